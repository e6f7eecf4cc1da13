"""All planners on one subject, judged by the same exact simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspore_bmpipe.errors import InfeasibleError, InputError, NoPlanFoundError
from mindspore_bmpipe.planner import Status, registered
from mindspore_bmpipe.planning import solve_subject
from mindspore_bmpipe.report.comparison import Entry
from mindspore_bmpipe.subjects import Subject

REFERENCE = "bmpipe"
"""The planner that the others are compared with."""
LEFT_OUT = ("exhaustive",)
"""Planners that only small problems can ask."""

Progress = Callable[[str, int, int], None]
"""Told the planner about to run, how many have run, and of how many."""


def default_planners() -> tuple[str, ...]:
    """Every planner that takes problems of real size."""
    return tuple(name for name in registered() if name not in LEFT_OUT)


def compare(subject: Subject, planners: Sequence[str], progress: Progress | None = None) -> list[Entry]:
    """The answer of every planner, bmpipe's among them.

    The others run first and their plans are given to bmpipe to start from, so its own is never worse than any of them.

    Raises:
        InputError: no planner takes the subject with its settings.
    """
    others = [name for name in dict.fromkeys(planners) if name != REFERENCE]
    entries: list[Entry] = []
    for name in (*others, REFERENCE):
        if progress is not None:
            progress(name, len(entries), len(others) + 1)
        starts = tuple(
            entry.solution.decision
            for entry in entries
            if entry.solution is not None and entry.solution.decision is not None
        )
        try:
            problem, solution = solve_subject(subject, name, starts if name == REFERENCE else ())
        except InputError as error:
            if name == REFERENCE:
                raise
            entries.append(Entry(name, None, None, str(error)))
            continue
        entries.append(Entry(name, problem, solution, solution.message))
    return entries


def require_any_plan(entries: Sequence[Entry]) -> None:
    """Raise if nobody found a plan.

    Raises:
        InfeasibleError: bmpipe proved that there is none.
        NoPlanFoundError: there may be one.
    """
    if any(entry.step_time_ms is not None for entry in entries):
        return
    for entry in entries:
        if entry.name == REFERENCE and entry.solution is not None and entry.solution.status is Status.INFEASIBLE:
            raise InfeasibleError(f"no plan is feasible: {entry.message}")
    raise NoPlanFoundError("no planner found a plan, and none was ruled out; raise --time-limit")
