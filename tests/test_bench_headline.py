"""The comparison on public models: errors of costs, the joint choice, and what the page says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from problem_samples import random_chunked_problem, random_problem

from mindspore_bmpipe.planner import SolveLimits, solve
from mindspore_bmpipe.problem import Decision, Option, Problem, Run, check, evaluate, expand_decision
from tools.bench.headline import DRAWS, Task, measure
from tools.bench.joint import joint_choice
from tools.bench.results_page import render
from tools.bench.results_wrong import failed, kept_gain
from tools.bench.wrong_costs import (
    MEMORY_ERROR,
    TIME_ERROR,
    judged,
    judged_by_units,
    with_margin,
    wrong_kinds,
)

LAYER = (Option("none", 60, 0.0, 9), Option("full", 10, 1.0, 40))
SMALL = Problem(
    runs=(
        Run("embedding", 1, 0.5, 1.0, 100, (Option("none", 0, 0.0),)),
        Run("layer", 8, 1.0, 2.0, 100, LAYER, update_bytes=30),
        Run("head", 1, 1.5, 3.0, 100, (Option("none", 20, 0.0, 7),)),
    ),
    schedule="1f1b",
    stages=2,
    chunks=1,
    micro_batches=8,
    memory_limit_bytes=(900, 900),
    stage_constant_bytes=50,
    transfer_ms=0.1,
)
LIMITS = SolveLimits(time_limit_s=5.0)


def written_out(problem: Problem, decision: Decision, draw: int, draws: int, seed: int) -> tuple[Problem, Decision]:
    """The problem with a run for each unit, wrong by the factors of one draw, and the plan for it."""
    generator = np.random.default_rng(seed)
    times = generator.uniform(1 - TIME_ERROR, 1 + TIME_ERROR, (2, draws, problem.units))[:, draw]
    sizes = generator.uniform(1 - MEMORY_ERROR, 1 + MEMORY_ERROR, (2, draws, problem.units))[:, draw]
    runs, counts = [], []
    for place, (forward, backward), (static, saved) in zip(
        expand_decision(problem, decision), times.T, sizes.T, strict=True
    ):
        run = problem.runs[place.run]
        # A thousand times the bytes, so that rounding to whole ones hardly shows.
        options = tuple(
            Option(
                option.name,
                round(1000 * saved * option.saved_bytes),
                forward * option.extra_backward_ms,
                round(1000 * saved * option.working_set_bytes),
            )
            for option in run.options
        )
        runs.append(
            replace(
                run,
                count=1,
                forward_ms=forward * run.forward_ms,
                backward_ms=backward * run.backward_ms,
                weight_gradient_ms=backward * run.split_weight_ms,
                static_bytes=round(1000 * static * run.static_bytes),
                update_bytes=round(1000 * static * run.update_bytes),
                options=options,
            )
        )
        rows = [[0] * len(options) for _ in range(problem.virtual_stages)]
        rows[place.virtual_stage][place.option_index] = 1
        counts.append(tuple(map(tuple, rows)))
    larger = replace(
        problem,
        runs=tuple(runs),
        memory_limit_bytes=tuple(1000 * limit for limit in problem.memory_limit_bytes),
        stage_constant_bytes=1000 * problem.stage_constant_bytes,
        shared_saved_bytes=1000 * problem.shared_saved_bytes,
    )
    return larger, Decision(tuple(counts))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble_v", 2)])
def test_errors_of_units_are_those_of_a_problem_with_a_run_for_each_unit(schedule: str, chunks: int) -> None:
    problem = replace(SMALL, schedule=schedule, chunks=chunks, shared_saved_bytes=5, memory_limit_bytes=(1200, 1200))
    decision = solve(problem, "even", LIMITS).decision
    assert decision is not None
    peaks = [stage.peak_bytes for stage in evaluate(problem, decision).stages]
    # Limits that some draws exceed and some do not.
    problem = replace(problem, memory_limit_bytes=tuple(peaks))
    found = judged_by_units(problem, decision, 3, draws=12)
    assert 0 < sum(found.fits) < 12
    for draw in range(12):
        larger, same = written_out(problem, decision, draw, 12, 3)
        assert found.times_ms[draw] == pytest.approx(evaluate(larger, same).step_time_ms)
        assert found.fits[draw] == (check(larger, same) == ())


@pytest.mark.parametrize("seed", range(8))
def test_right_costs_are_within_the_errors_around_the_planned_ones(seed: int) -> None:
    problem = random_problem(seed)
    planned = wrong_kinds(problem, seed)
    for right, wrong in zip(problem.runs, planned.runs, strict=True):
        for name, error in (("forward_ms", TIME_ERROR), ("backward_ms", TIME_ERROR), ("static_bytes", MEMORY_ERROR)):
            was, now = getattr(right, name), getattr(wrong, name)
            # Bytes are rounded up to whole ones.
            assert (1 - error) * (now - 1) <= was <= (1 + error) * now * (1 + 1e-12)
        assert len({option.name for option in wrong.options}) == len(right.options)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_with_a_margin_fits_whatever_the_errors(seed: int) -> None:
    problem = random_chunked_problem(seed)
    decision = solve(with_margin(wrong_kinds(problem, seed), MEMORY_ERROR), "even", LIMITS).decision
    if decision is not None:
        assert judged(problem, decision)[1]
    decision = solve(with_margin(problem, MEMORY_ERROR), "even", LIMITS).decision
    if decision is not None:
        assert all(judged_by_units(problem, decision, seed).fits)


def test_the_joint_choice_is_never_slower_than_what_it_chose_from() -> None:
    own = solve(SMALL, "bmpipe", LIMITS)
    assert own.decision is not None and own.step_time_ms is not None
    joint = joint_choice(SMALL, [own.decision], SolveLimits(time_limit_s=20.0), 3)
    # m = 8 is enough for a V on two stages, and three chunks of ten units are possible.
    assert {"1f1b x 1", "zero_bubble_v x 2", "interleaved x 2", "interleaved x 3"} <= set(joint["choices"])
    assert not any(name.endswith("x 4") for name in joint["choices"])
    times = [time for time in joint["choices"].values() if time is not None]
    assert joint["step_time_ms"] == min(times) <= own.step_time_ms
    assert joint["bound_ms"] <= joint["step_time_ms"] * (1 + 1e-9)
    assert joint["by_hand"]["schedule"].split(" x ")[0] in ("1f1b", "interleaved")
    assert joint["by_hand"]["step_time_ms"] >= joint["step_time_ms"]
    assert min(joint["same_schedule"].values()) >= joint["step_time_ms"] * (1 - 1e-9)


def wrong(planned: float, manual: list[float], mine: list[float], fits: list[bool]) -> dict[str, Any]:
    """Figures of one instance with errors."""
    rows = {"bmpipe": {"times_ms": mine, "fits": fits}, "megatron_manual": {"times_ms": manual, "fits": [True] * 2}}
    planners = {"bmpipe": {"step_time_ms": 100.0}, "megatron_manual": {"step_time_ms": 100.0 * planned}}
    return {"planners": planners, "wrong": {"kinds": rows}}


def test_gain_kept_by_hand() -> None:
    # Gains of 21 % and 44 % without errors, 1.1 and 1.2 squared: their geometric mean is 1.32. With errors the first
    # keeps a ratio of 1.21; the second has only the draw that fits, 1.1 squared: 1.21 for both.
    results = [
        wrong(1.21, [121.0, 242.0], [100.0, 200.0], [True, True]),
        wrong(1.44, [150.0, 121.0], [100.0, 100.0], [False, True]),
    ]
    found = kept_gain(results, "kinds", "bmpipe", "megatron_manual")
    assert (found.instances, found.draws) == (2, 3)
    assert found.gain == pytest.approx(0.21)
    assert found.kept == pytest.approx(0.21 / 0.32)
    assert failed(results, "kinds", "bmpipe") == (1, 4)


def test_page_says_what_was_found() -> None:
    result = measure(Task("llama2-7b", "medium", 20.0, 6.0, 10.0, 2, 1))
    rows = result["planners"]
    mine = rows["bmpipe"]["step_time_ms"]
    assert all(row["step_time_ms"] >= mine for row in rows.values() if "step_time_ms" in row)
    assert rows["megatron_even_selective"]["status"] == "infeasible"
    assert result["joint"]["step_time_ms"] <= mine
    for error, draws in (("kinds", 1), ("units", DRAWS)):
        assert result["wrong"][error]["bmpipe margin"]["fits"] == [True] * draws
    settings = {"hardware": "ascend910b", "room": {"medium": 0.5}, "most_gib": 58, "draws": DRAWS, "time_limit": 20.0,
                "joint_limit": 6.0, "wrong_limit": 10.0, "seeds": 1, "most_chunks": 2, "jobs": 1, "seconds": 1300.0,
                "time_error": 0.1, "memory_error": 0.05}  # fmt: skip
    page = render([result], settings)
    assert "Nothing was measured on an accelerator" in page
    assert f"| llama2-7b/medium | {result['limit_gib']:.1f} | {mine:.0f} |" in page
    assert f"{rows['pipedream']['step_time_ms'] / mine:.3f}" in page
    assert "inf." in page
    assert "| < 1200 s | 1300 s: no |" in page
    least = min(rows[name]["step_time_ms"] for name in ("pipedream", "merak", "adapipe"))
    assert f"| >= 1.27 | {least / mine:.3f}: no | llama2-7b/medium |" in page
    assert "| 1f1b x 1 | 1.000 (x 1) |" in page
    # The step time is proved, and AdaPipe's plan is as fast.
    assert "- llama2-7b/medium: adapipe" in page
