"""Units of the example networks, named units, and what cannot be a unit."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import Phase, read_tensors
from mindspore_bmpipe.graph.trace import trace
from mindspore_bmpipe.graph.units import split_units
from tests.graph_networks import FACTORIES, stack, traced

EXPECTED = {
    "llama": ["embedding", "blocks.0", "blocks.1", "norm", "head", "loss"],
    "gpt": ["embedding", "position", "embedding_dropout", "blocks.0", "blocks.1", "norm", "head", "loss"],
    "bert": ["embedding", "mask", "blocks.0", "blocks.1", "head", "loss", "next_sentence_head", "next_sentence_loss"],
    "vision_language": ["vision.embedding", "vision.pre_norm", "vision.blocks.0", "vision.blocks.1", "projector",
                        "embedding", "blocks.0", "blocks.1", "norm", "head", "loss"],
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORIES)
def test_units_of_the_examples(name: str) -> None:
    assert [unit.name for unit in split_units(traced(name)).units] == EXPECTED[name]


@pytest.mark.parametrize("name", FACTORIES)
def test_every_operation_is_in_one_unit_and_data_flows_forward(name: str) -> None:
    graph = traced(name)
    units = split_units(graph).units
    owner = {index: number for number, unit in enumerate(units) for index in (*unit.forward, *unit.backward)}
    assert sorted(owner) == list(range(len(graph.operations)))
    made = {out: owner[index] for index, op in enumerate(graph.operations) for out in op.outputs}
    for index, operation in enumerate(graph.operations):
        for tensor in read_tensors(operation):
            if tensor not in made:
                continue
            source = graph.operations[graph.tensors[tensor].producer or 0]
            if operation.phase is Phase.FORWARD:
                assert made[tensor] <= owner[index], operation
            elif source.phase is Phase.BACKWARD:
                assert made[tensor] >= owner[index], operation


def test_equal_blocks_have_equally_many_operations() -> None:
    for name in FACTORIES:
        blocks = [unit for unit in split_units(traced(name)).units if unit.name.startswith("blocks.")]
        sizes = [(len(unit.forward), len(unit.backward), len(unit.parameters)) for unit in blocks]
        if name == "vision_language":
            # Cutting the image tokens off is the network's own operation; it follows the last block.
            assert sizes == [sizes[0], (sizes[0][0] + 1, sizes[0][1] + 1, sizes[0][2])]
        else:
            assert len(set(sizes)) == 1, name


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_tied_embeddings_are_seen(name: str) -> None:
    split = split_units(traced(name))
    names = [unit.name for unit in split.units]
    (weight, users), = split.shared_parameters.items()  # fmt: skip
    assert "embedding" in weight
    assert [names[user] for user in users] == ["embedding", "head"]
    assert any("is shared by embedding, head" in note for note in split.notes)


def test_named_units_take_the_cells_around_them_along() -> None:
    split = split_units(traced("llama"), ["blocks.0", "blocks.1", "head"])
    assert [unit.name for unit in split.units] == ["blocks.0", "blocks.1", "head"]
    graph = traced("llama")
    assert sum(len(unit.forward) + len(unit.backward) for unit in split.units) == len(graph.operations)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["blocks.7"], "no cell named blocks.7"),
        (["blocks.0", "blocks.0.attention"], "lies inside"),
        (["head", "head"], "named twice"),
    ],
)
def test_units_that_cannot_be(units: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_units(traced("llama"), units)


class _BackAndForth(nn.Cell):
    """The first cell runs again after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(4, 4)
        self.second = nn.Dense(4, 4)
        self.last = nn.Dense(4, 4)

    def construct(self, states: Tensor) -> Tensor:
        return ops.ReduceSum()(self.last(self.first(self.second(self.first(states)))))


def test_cells_with_data_flowing_back_and_forth_are_one_unit() -> None:
    split = split_units(trace(_BackAndForth(), Tensor(np.zeros((2, 4)), ms.float32)))
    assert [unit.cells for unit in split.units] == [("first", "second"), ("last",)]
    assert any("are one unit" in note for note in split.notes)


def test_a_chain_inside_a_repeated_cell_is_not_cut_unless_its_links_have_several_layers() -> None:
    class Stage(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.CellList([Inner(), Inner()])

        def construct(self, states: Tensor) -> Tensor:
            for block in self.blocks:
                states = block(states)
            return states

    class Inner(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.path = nn.SequentialCell([nn.Dense(4, 4), nn.Dense(4, 4)])

        def construct(self, states: Tensor) -> Tensor:
            return self.path(states)

    class Network(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.CellList([Stage(), Stage()])

        def construct(self, states: Tensor) -> Tensor:
            for stage in self.stages:
                states = stage(states)
            return states.sum()

    split = split_units(trace(Network(), Tensor(np.zeros((2, 4)), ms.float32)))
    assert [unit.name for unit in split.units] == [f"stages.{i}.blocks.{j}" for i in range(2) for j in range(2)]


def test_layers_of_a_list_are_units() -> None:
    network, states = stack(layers=3)
    assert [unit.name for unit in split_units(trace(network, states)).units] == [f"layers.{i}" for i in range(3)]
