"""Joint graphs of real networks against MindSpore's own compile without any of our markings, and against each other."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from mindspore_bmpipe.costs.network import network_costs
from mindspore_bmpipe.errors import InputError, UnknownPrimitiveError
from mindspore_bmpipe.graph.cell_graph import CellGraph, Phase, read_tensors
from mindspore_bmpipe.graph.cell_keys import structural_keys
from mindspore_bmpipe.graph.compile_private import joint_graph_bytes, training_flags
from mindspore_bmpipe.graph.inline import inline_module
from mindspore_bmpipe.graph.mindir import TensorType, decode_module
from mindspore_bmpipe.graph.recorded import graph_of, recorded_trace, traced_file
from mindspore_bmpipe.graph.symbols import evaluate_dimension
from mindspore_bmpipe.graph.trace import record, trace
from tests.graph_networks import FACTORIES, build, stack, traced
from tests.joint_comparison import kept_labels, whole

MATRIX = frozenset({"MatMul", "BatchMatMul", "MatMulExt", "Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput"})


def matrix_operations(graph: Any, sizes: dict[str, int]) -> Counter[tuple[Any, ...]]:
    """How often each matrix operation occurs, with the shapes it reads and makes at given sizes."""

    def shape(tensor: int) -> tuple[int, ...]:
        return tuple(evaluate_dimension(size, sizes, "test") for size in graph.tensors[tensor].type.shape)

    return Counter(
        (operation.primitive, tuple(map(shape, read_tensors(operation))), tuple(map(shape, operation.outputs)))
        for operation in graph.operations
        if operation.primitive in MATRIX
    )


@pytest.mark.parametrize("name", FACTORIES)
def test_matrix_operations_equal_those_of_an_unmarked_compile(name: str) -> None:
    network, inputs = build(name)
    with training_flags(network):
        plain = inline_module(decode_module(joint_graph_bytes(network, inputs), name), ())
    graph = traced(name)
    assert matrix_operations(graph, dict(graph.symbols)) == matrix_operations(plain, {})


@pytest.mark.parametrize("name", ["llama", "vision_language"])
def test_symbols_predict_the_graph_traced_at_other_sizes(name: str) -> None:
    graph = traced(name)
    sizes = {"b": 7, "s": 24}
    network, inputs = build(name, batch=7, sequence=24)
    other = trace(network, *inputs, symbols={})
    assert set(graph.symbols) == set(sizes)
    assert matrix_operations(graph, sizes) == matrix_operations(other, {})
    kept = [sum(size for size in _kept_sizes(item, values)) for item, values in ((graph, sizes), (other, {}))]
    assert kept[0] == kept[1] > 0


def _kept_sizes(graph: CellGraph, sizes: dict[str, int]) -> list[int]:
    """Elements of every forward result that some backward operation reads."""
    forward = {o for op in graph.operations if op.phase is Phase.FORWARD for o in op.outputs}
    kept = {t for op in graph.operations if op.phase is Phase.BACKWARD for t in read_tensors(op)} & forward
    return [
        int(np.prod([evaluate_dimension(size, sizes, "test") for size in graph.tensors[t].type.shape])) for t in kept
    ]


@pytest.mark.parametrize("name", FACTORIES)
def test_weights_are_read_in_the_cell_that_holds_them(name: str) -> None:
    graph = traced(name)
    holders = {cell.path: set(cell.parameters) for cell in graph.cells}
    read = set()
    for operation in graph.operations:
        if operation.phase is Phase.FORWARD and operation.primitive in MATRIX:
            for tensor in read_tensors(operation):
                weight = weight_behind(graph, tensor)
                if weight in holders[operation.cell]:
                    read.add(weight)
    # Tables are gathered from; the decoders of tied networks read the table of another cell.
    expected = {key for key, info in graph.parameters.items() if len(info.type.shape) == 2 and "embedding" not in key}
    assert read >= expected - {"position.weight"} and len(read) >= 8


def weight_behind(graph: CellGraph, tensor: int) -> str | None:
    """Name of the weight that a tensor is, through the copies MindSpore puts between cells."""
    while (producer := graph.tensors[tensor].producer) is not None:
        operation = graph.operations[producer]
        if operation.primitive != "TensorMove":
            return None
        tensor = read_tensors(operation)[0]
    return graph.tensors[tensor].parameter


def test_repeated_cells_have_equal_operations() -> None:
    graph = traced("llama")
    blocks = [
        Counter(
            (op.primitive, op.phase, op.cell.split(".", 2)[-1]) for op in graph.operations if f"blocks.{i}" in op.cell
        )
        for i in range(2)
    ]
    assert blocks[0] == {
        (primitive, phase, cell.replace("1", "0") if cell == "1" else cell): count
        for (primitive, phase, cell), count in blocks[1].items()
    }


def test_a_traced_file_holds_the_whole_trace(tmp_path: Any) -> None:
    network, inputs = build("gpt")
    recorded = record(network, *inputs)
    data = traced_file(recorded)
    module = decode_module(data, "file")
    assert module.metadata is not None
    again = graph_of(recorded_trace(data, module, "file"))
    first = graph_of(recorded)
    assert again.operations == first.operations
    assert again.tensors == first.tensors
    assert (again.cells, again.symbols, again.notes) == (first.cells, first.symbols, first.notes)
    assert dict(again.parameters) == dict(first.parameters)


def test_tracing_allocates_no_weights_and_changes_none() -> None:
    network, inputs = build("llama")
    names = [weight.name for weight in network.get_parameters()]
    trace(network, *inputs)
    assert [weight.name for weight in network.get_parameters()] == names
    assert all(weight.has_init for weight in network.get_parameters())


class _Fixed(nn.Cell):
    """A network that works at one batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def construct(self, states: Tensor) -> Tensor:
        return ops.reshape(self.dense(states), (2, 3, 4)).sum()


def test_an_axis_that_is_baked_in_stays_a_number_and_is_reported() -> None:
    graph = trace(_Fixed(), Tensor(np.zeros((6, 4)), ms.float32))
    assert graph.symbols == {}
    assert any("axis b is fixed at 6" in note for note in graph.notes)


class _Branch(nn.Cell):
    """Control flow that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def construct(self, states: Tensor) -> Tensor:
        states = self.dense(states)
        if states.sum() > 0:
            states = states * 2
        return states.sum()


def test_control_flow_on_data_is_refused() -> None:
    with pytest.raises(InputError, match="control flow"):
        trace(_Branch(), Tensor(np.zeros((6, 4)), ms.float32))


class _Chosen(nn.Cell):
    """As many rows as there are positive numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def construct(self, states: Tensor) -> Tensor:
        states = self.dense(states)
        return ops.exp(ops.masked_select(states, states > 0)).sum()


def test_sizes_that_depend_on_data_are_refused() -> None:
    with pytest.raises(InputError, match=r"\(MaskedSelect\): a size that depends on values"):
        trace(_Chosen(), Tensor(np.zeros((6, 4)), ms.float32))


class _Sorted(nn.Cell):
    """Backward writes into zeros, at the places that forward returned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((6, 4), np.float32)), name="weight")

    def construct(self, states: Tensor) -> Tensor:
        return ops.exp(mint.sort(states * self.weight)[0]).sum()


def test_what_backward_writes_into_a_tensor_is_followed() -> None:
    # exp: its result; sort: the places (int64); product: the states.
    graph = trace(_Sorted(), Tensor(np.zeros((6, 4)), ms.float32), symbols={})
    kept = kept_labels(graph, whole)[""]
    assert set(kept) == {("Exp", (6, 4), "float32"), ("SortExt", (6, 4), "int64"), ("input", (6, 4), "float32")}
    backward = [operation.primitive for operation in graph.operations if operation.phase is Phase.BACKWARD]
    assert backward[-3:] == ["Zeros", "InplaceScatterSrc", "Mul"]


class _Doubled(nn.Cell):
    """Writes into a part of its states; MindSpore orders the write by its monad, and no operation reads the result."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def construct(self, states: Tensor) -> Tensor:
        states = ops.exp(self.dense(states))
        states[:, 1:3].mul_(2.0)
        return states.sum()


def test_writes_that_nothing_reads_are_not_lost() -> None:
    graph = trace(_Doubled(), Tensor(np.zeros((6, 4)), ms.float32), symbols={})
    assert "InplaceMuls" in [operation.primitive for operation in graph.operations]
    with pytest.raises(UnknownPrimitiveError, match="InplaceMuls"):
        network_costs(graph)


def test_what_is_not_a_network_is_refused() -> None:
    with pytest.raises(InputError, match=r"must be a mindspore.nn.Cell"):
        trace(lambda x: x, Tensor([1.0]))
    with pytest.raises(InputError, match="no trainable weight"):
        trace(nn.ReLU(), Tensor([1.0]))
    network, _ = stack()
    with pytest.raises(InputError, match="takes no tensor"):
        trace(network)
    with pytest.raises(InputError, match="does not compile"):
        trace(network, Tensor(np.zeros((4, 9)), ms.float32))


def test_calls_of_shared_functions_find_their_cell_by_the_weights_passed() -> None:
    network, states = stack(layers=4)
    graph = trace(network, states)
    read = {
        (op.cell, weight)
        for op in graph.operations
        if op.phase is Phase.FORWARD and op.primitive == "MatMul"
        for t in read_tensors(op)
        if (weight := weight_behind(graph, t))
    }
    # One function serves all four layers, so only the weights passed tell the calls apart.
    assert {(cell, weight) for cell, weight in read if weight != f"{cell}.weight"} == set()
    assert len(read) == 8
    assert all(isinstance(tensor.type, TensorType) for tensor in graph.tensors)


class _Product(nn.Cell):
    """A product with a weight of its own, or with one that is passed."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        if own:
            self.weight = Parameter(Tensor(np.ones((4, 4), np.float32)), name="weight")
        self.matmul = ops.MatMul()

    def construct(self, states: Tensor, table: Tensor | None = None) -> Tensor:
        return self.matmul(states, self.weight if self.own else table)


class _Borrower(nn.Cell):
    """A cell that passes another cell's weight on to a cell of the lender's class."""

    def __init__(self) -> None:
        super().__init__()
        self.product = _Product(own=False)

    def construct(self, states: Tensor, table: Tensor) -> Tensor:
        return self.product(states * 2, table)


class _Lender(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.product = _Product(own=True)
        self.borrower = _Borrower()

    def construct(self, states: Tensor) -> Tensor:
        return (self.product(states) + self.borrower(states, self.product.weight)).sum()


def test_a_cell_that_is_passed_a_weight_is_not_taken_for_the_one_that_holds_it() -> None:
    graph = trace(_Lender(), Tensor(np.ones((2, 4)), ms.float32))
    forward = [op.cell for op in graph.operations if op.phase is Phase.FORWARD and op.primitive == "MatMul"]
    assert sorted(forward) == ["borrower.product", "product"]


class _Scaled(nn.Cell):
    """A dense layer in a cell that may differ from its neighbours by a number or a seed."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.dense = nn.Dense(4, 4)
        self.dropout = nn.Dropout(p=0.5)

    def construct(self, states: Tensor) -> Tensor:
        return self.dropout(self.dense(states)) * self.factor


class _Row(nn.Cell):
    """Scaled layers in a list."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.layers = nn.CellList([_Scaled(factor) for factor in factors])

    def construct(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = layer(states)
        return states.sum()


def test_equal_cells_inside_different_ones_keep_their_own_weights() -> None:
    """The outer cells differ, the dense layers in them do not: MindSpore must not be told to share these."""
    network = _Row(1.0, 2.0, 1.0, 3.0)
    keys = structural_keys(network)
    assert keys["layers.0.dense"] == keys["layers.2.dense"]
    assert len({keys[f"layers.{index}.dense"] for index in range(4)}) == 3
    graph = trace(network, Tensor(np.zeros((2, 4)), ms.float32))
    read = [
        (op.cell, weight)
        for op in graph.operations
        if op.phase is Phase.FORWARD and op.primitive == "MatMul"
        for t in read_tensors(op)
        if (weight := weight_behind(graph, t))
    ]
    assert read == [(f"layers.{index}.dense", f"layers.{index}.dense.weight") for index in range(4)]


def test_seeds_do_not_make_layers_differ() -> None:
    code = (
        "import mindspore; mindspore.set_seed(3)\n"
        "from tests.test_graph_trace import _Row, structural_keys\n"
        "keys = structural_keys(_Row(1.0, 1.0))\n"
        "assert keys['layers.0'] == keys['layers.1'] and keys['layers.0.dropout'] == keys['layers.1.dropout']"
    )
    # In a process of its own: a seed cannot be unset.
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
