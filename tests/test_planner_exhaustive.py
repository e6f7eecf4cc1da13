"""The oracle itself, on problems small enough for hand calculation."""

from __future__ import annotations

from math import comb

import pytest
from problem_samples import case_a, small

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner import SolveLimits, Status, solve
from mindspore_bmpipe.planner.exhaustive import count_decisions
from mindspore_bmpipe.problem import Option, Problem, Run


def test_number_of_decisions() -> None:
    # Cuts 1|3, 2|2, 3|1 of four units with two options: n units have n + 1 ways.
    assert count_decisions(small(), 1000) == 2 * 4 + 3 * 3 + 4 * 2
    run = Run("body", 7, 1.0, 1.0, 0, tuple(Option(str(index), 0, 0.0) for index in range(3)))
    assert count_decisions(Problem((run,), "1f1b", 1, 1, 1, (1,)), 1000) == comb(7 + 2, 2)


def test_best_by_hand() -> None:
    # Stage 0 can keep 20 bytes above its 20 static: both units saved, twice in flight. Even and without recompute is
    # best.
    solution = solve(small(), "exhaustive")
    assert solution.status is Status.OPTIMAL
    assert solution.decision is not None
    assert solution.decision.counts == (((2, 0), (2, 0)),)
    assert solution.step_time_ms == pytest.approx((4 + 1) * 6)


def test_too_large_says_how_large() -> None:
    with pytest.raises(InputError, match="more than 300000 decisions"):
        solve(case_a(), "exhaustive")


def test_time_limit_is_an_answer_of_its_own() -> None:
    solution = solve(small(), "exhaustive", SolveLimits(time_limit_s=1e-9))
    assert solution.status is Status.UNKNOWN
    assert "time limit" in solution.message
