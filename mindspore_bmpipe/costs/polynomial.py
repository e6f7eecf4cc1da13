"""Sizes as vectors of coefficients over one list of monomials, so that sums, maxima and evaluation are numpy.

Every size in a graph is a polynomial in a handful of input symbols. Kept as sympy expressions, adding up the live bytes
of each moment of a unit would take seconds; as rows over a shared list of monomials it is a cumulative sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.symbols import symbol

Vector = NDArray[np.float64]
"""Coefficients of one polynomial, one per monomial of its :class:`Basis`."""


class Basis:
    """The monomials of all polynomials of one unit; it grows while they are collected and is then frozen."""

    def __init__(self, names: Sequence[str]) -> None:
        self._symbols = [symbol(name) for name in names]
        self._names = list(names)
        self._powers: dict[tuple[int, ...], int] = {(0,) * len(names): 0}
        self._known: dict[Any, tuple[tuple[int, float], ...]] = {}

    def terms(self, expression: Any) -> tuple[tuple[int, float], ...]:
        """The (monomial index, coefficient) pairs of an expression."""
        if isinstance(expression, (int, float)):
            return ((0, float(expression)),)
        found = self._known.get(expression)
        if found is None:
            found = tuple(self._terms(sympy.sympify(expression)))
            self._known[expression] = found
        return found

    def _terms(self, expression: Any) -> list[tuple[int, float]]:
        if expression.is_number:
            return [(0, float(expression))]
        polynomial = sympy.Poly(expression, *self._symbols)
        return [
            (self._powers.setdefault(tuple(powers), len(self._powers)), float(coefficient))
            for powers, coefficient in polynomial.terms()
        ]

    def matrix(self, rows: Sequence[tuple[tuple[int, float], ...]]) -> NDArray[np.float64]:
        """Rows of coefficients, shape (number of rows, number of monomials)."""
        result = np.zeros((len(rows), len(self._powers)))
        for index, row in enumerate(rows):
            for monomial, coefficient in row:
                result[index, monomial] += coefficient
        return result

    def values(self, sizes: Mapping[str, int]) -> Vector:
        """Value of every monomial at the given sizes."""
        missing = [name for name in self._names if name not in sizes]
        if missing:
            raise InputError(f"no size given for {', '.join(missing)}")
        return np.array(
            [
                float(np.prod([sizes[name] ** power for name, power in zip(self._names, powers, strict=True)]))
                for powers in self._powers
            ]
        )

    def monomials(self) -> list[Any]:
        """The monomials in order, as sympy expressions."""
        return [sympy.prod([s**p for s, p in zip(self._symbols, powers, strict=True)]) for powers in self._powers]

    def expression(self, vector: Vector) -> Any:
        """The sympy expression of a row of coefficients."""
        total = sympy.Integer(0)
        for monomial, coefficient in zip(self.monomials(), map(float, vector), strict=True):
            if coefficient:
                number = sympy.Integer(int(coefficient)) if coefficient.is_integer() else sympy.nsimplify(coefficient)
                total += number * monomial
        return total


def undominated(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows that are not, coefficient by coefficient, below another one.

    The maximum over all rows equals the maximum over these at any sizes, since monomials are never negative.
    """
    unique = np.unique(rows, axis=0)
    kept = [
        row
        for index, row in enumerate(unique)
        if not any(other != index and np.all(unique[other] >= row) for other in range(len(unique)))
    ]
    return np.array(kept).reshape(-1, rows.shape[1])
