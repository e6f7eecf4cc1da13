"""Derivative rules of collectives against the gradients that MindSpore derives in a network that two ranks share."""

from __future__ import annotations

from collections import Counter

import pytest
from verify_plans import needs_compiler

from mindspore_bmpipe.costs.differentiate import differentiate
from mindspore_bmpipe.graph.cell_graph import CellGraph, Phase, Sharding
from mindspore_bmpipe.graph.recorded import graph_of
from mindspore_bmpipe.graph.sharded import COLLECTIVES
from mindspore_bmpipe.verify.sharded import record_sharded
from tests.joint_comparison import (
    backward_flops,
    forward_only,
    kept_labels,
    matrix_operations,
    vector_operations,
    whole,
)

pytestmark = needs_compiler

SIZES = [(4, 8), (6, 4), (8, 12)]


def exchanges(graph: CellGraph, phase: Phase) -> Counter[tuple[object, ...]]:
    """Collectives with the shapes they read and make, and what they say of axes."""
    return Counter(
        (
            operation.primitive,
            tuple(graph.tensors[argument.tensor].type.shape for argument in operation.arguments[:1]),
            tuple(graph.tensors[output].type.shape for output in operation.outputs),
            operation.attributes.get("split_dim"),
            operation.attributes.get("concat_dim"),
            operation.attributes["group_rank_ids"],
        )
        for operation in graph.operations
        if operation.phase is phase and operation.primitive in COLLECTIVES
    )


@pytest.mark.parametrize("size", [SIZES[0], *(pytest.param(size, marks=pytest.mark.long) for size in SIZES[1:])])
def test_collectives_go_back_as_mindspore_sends_them(size: tuple[int, int]) -> None:
    settings = {"batch": size[0], "width": size[1]}
    trace, _ = record_sharded("collective_networks:factory", settings, Sharding(1, 2), varies=False)
    joint = graph_of(trace)
    assert {entry[0] for entry in exchanges(joint, Phase.FORWARD)} == COLLECTIVES
    derived = differentiate(forward_only(joint))
    assert exchanges(derived, Phase.BACKWARD) == exchanges(joint, Phase.BACKWARD)
    assert kept_labels(derived, whole) == kept_labels(joint, whole)
    assert matrix_operations(derived, whole) == matrix_operations(joint, whole)
    # The ranks share the gradient of the loss: a constant divided by a constant.
    surplus = vector_operations(joint, whole) - vector_operations(derived, whole)
    assert [name for _, name, _ in surplus.elements()] == ["RealDiv"]
    assert not vector_operations(derived, whole) - vector_operations(joint, whole)
    assert backward_flops(derived, whole) == backward_flops(joint, whole, [("", "RealDiv")])
