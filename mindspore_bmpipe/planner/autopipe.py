"""AutoPipe: the min-max split, then moves of units around the stage that the critical path runs through.

Algorithm: (1) dynamic program for the split whose slowest stage is fastest. (2) A recurrence over the starts of a 1F1B
step of m = 2p micro-batches without transfers gives its time and its critical stage: the last one that never waits
between its first backward and its last forward. (3) Breadth first from the first split: units before the critical stage
are split anew after the critical stage has given its first unit to them, and after it has given its last unit to the
next stage if that does not move the critical stage towards the end; besides, units behind the critical stage are passed
forward where the stages there finish late for its cool-down. The best split seen by the recurrence is the answer.

Source: Liu et al., IEEE CLUSTER 2022, doi 10.1109/CLUSTER51413.2022.00042, and the public code in Merak
(HPDL-Group/Merak, `Merak/cpp/autopipe.cpp`). Slicing of micro-batches, the paper's other part, changes the schedule and
is left out. Recompute policy: the partitioner has none (Merak hands it backward times that include recomputation);
added here: one recipe for all units, the first that fits, least recomputation first, its time part of the backward.
Memory does not enter the search, nor do pins and forbidden cuts. Times are rounded to nanoseconds, because the critical
stage is found by comparing times for equality.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits
from mindspore_bmpipe.planner.recipe_groups import require_listable
from mindspore_bmpipe.planner.recipes import judged, recipe_decision, runs_of_units, uniform_recipes
from mindspore_bmpipe.planner.splits import Bounds
from mindspore_bmpipe.problem import Problem

NAME = "autopipe"

_PER_MS = 1_000_000


@dataclass(frozen=True)
class _Units:
    """Integer times of units, and the min-max table of prefixes."""

    forward: Sequence[int]
    backward: Sequence[int]
    before: Sequence[int]
    """Forward and backward of the units before each."""
    slowest: Sequence[Sequence[float]]
    """[units][stages]: the slowest stage of the best split of that many first units."""


def make_units(forward: Sequence[int], backward: Sequence[int], stages: int) -> _Units:
    """The min-max table of dynamic programming."""
    before = [0, *itertools.accumulate(f + b for f, b in zip(forward, backward, strict=True))]
    size = len(before)
    slowest = [[float("inf")] * (stages + 1) for _ in range(size)]
    slowest[0][0] = 0
    for high in range(1, size):
        for stage in range(1, min(high, stages) + 1):
            slowest[high][stage] = min(
                max(slowest[low][stage - 1], before[high] - before[low]) for low in range(stage - 1, high)
            )
    return _Units(forward, backward, before, slowest)


def balanced(units: _Units, high: int, stages: int) -> Bounds:
    """A min-max split of the first units; of several, the one with the largest last stage, and so on forwards."""
    bounds = [high]
    for stage in range(stages, 0, -1):
        end = bounds[-1]
        bounds.append(
            next(
                low
                for low in range(stage - 1, end)
                if max(units.slowest[low][stage - 1], units.before[end] - units.before[low])
                == units.slowest[end][stage]
            )
        )
    return tuple(reversed(bounds))


def score(units: _Units, bounds: Bounds) -> tuple[float, int]:
    """Time of a step of 2p micro-batches and its critical stage; infinite and -1 if no stage never waits."""
    stages = len(bounds) - 1
    forward = [sum(units.forward[low:high]) for low, high in itertools.pairwise(bounds)]
    backward = [sum(units.backward[low:high]) for low, high in itertools.pairwise(bounds)]
    # Starts on each stage, counted from its last warm-up forward, which is number 0; stage s has p + s more of each.
    starts_f: list[list[float]] = [[float("-inf")] for _ in range(stages)]
    starts_b: list[list[float]] = []
    total = sum(forward)
    for stage in range(stages):
        starts_b.append([total + sum(backward[stage + 1 :])])
    for number in range(1, 2 * stages):
        for stage in range(stages):
            if number <= stages + stage:
                arrives = starts_f[stage - 1][number - 1] + forward[stage - 1] if stage else 0
                starts_f[stage].append(max(arrives, starts_b[stage][number - 1] + backward[stage]))
        for stage in reversed(range(stages)):
            if number <= stages + stage:
                arrives = starts_b[stage + 1][number] + backward[stage + 1] if stage < stages - 1 else 0
                starts_b[stage].append(max(arrives, starts_f[stage][number] + forward[stage]))
    for stage in reversed(range(stages)):
        if all(
            starts_f[stage][number] == starts_b[stage][number - 1] + backward[stage]
            and starts_b[stage][number] == starts_f[stage][number] + forward[stage]
            for number in range(1, len(starts_f[stage]))
        ):
            return _cool_down(forward, backward, stage, starts_f[stage][-1]) + sum(backward[: stage + 1]), stage
    return float("inf"), -1


def _cool_down(forward: Sequence[int], backward: Sequence[int], critical: int, last_forward: float) -> float:
    """Start of the critical stage's last backward, from the start of its last forward.

    Row r is stage critical + r, column c the backward that is the c-th before the last one of the critical stage.
    """
    size = len(forward) - critical
    table = [[0.0] * size for _ in range(size)]
    arrival = last_forward
    for row in range(size):
        arrival += forward[critical + row]
        table[row][size - 1 - row] = arrival
    for column in range(size - 2, -1, -1):
        for row in range(size - column - 2, -1, -1):
            own = table[row][column + 1] + backward[critical + row]
            table[row][column] = max(own, table[row + 1][column] + backward[critical + row + 1])
            if row:
                table[row][column] = max(table[row][column], table[row - 1][column + 1])
    return table[0][0]


def _passed_forward(units: _Units, bounds: Bounds, critical: int) -> list[Bounds]:
    """Splits seen while units behind the critical stage are passed forward, the given one first."""
    stages = len(bounds) - 1
    seen, current, adjusted, gap = [], list(bounds), critical + 1, 0.0

    def busy(stage: int) -> int:
        return units.before[current[stage + 1]] - units.before[current[stage]]

    while True:
        moved_critical = score(units, tuple(current))[1] != critical
        if adjusted == stages or not moved_critical:
            seen.append(tuple(current))
        if adjusted == stages or moved_critical:
            return seen
        cool_down = sum(units.backward[current[critical] : current[critical + 1]])
        late = sum(busy(stage) for stage in range(critical + 1, adjusted + 1))
        if late <= (adjusted - critical) * cool_down + gap:
            adjusted += 1
            continue
        for stage in range(critical + 1, adjusted):
            first = current[stage + 1]
            moved = units.forward[first] + units.backward[first]
            if current[stage + 2] - first > 1 and busy(critical) > busy(stage) + moved:
                late = sum(busy(earlier) for earlier in range(critical + 1, stage + 1))
                gap += max(0.0, late - ((stage - critical) * cool_down + gap))
                current[stage + 1] += 1
                adjusted = stage + 1
                break
        else:
            return seen


def _next_splits(units: _Units, bounds: Bounds, critical: int) -> list[Bounds]:
    """Splits in which the critical stage has given a unit to the stages before it, or to the next one."""
    if critical < 1:
        return []
    low, high = bounds[critical], bounds[critical + 1]
    found = []
    if high - low > 1:
        found.append((*balanced(units, low + 1, critical), *bounds[critical + 1 :]))
    if critical < len(bounds) - 2 and high - 1 > critical:
        back = (*balanced(units, high - 1, critical + 1), *bounds[critical + 2 :])
        if score(units, back)[1] <= critical:
            found.append(back)
    return found


def partition(forward: Sequence[int], backward: Sequence[int], stages: int, clock: Clock) -> tuple[Bounds, float]:
    """The best split seen and its time by the recurrence; stops early if the clock runs out."""
    units = make_units(forward, backward, stages)
    first = balanced(units, len(forward), stages)
    best, best_time = first, float("inf")
    waiting, known = deque([first]), set()
    while waiting and not clock.expired():
        current = waiting.popleft()
        _, critical = score(units, current)
        for split in _passed_forward(units, current, critical) if critical >= 0 else [current]:
            time = score(units, split)[0]
            if time < best_time:
                best, best_time = split, time
        for split in _next_splits(units, current, critical):
            if split not in known:
                known.add(split)
                waiting.append(split)
    return best, best_time


def plan(problem: Problem, limits: SolveLimits) -> Solution:
    """The plan above.

    Raises:
        InputError: several chunks per stage, or too many groups.
    """
    clock = Clock(limits)
    require_listable(problem, NAME)
    run_of_unit = runs_of_units(problem)
    answers = []
    for recipe in uniform_recipes(problem):
        forward = [round(problem.runs[run].forward_ms * _PER_MS) for run in run_of_unit]
        backward = [
            round((problem.runs[run].backward_ms + problem.runs[run].options[recipe[run]].extra_backward_ms) * _PER_MS)
            for run in run_of_unit
        ]
        bounds, _ = partition(forward, backward, problem.stages, clock)
        message = "min-max split with moves around the critical stage, one recipe for all units"
        if clock.expired():
            message += f"; the wall clock ({limits.time_limit_s:g} s) ended the search"
        answers.append(judged(NAME, problem, recipe_decision(problem, bounds, recipe), clock, message))
        if answers[-1].decision is not None:
            return answers[-1]
    return answers[-1]
