"""Exact times against an event simulation, closed forms and published numbers."""

from __future__ import annotations

import heapq
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule import (
    Schedule,
    critical_paths,
    make_schedule,
    simulate,
    step_times,
    timeline,
)
from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.schedule.schedule import looped_placement, validate_schedule

DATA = Path(__file__).parent / "data"


def event_simulation(
    schedule: Schedule,
    forward: list[float],
    backward: list[float],
    weight: list[float],
    transfers: list[float],
    repeated: list[float] | None = None,
) -> dict[tuple[int, Action], tuple[float, float]]:
    """Start and end of every action, by running the stages as machines on an event queue.

    A stage starts its next action as soon as it is idle and the action's message has arrived; messages are sent when
    the sending action ends. Nothing here looks at a graph or a level.
    """
    whole = [inputs + weights for inputs, weights in zip(backward, weight, strict=True)]
    apart = weight if repeated is None else [own + again for own, again in zip(weight, repeated, strict=True)]
    durations = {"F": forward, "B": backward, "W": apart, "BW": whole}
    messages = {"F": "F", "B": "B", "BW": "B", "W": "W"}
    virtual_at = {(s, schedule.chunk_of_virtual[k]): k for k, s in enumerate(schedule.stage_of_virtual)}
    last = schedule.virtual_stages - 1
    arrived: dict[tuple[str, int, int], float] = {}
    position = [0] * schedule.stages
    busy = [False] * schedule.stages
    events: list[tuple[float, int, str, tuple[int, ...]]] = []
    times: dict[tuple[int, Action], tuple[float, float]] = {}
    counter = 0

    def try_start(stage: int, now: float) -> None:
        nonlocal counter
        if busy[stage] or position[stage] == len(schedule.orders[stage]):
            return
        action = schedule.orders[stage][position[stage]]
        k = virtual_at[stage, action.chunk]
        message = messages[action.kind]
        needs_message = (message == "F" and k > 0) or (message == "B" and k < last)
        if needs_message and (message, k, action.micro_batch) not in arrived:
            return
        busy[stage] = True
        end = now + durations[action.kind][k]
        times[stage, action] = (now, end)
        counter += 1
        heapq.heappush(events, (end, counter, "end", (stage,)))

    for stage in range(schedule.stages):
        try_start(stage, 0.0)
    while events:
        now, _, kind, data = heapq.heappop(events)
        if kind == "end":
            stage = data[0]
            action = schedule.orders[stage][position[stage]]
            k = virtual_at[stage, action.chunk]
            message = messages[action.kind]
            target = k + 1 if message == "F" and k < last else k - 1 if message == "B" and k > 0 else None
            if target is not None:
                delay = transfers[min(k, target)] if schedule.stage_of_virtual[target] != stage else 0.0
                counter += 1
                heapq.heappush(events, (now + delay, counter, message, (target, action.micro_batch)))
            position[stage] += 1
            busy[stage] = False
            try_start(stage, now)
        else:
            target, micro_batch = data
            arrived[kind, target, micro_batch] = now
            try_start(schedule.stage_of_virtual[target], now)
    assert len(times) == sum(map(len, schedule.orders)), "the order deadlocks"
    return times


def random_schedule(rng: random.Random) -> Schedule:
    """A valid order made by running random ready actions, so that it cannot deadlock."""
    stages, chunks, micro_batches = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 5)
    size = stages * chunks
    placement = list(looped_placement(stages, chunks))
    if chunks == 2 and rng.random() < 0.5:
        placement = [*range(stages), *reversed(range(stages))]
    chunk_of = [placement[:k].count(stage) for k, stage in enumerate(placement)]
    with_weight = rng.random() < 0.3
    waiting = {("F", 0, j) for j in range(micro_batches)}
    orders: list[list[Action]] = [[] for _ in range(stages)]
    while waiting:
        kind, k, j = rng.choice(sorted(waiting))
        waiting.remove((kind, k, j))
        whole = kind == "B" and with_weight and rng.random() < 0.4
        orders[placement[k]].append(Action("BW" if whole else kind, chunk_of[k], j))
        if kind == "F":
            waiting.add(("F", k + 1, j) if k + 1 < size else ("B", k, j))
        elif kind == "B":
            if k:
                waiting.add(("B", k - 1, j))
            if with_weight and not whole:
                waiting.add(("W", k, j))
    schedule = Schedule("custom", stages, chunks, micro_batches, tuple(map(tuple, orders)), tuple(placement))
    validate_schedule(schedule)
    return schedule


@pytest.mark.parametrize("seed", range(500))
def test_random_orders_agree_with_the_event_simulation(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    size = schedule.virtual_stages
    forward, backward, weight, repeated = (
        [rng.choice([0.0, rng.random(), 3.0]) for _ in range(size)] for _ in range(4)
    )
    transfer: float | list[float] = rng.choice([0.0, rng.random(), [rng.random() for _ in range(size - 1)]])
    transfers = list(np.broadcast_to(transfer, (size - 1,)))
    expected = event_simulation(schedule, forward, backward, weight, transfers, repeated)
    for timed in timeline(schedule, forward, backward, transfer, weight, repeated):
        assert (timed.start_ms, timed.end_ms) == pytest.approx(expected[timed.stage, timed.action])
    longest = max(end for _, end in expected.values())
    assert step_times(schedule, forward, backward, transfer, weight, repeated)[0] == pytest.approx(longest)
    for path in critical_paths(schedule, forward, backward, transfer, weight, repeated):
        length = np.dot(path.forward, forward) + np.dot(path.backward, backward) + np.dot(path.weight, weight)
        length += np.dot(path.apart, repeated) + np.dot(path.transfers, transfers)
        assert length == pytest.approx(longest)


@pytest.mark.parametrize("seed", range(20))
def test_a_path_bounds_the_time_of_every_other_plan(seed: int) -> None:
    rng = np.random.default_rng(seed)
    schedule = make_schedule("1f1b", 5, 1, 7)
    path = critical_paths(schedule, rng.random(5), rng.random(5), 0.3)[0]
    forward, backward = rng.random((50, 5)), rng.random((50, 5))
    lengths = forward @ path.forward + backward @ path.backward + sum(path.transfers) * 0.3
    assert (lengths <= step_times(schedule, forward, backward, 0.3) + 1e-12).all()


def test_paths_of_many_plans_are_those_of_each() -> None:
    rng = np.random.default_rng(3)
    schedule = make_schedule("zero_bubble_v", 3, 2, 7)
    forward, backward, weight = rng.random((3, 5, 6))
    transfers = rng.random((5, 5))
    both = critical_paths(schedule, forward, backward, transfers, weight)
    times = step_times(schedule, forward, backward, transfers, weight)
    assert len(both) == 10
    for index, path in enumerate(both):
        plan = index // 2
        length = forward[plan] @ path.forward + backward[plan] @ path.backward + weight[plan] @ path.weight
        assert length + transfers[plan] @ path.transfers == pytest.approx(times[plan])


@pytest.mark.parametrize("kind", ["1f1b", "seqpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (4, 2), (4, 4), (8, 32)])
def test_equal_stages_take_the_closed_form(kind: str, stages: int, micro_batches: int) -> None:
    time_ms = step_times(make_schedule(kind, stages, 1, micro_batches), [1.5] * stages, [2.5] * stages)[0]
    assert time_ms == pytest.approx((micro_batches + stages - 1) * 4.0)


@pytest.mark.parametrize("row", json.loads((DATA / "zero_bubble.json").read_text())["rows"])
def test_published_bubbles_of_1f1b(row: dict[str, float]) -> None:
    stages, micro_batches = int(row["p"]), int(row["m"])
    work = row["F_ms"] + row["I_ms"] + row["W_ms"]
    backward = [row["I_ms"] + row["W_ms"]] * stages
    schedule = make_schedule("1f1b", stages, 1, micro_batches)
    timed = timeline(schedule, [row["F_ms"]] * stages, backward, row["transfer_ms"])
    spans = [[entry for entry in timed if entry.stage == stage] for stage in range(stages)]
    longest = max(max(e.end_ms for e in span) - min(e.start_ms for e in span) for span in spans)
    assert (longest - micro_batches * work) / longest == pytest.approx(row["b_1f1b"], abs=1e-4)


@pytest.mark.parametrize("row", json.loads((DATA / "zero_bubble.json").read_text())["rows"])
def test_published_bubbles_of_the_interleaved_schedule(row: dict[str, float]) -> None:
    configs = json.loads((DATA / "zero_bubble.json").read_text())["configs"]
    layers = dict(zip(("1.5B", "6.2B", "14.6B", "28.3B"), configs["layers"], strict=True))
    stages, micro_batches = int(row["p"]), int(row["m"])
    # One layer a chunk; the embedding and the head take a layer's place each.
    chunks = (layers[str(row["model"])] + 2) // stages
    size = stages * chunks
    work = row["F_ms"] + row["I_ms"] + row["W_ms"]
    schedule = make_schedule("interleaved", stages, chunks, micro_batches)
    backward = [(row["I_ms"] + row["W_ms"]) / chunks] * size
    timed = timeline(schedule, [row["F_ms"] / chunks] * size, backward, row["transfer_ms"])
    spans = [[entry for entry in timed if entry.stage == stage] for stage in range(stages)]
    longest = max(max(e.end_ms for e in span) - min(e.start_ms for e in span) for span in spans)
    assert (longest - micro_batches * work) / longest == pytest.approx(row["b_1f1b_interleaved"], abs=0.005)


def test_a_batch_in_pieces_gives_each_plan_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule("1f1b", 4, 1, 6)
    rng = np.random.default_rng(0)
    forward, backward = rng.random((11, 4)), rng.random((11, 4))
    alone = [step_times(schedule, f, b, 0.1)[0] for f, b in zip(forward, backward, strict=True)]
    monkeypatch.setattr(simulate, "_MAX_CELLS", 200)
    assert step_times(schedule, forward, backward, 0.1).tolist() == alone


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="backward times have shape"):
        step_times(make_schedule("1f1b", 4, 1, 2), [1.0] * 4, [1.0] * 3)


def test_many_micro_batches_are_quick() -> None:
    schedule = make_schedule("1f1b", 16, 1, 512)
    step_times(schedule, np.ones(16), np.ones(16))
    start = time.perf_counter()
    step_times(schedule, np.ones((64, 16)), np.ones((64, 16)))
    # Measured at 0.03 s; the room is for slow machines, a Python loop over actions would still exceed it.
    assert time.perf_counter() - start < 1.0
