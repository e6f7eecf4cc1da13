"""What a placement rule sees of an operation, and what it says of the shares that ranks hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import Operation, constant_value
from mindspore_bmpipe.sharding.layout import Axis, Layout, Split, device_matrix

Shape = tuple[Any, ...]
"""Dimensions as numbers or expressions."""
Strategy = tuple[tuple[int, ...], ...]
"""Parts of every axis of every operand."""


@dataclass(frozen=True)
class Site:
    """One forward operation at its whole size."""

    operation: Operation
    """The operation."""
    operands: tuple[Shape, ...]
    """Shape of every tensor it reads, in order."""
    results: tuple[Shape, ...]
    """Shape of every tensor it makes."""
    ranks: int
    """Ranks of the stage."""
    value: Callable[[Any], int]
    """Number of a dimension in the traced inputs."""

    @property
    def where(self) -> str:
        """What an error calls it."""
        cell = f" in cell {self.operation.cell}" if self.operation.cell else ""
        return f"{self.operation.primitive}{cell}"

    @property
    def strategy(self) -> Strategy | None:
        """Its own strategy; ``None`` if it has none.

        Raises:
            InputError: a strategy that does not fit the operands.
        """
        return self.strategy_of(self.operands)

    def strategy_of(self, shapes: Sequence[Shape]) -> Strategy | None:
        """Its own strategy, if that cuts tensors of other shapes than the operands'.

        Raises:
            InputError: as :attr:`strategy`.
        """
        given = self.operation.attributes.get("in_strategy")
        if given is None:
            return None
        strategy = tuple(_flat(given))
        if [len(part) for part in strategy] != [len(shape) for shape in shapes]:
            raise InputError(
                f"{self.where}: its strategy {given} does not fit operands of "
                f"{', '.join(str(list(shape)) for shape in shapes)}"
            )
        for part, shape in zip(strategy, shapes, strict=True):
            for count, size in zip(part, shape, strict=True):
                if self.value(size) % count:
                    raise InputError(f"{self.where}: its strategy {given} cuts an axis of {size} into {count} parts")
        return strategy

    def setting(self, name: str, position: int, default: Any) -> Any:
        """A setting that MindSpore stores as an attribute or passes as an argument, by version."""
        if name in self.operation.attributes:
            return self.operation.attributes[name]
        if position < len(self.operation.arguments):
            found = constant_value(self.operation.arguments[position])
            return default if found is None else found
        return default

    def axes(self, given: Any, rank: int) -> tuple[int, ...]:
        """Axes that a constant names, counted from 0; all of them for an empty one."""
        if given is None or given == ():
            return tuple(range(rank))
        return tuple(axis % rank for axis in (given if isinstance(given, tuple) else (given,)))

    def matrix(self, sizes: Sequence[int]) -> tuple[Axis, ...]:
        """Cuts by the dimensions of its device matrix."""
        return device_matrix(sizes, self.ranks, self.where)

    def batch_parts(self, size: Any) -> int:
        """Parts that MindSpore cuts a first axis into where there is no strategy: as many as divide axis and ranks."""
        return math.gcd(self.value(size), self.ranks)

    def refused(self, what: str) -> InputError:
        """The error for a strategy that is not modelled."""
        return InputError(
            f"{self.where}: {what} is not modelled; change its strategy, or give the file of 'bmpipe trace --sharded', "
            "which MindSpore compiles"
        )


def _flat(given: Any) -> list[tuple[int, ...]]:
    """Strategies one for each tensor, those of lists of tensors side by side with the others."""
    found: list[tuple[int, ...]] = []
    for part in given:
        if part and isinstance(part[0], tuple):
            found.extend(_flat(part))
        else:
            found.append(part)
    return found


@dataclass(frozen=True)
class Placement:
    """Shares that ranks hold of what an operation reads and makes."""

    operands: tuple[Layout, ...]
    """Layout of every tensor it reads."""
    results: tuple[Layout, ...]
    """Layout of every tensor it makes, after :attr:`sums`."""
    sums: tuple[Split, ...] = ()
    """Ranks whose results must be added up to be complete."""
    scatters: bool = False
    """Whether each of these ranks gets its part of the sum, along the first axis; otherwise all get the whole."""
    averages: bool = False
    """Whether the sum is divided by their number."""
    compiled: Operation | None = None
    """The operation with the settings that it has on a rank; ``None`` if they are the network's."""
    table_rows: Split | None = None
    """Ranks that share the rows of a table that is looked up."""


Rule = Callable[[Site], Placement]
"""A placement rule.

Raises:
    InputError: a strategy that MindSpore refuses or that is not modelled.
"""
