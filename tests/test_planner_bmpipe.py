"""The project's planner against the oracle, published optima and its own promises."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from problem_samples import DATA, batches, case_a, random_problem, small, with_known_recipes

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner import Solution, SolveLimits, Status, bmpipe, elimination, milp_groups, registered, solve
from mindspore_bmpipe.planner.base import Clock
from mindspore_bmpipe.planner.elimination import fitting, sharpen
from mindspore_bmpipe.planner.local_search import PathPool, SplitSearch
from mindspore_bmpipe.planner.milp import plan_counts
from mindspore_bmpipe.planner.splits import Groups, SplitRules, best_split
from mindspore_bmpipe.planner.stage_options import StageOptions
from mindspore_bmpipe.problem import (
    Option,
    Pin,
    Problem,
    Run,
    check,
    recompute_ms,
    stage_memory,
)

TIGHT = SolveLimits(relative_gap=1e-7)


def worst_excess(problem: Problem, needed: tuple[int, ...] | None) -> int | None:
    if needed is None:
        return None
    return max(need - limit for need, limit in zip(needed, problem.memory_limit_bytes, strict=True))


def assert_same_optimum(problem: Problem, solution: Solution, oracle: Solution) -> None:
    assert solution.status is oracle.status
    assert worst_excess(problem, solution.needed_bytes) == worst_excess(problem, oracle.needed_bytes)
    if oracle.step_time_ms is not None:
        assert solution.step_time_ms == pytest.approx(oracle.step_time_ms, rel=1e-7)


def assert_never_worse(problem: Problem, limits: SolveLimits) -> None:
    """No registered planner that takes the problem finds a faster plan, or one where there is said to be none."""
    solution = solve(problem, "bmpipe", limits)
    for name in registered():
        try:
            other = solve(problem, name, limits)
        except InputError:
            continue
        if other.step_time_ms is not None:
            assert solution.step_time_ms is not None, name
            assert solution.step_time_ms <= other.step_time_ms * (1 + 1e-9), name


@pytest.mark.parametrize("seeds", batches(300, 30, everyday=120))
def test_equals_the_oracle(seeds: range) -> None:
    for seed in seeds:
        problem = random_problem(seed)
        solution, oracle = bmpipe.plan(problem, TIGHT), solve(problem, "exhaustive")
        assert_same_optimum(problem, solution, oracle)
        if oracle.decision is not None and solution.decision is not None:
            least = recompute_ms(problem, oracle.decision)
            assert recompute_ms(problem, solution.decision) == pytest.approx(least, rel=1e-7)


@pytest.mark.parametrize("solver", [None, "CBC"])
@pytest.mark.parametrize("first", range(0, 240, 60))
def test_integer_program_over_counts_equals_the_oracle(solver: str | None, first: int) -> None:
    for seed in range(first, first + (60 if solver is None else 15)):
        problem = random_problem(seed)
        solution = plan_counts("counts", problem, TIGHT, Clock(TIGHT), None, solver)
        assert_same_optimum(problem, solution, solve(problem, "exhaustive"))


@pytest.mark.parametrize("solver", [None, "CBC"])
@pytest.mark.parametrize("first", range(0, 240, 60))
def test_integer_program_over_groups_equals_the_oracle(
    solver: str | None, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without elimination and with the worst start, everything is left to the integer program.
    monkeypatch.setattr(milp_groups, "eliminate", lambda survivors, pool, target, clock: survivors)
    for seed in range(first, first + (60 if solver is None else 15)):
        problem = random_problem(seed)
        oracle = solve(problem, "exhaustive")
        options, rules, clock = StageOptions(problem), SplitRules(problem), Clock(TIGHT)
        groups, pool = Groups(options, rules), PathPool(problem)
        excess, split = best_split(groups.excess_bytes, additive=False)
        assert (split is None or excess > 0) == (oracle.decision is None)
        if oracle.step_time_ms is None or split is None:
            continue
        search = SplitSearch(options, rules, pool, clock)
        search.offer([split])
        survivors = sharpen(fitting(groups), options, clock)
        assert survivors is not None
        bound = milp_groups.prove(survivors, search, pool, TIGHT, clock, solver)
        assert search.best_time == pytest.approx(oracle.step_time_ms, rel=1e-6)
        assert oracle.step_time_ms * (1 - 1e-6) <= bound <= oracle.step_time_ms * (1 + 1e-9)


def test_published_case_is_proved() -> None:
    expected = json.loads((DATA / "case_a_v1.expected.json").read_text())["plans"]["proved_optimum"]["step_time_ms"]
    solution = solve(case_a())
    assert solution.status is Status.OPTIMAL
    assert solution.step_time_ms == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("micro_batches", [8, 32, 512])
def test_large_pipelines_are_proved(micro_batches: int) -> None:
    solution = solve(case_a(micro_batches=micro_batches))
    assert solution.status is Status.OPTIMAL


@pytest.mark.parametrize("seeds", batches(300, 30, everyday=60))
def test_never_worse_than_another_planner(seeds: range) -> None:
    for seed in seeds:
        assert_never_worse(with_known_recipes(random_problem(seed)), TIGHT)


def test_a_cap_of_exactly_the_need_passes_and_one_byte_less_does_not() -> None:
    problem = case_a()
    best = solve(problem)
    assert best.decision is not None
    needs = tuple(peak for _, peak in stage_memory(problem, best.decision))
    exact = solve(replace(problem, memory_limit_bytes=needs))
    assert exact.step_time_ms == best.step_time_ms
    less = replace(problem, memory_limit_bytes=tuple(need - 1 for need in needs))
    other = solve(less)
    assert any(violation.kind == "memory" for violation in check(less, best.decision))
    assert other.decision is None or (other.decision != best.decision and check(less, other.decision) == ())


def test_the_count_program_respects_single_bytes() -> None:
    # 1e11 bytes and a limit one byte short: within the solver's tolerance, so only the exact check can tell.
    options = (Option("none", 24_999_999_999, 0.0), Option("full", 1, 1.0))
    run = Run("body", 4, 1.0, 2.0, 2, options)
    enough = Problem((run,), "gpipe", 2, 1, 2, (100_000_000_000,) * 2)
    for problem, extra in ((enough, 0.0), (replace(enough, memory_limit_bytes=(99_999_999_999, 100_000_000_000)), 1.0)):
        solution = plan_counts("counts", problem, TIGHT, Clock(TIGHT))
        assert solution.status is Status.OPTIMAL
        assert solution.decision is not None
        assert check(problem, solution.decision) == ()
        assert recompute_ms(problem, solution.decision) == extra


def test_infeasible_needs_are_a_cap_that_works() -> None:
    problem = case_a(memory_limit_bytes=(30 * 10**9,) * 16)
    solution = solve(problem)
    assert solution.status is Status.INFEASIBLE
    assert solution.needed_bytes is not None
    assert solve(replace(problem, memory_limit_bytes=solution.needed_bytes)).decision is not None
    excess = worst_excess(problem, solution.needed_bytes)
    assert excess is not None
    assert solve(replace(problem, memory_limit_bytes=(30 * 10**9 + excess,) * 16)).decision is not None
    assert solve(replace(problem, memory_limit_bytes=(30 * 10**9 + excess - 1,) * 16)).decision is None


def test_rules_without_a_way_out_are_told_apart_from_memory() -> None:
    solution = solve(small(pins=(Pin(0, 0, 1),)))
    assert solution.status is Status.INFEASIBLE
    assert solution.needed_bytes is None
    assert "no memory limit helps" in solution.message


def mixed_problem() -> Problem:
    """Thirty different units, on which elimination does not finish before the integer program."""
    runs = tuple(
        Run(f"u{unit}", 1, 5.0 + unit * 7 % 11, 9.0 + unit * 5 % 13, 10**9, (Option("none", 10**8 + unit, 0.0),))
        for unit in range(30)
    )
    return Problem(runs, "1f1b", 6, 1, 8, (10**11,) * 6)


def test_time_that_ran_out_is_said_and_leaves_a_plan_with_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination, "_PASSES", 0)
    solution = solve(mixed_problem(), limits=SolveLimits(time_limit_s=1e-6))
    assert solution.status is Status.FEASIBLE
    assert "wall clock" in solution.message
    assert solution.gap is not None
    assert 0 < solution.gap < 1


def test_large_networks_fall_back_to_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(4)
    direct = solve(problem)
    monkeypatch.setattr(bmpipe, "MAX_GROUPS", 0)
    assert solve(problem).step_time_ms == direct.step_time_ms
