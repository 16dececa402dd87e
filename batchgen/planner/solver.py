"""Mixed-integer programs (MIPs) of linear expressions, which HiGHS solves."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import threading
from collections.abc import Sequence
from functools import cache

import highspy
import numpy as np

from batchgen.planner.linear import Expression, Linear, total

# The MIPs are small: their solutions come from the LP and its branches sooner than from a search for feasible ones, and
# to presolve once more takes longer than it saves.
_OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_allow_restart": False,
}
# Without integers there is less to solve than presolving takes.
_WITH_INTEGERS, _WITHOUT = {"presolve": "choose", "solver": "choose"}, {"presolve": "off", "solver": "simplex"}
# Each thread keeps its solver, as to make one takes longer than to solve a small MIP.
_of_thread = threading.local()


class MIP:
    """Columns with bounds, rows over them, and an objective that is minimised.

    Attributes:
        objective: expression that is minimised.
        columns: values of all columns in the solution.
    """

    def __init__(self) -> None:
        self.objective: Linear = 0.0
        self.columns: tuple[float, ...] = ()
        self._most: list[float] = []  # of each column
        self._integer: list[bool] = []
        self._rows: list[Expression] = []  # each is kept from exceeding 0, or kept at 0
        self._equal: list[bool] = []
        self._duals: tuple[float, ...] = ()

    def column(self, most: float = math.inf, *, integer: bool = False) -> Expression:
        """A new unknown from 0 to `most`."""
        self._most.append(most)
        self._integer.append(integer)
        return Expression({len(self._most) - 1: 1.0})

    def at_most(self, left: Linear, right: Linear) -> int:
        """Add a row that keeps `left` from exceeding `right`, and return its number."""
        return self._row(left, right, equal=False)

    def equal(self, left: Linear, right: Linear) -> int:
        """Add a row that keeps both equal, and return its number."""
        return self._row(left, right, equal=True)

    def _row(self, left: Linear, right: Linear, *, equal: bool) -> int:
        self._rows.append(_expression(total((left, -right))))
        self._equal.append(equal)
        return len(self._rows) - 1

    def solve(self, gap: float, start: Sequence[float] = ()) -> bool:
        """Solve the MIP, and return whether it has a solution.

        Args:
            gap: fraction by which an integer solution may exceed the proven bound.
            start: values of all columns that the solver begins with; none: it finds its own.
        """
        solver = _solver()
        for name, value in ({"mip_rel_gap": gap} | (_WITH_INTEGERS if any(self._integer) else _WITHOUT)).items():
            solver.setOptionValue(name, value)
        self._pass_model(solver, start)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return False
        solution = solver.getSolution()
        self.columns, self._duals = tuple(solution.col_value), tuple(solution.row_dual)
        return True

    def _pass_model(self, solver: highspy.Highs, start: Sequence[float]) -> None:
        """Give HiGHS all columns and rows in one call, and the values to begin with."""
        objective, rows = _expression(self.objective), self._rows
        weights = np.zeros(len(self._most))
        weights[list(objective.terms)] = list(objective.terms.values())
        highest = -np.array([row.constant for row in rows])
        solver.passModel(
            len(self._most),
            len(rows),
            sum([len(row.terms) for row in rows]),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            objective.constant,
            weights,
            np.zeros(len(self._most)),
            np.array(self._most, dtype=float),
            np.where(self._equal, highest, -math.inf),
            highest,
            np.cumsum([0, *[len(row.terms) for row in rows]], dtype=np.int32),
            np.array([column for row in rows for column in row.terms], dtype=np.int32),
            np.array([factor for row in rows for factor in row.terms.values()], dtype=float),
            np.array(self._integer, dtype=np.int32),
        )
        if len(start):
            solution = highspy.HighsSolution()
            solution.col_value = list(start)
            solver.setSolution(solution)

    def value(self, expression: Linear) -> float:
        """Value of an expression in the solution."""
        if not isinstance(expression, Expression):
            return float(expression)
        terms = [factor * self.columns[number] for number, factor in expression.terms.items()]
        return expression.constant + sum(terms)

    def dual(self, row: int) -> float:
        """Change of the objective with each unit by which a row's limit is raised, in a solution without integers."""
        return self._duals[row]


def _expression(value: Linear) -> Expression:
    return value if isinstance(value, Expression) else Expression({}, value)


def _solver() -> highspy.Highs:
    """The solver of this thread, whose model is replaced with every MIP."""
    if not hasattr(_of_thread, "solver"):
        silence_banner()
        _of_thread.solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in _OPTIONS.items():
            _of_thread.solver.setOptionValue(name, value)
    solver: highspy.Highs = _of_thread.solver
    return solver


@cache
def silence_banner() -> None:
    """Have HiGHS 1.16 print its banner where nobody reads it: with a process's first solver, before any option."""
    with contextlib.suppress(OSError):  # there is no standard output
        sys.stdout.flush()
        shown, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 1)
            highspy.Highs()  # type: ignore[no-untyped-call]
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(shown, 1)
            os.close(shown)
            os.close(nowhere)
