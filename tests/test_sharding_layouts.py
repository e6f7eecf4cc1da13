"""Layouts, changes between them and placement rules, against arrays that are really cut and exchanged.

Every rank holds its part of a numbered array. Steps are carried out on these parts; what a rank holds at the end must
be its part under the wanted layout. Rules are checked by computing on parts what the operation computes on the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import sympy

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import Operation, Phase, TensorRef
from mindspore_bmpipe.graph.mindir import Constant
from mindspore_bmpipe.graph.symbols import symbol
from mindspore_bmpipe.sharding.base import Placement, Site
from mindspore_bmpipe.sharding.layout import Layout, Split, device_matrix, local_shape, merged, refined
from mindspore_bmpipe.sharding.placements import RULES
from mindspore_bmpipe.sharding.redistribute import NeedsNumber, changes

RANKS = 8
A, B, C = Split(4, 2), Split(2, 2), Split(1, 2)
ALL = Split(1, 8)


def part(array: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    """What a rank holds: of every axis the part that its digits say, outermost cut first."""
    for axis, cuts in enumerate(layout):
        for cut in cuts:
            array = np.split(array, cut.size, axis)[rank // cut.stride % cut.size]
    return array


def digit_of(rank: int, cut: Split) -> int:
    """Number of the part that a rank holds of a cut."""
    return rank // cut.stride % cut.size


def group(rank: int, cut: Split) -> list[int]:
    """Ranks that differ from one in the digit of a cut only, in its order."""
    first = rank - digit_of(rank, cut) * cut.stride
    return [first + cut.stride * digit for digit in range(cut.size)]


def number(size: Any) -> int:
    return int(size)


def carry_out(
    array: np.ndarray, before: Layout, after: Layout, target: Sequence[int], all_to_all: bool = False
) -> tuple[list[np.ndarray], int]:
    """Parts of all ranks after the changes, and the elements that rank 0 has gathered."""
    held = [part(array, before, rank) for rank in range(RANKS)]
    gathered = 0
    for change in changes(before, array.shape, after, target, number, "test", all_to_all):
        held = [piece.reshape(local_shape(change.shape, change.before)) for piece in held]
        for step in change.steps:
            if step.onto is not None:
                held = [np.concatenate([np.split(held[other], step.cut.size, step.onto)[digit_of(rank, step.cut)]
                                        for other in group(rank, step.cut)], step.axis)
                        for rank in range(RANKS)]  # fmt: skip
            elif step.gathers:
                held = [np.concatenate([held[other] for other in group(rank, step.cut)], step.axis)
                        for rank in range(RANKS)]  # fmt: skip
                gathered += held[0].size
            else:
                held = [np.split(piece, step.cut.size, step.axis)[digit_of(rank, step.cut)]
                        for rank, piece in enumerate(held)]  # fmt: skip
    return [piece.reshape(local_shape(target, after)) for piece in held], gathered


def layouts(rank: int) -> list[Layout]:
    """Every way to put the three cuts on the axes, or leave them out, in rank order on an axis."""
    found = []
    for places in itertools.product([None, *range(rank)], repeat=3):
        axes: list[list[Split]] = [[] for _ in range(rank)]
        for cut, place in zip((A, B, C), places, strict=True):
            if place is not None:
                axes[place].append(cut)
        found.append(tuple(merged(axis) for axis in axes))
    return found


@pytest.mark.parametrize("all_to_all", [False, True])
@pytest.mark.parametrize("before", layouts(2), ids=str)
def test_changes_between_any_two_layouts(before: Layout, all_to_all: bool) -> None:
    array = np.arange(16 * 24).reshape(16, 24)
    for after in layouts(2):
        held, gathered = carry_out(array, before, after, array.shape, all_to_all)
        for rank, piece in enumerate(held):
            np.testing.assert_array_equal(piece, part(array, after, rank))
        if before == after:
            assert gathered == 0


@pytest.mark.parametrize(
    ("shape", "target"),
    [((8, 16, 6), (128, 6)), ((128, 6), (8, 16, 6)), ((8, 48), (8, 8, 6)), ((6, 16), (96,)), ((3, 16, 8), (48, 8)),
     ((16, 3, 8), (4, 12, 8)), ((1, 16, 8), (16, 8)), ((24, 8), (8, 24))],
)  # fmt: skip
def test_changes_across_shapes(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    met = 0
    for before, after in itertools.product(layouts(len(shape)), layouts(len(target))):
        if not (divides(shape, before) and divides(target, after)):
            continue
        met += 1
        held, _ = carry_out(array, before, after, target)
        for rank, piece in enumerate(held):
            np.testing.assert_array_equal(piece, part(array.reshape(target), after, rank))
    assert met > 20


def divides(shape: Sequence[int], layout: Layout) -> bool:
    return all(size % math.prod(cut.size for cut in cuts) == 0 for size, cuts in zip(shape, layout, strict=True))


def test_exchanges_gather_nothing() -> None:
    """From rows to columns, and three cuts around three axes: every element is sent at most once for each cut."""
    array = np.arange(16 * 24).reshape(16, 24)
    assert carry_out(array, ((ALL,), ()), ((), (ALL,)), array.shape, True)[1] == 0
    (change,) = changes(((ALL,), ()), array.shape, ((), (ALL,)), array.shape, number, "test", True)
    assert [(step.axis, step.onto, step.cut) for step in change.steps] == [(0, 1, ALL)]
    cube = np.arange(8 * 8 * 8).reshape(8, 8, 8)
    rows, columns = ((A,), (B,), (C,)), ((B,), (), (A,))
    held, _ = carry_out(cube, rows, columns, cube.shape, True)
    for rank, piece in enumerate(held):
        np.testing.assert_array_equal(piece, part(cube, columns, rank))


def test_gathered_elements_by_hand() -> None:
    """Rows of 16 x 24 over 8 ranks, to columns: every rank gathers the whole and keeps a part."""
    array = np.arange(16 * 24).reshape(16, 24)
    assert carry_out(array, ((ALL,), ()), ((), (ALL,)), array.shape)[1] == 16 * 24
    # Tokens of each sample over two ranks (C), samples over four (merged A and B), to samples alone: one gather.
    samples = merged((A, B))
    assert carry_out(array, (samples, (C,)), (samples, ()), array.shape)[1] == 4 * 24


def test_a_layout_that_depends_on_the_batch_asks_for_its_value() -> None:
    """Rows cut by samples, then by tokens: whether the second cut meets samples or tokens depends on their number."""
    batch, tokens = symbol("b"), symbol("s")
    rows = (merged((A, B, C)), ())
    with pytest.raises(NeedsNumber) as needed:
        changes(rows, (4 * batch * tokens, 64), (merged((A, B)), (C,), ()), (4 * batch, tokens, 64),
                lambda size: int(sympy.sympify(size).subs({batch: 1, tokens: 16})), "test")  # fmt: skip
    assert needed.value.names == {"b"}


def test_device_matrices_repeat_work_on_neighbouring_ranks() -> None:
    """Of 8 ranks 2 x 2 parts leave two ranks with the same: numbers 0 and 1 hold the first part."""
    assert device_matrix((2, 1, 2), 8, "test") == ((Split(4, 2),), (), (Split(2, 2),))
    assert Split(2, 4).ranks == (0, 2, 4, 6)
    with pytest.raises(InputError, match="3 ranks, which do not divide the 8"):
        device_matrix((3,), 8, "test")


def test_cuts_that_overlap_in_part_are_refused() -> None:
    """Six ranks in twos of threes and threes of twos have no finer cut in common."""
    with pytest.raises(InputError, match="cannot follow each other"):
        refined([((Split(3, 2),),), ((Split(2, 3),),)], "test")


def site(primitive: str, shapes: Sequence[Sequence[int]], results: Sequence[Sequence[int]], *constants: Any,
         **attributes: Any) -> Site:  # fmt: skip
    arguments = (*(TensorRef(place) for place in range(len(shapes))), *(Constant(value) for value in constants))
    operation = Operation(primitive, arguments, (len(shapes),), attributes, "cell", Phase.FORWARD, "", "1")
    return Site(operation, tuple(map(tuple, shapes)), tuple(map(tuple, results)), RANKS, number)


def computed(placement: Placement, operands: Sequence[np.ndarray], function: Callable[..., np.ndarray]) -> None:
    """Compute on parts, add up what ranks must add up, and compare with the part of the whole result."""
    whole = function(*operands)
    made = [function(*(part(array, layout, rank) for array, layout in zip(operands, placement.operands, strict=True)))
            for rank in range(RANKS)]  # fmt: skip
    for cut in placement.sums:
        made = [sum(made[other] for other in group(rank, cut)) for rank in range(RANKS)]
    if placement.averages:
        made = [piece / math.prod(cut.size for cut in placement.sums) for piece in made]
    for cut in placement.sums if placement.scatters else ():
        made = [np.split(piece, cut.size, 0)[rank // cut.stride % cut.size] for rank, piece in enumerate(made)]
    for rank, piece in enumerate(made):
        np.testing.assert_allclose(piece, part(whole, placement.results[0], rank))


def ones(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape)


@pytest.mark.parametrize(
    ("strategy", "further"),
    [
        (((4, 1), (2, 1)), {}),
        (((2, 4), (1, 4)), {}),
        (((2, 2), (2, 2)), {}),
        (((2, 4), (1, 4)), {"out_strategy": ((8, 1),)}),
        (((1, 2), (1, 2)), {}),
        (None, {}),
    ],
)
def test_products(strategy: Any, further: dict[str, Any]) -> None:
    attributes = {"transpose_b": True, **further} | ({"in_strategy": strategy} if strategy else {})
    placement = RULES["MatMul"](site("MatMul", [(16, 8), (24, 8)], [(16, 24)], **attributes))
    computed(placement, (ones(16, 8), ones(24, 8)), lambda first, second: first @ second.T)
    if strategy is None:
        assert placement.results == (((ALL,), ()),)


@pytest.mark.parametrize(
    "strategy", [((2, 4, 1, 1), (2, 4, 1, 1)), ((2, 1, 2, 2), (2, 1, 2, 1)), ((1, 2, 1, 2), (1, 2, 2, 2)), None]
)
def test_batches_of_products(strategy: Any) -> None:
    attributes = {"in_strategy": strategy} if strategy else {}
    placement = RULES["BatchMatMul"](site("BatchMatMul", [(8, 4, 4, 8), (8, 4, 8, 6)], [(8, 4, 4, 6)], **attributes))
    computed(placement, (ones(8, 4, 4, 8), ones(8, 4, 8, 6)), np.matmul)


@pytest.mark.parametrize("strategy", [((2, 1, 4), (2, 1, 1)), ((2, 2, 2), (2, 2, 1)), ((8, 1, 1), (8, 1, 1)), None])
def test_broadcast_operands(strategy: Any) -> None:
    attributes = {"in_strategy": strategy} if strategy else {}
    placement = RULES["Mul"](site("Mul", [(8, 4, 8), (8, 4, 1)], [(8, 4, 8)], **attributes))
    computed(placement, (ones(8, 4, 8), ones(8, 4, 1)), np.multiply)


@pytest.mark.parametrize(("primitive", "function"), [("ReduceSum", np.sum), ("ReduceMean", np.mean)])
@pytest.mark.parametrize("strategy", [((2, 4),), ((8, 1),), ((1, 8),), None])
@pytest.mark.parametrize("axes", [(), (0,), (1,)])
def test_sums_over_axes(primitive: str, function: Any, strategy: Any, axes: tuple[int, ...]) -> None:
    attributes = {"in_strategy": strategy} if strategy else {}
    result = [size for axis, size in enumerate((16, 8)) if axes and axis not in axes]
    placement = RULES[primitive](site(primitive, [(16, 8)], [result], axes, **attributes))
    computed(placement, (ones(16, 8),), lambda array: function(array, axis=axes or None))


def test_transposed_axes_take_their_cuts_along() -> None:
    given = site("Transpose", [(8, 6, 4, 5)], [(8, 4, 6, 5)], (0, 2, 1, 3), in_strategy=((2, 1, 4, 1),))
    computed(RULES["Transpose"](given), (ones(8, 6, 4, 5),), lambda array: array.transpose(0, 2, 1, 3))


def test_a_bias_is_cut_as_the_columns() -> None:
    given = site("BiasAdd", [(8, 16), (16,)], [(8, 16)], in_strategy=((2, 4), (4,)))
    computed(RULES["BiasAdd"](given), (ones(8, 16), ones(16)), np.add)


def test_classes_of_one_hot_rows() -> None:
    """The strategy cuts the result; here samples only, as each rank makes all classes of its own."""
    given = site("OneHot", [(8, 4), (), ()], [(8, 4, 6)], in_strategy=((4, 1, 1), (), ()))
    rows = np.arange(32).reshape(8, 4) % 6
    computed(RULES["OneHot"](given), (rows, np.ones(()), np.zeros(())), lambda ids, on, off: np.eye(6)[ids] * on + off)


@pytest.mark.parametrize("strategy", [((4, 1, 2),), ((8, 1, 1),), None])
def test_running_sums_need_their_axis_whole(strategy: Any) -> None:
    given = site("CumSum", [(8, 6, 4)], [(8, 6, 4)], 1, **({"in_strategy": strategy} if strategy else {}))
    computed(RULES["CumSum"](given), (ones(8, 6, 4),), lambda array: np.cumsum(array, 1))


def attended(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Softmax attention of (b, heads, s, d)."""
    scores = np.exp(query @ key.swapaxes(-1, -2))
    return scores / scores.sum(-1, keepdims=True) @ value


@pytest.mark.parametrize("queries", [(2, 2, 2, 1), (1, 4, 2, 1), (2, 4, 1, 1), (1, 1, 8, 1)])
def test_attention_with_queries_cut_by_tokens(queries: tuple[int, ...]) -> None:
    """Each rank attends with its own queries to all keys and values of its samples and heads."""
    keys, shape = (*queries[:2], 1, 1), (2, 4, 8, 6)
    given = site("FlashAttentionScore", [shape] * 3, [shape], input_layout="BNSD", sparse_mode=2,
                 in_strategy=(queries, keys, keys))  # fmt: skip
    placement = RULES["FlashAttentionScore"](given)
    computed(placement, (ones(*shape), ones(*shape) / 2, ones(*shape) * 2), attended)
    mode = placement.compiled.attributes["sparse_mode"] if placement.compiled else 2
    assert mode == (4 if queries[2] > 1 else 2)


def test_masks_are_cut_as_the_scores() -> None:
    """A mask of (b, 1, s, s) by samples and tokens of queries, one of (s, s) by these tokens."""
    queries, keys, shape = (2, 2, 2, 1), (2, 2, 1, 1), (2, 4, 8, 6)
    for mask, cuts in (((2, 1, 8, 8), (2, 1, 2, 1)), ((8, 8), (2, 1))):
        given = site("FlashAttentionScore", [shape] * 3 + [mask], [shape], input_layout="BNSD", sparse_mode=0,
                     in_strategy=(queries, keys, keys, cuts))  # fmt: skip
        found = RULES["FlashAttentionScore"](given).operands[3]
        assert found == (((A,), (), (C,), ()) if len(mask) == 4 else ((C,), ()))


def test_tables_cut_by_columns_and_by_samples() -> None:
    ids = np.arange(32).reshape(8, 4) % 6
    given = site("Gather", [(6, 16), (8, 4)], [(8, 4, 16)], 0, in_strategy=((1, 4), (2, 1)))
    computed(RULES["Gather"](given), (ones(6, 16), ids), lambda table, places: table[places])


def test_tables_cut_by_rows_are_summed_over_the_ranks_of_the_rows() -> None:
    placement = RULES["Gather"](site("Gather", [(16, 6), (8, 4)], [(8, 4, 6)], 0, in_strategy=((4, 1), (2, 1))))
    assert placement.table_rows == Split(1, 4) and placement.sums == (Split(1, 4),)
    assert placement.operands == (((Split(1, 4),), ()), ((Split(4, 2),), ()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (site("Softmax", [(8, 8)], [(8, 8)], -1, in_strategy=((1, 2),)), "Softmax in cell cell.*needs whole"),
        (site("Split", [(8, 8)], [(8, 4), (8, 4)], 1, 2, in_strategy=((1, 2),)), "needs whole"),
        (site("MatMul", [(8, 8), (8, 8)], [(8, 8)], in_strategy=((1, 2), (4, 1))), "inner axis into 2 and 4"),
        (site("MatMul", [(8, 8), (8, 8)], [(8, 8)], in_strategy=((3, 1), (1, 1))), "an axis of 8 into 3 parts"),
        (site("MatMul", [(8, 8), (8, 8)], [(8, 8)], in_strategy=((2, 1),)), "does not fit operands"),
        (site("ReduceMax", [(8, 8)], [(8,)], 1, in_strategy=((1, 2),)), "cuts a reduced axis"),
        (site("Tile", [(8, 8)], [(8, 16)], (1, 2), in_strategy=((1, 2),)), "with repeats"),
        (site("Gather", [(6, 16), (8,)], [(6, 8)], 1), "lookup along axis 1"),
        (
            site(
                "FlashAttentionScore",
                [(2, 4, 8, 6)] * 3,
                [(2, 4, 8, 6)],
                input_layout="BNSD",
                in_strategy=((1, 1, 2, 1),) * 3,
            ),
            "cuts keys by tokens",
        ),
        (site("CumSum", [(8, 8)], [(8, 8)], 1, in_strategy=((1, 2),)), "needs whole"),
    ],
)
def test_strategies_that_are_not_modelled_name_the_operation(given: Site, message: str) -> None:
    with pytest.raises(InputError, match=message):
        RULES[given.operation.primitive](given)
