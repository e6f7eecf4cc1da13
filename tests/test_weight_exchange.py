"""Gathers of weights and sums of gradients among data-parallel ranks: what is counted where, and times by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_schedule_simulate import event_simulation

from mindspore_bmpipe.config import OVERLAPS, Config, parse_config
from mindspore_bmpipe.costs.hardware import load_hardware
from mindspore_bmpipe.costs.network import EvaluatedCosts, NetworkCosts, UnitCost, evaluate_costs, network_costs
from mindspore_bmpipe.costs.static_memory import StaticSettings
from mindspore_bmpipe.costs.unit_times import Exchange, UnitTimes
from mindspore_bmpipe.costs.weight_exchange import Moment, weight_collectives
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import Sharding
from mindspore_bmpipe.graph.trace import trace
from mindspore_bmpipe.plan import Plan, load_plan
from mindspore_bmpipe.planning import make_plan
from mindspore_bmpipe.report.explain import explain
from mindspore_bmpipe.report.simulation import render_simulation, simulate_plan, simulation_summary
from mindspore_bmpipe.report.summary import plan_summary
from mindspore_bmpipe.report.tables import render_plan
from mindspore_bmpipe.schedule import make_schedule, splits_backward, step_with_ends
from mindspore_bmpipe.subjects import subject_of_network
from tests.graph_networks import stack

MACHINE = load_hardware("ascend910b")
VOLUME = 256 * 128 * 4
"""Bytes of a float32 weight, and of its gradient, in the stack below."""
ONE_WAY = 0.010 + VOLUME / 2 / 19e6 + 0.005
"""Milliseconds to gather a weight among two cards of one server, or share out a gradient: 10 us, half of it over the
link of a pair (19 GB/s), 5 us to launch."""
BOTH_WAYS = 2 * (0.010 + VOLUME / 2 / 19e6) + 0.005
"""The same for an AllReduce."""


@pytest.fixture(scope="module")
def costs() -> NetworkCosts:
    """Four layers of two float32 weights of 128 KB each."""
    network, states = stack(layers=4, width=128, inner=256, batch=4)
    return network_costs(trace(network, states))


def evaluated(costs: NetworkCosts, ranks: int = 2, level: int = 0, overlap: tuple[str, ...] = ()) -> EvaluatedCosts:
    static = StaticSettings(Sharding(ranks, 1), level)
    return evaluate_costs(costs, MACHINE, {"b": 4}, static, [MACHINE.intra_node], overlap=overlap)


def unit(costs: NetworkCosts, name: str, **settings: Any) -> UnitCost:
    return next(unit for unit in evaluated(costs, **settings).units if unit.unit.name == name)


def test_unshared_weights_are_summed_once_a_step(costs: NetworkCosts) -> None:
    alone, shared = unit(costs, "layers.1", ranks=1), unit(costs, "layers.1")
    assert (alone.gather_ms, alone.reduce_ms, alone.weight_collectives) == (0, 0, ())
    assert (shared.forward_ms, shared.backward_ms, shared.gather_ms) == (alone.forward_ms, alone.backward_ms, 0)
    assert shared.reduce_ms == pytest.approx(2 * BOTH_WAYS)


@pytest.mark.parametrize(
    ("shares", "data_shares", "ranks"),
    [(1, 1, (0, 1, 2, 3, 4, 5, 6, 7)), (2, 1, (0, 2, 4, 6)), (2, 2, (0, 1, 2, 3)), (4, 2, (0, 2)), (8, 4, ())],
)
def test_ranks_with_the_same_share_sum_its_gradient(
    costs: NetworkCosts, shares: int, data_shares: int, ranks: tuple[int, ...]
) -> None:
    """Eight ranks in pairs of tensor parallelism; experts are told apart by the slowest-changing axis."""
    weights = {
        name: replace(weight, shares=shares, data_shares=data_shares) for name, weight in costs.graph.parameters.items()
    }
    graph = replace(costs.graph, parameters=weights)
    number = next(number for number, unit in enumerate(costs.split.units) if unit.name == "layers.1")
    found = weight_collectives(graph, costs.split, number, StaticSettings(Sharding(4, 2)))
    assert {collective.ranks for collective in found} == ({ranks} if ranks else set())


def test_neighbours_hold_what_fewer_parts_than_ranks_are_made_of(costs: NetworkCosts) -> None:
    """Two samples, four ranks each, halves: ranks 0 and 1 of each four hold the first one (compiled: `pairs of 4`)."""
    graph = replace(
        costs.graph, parameters={name: replace(weight, shares=2) for name, weight in costs.graph.parameters.items()}
    )
    found = weight_collectives(graph, costs.split, 1, StaticSettings(Sharding(2, 4)))
    assert {collective.ranks for collective in found} == {(0, 1, 4, 5)}


def test_weights_that_are_not_trained_are_gathered_only(costs: NetworkCosts) -> None:
    """As compiled (`pairs`): shared out like others, without gradients to sum."""
    frozen = {name: replace(weight, trainable=False) for name, weight in costs.graph.parameters.items()}
    graph = replace(costs.graph, parameters=frozen)
    settings = [StaticSettings(Sharding(2, 1), level) for level in range(4)]
    moments = [[item.moment.name for item in weight_collectives(graph, costs.split, 1, each)] for each in settings]
    assert moments == [[], ["START"] * 2, ["START"] * 2, ["FORWARD", "BACKWARD"] * 2]


def test_level_1_gathers_before_and_sums_after_the_pipeline(costs: NetworkCosts) -> None:
    alone, shared = unit(costs, "layers.1", ranks=1), unit(costs, "layers.1", level=1)
    assert (shared.forward_ms, shared.backward_ms) == (alone.forward_ms, alone.backward_ms)
    assert shared.gather_ms == pytest.approx(2 * ONE_WAY)
    assert shared.reduce_ms == pytest.approx(2 * ONE_WAY)


def test_level_2_shares_out_gradients_in_every_backward(costs: NetworkCosts) -> None:
    alone, shared = unit(costs, "layers.1", ranks=1), unit(costs, "layers.1", level=2)
    assert shared.forward_ms == alone.forward_ms
    assert shared.backward_ms == pytest.approx(alone.backward_ms + 2 * ONE_WAY)
    assert (shared.gather_ms, shared.reduce_ms) == (pytest.approx(2 * ONE_WAY), 0)


def test_level_3_gathers_in_forward_and_again_in_backward(costs: NetworkCosts) -> None:
    alone, shared = unit(costs, "layers.1", ranks=1), unit(costs, "layers.1", level=3)
    assert shared.forward_ms == pytest.approx(alone.forward_ms + 2 * ONE_WAY)
    assert shared.backward_ms == pytest.approx(alone.backward_ms + 4 * ONE_WAY)
    assert (shared.gather_ms, shared.reduce_ms) == (0, 0)
    # Nothing needs the gradient of the network's input, so the first product of all is not gathered for backward.
    first = unit(costs, "layers.0", level=3)
    in_backward = [item.weight for item in first.weight_collectives if item.moment is Moment.BACKWARD]
    assert in_backward.count("layers.0.up.weight") == 1 and in_backward.count("layers.0.down.weight") == 2


def test_recomputation_gathers_nothing_more(costs: NetworkCosts) -> None:
    """As compiled: backward has gathered what runs again."""
    alone, shared = unit(costs, "layers.1", ranks=1), unit(costs, "layers.1", level=3)
    assert [option.extra_backward_ms for option in shared.options] == pytest.approx(
        [option.extra_backward_ms for option in alone.options]
    )


def test_small_weights_and_uneven_ones_are_not_shared_out() -> None:
    """Below 64 KB (64 x 128 x 4 = 32 KB), or with an axis of 256 among 3 ranks."""
    network, states = stack(layers=3, width=64, inner=128, batch=4)
    small = network_costs(trace(network, states))
    for level in (0, 1, 2, 3):
        (found,) = {(item.moment, item.primitive) for item in unit(small, "layers.1", level=level).weight_collectives}
        assert found == (Moment.END, "AllReduce")
    network, states = stack(layers=3, width=129, inner=256, batch=3)
    uneven = unit(network_costs(trace(network, states)), "layers.1", ranks=3, level=1)
    # `up` has 256 rows, `down` 129, which three ranks can share.
    found_of = {(item.weight.split(".")[-2], item.primitive) for item in uneven.weight_collectives}
    assert found_of == {("up", "AllReduce"), ("down", "AllGather"), ("down", "ReduceScatter")}


TIMES = UnitTimes(
    forward_ms=10, forward_exchange_ms=3, backward_ms=20, backward_exchange_ms=6,
    weights=Exchange(start_ms=13, forward_ms=12, backward_weights_ms=4, backward_gradients_ms=18, end_ms=9), overlap=(),
)  # fmt: skip


def test_nothing_overlapped_is_a_sum() -> None:
    assert TIMES.forward() == 10 + 3 + 12
    assert TIMES.backward() == 20 + 6 + 4 + 18
    assert (TIMES.gather_ms, TIMES.reduce_ms, TIMES.extra_backward(5, 2)) == (13, 9, 7)


@pytest.mark.parametrize(
    ("overlap", "forward", "backward", "gather", "reduce", "extra"),
    [
        # max(10, 12) + 3; 20 + 6 + 18 beside 4; the gathers at the start come on top of the 12: 25 instead of 12.
        (("weights",), 15, 44, 13, 9, 7),
        # 18 beside 20; 27 at the end instead: 7 more; what runs again makes 25 and still hides the 18.
        (("gradients",), 25, 30, 13, 7, 7),
        # 6 beside 20, 8 beside 25 when more runs.
        (("tensor_parallel",), 22, 42, 13, 9, 5),
        # Forward max(10, 15), 28 at the start. Backward max(20, 28), 37 at the end; with 25 and 8, 30.
        (OVERLAPS, 15, 28, 13, 9, 2),
    ],
)
def test_overlapped_kinds_cost_what_computation_does_not_hide(
    overlap: tuple[str, ...], forward: float, backward: float, gather: float, reduce: float, extra: float
) -> None:
    times = replace(TIMES, overlap=overlap)
    assert (times.forward(), times.backward()) == (forward, backward)
    assert (times.gather_ms, times.reduce_ms, times.extra_backward(5, 2)) == (gather, reduce, extra)


def test_computation_that_is_long_enough_hides_everything() -> None:
    times = replace(TIMES, forward_ms=100, backward_ms=200, overlap=OVERLAPS)
    assert (times.forward(), times.backward(), times.gather_ms, times.reduce_ms) == (100, 200, 0, 0)
    assert times.extra_backward(5, 2) == 5


def test_overlap_of_a_network(costs: NetworkCosts) -> None:
    """The layers are so small that their computation hides only a part: at level 3, 2 gathers beside a forward."""
    alone = unit(costs, "layers.1", ranks=1)
    hidden = unit(costs, "layers.1", level=3, overlap=("weights", "gradients"))
    assert alone.forward_ms < 2 * ONE_WAY and alone.backward_ms < 4 * ONE_WAY
    assert hidden.forward_ms == pytest.approx(2 * ONE_WAY)
    assert hidden.backward_ms == pytest.approx(4 * ONE_WAY)


def test_what_overlaps_is_read_from_the_settings() -> None:
    assert parse_config({}).overlap is None
    assert parse_config({"overlap": []}).overlap == ()
    assert parse_config({"overlap": ["gradients", "weights", "gradients"]}).overlap == ("weights", "gradients")
    for wrong in ("weights", ["sends"], [1]):
        with pytest.raises(InputError, match=r"overlap.*give a list of weights, gradients, tensor_parallel"):
            parse_config({"overlap": wrong})


def test_a_step_with_gathers_and_sums_by_hand() -> None:
    """Two stages, two micro-batches, F = 1, B = 2: a step of 9.

    Stage 0 gathers until 3, stage 1 until 5. Stage 0: F 3-4, F 4-5, B 8-10, B 11-13. Stage 1: F 5-6, B 6-8, F 8-9,
    B 9-11. Sums of 1 and 4 end at 14 and 15.
    """
    schedule = make_schedule("1f1b", 2, 1, 2)
    assert step_with_ends(schedule, [1, 1], [2, 2]) == 9
    assert step_with_ends(schedule, [1, 1], [2, 2], before_ms=(3, 5)) == 13
    assert step_with_ends(schedule, [1, 1], [2, 2], before_ms=(3, 5), after_ms=(1, 4)) == 15
    # A sum that ends before the first stage has done its last backward costs nothing.
    assert step_with_ends(schedule, [1, 1], [2, 2], after_ms=(0, 2)) == 9


@pytest.mark.parametrize(
    ("kind", "stages", "chunks", "micro_batches"),
    [("1f1b", 4, 1, 7), ("interleaved", 3, 2, 6), ("gpipe", 2, 2, 4), ("zero_bubble_v", 3, 2, 7)],
)
def test_sums_start_when_a_stage_has_ended(kind: str, stages: int, chunks: int, micro_batches: int) -> None:
    """The event simulation tells when each stage ends; equal gathers on all stages just shift everything."""
    schedule = make_schedule(kind, stages, chunks, micro_batches)
    rng = random.Random(stages)
    size = schedule.virtual_stages
    forward, backward, weight, repeated = ([rng.uniform(1, 3) for _ in range(size)] for _ in range(4))
    if not splits_backward(schedule):
        weight = repeated = [0.0] * size
    transfers = [rng.uniform(0, 0.5) for _ in range(size - 1)]
    events = event_simulation(schedule, forward, backward, weight, transfers, repeated)
    after = [rng.uniform(0, 30) for _ in range(stages)]
    ends = [max(end for (at, _), (_, end) in events.items() if at == stage) for stage in range(stages)]
    expected = max(end + more for end, more in zip(ends, after, strict=True))
    found = step_with_ends(schedule, forward, backward, transfers, weight, repeated, after_ms=after)
    assert found == pytest.approx(expected)
    shifted = step_with_ends(schedule, forward, backward, transfers, weight, repeated, (2.5,) * stages, after)
    assert shifted == pytest.approx(expected + 2.5)


def plan_of(costs: NetworkCosts, **settings: Any) -> Plan:
    known = {"stages": 2, "micro_batches": 4, "memory_limit": "1GB", "hardware": "ascend910b", "data_parallel": 2}
    config = parse_config({**known, "micro_batch_size": 4, "time_limit": 5, **settings})
    return make_plan(subject_of_network(costs, config))


def test_plans_record_and_print_it(costs: NetworkCosts, tmp_path: Path) -> None:
    plan = plan_of(costs, optimizer_shard_level=1, overlap=["tensor_parallel"])
    layers = [sum(unit.name.startswith("layers") for unit in plan.units if unit.stage == stage) for stage in (0, 1)]
    for load, count in zip(plan.loads, layers, strict=True):
        assert (load.gather_ms, load.reduce_ms) == pytest.approx((2 * count * ONE_WAY,) * 2)
    plan.save(tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert read.settings["overlap"] == ["tensor_parallel"]
    summary = plan_summary(read)["exchange"]
    assert summary == simulation_summary(simulate_plan(read))["exchange"]
    assert summary["gather_ms"] == [load.gather_ms for load in plan.loads]
    # The first stage gathers before its first forward, and ends last.
    least = plan.solver.step_time_ms + summary["gather_ms"][0] + summary["reduce_ms"][0]
    assert least <= summary["step_time_ms"] * (1 + 1e-9)
    line = f"step with both {summary['step_time_ms']:.2f} ms"
    assert line in render_plan(read) and line in render_simulation(simulate_plan(read))


def test_plans_without_it_print_nothing_and_old_files_are_read(costs: NetworkCosts, tmp_path: Path) -> None:
    plan = plan_of(costs, data_parallel=1)
    assert "summed over ranks" not in render_plan(plan)
    assert plan_summary(plan)["exchange"]["step_time_ms"] == plan.solver.step_time_ms
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    for load in document["loads"]:
        del load["gather_ms"], load["reduce_ms"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert load_plan(tmp_path / "old.json") == plan


def test_what_runs_in_every_micro_batch_is_planned_with(costs: NetworkCosts) -> None:
    """At level 3 the step is longer by what all forwards and backwards gather and share out."""
    alone, shared = plan_of(costs, data_parallel=1), plan_of(costs, optimizer_shard_level=3)
    assert shared.solver.step_time_ms > alone.solver.step_time_ms + 4 * 6 * ONE_WAY
    assert all(load.gather_ms == load.reduce_ms == 0 for load in shared.loads)


def test_explain_lists_the_collectives(costs: NetworkCosts) -> None:
    document = explain(costs, MACHINE, evaluated(costs, level=2), {"b": 4})
    entry = next(entry for entry in document["units"] if entry["name"] == "layers.1")
    assert entry["weight_collectives"] == [
        {"moment": "start of the step", "primitive": "AllGather", "ranks": 2, "count": 2, "bytes": 2 * VOLUME},
        {"moment": "backward", "primitive": "ReduceScatter", "ranks": 2, "count": 2, "bytes": 2 * VOLUME},
    ]
    assert entry["backward_weights_ms"] == pytest.approx(2 * ONE_WAY)
    assert entry["gather_ms"] == pytest.approx(2 * ONE_WAY)


def test_settings_without_the_key_overlap_no_collective(costs: NetworkCosts) -> None:
    config = Config(stages=2, micro_batches=4, memory_limit=10**9, hardware="ascend910b", data_parallel=2,
                    optimizer_shard_level=3, micro_batch_size=4)  # fmt: skip
    times = [run.forward_ms for run in subject_of_network(costs, config).runs]
    for overlap in ((), ("transfers",)):
        assert times == [run.forward_ms for run in subject_of_network(costs, replace(config, overlap=overlap)).runs]
