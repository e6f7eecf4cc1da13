"""Idle time by kind and memory over time, by hand and against the event simulation."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from test_schedule_simulate import event_simulation, random_schedule

from mindspore_bmpipe.schedule import (
    Action,
    MemoryPoint,
    Schedule,
    critical_actions,
    critical_paths,
    in_flight_rows,
    make_schedule,
    memory_curve,
    splits_backward,
    stage_idle,
    timeline,
)


def random_times(rng: random.Random, schedule: Schedule) -> tuple[list[float], list[float], float, list[float]]:
    forward, backward, weight = ([rng.random() + 0.1 for _ in range(schedule.virtual_stages)] for _ in range(3))
    return forward, backward, rng.choice([0.0, 0.4]), weight


def test_idle_time_of_two_stages_by_hand() -> None:
    # F = 1, B = 2, transfer 0.5, two micro-batches. Stage 0: F0 0-1, F1 1-2, then B0 waits for stage 1.
    # Stage 1: F0 1.5-2.5, B0 2.5-4.5, F1 4.5-5.5 (arrived at 2.5), B1 5.5-7.5. Stage 0: B0 5-7, B1 8-10.
    schedule = make_schedule("1f1b", 2, 1, 2)
    timed = timeline(schedule, [1.0, 1.0], [2.0, 2.0], 0.5)
    first, second = stage_idle(schedule, timed, 0.5)
    assert (first.busy_ms, first.warm_up_ms, first.waiting_ms) == (6.0, pytest.approx(2.5), 0.0)
    assert (first.cool_down_ms, first.communication_ms) == (pytest.approx(0.5), pytest.approx(1.0))
    assert (second.busy_ms, second.warm_up_ms, second.communication_ms) == (6.0, pytest.approx(1.0), pytest.approx(0.5))
    assert (second.waiting_ms, second.cool_down_ms) == (0.0, pytest.approx(2.5))


@pytest.mark.parametrize("stages", [2, 5])
def test_equal_stages_wait_p_minus_1_times(stages: int) -> None:
    schedule = make_schedule("1f1b", stages, 1, 20)
    timed = timeline(schedule, [1.0] * stages, [2.0] * stages)
    for entry in stage_idle(schedule, timed):
        assert entry.idle_ms == pytest.approx((stages - 1) * 3.0)
        # Forwards arrive after s of them; the first backward comes back after p - 1 - s stages' F + B, less the
        # forwards that the warm-up runs meanwhile; what is left is the end.
        ahead = stages - 1 - entry.stage
        assert entry.warm_up_ms == pytest.approx(entry.stage * 1.0 + ahead * (1.0 + 2.0) - ahead * 1.0)
        assert entry.communication_ms == 0.0


@pytest.mark.parametrize("seed", range(60))
def test_parts_add_up_to_the_idle_time_of_the_event_simulation(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    forward, backward, transfer, weight = random_times(rng, schedule)
    expected = event_simulation(schedule, forward, backward, weight, [transfer] * (len(forward) - 1))
    step = max(end for _, end in expected.values())
    timed = timeline(schedule, forward, backward, transfer, weight)
    for entry in stage_idle(schedule, timed, transfer):
        own = [(start, end, action) for (stage, action), (start, end) in expected.items() if stage == entry.stage]
        busy = sum(end - start for start, end, _ in own)
        assert entry.busy_ms == pytest.approx(busy)
        assert entry.busy_ms + entry.idle_ms == pytest.approx(step)
        first_backward = min(start for start, _, action in own if action.kind in ("B", "BW"))
        last_forward = max(end for _, end, action in own if action.kind == "F")
        if first_backward < last_forward:
            inside = sum(end - start for start, end, _ in own if first_backward <= start and end <= last_forward)
            waited = entry.waiting_ms
            assert waited <= last_forward - first_backward - inside + 1e-9
            if transfer == 0.0:
                assert waited == pytest.approx(last_forward - first_backward - inside)


@pytest.mark.parametrize("seed", range(60))
def test_memory_is_what_runs_and_waits_at_each_moment(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    forward, backward, transfer, weight = random_times(rng, schedule)
    expected = event_simulation(schedule, forward, backward, weight, [transfer] * (len(forward) - 1))
    timed = timeline(schedule, forward, backward, transfer, weight)
    saved = [rng.randint(1, 9) for _ in range(schedule.chunks)]
    release = ("W", "BW") if splits_backward(schedule) else ("B",)
    for stage, rows in enumerate(in_flight_rows(schedule)):
        curve = memory_curve(schedule, timed, stage, 100, saved, 7)
        for moment in (rng.random() * timed[-1].end_ms for _ in range(20)):
            held = 100
            for (where, action), (start, end) in expected.items():
                if where != stage:
                    continue
                if action.kind == "F" and start <= moment:
                    held += saved[action.chunk]
                if action.kind in release and end <= moment:
                    held -= saved[action.chunk]
                if action.kind != "F" and start <= moment < end:
                    held += 7
            assert [point for point in curve if point.time_ms <= moment][-1].bytes == held
        peak = max(sum(count * size for count, size in zip(row, saved, strict=True)) for row in rows)
        assert max(point.bytes for point in curve) == 100 + peak + 7
        assert curve[-1].bytes == 100


def test_memory_of_a_small_step_by_hand() -> None:
    schedule = make_schedule("1f1b", 1, 1, 2)
    timed = timeline(schedule, [1.0], [2.0])
    # F0 B0 F1 B1: while a backward ends and the next forward starts, one micro-batch replaces the other.
    expected = [(0.0, 60), (1.0, 63), (3.0, 60), (4.0, 63), (6.0, 50)]
    assert memory_curve(schedule, timed, 0, 50, [10], 3) == tuple(MemoryPoint(*point) for point in expected)


@pytest.mark.parametrize("seed", range(40))
def test_the_critical_actions_run_without_a_gap(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    forward, backward, transfer, weight = random_times(rng, schedule)
    path = critical_actions(schedule, forward, backward, transfer, weight)
    step = max(
        end
        for _, end in event_simulation(schedule, forward, backward, weight, [transfer] * (len(forward) - 1)).values()
    )
    assert path[0].start_ms == pytest.approx(0.0)
    assert path[-1].end_ms == pytest.approx(step)
    counts = critical_paths(schedule, forward, backward, transfer, weight)[0]
    sends = 0
    for before, after in pairwise(path):
        sends += before.stage != after.stage
        assert after.start_ms == pytest.approx(before.end_ms + (transfer if before.stage != after.stage else 0.0))
    assert sends == sum(counts.transfers)
    kinds = [entry.action.kind for entry in path]
    assert kinds.count("F") == sum(counts.forward)
    assert kinds.count("B") + kinds.count("BW") == sum(counts.backward)


def test_the_critical_path_of_one_slow_stage_stays_on_it() -> None:
    path = critical_actions(make_schedule("1f1b", 3, 1, 5), [1.0, 9.0, 1.0], [2.0, 9.0, 2.0])
    assert path[0].stage == 0 and path[-1].stage == 0
    assert [entry.stage for entry in path[1:-1]] == [1] * 10
    assert path[0].action == Action("F", 0, 0) and path[-1].action == Action("B", 0, 4)
