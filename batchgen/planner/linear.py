"""Linear expressions, and linear and integer programmes of them, which are PuLP's and which HiGHS solves."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence

import highspy
import numpy as np
import pulp

from batchgen.planner.solver_banner import silence_banner

_OPTIONS = {"output_flag": False, "threads": 1}
# A thread's solver, whose model is replaced with every programme: to make one takes longer than a small programme.
_own = threading.local()


class Affine:
    """A sum of columns, each times a number, and a constant. Values are never changed.

    The cost model adds and multiplies so many of them that PuLP's expressions would take most of a plan's time.

    Attributes:
        terms: column number -> factor.
        constant: what is added.
    """

    __slots__ = ("constant", "terms")
    __array_ufunc__ = None  # numbers of numpy leave sums and products to this class

    def __init__(self, terms: dict[int, float], constant: float = 0.0) -> None:
        self.terms = terms
        self.constant = constant

    def __add__(self, other: Affine | float) -> Affine:
        if not isinstance(other, Affine):
            return Affine(self.terms, self.constant + other)
        terms = dict(self.terms)
        for column, factor in other.terms.items():
            terms[column] = terms.get(column, 0.0) + factor
        return Affine(terms, self.constant + other.constant)

    __radd__ = __add__

    def __neg__(self) -> Affine:
        return self * -1.0

    def __sub__(self, other: Affine | float) -> Affine:
        return self + -other

    def __rsub__(self, other: float) -> Affine:
        return -self + other

    def __mul__(self, factor: float) -> Affine:
        return Affine({column: own * factor for column, own in self.terms.items()}, self.constant * factor)

    __rmul__ = __mul__


def total(expressions: Iterable[Affine | float]) -> Affine:
    """The sum of all."""
    terms: dict[int, float] = {}
    constant = 0.0
    for expression in expressions:
        if isinstance(expression, Affine):
            for column, factor in expression.terms.items():
                terms[column] = terms.get(column, 0.0) + factor
            constant += expression.constant
        else:
            constant += expression
    return Affine(terms, constant)


class _WholeMatrix(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS, which is given all rows in one call: one by one they take longer than solving. start: values to begin with."""

    def __init__(self, gap: float, start: Sequence[float]) -> None:
        super().__init__(msg=False, gapRel=gap)
        self._start = start

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        lp.solverModel = _solver()
        lp.solverModel.setOptionValue("mip_rel_gap", self.gapRel)

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:
        columns, rows = lp.variables(), list(lp.constraints.values())
        for i, item in (*enumerate(columns), *enumerate(rows)):
            item.index = i
        terms = [[(column.index, factor) for column, factor in row.items()] for row in rows]
        lowest, highest = ([getattr(row, end)() for row in rows] for end in ("getLb", "getUb"))
        lp.solverModel.passModel(
            len(columns),
            len(rows),
            sum(map(len, terms)),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            float(lp.objective.constant),
            np.array([lp.objective.get(column, 0.0) for column in columns], dtype=float),
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
            known = highspy.HighsSolution()
            known.col_value = list(self._start)
            lp.solverModel.setSolution(known)


class Programme:
    """Columns with bounds, rows over them, and what is to be least.

    Attributes:
        objective: What is to be least.
    """

    def __init__(self) -> None:
        self.objective = Affine({})
        self._problem = pulp.LpProblem("plan", pulp.LpMinimize)
        self._columns: list[pulp.LpVariable] = []
        self._rows: list[pulp.LpConstraint] = []

    def column(self, most: float = math.inf, *, integer: bool = False) -> Affine:
        """A new unknown from 0 to `most`."""
        number, kind = len(self._columns), pulp.LpInteger if integer else pulp.LpContinuous
        # PuLP sorts columns by name.
        self._columns.append(pulp.LpVariable(f"{number:06d}", 0, None if most == math.inf else most, kind))
        return Affine({number: 1.0})

    def at_most(self, left: Affine | float, right: Affine | float) -> int:
        """A row that keeps `left` from exceeding `right`; its number."""
        return self._row(total((left, -right)), pulp.LpConstraintLE)

    def equal(self, left: Affine | float, right: Affine | float) -> int:
        """A row that keeps both equal; its number."""
        return self._row(total((left, -right)), pulp.LpConstraintEQ)

    def _row(self, row: Affine, sense: int) -> int:
        self._rows.append(pulp.LpConstraint(self._expression(row), sense))
        self._problem.addConstraint(self._rows[-1], str(len(self._rows)))
        return len(self._rows) - 1

    def _expression(self, affine: Affine) -> pulp.LpAffineExpression:
        terms = {self._columns[number]: factor for number, factor in affine.terms.items()}
        return pulp.LpAffineExpression(terms, affine.constant)

    @property
    def found(self) -> tuple[float, ...]:
        """Of the columns, in the solution."""
        return tuple(column.varValue or 0.0 for column in self._columns)

    def solve(self, gap: float, start: Sequence[float] = ()) -> bool:
        """Whether there is a solution, which is the best one; of integers, it is proven to be within `gap` of it, as a part of it.

        Args:
            gap: As a fraction.
            start: Values of all columns, for the solver to begin with; none: it finds its own.
        """
        self._problem.setObjective(self._expression(self.objective))
        return bool(self._problem.solve(_WholeMatrix(gap, start)) == pulp.LpStatusOptimal)

    def value(self, expression: Affine | float) -> float:
        """What the solution makes of an expression."""
        if not isinstance(expression, Affine):
            return float(expression)
        found = [factor * (self._columns[number].varValue or 0.0) for number, factor in expression.terms.items()]
        return expression.constant + sum(found)

    def dual(self, row: int) -> float:
        """By how much the objective changes with each unit by which a row's limit is raised; of the solution without integers."""
        return float(self._rows[row].pi)


def _solver() -> highspy.Highs:
    if not hasattr(_own, "solver"):
        silence_banner()
        _own.solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in _OPTIONS.items():
            _own.solver.setOptionValue(name, value)
    solver: highspy.Highs = _own.solver
    return solver
