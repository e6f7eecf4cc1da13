"""Evaluation and checking of decisions, against hand calculations and published numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from problem_samples import DATA, case_a, small

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.problem import (
    Decision,
    Option,
    Pin,
    Problem,
    Run,
    check,
    evaluate,
    expand_decision,
)

EXPECTED = json.loads((DATA / "case_a_v1.expected.json").read_text())
MB = 10**6

EVEN_SMALL = Decision((((2, 0), (1, 1)),))


def case_a_decision(body: list[tuple[int, int, int, int]]) -> Decision:
    head = tuple((int(stage == 0),) for stage in range(16))
    tail = tuple((int(stage == 15),) for stage in range(16))
    return Decision((head, tuple(body), tail))


def test_small_plan_by_hand() -> None:
    evaluation = evaluate(small(), EVEN_SMALL)
    # Stage 0: F 2, B 4. Stage 1: F 2, B 4 + 1. Stage 1 is never idle once started: 2 + 4 * 7, then B of stage 0.
    assert evaluation.step_time_ms == pytest.approx(2 + 4 * 7 + 4)
    assert evaluation.ideal_ms == 4 / 2 * 12
    # Two micro-batches in flight on stage 0 (2 units * 5 bytes), one on stage 1 (5 + 1 and a working set of 2).
    assert [(s.static_bytes, s.peak_bytes, s.limit_bytes) for s in evaluation.stages] == [(20, 40, 40), (20, 28, 40)]
    assert [(c.forward_ms, c.backward_ms) for s in evaluation.stages for c in s.chunks] == [(2, 4), (2, 5)]
    bubble = evaluation.bubble
    assert bubble.total == pytest.approx(34 / 24 - 1)
    assert (bubble.preparation, bubble.recompute) == pytest.approx((1 / 4, 4 / 2 * 1 / 24))
    assert bubble.communication == 0
    assert bubble.imbalance == pytest.approx(bubble.total - bubble.preparation - bubble.recompute)


def test_transfers_are_a_loss_of_their_own() -> None:
    free = evaluate(small(), EVEN_SMALL)
    paid = evaluate(small(transfer_ms=0.5), EVEN_SMALL)
    assert paid.step_time_ms > free.step_time_ms
    assert paid.bubble.communication == pytest.approx((paid.step_time_ms - free.step_time_ms) / 24)
    assert paid.bubble.imbalance == pytest.approx(free.bubble.imbalance)


def test_published_bubble_of_the_tool_s_own_plan() -> None:
    offset = [-1, 0, 0, -1, -2, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1]
    select = [5, 6, 5, 5, 0, 3, 6, 6, 1, 1, 1, 1, 1, 1, 1, 0]
    comm = [5, 4, 5, 0, 0, 3, 0, 0, 1, 4, 0, 0, 0, 0, 0, 0]
    body = [
        (6 + o - max(s, c), s - min(s, c), c - min(s, c), min(s, c))
        for o, s, c in zip(offset, select, comm, strict=True)
    ]
    bubble = evaluate(case_a(), case_a_decision(body)).bubble
    published = EXPECTED["plans"]["published_example"]
    assert bubble.total == pytest.approx(published["bubble"], abs=1e-4)
    assert bubble.preparation == published["preparation"]
    assert bubble.imbalance == pytest.approx(published["imbalance"], abs=1e-4)
    assert bubble.recompute == pytest.approx(published["recompute"], abs=1e-4)


def test_published_bubble_and_peak_of_the_even_plan() -> None:
    evaluation = evaluate(case_a(), case_a_decision([(0, 0, 0, 6)] * 16))
    published = EXPECTED["plans"]["even_both"]
    # The times of the table are fitted to four printed bubbles at once, which leaves 3e-4 here.
    assert evaluation.ideal_ms == EXPECTED["ideal_ms"]
    assert evaluation.bubble.total == pytest.approx(published["bubble"], abs=3e-4)
    assert evaluation.bubble.imbalance == pytest.approx(published["imbalance"], abs=3e-4)
    assert evaluation.bubble.recompute == pytest.approx(published["recompute"], abs=3e-4)
    assert evaluation.stages[1].peak_bytes == published["stage_peaks_mb_first"][1] * MB
    # Stage 0 is printed one stage constant higher than the table it was fitted with gives: constant, head, six layers,
    # sixteen micro-batches of six layers. No other stage shows that constant twice.
    by_hand = 1206 + 3408 + 6 * 2217 + 16 * 6 * 423
    assert evaluation.stages[0].peak_bytes == by_hand * MB
    assert published["stage_peaks_mb_first"][0] == by_hand + 1206


def test_units_are_expanded_in_network_and_option_order() -> None:
    placements = expand_decision(small(), EVEN_SMALL)
    assert [p.unit for p in placements] == [0, 1, 2, 3]
    assert [p.stage for p in placements] == [p.virtual_stage for p in placements] == [0, 0, 1, 1]
    assert [p.option_index for p in placements] == [0, 0, 0, 1]


def test_a_feasible_plan_has_no_violations_and_one_byte_less_has_one() -> None:
    assert check(small(), EVEN_SMALL) == ()
    (violation,) = check(small(memory_limit_bytes=(39, 40)), EVEN_SMALL)
    assert violation.kind == "memory"
    assert "stage 0 needs 40 bytes, 1 more than its limit of 39" in violation.message


def test_all_violations_are_reported() -> None:
    option = (Option("none", 0, 0.0),)
    runs = (Run("a", 2, 1.0, 1.0, 10, option), Run("b", 2, 1.0, 1.0, 10, option, trainable=False))
    problem = Problem(runs, "1f1b", 2, 1, 2, (15, 15), forbidden_cuts=frozenset({1}), pins=(Pin(0, 0, 1),))
    in_order = Decision((((2,), (0,)), ((0,), (2,))))
    assert [v.kind for v in check(problem, in_order)] == ["trainable", "memory", "memory", "pin", "forbidden_cut"]
    out_of_order = Decision((((0,), (2,)), ((1,), (0,))))
    kinds = [violation.kind for violation in check(problem, out_of_order)]
    assert kinds == ["count", "order", "trainable", "memory"]
    assert [v.kind for v in check(problem, Decision(((),)))] == ["shape"]


def test_evaluate_refuses_counts_that_do_not_fit_the_problem() -> None:
    with pytest.raises(InputError, match="3 units are placed, the run has 4"):
        evaluate(small(), Decision((((2, 0), (1, 0)),)))
    with pytest.raises(InputError, match="2 options"):
        evaluate(small(), Decision((((2,), (2,)),)))


RUN = small().runs[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runs": ()}, "runs: there are none"),
        ({"stages": 5, "memory_limit_bytes": (40,) * 5}, "5 stages of 1 chunk.*the network has 4; lower stages"),
        ({"stages": 0}, "stages: 0 is not allowed"),
        ({"micro_batches": 0}, "micro_batches: 0 is not allowed"),
        ({"schedule": "dualpipe"}, "unknown schedule 'dualpipe'"),
        ({"chunks": 2}, "at most 1 chunk"),
        ({"memory_limit_bytes": (40,)}, "1 limits for 2 stages"),
        ({"memory_limit_bytes": (40, -1)}, r"memory_limit_bytes\[1\]: -1"),
        ({"stage_constant_bytes": -1}, "stage_constant_bytes: -1"),
        ({"shared_saved_bytes": -1}, "shared_saved_bytes: -1"),
        ({"transfer_ms": float("nan")}, "transfer_ms: nan"),
        ({"forbidden_cuts": frozenset({3})}, "3 is no cut; give the unit before it, 0 to 2"),
        ({"pins": (Pin(3, 4, 0),)}, "units 3-4 do not exist"),
        ({"pins": (Pin(0, 0, 2),)}, "there is no stage 2"),
        ({"runs": (replace(RUN, count=0),)}, r"body\).count: 0"),
        ({"runs": (replace(RUN, forward_ms=-1.0),)}, "forward_ms: -1.0"),
        ({"runs": (replace(RUN, static_bytes=1.5),)}, "static_bytes: 1.5"),
        ({"runs": (replace(RUN, options=()),)}, "options: there are none"),
        ({"runs": (replace(RUN, options=RUN.options[:1] * 2),)}, "none appears more than once"),
        ({"runs": (replace(RUN, options=(Option("x", -5, 0.0),)),)}, r"\(x\).saved_bytes: -5"),
        ({"runs": (replace(RUN, forward_ms=0.0, backward_ms=0.0),)}, "all forward and backward times are 0"),
    ],
)
def test_impossible_problems_name_the_field(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        small(**changes)


def test_shared_bytes_are_kept_once_for_each_micro_batch_in_flight() -> None:
    # 1f1b on 3 stages has 3, 2 and 1 micro-batches in flight; nothing else uses memory here.
    body = Run("body", 3, 1.0, 2.0, 0, (Option("none", 0, 0.0),))
    problem = Problem((body,), "1f1b", 3, 1, 8, (1000,) * 3, shared_saved_bytes=7)
    decision = Decision((((1,), (1,), (1,)),))
    evaluation = evaluate(problem, decision)
    assert [stage.peak_bytes for stage in evaluation.stages] == [21, 14, 7]
    assert [stage.static_bytes for stage in evaluation.stages] == [0, 0, 0]


def test_updating_weights_is_a_moment_of_its_own() -> None:
    # Two micro-batches in flight on stage 0, one on stage 1: 20 + 2 * 2 * 5 against 20 + 2 * 7, and 20 + 10 against it.
    body = Run("body", 4, 1.0, 2.0, 10, (Option("none", 5, 0.0),), update_bytes=7)
    problem = Problem((body,), "1f1b", 2, 1, 4, (40, 33))
    decision = Decision((((2,), (2,)),))
    assert [stage.peak_bytes for stage in evaluate(problem, decision).stages] == [40, 34]
    assert [violation.where for violation in check(problem, decision)] == ["stage 1"]
