"""Long schedules, whose step times are extended by a period, against the full simulation."""

from __future__ import annotations

import random

import numpy as np
import pytest
from test_schedule_simulate import event_simulation

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule import (
    Schedule,
    dependency_graph,
    format_schedule,
    make_schedule,
    parse_schedule,
    periodic,
    registered,
    splits_backward,
    step_times,
    sweep,
    timeline,
)
from mindspore_bmpipe.schedule.periodic import find_period

SIZES = ((2, 1, 40), (5, 1, 131), (8, 1, 96), (4, 2, 64), (4, 3, 66), (3, 2, 61), (8, 2, 128))

Times = tuple[list[float], list[float], float | list[float], list[float] | None]


def schedules() -> list[Schedule]:
    """Long schedules of every kind."""
    made = []
    for kind in registered():
        for size in SIZES:
            try:
                made.append(make_schedule(kind, *size))
            except InputError:
                continue
    parts = (("seqpipe", 4, 1, 40, 3), ("seqpipe", 3, 2, 40, 2), ("seqvpp", 4, 2, 40, 2), ("seqsmartvpp", 4, 3, 41, 2))
    return made + [make_schedule(*setting) for setting in parts]


def random_times(rng: random.Random, schedule: Schedule) -> Times:
    """Times of virtual stages: whole numbers of equal layers, nearly equal, or anything; transfers free or not."""
    size = schedule.virtual_stages
    style = rng.choice(("layers", "near", "any", "equal"))
    forward = [
        {"layers": 30.3 * rng.randint(2, 4), "near": 1 + 0.01 * rng.random(), "any": rng.random(), "equal": 1.5}[style]
        for _ in range(size)
    ]
    backward = [2 * time + (rng.choice((0.0, 0.1)) if style != "equal" else 0.0) for time in forward]
    transfer = rng.choice((0.0, 0.05, 0.7, [rng.random() for _ in range(size - 1)]))
    if not splits_backward(schedule):
        return forward, backward, transfer, None
    return forward, [time / 2 for time in backward], transfer, [time / 2 for time in backward]


def full_simulation(schedule: Schedule, times: Times) -> float:
    """Largest end over all actions, every one of them simulated."""
    return max(entry.end_ms for entry in timeline(schedule, *times))


@pytest.mark.parametrize(
    "schedule", schedules(), ids=lambda s: f"{s.kind}-{s.stages}-{s.chunks}-{s.micro_batches}-{s.sequence_parts}"
)
def test_the_extended_time_is_that_of_the_full_simulation(schedule: Schedule) -> None:
    rng = random.Random(format_schedule(schedule)[:200])
    plans = [random_times(rng, schedule) for _ in range(12)]
    for times in plans:
        forward, backward, transfer, weight = times
        extended = step_times(schedule, forward, backward, transfer, weight)[0]
        assert extended == pytest.approx(full_simulation(schedule, times), rel=2e-11)


@pytest.mark.parametrize("kind", registered())
def test_the_extended_time_is_that_of_the_event_simulation(kind: str) -> None:
    schedule = make_schedule(kind, 4, max(1, min(2, 2 if kind == "zero_bubble_v" else 1)), 60)
    rng = random.Random(kind)
    for _ in range(4):
        forward, backward, transfer, weight = random_times(rng, schedule)
        transfers = list(np.broadcast_to(transfer, (len(forward) - 1,)))
        expected = event_simulation(schedule, forward, backward, weight or [0.0] * len(forward), transfers)
        longest = max(end for _, end in expected.values())
        assert step_times(schedule, forward, backward, transfer, weight)[0] == pytest.approx(longest, rel=2e-11)


@pytest.mark.parametrize(
    ("kind", "chunks", "per_block"),
    [("1f1b", 1, 1), ("interleaved", 3, 4), ("seqsmartvpp", 2, 4), ("zero_bubble_v", 2, 1), ("seqpipe/2", 2, 8)],
)
def test_the_period_shifts_every_action_and_its_predecessors(kind: str, chunks: int, per_block: int) -> None:
    name, _, parts = kind.partition("/")
    schedule = make_schedule(name, 4, chunks, 80 // int(parts or 1), int(parts or 1))
    graph = dependency_graph(schedule)
    period = find_period(graph)
    assert period is not None and period.micro_batches == per_block
    action_of = {}
    for stage, (order, numbers) in enumerate(zip(schedule.orders, graph.of_stage, strict=True)):
        action_of |= {int(number): (stage, action) for number, action in zip(numbers, order, strict=True)}
    for number in range(period.first, period.end - period.actions):
        (stage, action), (later_stage, later) = action_of[number], action_of[number + period.actions]
        assert later_stage == stage
        assert later == action._replace(micro_batch=action.micro_batch + per_block)
    # All but a warm-up, a cool-down and a part of a block.
    assert period.blocks * per_block >= 80 - 5 * 4


def test_several_chunks_of_gpipe_have_no_period() -> None:
    # Each phase waits for the end of the phase before it, any number of actions back.
    assert find_period(dependency_graph(make_schedule("gpipe", 4, 2, 64))) is None
    assert find_period(dependency_graph(make_schedule("1f1b", 4, 1, 8))) is None


def test_an_order_that_breaks_its_period_is_not_extended_across_the_break() -> None:
    text = format_schedule(make_schedule("1f1b", 2, 1, 60)).splitlines()
    # Stage 0 once runs two forwards before two backwards, which makes it wait.
    assert " F41 B40 F42 B41 " in text[0]
    text[0] = text[0].replace(" F41 B40 F42 B41 ", " F41 F42 B40 B41 ")
    schedule = parse_schedule("\n".join(text), 1, 60)
    for forward, backward in (([1.0, 1.0], [2.0, 2.0]), ([3.0, 1.0], [1.0, 2.5]), ([1.0, 4.0], [5.0, 1.0])):
        extended = step_times(schedule, forward, backward, 0.3)[0]
        assert extended == pytest.approx(full_simulation(schedule, (forward, backward, 0.3, None)), rel=1e-12)


def simulated_from(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """First actions of all simulations that run to the end."""
    seen: list[int] = []
    original = periodic._last_end

    def recorded(graph, period, durations, cut, state):  # type: ignore[no-untyped-def]
        seen.append(cut)
        return original(graph, period, durations, cut, state)

    monkeypatch.setattr(periodic, "_last_end", recorded)
    return seen


@pytest.mark.parametrize(
    ("forward", "backward", "transfer", "expected"),
    [
        # Equal stages without transfers: (m + p - 1) (F + B).
        ([1.0] * 4, [2.0] * 4, 0.0, (401 + 3) * 3.0),
        # With a transfer c, stage 0 starts micro-batch j + p when j is back, after p (F + B) + 2 (p - 1) c.
        ([1.0] * 4, [2.0] * 4, 0.5, 101 * (4 * 3 + 6 * 0.5)),
        # One slow stage: it never waits once it has started, so all else is the first forward and the last backward.
        ([1.0, 5.0, 1.0, 1.0], [2.0, 9.0, 2.0, 2.0], 0.0, 1.0 + 401 * 14.0 + 2.0),
    ],
)
def test_known_times_need_no_simulation_of_the_middle(
    forward: list[float], backward: list[float], transfer: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = make_schedule("1f1b", 4, 1, 401)
    period = find_period(dependency_graph(schedule))
    assert period is not None
    seen = simulated_from(monkeypatch)
    assert step_times(schedule, forward, backward, transfer)[0] == pytest.approx(expected, rel=1e-12)
    assert seen == [period.end]


def test_a_time_that_bounds_do_not_settle_is_simulated_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # Stages 0 and 3 take nearly the same time: the path that grows fastest is not yet the longest one.
    schedule = make_schedule("1f1b", 4, 1, 400)
    times: Times = ([2.0, 1.9, 0.5, 2.0], [4.0, 3.0, 0.5, 4.001], 0.7, None)
    seen = simulated_from(monkeypatch)
    extended = step_times(schedule, *times)[0]
    assert extended == pytest.approx(full_simulation(schedule, times), rel=1e-12)
    period = find_period(dependency_graph(schedule))
    assert period is not None
    assert seen[0] == period.end
    assert len(seen) == 2 and seen[1] < period.end


def test_a_plan_has_the_same_time_alone_and_among_others() -> None:
    schedule = make_schedule("interleaved", 4, 2, 96)
    rng = np.random.default_rng(3)
    forward = rng.integers(2, 5, (40, 8)) * 1.7
    backward = 2 * forward + rng.random((40, 8)) * rng.integers(0, 2, (40, 1))
    alone = [step_times(schedule, f, b, 0.1)[0] for f, b in zip(forward, backward, strict=True)]
    assert step_times(schedule, forward, backward, 0.1).tolist() == alone


@pytest.mark.parametrize("setting", [("1f1b", 5, 1, 60), ("interleaved", 3, 2, 60), ("zero_bubble_v", 4, 2, 60)])
@pytest.mark.parametrize("block", [1, 2, 5])
def test_both_bounds_hold_wherever_they_are_made(setting: tuple[str, int, int, int], block: int) -> None:
    schedule = make_schedule(*setting)
    graph = dependency_graph(schedule)
    period = find_period(graph)
    assert period is not None
    rng = random.Random(block)
    for _ in range(25):
        times = random_times(rng, schedule)
        forward, backward, transfer, weight = times
        durations = sweep.slot_durations(graph, forward, backward, weight, transfer)
        ends = sweep.end_times(graph, durations)
        lower, upper = periodic._bounds(graph, period, durations, ends[: period.cut(block)], block)
        full = full_simulation(schedule, times)
        assert lower[0] <= full * (1 + 1e-12)
        assert upper[0] >= full * (1 - 1e-12)
