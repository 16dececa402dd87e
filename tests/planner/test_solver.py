"""Mixed-integer programs against all their integer points, and PuLP without the solver that it ships."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pulp
import pytest

from batchgen.planner.linear import total
from batchgen.planner.solver import MIP

MOST = 4


def random_program(seed):
    """A MIP of three counts, and the least objective of all its integer points; None where no point is allowed."""
    rng = random.Random(seed)
    rows = [([rng.randint(-3, 3) for _ in range(3)], rng.randint(-4, 4)) for _ in range(3)]
    weights = [rng.randint(-5, 5) for _ in range(3)]
    mip = MIP()
    columns = [mip.column(MOST, integer=True) for _ in range(3)]
    for factors, limit in rows:
        mip.at_most(total(factor * column for factor, column in zip(factors, columns, strict=True)), limit)
    mip.equal(total(columns), mip.column(2 * MOST, integer=True))
    mip.objective = total(weight * column for weight, column in zip(weights, columns, strict=True)) + 7

    def dot(factors, point):
        return sum(factor * x for factor, x in zip(factors, point, strict=True))

    points = [
        point
        for point in itertools.product(range(MOST + 1), repeat=3)
        if all(dot(factors, point) <= limit for factors, limit in rows) and sum(point) <= 2 * MOST
    ]
    return mip, columns, min((dot(weights, point) + 7 for point in points), default=None)


def test_the_least_objective_of_all_integer_points_is_found():
    feasible = 0
    for seed in range(60):
        mip, columns, least = random_program(seed)
        assert mip.solve(1e-6) == (least is not None), seed
        if least is not None:
            feasible += 1
            assert mip.value(mip.objective) == pytest.approx(least), seed
            values = mip.columns
            assert [mip.value(column) for column in columns] == pytest.approx(list(values[:3]))
            assert mip.solve(1e-6, values) and mip.value(mip.objective) == pytest.approx(least), "from its solution"
    assert 10 < feasible < 60


def test_the_dual_of_a_row_is_what_a_higher_limit_changes():
    def solved(limit):
        mip = MIP()
        few, many = mip.column(), mip.column(10)
        row = mip.at_most(few + many * 2, limit)
        mip.objective = -3 * few - many
        assert mip.solve(1e-6)
        return mip.value(mip.objective), mip.dual(row)

    (objective, dual), (higher, _) = solved(8), solved(9)
    assert higher - objective == pytest.approx(dual) == pytest.approx(-3)


def test_a_mip_needs_no_solver_of_pulps(tmp_path):
    """PuLP without the folder of its CBC, and without any program on the path."""
    package = Path(pulp.__file__).parent
    shutil.copytree(package, tmp_path / "pulp", ignore=shutil.ignore_patterns("solverdir", "tests", "__pycache__"))
    assert not list(tmp_path.rglob("cbc*"))
    program = (
        "import pulp\n"
        f"assert pulp.__file__.startswith({str(tmp_path)!r})\n"
        "from batchgen.planner.solver import MIP\n"
        "mip = MIP()\n"
        "count = mip.column(9, integer=True)\n"
        "mip.at_most(2 * count, 7)\n"
        "mip.objective = -1.0 * count\n"
        "print(mip.solve(1e-6), mip.value(count))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("True 3.0\n", 0), done.stderr
