"""Choices of options of a chunk where the schedule splits backwards: what runs again counts beside recomputation.

What separate weight gradients run again is no sum over units (`split_backward`), so a choice for some units is only
dropped if another is no worse whatever the rest of the chunk holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.dominance import undominated_rows
from mindspore_bmpipe.planner.knapsack import Frontier, Segments
from mindspore_bmpipe.problem import Problem
from mindspore_bmpipe.split_backward import repeats_of

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _Units:
    """Choices for units of one run, by increasing saved bytes."""

    saved: npt.NDArray[np.int64]
    extra: FloatArray
    first: FloatArray
    after: FloatArray
    counts: npt.NDArray[np.int32]


class SplitFrontiers:
    """Frontiers of chunks, from those of runs, which are grown one unit at a time and kept."""

    def __init__(self, problem: Problem, most: int) -> None:
        """Prepare frontiers of at most so many choices; longer ones are thinned."""
        self._runs = problem.runs
        self._repeats = [repeats_of(run) for run in problem.runs]
        self._most = most
        self._ladders: dict[tuple[int, tuple[int, ...]], list[_Units]] = {}

    def of(self, segments: Segments, allowed: list[tuple[int, ...]]) -> Frontier:
        """Frontier of a chunk in saved bytes, recomputation and what runs again.

        Args:
            segments: what the chunk holds, in network order.
            allowed: options that may be used, of each segment.
        """
        saved, extra, repeated = np.zeros(1, np.int64), np.zeros(1), np.zeros(1)
        counts = np.zeros((1, 0), np.int32)
        for (run, number), options in zip(segments, allowed, strict=True):
            units = self._units(run, number, options)
            left, right = np.divmod(np.arange(len(saved) * len(units.saved)), len(units.saved))
            before = repeated[left]
            saved, extra = saved[left] + units.saved[right], extra[left] + units.extra[right]
            repeated = before + np.where(before > 0, units.after[right], units.first[right])
            counts = np.concatenate((counts[left], units.counts[right]), axis=1)
            kept = self._kept(saved, extra, repeated)
            saved, extra, repeated, counts = saved[kept], extra[kept], repeated[kept], counts[kept]
        return Frontier(saved, extra, counts, repeated)

    def _units(self, run: int, number: int, allowed: tuple[int, ...]) -> _Units:
        ladder = self._ladders.setdefault((run, allowed), [])
        options, repeats = self._runs[run].options, self._repeats[run]
        steps = np.eye(len(options), dtype=np.int32)[list(allowed)]
        sizes = np.array([option.saved_bytes for option in options], dtype=np.int64)
        times = np.array([option.extra_backward_ms for option in options])
        waits = repeats.first > 0
        while len(ladder) <= number:
            if ladder:
                counts = (ladder[-1].counts[:, None, :] + steps[None, :, :]).reshape(-1, len(options))
            else:
                counts = np.zeros((1, len(options)), np.int32)
            saved, extra = counts.astype(np.int64) @ sizes, counts @ times
            first, after, _ = repeats.of_counts(counts.astype(np.int64))
            # The last says what one more unit that runs again, and is made the first, would leave behind it.
            kept = self._kept(saved, extra, first, after, counts[:, waits] @ repeats.after[waits])
            ladder.append(_Units(saved[kept], extra[kept], first[kept], after[kept], counts[kept]))
        return ladder[number]

    def _kept(self, saved: npt.NDArray[np.int64], *costs: FloatArray) -> npt.NDArray[np.intp]:
        """Rows that no other beats, by increasing saved bytes."""
        columns = np.stack((saved.astype(np.float64), *costs), axis=1)
        rows = undominated_rows(columns, np.lexsort(columns.T[::-1]))
        if len(rows) > self._most:
            rows = rows[np.unique(np.linspace(0, len(rows) - 1, self._most).round().astype(np.intp))]
        return rows
