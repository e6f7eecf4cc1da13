"""The same plan from every process, whatever else the machine does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from problem_samples import case_b, small
from test_planner_bmpipe import mixed_problem

from mindspore_bmpipe.planner import SolveLimits, Status, StoppedBy, bmpipe, solve
from mindspore_bmpipe.planner.base import EMERGENCY_LIMITS, Clock
from mindspore_bmpipe.planner.choices import Candidate, solve_best

TESTS = Path(__file__).parent

SCRIPT = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from problem_samples import case_b
from mindspore_bmpipe.planner import SolveLimits, solve
solution = solve(case_b(), limits=SolveLimits(time_limit_s={limit}, seed=7, effort={effort}))
assert solution.status.value == "feasible", solution
print(hashlib.sha256(repr(solution.decision).encode()).hexdigest(), solution.stopped_by, solution.step_time_ms)
"""


def start(limit: float, effort: float) -> subprocess.Popen[str]:
    script = SCRIPT.format(tests=str(TESTS), limit=limit, effort=effort)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> tuple[str, str, str]:
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0
    fingerprint, stopped_by, step_time = output.split()
    return fingerprint, stopped_by, step_time


def test_a_loaded_machine_gives_the_same_plan() -> None:
    """The proof is far from its end when the time is up, once on an idle and once on a busy machine."""
    limits = SolveLimits(time_limit_s=8.0, seed=7, effort=0.5)
    alone = solve(case_b(), limits=limits)
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        loaded = solve(case_b(), limits=limits)
    finally:
        for load in loads:
            load.kill()
            load.wait()
    assert alone.status is loaded.status is Status.FEASIBLE
    assert alone.stopped_by is loaded.stopped_by is StoppedBy.WORK
    assert alone.decision == loaded.decision


@pytest.mark.long
def test_eight_processes_at_once_give_the_same_plan() -> None:
    processes = [start(20.0, 0.3) for _ in range(8)]
    answers = {answer(process) for process in processes}
    assert len(answers) == 1
    assert next(iter(answers))[1] == "work"
    # And another one that has the machine to itself.
    assert {answer(start(20.0, 0.3))} == answers


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_the_proof_finds_is_not_the_plan(chunks: int) -> None:
    """A search without any work, then a proof: the bound rises, the plan stays."""
    problem = mixed_problem()
    if chunks == 2:
        problem = replace(problem, schedule="interleaved", chunks=2, stages=3, memory_limit_bytes=(10**11,) * 3)
    searched = solve(problem, limits=SolveLimits(time_limit_s=5.0, effort=1e-6, prove=False))
    proved = solve(problem, limits=SolveLimits(time_limit_s=5.0, effort=1e-6))
    assert searched.decision == proved.decision
    assert searched.bound_ms is not None
    assert proved.bound_ms is not None
    assert searched.bound_ms <= proved.bound_ms


def test_the_clock_ends_a_search_only_in_an_emergency(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock(SolveLimits(time_limit_s=5.0))
    now[0] = 5.0 * EMERGENCY_LIMITS - 0.1
    assert not clock.expired()
    assert not clock.struck
    clock.begin_proof()
    assert clock.expired()
    assert not clock.struck
    assert "the plan does not depend on it" in clock.message(proved=False)
    late = Clock(SolveLimits(time_limit_s=5.0))
    now[0] += 5.0 * EMERGENCY_LIMITS
    assert late.expired()
    assert late.struck
    assert "another run may give another plan" in late.message(proved=True)


def test_work_ends_a_search_at_the_same_point_and_not_a_proof() -> None:
    clock = Clock(SolveLimits(time_limit_s=100.0), work_share=0.5)
    clock.spend(49.0)
    assert not clock.ends()
    clock.spend(1.0)
    assert clock.ends()
    clock.begin_proof()
    assert not clock.ends()


def test_an_emergency_in_any_candidate_is_said() -> None:
    candidates = [Candidate("one", small()), Candidate("two", case_b())]
    _, solution = solve_best(candidates, bmpipe.NAME, SolveLimits(time_limit_s=1e-3))
    assert solution.stopped_by is StoppedBy.TIME


def test_one_core_is_enough_for_any_plan() -> None:
    """The number of processors is no input of a plan."""
    affinity = os.sched_getaffinity(0)
    first = solve(case_b(), limits=SolveLimits(time_limit_s=1.0, prove=False))
    try:
        os.sched_setaffinity(0, {min(affinity)})
        second = solve(case_b(), limits=SolveLimits(time_limit_s=1.0, prove=False))
    finally:
        os.sched_setaffinity(0, affinity)
    assert first.decision == second.decision
    assert first.bound_ms == second.bound_ms
