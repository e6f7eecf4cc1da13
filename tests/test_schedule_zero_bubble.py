"""The bubble of the V that MindSpore compiles: where it comes from, and why it stays above that of ZB-H2."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_schedule_simulate import event_simulation

from mindspore_bmpipe.schedule import Action, make_schedule, parse_order, timeline

DATA = Path(__file__).parent / "data"
COMPILED = sorted((DATA / "compiled_orders").glob("zero_bubble_v_*.txt"))
ROWS = json.loads((DATA / "zero_bubble.json").read_text())["rows"]


def excess(stages: int, forward: float, inputs: float) -> float:
    """What the path of `test_a_path_through_the_compiled_order` takes above the work of a stage."""
    return (stages - 1) * (forward + inputs)


def zb_h2_excess(stages: int, forward: float, inputs: float, weights: float) -> float:
    """Bubble of ZB-H2, for the times of a whole stage (arXiv 2401.10241, table 2)."""
    return (stages - 1) * (forward + inputs - 2 * weights)


@pytest.mark.parametrize("path", [path for path in COMPILED if "refused" not in path.read_text()], ids=lambda p: p.stem)
def test_a_path_through_the_compiled_order(path: Path) -> None:
    """The first forward runs down to the last stage, which then works until the last gradient leaves it for stage 0.

    Of the weight gradients the last stage leaves p for later, but stage 0 has p of its own left when that gradient
    arrives. So the step takes at least

        (p - 1) f + [2 m (f + i) + (2 m - p) w] + (p - 1) i + p w = 2 m (f + i + w) + (p - 1) (f + i)

    with f, i, w the times of one chunk.
    """
    stages, micro_batches = map(int, re.findall(r"_[pm](\d+)", path.stem))
    lines = [parse_order(line) for line in path.read_text().splitlines()[1:]]
    for order in lines[:-1]:
        assert order[0] == Action("F", 0, 0)
        # The last gradient passes this stage on its way to stage 0.
        assert Action("B", 0, micro_batches - 1) in order or Action("BW", 0, micro_batches - 1) in order
    last = lines[-1]
    leaves = last.index(Action("B", 0, micro_batches - 1))
    before = [action.kind for action in last[: leaves + 1]]
    assert before.count("F") == before.count("B") + before.count("BW") == 2 * micro_batches
    assert before.count("W") + before.count("BW") == 2 * micro_batches - stages
    first = lines[0]
    after = first[first.index(Action("B", 0, micro_batches - 1)) + 1 :]
    assert [action.kind for action in after] == ["W"] * stages


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 7), (4, 8), (4, 20)])
@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1.0, 1.0, 1.0), (1.0, 1.0, 0.8), (1.1, 1.0, 0.9)])
def test_that_path_is_the_longest_where_the_three_are_nearly_equal(
    stages: int, micro_batches: int, forward: float, inputs: float, weights: float
) -> None:
    schedule = make_schedule("zero_bubble_v", stages, 2, micro_batches)
    size = 2 * stages
    expected = event_simulation(schedule, [forward] * size, [inputs] * size, [weights] * size, [0.0] * (size - 1))
    step = max(end for _, end in expected.values())
    work = 2 * micro_batches * (forward + inputs + weights)
    assert step - work == pytest.approx(excess(stages, forward, inputs))
    # ZB-H2 wastes less unless weight gradients take less than a quarter of forward and input gradient together.
    assert step - work > zb_h2_excess(stages, 2 * forward, 2 * inputs, 2 * weights) + stages / 2


@pytest.mark.parametrize("row", ROWS)
def test_rates_for_the_published_times(row: dict[str, float]) -> None:
    stages, micro_batches, size = int(row["p"]), int(row["m"]), 2 * int(row["p"])
    chunk = [row[key] / 2 for key in ("F_ms", "I_ms", "W_ms")]
    schedule = make_schedule("zero_bubble_v", stages, 2, micro_batches)
    forward, inputs, weights = ([time] * size for time in chunk)
    rates = {}
    for transfer in (0.0, row["transfer_ms"]):
        # Stage 0 has the first start and the last end, so the step time is the longest span of a stage.
        step = max(entry.end_ms for entry in timeline(schedule, forward, inputs, transfer, weights))
        rates[transfer] = 1 - 2 * micro_batches * sum(chunk) / step
    lost = excess(stages, chunk[0], chunk[1])
    assert rates[0.0] == pytest.approx(lost / (lost + 2 * micro_batches * sum(chunk)), abs=1e-9)
    assert rates[0.0] < row["b_zb_h1"]
    # The published figures count transfers.
    assert row["b_zb_h2"] < rates[row["transfer_ms"]] < row["b_1f1b"]


def test_the_largest_published_setting() -> None:
    row = next(row for row in ROWS if row["model"] == "28.3B" and row["m"] == 96)
    forward, inputs, weights = ([row[key] / 2] * 64 for key in ("F_ms", "I_ms", "W_ms"))
    work = 96 * (row["F_ms"] + row["I_ms"] + row["W_ms"])
    schedule = make_schedule("zero_bubble_v", 32, 2, 96)
    step = max(entry.end_ms for entry in timeline(schedule, forward, inputs, 0.0, weights))
    # 31 * (5.2095 + 5.1035) = 319.7 ms above 2720.7 ms of work; ZB-H2: 31 * (10.419 + 10.207 - 15.43) = 161.1 ms.
    assert 1 - work / step == pytest.approx(319.70 / (319.70 + 2720.74), abs=1e-5)
    h2 = zb_h2_excess(32, row["F_ms"], row["I_ms"], row["W_ms"])
    assert h2 == pytest.approx(161.08, abs=0.01)
    assert 1 - work / step > 0.105 > row["b_zb_h2"] > h2 / (h2 + work)
