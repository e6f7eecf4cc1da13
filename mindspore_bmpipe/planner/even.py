"""Even split with one recompute recipe: the plan a careful user writes by hand, and the simplest baseline.

With several chunks, what is said of stages holds for virtual stages.

Split: the single units at both ends of the network (embedding, head) ride with the first and the last stage; the units
between them are dealt out by number, as evenly as possible, and where they do not divide the last stages get one more,
because they hold fewer micro-batches in flight. Where pins, forbidden cuts or trainable units forbid that, the allowed
split with the least sum of squared deviations from even is taken.

Recompute: one recipe for the whole network, the one with the least total recomputation with which every stage fits. A
recipe is the name of an option; units without that option, and units not recomputed, take their option with the least
extra time. Each stage recomputes its first n units, with the smallest n that fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits, Status, needs_message, with_plan, without_plan
from mindspore_bmpipe.planner.chunk_rules import ChunkRules
from mindspore_bmpipe.planner.recipes import judged, kept_option, recipe_decision, required_recipe, uniform_recipes
from mindspore_bmpipe.planner.splits import Bounds, SplitRules, best_split
from mindspore_bmpipe.problem import (
    Decision,
    Problem,
    schedule_of,
    stage_constants,
    update_peak,
)
from mindspore_bmpipe.schedule import in_flight_rows

NAME = "even"


def end_units(problem: Problem) -> tuple[int, int]:
    """Single units at the start and at the end that ride along; none if too few units would be left between them."""
    counts = [run.count for run in problem.runs]
    repeated = [index for index, count in enumerate(counts) if count > 1]
    if not repeated:
        return 0, 0
    before, after = repeated[0], len(counts) - 1 - repeated[-1]
    return (before, after) if problem.units - before - after >= problem.virtual_stages else (0, 0)


def _even_virtual_split(problem: Problem) -> Bounds | None:
    """The split of the policy above for several chunks."""
    before, after = end_units(problem)
    goals = np.full(problem.virtual_stages, (problem.units - before - after) / problem.virtual_stages)
    goals[0] += before
    goals[-1] += after
    boundary = np.arange(problem.units + 1, dtype=np.float64)
    return ChunkRules(problem).nearest_split(boundary[None, :] - boundary[:, None], goals)


def even_split(problem: Problem, rules: SplitRules) -> Bounds | None:
    """The split of the policy above; `None` if the rules allow no split at all."""
    before, after = end_units(problem)
    target = (problem.units - before - after) / problem.stages
    costs = np.full((problem.stages, problem.units + 1, problem.units + 1), np.inf)
    for low in range(problem.units):
        for high in range(low + 1, problem.units + 1):
            for stage in rules.stages_of(low, high):
                size = high - low - (before if stage == 0 else 0) - (after if stage == problem.stages - 1 else 0)
                costs[stage, low, high] = (size - target) ** 2
    return best_split(costs, additive=True)[1]


def _stage_counts(
    problem: Problem, stage: int, units: list[list[int]], recipe: tuple[int, ...]
) -> tuple[list[list[list[int]]], int]:
    """Counts [chunk][run][option] of one stage and its peak: the fewest first units that fit, else the lowest peak.

    Args:
        problem: the problem.
        stage: the stage.
        units: run of each unit of each of its chunks.
        recipe: option of each run when recomputed.
    """
    rows = in_flight_rows(schedule_of(problem))[stage]
    static = stage_constants(problem)[stage] + sum(problem.runs[run].static_bytes for chunk in units for run in chunk)
    updating = update_peak(problem, ((run, 1) for chunk in units for run in chunk))
    best: tuple[list[list[list[int]]], int] | None = None
    for recomputed in range(sum(map(len, units)) + 1):
        counts = [[[0] * len(run.options) for run in problem.runs] for _ in units]
        saved, working_set, position = [0] * len(units), 0, 0
        for chunk, held in enumerate(units):
            for run in held:
                index = recipe[run] if position < recomputed else kept_option(problem.runs[run])
                counts[chunk][run][index] += 1
                saved[chunk] += problem.runs[run].options[index].saved_bytes
                working_set = max(working_set, problem.runs[run].options[index].working_set_bytes)
                position += 1
        in_flight = max(sum(count * size for count, size in zip(row, saved, strict=True)) for row in rows)
        peak = max(static + in_flight + working_set, updating)
        if peak <= problem.memory_limit_bytes[stage]:
            return counts, peak
        if best is None or peak < best[1]:
            best = (counts, peak)
    assert best is not None
    return best


def even_bounds(problem: Problem) -> Bounds | None:
    """The split of the policy above for any number of chunks; `None` if the rules allow no split at all."""
    return even_split(problem, SplitRules(problem)) if problem.chunks == 1 else _even_virtual_split(problem)


def even_recipe_plan(
    name: str, problem: Problem, limits: SolveLimits, options: Sequence[str], message: str
) -> Solution:
    """The even split with one recipe on every unit; infeasible if it does not fit.

    Args:
        name: planner.
        problem: the problem.
        limits: of the planner.
        options: names of the recipe's option, the first that any unit has.
        message: what the plan is, for people.

    Raises:
        InputError: no unit has one of these options.
    """
    clock = Clock(limits)
    recipe = required_recipe(problem, options, name)
    bounds = even_bounds(problem)
    if bounds is None:
        return without_plan(name, Status.INFEASIBLE, clock, needs_message(problem, None))
    return judged(name, problem, recipe_decision(problem, bounds, recipe), clock, message)


def plan(problem: Problem, limits: SolveLimits) -> Solution:
    """The plan of the policy above; infeasible means that no recipe makes this split fit."""
    clock = Clock(limits)
    bounds = even_bounds(problem)
    if bounds is None:
        return without_plan(NAME, Status.INFEASIBLE, clock, needs_message(problem, None))
    run_of_unit = [index for index, run in enumerate(problem.runs) for _ in range(run.count)]
    groups = [run_of_unit[low:high] for low, high in itertools.pairwise(bounds)]
    schedule = schedule_of(problem)
    closest: tuple[int, tuple[int, ...]] | None = None
    for recipe in uniform_recipes(problem):
        stages = [
            _stage_counts(problem, stage, [groups[virtual] for virtual in virtuals], recipe)
            for stage, virtuals in enumerate(schedule.virtual_of_chunk)
        ]
        peaks = tuple(peak for _, peak in stages)
        excess = max(peak - limit for peak, limit in zip(peaks, problem.memory_limit_bytes, strict=True))
        if excess <= 0:
            chunk_of_virtual = schedule.chunk_of_virtual
            by_virtual = [
                stages[stage][0][chunk_of_virtual[virtual]] for virtual, stage in enumerate(schedule.stage_of_virtual)
            ]
            counts = tuple(tuple(tuple(held[run]) for held in by_virtual) for run in range(len(problem.runs)))
            return with_plan(NAME, problem, Decision(counts), clock, None, False, "even split, not searched further")
        if closest is None or excess < closest[0]:
            closest = (excess, peaks)
    assert closest is not None
    message = f"the even split {needs_message(problem, closest[1])}"
    return without_plan(NAME, Status.INFEASIBLE, clock, message, closest[1])
