"""Linear expressions of the unknowns of a MIP, which the cost model adds and multiplies like numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias


class Expression:
    """A sum of columns, each times a number, and a constant. Values are never changed.

    The cost model adds and multiplies so many of them that PuLP's expressions would take most of a plan's time.

    Attributes:
        terms: column number -> factor.
        constant: number that is added.
    """

    __slots__ = ("constant", "terms")
    __array_ufunc__ = None  # numbers of numpy leave sums and products to this class

    def __init__(self, terms: dict[int, float], constant: float = 0.0) -> None:
        self.terms = terms
        self.constant = constant

    def __add__(self, other: Linear) -> Expression:
        if not isinstance(other, Expression):
            return Expression(self.terms, self.constant + other)
        terms = dict(self.terms)
        for column, factor in other.terms.items():
            terms[column] = terms.get(column, 0.0) + factor
        return Expression(terms, self.constant + other.constant)

    __radd__ = __add__

    def __neg__(self) -> Expression:
        return self * -1.0

    def __sub__(self, other: Linear) -> Expression:
        return self + -other

    def __rsub__(self, other: float) -> Expression:
        return -self + other

    def __mul__(self, number: float) -> Expression:
        return Expression({column: factor * number for column, factor in self.terms.items()}, self.constant * number)

    __rmul__ = __mul__

    def __truediv__(self, number: float) -> Expression:
        return Expression({column: factor / number for column, factor in self.terms.items()}, self.constant / number)


# A number, or an expression of unknowns: formulas hold for both.
Linear: TypeAlias = float | Expression


def total(values: Iterable[Linear]) -> Linear:
    """Sum of numbers and expressions: a number where all are numbers."""
    terms: dict[int, float] = {}
    constant = 0.0
    symbolic = False
    for value in values:
        if isinstance(value, Expression):
            symbolic = True
            for column, factor in value.terms.items():
                terms[column] = terms.get(column, 0.0) + factor
            constant += value.constant
        else:
            constant += value
    return Expression(terms, constant) if symbolic else constant


def number(value: Linear) -> float:
    """The value as a number. Raises TypeError for an expression, whose value is not known yet."""
    if isinstance(value, Expression):
        raise TypeError("an expression of unknowns has no value before the MIP is solved")
    return value
