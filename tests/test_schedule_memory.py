"""In-flight rows against the published formulas and a brute-force count."""

from __future__ import annotations

import random

import pytest
from test_schedule_simulate import random_schedule

from mindspore_bmpipe.schedule import in_flight_rows, make_schedule, pareto_maximal


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (4, 2), (4, 4), (4, 9), (8, 3)])
def test_counts_are_the_published_ones(stages: int, micro_batches: int) -> None:
    expected = tuple(((min(micro_batches, stages - stage),),) for stage in range(stages))
    assert in_flight_rows(make_schedule("1f1b", stages, 1, micro_batches)) == expected
    assert in_flight_rows(make_schedule("gpipe", stages, 1, micro_batches)) == (((micro_batches,),),) * stages


@pytest.mark.parametrize("seed", range(30))
def test_rows_bound_the_memory_of_every_moment(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    for stage, rows in enumerate(in_flight_rows(schedule)):
        sizes = [rng.random() for _ in range(schedule.chunks)]
        order = schedule.orders[stage]
        release = "W" if any(action.kind == "W" for action in order) else "B"
        highest = 0.0
        for step in range(len(order)):
            alive = {(a.chunk, a.micro_batch) for a in order[: step + 1] if a.kind == "F"}
            alive -= {(a.chunk, a.micro_batch) for a in order[:step] if a.kind == release}
            highest = max(highest, sum(sizes[chunk] for chunk, _ in alive))
        by_rows = max(sum(count * size for count, size in zip(row, sizes, strict=True)) for row in rows)
        assert by_rows == pytest.approx(highest)


def test_only_maximal_rows_are_kept() -> None:
    assert pareto_maximal([(1, 2), (2, 1), (1, 1), (2, 1), (0, 2)]) == ((2, 1), (1, 2))
