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
    """

    def __init__(self) -> None:
        self.objective = Affine({})
        self._upper: list[float] = []
        self._integer: list[int] = []
        self._starts, self._columns, self._factors = [0], list[int](), list[float]()
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._values: list[float] = []
        self._duals: list[float] = []

    def column(self, most: float = math.inf, *, integer: bool = False) -> Affine:
        """A new unknown from 0 to `most`."""
        self._upper.append(most)
        self._integer.append(int(integer))
        return Affine({len(self._upper) - 1: 1.0})

    def at_most(self, left: Affine | float, right: Affine | float) -> int:
        """A row that keeps `left` from exceeding `right`; its number."""
        return self._row(total((left, -right)), -math.inf)

    def equal(self, left: Affine | float, right: Affine | float) -> int:
        """A row that keeps both equal; its number."""
        row = total((left, -right))
        return self._row(row, -row.constant)

    def _row(self, row: Affine, lower: float) -> int:
        self._columns.extend(row.terms)
        self._factors.extend(row.terms.values())
        self._starts.append(len(self._columns))
        self._row_lower.append(lower)
        self._row_upper.append(-row.constant)
        return len(self._row_upper) - 1

    @property
    def found(self) -> tuple[float, ...]:
        """Of the columns, in the solution."""
        return tuple(self._values)

    def solve(self, gap: float, start: Sequence[float] = ()) -> bool:
        """Whether there is a solution, which is the best one; of integers, it is proven to be within `gap` of it, as a part of it.

        Args:
            gap: As a fraction.
            start: Values of all columns, for the solver to begin with; none: it finds its own.
        """
        solver = _solver()
        costs = np.zeros(len(self._upper))
        costs[list(self.objective.terms)] = list(self.objective.terms.values())
        solver.setOptionValue("mip_rel_gap", gap)
        solver.passModel(
            len(self._upper),
            len(self._row_upper),
            len(self._columns),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            self.objective.constant,
            costs,
            np.zeros(len(self._upper)),
            np.array(self._upper),
            np.array(self._row_lower),
            np.array(self._row_upper),
            np.array(self._starts, dtype=np.int32),
            np.array(self._columns, dtype=np.int32),
            np.array(self._factors),
            np.array(self._integer, dtype=np.int32),
        )
        if len(start):
            known = highspy.HighsSolution()
            known.col_value = list(start)
            solver.setSolution(known)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return False
        solution = solver.getSolution()
        self._values, self._duals = list(solution.col_value), list(solution.row_dual)
        return True

    def value(self, expression: Affine | float) -> float:
        """What the solution makes of an expression."""
        if not isinstance(expression, Affine):
            return float(expression)
        return expression.constant + sum(factor * self._values[column] for column, factor in expression.terms.items())

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
