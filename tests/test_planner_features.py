"""Everything that makes devices or units unequal, one at a time, for one chunk and for two, against the oracle.

Each feature is put on plain problems that have none. A feature that a planner overlooked would leave the plan of the
plain problem, so the test also asserts that the oracle's best step time changes in some of the cases.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from mindspore_bmpipe.planner import SolveLimits, solve
from mindspore_bmpipe.problem import Option, Pin, Problem, Run, check

LIMITS = SolveLimits(relative_gap=1e-7, effort=0.2)
CASES = 6


def plain(rng: random.Random, chunks: int) -> Problem:
    """Two runs of units on two stages, the first slow enough for a stage of its own, and room for most they keep."""
    runs = tuple(
        Run(
            f"r{index}", count, slow * rng.uniform(3, 4), slow * rng.uniform(6, 8), rng.randint(10, 99),
            (Option("none", rng.randint(50, 99), 0.0), Option("full", rng.randint(1, 20), rng.uniform(0.5, 3.0))),
        )
        for index, (count, slow) in enumerate(((2, 2.0), (4, 1.0)))
    )  # fmt: skip
    schedule = "1f1b" if chunks == 1 else rng.choice(["interleaved", "seqpipe", "zero_bubble_v", "gpipe"])
    return Problem(runs, schedule, 2, chunks, 4, ({1: 600, 2: 1800}[chunks],) * 2)


def unequal_limits(rng: random.Random, problem: Problem) -> Problem:
    limit = problem.memory_limit_bytes[0]
    return replace(problem, memory_limit_bytes=(limit * rng.randint(4, 7) // 10, limit * 2))


def unequal_speeds(rng: random.Random, problem: Problem) -> Problem:
    return replace(problem, stage_speeds=(rng.choice([0.5, 0.8]), rng.choice([1.0, 1.7])))


def pinned(rng: random.Random, problem: Problem) -> Problem:
    first = rng.randrange(1, 4)
    return replace(problem, pins=(Pin(first, first + 1, rng.randrange(2)),))


def forbidden_cuts(rng: random.Random, problem: Problem) -> Problem:
    # The even cut among them.
    return replace(problem, forbidden_cuts=frozenset({2, rng.choice([0, 1, 3, 4])}))


def tied_ends(rng: random.Random, problem: Problem) -> Problem:
    """Units that share weights and so must share a stage: both ends where the stages form a V, else the first four."""
    if problem.chunks == 1:
        return replace(problem, pins=(Pin(0, 0, 0), Pin(3, 3, 0)))
    return replace(problem, schedule="zero_bubble_v", pins=(Pin(0, 0, 0), Pin(4, 5, 0)))


def transfers(rng: random.Random, problem: Problem) -> Problem:
    return replace(problem, transfer_ms=rng.uniform(0.5, 4.0))


def cut_transfers(rng: random.Random, problem: Problem) -> Problem:
    """What is sent differs from cut to cut, and how fast from stage to stage."""
    sent = [rng.choice([0.1, 1.0, 6.0]) for _ in range(problem.units - 1)]
    table = tuple(tuple(rng.choice([0.5, 1.5]) * size for size in sent) for _ in range(problem.virtual_stages - 1))
    return replace(problem, cut_transfers_ms=table)


def frozen_units(rng: random.Random, problem: Problem) -> Problem:
    return replace(problem, runs=(replace(problem.runs[0], trainable=False), problem.runs[1]))


def shared_inputs(rng: random.Random, problem: Problem) -> Problem:
    return replace(problem, shared_saved_bytes=rng.randint(60, 120), stage_constant_bytes=rng.randint(0, 90))


def working_sets(rng: random.Random, problem: Problem) -> Problem:
    limit = problem.memory_limit_bytes[0]
    sizes = (0, limit // 2, limit * 3 // 4)
    runs = []
    for run in problem.runs:
        options = tuple(replace(option, working_set_bytes=rng.choice(sizes)) for option in run.options)
        runs.append(replace(run, options=options))
    return replace(problem, runs=tuple(runs))


FEATURES = (
    unequal_limits, unequal_speeds, pinned, forbidden_cuts, tied_ends, transfers, cut_transfers,
    frozen_units, shared_inputs, working_sets,
)  # fmt: skip


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_every_feature_against_the_oracle(feature: Callable[[random.Random, Problem], Problem], chunks: int) -> None:
    changed = planned = 0
    for seed in range(CASES):
        rng = random.Random(f"{feature.__name__} {chunks} {seed}")
        without = plain(rng, chunks)
        problem = feature(rng, without)
        oracle, solution = solve(problem, "exhaustive"), solve(problem, "bmpipe", LIMITS)
        assert solution.status is oracle.status
        before = solve(without, "exhaustive").step_time_ms
        if oracle.step_time_ms is None or solution.decision is None:
            changed += before is not None
            continue
        planned += 1
        changed += before is None or abs(before - oracle.step_time_ms) > 1e-6 * before
        assert solution.step_time_ms == pytest.approx(oracle.step_time_ms, rel=1e-7)
        assert check(problem, solution.decision) == ()
        assert solution.bound_ms is not None and solution.bound_ms <= oracle.step_time_ms * (1 + 1e-9)
    assert changed
    assert planned
