"""Writing plans onto real cells: what is written, what is refused, and that refusing changes nothing."""

from __future__ import annotations

import copy
import dataclasses

import mindspore
import numpy as np
import pytest
from apply_networks import RECOMPUTE, WIDTH, Block, Network, batch, change_units, make_plan, written
from mindspore import Parameter, Tensor, nn, ops

from mindspore_bmpipe.apply.cells import applied_plan, apply
from mindspore_bmpipe.errors import InputError


@pytest.fixture
def network() -> Network:
    return Network()


def refuse(network: nn.Cell, plan, *parts: str) -> str:
    """Apply, expect a refusal that names all parts and leaves the network untouched; return the message."""
    before = written(network)
    names = [parameter.name for parameter in network.get_parameters()]
    with pytest.raises(InputError) as caught:
        apply(network, plan)
    for part in parts:
        assert part in str(caught.value)
    assert written(network) == before
    assert [parameter.name for parameter in network.get_parameters()] == names
    assert applied_plan(network) is None
    return str(caught.value)


def test_writes_stages_and_every_kind_of_recompute(network: Network) -> None:
    names = [parameter.name for parameter in network.get_parameters()]
    plan = make_plan(network, changes=RECOMPUTE)
    apply(network, plan)
    assert written(network) == {
        "embedding:pipeline_stage": 0,
        "blocks.0:pipeline_stage": 0,
        "blocks.1:pipeline_stage": 0,
        "blocks.2:pipeline_stage": 1,
        "blocks.3:pipeline_stage": 1,
        "head:pipeline_stage": 1,
        "blocks.0:recompute": True,
        "blocks.1.attention:recompute": True,
        "blocks.2.attention.softmax:recompute": True,
    }
    assert [parameter.name for parameter in network.get_parameters()] == names
    assert applied_plan(network) is plan


def test_stages_are_plain_integers_for_mindspore(network: Network) -> None:
    plan = change_units(make_plan(network), head={"stage": np.int64(1)})
    apply(network, plan)
    assert type(network.head.pipeline_stage) is int


def test_segments_are_written_for_the_schedule_that_reads_them(network: Network) -> None:
    stages = (0, 1, 1, 1, 1, 0)
    chunks = {"blocks.2": {"chunk": 1}, "blocks.3": {"chunk": 1}, "head": {"chunk": 1}}
    apply(network, make_plan(network, stages, chunks, schedule="zero_bubble_v"))
    found = written(network)
    assert [found[f"{path}:pipeline_segment"] for path in ("embedding", "blocks.1", "blocks.2", "head")] == [0, 0, 1, 1]


def test_no_segments_for_other_schedules(network: Network) -> None:
    apply(network, make_plan(network, schedule="1f1b"))
    assert not [key for key in written(network) if key.endswith("pipeline_segment")]


def test_the_same_plan_twice_changes_nothing(network: Network) -> None:
    plan = make_plan(network, changes=RECOMPUTE)
    apply(network, plan)
    before = written(network)
    apply(network, copy.deepcopy(plan))
    assert written(network) == before


def test_another_plan_afterwards_is_refused(network: Network) -> None:
    apply(network, make_plan(network, changes=RECOMPUTE))
    before = written(network)
    with pytest.raises(InputError) as caught:
        apply(network, make_plan(network, (0, 0, 1, 1, 1, 1)))
    assert "'blocks.1' already has pipeline_stage 0" in str(caught.value)
    assert "'blocks.0' is already recomputed" in str(caught.value)
    assert "'blocks.2.attention.softmax' was told recompute(True)" in str(caught.value)
    assert written(network) == before


def test_all_violations_come_at_once(network: Network) -> None:
    plan = change_units(
        make_plan(network, (0, 0, 0, 1, 0, 1)),
        blocks_0={"recompute_cells": ("blocks.0", "blocks.0.attention", "blocks.9")},
        blocks_1={
            "recompute_cells": ("blocks.3.attention",),
            "recompute_primitives": ("blocks.1.drop", "blocks.2.attention.softmax"),
        },
    )
    message = refuse(
        network,
        plan,
        "unit 'blocks.3' follows 'blocks.2' on an earlier stage (0 < 1)",
        "recomputed cell 'blocks.0.attention' is inside the recomputed cell 'blocks.0'",
        "unit 'blocks.0': the network has no cell 'blocks.9' to recompute",
        "unit 'blocks.1': the network has no primitive 'blocks.1.drop' to recompute",
        "unit 'blocks.1': the recomputed primitive 'blocks.2.attention.softmax' is not inside the unit",
        "unit 'blocks.1': the recomputed cell 'blocks.3.attention' is not inside the unit",
    )
    assert len(message.splitlines()) == 7


def test_a_plan_for_another_network_says_so_first() -> None:
    message = refuse(
        Network(blocks=5),
        make_plan(Network(blocks=4)),
        "no unit of the plan covers the cell 'blocks.4.attention.project', which holds the trainable parameter 'w",
    )
    assert "was made for another network" in message.splitlines()[0]
    message = refuse(Network(blocks=3), make_plan(Network(blocks=4)), "unit 'blocks.3': the network has no cell")
    assert "was made for another network" in message.splitlines()[0]


def test_the_network_around_the_planned_one_is_recognised(network: Network) -> None:
    message = refuse(nn.PipelineCell(network, 4), make_plan(network), "the network has no cell 'embedding'")
    assert "inside PipelineCell" in message.splitlines()[0]


@pytest.mark.parametrize("field", ["parameters", "parameter_elements"])
def test_a_network_of_other_sizes_is_refused(network: Network, field: str) -> None:
    plan = change_units(make_plan(network), blocks_1={field: 3})
    message = refuse(network, plan, "unit 'blocks.1': the network has 4 trainable parameters with 144 elements here")
    assert "was made for another network" in message.splitlines()[0]


def test_frozen_parameters_do_not_count(network: Network) -> None:
    plan = make_plan(network)
    network.blocks[1].feed.weight.requires_grad = False
    refuse(network, plan, "unit 'blocks.1': the network has 3 trainable parameters with 80 elements here, the plan 4")


def test_parameters_of_cells_around_units_follow_their_users(network: Network) -> None:
    """Networks hold position embeddings so; no cell could carry a stage for them."""
    plan = make_plan(network)
    network.position = Parameter(Tensor(1.0), name="position")
    apply(network, plan)
    assert "pipeline_stage" not in {key.partition(":")[2] for key in written(network) if key.startswith(":")}


def test_a_missing_unit_is_named(network: Network) -> None:
    plan = make_plan(network)
    plan = dataclasses.replace(plan, units=plan.units[:-1])
    refuse(network, plan, "no unit of the plan covers the cell 'head', which holds the trainable parameter")


def test_a_shared_weight_counts_in_each_unit_that_holds_it(network: Network) -> None:
    network.blocks[3].feed.weight = network.blocks[2].feed.weight
    plan = make_plan(network)
    apply(network, plan)
    assert written(network)["blocks.3:pipeline_stage"] == 1


def test_a_weight_that_cells_of_two_stages_hold_is_refused(network: Network) -> None:
    network.blocks[3].feed.weight = network.blocks[0].feed.weight
    refuse(network, make_plan(network), "cells 'blocks.0.feed', 'blocks.3.feed' hold one weight and are on stages 0, 1")


@pytest.mark.parametrize(
    ("stages", "chunks", "message"),
    [
        ((0, 0, 1, 0, 0, 0), (0, 0, 0, 1, 1, 1), "chunk 1 of stage 1 holds no trainable parameter"),
        ((1, 1, 0, 1, 0, 0), (0, 0, 0, 1, 1, 1), "unit 'blocks.1' (stage 0, chunk 0) follows 'blocks.0' (stage 1"),
        ((0, 0, 1, 1, 0, 0), (0, 0, 0, 1, 1, 1), "unit 'blocks.3' (stage 0, chunk 1) follows 'blocks.2' (stage 1"),
    ],
    ids=["a chunk without units", "chunks that start on stage 1", "chunks in a V"],
)
def test_chunks_in_an_order_that_the_compiler_refuses_are_refused(
    network: Network, stages: tuple[int, ...], chunks: tuple[int, ...], message: str
) -> None:
    names = [unit.name for unit in make_plan(network, stages).units]
    plan = make_plan(network, stages, {name: {"chunk": chunk} for name, chunk in zip(names, chunks, strict=True)})
    refuse(network, plan, message)


def test_chunks_in_a_v_are_what_zero_bubble_takes(network: Network) -> None:
    names = [unit.name for unit in make_plan(network).units]
    changes = {name: {"chunk": chunk} for name, chunk in zip(names, (0, 0, 0, 1, 1, 1), strict=True)}
    apply(network, make_plan(network, (0, 0, 1, 1, 0, 0), changes, schedule="zero_bubble_v"))
    assert written(network)["head:pipeline_segment"] == 1


@pytest.mark.parametrize(
    ("cells", "part"),
    [
        (("blocks.1", "blocks.0"), "cell 'blocks.0' belongs to 2 units"),
        (("blocks.1", "blocks.0.feed"), "cell 'blocks.0.feed' is inside 'blocks.0', which is listed as well"),
    ],
)
def test_overlapping_units_are_refused(network: Network, cells: tuple[str, ...], part: str) -> None:
    refuse(network, change_units(make_plan(network), blocks_1={"cells": cells}), part)


def test_a_unit_of_several_cells_gets_one_stage(network: Network) -> None:
    parameters = network.blocks[0].trainable_params()
    plan = make_plan(network)
    merged = dataclasses.replace(
        plan.units[1],
        cells=("blocks.0", "blocks.1"),
        parameters=2 * len(parameters),
        parameter_elements=2 * sum(parameter.size for parameter in parameters),
    )
    apply(network, dataclasses.replace(plan, units=(plan.units[0], merged, *plan.units[3:])))
    assert network.blocks[0].pipeline_stage == network.blocks[1].pipeline_stage == 0


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_without_trainable_parameters_is_refused(network: Network, stage: int) -> None:
    stages = (1,) * 6 if stage == 0 else (0, 0, 0, 2, 2, 2)
    refuse(network, make_plan(network, stages), f"stage {stage} holds no trainable parameter")


def test_stages_may_go_back_when_interleaved(network: Network) -> None:
    chunks = {"blocks.2": {"chunk": 1}, "blocks.3": {"chunk": 1}, "head": {"chunk": 1}}
    apply(network, make_plan(network, (0, 0, 1, 0, 1, 1), chunks))
    assert [cell.pipeline_stage for cell in network.blocks] == [0, 1, 0, 1]


@pytest.mark.parametrize("path", ["", "embedding", "blocks.2.attention", "loss"])
def test_a_stage_set_by_the_user_is_refused(network: Network, path: str) -> None:
    dict(network.cells_and_names())[path].pipeline_stage = 7
    refuse(network, make_plan(network), "already has pipeline_stage 7", "remove it from the network's code")


@pytest.mark.parametrize("path", RECOMPUTE)
def test_stages_alone_do_not_make_a_network_follow_its_plan(network: Network, path: str) -> None:
    apply(network, make_plan(network))
    apply(network, make_plan(network, changes={path: RECOMPUTE[path]}))
    assert [key for key in written(network) if key.endswith(":recompute")]


def test_recompute_the_user_set_on_a_planned_primitive_is_fine(network: Network) -> None:
    network.blocks[2].attention.softmax.recompute()
    apply(network, make_plan(network, changes=RECOMPUTE))
    assert written(network)["blocks.2.attention.softmax:recompute"] is True
    assert written(network)["blocks.0:recompute"] is True


def test_a_stage_the_user_set_to_the_planned_value_is_fine(network: Network) -> None:
    network.head.pipeline_stage = 1
    apply(network, make_plan(network))


@pytest.mark.parametrize("path", ["", "blocks.0", "blocks.0.attention", "blocks.3.feed"])
def test_recompute_called_by_the_user_is_refused(network: Network, path: str) -> None:
    dict(network.cells_and_names())[path].recompute()
    message = refuse(network, make_plan(network, changes=RECOMPUTE), "is already recomputed", "without its recompute()")
    assert message.count("is already recomputed") == 1


def test_recompute_of_a_container_is_refused() -> None:
    class Grouped(Network):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].parts = nn.CellList([nn.Dense(WIDTH, WIDTH)])

    network = Grouped()
    plan = make_plan(network, changes={"blocks.0": {"recompute_cells": ("blocks.0.parts",)}})
    refuse(network, plan, "'blocks.0.parts' is a container, to which recompute() would add an item")
    assert len(network.blocks[0].parts) == 1


def test_recompute_called_by_the_user_on_primitives_is_refused(network: Network) -> None:
    network.blocks[3].attention.softmax.recompute()
    network.blocks[0].attention.softmax.recompute(False)
    refuse(
        network,
        make_plan(network, changes=RECOMPUTE),
        "'blocks.3.attention.softmax' was told recompute(True)",
        "'blocks.0.attention.softmax' was told recompute(False)",
    )


class SharedSoftmax(Network):
    def __init__(self, where: str) -> None:
        super().__init__()
        softmax = ops.Softmax()
        self.blocks[2].attention.softmax = softmax
        if where == "cell":
            self.blocks[3].attention.softmax = softmax
        elif where == "list":
            self.blocks[3].extra = [softmax]


@pytest.mark.parametrize(("where", "place"), [("cell", "'blocks.3.attention.softmax'"), ("list", "'blocks.3.extra.0'")])
def test_a_primitive_shared_between_units_is_refused(where: str, place: str) -> None:
    network = SharedSoftmax(where)
    refuse(network, make_plan(network, changes=RECOMPUTE), "'blocks.2.attention.softmax' is one object that", place)


def test_a_shared_primitive_recomputed_everywhere_is_fine() -> None:
    network = SharedSoftmax("cell")
    changes = {f"blocks.{i}": {"recompute_primitives": (f"blocks.{i}.attention.softmax",)} for i in (2, 3)}
    apply(network, make_plan(network, changes=changes))
    assert network.blocks[3].attention.softmax.attrs["recompute"] is True


def test_communication_is_recomputed_around_the_primitives_of_a_cell(network: Network) -> None:
    plan = make_plan(network, changes={"blocks.1": {"recompute_communication": ("blocks.1.attention",)}})
    apply(network, plan)
    attention = network.blocks[1].attention
    assert attention.softmax.attrs["recompute_comm_op"] is True
    assert "recompute_comm_op" not in network.blocks[0].attention.softmax.attrs
    assert "recompute" not in attention.softmax.attrs
    apply(network, plan)
    with pytest.raises(InputError, match="softmax' already has recompute_comm_op True"):
        apply(network, make_plan(network))


def test_communication_of_cells_that_are_not_there_is_refused(network: Network) -> None:
    changes = {"blocks.1": {"recompute_communication": ("blocks.0.attention", "blocks.9")}}
    before = written(network)
    with pytest.raises(InputError, match=r"no cell 'blocks\.0\.attention' to recompute communication of") as caught:
        apply(network, make_plan(network, changes=changes))
    assert "no cell 'blocks.9'" in str(caught.value)
    assert written(network) == before


def test_a_layer_table_plan_says_why_it_cannot_be_applied(network: Network) -> None:
    plan = make_plan(network)
    plan = dataclasses.replace(plan, units=tuple(dataclasses.replace(item, cells=()) for item in plan.units))
    refuse(network, plan, "names no cells", "layer table")


def test_wrong_types_are_refused(network: Network) -> None:
    with pytest.raises(InputError, match=r"must be a mindspore\.nn\.Cell, got function"):
        apply(lambda: None, make_plan(network))
    with pytest.raises(InputError, match="must be a Plan"):
        apply(network, "plan.json")


class Step(nn.Cell):
    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.weights = mindspore.ParameterTuple(network.trainable_params())
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, x, y):
        return self.network(x, y), self.gradient(self.network, self.weights)(x, y)


class NoDropout(Network):
    """MindSpore does not promise equal random numbers when dropout is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.drop = nn.Dropout(p=0.0)


def test_recomputation_keeps_loss_and_gradients() -> None:
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_seed(1)
    plain = NoDropout()
    recomputed = NoDropout()
    mindspore.load_param_into_net(recomputed, {item.name: item for item in plain.get_parameters()})
    apply(recomputed, make_plan(recomputed, (0,) * 6, RECOMPUTE))
    expected_loss, expected = Step(plain)(*batch())
    loss, gradients = Step(recomputed)(*batch())
    assert float(expected_loss) > 0
    np.testing.assert_allclose(loss.asnumpy(), expected_loss.asnumpy(), rtol=1e-6)
    assert len(gradients) == len(expected) == len(plain.trainable_params())
    for found, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found.asnumpy(), wanted.asnumpy(), rtol=1e-5, atol=1e-7)
    assert any(np.abs(wanted.asnumpy()).max() > 0 for wanted in expected)


def test_the_network_of_these_tests_has_the_sizes_the_messages_name() -> None:
    parameters = Block().trainable_params()
    assert len(parameters) == 4
    assert sum(parameter.size for parameter in parameters) == 2 * (WIDTH * WIDTH + WIDTH)
