"""Stages that are busy while they send: by hand, against the event simulation, and the planner against enumeration."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from problem_samples import random_chunked_problem, random_problem, small
from test_planner_bmpipe import TIGHT, assert_same_optimum
from test_schedule_simulate import event_simulation

from mindspore_bmpipe.config import parse_config
from mindspore_bmpipe.layer_table import parse_layer_table
from mindspore_bmpipe.planner import Status, solve
from mindspore_bmpipe.planner.base import Clock
from mindspore_bmpipe.planner.milp import plan_counts
from mindspore_bmpipe.planner.milp_counts import CountModel
from mindspore_bmpipe.planning import make_plan, pose
from mindspore_bmpipe.problem import Problem, evaluate
from mindspore_bmpipe.report.simulation import simulate_plan
from mindspore_bmpipe.schedule import critical_paths, make_schedule, splits_backward, step_times
from mindspore_bmpipe.subjects import subject_of_layers

KINDS = [
    ("1f1b", 4, 1, 9), ("1f1b", 3, 1, 60), ("interleaved", 3, 2, 6), ("interleaved", 2, 3, 64), ("gpipe", 2, 2, 4),
    ("seqpipe", 3, 2, 7), ("zero_bubble_v", 3, 2, 7),
]  # fmt: skip
"""Kind, stages, chunks, micro-batches; the long ones are not simulated whole."""


def test_two_stages_by_hand() -> None:
    """F = 1, B = 2, messages of 0.5; stage 0 and stage 1 line by line, each action with what it sends:

    F 0-1.5, F 1.5-3, B 5-7, B 8.5-10.5
    F 1.5-2.5, B 2.5-5, F 5-6, B 6-8.5
    """
    assert step_times(make_schedule("1f1b", 2, 1, 2, sends_block=True), [1, 1], [2, 2], 0.5)[0] == 10.5
    # Messages that occupy nobody: B of stage 1 at 2.5-4.5 and 5.5-7.5, so stage 0 ends at 10.
    assert step_times(make_schedule("1f1b", 2, 1, 2), [1, 1], [2, 2], 0.5)[0] == 10


@pytest.mark.parametrize(("kind", "stages", "chunks", "micro_batches"), KINDS)
def test_a_send_is_part_of_the_action_before_it(kind: str, stages: int, chunks: int, micro_batches: int) -> None:
    schedule = make_schedule(kind, stages, chunks, micro_batches, sends_block=True)
    rng = random.Random(stages + micro_batches)
    size = schedule.virtual_stages
    forward, backward, weight = ([rng.uniform(1, 3) for _ in range(size)] for _ in range(3))
    if not splits_backward(schedule):
        weight = [0.0] * size
    transfers = [rng.uniform(0, 0.5) for _ in range(size - 1)]
    # Neighbours on one stage, where a V turns, send nothing.
    crossing = [one != other for one, other in pairwise(schedule.stage_of_virtual)]
    longer_forward, longer_backward = list(forward), list(backward)
    for k in range(size - 1):
        longer_forward[k] += transfers[k] * crossing[k]
        longer_backward[k + 1] += transfers[k] * crossing[k]
    events = event_simulation(schedule, longer_forward, longer_backward, weight, [0.0] * (size - 1))
    step = max(end for _, end in events.values())
    assert step_times(schedule, forward, backward, transfers, weight)[0] == pytest.approx(step)
    for path in critical_paths(schedule, forward, backward, transfers, weight):
        length = np.dot(path.forward, forward) + np.dot(path.backward, backward) + np.dot(path.weight, weight)
        assert length + np.dot(path.transfers, transfers) == pytest.approx(step)


def blocking(problem: Problem, seed: int) -> Problem:
    """The problem with a random time for every cut, all of them blocking."""
    rng = random.Random(seed)
    rows = tuple(
        tuple(rng.choice([0.0, 0.5, 2.0, 6.0]) for _ in range(problem.units - 1))
        for _ in range(problem.virtual_stages - 1)
    )
    return replace(problem, cut_transfers_ms=rows, sends_block=True)


def compare(problem: Problem) -> bool:
    """Whether there is a plan; planner, integer program over counts and enumeration must agree."""
    best = solve(problem, "exhaustive")
    for found in (solve(problem, "bmpipe", TIGHT), plan_counts("counts", problem, TIGHT, Clock(TIGHT))):
        assert_same_optimum(problem, found, best)
        if found.decision is not None:
            assert evaluate(problem, found.decision).step_time_ms == pytest.approx(found.step_time_ms)
    return best.decision is not None


def test_plans_are_the_best_ones() -> None:
    assert sum(compare(blocking(random_problem(seed), seed)) for seed in range(40)) >= 10


def test_plans_of_several_chunks_are_the_best_ones() -> None:
    assert sum(compare(blocking(random_chunked_problem(seed), seed)) for seed in range(12)) >= 4


@pytest.mark.parametrize(("schedule", "chunks", "micro_batches"), [("1f1b", 1, 4), ("interleaved", 2, 4)])
def test_start_times_in_the_program_count_sends(schedule: str, chunks: int, micro_batches: int) -> None:
    """With one start time per action, the program's step time is the simulated one, without any path."""
    problem = blocking(
        small(schedule=schedule, chunks=chunks, micro_batches=micro_batches, memory_limit_bytes=(400, 400)), 3
    )
    model = CountModel(problem, TIGHT)
    model.add_start_times()
    best = solve(problem, "exhaustive").step_time_ms
    decision, bound, complete = model.solve(Clock(TIGHT), TIGHT.node_limit)
    assert complete and decision is not None
    assert evaluate(problem, decision).step_time_ms == pytest.approx(best, rel=1e-5)
    assert bound == pytest.approx(best, rel=1e-5)


LAYERS = {
    "format": "bmpipe-layers/1",
    "transfer_ms": 0.5,
    "units": [{"name": "body", "count": 2, "forward_ms": 1, "backward_ms": 2, "static_bytes": 1,
               "options": [{"name": "none", "saved_bytes": 1, "extra_backward_ms": 0}]}],
}  # fmt: skip


@pytest.mark.parametrize(("overlap", "step"), [(None, 10.0), (["transfers"], 10.0), (["weights"], 10.5), ([], 10.5)])
def test_the_settings_say_whether_messages_block(overlap: list[str] | None, step: float) -> None:
    config = parse_config({"stages": 2, "micro_batches": 2, "memory_limit": 100, "overlap": overlap})
    subject = subject_of_layers(parse_layer_table(LAYERS), "net", config)
    assert pose(subject).sends_block == (step == 10.5)
    plan = make_plan(subject)
    assert plan.solver.status == Status.OPTIMAL.value and plan.solver.step_time_ms == step
    simulation = simulate_plan(plan)
    assert simulation.step_time_ms == step
    for idle in simulation.idle:
        assert idle.busy_ms + idle.idle_ms == pytest.approx(step)
    # What the stages send is part of their busy time: 0.5 for each of two micro-batches.
    assert [idle.busy_ms for idle in simulation.idle] == [6 + (step == 10.5)] * 2
