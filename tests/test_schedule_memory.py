"""In-flight rows against the published formulas and a brute-force count."""

from __future__ import annotations

import random

import pytest
from test_schedule_simulate import random_schedule

from mindspore_bmpipe.schedule import extreme_rows, in_flight_rows, make_schedule, pareto_maximal, splits_backward


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (4, 2), (4, 4), (4, 9), (8, 3)])
def test_counts_are_the_published_ones(stages: int, micro_batches: int) -> None:
    expected = tuple(((min(micro_batches, stages - stage),),) for stage in range(stages))
    assert in_flight_rows(make_schedule("1f1b", stages, 1, micro_batches)) == expected
    if micro_batches > 1:
        everything = ((micro_batches, micro_batches),)
        assert in_flight_rows(make_schedule("gpipe", stages, 2, micro_batches)) == (everything,) * stages


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"), [(4, 2, 8), (4, 3, 16), (8, 2, 8), (2, 6, 10), (3, 2, 3)]
)
def test_chunks_in_flight_are_the_published_ones(stages: int, chunks: int, micro_batches: int) -> None:
    large = in_flight_rows(make_schedule("interleaved", stages, chunks, micro_batches))
    small = in_flight_rows(make_schedule("seqsmartvpp", stages, chunks, micro_batches))
    for stage in range(stages):
        most = max(map(sum, large[stage]))
        assert most == min(chunks * micro_batches, (chunks - 1) * stages + 2 * (stages - stage - 1) + 1)
        assert max(map(sum, small[stage])) == min(chunks * micro_batches, (chunks - 1) * stages + stages - stage)


@pytest.mark.parametrize(("stages", "parts"), [(4, 2), (3, 3), (8, 4)])
def test_parts_in_flight_are_the_published_ones(stages: int, parts: int) -> None:
    # Seq1F1B: p - s + k - 1 parts, a k-th of a sequence each.
    rows = in_flight_rows(make_schedule("seqpipe", stages, 1, 2 * stages, parts))
    assert rows == tuple(((stages - stage + parts - 1,),) for stage in range(stages))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_v_keeps_two_p_chunks_on_every_stage(stages: int) -> None:
    rows = in_flight_rows(make_schedule("zero_bubble_v", stages, 2, 4 * stages))
    assert [max(map(sum, stage_rows)) for stage_rows in rows] == [2 * stages] * stages


@pytest.mark.parametrize("seed", range(40))
def test_extreme_rows_reach_the_largest_memory(seed: int) -> None:
    rng = random.Random(seed)
    rows = pareto_maximal(tuple(rng.randint(0, 6) for _ in range(rng.randint(1, 4))) for _ in range(1))
    width = len(rows[0])
    rows = pareto_maximal(tuple(rng.randint(0, 6) for _ in range(width)) for _ in range(12))
    extreme = extreme_rows(rows)
    assert set(extreme) <= set(rows)
    for _ in range(20):
        sizes = [rng.random() for _ in range(width)]
        most = max(sum(c * s for c, s in zip(row, sizes, strict=True)) for row in rows)
        assert max(sum(c * s for c, s in zip(row, sizes, strict=True)) for row in extreme) == pytest.approx(most)


@pytest.mark.parametrize("seed", range(30))
def test_rows_bound_the_memory_of_every_moment(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    for stage, rows in enumerate(in_flight_rows(schedule)):
        sizes = [rng.random() for _ in range(schedule.chunks)]
        order = schedule.orders[stage]
        release = ("W", "BW") if splits_backward(schedule) else ("B",)
        highest = 0.0
        for step in range(len(order)):
            alive = {(a.chunk, a.micro_batch) for a in order[: step + 1] if a.kind == "F"}
            alive -= {(a.chunk, a.micro_batch) for a in order[:step] if a.kind in release}
            highest = max(highest, sum(sizes[chunk] for chunk, _ in alive))
        by_rows = max(sum(count * size for count, size in zip(row, sizes, strict=True)) for row in rows)
        assert by_rows == pytest.approx(highest)


def test_only_maximal_rows_are_kept() -> None:
    assert pareto_maximal([(1, 2), (2, 1), (1, 1), (2, 1), (0, 2)]) == ((2, 1), (1, 2))
