"""Transfers by what a cut sends and where its stages are: by hand, and from a network to a simulated plan."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters
from problem_samples import small

from mindspore_bmpipe.config import parse_config
from mindspore_bmpipe.costs.hardware import Link, load_hardware
from mindspore_bmpipe.costs.network import network_costs
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.trace import trace
from mindspore_bmpipe.plan import load_plan
from mindspore_bmpipe.planning import check_plan, make_plan, pose
from mindspore_bmpipe.problem import Decision, evaluate
from mindspore_bmpipe.report.simulation import simulate_plan
from mindspore_bmpipe.subjects import Subject, subject_of_network
from mindspore_bmpipe.transfers import least_transfers, split_transfers, with_cuts

WIDTHS = (64, 64, 32, 32, 8, 8)
"""Widths of what each layer makes."""
SAMPLES = 100_000
"""Of one rank, so that bytes count beside latencies."""


class Narrowing(nn.Cell):
    """Dense layers of falling width, then the mean of squares as loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList(
            [nn.Dense(before, after, has_bias=False) for before, after in zip((64, *WIDTHS), WIDTHS, strict=False)]
        )

    def construct(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = layer(states)
        return ops.mean(ops.square(states))


@pytest.fixture(scope="module")
def narrowing() -> Subject:
    """Four stages of four data-parallel ranks: two stages share a node of eight."""
    with no_init_parameters():
        network = Narrowing()
    config = parse_config(
        {"stages": 4, "micro_batches": 8, "data_parallel": 4, "micro_batch_size": SAMPLES, "hardware": "ascend910b"}
    )
    return subject_of_network(network_costs(trace(network, Tensor(np.zeros((2, 64)), ms.float32))), config)


def test_a_step_pays_for_the_cut_it_makes() -> None:
    """Forward 2 and backward 4 on stage 0, forward 2 and backward 5 on stage 1, which works without a break once it has
    started (`test_small_plan_by_hand`): the first message and the last are on the critical path.
    """
    problem = small(transfer_ms=9.0, cut_transfers_ms=((0.25, 0.5, 4.0),))
    assert evaluate(problem, Decision((((2, 0), (1, 1)),))).step_time_ms == pytest.approx(34 + 2 * 0.5)
    # Three units on stage 0: forward 3, backward 6 and every backward there waits for its own; 4.0 each way.
    other = evaluate(problem, Decision((((3, 0), (1, 0)),))).step_time_ms
    assert other == evaluate(small(transfer_ms=4.0), Decision((((3, 0), (1, 0)),))).step_time_ms


def test_least_transfers_leave_out_cuts_that_nobody_makes() -> None:
    """Four units on three virtual stages: the first cut comes after unit 0 or 1, the second after unit 1 or 2."""
    problem = small(stages=3, memory_limit_bytes=(40,) * 3, cut_transfers_ms=((3.0, 2.0, 1.0), (1.0, 5.0, 4.0)))
    assert least_transfers(problem).tolist() == [2.0, 4.0]
    table = np.array(problem.cut_transfers_ms)
    assert split_transfers(table, [[0, 1, 3, 4], [0, 2, 3, 4]]).tolist() == [[3.0, 4.0], [2.0, 4.0]]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (((1.0, 2.0),), "give 1 rows, one for each virtual stage but the last, of 3 times"),
        (((1.0, -2.0, 0.0),), r"cut_transfers_ms\[0\]\[1\]: -2.0"),
    ],
)
def test_tables_that_cannot_be(table: tuple[tuple[float, ...], ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(cut_transfers_ms=table)


def test_a_v_returns_over_the_same_links() -> None:
    """Stages 0 1 1 0: the turn stays on stage 1, and the way back uses the link of the way there."""
    slow = Link(1.0, 10.0, 10.0)
    problem = small(schedule="zero_bubble_v", chunks=2, memory_limit_bytes=(1000,) * 2)
    found = with_cuts(problem, (10, 20, 30), (slow, Link(0.0, 1000.0, 1000.0)))
    assert found.cut_transfers_ms == ((2.0, 3.0, 4.0), (0.0, 0.0, 0.0), (2.0, 3.0, 4.0))


def test_what_each_cut_sends(narrowing: Subject) -> None:
    """The float32 result of the layer before it."""
    names = [unit.name for unit in narrowing.units]
    for layer, width in enumerate(WIDTHS[:-1]):
        assert narrowing.cut_bytes[names.index(f"layers.{layer}")] == 4 * SAMPLES * width


def test_times_follow_from_bytes_and_places(narrowing: Subject) -> None:
    problem, machine = pose(narrowing), load_hardware("ascend910b")
    assert len(problem.cut_transfers_ms) == 3
    for row, link in zip(
        problem.cut_transfers_ms, (machine.intra_node, machine.inter_node, machine.intra_node), strict=True
    ):
        expected = [link.latency_ms + size / link.pair_bytes_per_ms for size in narrowing.cut_bytes]
        assert row == pytest.approx(expected)
    assert max(map(max, problem.cut_transfers_ms)) <= problem.transfer_ms * (1 + 1e-12)


def test_a_plan_records_the_transfers_of_its_cuts(narrowing: Subject, tmp_path: Path) -> None:
    plan = make_plan(narrowing)
    problem = pose(narrowing)
    placed = [unit.stage for unit in plan.units]
    cuts = [placed.index(stage) - 1 for stage in (1, 2, 3)]
    assert plan.transfer_ms == tuple(problem.cut_transfers_ms[stage][cut] for stage, cut in enumerate(cuts))
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert simulate_plan(again).step_time_ms == pytest.approx(plan.solver.step_time_ms)
    assert check_plan(again, narrowing) == []
