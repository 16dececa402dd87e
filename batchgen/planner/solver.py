"""Mixed-integer programs (MIPs) of linear expressions: PuLP's models, which HiGHS solves."""

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
import pulp

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
    """

    def __init__(self) -> None:
        self.objective: Linear = 0.0
        self._problem = pulp.LpProblem("plan", pulp.LpMinimize)
        self._columns: list[pulp.LpVariable] = []
        self._rows: list[pulp.LpConstraint] = []

    def column(self, most: float = math.inf, *, integer: bool = False) -> Expression:
        """A new unknown from 0 to `most`."""
        number, kind = len(self._columns), pulp.LpInteger if integer else pulp.LpContinuous
        self._columns.append(pulp.LpVariable(str(number), 0, None if most == math.inf else most, kind))
        return Expression({number: 1.0})

    def at_most(self, left: Linear, right: Linear) -> int:
        """Add a row that keeps `left` from exceeding `right`, and return its number."""
        return self._row(total((left, -right)), pulp.LpConstraintLE)

    def equal(self, left: Linear, right: Linear) -> int:
        """Add a row that keeps both equal, and return its number."""
        return self._row(total((left, -right)), pulp.LpConstraintEQ)

    def _row(self, row: Linear, sense: int) -> int:
        self._rows.append(pulp.LpConstraint(self._pulp_expression(row), sense))
        self._problem.addConstraint(self._rows[-1], str(len(self._rows)))
        return len(self._rows) - 1

    def _pulp_expression(self, value: Linear) -> pulp.LpAffineExpression:
        if not isinstance(value, Expression):
            return pulp.LpAffineExpression({}, value)
        terms = {self._columns[number]: factor for number, factor in value.terms.items()}
        return pulp.LpAffineExpression(terms, value.constant)

    @property
    def columns(self) -> tuple[float, ...]:
        """Values of all columns in the solution."""
        return tuple(column.varValue or 0.0 for column in self._columns)

    def solve(self, gap: float, start: Sequence[float] = ()) -> bool:
        """Solve the MIP, and return whether it has a solution.

        Args:
            gap: fraction by which an integer solution may exceed the proven bound.
            start: values of all columns that the solver begins with; none: it finds its own.
        """
        self._problem.setObjective(self._pulp_expression(self.objective))
        return bool(self._problem.solve(_Highs(self._columns, self._rows, gap, start)) == pulp.LpStatusOptimal)

    def value(self, expression: Linear) -> float:
        """Value of an expression in the solution."""
        if not isinstance(expression, Expression):
            return float(expression)
        terms = [factor * (self._columns[number].varValue or 0.0) for number, factor in expression.terms.items()]
        return expression.constant + sum(terms)

    def dual(self, row: int) -> float:
        """Change of the objective with each unit by which a row's limit is raised, in a solution without integers."""
        return float(self._rows[row].pi)


class _Highs(pulp.LpSolver):  # type: ignore[misc]
    """HiGHS as a solver of PuLP's.

    PuLP's own one gives HiGHS the columns and rows one by one, which takes longer than solving, and no values to begin
    with.
    """

    name = "HiGHS, whole matrix"

    def __init__(
        self, columns: list[pulp.LpVariable], rows: list[pulp.LpConstraint], gap: float, start: Sequence[float]
    ) -> None:
        super().__init__(msg=False)
        self._columns, self._rows = columns, rows
        self._gap, self._start = gap, start

    def available(self) -> bool:
        return True

    def actualSolve(self, lp: pulp.LpProblem) -> int:
        """Solve a problem of PuLP's; its columns and rows get their values, and the status is returned."""
        solver = _solver()
        has_integers = any(column.cat == pulp.LpInteger for column in self._columns)
        for name, value in ({"mip_rel_gap": self._gap} | (_WITH_INTEGERS if has_integers else _WITHOUT)).items():
            solver.setOptionValue(name, value)
        self._pass_model(solver, lp.objective)
        solver.run()
        solution = solver.getSolution()
        for column, value in zip(self._columns, solution.col_value, strict=True):
            column.varValue = value
        for row, dual in zip(self._rows, solution.row_dual, strict=True):
            row.pi = dual
        optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        status: int = pulp.LpStatusOptimal if optimal else pulp.LpStatusInfeasible
        lp.assignStatus(status)
        return status

    def _pass_model(self, solver: highspy.Highs, objective: pulp.LpAffineExpression) -> None:
        """Give HiGHS all columns and rows in one call, and the values to begin with."""
        columns, rows = self._columns, self._rows
        numbers = {column: number for number, column in enumerate(columns)}
        terms = [[(numbers[column], factor) for column, factor in row.items()] for row in rows]
        lowest, highest = ([getattr(row, end)() for row in rows] for end in ("getLb", "getUb"))
        solver.passModel(
            len(columns),
            len(rows),
            sum(map(len, terms)),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            float(objective.constant),
            np.array([objective.get(column, 0.0) for column in columns], dtype=float),
            np.array([column.lowBound for column in columns], dtype=float),
            np.array([math.inf if column.upBound is None else column.upBound for column in columns], dtype=float),
            np.array([-math.inf if bound is None else bound for bound in lowest], dtype=float),
            np.array([math.inf if bound is None else bound for bound in highest], dtype=float),
            np.cumsum([0, *map(len, terms)], dtype=np.int32),
            np.array([column for row in terms for column, _ in row], dtype=np.int32),
            np.array([factor for row in terms for _, factor in row], dtype=float),
            np.array([column.cat == pulp.LpInteger for column in columns], dtype=np.int32),
        )
        if len(self._start):
            solution = highspy.HighsSolution()
            solution.col_value = list(self._start)
            solver.setSolution(solution)


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
