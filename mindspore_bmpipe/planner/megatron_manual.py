"""The best Megatron-LM configuration a patient user finds by hand: every split and recompute setting of a grid.

Algorithm: exhaustive over the splits of `megatron_layouts` and, for each, over the recompute settings

- nothing;
- `--recompute-granularity full --recompute-method uniform`: every layer;
- `... --recompute-method block --recompute-num-layers n`: the first n layers of every virtual stage, n the same on all
  ranks;
- `--recompute-granularity selective`: every layer, once for each selective option that the table names.

Each is simulated exactly unless a path through the schedule already proves it slower than the best one found; the
fastest that fits is the answer, then the one with the least recomputation. So this is more than anybody does by hand.

Source: the arguments of Megatron-LM (NVIDIA/Megatron-LM, `megatron/training/arguments.py`) and Korthikanti et al.,
arXiv 2205.05198. Recompute policy: as above; `full` is the option of that name, selective those named `select`,
`selective` or `both`. Embedding and head are never recomputed. A table that names none of them leaves "nothing".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits, Status, needs_message, without_plan
from mindspore_bmpipe.planner.chunk_rules import ChunkRules
from mindspore_bmpipe.planner.even import even_bounds
from mindspore_bmpipe.planner.local_search import PathPool
from mindspore_bmpipe.planner.megatron_layouts import IntArray, LayoutCosts, Layouts
from mindspore_bmpipe.planner.recipes import (
    FULL,
    SELECTIVE,
    Recipe,
    judged,
    kept_recipe,
    named_recipe,
    runs_of_units,
    split_decision,
)
from mindspore_bmpipe.problem import Decision, Problem, recompute_ms, simulated_ms, stage_memory
from mindspore_bmpipe.transfers import split_transfers, transfer_table

NAME = "megatron_manual"

_BATCH = 16
"""Plans simulated at once."""
_SAME_TIME = 1e-9


@dataclass(frozen=True, eq=False)
class _Setting:
    """A recompute setting."""

    label: str
    recipe: Recipe
    costs: LayoutCosts
    layers: int
    """First layers of every virtual stage that are recomputed."""


@dataclass(frozen=True, eq=False)
class _Plan:
    """The best plan so far."""

    time_ms: float
    extra_ms: float
    setting: _Setting
    bounds: IntArray


def _settings(problem: Problem, most: int) -> Iterator[_Setting]:
    """Every recompute setting for virtual stages of at most so many layers, least recomputation first."""
    kept = kept_recipe(problem)
    yield _Setting("no recomputation", kept, LayoutCosts(problem, kept, kept), 0)
    for name in SELECTIVE:
        recipe = named_recipe(problem, (name,))
        if recipe is not None:
            yield _Setting(f"selective ({name})", recipe, LayoutCosts(problem, kept, recipe), problem.units)
    full = named_recipe(problem, FULL)
    if full is not None:
        costs = LayoutCosts(problem, kept, full)
        for layers in range(1, most):
            yield _Setting(f"full, block {layers}", full, costs, layers)
        yield _Setting("full, uniform", full, costs, problem.units)


class _Grid:
    """The search over one list of splits at a time."""

    def __init__(self, problem: Problem, clock: Clock) -> None:
        self.problem, self.clock = problem, clock
        self.pool = PathPool(problem)
        self._transfers = transfer_table(problem)
        self.best: _Plan | None = None
        self.closest: tuple[int, _Setting, IntArray] | None = None

    def drop_slow(self, splits: IntArray, costs: LayoutCosts) -> IntArray:
        """Splits that are not proved slower than the best plan even without recomputation."""
        if self.best is None or not len(splits):
            return splits
        kept = self.pool.bounds(*costs.times(splits, 0)) <= self.best.time_ms * (1 + _SAME_TIME)
        return splits[kept]

    def try_all(self, splits: IntArray, setting: _Setting) -> None:
        """Simulate the splits that fit with a setting, in the order of their lower bounds."""
        excess = setting.costs.excess_bytes(splits, setting.layers).max(axis=1)
        if len(excess) and (self.closest is None or excess.min() < self.closest[0]):
            nearest = int(np.argmin(excess))
            self.closest = (int(excess[nearest]), setting, splits[nearest])
        splits = splits[excess <= 0]
        if not len(splits):
            return
        forward, backward, weight = setting.costs.times(splits, setting.layers)
        left = np.arange(len(splits))
        while left.size and not self.clock.expired():
            lower = self.pool.bounds(forward[left], backward[left], None if weight is None else weight[left])
            order = np.argsort(lower, kind="stable")
            if self.best is not None:
                order = order[lower[order] <= self.best.time_ms * (1 + _SAME_TIME)]
            batch, left = left[order[:_BATCH]], left[order[_BATCH:]]
            if not batch.size:
                return
            parts = None if weight is None else weight[batch]
            transfers = split_transfers(self._transfers, splits[batch])
            totals = simulated_ms(self.problem, forward[batch], backward[batch], parts, transfers)
            for place, total in zip(batch.tolist(), totals.tolist(), strict=True):
                self._offer(float(total), setting, splits[place])
            # The longest path of the best of them proves most of the others slower.
            top = batch[np.argmin(totals)]
            self.pool.separate(forward[top], backward[top], None if weight is None else weight[top])

    def _offer(self, total: float, setting: _Setting, bounds: IntArray) -> None:
        if self.best is not None and total > self.best.time_ms * (1 + _SAME_TIME):
            return
        extra = recompute_ms(self.problem, decision_of(self.problem, setting, bounds))
        if self.best is None or total < self.best.time_ms * (1 - _SAME_TIME) or extra < self.best.extra_ms:
            time = total if self.best is None else min(total, self.best.time_ms)
            self.best = _Plan(time, extra, setting, bounds)


def decision_of(problem: Problem, setting: _Setting, bounds: IntArray) -> Decision:
    """The decision of a split and a recompute setting."""
    unit_runs, kept = runs_of_units(problem), kept_recipe(problem)
    options = [kept[run] for run in unit_runs]
    start, stop = setting.costs.recomputed_range(bounds[None, :], setting.layers)
    for low, high in zip(start[0].tolist(), stop[0].tolist(), strict=True):
        for unit in range(low, high):
            options[unit] = setting.recipe[unit_runs[unit]]
    return split_decision(problem, bounds.tolist(), options)


def plan(problem: Problem, limits: SolveLimits) -> Solution:
    """The plan above; infeasible if no point of the grid fits."""
    clock = Clock(limits)
    rules, layouts, grid = ChunkRules(problem), Layouts(problem), _Grid(problem, clock)
    even = even_bounds(problem)
    if even is None:
        return without_plan(NAME, Status.INFEASIBLE, clock, needs_message(problem, None))
    first = np.array([even], dtype=np.int64)
    for setting in _settings(problem, int(np.diff(first).max())):
        grid.try_all(first, setting)
    costs = LayoutCosts(problem, kept_recipe(problem), kept_recipe(problem))
    splits = layouts.bounds(*_most_layers(problem, layouts, costs, grid))
    splits = splits[rules.allowed(splits)] if len(splits) else splits
    splits = grid.drop_slow(splits, costs)
    most = int(np.diff(splits).max()) if len(splits) else 0
    for setting in _settings(problem, most):
        splits = grid.drop_slow(splits, costs)
        grid.try_all(splits, setting)
    if grid.best is not None:
        found = grid.best
        message = f"best of its grid: {_layout_text(layouts, found.bounds)}, {found.setting.label}"
        if clock.expired():
            message += f"; the wall clock ({limits.time_limit_s:g} s) ended the search"
        return judged(NAME, problem, decision_of(problem, found.setting, found.bounds), clock, message)
    assert grid.closest is not None
    excess, setting, bounds = grid.closest
    if excess <= 0:
        # It fits, but the wall clock ended the search before it was simulated.
        message = f"the first of its grid that fits; the wall clock ({limits.time_limit_s:g} s) ended the search"
        return judged(NAME, problem, decision_of(problem, setting, bounds), clock, message)
    needed = tuple(peak for _, peak in stage_memory(problem, decision_of(problem, setting, bounds)))
    message = f"no layout of its grid fits: {needs_message(problem, needed)}"
    return without_plan(NAME, Status.INFEASIBLE, clock, message, needed)


def _most_layers(problem: Problem, layouts: Layouts, costs: LayoutCosts, grid: _Grid) -> tuple[int, int]:
    """Layers on the first and the last virtual stage above which they alone take longer than the best plan."""
    if grid.best is None or layouts.size == 1:
        return layouts.layers, layouts.layers
    run_of_unit = runs_of_units(problem)
    busy = [problem.runs[run].forward_ms + problem.runs[run].backward_ms for run in run_of_unit]
    fastest = max(problem.speeds)
    room = grid.best.time_ms / problem.micro_batches * fastest
    ends = (busy, busy[::-1])
    beside = (layouts.before, layouts.after)
    most = []
    for times, count in zip(ends, beside, strict=True):
        until = np.cumsum(times)[count:]
        most.append(min(layouts.layers, int(np.searchsorted(until, room, side="right")) + 1))
    return most[0], most[1]


def _layout_text(layouts: Layouts, bounds: IntArray) -> str:
    """Layers of the virtual stages, equal neighbours together: `0, 42 of 2, 4 of 3, 0`."""
    counts = np.diff(bounds)
    counts[0] -= layouts.before
    counts[-1] -= layouts.after
    parts = []
    for count, equal in itertools.groupby(counts.tolist()):
        times = len(list(equal))
        parts.append(str(count) if times == 1 else f"{times} of {count}")
    return f"layers {', '.join(parts)}"
