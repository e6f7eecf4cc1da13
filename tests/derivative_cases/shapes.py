"""Shapes of the operands of a case, as functions of a batch, a length and a width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Shapes = Callable[[int, int, int], list[tuple[int, ...]]]

Case = tuple[Any, Shapes]
"""A function, or a class of cells where the case has weights of its own, and the shapes of its operands."""


def one(b: int, s: int, h: int) -> list[tuple[int, ...]]:
    return [(b, s, h)]


def two(b: int, s: int, h: int) -> list[tuple[int, ...]]:
    return [(b, s, h), (b, s, h)]


def with_vector(b: int, s: int, h: int) -> list[tuple[int, ...]]:
    return [(b, s, h), (h,)]


def with_column(b: int, s: int, h: int) -> list[tuple[int, ...]]:
    return [(b, s, h), (s, 1)]


def with_gain_and_shift(b: int, s: int, h: int) -> list[tuple[int, ...]]:
    return [(b, s, h), (h,), (h,)]


def image(b: int, s: int, h: int) -> list[tuple[int, ...]]:
    return [(b, h, s, s)]
