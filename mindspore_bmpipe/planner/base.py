"""What every planner is given and returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.problem import Decision, Problem, check, evaluate


class Status(str, Enum):
    """The four different answers of a planner."""

    OPTIMAL = "optimal"
    """A plan, proved to be within the relative gap of the best one."""
    FEASIBLE = "feasible"
    """A plan; a better one may exist."""
    INFEASIBLE = "infeasible"
    """No plan of the kind this planner makes satisfies the constraints."""
    UNKNOWN = "no plan found in the time limit"
    """Neither a plan nor a proof that there is none."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Solution:
    """What a planner found."""

    planner: str
    """Registered name of the planner."""
    status: Status
    """Which of the four answers this is."""
    decision: Decision | None
    """The plan, or `None` if infeasible or unknown."""
    step_time_ms: float | None
    """Step time of the plan as `evaluate` gives it; `None` without a plan."""
    bound_ms: float | None
    """Proved lower bound on the step time of any plan, never above `step_time_ms`; `None` if nothing was proved."""
    gap: float | None
    """(step time - bound) / step time, from 0 to 1; `None` without a plan or a bound."""
    solve_seconds: float
    """Wall-clock time taken."""
    needed_bytes: tuple[int, ...] | None
    """If infeasible, each stage's peak in the plan that exceeds the limits least, so limits of this size have a plan;
    `None` otherwise, and if no limits would help (pins, forbidden cuts or too few trainable units)."""
    message: str
    """Why the search ended, or what to change; may be empty."""


@dataclass(frozen=True)
class SolveLimits:
    """How much work a planner may do.

    Work limits (rounds, nodes) end a search at the same point on every machine. The wall clock does not, so it is only
    the last resort: ranks that must agree on a plan can rely on it only if no solution's message says that time ran
    out.
    """

    time_limit_s: float = 60.0
    """Wall-clock seconds, greater than 0."""
    seed: int = 0
    """Seed of everything random, at least 0."""
    threads: int = 1
    """Threads of the solver, at least 1; one keeps it deterministic."""
    relative_gap: float = 1e-4
    """Gap at which a plan counts as optimal, at least 0."""
    node_limit: int = 20_000
    """Branch-and-bound nodes of one solver call, at least 1."""
    effort: float = 1.0
    """Factor on all other work, above 0: less for a first look, more for a search that may take longer."""
    starts: tuple[Decision, ...] = ()
    """Plans known from elsewhere: the planner's own is never worse than those of them that are feasible."""

    @property
    def accepted_gap(self) -> float:
        """The relative gap, but never finer than the rounding that proofs allow for."""
        return max(self.relative_gap, 1e-8)

    def __post_init__(self) -> None:
        for name, value, minimum in (
            ("seed", self.seed, 0),
            ("threads", self.threads, 1),
            ("node_limit", self.node_limit, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise InputError(f"{name}: {value!r} is not allowed; give an integer of at least {minimum}")
        if not self.effort > 0:
            raise InputError(f"effort: {self.effort!r} is not allowed; give a number above 0")
        if not self.time_limit_s > 0:
            raise InputError(f"time_limit: {self.time_limit_s!r} is not allowed; give seconds greater than 0")
        if not 0 <= self.relative_gap < 1:
            raise InputError(f"relative_gap: {self.relative_gap!r} is not allowed; give a number from 0 to below 1")


Planner = Callable[[Problem, SolveLimits], Solution]
"""Signature of a planner."""


class Clock:
    """Wall clock of one planner call."""

    def __init__(self, limits: SolveLimits) -> None:
        self._start = time.monotonic()
        self._limit = limits.time_limit_s

    def part(self, share: float) -> Clock:
        """A clock whose time runs out after a share of what is left on this one."""
        part = Clock(SolveLimits(time_limit_s=max(share * self.remaining(), 1e-9)))
        return part

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._limit - self.elapsed())

    def expired(self) -> bool:
        """Whether the time limit has passed."""
        return self.remaining() <= 0


def with_plan(
    planner: str,
    problem: Problem,
    decision: Decision,
    clock: Clock,
    bound_ms: float | None,
    optimal: bool,
    message: str,
) -> Solution:
    """A solution that holds a plan; its time comes from `evaluate`, and it is checked once more."""
    violations = check(problem, decision)
    assert not violations, f"planner {planner} made a plan that breaks constraints: {violations[0].message}"
    step_time = evaluate(problem, decision).step_time_ms
    bound = None if bound_ms is None else max(0.0, min(bound_ms, step_time))
    gap = None if bound is None else (step_time - bound) / step_time if step_time else 0.0
    status = Status.OPTIMAL if optimal else Status.FEASIBLE
    return Solution(planner, status, decision, step_time, bound, gap, clock.elapsed(), None, message)


def without_plan(
    planner: str, status: Status, clock: Clock, message: str, needed_bytes: tuple[int, ...] | None = None
) -> Solution:
    """A solution that holds no plan."""
    return Solution(planner, status, None, None, None, None, clock.elapsed(), needed_bytes, message)


def needs_message(problem: Problem, needed_bytes: tuple[int, ...] | None) -> str:
    """What to tell a user whose problem is infeasible."""
    if needed_bytes is None:
        return "no memory limit helps: pins, forbidden cuts and trainable units leave no way to cut the network"
    over = [
        f"stage {stage} {needed} > {limit}"
        for stage, (needed, limit) in enumerate(zip(needed_bytes, problem.memory_limit_bytes, strict=True))
        if needed > limit
    ]
    return f"does not fit in memory; the closest plan needs {', '.join(over)} bytes"
