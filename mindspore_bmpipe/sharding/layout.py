"""How a tensor is shared out over the ranks of a stage.

Ranks are numbered as MindSpore numbers them: rank r of D x T ranks is number r // T among those that share the samples
and r % T among those that share the operations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mindspore_bmpipe.errors import InputError


@dataclass(frozen=True)
class Split:
    """One cut of an axis into equal parts."""

    stride: int
    """Ranks between one that holds a part and one that holds the next part."""
    size: int
    """Parts, at least 2."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold the parts of which rank 0 holds the first."""
        return tuple(range(0, self.stride * self.size, self.stride))


Axis = tuple[Split, ...]
"""Cuts of one axis, outermost first."""

Layout = tuple[Axis, ...]
"""Cuts of every axis of a tensor. Ranks that no cut tells apart hold the same elements."""


def whole(rank: int) -> Layout:
    """Layout of a tensor with ``rank`` axes that every rank holds whole."""
    return ((),) * rank


def parts(axis: Axis) -> int:
    """Parts that an axis is cut into."""
    return math.prod(split.size for split in axis)


def shares(layout: Layout) -> int:
    """Parts that a tensor is cut into."""
    return math.prod(parts(axis) for axis in layout)


def shares_apart(layout: Layout, stride: int) -> int:
    """Parts that ranks hold which are multiples of ``stride`` ranks apart."""
    ends = ((cut.stride, cut.stride * cut.size) for axis in layout for cut in axis)
    return math.prod(max(end, stride) // max(start, stride) for start, end in ends)


def merged(axis: Iterable[Split]) -> Axis:
    """The same cuts with those that follow each other without a gap made one, so that equal layouts compare equal."""
    found: list[Split] = []
    for split in axis:
        if split.size == 1:
            continue
        if found and found[-1].stride == split.stride * split.size:
            found[-1] = Split(split.stride, found[-1].size * split.size)
        else:
            found.append(split)
    return tuple(found)


def device_matrix(sizes: Sequence[int], ranks: int, where: str) -> tuple[Axis, ...]:
    """Cuts by an operation's device matrix: the last size changes fastest, what repeats the work faster still.

    Args:
        sizes: parts along each of its dimensions.
        ranks: ranks of the stage.
        where: the operation, for errors.

    Raises:
        InputError: the sizes do not divide the ranks.
    """
    used = math.prod(sizes)
    if ranks % used:
        raise InputError(
            f"{where}: its strategy shares the work among {used} ranks, which do not divide the {ranks} of a stage "
            "(data_parallel x tensor_parallel); trace for these degrees or change them"
        )
    stride = ranks // used
    found: list[Axis] = []
    for size in reversed(sizes):
        found.append((Split(stride, size),) if size > 1 else ())
        stride *= size
    return tuple(reversed(found))


def local_shape(shape: Sequence[Any], layout: Layout) -> tuple[Any, ...]:
    """Shape of what one rank holds of a tensor; dimensions are numbers or expressions."""
    found = []
    for size, axis in zip(shape, layout, strict=True):
        count = parts(axis)
        found.append(size // count if isinstance(size, int) else size / count)
    return tuple(found)


def refined(layouts: Sequence[Layout], where: str, further: Iterable[int] = ()) -> list[Layout]:
    """The same layouts in cuts so fine that any two of them are equal or have no rank stride in common.

    Args:
        layouts: layouts of a tensor.
        where: the operation, for errors.
        further: strides at which to cut as well.

    Raises:
        InputError: cuts that overlap in part, which no device matrix makes.
    """
    ends = {bound for layout in layouts for axis in layout for cut in axis for bound in _ends(cut)}
    bounds = sorted(ends.union(further))
    return [tuple(tuple(atom for cut in axis for atom in _atoms(cut, bounds, where)) for axis in layout)
            for layout in layouts]  # fmt: skip


def _ends(cut: Split) -> tuple[int, int]:
    return cut.stride, cut.stride * cut.size


def _atoms(cut: Split, bounds: Sequence[int], where: str) -> list[Split]:
    low, high = _ends(cut)
    inner = [bound for bound in bounds if low <= bound <= high]
    found = []
    for below, above in itertools.pairwise(inner):
        if above % below:
            raise InputError(
                f"{where}: strategies that cut by {below} and by {above} ranks cannot follow each other; give "
                "neighbouring operations strategies of the same numbers"
            )
        found.append(Split(below, above // below))
    return found[::-1]
