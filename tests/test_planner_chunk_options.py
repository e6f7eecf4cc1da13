"""Choices of options for a stage with several chunks against plain enumeration."""

from __future__ import annotations

import random
from itertools import product

import pytest

from mindspore_bmpipe.planner.chunk_options import ChunkOptions
from mindspore_bmpipe.problem import Option, Problem, Run, schedule_of
from mindspore_bmpipe.schedule import Schedule


def most_kept(schedule: Schedule, stage: int, saved: list[int]) -> int:
    """Most bytes in flight while a stage runs its actions one by one, each chunk keeping `saved` per micro-batch."""
    held, most = 0, 0
    for action in schedule.orders[stage]:
        size = saved[action.chunk]
        if action.kind == "F":
            held += size
            most = max(most, held)
        else:
            held -= size
    return most


@pytest.mark.parametrize("seed", range(40))
def test_every_unbeaten_choice_is_listed(seed: int) -> None:
    rng = random.Random(seed)

    def option(number: int) -> Option:
        extra = rng.choice([0.0, float(rng.randint(1, 9))])
        return Option(str(number), rng.randint(0, 20), extra, rng.choice([0, 3, 8]))

    runs = tuple(
        Run(f"r{index}", 12, 1.0, 2.0, rng.randint(0, 5), tuple(map(option, range(rng.randint(1, 3)))))
        for index in range(2)
    )
    chunks = rng.randint(2, 3)
    problem = Problem(runs, "interleaved", 2, chunks, 4, (rng.randint(20, 60 * chunks),) * 2)
    stage = rng.randint(0, 1)
    segments = tuple(
        tuple((index, rng.randint(1, 2)) for index in sorted(rng.sample(range(2), rng.randint(1, 2))))
        for _ in range(chunks)
    )
    static = sum(units * runs[index].static_bytes for chunk in segments for index, units in chunk)
    slots = [(place, index) for place, chunk in enumerate(segments) for index, units in chunk for _ in range(units)]
    fitting: dict[tuple[float, ...], int] = {}
    for chosen in product(*(runs[index].options for _, index in slots)):
        saved, extra = [0] * chunks, [0.0] * chunks
        for (place, _), option in zip(slots, chosen, strict=True):
            saved[place] += option.saved_bytes
            extra[place] += option.extra_backward_ms
        working = max(option.working_set_bytes for option in chosen)
        peak = static + working + most_kept(schedule_of(problem), stage, saved)
        if peak <= problem.memory_limit_bytes[stage]:
            fitting[tuple(extra)] = min(peak, fitting.get(tuple(extra), peak))
    unbeaten = {
        extra
        for extra in fitting
        if not any(other != extra and all(map(float.__le__, other, extra)) for other in fitting)
    }
    listed = ChunkOptions(problem).patterns(stage, segments)
    if not fitting:
        assert listed.excess_bytes > 0
        return
    assert listed.excess_bytes == 0
    assert {tuple(row) for row in listed.extra_ms.tolist()} == unbeaten
    for number, (extra, peak) in enumerate(zip(listed.extra_ms.tolist(), listed.peak_bytes.tolist(), strict=True)):
        assert fitting[tuple(extra)] <= peak <= problem.memory_limit_bytes[stage]
        counts = listed.counts(number)
        for place, chunk in enumerate(segments):
            assert [sum(by_option) for by_option in counts[place]] == [units for _, units in chunk]
            assert extra[place] == sum(
                count * option.extra_backward_ms
                for (index, _), by_option in zip(chunk, counts[place], strict=True)
                for count, option in zip(by_option, runs[index].options, strict=True)
            )
