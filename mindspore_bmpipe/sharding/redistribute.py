"""What MindSpore does between two layouts of one tensor: collectives and slices, in its order.

The order is that of its `RedistributionOperatorInfer`. `tools/verified_sharding.py` compares the result with graphs
that MindSpore compiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from mindspore_bmpipe.sharding.layout import Layout, Split, refined, whole

Value = Callable[[Any], int]
"""Number that a dimension has in the traced inputs."""


@dataclass(frozen=True)
class Step:
    """One change of layout."""

    gathers: bool
    """Whether ranks exchange their parts of an axis; otherwise each takes its part of what it holds."""
    axis: int
    """Axis of the change's working shape."""
    cut: Split
    """Ranks that exchange, or take their parts."""
    onto: int | None = None
    """Axis along which each rank sends every other its part at the same time (`AlltoAll`); ``None`` if it sends all it
    holds."""


@dataclass(frozen=True)
class Change:
    """Steps from one layout to another."""

    shape: tuple[Any, ...]
    """Whole tensor in the axes that :attr:`steps` count: so many that each is cut once at most."""
    before: Layout
    """Layout of that shape before the steps."""
    steps: tuple[Step, ...]
    """What is done, in order."""


class NeedsNumber(Exception):
    """The change depends on the value of symbols, which are :attr:`names`."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = names


def changes(
    before: Layout,
    shape: Sequence[Any],
    after: Layout,
    target: Sequence[Any],
    value: Value,
    where: str,
    all_to_all: bool = False,
) -> list[Change]:
    """Changes that make a tensor of one shape and layout into one of another shape and layout.

    Args:
        before: layout of the tensor.
        shape: its shape; dimensions are numbers or expressions.
        after: wanted layout.
        target: wanted shape, with as many elements.
        value: number of a dimension in the traced inputs.
        where: the operation that needs the change, for errors.
        all_to_all: whether cuts pass from one axis to another by `AlltoAll` (MindSpore's `enable_alltoall`); otherwise
            by gathering the one and cutting the other.

    Returns:
        Nothing if no rank needs anything of another or drops anything; otherwise one change. Two, by way of the whole
        tensor, where no shape shows both layouts as cuts of whole axes: MindSpore gathers everything there.

    Raises:
        NeedsNumber: it depends on the value of a symbol.
        InputError: layouts that cannot follow each other.
    """
    space = _common_shape(shape, target, value)
    bounds: frozenset[int] = frozenset()
    while space is not None:
        one, two = refined((before, after), where, bounds)
        first, second = (
            _placed(layout, space.shape, places, value)
            for layout, places in ((one, space.of_first), (two, space.of_second))
        )
        if first is None or second is None:
            break
        if first == second:
            return []
        expanded = _expanded(space.shape, first, second, value)
        if expanded is not None:
            wide, old, new = expanded
            return [Change(wide, old, _steps(old, new, all_to_all))]
        finer = bounds | _finer(first, second)
        if finer == bounds:
            break
        bounds = finer
    found = []
    for layout, size, gathers in ((before, shape, True), (after, target, False)):
        wide_layout = _expanded(size, layout if gathers else whole(len(size)), whole(len(size)) if gathers else layout,
                                value)  # fmt: skip
        assert wide_layout is not None
        wide, old, new = wide_layout
        steps = _steps(old, new, all_to_all)
        if steps:
            found.append(Change(wide, old, steps))
    return found


@dataclass(frozen=True)
class _Space:
    shape: list[Any]
    of_first: list[list[int]]
    of_second: list[list[int]]


def _common_shape(first: Sequence[Any], second: Sequence[Any], value: Value) -> _Space | None:
    """The coarsest shape whose axes make up the axes of both; ``None`` if there is none."""
    shape: list[Any] = []
    places: tuple[list[list[int]], list[list[int]]] = ([[] for _ in first], [[] for _ in second])
    rest = [[(axis, size) for axis, size in enumerate(sizes) if size != 1] for sizes in (first, second)]
    while rest[0] and rest[1]:
        (axis, size), (other, length) = rest[0][0], rest[1][0]
        if _equal(size, length):
            taken, left, right = size, 1, 1
        elif value(size) > value(length) and value(size) % value(length) == 0:
            taken, left, right = length, _ratio(size, length), 1
        elif value(length) % value(size) == 0:
            taken, left, right = size, 1, _ratio(length, size)
        else:
            return None
        places[0][axis].append(len(shape))
        places[1][other].append(len(shape))
        shape.append(taken)
        rest[0][0], rest[1][0] = (axis, left), (other, right)
        rest = [queue[1:] if queue[0][1] == 1 else queue for queue in rest]
    return _Space(shape, *places) if not rest[0] and not rest[1] else None


def _equal(first: Any, second: Any) -> bool:
    return bool(first == second or sympy.simplify(first - second) == 0)


def _ratio(first: Any, second: Any) -> Any:
    if isinstance(first, int) and isinstance(second, int):
        return first // second
    ratio = sympy.simplify(first / second)
    return int(ratio) if ratio.is_Integer else ratio


def _placed(layout: Layout, shape: Sequence[Any], places: Sequence[Sequence[int]], value: Value) -> Layout | None:
    """A layout in finer axes: outer cuts on outer axes; ``None`` if a cut goes through the middle of an axis."""
    found: list[list[Split]] = [[] for _ in shape]
    for axis, finer in zip(layout, places, strict=True):
        position = 0
        rest: Any = shape[finer[0]] if finer else 1
        for cut in axis:
            while True:
                if position >= len(finer):
                    return None
                inner = finer[position]
                if found[inner] and not isinstance(rest, int) and len(finer) > 1:
                    raise NeedsNumber(frozenset(symbol.name for symbol in rest.free_symbols))
                if value(rest) != 1:
                    break
                position += 1
                rest = shape[finer[position]] if position < len(finer) else 1
            if value(rest) % cut.size:
                return None
            found[inner].append(cut)
            rest = _ratio(rest, cut.size)
    return tuple(tuple(cuts) for cuts in found)


def _finer(first: Layout, second: Layout) -> frozenset[int]:
    """Where to cut further, so that the cuts of each axis have the same numbers in turn."""
    found: set[int] = set()
    for pair in zip(first, second, strict=True):
        for cuts in zip(*pair, strict=False):
            common = math.gcd(*(cut.size for cut in cuts))
            if common > 1:
                found.update(cut.stride * cut.size // common for cut in cuts if cut.size > common)
    return frozenset(found)


def _expanded(
    shape: Sequence[Any], before: Layout, after: Layout, value: Value
) -> tuple[tuple[Any, ...], Layout, Layout] | None:
    """The same with every axis cut at most once: an axis cut twice becomes several."""
    wide: list[Any] = []
    old: list[tuple[Split, ...]] = []
    new: list[tuple[Split, ...]] = []
    for size, first, second in zip(shape, before, after, strict=True):
        if size == 1:
            continue
        rest = size
        count = max(len(first), len(second), 1)
        for number in range(count):
            cuts = [axis[number : number + 1] for axis in (first, second)]
            sizes = {cut.size for axis in cuts for cut in axis}
            if len(sizes) > 1 and count > 1:
                return None
            last = number == count - 1
            wide.append(rest if last else sizes.copy().pop())
            rest = rest if last else _ratio(rest, wide[-1])
            old.append(cuts[0])
            new.append(cuts[1])
    return tuple(wide), tuple(old), tuple(new)


def _steps(before: Layout, after: Layout, all_to_all: bool) -> tuple[Step, ...]:
    """Gather what differs, last axes first, then cut, first axes first; or exchange what passes between axes."""
    exchanged = _exchanges(before, after) if all_to_all else ()
    if any(step.onto is not None for step in exchanged):
        return exchanged
    differ = [axis for axis, cuts in enumerate(before) if cuts != after[axis]]
    gathers = [Step(True, axis, cut) for axis in reversed(differ) for cut in before[axis]]
    return (*gathers, *(Step(False, axis, cut) for axis in differ for cut in after[axis]))


def _exchanges(before: Layout, after: Layout) -> tuple[Step, ...]:
    """Cut what no axis holds, pass cuts from axis to axis, then gather what no axis wants.

    Axes come in the order that compiled graphs show: the first two, then from the last one back. Where all wait for
    each other, the first is gathered.
    """
    steps: list[Step] = []
    wanted = [cuts[0] if cuts else None for cuts in after]
    order = (*range(len(before))[:2], *reversed(range(2, len(before))))
    left = {axis: before[axis][0] if before[axis] else None for axis in order}

    def cut_free() -> None:
        for axis, held in list(left.items()):
            cut = wanted[axis]
            if held is None and cut is not None and cut not in left.values():
                steps.append(Step(False, axis, cut))
                left[axis] = cut

    def pass_on() -> None:
        for axis in order:
            cut = wanted[axis]
            if left[axis] is None and cut is not None and cut in left.values():
                holder = next(other for other, held in left.items() if held == cut)
                steps.append(Step(True, holder, cut, onto=axis))
                left[holder], left[axis] = None, cut

    def gather_unwanted() -> None:
        for axis, cut in left.items():
            if cut is not None and cut not in wanted:
                steps.append(Step(True, axis, cut))
                left[axis] = None

    def repeat(*moves: Callable[[], None]) -> None:
        count = -1
        while len(steps) > count:
            count = len(steps)
            for move in moves:
                move()

    while any(left[axis] != wanted[axis] for axis in left):
        count = len(steps)
        repeat(cut_free, lambda: repeat(pass_on))
        gather_unwanted()
        if len(steps) == count:
            axis, cut = next((axis, cut) for axis, cut in left.items() if cut is not None and cut != wanted[axis])
            steps.append(Step(True, axis, cut))
            left[axis] = None
    return tuple(steps)
