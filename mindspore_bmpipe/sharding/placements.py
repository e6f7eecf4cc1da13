"""Placement rules: from an operation's strategy to the shares of what it reads and makes.

Each follows MindSpore's own operator (`frontend/parallel/ops_info`): which dimension of the device matrix cuts which
axis, and what ranks must add up. Operations without a strategy are shared out along their first axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from mindspore_bmpipe.graph.attention import ATTENTION_LAYOUTS, BAND_MODE, CAUSAL_MODES
from mindspore_bmpipe.graph.cell_graph import Operation
from mindspore_bmpipe.graph.mindir import Constant
from mindspore_bmpipe.sharding.base import Placement, Rule, Shape, Site, Strategy
from mindspore_bmpipe.sharding.layout import Axis, Layout, Split


def elementwise(site: Site) -> Placement:
    """Operands broadcast against each other; the result is cut as the operand that is cut."""
    return _broadcast(site, site.strategy or _first_axis(site))


def _first_axis(site: Site) -> Strategy:
    """Operands of full rank are cut along their first axis, unless broadcast there."""
    rank = max((len(shape) for shape in site.operands), default=0)
    parts = site.batch_parts(site.results[0][0]) if rank else 1
    return tuple(
        tuple(parts if axis == 0 and len(shape) == rank and size != 1 else 1 for axis, size in enumerate(shape))
        for shape in site.operands
    )


def _broadcast(site: Site, strategy: Strategy) -> Placement:
    rank = max(len(part) for part in strategy)
    sizes = [
        max(part[axis - rank + len(part)] for part in strategy if axis >= rank - len(part)) for axis in range(rank)
    ]
    cuts = site.matrix(sizes)
    operands = tuple(
        tuple(cuts[rank - len(part) + axis] if count > 1 else () for axis, count in enumerate(part))
        for part in strategy
    )
    return Placement(operands, tuple(_aligned(cuts, shape) for shape in site.results))


def _aligned(cuts: tuple[Axis, ...], shape: Shape) -> Layout:
    """Cuts of the last axes; axes of one element are whole."""
    return tuple(cut if size != 1 else () for cut, size in zip(cuts[len(cuts) - len(shape) :], shape, strict=True))


def _whole_along(axes: Callable[[Site], Iterable[int]]) -> Rule:
    """Operations that need some axes of their first operand whole; other operands belong to its last axes."""

    def rule(site: Site) -> Placement:
        strategy = site.strategy or _first_axis_of_first(site)
        if any(strategy[0][axis] > 1 for axis in axes(site)):
            raise site.refused(f"strategy {strategy}, which cuts an axis that the operation needs whole,")
        cuts = site.matrix(strategy[0])
        operands = [cuts]
        for part in strategy[1:]:
            if any(count > 1 for count in part):
                raise site.refused(f"strategy {strategy}")
            operands.append(((),) * len(part))
        return Placement(tuple(operands), tuple(_same_axes(cuts, shape) for shape in site.results))

    return rule


def _first_axis_of_first(site: Site) -> Strategy:
    parts = site.batch_parts(site.operands[0][0])
    return tuple(
        tuple(parts if number == 0 and axis == 0 else 1 for axis in range(len(shape)))
        for number, shape in enumerate(site.operands)
    )


def _same_axes(cuts: tuple[Axis, ...], shape: Shape) -> Layout:
    if len(shape) != len(cuts):
        return ((),) * len(shape)
    return tuple(cut if size != 1 else () for cut, size in zip(cuts, shape, strict=True))


def _last_axis(site: Site) -> Iterable[int]:
    return site.axes(site.setting("axis", 1, -1), len(site.operands[0]))


def _counted_axis(site: Site) -> Iterable[int]:
    return site.axes(site.setting("axis", 1, 0), len(site.operands[0]))


def _normalised_axes(site: Site) -> Iterable[int]:
    rank = len(site.operands[0])
    begin = site.setting("begin_norm_axis", 3, -1) if site.operation.primitive == "LayerNorm" else rank - 1
    return range(begin % rank, rank)


def reduction(site: Site) -> Placement:
    """Sums over cut axes are completed by the ranks that share them."""
    shape = site.operands[0]
    axes = site.axes(site.setting("axis", 1, ()), len(shape))
    cuts = site.matrix((site.strategy or _first_axis_of_first(site))[0])
    sums = tuple(cut for axis in axes for cut in cuts[axis])
    if sums and site.operation.primitive not in _ADDED:
        raise site.refused("a strategy that cuts a reduced axis")
    keeps = len(site.results[0]) == len(shape)
    result = tuple(() if axis in axes else cut for axis, cut in enumerate(cuts) if keeps or axis not in axes)
    return Placement((cuts,), (result,), sums, averages=site.operation.primitive in _AVERAGED)


def product(site: Site) -> Placement:
    """Products of matrices, with the device matrix (batch axes, rows, inner axis, columns).

    Ranks that share the inner axis add up; each keeps its rows only if the output strategy cuts these further.
    """
    turned = [bool(site.setting(name, 2 + place, False)) for place, name in enumerate(("transpose_a", "transpose_b"))]
    first, second = site.strategy or _batch_of_product(site, turned[0])
    if turned[0]:
        first = (*first[:-2], first[-1], first[-2])
    if turned[1]:
        second = (*second[:-2], second[-1], second[-2])
    if first[-1] != second[-2]:
        raise site.refused(f"a strategy that cuts the inner axis into {first[-1]} and {second[-2]} parts")
    batch = max(first[:-2], second[:-2], key=len)
    shorter = min(first[:-2], second[:-2], key=len)
    if tuple(batch[len(batch) - len(shorter) :]) != tuple(shorter):
        raise site.refused("a strategy that cuts the batch axes of its operands differently")
    cuts = site.matrix((*batch, first[-2], first[-1], second[-1]))
    *outer, rows, inner, columns = cuts
    layouts = []
    for part, matrix, swap in ((first, (rows, inner), turned[0]), (second, (inner, columns), turned[1])):
        own = outer[len(outer) - len(part) + 2 :]
        layouts.append((*own, *(matrix[::-1] if swap else matrix)))
    for shape in site.operands[2:]:
        raise site.refused(f"an operand of {list(shape)}")
    result = (*outer, rows, columns)
    wanted = site.operation.attributes.get("out_strategy")
    if wanted and _rows_of(wanted) != first[-2]:
        if len(result) != 2 or _rows_of(wanted) != first[-2] * first[-1]:
            raise site.refused(f"out_strategy {wanted}")
        return Placement(tuple(layouts), (((*rows, *inner), columns),), inner, scatters=True)
    return Placement(tuple(layouts), (result,), inner)


def _rows_of(strategy: tuple[tuple[int, ...], ...]) -> int:
    return strategy[0][0]


def _batch_of_product(site: Site, turned: bool) -> Strategy:
    """The first axis of the first operand, and of the second if both are batches."""
    first, second = site.operands[:2]
    if turned and len(first) == 2:
        raise site.refused("a transposed product without a strategy")
    parts = site.batch_parts(first[0])
    second_parts = parts if len(second) == len(first) and len(second) > 2 else 1
    return ((parts, *(1,) * (len(first) - 1)), (second_parts, *(1,) * (len(second) - 1)))


def bias(site: Site) -> Placement:
    """A bias along the second axis."""
    first, _ = site.strategy or _first_axis_of_first(site)
    cuts = site.matrix(first)
    return Placement((cuts, (cuts[1],)), (cuts,))


def transpose(site: Site) -> Placement:
    """Axes take their cuts along."""
    (strategy,) = site.strategy or _first_axis_of_first(site)
    cuts = site.matrix(strategy)
    order = site.axes(site.setting("perm", 1, ()), len(cuts))
    return Placement((cuts,), (tuple(cuts[axis] for axis in order),))


def side_by_side(site: Site) -> Placement:
    """Tensors laid along an axis that all ranks hold whole."""
    rank = len(site.operands[0])
    axis = int(site.setting("axis", 1, 0)) % rank
    strategy = site.strategy
    first = strategy[0] if strategy else _first_axis_of_first(site)[0]
    if first[axis] > 1 or (strategy and any(part != first for part in strategy)):
        raise site.refused(f"strategy {strategy or first}")
    cuts = site.matrix(first)
    return Placement((cuts,) * len(site.operands), (cuts,))


def tile(site: Site) -> Placement:
    """Repeated axes are whole on every rank."""
    (strategy,) = site.strategy or _first_axis_of_first(site)
    repeats = site.setting("multiples", 1, ())
    rank = len(site.operands[0])
    if len(repeats) != rank or any(count > 1 and times != 1 for count, times in zip(strategy, repeats, strict=True)):
        raise site.refused(f"strategy {strategy} with repeats {repeats}")
    cuts = site.matrix(strategy)
    return Placement((cuts,), (cuts,))


def lookup(site: Site) -> Placement:
    """Rows of a table: cut by samples, by columns of the table, or by its rows, whose ranks add up what they find."""
    table, indices = site.operands[:2]
    axis = int(site.setting("axis", 2, 0)) % len(table)
    strategy = site.strategy
    if strategy is None:
        parts = site.batch_parts(indices[0]) if indices else 1
        strategy = ((1,) * len(table), (parts, *(1,) * (len(indices) - 1)) if indices else ())
    of_table, of_indices = strategy[:2]
    if axis != 0 or (of_table[0] > 1 and any(count > 1 for count in of_table[1:])):
        raise site.refused(f"strategy {strategy} of a lookup along axis {axis}")
    cuts = site.matrix((*of_indices, *of_table))
    for_indices, for_table = cuts[: len(indices)], cuts[len(indices) :]
    rows: Split | None = None
    if for_table[0]:
        (rows,) = for_table[0]
        if rows.stride != 1:
            raise site.refused(f"strategy {strategy}, which leaves ranks without work of their own,")
    result = (*for_indices, *for_table[1:])
    return Placement((for_table, for_indices), (result,), for_table[0], table_rows=rows)


def pick(site: Site) -> Placement:
    """One element along an axis that all ranks hold whole; table and indices are cut alike."""
    axis = int(site.setting("dim", 1, 0)) % len(site.operands[0])
    strategy = site.strategy
    if strategy is None:
        parts = site.batch_parts(site.operands[0][0])
        strategy = ((parts, *(1,) * (len(site.operands[0]) - 1)),) * 2
    if strategy[0] != strategy[1] or strategy[0][axis] > 1:
        raise site.refused(f"strategy {strategy}")
    cuts = site.matrix(strategy[0])
    return Placement((cuts, cuts), (cuts,))


def one_hot(site: Site) -> Placement:
    """A last axis of classes more; the strategy cuts the result."""
    indices, *values = site.operands
    strategy = site.strategy_of((site.results[0], *values))
    parts = site.batch_parts(indices[0]) if strategy is None else 0
    first = strategy[0] if strategy else (parts, *(1,) * len(indices))
    if int(site.setting("axis", 4, -1)) % len(first) != len(indices):
        raise site.refused("an axis of classes that is not the last")
    cuts = site.matrix(first)
    return Placement((cuts[:-1], *((),) * len(values)), (cuts,))


def added_axis(site: Site) -> Placement:
    """An axis of one element more."""
    (strategy,) = site.strategy or _first_axis_of_first(site)
    cuts = site.matrix(strategy)
    axis = int(site.setting("axis", 1, 0)) % (len(cuts) + 1)
    return Placement((cuts,), ((*cuts[:axis], (), *cuts[axis:]),))


def attention(site: Site) -> Placement:
    """The fused kernel: samples, heads and the tokens of queries are cut; every rank sees all keys and values."""
    strategy = site.strategy
    if strategy is None:
        raise site.refused("attention without a strategy")
    names = _attention_layout(site)
    cuts = site.matrix(strategy[0])
    tokens = names.index("S")
    whole_keys = tuple(1 if axis == tokens else count for axis, count in enumerate(strategy[0]))
    if any(part != whole_keys for part in strategy[1:3]):
        raise site.refused(f"strategy {strategy}, which cuts keys by tokens or apart from queries,")
    samples, heads, queries = cuts[names.index("B")], cuts[names.index("N" if "N" in names else "H")], cuts[tokens]
    keys = tuple(() if axis == tokens else cut for axis, cut in enumerate(cuts))
    by_axis = {4: (samples, heads, queries, ()), 2: (queries, ())}
    masks = []
    for part in strategy[3:]:
        full = by_axis.get(len(part), ((),) * len(part))
        masks.append(tuple(cut if count > 1 else () for cut, count in zip(full, part, strict=True)))
        if any(count > 1 and not cut for cut, count in zip(full, part, strict=True)):
            raise site.refused(f"strategy {strategy}")
    *statistics, result = site.results
    found = tuple(by_axis[4] if len(shape) == 4 else ((),) * len(shape) for shape in statistics)
    made = cuts if len(result) == len(cuts) else ((),) * len(result)
    return Placement((cuts, keys, keys, *masks), (*found, made), compiled=_with_band(site) if queries else None)


def _with_band(site: Site) -> Operation | None:
    """Masks that the kernel makes itself become bands, at another place on every rank."""
    operation, mode = site.operation, site.setting("sparse_mode", len(site.operation.arguments) - 1, 0)
    if mode not in CAUSAL_MODES:
        return None
    if "sparse_mode" in operation.attributes:
        return replace(operation, attributes={**operation.attributes, "sparse_mode": BAND_MODE})
    return replace(operation, arguments=(*operation.arguments[:-1], Constant(BAND_MODE)))


def _attention_layout(site: Site) -> str:
    given = site.setting("input_layout", len(site.operation.arguments) - 2, "BNSD")
    name = ATTENTION_LAYOUTS[given] if given in range(len(ATTENTION_LAYOUTS)) else str(given)
    if not set("BS") <= set(name):
        raise site.refused(f"layout {name}")
    return name


_ADDED = frozenset({"ReduceSum", "ReduceMean", "SumExt", "MeanExt"})
_AVERAGED = frozenset({"ReduceMean", "MeanExt"})

_ELEMENTWISE = (
    "Abs", "Add", "Cast", "Cos", "Div", "Dropout", "Equal", "Erf", "Exp", "FastGeLU", "GeLU", "Greater",
    "GreaterEqual", "Less", "LessEqual", "Log", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mul",
    "Neg", "NotEqual", "Pow", "ReLU", "RealDiv", "Rsqrt", "SiLU", "Sigmoid", "Sin", "Sqrt", "Square", "Sub", "Tanh",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "SumExt", "MeanExt", "ReduceMax", "ReduceMin"), reduction),
    **dict.fromkeys(("MatMul", "BatchMatMul"), product),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _whole_along(_last_axis)),
    **dict.fromkeys(("LayerNorm", "RmsNorm"), _whole_along(_normalised_axes)),
    "BiasAdd": bias,
    "Concat": side_by_side,
    "CumSum": _whole_along(_counted_axis),
    "ExpandDims": added_axis,
    "FlashAttentionScore": attention,
    "Gather": lookup,
    "GatherD": pick,
    "OneHot": one_hot,
    "Split": _whole_along(lambda site: site.axes(site.setting("axis", 1, 0), len(site.operands[0]))),
    "Tile": tile,
    "TopK": _whole_along(lambda site: (len(site.operands[0]) - 1,)),
    "Transpose": transpose,
}
"""Rules by primitive."""
