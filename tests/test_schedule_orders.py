"""Orders of the schedules, their text form, and what the validator says."""

from __future__ import annotations

import pytest

from mindspore_bmpipe.config import MINDSPORE_SCHEDULES
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule import (
    Action,
    ScheduleKind,
    dependency_graph,
    format_order,
    format_schedule,
    lookup,
    make_schedule,
    parse_order,
    parse_schedule,
    register,
    registered,
    splits_backward,
    step_times,
)

ONE_F_ONE_B_4_5 = """\
F0 F1 F2 F3 B0 F4 B1 B2 B3 B4
F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"""
ONE_F_ONE_B_4_2 = """\
F0 F1 B0 B1
F0 F1 B0 B1
F0 F1 B0 B1
F0 B0 F1 B1"""
GPIPE_2_2_3 = """\
F0 F1 F2 F0/1 F1/1 F2/1 B0/1 B1/1 B2/1 B0 B1 B2
F0 F1 F2 F0/1 F1/1 F2/1 B0/1 B1/1 B2/1 B0 B1 B2"""


@pytest.mark.parametrize(
    ("kind", "stages", "chunks", "micro_batches", "expected"),
    [
        ("1f1b", 4, 1, 5, ONE_F_ONE_B_4_5),
        ("1f1b", 4, 1, 2, ONE_F_ONE_B_4_2),
        ("gpipe", 4, 1, 5, ONE_F_ONE_B_4_5),
        ("gpipe", 2, 2, 3, GPIPE_2_2_3),
    ],
)
def test_orders_are_the_published_ones(kind: str, stages: int, chunks: int, micro_batches: int, expected: str) -> None:
    assert format_schedule(make_schedule(kind, stages, chunks, micro_batches)) == expected


@pytest.mark.parametrize("kind", registered())
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
@pytest.mark.parametrize("micro_batches", [1, 3, 7, 9, 16, 26])
def test_every_schedule_reads_back_and_has_no_deadlock(kind: str, stages: int, chunks: int, micro_batches: int) -> None:
    try:
        schedule = make_schedule(kind, stages, chunks, micro_batches)
    except InputError:
        return
    placement = schedule.stage_of_virtual
    assert parse_schedule(format_schedule(schedule), chunks, micro_batches, kind, placement) == schedule
    merged = sum(action.kind == "BW" for order in schedule.orders for action in order)
    per_pair = 3 if splits_backward(schedule) else 2
    assert dependency_graph(schedule).size == per_pair * stages * chunks * micro_batches - merged


def test_text_form_names_chunks_and_weight_gradients() -> None:
    text = "F0 F0/1 B0/1 W0/1 B0 W0"
    assert parse_order(text)[1:3] == (Action("F", 1, 0), Action("B", 1, 0))
    assert format_order(parse_order(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F0 X1", ["step 1", "X1"]),
        ("F0 B1 B0 F1", ["step 1", "[B1]", "forward has not run"]),
        ("F0 F0 B0", ["step 1", "[F0]", "already run"]),
        ("F0 B0 F2 B2", ["step 2", "[F2]", "no micro-batch 2"]),
        ("F0/3 B0/3", ["step 0", "no chunk 3"]),
        ("F0 B0 F1", ["step 3", "[end]", "without B1"]),
        ("F0 W0 B0", ["step 1", "backward has not run"]),
        ("F0 BW0 W0", ["step 2", "[W0]", "whole backward has already run"]),
        ("F0 B0 BW0", ["step 2", "[BW0]", "backward has already run"]),
        ("F0 BW0 F1 B1", ["step 4", "[end]", "without W1"]),
    ],
)
def test_validator_points_at_the_wrong_step(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_schedule(text, 1, 2)
    assert "stage 0" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_deadlock_says_where_each_stage_is_stuck() -> None:
    schedule = parse_schedule("F0 B0 F1 B1\nF1 B1 F0 B0", 1, 2)
    with pytest.raises(InputError, match=r"stage 0 waits at step 1 \(B0\).*stage 1 waits at step 0 \(F1\)"):
        dependency_graph(schedule)


def test_registry_normalises_refuses_duplicates_and_lists_names() -> None:
    assert lookup(" GPipe ").name == "gpipe"
    kind = lookup("gpipe")
    with pytest.raises(InputError, match="already registered"):
        register(ScheduleKind("GPIPE", kind.orders, 1))
    with pytest.raises(InputError, match="1f1b, gpipe, interleaved"):
        lookup("dualpipe")


def test_numbers_a_schedule_cannot_take() -> None:
    with pytest.raises(InputError, match="micro_batches: 0"):
        make_schedule("1f1b", 2, 1, 0)
    with pytest.raises(InputError, match="at most 1 chunk"):
        make_schedule("1f1b", 2, 2, 4)
    with pytest.raises(InputError, match="at least 2 chunks"):
        make_schedule("zero_bubble_v", 2, 1, 4)
    with pytest.raises(InputError, match="twice as many micro-batches"):
        make_schedule("zero_bubble_v", 3, 2, 5)
    with pytest.raises(InputError, match=r"as many micro-batches as stages \(4\)"):
        make_schedule("interleaved", 4, 2, 3)


def test_sequences_in_parts() -> None:
    # Seq1F1B with two parts: a micro-batch's parts return in the opposite order, each stage one part later.
    schedule = make_schedule("seqpipe", 2, 1, 2, 2)
    assert format_schedule(schedule) == "F0 F1 F2 B1 F3 B0 B3 B2\nF0 F1 B1 F2 B0 F3 B3 B2"
    assert (schedule.micro_batches, schedule.sequence_parts) == (4, 2)
    with pytest.raises(InputError, match="does not split sequences, got 2 parts; give 1, or one of the schedules seqp"):
        make_schedule("1f1b", 2, 1, 4, 2)
    with pytest.raises(InputError, match="sequence_parts: 0 is below 1"):
        make_schedule("seqpipe", 2, 1, 4, 0)
    with pytest.raises(InputError, match=r"at most as many parts as stages \(2\), got 3"):
        make_schedule("seqvpp", 2, 2, 4, 3)
    with pytest.raises(InputError, match=r"as many micro-batches as stages \(6\), parts of sequences counted, got 4"):
        make_schedule("seqsmartvpp", 6, 2, 2, 2)


@pytest.mark.parametrize(("stages", "micro_batches", "parts"), [(2, 4, 2), (4, 8, 2), (4, 12, 3), (3, 3, 3)])
def test_parts_divide_the_bubble(stages: int, micro_batches: int, parts: int) -> None:
    # (p - 1) t / k of equal stages, where whole sequences wait (p - 1) t.
    times = [1.0 / parts] * stages, [2.0 / parts] * stages
    step = step_times(make_schedule("seqpipe", stages, 1, micro_batches, parts), *times)[0]
    assert step - micro_batches * 3.0 == pytest.approx((stages - 1) * 3.0 / parts)


def test_supported_names_agree_with_the_registry() -> None:
    assert set(MINDSPORE_SCHEDULES) == set(registered())
