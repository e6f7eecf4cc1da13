"""Settings left to the planner: all are compared, and the best wins."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problem_samples import small

from mindspore_bmpipe.config import Config
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.layer_table import LayerTable
from mindspore_bmpipe.planner import SolveLimits, Status, solve
from mindspore_bmpipe.planner.choices import Candidate, settled_configs, solve_best
from mindspore_bmpipe.planning import check_plan, make_plan
from mindspore_bmpipe.problem import Option, Run
from mindspore_bmpipe.subjects import subject_of_layers

BODY = Run("body", 12, 1.0, 2.0, 10, (Option("none", 5, 0.0), Option("full", 1, 1.0)))
OPEN = Config(stages=2, micro_batches=4, chunks="auto", schedule="auto", memory_limit=10_000)


def test_every_distinct_order_is_a_candidate_once() -> None:
    found = [(config.schedule, config.chunks) for config in settled_configs(OPEN, 12)]
    looped = [(name, chunks) for chunks in range(2, 7) for name in ("interleaved", "seqsmartvpp", "gpipe")]
    assert sorted(found) == sorted([("1f1b", 1), ("zero_bubble_v", 2), *looped])
    assert settled_configs(replace(OPEN, chunks=1, schedule="1f1b"), 12) == [replace(OPEN, chunks=1, schedule="1f1b")]
    with pytest.raises(InputError, match="no schedule is possible"):
        settled_configs(replace(OPEN, schedule="zero_bubble_v", micro_batches=3), 12)


def test_the_best_candidate_wins_and_the_rest_are_named() -> None:
    flat = small()
    looped = replace(flat, schedule="interleaved", chunks=2, micro_batches=4)
    candidates = [Candidate("one chunk", flat), Candidate("two chunks", looped)]
    problem, solution = solve_best(candidates, "bmpipe", SolveLimits())
    times = {candidate.label: solve(candidate.problem).step_time_ms for candidate in candidates}
    assert solution.step_time_ms == min(time for time in times.values() if time is not None)
    assert problem in (flat, looped)
    assert solution.status is Status.OPTIMAL
    assert "compared one chunk" in solution.message
    assert "two chunks" in solution.message


def test_a_plan_with_open_settings_says_what_it_chose_and_passes_its_check() -> None:
    subject = subject_of_layers(LayerTable((BODY,), 0, 0.0, "table"), "table", OPEN)
    plan = make_plan(subject)
    # 12 ms x 3 x 4 micro-batches / 2 stages, and one unit's forward and backward before and after the other stage's.
    assert plan.solver.step_time_ms == pytest.approx(12 * 3 * 4 / 2 + 3)
    assert plan.settings["chunks"] > 1
    assert "zero_bubble_v with 2 chunk(s)" in plan.solver.message
    assert check_plan(plan, subject) == []
