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

from mindspore_bmpipe.planner.dominance import undominated_options, undominated_rows
from mindspore_bmpipe.planner.knapsack import Frontier, RunFrontiers, Segments, pareto
from mindspore_bmpipe.planner.split_frontiers import SplitFrontiers
from mindspore_bmpipe.problem import Problem, schedule_of, stage_constants, update_peak
from mindspore_bmpipe.schedule import extreme_rows, in_flight_rows, splits_backward
from mindspore_bmpipe.split_backward import repeats_of

_MAX_PRODUCT = 6_000
"""Combinations of the chunks' choices looked at for one stage."""
_MAX_PATTERNS = 200
"""Choices kept for one stage, those with the least recomputation in total."""
_MAX_CAPS = 6
"""Working-set caps tried; of more sizes, the largest are tried."""
_MAX_FRONTIER = 400
"""Choices of one chunk kept while its runs are combined."""


@dataclass(frozen=True, eq=False)
class StagePatterns:
    """The choices of one stage for given units."""

    excess_bytes: int
    """Least bytes over the limit, 0 if a choice fits; then there is one pattern, the one with that excess."""
    extra_ms: npt.NDArray[np.float64]
    """Recomputation of each chunk, shape (patterns, chunks)."""
    repeated_ms: npt.NDArray[np.float64] | None
    """What separate weight gradients of each chunk run again, the same shape, if the schedule splits backwards."""
    peak_bytes: npt.NDArray[np.int64]
    """Peak memory, shape (patterns,)."""
    comparisons: int
    """Peaks of combinations that were compared with the limit to find the patterns: what listing them cost."""
    _choices: tuple[tuple[Frontier, ...], ...]
    """Frontiers of the chunks, once for each working-set cap that led to patterns."""
    _origin: npt.NDArray[np.intp]
    """Of each pattern, which of these frontiers, then a row of the frontier of each chunk, (patterns, 1 + chunks)."""
    _widths: tuple[tuple[int, ...], ...]
    """[chunk][run of the chunk]: how many options the run has."""

    def counts(self, pattern: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Units by [chunk][run of the chunk][option] of one pattern."""
        number, *rows = self._origin[pattern].tolist()
        return tuple(
            _split_counts(frontier.counts[row], widths)
            for frontier, row, widths in zip(self._choices[number], rows, self._widths, strict=True)
        )


class ChunkOptions:
    """Choices for the stages of a problem, made on demand and kept."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        schedule = schedule_of(problem)
        self._rows = [np.array(extreme_rows(rows), dtype=np.int64) for rows in in_flight_rows(schedule)]
        self._constants = stage_constants(problem)
        self._split = SplitFrontiers(problem, _MAX_FRONTIER) if splits_backward(schedule) else None
        self._undominated = [
            undominated_options(run.options, None if self._split is None else repeats_of(run)) for run in problem.runs
        ]
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
        if self._split is not None:
            options = [self._allowed(index, cap) for index, _ in segments]
            return self._split.of(segments, options) if all(options) else None
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
        widths = tuple(tuple(len(runs[index].options) for index, _ in chunk) for chunk in segments)
        closest: tuple[int, int, tuple[Frontier, ...]] | None = None
        found: list[tuple[tuple[Frontier, ...], npt.NDArray[np.intp], npt.NDArray[np.int64]]] = []
        known: list[tuple[int, ...]] | None = None
        comparisons = excess = 0
        for cap in self._caps:
            allowed = [self._allowed(index, cap) for chunk in segments for index, _ in chunk]
            frontiers = [self._frontier(cap, chunk) for chunk in segments]
            if allowed == known or any(frontier is None for frontier in frontiers):
                continue
            known = allowed
            usable = tuple(frontier for frontier in frontiers if frontier is not None)
            least = int((rows @ np.array([int(frontier.saved[0]) for frontier in usable])).max())
            needed = max(static + cap + least, updating)
            if needed > limit:
                if closest is None or needed < closest[1]:
                    closest = (needed - limit, needed, usable)
                continue
            chosen, compared = _fitting_choices(usable, rows, limit - static - cap)
            comparisons += compared
            saved = np.stack([f.saved[chosen[:, c]] for c, f in enumerate(usable)], axis=1)
            found.append((usable, chosen, np.maximum(static + cap + (saved @ rows.T).max(axis=1), updating)))
        if not found:
            # Every option is within the largest cap, so there is always a closest choice.
            assert closest is not None
            excess, least_peak, usable = closest
            found.append((usable, np.zeros((1, len(usable)), dtype=np.intp), np.array([least_peak])))
        extra, repeated = (
            np.concatenate([_times(usable, chosen, repeats) for usable, chosen, _ in found])
            for repeats in (False, True)
        )
        peak = np.concatenate([peaks for _, _, peaks in found])
        origin = np.concatenate([np.insert(chosen, 0, number, axis=1) for number, (_, chosen, _) in enumerate(found)])
        costs = np.concatenate((extra, repeated), axis=1)
        kept = undominated_rows(costs, np.lexsort((peak, costs.sum(axis=1))), _MAX_PATTERNS)
        return StagePatterns(
            excess, extra[kept], None if self._split is None else repeated[kept], peak[kept], comparisons,
            tuple(usable for usable, _, _ in found), origin[kept], widths,
        )  # fmt: skip


def _times(frontiers: tuple[Frontier, ...], chosen: npt.NDArray[np.intp], repeats: bool) -> npt.NDArray[np.float64]:
    """Recomputation of each chunk, or what its weight gradients run again; no columns if nothing is known of that."""
    times = [frontier.repeated if repeats else frontier.extra for frontier in frontiers]
    columns = [time[chosen[:, chunk]] for chunk, time in enumerate(times) if time is not None]
    return np.stack(columns, axis=1) if columns else np.zeros((len(chosen), 0))


def _split_counts(flat: npt.NDArray[np.int32], widths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    values = flat.tolist()
    ends = np.cumsum(widths).tolist()
    return tuple(tuple(values[end - width : end]) for end, width in zip(ends, widths, strict=True))


def _thinned(frontier: Frontier, size: int) -> Frontier:
    """At most this many choices, both ends among them."""
    if len(frontier.saved) <= size:
        return frontier
    rows = np.unique(np.linspace(0, len(frontier.saved) - 1, max(size, 2)).round().astype(np.intp))
    return Frontier(frontier.saved[rows], frontier.extra[rows], frontier.counts[rows])


def _best_until(frontier: Frontier) -> npt.NDArray[np.intp]:
    """For each choice, the one with the least time among it and those that save less."""
    rows = np.arange(len(frontier.saved))
    if frontier.repeated is None:
        return rows
    time = frontier.extra + frontier.repeated
    return np.maximum.accumulate(np.where(time <= np.minimum.accumulate(time), rows, 0))


def _fitting_choices(
    frontiers: tuple[Frontier, ...], rows: npt.NDArray[np.int64], budget: int
) -> tuple[npt.NDArray[np.intp], int]:
    """Rows of the frontiers that fit together, shape (choices, chunks), not all of them if there are very many.

    Also how many peaks were compared with the budget.
    """
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
    used = np.zeros((len(rows), 1), dtype=np.int64)
    compared = 0
    for chunk, (frontier, index) in enumerate(zip(frontiers, indices, strict=True)):
        room = budget - rows[:, chunk + 1 :] @ least[chunk + 1 :]
        added = frontier.saved[index][None, :] * rows[:, chunk][:, None]
        fits = np.ones((len(chosen), len(index)), dtype=bool)
        for row in range(len(rows)):
            fits &= used[row][:, None] + added[row][None, :] <= room[row]
        compared += fits.size * len(rows)
        left, right = np.nonzero(fits)
        chosen = np.concatenate((chosen[left], index[right][:, None]), axis=1)
        used = used[:, left] + added[:, right]
    # Spend what is left, chunk by chunk: the most saved bytes, hence the least recomputation, that still fit.
    first = chosen
    for chunk, frontier in enumerate(frontiers):
        weight = rows[:, chunk]
        others = used - frontier.saved[chosen[:, chunk]][None, :] * weight[:, None]
        held = np.flatnonzero(weight)
        room = ((budget - others[held]) // weight[held, None]).min(axis=0, initial=np.iinfo(np.int64).max)
        better = _best_until(frontier)[np.searchsorted(frontier.saved, room, side="right") - 1]
        chosen = np.concatenate((chosen[:, :chunk], better[:, None], chosen[:, chunk + 1 :]), axis=1)
        used = others + frontier.saved[better][None, :] * weight[:, None]
    if any(frontier.repeated is not None for frontier in frontiers):
        # The least sum is not the least of both, so what it replaces may be better.
        chosen = np.concatenate((first, chosen))
    sizes = [len(frontier.saved) for frontier in frontiers]
    if np.prod([float(size) for size in sizes]) >= np.iinfo(np.int64).max:
        return np.unique(chosen, axis=0), compared
    _, first = np.unique(np.ravel_multi_index(tuple(chosen.T), sizes), return_index=True)
    return chosen[first], compared
