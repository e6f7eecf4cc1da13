"""The splits a Megatron-LM user can write, and what they cost under its recompute settings, many at a time.

Units before the first and after the last repeated run are taken as the embedding E and the loss head L; the layers lie
between. For p stages of v chunks, K = p v virtual stages, the splits are

- `--decoder-first-pipeline-num-layers f`, `--decoder-last-pipeline-num-layers l`, either or both: counts of the first
  and last *stage*, multiples of v, the other stages even;
- `--account-for-embedding-in-pipeline-split`, `--account-for-loss-in-pipeline-split`: E or L counts as one layer of an
  even split;
- `--pipeline-model-parallel-layout` with any number of layers beside E and beside L (none: `E|`, `|L`) and counts that
  differ by at most one between them, the larger ones first or last.

Layouts of other shapes can be written too, but not found by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.even import end_units
from mindspore_bmpipe.planner.recipes import Recipe, runs_of_units
from mindspore_bmpipe.problem import Problem, schedule_of, stage_constants
from mindspore_bmpipe.schedule import extreme_rows, in_flight_rows, splits_backward
from mindspore_bmpipe.split_backward import chunk_repeated, repeats_of

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class Layouts:
    """Splits as layers of every virtual stage."""

    def __init__(self, problem: Problem) -> None:
        self.schedule = schedule_of(problem)
        self.before, self.after = end_units(problem)
        self.layers = problem.units - self.before - self.after
        self.stages, self.chunks = problem.stages, problem.chunks
        self.size = problem.virtual_stages

    def bounds(self, most_first: int, most_last: int) -> IntArray:
        """Every distinct split with at most so many layers on the first and last virtual stage, shape (n, K + 1)."""
        found = {
            counts: None
            for counts in itertools.chain(self._by_stage(), self._as_layers(), self._laid_out(most_first, most_last))
            if counts[0] <= most_first and counts[-1] <= most_last
        }
        counts = np.array(list(found), dtype=np.int64).reshape(-1, self.size)
        counts[:, 0] += self.before
        counts[:, -1] += self.after
        return np.concatenate((np.zeros((len(counts), 1), np.int64), np.cumsum(counts, axis=1)), axis=1)

    def _by_stage(self) -> Iterator[tuple[int, ...]]:
        """First and last counts of stages."""
        for first in (None, *range(self.chunks, self.layers, self.chunks)):
            for last in (None, *range(self.chunks, self.layers, self.chunks)):
                fixed = (first is not None) + (last is not None)
                others, rest = self.stages - fixed, self.layers - (first or 0) - (last or 0)
                if others < 0 or rest < 0 or (others == 0) != (rest == 0) or (fixed == 2 and self.stages < 2):
                    continue
                if others and rest % (others * self.chunks):
                    continue
                each = [rest // others if others else 0] * self.stages
                each[0] = each[0] if first is None else first
                each[-1] = each[-1] if last is None else last
                yield tuple(each[stage] // self.chunks for stage in self.schedule.stage_of_virtual)

    def _as_layers(self) -> Iterator[tuple[int, ...]]:
        """The embedding, the loss, or both as one layer each."""
        for embedding, loss in ((1, 0), (0, 1), (1, 1)):
            each, rest = divmod(self.layers + embedding + loss, self.size)
            counts = [each] * self.size
            counts[0] -= embedding
            counts[-1] -= loss
            if rest == 0 and min(counts) >= 0:
                yield tuple(counts)

    def _laid_out(self, most_first: int, most_last: int) -> Iterator[tuple[int, ...]]:
        """Layout strings."""
        if self.size == 1:
            yield (self.layers,)
            return
        middle = self.size - 2
        for first in range(min(most_first, self.layers) + 1):
            for last in range(min(most_last, self.layers - first) + 1):
                rest = self.layers - first - last
                if (middle == 0) != (rest == 0):
                    continue
                if middle == 0:
                    yield (first, last)
                    continue
                each, larger = divmod(rest, middle)
                yield (first, *[each + 1] * larger, *[each] * (middle - larger), last)
                yield (first, *[each] * (middle - larger), *[each + 1] * larger, last)


class LayoutCosts:
    """Times and peaks of many splits when the first n layers of every virtual stage take a recipe."""

    def __init__(self, problem: Problem, kept: Recipe, recomputed: Recipe) -> None:
        self.problem = problem
        self._before, after = end_units(problem)
        self._last_layer = problem.units - after
        units = runs_of_units(problem)
        runs = problem.runs
        self._forward = _before([runs[run].forward_ms for run in units])
        self._static = _before_bytes([runs[run].static_bytes for run in units])
        self._updating = _before_bytes([runs[run].static_bytes + runs[run].update_bytes for run in units])
        self._weight = _before([runs[run].split_weight_ms for run in units])
        self._splits = splits_backward(schedule_of(problem))
        self._units, self._recipes = units, (kept, recomputed)
        self._repeats = [repeats_of(run) for run in runs]
        self._backward, self._saved, self._working = [], [], []
        for recipe in (kept, recomputed):
            options = [runs[run].options[recipe[run]] for run in units]
            extra = [option.extra_backward_ms for option in options]
            self._backward.append(
                _before([runs[run].backward_ms + more for run, more in zip(units, extra, strict=True)])
            )
            self._saved.append(_before_bytes([option.saved_bytes for option in options]))
            self._working.append(_range_maxima([option.working_set_bytes for option in options]))
        schedule = schedule_of(problem)
        self._virtual_of_chunk = schedule.virtual_of_chunk
        self._rows = [np.array(extreme_rows(rows), dtype=np.int64) for rows in in_flight_rows(schedule)]
        self._constants = stage_constants(problem)
        self._speeds = np.array([problem.speeds[stage] for stage in schedule.stage_of_virtual])

    def recomputed_range(self, bounds: IntArray, layers: int) -> tuple[IntArray, IntArray]:
        """First recomputed unit of every virtual stage and the one after the last, shapes (n, K)."""
        start = np.minimum(np.maximum(bounds[:, :-1], self._before), bounds[:, 1:])
        return start, np.maximum(start, np.minimum(np.minimum(start + layers, bounds[:, 1:]), self._last_layer))

    def times(self, bounds: IntArray, layers: int) -> tuple[FloatArray, FloatArray, FloatArray | None]:
        """Forward and whole backward of every virtual stage, shapes (n, K), and weight gradients as simulations do."""
        low, high = bounds[:, :-1], bounds[:, 1:]
        start, stop = self.recomputed_range(bounds, layers)
        kept, again = self._backward
        backward = kept[high] - kept[low] - (kept[stop] - kept[start]) + again[stop] - again[start]
        forward = (self._forward[high] - self._forward[low]) / self._speeds
        weight = None
        if self._splits:
            parts = self._weight[high] - self._weight[low], self._repeated(np.stack((low, high, start, stop), axis=-1))
            weight = np.stack(parts, axis=1) / self._speeds
        return forward, backward / self._speeds, weight

    def _repeated(self, groups: IntArray) -> FloatArray:
        """What weight gradients run again of groups [low, high) recomputed in [start, stop), shape (n, K, 4)."""
        distinct, inverse = np.unique(groups.reshape(-1, 4), axis=0, return_inverse=True)
        return np.array([self._repeated_of(*row) for row in distinct.tolist()])[inverse].reshape(groups.shape[:2])

    def _repeated_of(self, low: int, high: int, start: int, stop: int) -> float:
        counts: dict[int, list[int]] = {}
        for unit in range(low, high):
            run = self._units[unit]
            held = counts.setdefault(run, [0] * len(self.problem.runs[run].options))
            held[self._recipes[start <= unit < stop][run]] += 1
        return chunk_repeated(self._repeats, counts.items())

    def excess_bytes(self, bounds: IntArray, layers: int) -> IntArray:
        """Peak minus limit of every stage, shape (n, p)."""
        low, high = bounds[:, :-1], bounds[:, 1:]
        start, stop = self.recomputed_range(bounds, layers)
        kept, again = self._saved
        saved = kept[high] - kept[low] - (kept[stop] - kept[start]) + again[stop] - again[start]
        static = self._static[high] - self._static[low]
        updating = self._updating[high] - self._updating[low]
        working = np.maximum(self._working[0][low, start], self._working[0][stop, high])
        working = np.maximum(working, self._working[1][start, stop])
        columns = []
        for stage, virtuals in enumerate(self._virtual_of_chunk):
            chosen = list(virtuals)
            in_flight = (saved[:, chosen] @ self._rows[stage].T).max(axis=1)
            peak = static[:, chosen].sum(axis=1) + in_flight + working[:, chosen].max(axis=1)
            updates = updating[:, chosen].sum(axis=1) + self.problem.stage_constant_bytes
            peak = np.maximum(peak + self._constants[stage], updates)
            columns.append(peak - self.problem.memory_limit_bytes[stage])
        return np.stack(columns, axis=1)


def _before(values: list[float]) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(values)))


def _before_bytes(values: list[int]) -> IntArray:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(np.array(values, dtype=np.int64))))


def _range_maxima(values: list[int]) -> IntArray:
    """Largest of values[low:high] for every pair, 0 where there is none; shape (n + 1, n + 1)."""
    size = len(values)
    table = np.zeros((size + 1, size + 1), dtype=np.int64)
    for low in range(size):
        table[low, low + 1 :] = np.maximum.accumulate(values[low:])
    return table
