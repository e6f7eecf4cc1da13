"""The planner for several chunks per stage against the oracle, published plans and its own promises."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from problem_samples import (
    DATA,
    batches,
    case_b,
    even_decision,
    random_chunked_problem,
    with_known_recipes,
)
from test_planner_bmpipe import TIGHT, assert_never_worse, assert_same_optimum

from mindspore_bmpipe.planner import SolveLimits, Status, StoppedBy, solve
from mindspore_bmpipe.planner.base import Clock
from mindspore_bmpipe.planner.milp import plan_counts
from mindspore_bmpipe.problem import Option, Problem, Run, check, evaluate, recompute_ms, stage_memory

EXPECTED = json.loads((DATA / "case_b.expected.json").read_text())["plans"]
QUICK = SolveLimits(relative_gap=1e-7, effort=0.1)


@pytest.mark.parametrize("option", ["none", "both"])
def test_published_plans_take_their_published_time_and_memory(option: str) -> None:
    problem = case_b()
    expected = EXPECTED[f"even_{option}"]
    decision = even_decision(problem, option)
    evaluation = evaluate(problem, decision)
    assert evaluation.step_time_ms == pytest.approx(expected["step_time_ms"], abs=0.05)
    assert evaluation.bubble.total == pytest.approx(expected["bubble"], abs=5e-5)
    peaks = [peak / 1e6 for _, peak in stage_memory(problem, decision)]
    published = expected["stage_peaks_mb"]
    assert peaks[: len(published)] == pytest.approx(published, abs=1)


def test_samples_cover_every_schedule_and_both_answers() -> None:
    problems = [random_chunked_problem(seed) for seed in range(300)]
    assert len(Counter(problem.schedule for problem in problems)) == 8
    feasible = [solve(problem, "exhaustive").decision is not None for problem in problems[:40]]
    assert {True, False} == set(feasible)


@pytest.mark.parametrize("seeds", batches(300, 20, everyday=60))
def test_equals_the_oracle(seeds: range) -> None:
    for seed in seeds:
        problem = random_chunked_problem(seed)
        oracle = solve(problem, "exhaustive")
        solution = solve(problem, "bmpipe", QUICK)
        assert_same_optimum(problem, solution, oracle)
        assert solution.decision is None or check(problem, solution.decision) == ()


@pytest.mark.parametrize("seeds", batches(300, 20, everyday=60))
def test_integer_program_alone_equals_the_oracle(seeds: range) -> None:
    for seed in seeds:
        problem = random_chunked_problem(seed)
        solution = plan_counts("counts", problem, TIGHT, Clock(TIGHT))
        assert_same_optimum(problem, solution, solve(problem, "exhaustive"))


@pytest.mark.parametrize("seeds", batches(300, 20, everyday=60))
def test_never_worse_than_another_planner(seeds: range) -> None:
    for seed in seeds:
        assert_never_worse(with_known_recipes(random_chunked_problem(seed)), QUICK)


def test_a_first_look_at_the_published_case_beats_the_published_solver() -> None:
    limits = SolveLimits(effort=0.1, prove=False)
    solution = solve(case_b(), "bmpipe", limits)
    assert solution.step_time_ms is not None
    assert solution.bound_ms is not None
    assert solution.status is Status.FEASIBLE
    assert solution.stopped_by is StoppedBy.WORK
    assert solution.step_time_ms <= 13300
    assert EXPECTED["proved_optimum"]["step_time_ms"] >= solution.bound_ms * (1 - 1e-6)
    again = solve(case_b(), "bmpipe", limits)
    assert again.decision == solution.decision
    assert again.bound_ms == solution.bound_ms


def test_the_four_answers_are_told_apart() -> None:
    """Ninety-eight units of 2.1 GB and more on 16 stages; where units go in pairs, few plans fit in 52 GB, if any."""
    quick = SolveLimits(time_limit_s=1.0, effort=1e-4, prove=False, node_limit=1)
    assert solve(case_b(memory_limit_bytes=(10**12,) * 16), "bmpipe", quick).status is Status.FEASIBLE
    lacking = solve(case_b(memory_limit_bytes=(40 * 10**9,) * 16), "bmpipe", quick)
    assert lacking.status is Status.INFEASIBLE
    assert lacking.stopped_by is StoppedBy.PROOF
    pairs = frozenset(range(1, 96, 4))
    unknown = solve(case_b(memory_limit_bytes=(52 * 10**9,) * 16, forbidden_cuts=pairs), "bmpipe", quick)
    assert unknown.status is Status.UNKNOWN
    assert unknown.stopped_by is not StoppedBy.PROOF
    assert (unknown.decision, unknown.bound_ms, unknown.needed_bytes) == (None, None, None)
    two = Problem((Run("body", 4, 1.0, 2.0, 0, (Option("none", 0, 0.0),)),), "interleaved", 2, 2, 2, (1, 1))
    proved = solve(two, "bmpipe", QUICK)
    assert (proved.status, proved.stopped_by, proved.message) == (Status.OPTIMAL, StoppedBy.PROOF, "")


def test_speeds_scale_the_times_of_their_stage() -> None:
    problem = case_b(stage_speeds=(2.0,) * 16)
    decision = even_decision(problem, "none")
    assert evaluate(problem, decision).step_time_ms == pytest.approx(15660.0 / 2)
    assert recompute_ms(problem, decision) == 0
