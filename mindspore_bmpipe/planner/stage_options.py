"""The exact best options of a stage, once it is known which units it holds (one chunk per stage).

A stage holds units [low, high); its forward time is then fixed, and of all choices of options that fit in memory the
one with the least recomputation is best for every schedule, since every path length grows with the backward time. With
f micro-batches in flight, memory fits when the saved bytes of one micro-batch are at most

    budget = (limit - constant - static - working set) // f.

That is a multiple-choice knapsack with many equal items. Its relaxation starts from the options with the least extra
time and buys bytes back along the convex hull of each run's options, cheapest byte first; taking whole units of the
last purchase gives a feasible choice. The two values bracket the optimum so closely that a dynamic program over runs,
which keeps Pareto states between them, stays tiny. Working sets enter through a cap: for each distinct size, only
options up to that size are used, and the cap is reserved.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.knapsack import CapTable, RunFrontiers, cheapest_choice, relaxed_extra
from mindspore_bmpipe.problem import Decision, Problem, schedule_of, stage_constants, update_peak
from mindspore_bmpipe.schedule import in_flight_rows

_MAX_BOUND_CAPS = 6
"""Working-set caps told apart in lower bounds; more are merged into ranges, which only weakens the bound."""

_CHOICE_S, _STEP_S, _PAIR_S = 2e-4, 6e-5, 1e-7
"""Seconds of an idle core for one choice, and more for each step and each pair of choices that it took."""

_SAME_TIME = 1e-12


@dataclass(frozen=True, eq=False)
class StageChoice:
    """The best options of one group of units on one stage."""

    forward_ms: float
    """Forward time."""
    backward_ms: float
    """Backward time with the least recomputation that fits."""
    extra_ms: float
    """The recomputation in it, at speed 1."""
    peak_bytes: int
    """Peak memory of the stage."""
    counts: tuple[tuple[int, ...], ...]
    """Units with each option, for each run of the group."""


class StageOptions:
    """Choices for groups of units of a problem, made on demand and kept."""

    def __init__(self, problem: Problem) -> None:
        assert problem.chunks == 1
        self.problem = problem
        self.firsts = problem.first_units
        self.in_flight = np.array([max(row[0] for row in rows) for rows in in_flight_rows(schedule_of(problem))])
        self.limits = np.array(problem.memory_limit_bytes, dtype=np.int64)
        self.speeds = np.array(problem.speeds)
        self._constants = np.array(stage_constants(problem), dtype=np.int64)
        sizes = sorted({option.working_set_bytes for run in problem.runs for option in run.options})
        self._caps = [CapTable(problem, size, size) for size in sizes]
        if len(sizes) <= _MAX_BOUND_CAPS:
            self._bound_caps = self._caps
        else:
            parts = np.array_split(np.arange(len(sizes)), _MAX_BOUND_CAPS)
            self._bound_caps = [CapTable(problem, sizes[int(part[-1])], sizes[int(part[0])]) for part in parts]
        number_of = {size: number for number, size in enumerate(sizes)}
        self._entries = [{number_of[option.working_set_bytes] for option in run.options} for run in problem.runs]
        """Caps from which on a run has another option, by run."""
        self._frontiers = RunFrontiers(problem)
        self._relaxations = 0
        self._choices: dict[tuple[int, tuple[tuple[int, int], ...]], StageChoice | None] = {}
        self._by_place: dict[tuple[int, int, int], StageChoice | None] = {}
        self._tables: npt.NDArray[np.float64] | None = None
        ones = [(index, run) for index, run in enumerate(problem.runs) for _ in range(run.count)]
        self._forward_before = _before([run.forward_ms for _, run in ones])
        self._backward_before = _before([run.backward_ms for _, run in ones])
        static = np.array([run.static_bytes for _, run in ones], dtype=np.int64)
        self._static_before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(static)))
        updating = static + np.array([run.update_bytes for _, run in ones], dtype=np.int64)
        self._updating_before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(updating)))
        self._units_before = np.zeros((problem.units + 1, len(problem.runs)), dtype=np.int64)
        for unit, (index, _) in enumerate(ones):
            self._units_before[unit + 1] = self._units_before[unit]
            self._units_before[unit + 1, index] += 1

    @property
    def work_s(self) -> float:
        """What the choices made so far cost, in seconds of an idle core more or less; a function of the input alone."""
        frontiers = self._frontiers
        return (
            len(self._choices) * _CHOICE_S + (self._relaxations + frontiers.steps) * _STEP_S + frontiers.pairs * _PAIR_S
        )

    def segments(self, low: int, high: int) -> tuple[tuple[int, int], ...]:
        """(run, units of it) in [low, high)."""
        units = self._units_before[high] - self._units_before[low]
        return tuple((index, int(units[index])) for index in np.flatnonzero(units).tolist())

    def forward_from(self, low: int) -> npt.NDArray[np.float64]:
        """Forward time of [low, high) on every stage, for every high from low + 1 on: (highs, stages)."""
        return np.asarray((self._forward_before[low + 1 :] - self._forward_before[low])[:, None] / self.speeds)

    def least_bytes_from(self, low: int) -> npt.NDArray[np.int64]:
        """Least peak of [low, high) on every stage, whatever the limit, for every high > low: (highs, stages)."""
        units = self._units_before[low + 1 :] - self._units_before[low]
        static = self._static_before[low + 1 :] - self._static_before[low]
        best = np.full((len(units), self.problem.stages), np.iinfo(np.int64).max, dtype=np.int64)
        for table in self._caps:
            possible = ~(units[:, table.without_option] > 0).any(axis=1)
            saved = (units @ table.least_saved)[:, None] * self.in_flight[None, :]
            peak = self._constants + static[:, None] + table.reserved + saved
            best = np.where(possible[:, None], np.minimum(best, peak), best)
        return np.maximum(best, self._updating_from(low))

    def backward_bound_from(self, low: int) -> npt.NDArray[np.float64]:
        """Lower bound on the backward time of [low, high) on every stage, for every high > low: (highs, stages).

        Infinite where it does not fit, by the relaxation; `least_bytes_from` tells exactly.
        """
        units = self._units_before[low + 1 :] - self._units_before[low]
        static = self._static_before[low + 1 :] - self._static_before[low]
        plain = self._backward_before[low + 1 :] - self._backward_before[low]
        best = np.full((len(units), self.problem.stages), np.inf)
        for table in self._bound_caps:
            budget = (self.limits - self._constants - static[:, None] - table.reserved) // self.in_flight[None, :]
            best = np.minimum(best, table.extra_bound(units, budget))
        best = np.where(self._updating_from(low) > self.limits, np.inf, best)
        # Sums in another order may round differently; the bound must stay below.
        return np.asarray((plain[:, None] + best) / self.speeds * (1 - _SAME_TIME))

    def _updating_from(self, low: int) -> npt.NDArray[np.int64]:
        """Memory of [low, high) while weights are updated, for every high > low: (highs, 1)."""
        sums = self._updating_before[low + 1 :] - self._updating_before[low]
        return np.asarray(self.problem.stage_constant_bytes + sums[:, None])

    def choice(self, stage: int, low: int, high: int) -> StageChoice | None:
        """The best options of units [low, high) on a stage, or `None` if none fit."""
        place = (stage, low, high)
        if place not in self._by_place:
            # Groups with the same units of the same runs share one choice.
            key = (stage, self.segments(low, high))
            if key not in self._choices:
                self._choices[key] = self._choose(*key)
            self._by_place[place] = self._choices[key]
        return self._by_place[place]

    def times(self, splits: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Forward and backward times of the stages of splits, with the best options; infinite where none fit.

        Args:
            splits: first unit of each stage, then the number of units; shape (n, stages + 1).

        Returns:
            Both of shape (n, stages).
        """
        size = self.problem.units + 1
        if self._tables is None:
            self._tables = np.full((2, self.problem.stages * size**2), np.nan)
        places = (np.arange(self.problem.stages) * size + splits[:, :-1]) * size + splits[:, 1:]
        forward, backward = self._tables
        for place in np.unique(places[np.isnan(forward[places])]).tolist():
            stage, low, high = place // size**2, place // size % size, place % size
            choice = self.choice(stage, low, high)
            times = (np.inf, np.inf) if choice is None else (choice.forward_ms, choice.backward_ms)
            forward[place], backward[place] = times
        return forward[places], backward[places]

    def _choose(self, stage: int, segments: tuple[tuple[int, int], ...]) -> StageChoice | None:
        problem = self.problem
        static = int(self._constants[stage])
        static += sum(units * problem.runs[index].static_bytes for index, units in segments)
        in_flight, limit = int(self.in_flight[stage]), problem.memory_limit_bytes[stage]
        updating = update_peak(problem, segments)
        if updating > limit:
            return None
        best: tuple[float, int, tuple[tuple[int, ...], ...]] | None = None
        best_number = -1
        for bound, number in self._promising(segments, limit - static, in_flight):
            if best is not None and bound > best[0] + _SAME_TIME * (1 + best[0]):
                break
            table = self._caps[number]
            budget = (limit - static - table.reserved) // in_flight
            found = cheapest_choice(table, self._frontiers, segments, budget, float("inf") if best is None else best[0])
            if found is None:
                continue
            same = _SAME_TIME * (1 + found[0])
            # A larger cap must gain something: otherwise the smaller one gives the lower peak.
            if best is None or found[0] < best[0] - same or (number < best_number and found[0] <= best[0] + same):
                best, best_number = (found[0], static + table.reserved + in_flight * found[1], found[2]), number
        if best is None:
            return None
        forward = sum(units * problem.runs[index].forward_ms for index, units in segments)
        backward = sum(units * problem.runs[index].backward_ms for index, units in segments)
        speed = problem.speeds[stage]
        peak = max(best[1], updating)
        return StageChoice(forward / speed, (backward + best[0]) / speed, best[0], peak, best[2])

    def _promising(self, segments: tuple[tuple[int, int], ...], room: int, in_flight: int) -> list[tuple[float, int]]:
        """Caps that allow other options than smaller ones do, with the least extra time they may give, least first.

        Args:
            segments: the group of units.
            room: bytes left by what does not depend on options.
            in_flight: micro-batches in flight.
        """
        numbers = sorted(set().union(*(self._entries[index] for index, _ in segments)))
        if len(numbers) == 1 or len(segments) == 1:
            return [(0.0, number) for number in numbers]
        self._relaxations += len(numbers)
        bounds = (
            relaxed_extra(self._caps[number], segments, (room - self._caps[number].reserved) // in_flight)
            for number in numbers
        )
        return sorted((bound, number) for bound, number in zip(bounds, numbers, strict=True) if bound < float("inf"))

    def decision(self, bounds: tuple[int, ...]) -> Decision:
        """The decision in which stage s holds units bounds[s] to bounds[s + 1] - 1; every stage must fit."""
        problem = self.problem
        table = [[(0,) * len(run.options) for _ in range(problem.stages)] for run in problem.runs]
        for stage, (low, high) in enumerate(itertools.pairwise(bounds)):
            choice = self.choice(stage, low, high)
            assert choice is not None
            for (index, _), counts in zip(self.segments(low, high), choice.counts, strict=True):
                table[index][stage] = counts
        return Decision(tuple(tuple(row) for row in table))


def _before(values: list[float]) -> npt.NDArray[np.float64]:
    return np.concatenate(([0.0], np.cumsum(values)))
