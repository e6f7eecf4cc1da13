"""Choices of options for a stage with several chunks, once it is known which units each chunk holds.

With one chunk the least recomputation is best for every schedule. With several, a millisecond in one chunk may lie on
more longest paths than one in another, so a stage has many choices that no other beats: one recomputation time per
chunk each. They are listed from the Pareto frontiers of the chunks (`knapsack`); long frontiers are thinned first and
the memory that leaves free is spent again afterwards, so lists stay short, at the price of being complete only for
small chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.dominance import undominated_options
from mindspore_bmpipe.planner.knapsack import Frontier, RunFrontiers, Segments, pareto
from mindspore_bmpipe.problem import Problem, Run, schedule_of, stage_constants, update_peak
from mindspore_bmpipe.schedule import extreme_rows, in_flight_rows

_MAX_PRODUCT = 20_000
"""Combinations of the chunks' choices looked at for one stage."""
_MAX_PATTERNS = 400
"""Choices kept for one stage, those with the least recomputation in total."""
_MAX_CAPS = 6
"""Working-set caps tried; of more sizes, the largest are tried."""
_MAX_FRONTIER = 400
"""Choices of one chunk kept while its runs are combined."""
_SAME_TIME = 1e-12


@dataclass(frozen=True, eq=False)
class StagePatterns:
    """The choices of one stage for given units."""

    excess_bytes: int
    """Least bytes over the limit, 0 if a choice fits; then there is one pattern, the one with that excess."""
    extra_ms: npt.NDArray[np.float64]
    """Recomputation of each chunk, shape (patterns, chunks)."""
    peak_bytes: npt.NDArray[np.int64]
    """Peak memory, shape (patterns,)."""
    counts: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    """[pattern][chunk][run of the chunk][option]."""


class ChunkOptions:
    """Choices for the stages of a problem, made on demand and kept."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        schedule = schedule_of(problem)
        self._rows = [np.array(extreme_rows(rows), dtype=np.int64) for rows in in_flight_rows(schedule)]
        self._constants = stage_constants(problem)
        self._undominated = [undominated_options(run.options) for run in problem.runs]
        self._frontiers = RunFrontiers(problem)
        sizes = sorted({option.working_set_bytes for run in problem.runs for option in run.options})
        self._caps = sizes[-_MAX_CAPS:]
        self._chunk_frontiers: dict[tuple[int, Segments], Frontier | None] = {}
        self._patterns: dict[tuple[int, tuple[Segments, ...]], StagePatterns] = {}

    def patterns(self, stage: int, segments: tuple[Segments, ...]) -> StagePatterns:
        """The choices of a stage whose chunks hold these (run, units) segments."""
        key = (stage, segments)
        if key not in self._patterns:
            self._patterns[key] = self._list(stage, segments)
        return self._patterns[key]

    def _allowed(self, index: int, cap: int) -> tuple[int, ...]:
        options = self.problem.runs[index].options
        return tuple(number for number in self._undominated[index] if options[number].working_set_bytes <= cap)

    def _frontier(self, cap: int, segments: Segments) -> Frontier | None:
        """Frontier of one chunk, or `None` if a run has no option within the cap."""
        key = (cap, segments)
        if key not in self._chunk_frontiers:
            self._chunk_frontiers[key] = self._combined(cap, segments)
        return self._chunk_frontiers[key]

    def _combined(self, cap: int, segments: Segments) -> Frontier | None:
        state = Frontier(np.zeros(1, np.int64), np.zeros(1), np.zeros((1, 0), np.int32))
        for index, units in segments:
            allowed = self._allowed(index, cap)
            if not allowed:
                return None
            right = self._frontiers.of(index, units, allowed)
            left_rows, right_rows = np.divmod(np.arange(len(state.saved) * len(right.saved)), len(right.saved))
            counts = np.concatenate((state.counts[left_rows], right.counts[right_rows]), axis=1)
            state = pareto(
                state.saved[left_rows] + right.saved[right_rows],
                state.extra[left_rows] + right.extra[right_rows],
                counts,
            )
            if len(state.saved) > _MAX_FRONTIER:
                state = _thinned(state, _MAX_FRONTIER)
        return state

    def _list(self, stage: int, segments: tuple[Segments, ...]) -> StagePatterns:
        runs = self.problem.runs
        static = self._constants[stage]
        static += sum(units * runs[index].static_bytes for chunk in segments for index, units in chunk)
        updating = update_peak(self.problem, (held for chunk in segments for held in chunk))
        limit = self.problem.memory_limit_bytes[stage]
        rows = self._rows[stage]
        closest: tuple[int, int, list[Frontier]] | None = None
        found: list[tuple[list[Frontier], npt.NDArray[np.intp], npt.NDArray[np.float64], npt.NDArray[np.int64]]] = []
        known: list[tuple[int, ...]] | None = None
        for cap in self._caps:
            allowed = [self._allowed(index, cap) for chunk in segments for index, _ in chunk]
            frontiers = [self._frontier(cap, chunk) for chunk in segments]
            if allowed == known or any(frontier is None for frontier in frontiers):
                continue
            known = allowed
            usable = [frontier for frontier in frontiers if frontier is not None]
            least = int((rows @ np.array([int(frontier.saved[0]) for frontier in usable])).max())
            needed = max(static + cap + least, updating)
            if needed > limit:
                if closest is None or needed < closest[1]:
                    closest = (needed - limit, needed, usable)
                continue
            chosen = _fitting_choices(usable, rows, limit - static - cap)
            extra = np.stack([f.extra[chosen[:, c]] for c, f in enumerate(usable)], axis=1)
            saved = np.stack([f.saved[chosen[:, c]] for c, f in enumerate(usable)], axis=1)
            found.append((usable, chosen, extra, np.maximum(static + cap + (saved @ rows.T).max(axis=1), updating)))
        if not found:
            # Every option is within the largest cap, so there is always a closest choice.
            assert closest is not None
            excess, least_peak, usable = closest
            least_extra = np.array([[float(frontier.extra[0]) for frontier in usable]])
            counts = tuple(
                _split_counts(frontier.counts[0], chunk, runs) for frontier, chunk in zip(usable, segments, strict=True)
            )
            return StagePatterns(excess, least_extra, np.array([least_peak], dtype=np.int64), (counts,))
        extra = np.concatenate([entry[2] for entry in found])
        peak = np.concatenate([entry[3] for entry in found])
        origin = [(number, row) for number, entry in enumerate(found) for row in range(len(entry[1]))]
        kept = _unbeaten(extra, peak)[:_MAX_PATTERNS]
        tables = []
        for position in kept.tolist():
            number, row = origin[position]
            frontiers_used, chosen = found[number][0], found[number][1]
            tables.append(
                tuple(
                    _split_counts(frontier.counts[chosen[row, place]], chunk, runs)
                    for place, (frontier, chunk) in enumerate(zip(frontiers_used, segments, strict=True))
                )
            )
        return StagePatterns(0, extra[kept], peak[kept], tuple(tables))


def _split_counts(flat: npt.NDArray[np.int32], chunk: Segments, runs: tuple[Run, ...]) -> tuple[tuple[int, ...], ...]:
    values = flat.tolist()
    parts = []
    for index, _ in chunk:
        width = len(runs[index].options)
        parts.append(tuple(values[:width]))
        values = values[width:]
    return tuple(parts)


def _thinned(frontier: Frontier, size: int) -> Frontier:
    """At most this many choices, both ends among them."""
    if len(frontier.saved) <= size:
        return frontier
    rows = np.unique(np.linspace(0, len(frontier.saved) - 1, max(size, 2)).round().astype(np.intp))
    return Frontier(frontier.saved[rows], frontier.extra[rows], frontier.counts[rows])


def _fitting_choices(frontiers: list[Frontier], rows: npt.NDArray[np.int64], budget: int) -> npt.NDArray[np.intp]:
    """Rows of the frontiers that fit together, shape (choices, chunks), not all of them if there are very many."""
    chunks = len(frontiers)
    indices = [np.arange(len(frontier.saved)) for frontier in frontiers]
    if np.prod([float(len(index)) for index in indices]) > _MAX_PRODUCT:
        size = max(2, int(_MAX_PRODUCT ** (1 / chunks)))
        while np.prod([float(min(len(index), size + 1)) for index in indices]) <= _MAX_PRODUCT:
            size += 1
        indices = [
            np.unique(np.linspace(0, len(index) - 1, min(size, len(index))).round().astype(np.intp))
            for index in indices
        ]
    least = np.array([int(frontier.saved[0]) for frontier in frontiers])
    chosen = np.zeros((1, 0), dtype=np.intp)
    used = np.zeros((1, len(rows)), dtype=np.int64)
    for chunk, (frontier, index) in enumerate(zip(frontiers, indices, strict=True)):
        rest = rows[:, chunk + 1 :] @ least[chunk + 1 :]
        total = used[:, None, :] + frontier.saved[index][None, :, None] * rows[:, chunk][None, None, :]
        left, right = np.nonzero((total + rest <= budget).all(axis=2))
        chosen = np.concatenate((chosen[left], index[right][:, None]), axis=1)
        used = total[left, right]
    # Spend what is left, chunk by chunk: the most saved bytes, hence the least recomputation, that still fit.
    for chunk, frontier in enumerate(frontiers):
        weight = rows[:, chunk]
        others = used - frontier.saved[chosen[:, chunk]][:, None] * weight
        room = np.where(weight > 0, (budget - others) // np.maximum(weight, 1), np.iinfo(np.int64).max).min(axis=1)
        better = np.searchsorted(frontier.saved, room, side="right") - 1
        chosen[:, chunk] = better
        used = others + frontier.saved[better][:, None] * weight
    sizes = [len(frontier.saved) for frontier in frontiers]
    if np.prod([float(size) for size in sizes]) >= np.iinfo(np.int64).max:
        return np.unique(chosen, axis=0)
    _, first = np.unique(np.ravel_multi_index(tuple(chosen.T), sizes), return_index=True)
    return chosen[first]


def _unbeaten(extra: npt.NDArray[np.float64], peak: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Rows of which no other is at most as large everywhere, by total, then peak."""
    total = extra.sum(axis=1)
    order = np.lexsort((peak, total))
    ordered = extra[order] + _SAME_TIME
    alive = np.ones(len(order), dtype=bool)
    kept = []
    for position in range(len(order)):
        if not alive[position]:
            continue
        kept.append(order[position])
        if len(kept) >= _MAX_PATTERNS:
            break
        alive[position + 1 :] &= ~(extra[order[position]] <= ordered[position + 1 :]).all(axis=1)
    return np.array(kept, dtype=np.intp)
