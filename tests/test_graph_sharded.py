"""Shares of weights and gradients summed once a step, on graphs written by hand."""

from __future__ import annotations

import pytest

from mindspore_bmpipe.costs.static_memory import StaticSettings, static_bytes
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import Operation, ParameterInfo, Phase, Sharding, Tensor, TensorRef
from mindspore_bmpipe.graph.inline import FlatModule
from mindspore_bmpipe.graph.mindir import TensorType
from mindspore_bmpipe.graph.sharded import (
    gradient_groups,
    require_degrees,
    require_experts,
    sharded_parameters,
    synchronisation_note,
    without_synchronisation,
)

KIND = TensorType((6, 2), "float32")
K = 1024
"""Makes weights of some rows large enough to be shared out."""
MIRROR = "Gradients/Default/up-Dense/Grad__MirrorOperator/AllReduce-op0"


def operation(
    primitive: str, reads: int, makes: int, scope: str = "Gradients/", phase: Phase = Phase.BACKWARD
) -> Operation:
    return Operation(primitive, (TensorRef(reads),), (makes,), {}, "up", phase, scope, None)


def test_sums_over_ranks_go_and_the_rest_stays() -> None:
    flat = FlatModule(
        (
            operation("AllReduce", 0, 1, "Default/up-Dense/AllReduce-op0", Phase.FORWARD),
            operation("AllReduce", 1, 2, "Gradients/Default/up-Dense/Grad_AllReduce/AllReduce-op1"),
            operation("MatMul", 2, 3),
            operation("AllReduce", 3, 4, MIRROR),
            operation("Mul", 4, 5),
        ),
        tuple(Tensor(KIND, index - 1 if index else None) for index in range(6)),
        (0,),
        frozenset(),
    )
    rest, removed = without_synchronisation(flat)
    assert [item.outputs for item in rest.operations] == [(1,), (2,), (3,)]
    assert [item.outputs for item in removed] == [(4,)]
    assert [tensor.producer for tensor in rest.tensors] == [None, 0, 1, 2, None, None]
    (note,) = synchronisation_note(rest, removed)
    assert "1 sums of weight gradients over ranks (48 bytes)" in note  # 12 elements of 4 bytes
    assert "once a step" in note


def test_nothing_is_said_of_graphs_without_such_sums() -> None:
    flat = FlatModule((operation("MatMul", 0, 1),), (Tensor(KIND, None), Tensor(KIND, 0)), (0,), frozenset())
    rest, removed = without_synchronisation(flat)
    assert rest == flat
    assert synchronisation_note(rest, removed) == ()


def weight(*shape: int, dtype: str = "float16") -> ParameterInfo:
    return ParameterInfo("w", TensorType(shape, dtype), True)


def test_shares_are_read_off_the_compiled_weights() -> None:
    whole = {"a": weight(8, 6), "b": weight(6), "c": weight(5)}
    compiled = {"a": TensorType((2, 6), "float16"), "b": TensorType((6,), "float16")}
    found = sharded_parameters(whole, compiled, {}, Sharding(1, 4))
    assert {name: info.shares for name, info in found.items()} == {"a": 4, "b": 1, "c": 1}
    assert found["a"].type.shape == (8, 6)
    with pytest.raises(InputError, match="no share of it"):
        sharded_parameters(whole, {"c": TensorType((2,), "float16")}, {}, Sharding(1, 4))


def test_a_share_takes_its_part_of_static_memory() -> None:
    """18 bytes an element of a 16-bit weight (arXiv 2205.05198), for the elements that a rank holds."""
    whole, part = weight(8 * K, 6), TensorType((2 * K, 6), "float16")
    share = sharded_parameters({"w": whole}, {"w": part}, {}, Sharding(2, 4))["w"]
    assert static_bytes(share, StaticSettings()) == 12 * K * 18
    # Optimizer state (12 bytes) shared by two more ranks, weight (2, and 2 gathered) and gradient (4) as level 1 says.
    assert static_bytes(share, StaticSettings(Sharding(2, 4), 1)) == (6 * (2 + 12) + 12 * 2 + 12 * 4) * K


def test_experts_are_held_by_fewer_ranks() -> None:
    """Eight ranks in pairs: a weight cut in four among the pairs, one cut in two within them, one of four ranks each.

    Of the four pairs, which hold other samples, one holds a share of the first, all of the second, two of the third.
    """
    groups = {"experts": (0, 1), "columns": (0, 2, 4, 6), "both": (0, 4)}
    parts = {"experts": (2 * K, 6), "columns": (8 * K, 3), "both": (4 * K, 3)}
    whole = {name: weight(8 * K, 6) for name in parts}
    compiled = {name: TensorType(shape, "float16") for name, shape in parts.items()}
    found = sharded_parameters(whole, compiled, groups, Sharding(4, 2, expert_parallel=4))
    assert {name: (info.shares, info.data_shares, info.row_shares) for name, info in found.items()} == {
        "experts": (4, 4, 4), "columns": (2, 1, 1), "both": (4, 2, 2)
    }  # fmt: skip
    # Level 1 shares 14 bytes of 18 among those that hold the same: the two of a pair, four pairs, and two of them. It
    # keeps the gathered weight and its gradient.
    settings = StaticSettings(Sharding(4, 2, expert_parallel=4), 1)
    assert static_bytes(found["experts"], settings) == (6 * 14 + 12 * 2 + 12 * 4) * K
    assert static_bytes(found["columns"], settings) == (6 * 14 + 24 * 2 + 24 * 4) * K
    assert static_bytes(found["both"], settings) == (6 * 14 + 12 * 2 + 12 * 4) * K


def test_the_ranks_that_add_up_a_gradient_hold_the_same_share() -> None:
    """Results are the loss and the gradients of trained weights; the second is summed twice, once for each use."""

    def summed(reads: int, makes: int, ranks: tuple[int, ...]) -> Operation:
        return Operation("AllReduce", (TensorRef(reads),), (makes,), {"group_rank_ids": ranks}, "up", Phase.BACKWARD,
                         MIRROR, None)  # fmt: skip

    both = Operation("AddN", (TensorRef(3), TensorRef(4)), (5,), {}, "up", Phase.BACKWARD, "Gradients/", None)
    flat = FlatModule(
        (operation("MatMul", 0, 1), summed(1, 2, (0, 2)), summed(1, 3, (0, 1, 2, 3)), summed(1, 4, (0, 1, 2, 3)), both),
        tuple(Tensor(KIND, None) for _ in range(6)), (0,), frozenset(), results=(0, 2, 5, 1),
    )  # fmt: skip
    frozen = ParameterInfo("f", KIND, False)
    known = {"a": weight(6, 2), "f": frozen, "b": weight(6, 2), "c": weight(6, 2)}
    assert gradient_groups(flat, known) == {"a": (0, 2), "b": (0, 1, 2, 3)}


def test_degrees_that_share_out_no_experts() -> None:
    with pytest.raises(InputError, match="expert_parallel: 4 does not divide the 2 ranks"):
        require_degrees(Sharding(2, 4, expert_parallel=4))
    require_degrees(Sharding(2, 1, context_parallel=2, expert_parallel=4))
    halves = ParameterInfo("w", KIND, True, shares=2, data_shares=2)
    require_experts("Net", {"w": halves}, Sharding(4, 1, expert_parallel=2))
    with pytest.raises(InputError, match="cut no weight among so many data-parallel ranks, but among 2"):
        require_experts("Net", {"w": halves}, Sharding(4, 1, expert_parallel=4))
    require_experts("Net", {}, Sharding(4, 1))
