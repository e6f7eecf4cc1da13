"""From CONFIG and costs to a problem."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problem_samples import random_problem, small

from mindspore_bmpipe.config import parse_config
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner import solve
from mindspore_bmpipe.problem import Option, Pin, Problem, Run, check
from mindspore_bmpipe.problem_config import problem_from_config, usable_bytes

BODY = small().runs[0]
RUNS = (Run("head", 1, 1.0, 1.0, 1, (Option("none", 0, 0.0),)), BODY, Run("tail", 1, 1.0, 1.0, 1, BODY.options))
BASE = {"stages": 2, "micro_batches": 4, "memory_limit": "1GB"}


def make(**extra: object) -> Problem:
    return problem_from_config(RUNS, parse_config({**BASE, **extra}))


def test_defaults() -> None:
    problem = make()
    assert (problem.schedule, problem.chunks, problem.memory_limit_bytes) == ("1f1b", 1, (10**9, 10**9))
    assert make(memory_limit=["1GB", 7]).memory_limit_bytes == (10**9, 7)


def test_a_margin_is_kept_free_of_every_limit() -> None:
    assert make(memory_margin="25%", memory_limit=[1000, 999]).memory_limit_bytes == (800, 799)
    assert make(memory_margin=0).memory_limit_bytes == make().memory_limit_bytes


def with_larger_bytes(problem: Problem, factor: int) -> Problem:
    """The problem in which everything takes `factor` times the bytes."""
    runs = tuple(
        replace(
            run,
            static_bytes=factor * run.static_bytes,
            update_bytes=factor * run.update_bytes,
            options=tuple(
                replace(
                    option,
                    saved_bytes=factor * option.saved_bytes,
                    working_set_bytes=factor * option.working_set_bytes,
                )
                for option in run.options
            ),
        )
        for run in problem.runs
    )
    constant, shared = factor * problem.stage_constant_bytes, factor * problem.shared_saved_bytes
    return replace(problem, runs=runs, stage_constant_bytes=constant, shared_saved_bytes=shared)


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_with_a_margin_is_the_best_of_those_that_fit_with_larger_bytes(seed: int) -> None:
    # With integers throughout: bytes and limits times four, bytes a quarter higher against the limits.
    tight = random_problem(seed)
    limits = tuple(4 * limit for limit in tight.memory_limit_bytes)
    planned = with_larger_bytes(replace(tight, memory_limit_bytes=usable_bytes(limits, 0.25)), 4)
    higher = with_larger_bytes(replace(tight, memory_limit_bytes=limits), 5)
    mine, expected = solve(planned), solve(higher, "exhaustive")
    assert (mine.step_time_ms is None) == (expected.step_time_ms is None)
    if mine.decision is not None and expected.step_time_ms is not None:
        assert mine.step_time_ms == pytest.approx(expected.step_time_ms, rel=2e-4)
        assert check(higher, mine.decision) == ()


@pytest.mark.parametrize(
    ("units", "pin"),
    [
        ("0-3", Pin(0, 3, 1)),
        (5, Pin(5, 5, 1)),
        ("tail", Pin(5, 5, 1)),
        ("body", Pin(1, 4, 1)),
        ("body[1-2]", Pin(2, 3, 1)),
        ("body[3]", Pin(4, 4, 1)),
    ],
)
def test_pins_by_index_range_and_name(units: object, pin: Pin) -> None:
    assert make(pins=[{"units": units, "stage": 1}]).pins == (pin,)


@pytest.mark.parametrize(
    ("units", "words"),
    [("neck", "the runs are head, body, tail"), ("body[2-4]", "units are 0-3"), ("0-9", "units 0-9 do not exist")],
)
def test_pins_that_name_nothing(units: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(pins=[{"units": units, "stage": 1}])


def test_a_name_shared_by_runs_cannot_be_pinned() -> None:
    config = parse_config({**BASE, "pins": [{"units": "body", "stage": 0}]})
    with pytest.raises(InputError, match="several runs are named body"):
        problem_from_config((BODY, RUNS[0], BODY), config)


def test_options_are_filtered_but_never_all_removed() -> None:
    problem = make(recompute_options=["full"])
    assert [[option.name for option in run.options] for run in problem.runs] == [["none"], ["full"], ["full"]]
    with pytest.raises(InputError, match="no unit has an option half; the options are full, none"):
        make(recompute_options=["half"])


def test_missing_and_unsupported_keys() -> None:
    with pytest.raises(InputError, match="micro_batches, memory_limit is missing"):
        problem_from_config(RUNS, parse_config({"stages": 2}))
    with pytest.raises(InputError, match="schedule 1f1b takes at most 1 chunk"):
        make(schedule="1f1b", chunks=2)


def test_schedule_and_chunks_that_are_not_given() -> None:
    assert make(chunks=2).schedule == "interleaved"
    assert make(schedule="zero_bubble_v").chunks == 2
