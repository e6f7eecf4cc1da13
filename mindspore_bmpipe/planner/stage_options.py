"""The exact best options of a stage, once it is known which units it holds.

One chunk per stage: a stage holds units [low, high), its forward time is then fixed, and of all choices of options that
fit in memory the one with the least recomputation is best for every schedule, since every path length grows with the
backward time. With f in-flight micro-batches, memory fits when the saved bytes of one micro-batch are at most

    budget = (limit - constant - static - working set) // f,

so one Pareto frontier of (saved bytes, recomputation) per group of units serves all stages: a stage looks up its budget.
Working sets enter through a cap: for each distinct size, only options up to that size are used and the cap is reserved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.problem import Decision, Problem, schedule_of
from mindspore_bmpipe.schedule import in_flight_rows

_SAME_TIME = 1e-12
"""Relative difference below which two recomputation times count as equal (rounding of sums)."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """Choices of options that no other choice beats in both saved bytes and recomputation."""

    saved: npt.NDArray[np.int64]
    """Saved bytes per micro-batch, increasing, shape (n,)."""
    extra: npt.NDArray[np.float64]
    """Recomputation milliseconds, decreasing, shape (n,)."""
    counts: npt.NDArray[np.int32]
    """Units with each option, shape (n, options of all runs concerned in run order)."""


def _pareto(saved: npt.NDArray[np.int64], extra: npt.NDArray[np.float64], counts: npt.NDArray[np.int32]) -> Frontier:
    order = np.lexsort((extra, saved))
    sorted_extra = extra[order]
    best_before = np.concatenate(([np.inf], np.minimum.accumulate(sorted_extra)[:-1]))
    kept = order[sorted_extra < best_before - _SAME_TIME * (1 + np.abs(sorted_extra))]
    return Frontier(saved[kept], extra[kept], counts[kept])


@dataclass(frozen=True, eq=False)
class StageChoice:
    """One group of units [low, high) on every stage it might be placed on; entries of stages where it does not fit
    are infinite or -1."""

    forward_ms: float
    """Forward time of the group."""
    backward_ms: npt.NDArray[np.float64]
    """Backward time with the least recomputation that fits, shape (stages,)."""
    extra_ms: npt.NDArray[np.float64]
    """The recomputation in it, shape (stages,)."""
    peak_bytes: npt.NDArray[np.int64]
    """Peak memory of that choice, shape (stages,)."""
    least_bytes: npt.NDArray[np.int64]
    """Least peak memory of any choice, whatever the limit, shape (stages,)."""
    counts: tuple[npt.NDArray[np.int32] | None, ...]
    """Units with each option, by stage; options of the runs concerned in run order."""


class StageOptions:
    """Choices for all groups of units of a problem with one chunk per stage, made on demand and kept."""

    def __init__(self, problem: Problem) -> None:
        assert problem.chunks == 1
        self.problem = problem
        self.firsts = problem.first_units
        self._in_flight = np.array([max(row[0] for row in rows) for rows in in_flight_rows(schedule_of(problem))])
        self._limits = np.array(problem.memory_limit_bytes, dtype=np.int64)
        sizes = {option.working_set_bytes for run in problem.runs for option in run.options}
        self._caps = sorted(sizes)
        self._frontiers: dict[tuple[int, int], list[Frontier]] = {}
        self._merged: dict[tuple[tuple[tuple[int, int], ...], int], Frontier | None] = {}
        self._choices: dict[tuple[tuple[int, int], ...], StageChoice] = {}

    def segments(self, low: int, high: int) -> tuple[tuple[int, int], ...]:
        """(run, units of it) in [low, high)."""
        return tuple(
            (index, min(high, last) - max(low, first))
            for index, (first, last) in enumerate(zip(self.firsts, self.firsts[1:], strict=False))
            if min(high, last) > max(low, first)
        )

    def choice(self, low: int, high: int) -> StageChoice:
        """The best options of units [low, high) on every stage."""
        segments = self.segments(low, high)
        found = self._choices.get(segments)
        if found is None:
            found = self._choices[segments] = self._choose(segments)
        return found

    def _run_frontier(self, run_index: int, units: int, cap: int) -> Frontier | None:
        """Frontier of some units of one run, with options whose working set is at most the cap."""
        options = self.problem.runs[run_index].options
        allowed = [index for index, option in enumerate(options) if option.working_set_bytes <= cap]
        if not allowed:
            return None
        key = (run_index, sum(1 << index for index in allowed))
        ladder = self._frontiers.setdefault(key, [])
        steps = np.zeros((len(allowed), len(options)), dtype=np.int32)
        steps[range(len(allowed)), allowed] = 1
        saved = np.array([option.saved_bytes for option in options], dtype=np.int64)
        extra = np.array([option.extra_backward_ms for option in options])
        if not ladder:
            empty = np.zeros((1, len(options)), dtype=np.int32)
            ladder.append(Frontier(np.zeros(1, dtype=np.int64), np.zeros(1), empty))
        while len(ladder) <= units:
            counts = (ladder[-1].counts[:, None, :] + steps[None, :, :]).reshape(-1, len(options))
            ladder.append(_pareto(counts.astype(np.int64) @ saved, counts @ extra, counts))
        return ladder[units]

    def _frontier(self, segments: tuple[tuple[int, int], ...], cap: int) -> Frontier | None:
        """Frontier of several runs together; `None` if some unit has no option within the cap."""
        if len(segments) == 1:
            return self._run_frontier(*segments[0], cap)
        key = (segments, cap)
        if key not in self._merged:
            left, right = self._frontier(segments[:-1], cap), self._run_frontier(*segments[-1], cap)
            self._merged[key] = None if left is None or right is None else _merge(left, right)
        return self._merged[key]

    def _choose(self, segments: tuple[tuple[int, int], ...]) -> StageChoice:
        problem = self.problem
        forward = sum(units * problem.runs[index].forward_ms for index, units in segments)
        backward = sum(units * problem.runs[index].backward_ms for index, units in segments)
        static = problem.stage_constant_bytes
        static += sum(units * problem.runs[index].static_bytes for index, units in segments)
        extra = np.full(problem.stages, np.inf)
        peak = np.full(problem.stages, -1, dtype=np.int64)
        least = np.full(problem.stages, np.iinfo(np.int64).max, dtype=np.int64)
        counts: list[npt.NDArray[np.int32] | None] = [None] * problem.stages
        for cap in self._caps:
            frontier = self._frontier(segments, cap)
            if frontier is None:
                continue
            least = np.minimum(least, static + cap + self._in_flight * frontier.saved[0])
            budget = (self._limits - static - cap) // self._in_flight
            position = np.searchsorted(frontier.saved, budget, side="right") - 1
            for stage in np.flatnonzero(position >= 0).tolist():
                at = position[stage]
                here = float(frontier.extra[at])
                # A larger cap must gain something: otherwise the smaller one already gives the lower peak.
                if here < extra[stage] - _SAME_TIME * (1 + here) or counts[stage] is None:
                    extra[stage] = here
                    peak[stage] = static + cap + int(self._in_flight[stage]) * int(frontier.saved[at])
                    counts[stage] = frontier.counts[at]
        return StageChoice(forward, backward + extra, extra, peak, least, tuple(counts))

    def decision(self, bounds: tuple[int, ...]) -> Decision:
        """The decision in which stage s holds units bounds[s] to bounds[s + 1] - 1; every stage must fit."""
        problem = self.problem
        table = [[[0] * len(run.options) for _ in range(problem.stages)] for run in problem.runs]
        for stage, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
            counts = self.choice(low, high).counts[stage]
            assert counts is not None
            remaining = counts.tolist()
            for index, _ in self.segments(low, high):
                width = len(problem.runs[index].options)
                table[index][stage], remaining = remaining[:width], remaining[width:]
        return Decision(tuple(tuple(tuple(cell) for cell in row) for row in table))


def _merge(left: Frontier, right: Frontier) -> Frontier:
    saved = (left.saved[:, None] + right.saved[None, :]).reshape(-1)
    extra = (left.extra[:, None] + right.extra[None, :]).reshape(-1)
    counts = np.concatenate(
        (
            np.repeat(left.counts, len(right.saved), axis=0),
            np.tile(right.counts, (len(left.saved), 1)),
        ),
        axis=1,
    )
    return _pareto(saved, extra, counts)
