"""AdaPipe, a reconstruction: recomputation as a knapsack inside every stage, a dynamic program over suffixes across.

Algorithm: a stage that holds given units keeps the activations whose recomputation costs most time, within what its
p - s micro-batches in flight leave of its memory; its times F, B follow. Across stages, from the last to the first,

    W_s = F_s + max(W_(s+1) + B_(s+1), (p - 1 - s) F_s)        warm-up
    E_s = B_s + max(E_(s+1) + F_(s+1), (p - 1 - s) B_s)        cool-down
    X_s = max(X_(s+1), F_s + B_s)                              steady state
    T   = W_0 + E_0 + (m - p) X_0

and the split with the least T is taken. W and E take stages as about equal, so a slow stage shows only in X; with fewer
than 2p micro-batches X counts p times, since plans would be far out of balance otherwise. That is our amendment.

Source: Sun et al., ASPLOS 2024, doi 10.1145/3620666.3651359. No code is public, so this is our reading: the recurrence
is the paper's 1F1B model as we understand it, the knapsack works on the options of the layer table where the paper's
works on computation units inside a layer, and it is solved exactly, with memory counted as everywhere here (the paper
rounds bytes). Suffixes are kept as long as none is better in W, E and X at once, so the least T is found; whether the
paper keeps more than one is not known to us. Transfers are not in its model.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits, Status, without_plan
from mindspore_bmpipe.planner.recipe_groups import fitting_split, require_listable
from mindspore_bmpipe.planner.recipes import judged
from mindspore_bmpipe.planner.splits import Bounds, Groups, SplitRules, best_split
from mindspore_bmpipe.planner.stage_options import StageOptions
from mindspore_bmpipe.problem import Problem

NAME = "adapipe"

_SLACK = 1e-9


@dataclass(frozen=True)
class _Suffix:
    """Stages from some stage to the last."""

    warm_up: float
    """W + B of its first stage."""
    cool_down: float
    """E + F of its first stage."""
    steady: float
    """X."""
    first_ms: float
    """F + B of its first stage."""
    bounds: Bounds
    """First unit of each of its stages, and the number of units."""

    def total(self, steps: int) -> float:
        """T, if the first stage is stage 0."""
        return self.warm_up + self.cool_down - self.first_ms + steps * self.steady


def steady_steps(micro_batches: int, stages: int) -> int:
    """How often X counts."""
    return max(micro_batches - stages, stages)


def modelled_ms(forward: list[float], backward: list[float], micro_batches: int) -> float:
    """T of the stages' times by the recurrence above."""
    suffix = None
    for stage in reversed(range(len(forward))):
        suffix = _before(suffix, forward[stage], backward[stage], len(forward) - 1 - stage, 0)
    assert suffix is not None
    return suffix.total(steady_steps(micro_batches, len(forward)))


def _before(suffix: _Suffix | None, forward: float, backward: float, later: int, low: int) -> _Suffix:
    """A suffix with one more stage before it, which has `later` stages behind it and starts at unit `low`."""
    busy = forward + backward
    warm_up, cool_down = busy + later * forward, busy + later * backward
    if suffix is None:
        return _Suffix(warm_up, cool_down, busy, busy, (low,))
    return _Suffix(
        max(warm_up, busy + suffix.warm_up),
        max(cool_down, busy + suffix.cool_down),
        max(busy, suffix.steady),
        busy,
        (low, *suffix.bounds),
    )


def _unbeaten(suffixes: list[_Suffix], whole: bool, steps: int) -> list[_Suffix]:
    """Those that no other is at least as good as in everything; of whole pipelines only the best."""
    if whole:
        return [min(suffixes, key=lambda suffix: suffix.total(steps))] if suffixes else []
    kept: list[_Suffix] = []
    for suffix in sorted(suffixes, key=lambda entry: (entry.steady, entry.warm_up, entry.cool_down)):
        if not any(
            other.warm_up <= suffix.warm_up + _SLACK and other.cool_down <= suffix.cool_down + _SLACK for other in kept
        ):
            kept.append(suffix)
    return kept


def least_modelled(options: StageOptions, groups: Groups, clock: Clock) -> Bounds | None:
    """The split with the least T; `None` if none fits or the clock ran out first."""
    problem = options.problem
    stages, units = problem.stages, problem.units
    steps = steady_steps(problem.micro_batches, stages)
    least_ms = groups.forward_ms + groups.backward_bound_ms
    limit = _first_total(options, best_split(least_ms, additive=False)[1])
    # What the stages before a suffix take at least: each is passed in warm-up and cool-down together once or more.
    least_before = problem_times(problem)
    table: dict[int, list[_Suffix]] = {units: []}
    for stage in reversed(range(stages)):
        later = stages - 1 - stage
        found: dict[int, list[_Suffix]] = {}
        for high, suffixes in table.items():
            if clock.expired():
                return None
            for low in [0] if stage == 0 else range(stage, high):
                if not least_ms[stage, low, high] < float("inf"):
                    continue
                choice = options.choice(stage, low, high)
                assert choice is not None
                for suffix in suffixes if later else [None]:
                    longer = _before(suffix, choice.forward_ms, choice.backward_ms, later, low)
                    if longer.total(steps) + least_before[low] <= limit * (1 + _SLACK):
                        found.setdefault(low, []).append(longer)
        table = {low: _unbeaten(entries, stage == 0, steps) for low, entries in found.items()}
    whole = table.get(0, [])
    return (*whole[0].bounds, units) if whole else None


def problem_times(problem: Problem) -> list[float]:
    """Time of all units before each one, without recomputation and at the highest speed."""
    speed = max(problem.speeds)
    each = [(run.forward_ms + run.backward_ms) / speed for run in problem.runs for _ in range(run.count)]
    return list(itertools.accumulate(each, initial=0.0))


def _first_total(options: StageOptions, bounds: Bounds | None) -> float:
    """T of a split."""
    if bounds is None:
        return float("inf")
    choices = [options.choice(stage, low, high) for stage, (low, high) in enumerate(itertools.pairwise(bounds))]
    forward = [choice.forward_ms for choice in choices if choice is not None]
    backward = [choice.backward_ms for choice in choices if choice is not None]
    assert len(forward) == len(choices)
    return modelled_ms(forward, backward, options.problem.micro_batches)


def plan(problem: Problem, limits: SolveLimits) -> Solution:
    """The plan above.

    Raises:
        InputError: several chunks per stage, or too many groups.
    """
    clock = Clock(limits)
    require_listable(problem, NAME)
    options, rules = StageOptions(problem), SplitRules(problem)
    groups = Groups(options, rules)
    closest = fitting_split(NAME, options, groups, clock)
    if isinstance(closest, Solution):
        return closest
    bounds = least_modelled(options, groups, clock)
    if bounds is None:
        return without_plan(NAME, Status.UNKNOWN, clock, "the wall clock ended the dynamic program")
    message = "reconstruction: knapsack inside a stage, least modelled time across"
    return judged(NAME, problem, options.decision(bounds), clock, message)
