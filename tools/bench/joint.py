"""What it adds to choose schedule and chunks together with the plan, as `schedule: auto, chunks: auto` does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from mindspore_bmpipe.comparison import REFERENCE, default_planners
from mindspore_bmpipe.config import AUTO, Config
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner import Solution, SolveLimits, Status, solve
from mindspore_bmpipe.planner.choices import Candidate, settled_configs, solve_all
from mindspore_bmpipe.problem import Decision, Problem, stage_memory

MEGATRON_SCHEDULES = ("1f1b", "interleaved")
"""What Megatron-LM offers of the schedules that are compared."""
MANUAL = "megatron_manual"


def candidates(problem: Problem, most_chunks: int) -> list[Candidate]:
    """Every schedule and number of chunks that MindSpore accepts for the problem's stages and micro-batches."""
    config = Config(stages=problem.stages, micro_batches=problem.micro_batches, schedule=AUTO, chunks=AUTO)
    found = []
    for settled in settled_configs(config, problem.units):
        assert settled.schedule is not None and isinstance(settled.chunks, int)
        if settled.chunks <= most_chunks:
            changed = replace(problem, schedule=settled.schedule, chunks=settled.chunks)
            found.append(Candidate(label(changed), changed))
    return found


def label(problem: Problem) -> str:
    """Schedule and chunks as text."""
    return f"{problem.schedule} x {problem.chunks}"


def answer(problem: Problem, planner: str, limits: SolveLimits) -> tuple[Solution | None, str]:
    """A planner's solution, or why it does not apply."""
    try:
        solution = solve(problem, planner, limits)
    except InputError as error:
        return None, str(error)
    return solution, solution.message


def mean_memory(problem: Problem, decision: Decision) -> float:
    """Mean over the stages of peak over limit."""
    peaks = [peak for _, peak in stage_memory(problem, decision)]
    return float(np.mean(np.array(peaks) / np.array(problem.memory_limit_bytes)))


def joint_choice(problem: Problem, own: Iterable[Decision], limits: SolveLimits, most_chunks: int) -> dict[str, Any]:
    """Bmpipe on every schedule, Megatron's grid on Megatron's, and every planner on the schedule that bmpipe chose.

    Args:
        problem: with its own schedule, one of the candidates unless it has more than `most_chunks`.
        own: plans known for it.
        limits: of bmpipe on all candidates together, and of each other planner on each.
        most_chunks: most chunks per stage that are tried.
    """
    choices = candidates(problem, most_chunks)
    by_hand: dict[str, Solution] = {}
    for choice in choices:
        if choice.problem.schedule in MEGATRON_SCHEDULES:
            solution, _ = answer(choice.problem, MANUAL, limits)
            if solution is not None and solution.step_time_ms is not None:
                by_hand[choice.label] = solution
    starts = (*own, *(found.decision for found in by_hand.values() if found.decision is not None))
    solutions = solve_all(choices, REFERENCE, replace(limits, starts=starts))
    timed = [index for index, found in enumerate(solutions) if found is not None and found.step_time_ms is not None]
    if not timed:
        return {}
    chosen = min(timed, key=lambda index: solutions[index].step_time_ms)  # type: ignore[union-attr,arg-type,return-value]
    same, best = _on_one_schedule(choices[chosen].problem, solutions[chosen], limits, starts)
    assert best.decision is not None
    # A schedule on which nothing was proved may hold any plan.
    bounds = [
        found.bound_ms or 0.0 for found in solutions if found is not None and found.status is not Status.INFEASIBLE
    ]
    found: dict[str, Any] = {
        "choices": {
            choice.label: None if solution is None else solution.step_time_ms
            for choice, solution in zip(choices, solutions, strict=True)
        },
        "schedule": choices[chosen].label,
        "step_time_ms": best.step_time_ms,
        "bound_ms": min(bounds),
        "memory": mean_memory(choices[chosen].problem, best.decision),
        "same_schedule": same,
    }
    if by_hand:
        fastest = min(by_hand, key=lambda name: by_hand[name].step_time_ms or float("inf"))
        found["by_hand"] = {"schedule": fastest, "step_time_ms": by_hand[fastest].step_time_ms}
    return found


def _on_one_schedule(
    problem: Problem, mine: Solution | None, limits: SolveLimits, starts: tuple[Decision, ...]
) -> tuple[dict[str, float], Solution]:
    """Step times of the other planners that take the problem, and bmpipe's answer, started again from faster ones."""
    assert mine is not None and mine.step_time_ms is not None
    times, faster = {}, []
    for planner in default_planners():
        if planner == REFERENCE:
            continue
        solution, _ = answer(problem, planner, limits)
        if solution is None or solution.step_time_ms is None or solution.decision is None:
            continue
        times[planner] = solution.step_time_ms
        if solution.step_time_ms < mine.step_time_ms:
            faster.append(solution.decision)
    if faster:
        known = (*starts, *faster) if mine.decision is None else (*starts, mine.decision, *faster)
        mine = solve(problem, REFERENCE, replace(limits, starts=known, prove=False))
    return times, mine
