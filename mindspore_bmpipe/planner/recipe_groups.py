"""Groups of units: what methods that look for cuts choose from, most of them with one recipe for all units.

One chunk per stage. A group is allowed on a stage if pins, forbidden cuts and trainable units allow it and it fits in
the stage's memory, counted exactly; methods published with a coarser memory model are given the exact one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner.base import Clock, Solution, Status, needs_message, without_plan
from mindspore_bmpipe.planner.recipes import (
    Recipe,
    judged,
    one_chunk_only,
    recipe_decision,
    uniform_recipes,
    with_recipe,
)
from mindspore_bmpipe.planner.splits import MAX_GROUPS, Bounds, Groups, SplitRules, best_split
from mindspore_bmpipe.planner.stage_options import StageOptions
from mindspore_bmpipe.problem import Problem, stage_memory


@dataclass(frozen=True, eq=False)
class RecipeGroups:
    """All groups [low, high) on all stages, with one recipe."""

    recipe: Recipe
    """Option of each run."""
    forward_ms: npt.NDArray[np.float64]
    """Forward time, shape (stages, units + 1, units + 1); infinite where not allowed or too large."""
    backward_ms: npt.NDArray[np.float64]
    """Backward time with recomputation, the same."""
    excess_bytes: npt.NDArray[np.float64]
    """Peak minus limit; infinite where not allowed."""

    @property
    def stage_ms(self) -> npt.NDArray[np.float64]:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


def require_listable(problem: Problem, planner: str) -> None:
    """Refuse several chunks, and networks whose groups are too many to list.

    Raises:
        InputError: one of these.
    """
    one_chunk_only(problem, planner)
    size = problem.stages * (problem.units + 1) ** 2
    if size > MAX_GROUPS:
        raise InputError(
            f"planner {planner}: {problem.units} units on {problem.stages} stages make a table of {size} groups, more "
            f"than {MAX_GROUPS}; merge units of the layer table"
        )


def recipe_groups(problem: Problem, recipe: Recipe) -> RecipeGroups:
    """The groups of one recipe."""
    groups = Groups(StageOptions(with_recipe(problem, recipe)), SplitRules(problem))
    fits = np.isfinite(groups.backward_bound_ms)
    forward = np.where(fits, groups.forward_ms, np.inf)
    # With one option per unit the bound on the backward is the backward.
    return RecipeGroups(recipe, forward, groups.backward_bound_ms, groups.excess_bytes)


def fitting_split(name: str, options: StageOptions, groups: Groups, clock: Clock) -> Bounds | Solution:
    """The split that leaves most room in memory, or the infeasible answer if not even that fits with any options."""
    problem = options.problem
    excess, closest = best_split(groups.excess_bytes, additive=False)
    if closest is None:
        return without_plan(name, Status.INFEASIBLE, clock, needs_message(problem, None))
    if excess <= 0:
        return closest
    needed = tuple(
        int(options.least_bytes_from(low)[high - low - 1, stage])
        for stage, (low, high) in enumerate(itertools.pairwise(closest))
    )
    return without_plan(name, Status.INFEASIBLE, clock, needs_message(problem, needed), needed)


def every_recipe(problem: Problem) -> Iterator[RecipeGroups]:
    """The groups of every uniform recipe, the one with the least recomputation first."""
    for recipe in uniform_recipes(problem):
        yield recipe_groups(problem, recipe)


def best_recipe_split(
    name: str,
    problem: Problem,
    clock: Clock,
    cut: Callable[[RecipeGroups], tuple[float, Bounds | None]],
    message: str,
) -> Solution:
    """The plan of the recipe whose split has the least value, the first of equals.

    Args:
        name: planner.
        problem: one chunk per stage.
        clock: of the planner.
        cut: the least value of a split of these groups, and the split; `None` if there is none.
        message: what the plan is, for people.
    """
    best: tuple[float, Bounds, Recipe] | None = None
    closest: tuple[float, Bounds, Recipe] | None = None
    for groups in every_recipe(problem):
        value, bounds = cut(groups)
        if bounds is not None and (best is None or value < best[0]):
            best = (value, bounds, groups.recipe)
        excess, split = best_split(groups.excess_bytes, additive=False)
        if split is not None and (closest is None or excess < closest[0]):
            closest = (excess, split, groups.recipe)
    if best is not None:
        return judged(name, problem, recipe_decision(problem, best[1], best[2]), clock, message)
    if closest is None:
        return without_plan(name, Status.INFEASIBLE, clock, needs_message(problem, None))
    needed = tuple(peak for _, peak in stage_memory(problem, recipe_decision(problem, closest[1], closest[2])))
    text = f"no split with one recipe for all units fits: {needs_message(problem, needed)}"
    return without_plan(name, Status.INFEASIBLE, clock, text, needed)
