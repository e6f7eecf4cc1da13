"""How many micro-batches of each chunk hold saved activations, read off the order of a stage."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from mindspore_bmpipe.schedule.actions import BACKWARD, FORWARD, WEIGHT
from mindspore_bmpipe.schedule.schedule import Schedule

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
    for order in schedule.orders:
        release = WEIGHT if any(action.kind == WEIGHT for action in order) else BACKWARD
        counts = [0] * schedule.chunks
        rows = set()
        for action in order:
            if action.kind == FORWARD:
                counts[action.chunk] += 1
                continue
            rows.add(tuple(counts))
            if action.kind == release:
                counts[action.chunk] -= 1
        result.append(pareto_maximal(rows))
    return tuple(result)
