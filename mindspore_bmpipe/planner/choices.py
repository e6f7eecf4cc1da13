"""Settings left to the planner (`chunks: auto`, `schedule: auto`, and several micro-batch sizes): all are planned.

Every candidate is first planned with a small share of the work. A candidate whose proved bound is no better than
another's plan is out; the rest are planned again in full, best first. The bound of the whole is the least bound of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspore_bmpipe.config import AUTO, MINDSPORE_SCHEDULES, Config
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits, Status, StoppedBy
from mindspore_bmpipe.planner.registry import solve
from mindspore_bmpipe.problem import Problem
from mindspore_bmpipe.schedule import make_schedule

MOST_CHUNKS = 6
"""Most chunks per stage that `auto` tries."""

_PREFERRED = (
    "1f1b",
    "interleaved",
    "seqsmartvpp",
    "zero_bubble_v",
    "seqpipe",
    "seqvpp",
    "gpipe",
    "interleaved_less_memory",
)
assert set(_PREFERRED) == set(MINDSPORE_SCHEDULES)
"""Schedules in the order in which equal ones are kept: those that need no switch in the environment first."""

_FIRST_EFFORT = 0.1
_FIRST_SHARE = 0.5
"""Shares of the work and of the time limit that go into the first look at all candidates."""
_FINALISTS = 3
"""Candidates planned in full, at most."""


@dataclass(frozen=True)
class Candidate:
    """One way to settle what was left open."""

    label: str
    """What it is, for people."""
    problem: Problem
    """What to plan."""


def settled_configs(config: Config, units: int) -> list[Config]:
    """Every way to settle `schedule` and `chunks`, one per distinct order of actions.

    Raises:
        InputError: MindSpore accepts none of them with these stages and micro-batches.
    """
    stages, micro_batches = config.stages, config.micro_batches
    if AUTO not in (config.schedule, config.chunks) or stages is None or micro_batches is None:
        return [config]
    if config.chunks == AUTO:
        chunk_choices = list(range(1, min(MOST_CHUNKS, units // stages) + 1))
    else:
        chunk_choices = [int(config.chunks or 1)]
    found: list[Config] = []
    known: set[object] = set()
    refused = ""
    for chunks in chunk_choices:
        if config.schedule == AUTO:
            names: Sequence[str] = _PREFERRED
        elif config.schedule is None:
            names = ("1f1b",) if chunks == 1 else ("interleaved",)
        else:
            names = (config.schedule,)
        for name in names:
            try:
                schedule = make_schedule(name, stages, chunks, micro_batches)
            except InputError as error:
                refused = str(error)
                continue
            if schedule.orders not in known:
                known.add(schedule.orders)
                found.append(replace(config, schedule=name, chunks=chunks))
    if not found:
        raise InputError(f"config: no schedule is possible with these settings; the last one tried says: {refused}")
    return found


def solve_all(candidates: Sequence[Candidate], planner: str, limits: SolveLimits) -> list[Solution | None]:
    """The answer on every candidate, in full for the best and from a first look for the rest; `None` if not taken.

    Raises:
        InputError: there are none, or the planner takes none of them.
    """
    share = _FIRST_SHARE * limits.time_limit_s / max(1, len(candidates))
    # Without the proofs that the wall clock ends, who goes on to the full plan is the same on every machine.
    first = replace(limits, effort=limits.effort * _FIRST_EFFORT, time_limit_s=share, prove=False)
    solutions: list[Solution | None] = []
    refused = ""
    for candidate in candidates:
        try:
            solutions.append(solve(candidate.problem, planner, first))
        except InputError as error:
            solutions.append(None)
            refused = str(error)
    if all(solution is None for solution in solutions):
        raise InputError(refused or "there is nothing to compare")
    order = _ranked(solutions)
    finalists = [index for index in order[:_FINALISTS] if not _is_decided(solutions[index])]
    full = replace(limits, time_limit_s=(1 - _FIRST_SHARE) * limits.time_limit_s / max(1, len(finalists)))
    for index in finalists:
        mine, best = solutions[index], _best(solutions)
        if best is not None and _bound(mine) >= _time(best) * (1 - limits.accepted_gap):
            continue
        again = solve(candidates[index].problem, planner, full)
        if mine is not None and again.decision is None:
            again = mine
        bounds = [found.bound_ms for found in (mine, again) if found is not None and found.bound_ms is not None]
        if bounds and again.step_time_ms is not None:
            again = replace(again, bound_ms=min(max(bounds), again.step_time_ms))
        solutions[index] = again if _time(again) <= _time(mine) else mine
    return solutions


def solve_best(candidates: Sequence[Candidate], planner: str, limits: SolveLimits) -> tuple[Problem, Solution]:
    """Plan all candidates and return the best plan, with a message that says what was compared.

    Raises:
        InputError: there are none, or the planner takes none of them.
    """
    if len(candidates) == 1:
        return candidates[0].problem, solve(candidates[0].problem, planner, limits)
    clock = Clock(limits)
    solutions = solve_all(candidates, planner, limits)
    chosen = _ranked(solutions)[0]
    solution = solutions[chosen]
    assert solution is not None
    compared = ", ".join(
        f"{candidate.label} {_text(found)}" for candidate, found in zip(candidates, solutions, strict=True)
    )
    message = "; ".join(part for part in (solution.message, f"compared {compared}") if part)
    solution = replace(solution, message=message, solve_seconds=clock.elapsed())
    if solution.step_time_ms is not None:
        bound = min(solution.step_time_ms, *(_bound(found) for found in solutions))
        gap = (solution.step_time_ms - bound) / solution.step_time_ms
        proved = gap <= limits.accepted_gap
        status = Status.OPTIMAL if proved else Status.FEASIBLE
        stopped_by = StoppedBy.PROOF if proved else StoppedBy.WORK
        solution = replace(solution, bound_ms=bound, gap=gap, status=status, stopped_by=stopped_by)
    if any(found is not None and found.stopped_by is StoppedBy.TIME for found in solutions):
        # Even one that lost might have won on another machine.
        solution = replace(solution, stopped_by=StoppedBy.TIME)
    return candidates[chosen].problem, solution


def _ranked(solutions: Sequence[Solution | None]) -> list[int]:
    """Indices of those that the planner takes, the best first."""
    return sorted((index for index, found in enumerate(solutions) if found), key=lambda index: _rank(solutions[index]))


def _is_decided(solution: Solution | None) -> bool:
    return solution is None or solution.status in (Status.OPTIMAL, Status.INFEASIBLE)


def _time(solution: Solution | None) -> float:
    return float("inf") if solution is None or solution.step_time_ms is None else solution.step_time_ms


def _bound(solution: Solution | None) -> float:
    """Proved bound; of a candidate that was refused or is infeasible, infinity."""
    if solution is None or solution.status is Status.INFEASIBLE:
        return float("inf")
    return 0.0 if solution.bound_ms is None else solution.bound_ms


def _rank(solution: Solution | None) -> tuple[float, bool]:
    # An answer that says nothing is worth another look before one that says "infeasible".
    return _time(solution), solution is None or solution.status is Status.INFEASIBLE


def _best(solutions: Sequence[Solution | None]) -> Solution | None:
    found = [solution for solution in solutions if solution is not None and solution.step_time_ms is not None]
    return min(found, key=_time) if found else None


def _text(solution: Solution | None) -> str:
    if solution is None:
        return "not possible"
    return str(solution.status) if solution.step_time_ms is None else f"{solution.step_time_ms:.3f} ms"
