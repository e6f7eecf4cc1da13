"""The even planner's stated policy, by hand."""

from __future__ import annotations

from dataclasses import replace

from problem_samples import case_a, small

from mindspore_bmpipe.planner import Status, solve
from mindspore_bmpipe.problem import (
    Option,
    Pin,
    Problem,
    Run,
    stage_memory,
)


def test_ends_ride_along_and_the_recipe_is_the_cheapest_that_fits() -> None:
    solution = solve(case_a(memory_limit_bytes=(59 * 10**9,) * 16), "even")
    assert solution.status is Status.FEASIBLE
    assert solution.decision is not None
    body = solution.decision.counts[1]
    assert [sum(stage) for stage in body] == [6] * 16
    # Six layers at 16 in flight fit in 59 GB with `both` only; later stages need fewer recomputed layers, down to none.
    assert body[0] == (0, 0, 0, 6)
    assert body[-1] == (6, 0, 0, 0)
    assert all(select == comm == 0 for _, select, comm, _ in body)
    recomputed = [both for *_, both in body]
    assert recomputed == sorted(recomputed, reverse=True)


def test_each_stage_recomputes_as_few_units_as_fit() -> None:
    solution = solve(small(memory_limit_bytes=(32, 40)), "even")
    assert solution.decision is not None
    # Stage 0 holds 20 static; 2 * 5 * 2 = 20 more do not fit in 32 and neither do 2 * (5 + 1) + 2 = 14, 2 * 2 + 2 = 6
    # do.
    assert solution.decision.counts == (((0, 2), (2, 0)),)


def test_remainders_go_to_the_last_stages_unless_rules_forbid() -> None:
    run = Run("body", 5, 1.0, 2.0, 0, (Option("none", 0, 0.0),))
    problem = Problem((run,), "1f1b", 2, 1, 4, (1, 1))
    for changed, sizes in (
        (problem, [2, 3]),
        (replace(problem, forbidden_cuts=frozenset({1})), [3, 2]),
        (replace(problem, pins=(Pin(3, 3, 0),)), [4, 1]),
    ):
        solution = solve(changed, "even")
        assert solution.decision is not None
        assert [sum(stage) for stage in solution.decision.counts[0]] == sizes


def test_infeasible_says_what_the_even_split_needs() -> None:
    solution = solve(small(memory_limit_bytes=(25, 40)), "even")
    assert solution.status is Status.INFEASIBLE
    assert solution.needed_bytes is not None
    assert solution.needed_bytes[0] == 20 + 2 * 2 + 2
    assert "even split" in solution.message
    assert "stage 0 26 > 25" in solution.message


def test_peaks_stay_within_the_limit_exactly() -> None:
    limits = solve(small(memory_limit_bytes=(25, 40)), "even").needed_bytes
    assert limits is not None
    problem = small(memory_limit_bytes=limits)
    solution = solve(problem, "even")
    assert solution.decision is not None
    assert stage_memory(problem, solution.decision)[0][1] == limits[0]
