"""Work of single operations against counts made by hand from m, k, n and element sizes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import sympy

from mindspore_bmpipe.costs.network import network_costs
from mindspore_bmpipe.costs.rules import VIEWS, known_primitives, require_known, work_of
from mindspore_bmpipe.costs.rules.base import Engine, OperationView
from mindspore_bmpipe.errors import InputError, UnknownPrimitiveError
from mindspore_bmpipe.graph.mindir import TensorType
from mindspore_bmpipe.graph.symbols import symbol
from mindspore_bmpipe.graph.trace import trace
from tests.graph_networks import FACTORIES, build, traced


def view(primitive: str, inputs: list[Any], outputs: list[Any], *constants: Any, **attributes: Any) -> OperationView:
    kinds = tuple(TensorType(tuple(shape), dtype) for shape, dtype in inputs)
    made = tuple(TensorType(tuple(shape), dtype) for shape, dtype in outputs)
    return OperationView(primitive, (*kinds, *constants), kinds, made, attributes)


HALF, FULL, INT = "float16", "float32", "int32"


@pytest.mark.parametrize(
    ("operation", "engine", "flops", "moved"),
    [
        # 3 x 5 results of 4 multiply-adds; 12 + 20 read, 15 written, 2 bytes each.
        (view("MatMul", [((3, 4), HALF), ((4, 5), HALF)], [((3, 5), HALF)], False, False), Engine.MATMUL, 120, 94),
        (view("MatMul", [((4, 3), HALF), ((4, 5), HALF)], [((3, 5), HALF)], True, False), Engine.MATMUL, 120, 94),
        (view("MatMul", [((3, 4), HALF), ((5, 4), HALF)], [((3, 5), HALF)], False, True), Engine.MATMUL, 120, 94),
        (view("BatchMatMul", [((2, 7, 3, 4), FULL), ((2, 7, 4, 5), FULL)], [((2, 7, 3, 5), FULL)], False, False),
         Engine.MATMUL, 14 * 120, 14 * 4 * (12 + 20 + 15)),
        # 8 filters of 3 x 2 x 2 over 4 x 4 places of 2 images.
        (view("Conv2D", [((2, 3, 8, 8), FULL), ((8, 3, 2, 2), FULL)], [((2, 8, 4, 4), FULL)]),
         Engine.MATMUL, 2 * 256 * 12, 4 * (384 + 96 + 256)),
        (view("Conv2DBackpropFilter", [((2, 8, 4, 4), FULL), ((2, 3, 8, 8), FULL)], [((8, 3, 2, 2), FULL)]),
         Engine.MATMUL, 2 * 256 * 12, 4 * (384 + 96 + 256)),
        (view("Add", [((6, 5), HALF), ((5,), HALF)], [((6, 5), HALF)]), Engine.VECTOR, 30, 2 * (30 + 5 + 30)),
        (view("AddN", [((6,), FULL)] * 3, [((6,), FULL)]), Engine.VECTOR, 12, 4 * 24),
        (view("ReduceMean", [((6, 5), FULL)], [((6, 1), FULL)]), Engine.VECTOR, 30, 4 * 36),
        (view("Cast", [((10,), HALF)], [((10,), FULL)]), Engine.VECTOR, 0, 20 + 40),
        # A table look-up touches the rows it returns, not the table.
        (view("Gather", [((1000, 8), HALF), ((3,), INT)], [((3, 8), HALF)]), Engine.VECTOR, 0, 48 + 12 + 48),
        (view("Reshape", [((6, 5), HALF)], [((30,), HALF)]), Engine.NONE, 0, 0),
    ],
)  # fmt: skip
def test_work_by_hand(operation: OperationView, engine: Engine, flops: int, moved: int) -> None:
    work = work_of(operation)
    assert (work.engine, work.flops, work.read_bytes + work.written_bytes) == (engine, flops, moved)


@pytest.mark.parametrize(
    ("equation", "shapes", "result", "forward", "backward"),
    [
        # 2 x 3 x 5 results of 4 multiply-adds; each operand's gradient meets as many pairs.
        ("bij,bkj->bik", [(2, 3, 4), (2, 5, 4)], (2, 3, 5), 2 * 2 * 3 * 5 * 4, 2 * 240),
        ("bij,bkj", [(2, 3, 4), (2, 5, 4)], (3, 5), 2 * 2 * 3 * 5 * 4, 2 * 240),
        # The batch of any rank: 6 x 7 matrices of 3 x 5, 4 multiply-adds.
        ("...ij,jk->...ik", [(6, 7, 3, 4), (4, 5)], (6, 7, 3, 5), 42 * 2 * 60, 2 * 42 * 2 * 60),
        ("...ij, ...jk -> ...ik", [(6, 1, 3, 4), (7, 4, 5)], (6, 7, 3, 5), 42 * 2 * 60, 2 * 42 * 2 * 60),
        # (2 x 3) (3 x 4), then (2 x 4) (4 x 5). Backward needs the first product again, and two for each.
        ("bi,ij,jk->bk", [(2, 3), (3, 4), (4, 5)], (2, 5), 2 * (24 + 40), 2 * (24 + 2 * 24 + 2 * 40)),
        # One operand: every element is added once; backward repeats the result's gradient.
        ("bij->bj", [(2, 3, 4)], (2, 4), 24, 0),
    ],
)  # fmt: skip
def test_einsum_by_hand(
    equation: str, shapes: list[tuple[int, ...]], result: tuple[int, ...], forward: int, backward: int
) -> None:
    kinds, made = [(shape, HALF) for shape in shapes], (result, HALF)
    work = work_of(view("Einsum", kinds, [made], equation=equation))
    assert (work.flops, work.engine) == (forward, Engine.MATMUL if len(shapes) > 1 else Engine.VECTOR)
    assert work_of(view("EinsumGrad", [*kinds, made], kinds, equation=equation)).flops == backward


def test_einsum_without_its_equation_is_refused() -> None:
    with pytest.raises(InputError, match="Einsum: equation None does not name 1 operands"):
        work_of(view("Einsum", [((2, 3), HALF)], [((2,), HALF)]))


def test_fused_attention_counts_two_products_and_half_of_them_under_a_causal_mask() -> None:
    # 2 samples, 4 heads, 16 queries, 16 keys of size 8: two products of 2 * 16 * 16 * 8 flops a head. Graphs hold the
    # layout (1 is BNSD) and the mask mode as the last arguments of the kernel.
    heads, flat = ((2, 4, 16, 8), HALF), ((2, 16, 32), HALF)
    expected = 2 * 4 * 2 * (2 * 16 * 16 * 8)
    assert work_of(view("FlashAttentionScore", [heads] * 3, [heads], 1, 0)).flops == expected
    assert work_of(view("FlashAttentionScore", [flat] * 3, [flat], 0, 0)).flops == expected
    assert work_of(view("FlashAttentionScore", [heads] * 3, [heads], 1, 2)).flops == expected / 2
    assert work_of(view("FlashAttentionScoreGrad", [heads] * 4, [heads] * 3, 1, 2)).flops == expected / 2 * 2.5
    # A band (4) of a whole mask may be all of it. Of four ranks with 4 queries each, the last sees 16 keys, less the
    # half of its own block that lies ahead: 4 * 16 - 4 * 4 / 2 pairs.
    assert work_of(view("FlashAttentionScore", [heads] * 3, [heads], 1, 4)).flops == expected
    own = ((2, 4, 4, 8), HALF)
    last = work_of(view("FlashAttentionScore", [own, heads, heads], [own], 1, 4)).flops
    assert last == 2 * 4 * 2 * (2 * 8) * (4 * 16 - 4 * 4 / 2)
    with pytest.raises(InputError, match="unknown lengths"):
        work_of(view("FlashAttentionScore", [flat] * 3, [flat], 4, 0))


def test_fused_attention_is_read_off_real_graphs() -> None:
    """Sizes of the LLaMA example: causal, so half of 4 s^2 h for every sample, and 2.5 times that for backward."""
    network, inputs = build("llama", flash=True, dtype="float16")
    costs = network_costs(trace(network, *inputs))
    names = [unit.name for unit in costs.split.units]
    model = costs.models[names.index("blocks.0")]
    flops = model.flops @ model.basis.values({"b": 3, "s": 32})
    found = {op.primitive: value for op, value in zip(model.operations, flops, strict=True) if "Flash" in op.primitive}
    forward = 3 * 4 * 32**2 * 64 / 2
    assert found == {"FlashAttentionScore": forward, "FlashAttentionScoreGrad": 2.5 * forward}


def test_rules_take_symbols() -> None:
    b, s = symbol("b"), symbol("s")
    work = work_of(view("MatMul", [((b * s, 4), HALF), ((4, 5), HALF)], [((b * s, 5), HALF)], False, False))
    assert sympy.expand(work.flops) == 40 * b * s
    assert sympy.expand(work.read_bytes + work.written_bytes) == 18 * b * s + 40


@pytest.mark.parametrize("name", FACTORIES)
def test_all_primitives_of_the_examples_are_known(name: str) -> None:
    require_known(operation.primitive for operation in traced(name).operations)


def test_unknown_primitives_are_reported_together_with_counts() -> None:
    with pytest.raises(UnknownPrimitiveError, match=r"Mystery \(1 times\), Riddle \(2 times\)") as caught:
        require_known(["Riddle", "MatMul", "Mystery", "Riddle"])
    assert caught.value.counts == {"Riddle": 2, "Mystery": 1}
    assert caught.value.exit_code == 2


def test_no_unknown_primitive_costs_nothing_when_assumed() -> None:
    unknown = view("Riddle", [((6,), FULL)], [((6,), FULL)])
    assert work_of(unknown, assume_elementwise=True).flops == 6
    assert "Riddle" not in known_primitives() and known_primitives() >= VIEWS


def _transformer_flops(layers: int, b: int, s: int, h: int, vocab: int) -> int:
    """Forward flops of a GPT: 24 b s h^2 + 4 b s^2 h a layer and 2 b s h v for the head (arXiv 2104.04473)."""
    return layers * (24 * b * s * h**2 + 4 * b * s**2 * h) + 2 * b * s * h * vocab


def test_matrix_flops_of_a_gpt_follow_the_published_formula() -> None:
    graph = traced("gpt")
    costs = network_costs(graph)
    sizes = {"b": 3, "s": 40}
    totals: Counter[str] = Counter()
    for model in costs.models:
        flops = model.flops @ model.basis.values(sizes)
        for operation, value in zip(model.operations, flops, strict=True):
            if operation.engine is Engine.MATMUL:
                totals[operation.phase.value] += int(value)
    expected = _transformer_flops(layers=2, b=3, s=40, h=64, vocab=256)
    assert totals["forward"] == expected
    assert totals["backward"] == 2 * expected
