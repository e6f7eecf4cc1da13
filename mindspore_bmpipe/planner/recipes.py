"""Recompute recipes as other systems know them, and decisions made of a split and one option per unit.

A recipe gives one option to each run. Systems that know "recompute everything" mean the option named `full`, those that
know "selective" the one named `select`, `selective` or `both`, the first of these that a table names. Units without the
named option, such as embeddings, keep what they have: their option with the least extra time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner.base import Clock, Solution, Status, needs_message, with_plan, without_plan
from mindspore_bmpipe.problem import Decision, Problem, Run, check, stage_memory

FULL = ("full",)
"""Names of the option that recomputes a whole unit."""
SELECTIVE = ("select", "selective", "both")
"""Names of the options that recompute part of a unit, most wanted first."""

Recipe = tuple[int, ...]
"""Index of an option for each run."""


def kept_option(run: Run) -> int:
    """Option of a unit that is not recomputed."""
    return min(
        range(len(run.options)),
        key=lambda index: (run.options[index].extra_backward_ms, run.options[index].saved_bytes),
    )


def kept_recipe(problem: Problem) -> Recipe:
    """The recipe that recomputes nothing."""
    return tuple(kept_option(run) for run in problem.runs)


def named_recipe(problem: Problem, names: Sequence[str]) -> Recipe | None:
    """The recipe of the first name that any run has; `None` if no run has one of them."""
    for name in names:
        indices = [
            next((i for i, option in enumerate(run.options) if option.name == name), None) for run in problem.runs
        ]
        if any(index is not None for index in indices):
            return tuple(
                kept_option(run) if index is None else index for run, index in zip(problem.runs, indices, strict=True)
            )
    return None


def required_recipe(problem: Problem, names: Sequence[str], planner: str) -> Recipe:
    """`named_recipe`, or an error that says which names are missing.

    Raises:
        InputError: no run has an option of one of these names.
    """
    recipe = named_recipe(problem, names)
    if recipe is None:
        known = dict.fromkeys(option.name for run in problem.runs for option in run.options)
        raise InputError(
            f"planner {planner}: no unit has an option named {' or '.join(names)}, which it recomputes with; "
            f"the options are {', '.join(known)}"
        )
    return recipe


def uniform_recipes(problem: Problem) -> list[Recipe]:
    """One recipe for each option name, the one with the least recomputation in total first."""
    names = dict.fromkeys(option.name for run in problem.runs for option in run.options)
    recipes = {named_recipe(problem, (name,)) for name in names} | {kept_recipe(problem)}

    def total(recipe: Recipe) -> float:
        return sum(
            run.count * run.options[index].extra_backward_ms for run, index in zip(problem.runs, recipe, strict=True)
        )

    return sorted((recipe for recipe in recipes if recipe is not None), key=lambda recipe: (total(recipe), recipe))


def with_options(problem: Problem, allowed: Sequence[Sequence[int]]) -> Problem:
    """The problem with only these options of each run, in this order."""
    runs = tuple(
        replace(run, options=tuple(run.options[index] for index in indices))
        for run, indices in zip(problem.runs, allowed, strict=True)
    )
    return replace(problem, runs=runs)


def with_recipe(problem: Problem, recipe: Recipe) -> Problem:
    """The problem in which every unit has only its option of a recipe."""
    return with_options(problem, [(index,) for index in recipe])


def original_decision(problem: Problem, allowed: Sequence[Sequence[int]], decision: Decision) -> Decision:
    """A decision of `with_options(problem, allowed)` as one of the problem itself."""
    counts = []
    for run, indices, placed in zip(problem.runs, allowed, decision.counts, strict=True):
        rows = []
        for by_option in placed:
            row = [0] * len(run.options)
            for index, count in zip(indices, by_option, strict=True):
                row[index] += count
            rows.append(tuple(row))
        counts.append(tuple(rows))
    return Decision(tuple(counts))


def runs_of_units(problem: Problem) -> list[int]:
    """Run of each unit."""
    return [index for index, run in enumerate(problem.runs) for _ in range(run.count)]


def split_decision(problem: Problem, bounds: Sequence[int], options: Sequence[int]) -> Decision:
    """The decision that cuts the network at bounds, first unit of each virtual stage and the number of units.

    Args:
        problem: the problem.
        bounds: K + 1 entries, not decreasing.
        options: option of each unit.
    """
    table = [[[0] * len(run.options) for _ in range(problem.virtual_stages)] for run in problem.runs]
    unit_runs = runs_of_units(problem)
    for virtual, (low, high) in enumerate(itertools.pairwise(bounds)):
        for unit in range(low, high):
            table[unit_runs[unit]][virtual][options[unit]] += 1
    return Decision(tuple(tuple(tuple(row) for row in placed) for placed in table))


def recipe_decision(problem: Problem, bounds: Sequence[int], recipe: Recipe) -> Decision:
    """The decision in which every unit has its option of a recipe."""
    return split_decision(problem, bounds, [recipe[run] for run in runs_of_units(problem)])


def judged(name: str, problem: Problem, decision: Decision, clock: Clock, message: str) -> Solution:
    """The solution of a method that makes one plan and proves nothing: infeasible if the plan breaks a constraint."""
    violations = check(problem, decision)
    others = [violation.message for violation in violations if violation.kind != "memory"]
    if others:
        return without_plan(name, Status.INFEASIBLE, clock, f"{message}: {'; '.join(others)}")
    if violations:
        needed = tuple(peak for _, peak in stage_memory(problem, decision))
        return without_plan(name, Status.INFEASIBLE, clock, f"{message}: {needs_message(problem, needed)}", needed)
    return with_plan(name, problem, decision, clock, None, False, message)


def one_chunk_only(problem: Problem, planner: str) -> None:
    """Refuse several chunks per stage for a method that was published without them.

    Raises:
        InputError: the problem has several.
    """
    if problem.chunks > 1:
        raise InputError(
            f"planner {planner}: knows one chunk per stage only, the problem has {problem.chunks}; compare it with "
            "chunks: 1"
        )
