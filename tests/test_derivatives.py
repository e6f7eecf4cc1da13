"""Derivative rules against the gradients that MindSpore itself derives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor

from mindspore_bmpipe.costs.derivatives import WITHOUT_GRADIENT, differentiable_primitives
from mindspore_bmpipe.costs.differentiate import common_cell, differentiate
from mindspore_bmpipe.costs.rules import known_primitives
from mindspore_bmpipe.errors import InputError, UnknownPrimitiveError
from mindspore_bmpipe.graph.cell_graph import (
    CellGraph,
    CellInfo,
    Operation,
    ParameterInfo,
    Phase,
    TensorRef,
    read_tensors,
)
from mindspore_bmpipe.graph.cell_graph import (
    Tensor as GraphTensor,
)
from mindspore_bmpipe.graph.mindir import TensorType
from mindspore_bmpipe.graph.sharded import COLLECTIVES
from mindspore_bmpipe.graph.trace import trace
from tests.derivative_cases import CASES, CaseNetwork
from tests.derivative_cases.arithmetic import power_constant
from tests.derivative_cases.reduction import variance
from tests.joint_comparison import (
    backward_flops,
    forward_only,
    kept_bytes,
    kept_labels,
    leaf_of,
    matrix_operations,
    unit_of,
    vector_operations,
    whole,
)
from tools.examples import bert, gpt, llama, vision_language

SIZES = [(2, 6, 8), (3, 10, 4), (5, 4, 12)]

# An exponent that is a tensor constant: MindSpore leaves the scalar subtraction in, we fold it.
FOLDED = {(power_constant, "SubScalar"), (variance, "SubScalar")}

NETWORKS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (llama.factory, {}),
    "llama-flash": (llama.factory, {"flash": True, "dtype": "float16", "tied": True}),
    "gpt": (gpt.factory, {}),
    "gpt-alibi": (gpt.factory, {"alibi": True, "tied": False, "heads": 2}),
    "bert": (bert.factory, {}),
    "vision-language": (vision_language.factory, {}),
}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ms.set_context(mode=ms.GRAPH_MODE)


@lru_cache
def joint_graph(family: str, size: tuple[int, int, int]) -> CellGraph:
    return trace(CaseNetwork(family, size), Tensor(0.0, ms.float32), symbols={})


def case_of(cell: str) -> str:
    parts = cell.split(".")
    return parts[1] if parts[0] == "cases" else ""


@pytest.mark.parametrize("size", [SIZES[0], *(pytest.param(size, marks=pytest.mark.long) for size in SIZES[1:])])
@pytest.mark.parametrize("family", CASES)
def test_rule_reads_and_computes_what_mindspore_does(family: str, size: tuple[int, int, int]) -> None:
    joint = joint_graph(family, size)
    derived = differentiate(forward_only(joint))
    kept, own_kept = kept_labels(joint, case_of), kept_labels(derived, case_of)
    surplus = vector_operations(joint, case_of) - vector_operations(derived, case_of)
    lacking = vector_operations(derived, case_of) - vector_operations(joint, case_of)
    for number, (function, _) in enumerate(CASES[family]):
        key = str(number)
        assert own_kept.get(key) == kept.get(key), function.__name__
        folded = {name for owner, name in FOLDED if owner is function}
        assert {name for cell, name, _ in surplus if cell == key} == folded, function.__name__
        assert not [entry for entry in lacking if entry[0] == key], function.__name__
    assert matrix_operations(derived, case_of) == matrix_operations(joint, case_of)
    folded_here = [
        (str(number), name) for number, (function, _) in enumerate(CASES[family]) for owner, name in FOLDED
        if owner is function
    ]  # fmt: skip
    # What stands in no case adds the results up.
    flops, own_flops = backward_flops(joint, case_of, folded_here), backward_flops(derived, case_of)
    assert {case: flops.get(case) for case in (*flops, *own_flops) if case} == {
        case: own_flops.get(case) for case in (*flops, *own_flops) if case
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_whole_network_keeps_and_multiplies_what_mindspore_does(name: str) -> None:
    build, settings = NETWORKS[name]
    network, inputs = build(**settings)
    joint = trace(network, *inputs, symbols={})
    derived = differentiate(forward_only(joint))
    assert kept_bytes(derived, unit_of) == kept_bytes(joint, unit_of)
    assert kept_labels(derived, unit_of) == kept_labels(joint, unit_of)
    assert matrix_operations(derived, unit_of) == matrix_operations(joint, unit_of)
    # The mean of the loss divides a constant gradient by a constant.
    assert Counter(key[1] for key in vector_operations(joint, whole) - vector_operations(derived, whole)) == {
        "RealDiv": 1
    }
    assert not vector_operations(derived, whole) - vector_operations(joint, whole)


def test_symbolic_shapes_stay_symbolic() -> None:
    network, inputs = llama.factory()
    joint = trace(network, *inputs)
    assert set(joint.symbols) == {"b", "s"}
    derived = differentiate(forward_only(joint))
    assert kept_labels(derived, leaf_of) == kept_labels(joint, leaf_of)
    assert matrix_operations(derived, leaf_of) == matrix_operations(joint, leaf_of)


# Graphs written by hand: two weights, one input of floats and one of integers.


def hand_graph(*steps: tuple[str, tuple[int, ...], str, str], trainable: bool = True) -> CellGraph:
    """Each step is (primitive, tensors read, dtype made, cell); tensor 4 is the first one made."""
    kind = TensorType((4, 4), "float32")
    tensors = [
        GraphTensor(kind, None, parameter="a"),
        GraphTensor(kind, None, parameter="b"),
        GraphTensor(kind, None),
        GraphTensor(TensorType((4,), "int32"), None),
    ]
    operations = []
    for index, (primitive, read, dtype, cell) in enumerate(steps):
        tensors.append(GraphTensor(TensorType((4, 4), dtype), index))
        operations.append(
            Operation(
                primitive=primitive,
                arguments=tuple(TensorRef(tensor) for tensor in read),
                outputs=(len(tensors) - 1,),
                attributes={},
                cell=cell,
                phase=Phase.FORWARD,
                scope=f"Default/{cell}/{primitive}-op0",
                unique_id=None,
            )
        )
    return CellGraph(
        name="hand",
        operations=tuple(operations),
        tensors=tuple(tensors),
        inputs=(2, 3),
        cells=(CellInfo("", "Hand", ("a", "b")),),
        parameters={name: ParameterInfo(name, kind, trainable or name == "b") for name in "ab"},
        symbols={},
        notes=("exported",),
        has_backward=False,
    )


def backward(graph: CellGraph) -> list[tuple[str, tuple[int, ...], str]]:
    return [(op.primitive, read_tensors(op), op.cell) for op in graph.operations if op.phase is Phase.BACKWARD]


def test_product_reads_each_operand_for_the_other() -> None:
    # y = exp(a * b): dy = y * 1 reads y; then b's gradient reads a, and a's reads b.
    graph = hand_graph(("Mul", (0, 1), "float32", "m"), ("Exp", (4,), "float32", "e"))
    derived = differentiate(graph)
    exp_gradient = derived.operations[2]
    assert (exp_gradient.primitive, exp_gradient.cell, exp_gradient.phase) == ("Mul", "e", Phase.BACKWARD)
    assert 5 in read_tensors(exp_gradient)
    assert exp_gradient.scope.startswith("Gradients/Default/e/Grad_Exp/")
    (product,) = exp_gradient.outputs
    assert backward(derived)[1:] == [("Mul", (1, product), "m"), ("Mul", (0, product), "m")]
    assert derived.has_backward
    assert derived.operations[:2] == graph.operations
    assert derived.notes == ("exported",)


def test_gradients_go_to_trainable_weights_only() -> None:
    # a is frozen and tensor 2 is an input: only b's gradient, which reads a * x.
    graph = hand_graph(
        ("Mul", (0, 2), "float32", ""), ("Mul", (4, 1), "float32", ""), ("Tanh", (5,), "float32", ""), trainable=False
    )
    found = backward(differentiate(graph))
    assert [name for name, _, _ in found] == ["TanhGrad", "Mul"]
    assert 4 in found[1][1]


def test_nothing_passes_stop_gradient_or_places() -> None:
    graph = hand_graph(
        ("StopGradient", (0,), "float32", ""), ("Argmax", (1,), "int32", ""), ("Cast", (5,), "float32", ""),
        ("Add", (4, 6), "float32", ""), ("Mul", (7, 1), "float32", ""), ("Tanh", (8,), "float32", ""),
    )  # fmt: skip
    assert [name for name, _, _ in backward(differentiate(graph))] == ["TanhGrad", "Mul"]


def test_contributions_are_summed_in_the_innermost_cell_that_holds_their_readers() -> None:
    # z = tanh(a) is read twice in cell n.x and once in n: n.x sums its two before n adds the third.
    graph = hand_graph(
        ("Tanh", (0,), "float32", "t"), ("Exp", (4,), "float32", "n.x"), ("Log", (4,), "float32", "n.x"),
        ("Sin", (4,), "float32", "n"), ("AddN", (5, 6, 7), "float32", "n"), ("Exp", (8,), "float32", "e"),
    )  # fmt: skip
    sums = [(read, cell) for name, read, cell in backward(differentiate(graph)) if name == "AddN"]
    assert [(len(read), cell) for read, cell in sums] == [(2, "n.x"), (2, "n")]


def test_operations_that_no_weight_needs_are_dropped() -> None:
    # The slope of a step is zero: the gradient that reaches it is never computed.
    graph = hand_graph(
        ("FloorDiv", (2, 1), "float32", ""), ("Mul", (4, 0), "float32", ""), ("Tanh", (5,), "float32", "")
    )
    assert [name for name, _, _ in backward(differentiate(graph))] == ["TanhGrad", "Mul"]


def test_all_unknown_primitives_are_reported_at_once() -> None:
    graph = hand_graph(
        ("Frobnicate", (0,), "float32", ""), ("Frobnicate", (4,), "float32", ""), ("Warp", (5,), "float32", ""),
        ("Exotic", (2,), "float32", ""), ("Mul", (6, 7), "float32", ""),
    )  # fmt: skip
    with pytest.raises(UnknownPrimitiveError, match=r"Frobnicate \(2 times\), Warp \(1 times\)") as caught:
        differentiate(graph)
    assert caught.value.counts == {"Frobnicate": 2, "Warp": 1}  # Exotic is not on the way to a weight


def test_unknown_primitives_can_be_taken_to_keep_everything() -> None:
    graph = hand_graph(("Warp", (0, 2), "float32", "w"), ("Tanh", (4,), "float32", ""))
    derived = differentiate(graph, assume_elementwise=True)
    name, read, cell = backward(derived)[-1]
    assert (name, cell) == ("WarpGrad", "w")
    assert {0, 2, 4} < set(read)
    assert derived.notes[-1] == "Warp (1 times) has no derivative rule: taken to keep all it reads and makes"


def test_unusable_graphs_are_refused() -> None:
    graph = hand_graph(("Tanh", (0,), "float32", ""))
    with pytest.raises(InputError, match="has backward operations already"):
        differentiate(differentiate(graph))
    with pytest.raises(InputError, match="no trainable weight reaches its result"):
        differentiate(hand_graph(("Tanh", (2,), "float32", "")))
    frozen = {name: replace(info, trainable=False) for name, info in graph.parameters.items()}
    with pytest.raises(InputError, match="no trainable weight reaches its result"):
        differentiate(replace(graph, parameters=frozen))


@pytest.mark.parametrize(
    ("paths", "common"), [(["a.b", "a.c"], "a"), (["a.b", "a.b.c"], "a.b"), (["ab", "a"], ""), (["", "a"], "")]
)
def test_common_cell(paths: list[str], common: str) -> None:
    assert common_cell(paths) == common


_FOLDED = "folded into a constant where MindSpore knows the size; any other size is refused"
_SHARED = "stands in graphs of networks that ranks share: test_derivatives_sharded.py"
_STOPPED = "MindSpore drops it while it compiles: neither joint graphs nor exported files have it (test_exported.py)"

WITHOUT_CASE = {
    "AllGather": _SHARED, "AllReduce": _SHARED, "AlltoAll": _SHARED, "Arange": _FOLDED, "Ones": _FOLDED,
    "OnesLike": _FOLDED, "Range": _FOLDED, "ReduceScatter": _SHARED, "StopGradient": _STOPPED, "ZerosLike": _FOLDED,
}  # fmt: skip
"""Primitives that have a cost rule and that no case shows, with the reason."""


@pytest.mark.long
def test_every_rule_is_tested_against_mindspore() -> None:
    seen: set[str] = set()
    anywhere: set[str] = set()
    for family in CASES:
        operations = joint_graph(family, SIZES[0]).operations
        seen |= {operation.primitive for operation in operations if operation.phase is Phase.FORWARD}
        anywhere |= {operation.primitive for operation in operations}
    assert known_primitives() - anywhere == set(WITHOUT_CASE)
    assert anywhere <= known_primitives()
    assert differentiable_primitives() - seen == COLLECTIVES <= set(WITHOUT_CASE)
    assert WITHOUT_GRADIENT - anywhere <= set(WITHOUT_CASE)
    assert not WITHOUT_GRADIENT & differentiable_primitives()
