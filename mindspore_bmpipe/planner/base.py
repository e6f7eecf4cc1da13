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


class StoppedBy(str, Enum):
    """What ended a planner, and so whether another run gives the same plan."""

    PROOF = "proof"
    """The answer is final."""
    WORK = "work"
    """The search did all the work its limits allow: the same on every machine. The proof may have been ended by the
    time limit, so bound and gap may differ elsewhere; the plan does not."""
    TIME = "time"
    """The emergency stop: the wall clock ended the search, and another run may give another plan."""

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
    stopped_by: StoppedBy = StoppedBy.PROOF
    """What ended the planner."""


EMERGENCY_LIMITS = 20.0
"""Time limits after which the wall clock ends even a search."""

WORK_SHARE = 0.25
"""Share of the time limit, in seconds of an idle core, of the work that a clock gives to a search."""


@dataclass(frozen=True)
class SolveLimits:
    """How much a planner may do.

    A planner first searches for a plan, then goes on proving that there is no better one. The search is limited by
    work, which is counted and not timed, so it ends at the same point on every machine and under every load; the
    proof, which only raises the bound, ends at the time limit. Ranks that must agree on a plan can rely on it unless
    `Solution.stopped_by` says `time`.
    """

    time_limit_s: float = 60.0
    """Seconds, greater than 0: the wall clock ends a proof then, and a search only after `EMERGENCY_LIMITS` times as
    many. The work of the search is proportional to it, so that an idle core has time left for the proof."""
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
    prove: bool = True
    """Whether to go on with the proof until the time limit once the search has done its work. Without, the bound is
    the same on every machine too."""
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
    """What ends one planner call: counted work and the emergency stop in its search, the wall clock in its proof."""

    def __init__(self, limits: SolveLimits, work_share: float = WORK_SHARE) -> None:
        self._start = time.monotonic()
        self._limit = limits.time_limit_s
        self._work_left = work_share * limits.time_limit_s * limits.effort
        self._proving = False
        self._struck = False
        self.node_iterations = 0.0
        """Iterations that a branch-and-bound node took in the last solver call that told; 0 before there was one."""

    def begin_proof(self) -> None:
        """From here on nothing changes the plan any more, so the wall clock may end it."""
        self._proving = True

    @property
    def proving(self) -> bool:
        """Whether the search is over."""
        return self._proving

    @property
    def struck(self) -> bool:
        """Whether the wall clock ended the search: the one thing that makes a plan depend on the machine."""
        return self._struck

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def remaining(self) -> float:
        """Seconds until the wall clock ends what is going on, at least 0."""
        limit = self._limit if self._proving else self._limit * EMERGENCY_LIMITS
        return max(0.0, limit - self.elapsed())

    def expired(self) -> bool:
        """Whether the wall clock ends what is going on."""
        over = self.remaining() <= 0
        self._struck = self._struck or (over and not self._proving)
        return over

    def spend(self, seconds: float) -> None:
        """Count work, in seconds that it takes an idle core more or less; must be a function of the input alone."""
        self._work_left -= seconds

    def work_left(self) -> float:
        """Work left, in the same seconds; without limit in a proof."""
        return float("inf") if self._proving else max(0.0, self._work_left)

    def ends(self) -> bool:
        """Whether work or wall clock ends what is going on."""
        return self.expired() or self.work_left() <= 0

    def message(self, proved: bool) -> str:
        """Why a planner with a plan stopped; empty if it is proved."""
        if self._struck:
            seconds = self._limit * EMERGENCY_LIMITS
            return f"the wall clock ({seconds:g} s) ended the search; another run may give another plan"
        if proved:
            return ""
        if self._proving and self.expired():
            return f"the time limit ({self._limit:g} s) ended the proof; the plan does not depend on it"
        return "the work limit ended the proof"


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
    stopped_by = StoppedBy.TIME if clock.struck else StoppedBy.PROOF if optimal else StoppedBy.WORK
    return Solution(planner, status, decision, step_time, bound, gap, clock.elapsed(), None, message, stopped_by)


def without_plan(
    planner: str, status: Status, clock: Clock, message: str, needed_bytes: tuple[int, ...] | None = None
) -> Solution:
    """A solution that holds no plan."""
    final = status is Status.INFEASIBLE
    stopped_by = StoppedBy.PROOF if final else StoppedBy.TIME if clock.struck else StoppedBy.WORK
    return Solution(planner, status, None, None, None, None, clock.elapsed(), needed_bytes, message, stopped_by)


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
