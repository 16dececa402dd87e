"""Linear expressions, and linear and integer programmes of them, which HiGHS solves."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence

import highspy
import numpy as np

from batchgen.planner.solver_banner import silence_banner

_OPTIONS = {"output_flag": False, "threads": 1}
# A thread's solver, whose model is replaced with every programme: to make one takes longer than a small programme.
_own = threading.local()


class Affine:
    """A sum of columns, each times a number, and a constant. Values are never changed.

    The cost model adds and multiplies so many of them that expressions of a library would take most of a plan's time.

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


class Programme:
    """Columns with bounds, rows over them, and what is to be least.

    Attributes:
        objective: What is to be least.
        found: Of the columns, in the solution.
    """

    def __init__(self) -> None:
        self.objective = Affine({})
        self.found: tuple[float, ...] = ()
        self._highest: list[float] = []  # of each column
        self._is_integer: list[bool] = []
        # Of each row: terms, and between what their sum must lie.
        self._rows: list[tuple[dict[int, float], float, float]] = []
        self._duals: list[float] = []

    def column(self, most: float = math.inf, *, integer: bool = False) -> Affine:
        """A new unknown from 0 to `most`."""
        self._highest.append(most)
        self._is_integer.append(integer)
        return Affine({len(self._highest) - 1: 1.0})

    def at_most(self, left: Affine | float, right: Affine | float) -> int:
        """A row that keeps `left` from exceeding `right`; its number."""
        row = total((left, -right))
        return self._row(row, -math.inf)

    def equal(self, left: Affine | float, right: Affine | float) -> int:
        """A row that keeps both equal; its number."""
        row = total((left, -right))
        return self._row(row, -row.constant)

    def _row(self, row: Affine, lowest: float) -> int:
        self._rows.append((row.terms, lowest, -row.constant))
        return len(self._rows) - 1

    def solve(self, gap: float, start: Sequence[float] = ()) -> bool:
        """Whether there is a solution, which is the best one; of integers, it is proven to be within `gap` of it, as a part of it.

        Args:
            gap: As a fraction.
            start: Values of all columns, for the solver to begin with; none: it finds its own.
        """
        solver = _solver()
        solver.setOptionValue("mip_rel_gap", gap)
        self._pass_to(solver)
        if len(start):
            known = highspy.HighsSolution()
            known.col_value = list(start)
            solver.setSolution(known)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return False
        solution = solver.getSolution()
        self.found, self._duals = tuple(solution.col_value), list(solution.row_dual)
        return True

    def _pass_to(self, solver: highspy.Highs) -> None:
        """All rows in one call: one by one they take longer than solving."""
        terms, lowest, highest = zip(*self._rows, strict=True) if self._rows else ((), (), ())
        counts, columns = list(map(len, terms)), len(self._highest)
        costs = np.zeros(columns)
        for column, factor in self.objective.terms.items():
            costs[column] = factor
        solver.passModel(
            columns,
            len(terms),
            sum(counts),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            self.objective.constant,
            costs,
            np.zeros(columns),
            np.array(self._highest, dtype=float),
            np.array(lowest, dtype=float),
            np.array(highest, dtype=float),
            np.cumsum([0, *counts], dtype=np.int32),
            np.array([column for row in terms for column in row], dtype=np.int32),
            np.array([factor for row in terms for factor in row.values()], dtype=float),
            np.array(self._is_integer, dtype=np.int32),
        )

    def value(self, expression: Affine | float) -> float:
        """What the solution makes of an expression."""
        if not isinstance(expression, Affine):
            return float(expression)
        return expression.constant + sum(factor * self.found[number] for number, factor in expression.terms.items())

    def dual(self, row: int) -> float:
        """By how much the objective changes with each unit by which a row's limit is raised; of the solution without integers."""
        return self._duals[row]


def _solver() -> highspy.Highs:
    if not hasattr(_own, "solver"):
        silence_banner()
        _own.solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for name, value in _OPTIONS.items():
            _own.solver.setOptionValue(name, value)
    solver: highspy.Highs = _own.solver
    return solver
