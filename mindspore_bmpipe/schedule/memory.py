"""How many micro-batches of each chunk hold saved activations, read off the order of a stage."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

from mindspore_bmpipe.schedule.actions import FORWARD
from mindspore_bmpipe.schedule.schedule import Schedule, releasing_kinds

Row = tuple[int, ...]
"""Micro-batches in flight of each chunk of a stage."""


def pareto_maximal(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows that no other row reaches in every entry, sorted from large to small."""
    kept: list[Row] = []
    for row in sorted(set(rows), reverse=True):
        if not any(all(mine <= theirs for mine, theirs in zip(row, other, strict=True)) for other in kept):
            kept.append(row)
    return tuple(kept)


@lru_cache(maxsize=32)
def in_flight_rows(schedule: Schedule) -> tuple[tuple[Row, ...], ...]:
    """Pareto-maximal in-flight rows of each stage.

    A micro-batch counts from its forward until its backward has ended (until its weight gradient, where that is
    separate), so rows are taken while a backward or weight gradient runs, with the micro-batch it works on included.
    Every forward is followed by one of those before anything is released, so no larger row exists in between.
    """
    result = []
    release = releasing_kinds(schedule)
    for order in schedule.orders:
        counts = [0] * schedule.chunks
        rows = set()
        for action in order:
            if action.kind == FORWARD:
                counts[action.chunk] += 1
                continue
            rows.add(tuple(counts))
            if action.kind in release:
                counts[action.chunk] -= 1
        result.append(pareto_maximal(rows))
    return tuple(result)


@lru_cache(maxsize=4096)
def extreme_rows(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Rows that no other row, and no point between two others, reaches in every entry.

    The bytes in flight are linear in a row, so for every choice of saved bytes one of these rows has the most.
    """
    kept = list(pareto_maximal(rows))
    position = 0
    while position < len(kept):
        others = kept[:position] + kept[position + 1 :]
        if any(_between(kept[position], one, other) for one, other in combinations(others, 2)):
            kept.pop(position)
        else:
            position += 1
    return tuple(kept)


def _between(row: Row, one: Row, other: Row) -> bool:
    """Whether a point on the segment from one row to another is at least as large as the row in every entry."""
    low, high = Fraction(0), Fraction(1)
    for mine, start, end in zip(row, one, other, strict=True):
        if start == end:
            if mine > start:
                return False
            continue
        crossing = Fraction(mine - start, end - start)
        if end > start:
            low = max(low, crossing)
        else:
            high = min(high, crossing)
    return low <= high
