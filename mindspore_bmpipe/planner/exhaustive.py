"""Every decision, one by one: the oracle the other planners are tested against."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product
from math import comb, prod

import numpy as np

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner.base import (
    Clock,
    Solution,
    SolveLimits,
    Status,
    needs_message,
    with_plan,
    without_plan,
)
from mindspore_bmpipe.problem import (
    Decision,
    Problem,
    check,
    recompute_ms,
    schedule_of,
    simulated_ms,
    stage_memory,
    virtual_stage_times,
    virtual_stage_weights,
)
from mindspore_bmpipe.transfers import decision_transfers

NAME = "exhaustive"

MAX_DECISIONS = 300_000
"""Decisions it accepts to look at."""

_BATCH = 4096
"""Decisions timed in one sweep."""


def _splits(problem: Problem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Units of each run in each virtual stage, [virtual stage][run], for every way to cut the network."""
    run_of_unit = [index for index, run in enumerate(problem.runs) for _ in range(run.count)]
    for cuts in combinations(range(1, problem.units), problem.virtual_stages - 1):
        bounds = (0, *cuts, problem.units)
        yield tuple(
            tuple(run_of_unit[low:high].count(index) for index in range(len(problem.runs)))
            for low, high in pairwise(bounds)
        )


def _ways(units: int, options: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each of some equal units one of the options."""
    if options == 1:
        yield (units,)
        return
    for first in range(units + 1):
        for rest in _ways(units - first, options - 1):
            yield (first, *rest)


def count_decisions(problem: Problem, stop_above: int) -> int:
    """Number of decisions, or some number above `stop_above` if there are more."""
    if comb(problem.units - 1, problem.virtual_stages - 1) > stop_above:
        return comb(problem.units - 1, problem.virtual_stages - 1)
    total = 0
    for split in _splits(problem):
        total += prod(
            comb(units + len(run.options) - 1, len(run.options) - 1)
            for cell in split
            for units, run in zip(cell, problem.runs, strict=True)
        )
        if total > stop_above:
            break
    return total


def _stage_ways(problem: Problem, split: tuple[tuple[int, ...], ...], stage: int) -> list[tuple[int, Decision]]:
    """(peak bytes, decision that places only this stage's units) for every choice of options on one stage."""
    virtual_stages = schedule_of(problem).virtual_of_chunk[stage]
    cells = [
        list(
            product(*(_ways(units, len(run.options)) for units, run in zip(split[virtual], problem.runs, strict=True)))
        )
        for virtual in virtual_stages
    ]
    empty = tuple((0,) * len(run.options) for run in problem.runs)
    ways = []
    for chosen in product(*cells):
        columns = [empty] * problem.virtual_stages
        for virtual, cell in zip(virtual_stages, chosen, strict=True):
            columns[virtual] = cell
        decision = Decision(tuple(tuple(column[index] for column in columns) for index in range(len(problem.runs))))
        ways.append((stage_memory(problem, decision)[stage][1], decision))
    return ways


def _added(decisions: tuple[Decision, ...]) -> Decision:
    """The decision of all stages, from decisions of one stage each."""
    by_run = zip(*(decision.counts for decision in decisions), strict=True)
    return Decision(
        tuple(
            tuple(tuple(map(sum, zip(*cells, strict=True))) for cells in zip(*per_stage, strict=True))
            for per_stage in by_run
        )
    )


class _Search:
    """Best plan so far, and the plan that exceeds the limits least."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.best: tuple[tuple[float, float, int], Decision] | None = None
        self.closest: tuple[int, tuple[int, ...]] | None = None
        self._waiting: list[Decision] = []

    def add_split(self, split: tuple[tuple[int, ...], ...]) -> None:
        """Look at every decision with these units per virtual stage."""
        problem = self.problem
        ways = [_stage_ways(problem, split, stage) for stage in range(problem.stages)]
        first = _added(tuple(choices[0][1] for choices in ways))
        if any(violation.kind != "memory" for violation in check(problem, first)):
            return
        peaks = tuple(min(peak for peak, _ in choices) for choices in ways)
        excess = max(peak - limit for peak, limit in zip(peaks, problem.memory_limit_bytes, strict=True))
        if self.closest is None or excess < self.closest[0]:
            self.closest = (excess, peaks)
        fitting = [
            [decision for peak, decision in choices if peak <= problem.memory_limit_bytes[stage]]
            for stage, choices in enumerate(ways)
        ]
        for parts in product(*fitting):
            self._waiting.append(_added(parts))
            if len(self._waiting) >= _BATCH:
                self.flush()

    def flush(self) -> None:
        """Time the decisions that are waiting."""
        if not self._waiting:
            return
        problem = self.problem
        times = [virtual_stage_times(problem, decision) for decision in self._waiting]
        forward, backward = [pair[0] for pair in times], [pair[1] for pair in times]
        weights = [virtual_stage_weights(problem, decision) for decision in self._waiting]
        split = [weight for weight in weights if weight is not None]
        transfers = np.array([decision_transfers(problem, decision.counts) for decision in self._waiting])
        totals = simulated_ms(problem, forward, backward, split or None, transfers)
        for total, decision in zip(totals.tolist(), self._waiting, strict=True):
            if self.best is None or total <= self.best[0][0]:
                peak = max(peak for _, peak in stage_memory(problem, decision))
                key = (total, recompute_ms(problem, decision), peak)
                if self.best is None or key < self.best[0]:
                    self.best = (key, decision)
        self._waiting.clear()


def plan(problem: Problem, limits: SolveLimits) -> Solution:
    """The best of all decisions by step time, then recomputation, then highest peak.

    Raises:
        InputError: there are more than `MAX_DECISIONS` decisions.
    """
    size = count_decisions(problem, MAX_DECISIONS)
    if size > MAX_DECISIONS:
        raise InputError(
            f"planner {NAME}: the problem has more than {MAX_DECISIONS} decisions (at least {size}); "
            "use planner bmpipe, or a smaller problem"
        )
    clock = Clock(limits)
    search = _Search(problem)
    complete = True
    for split in _splits(problem):
        if clock.expired():
            complete = False
            break
        search.add_split(split)
    search.flush()
    if search.best is not None:
        bound = search.best[0][0] if complete else None
        message = "" if complete else clock.message(False)
        return with_plan(NAME, problem, search.best[1], clock, bound, complete, message)
    if not complete:
        return without_plan(
            NAME, Status.UNKNOWN, clock, "the time limit ended the enumeration before any plan was found"
        )
    needed = search.closest[1] if search.closest else None
    return without_plan(NAME, Status.INFEASIBLE, clock, needs_message(problem, needed), needed)
