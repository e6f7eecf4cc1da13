"""Forward graph of one rank, from the graph of the whole network and the strategies of its operations.

What MindSpore's parallel passes do to the forward graph is repeated here on shapes: every operation gets shares of its
operands, collectives and slices stand where one layout follows another, sums over ranks behind what makes parts of
them. Backward is no matter of this module: MindSpore differentiates after sharding, so that the derivative of the
sharded forward graph is the sharded backward graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import CellGraph, Operation, Phase, Sharding, read_tensors
from mindspore_bmpipe.graph.mindir import BYTES_PER_ELEMENT, TensorType
from mindspore_bmpipe.graph.sharded import synchronisation_text
from mindspore_bmpipe.graph.symbols import evaluate_dimension, symbol
from mindspore_bmpipe.graph.trace_axes import BATCH
from mindspore_bmpipe.sharding.base import Placement, Shape, Site
from mindspore_bmpipe.sharding.layout import Layout, Split, local_shape, merged, parts, shares, shares_apart, whole
from mindspore_bmpipe.sharding.placements import RULES
from mindspore_bmpipe.sharding.redistribute import NeedsNumber, changes
from mindspore_bmpipe.sharding.tape import Tape

_RENAMED = "Reshape"
"""Shapes of the same elements: MindSpore gives them the layout that their reader needs."""
_COPY = "TensorMove"
"""Copies of weights between cells compiled alone, which parallel compiles do not have."""
_CAST = "Cast"
"""Without a strategy, these follow the layout of what they read."""


def has_strategies(graph: CellGraph) -> bool:
    """Whether any operation says how ranks share it."""
    return any(_has_strategy(operation) for operation in graph.operations)


def _has_strategy(operation: Operation) -> bool:
    return operation.phase is Phase.FORWARD and operation.attributes.get("in_strategy") is not None


def shard_forward(graph: CellGraph, sharding: Sharding, sizes: Mapping[str, int]) -> CellGraph:
    """Forward operations that rank 0 of a stage runs.

    Args:
        graph: forward and backward, or forward only, of the whole network; backward is left out.
        sharding: ranks that share it. The symbol ``b`` of the result counts the samples of one data-parallel rank.
        sizes: values of symbols on one rank, other than those of the trace; names that are no symbols are left out.

    Returns:
        A graph without backward, with collectives and the shares of weights that the rank holds. Symbols whose value
        decides how layouts change are numbers in it; a note names them.

    Raises:
        InputError: strategies that do not fit the ranks or the shapes, or are not modelled; it names the operation.
    """
    graph = _of_one_rank(graph, sharding, sizes)
    while True:
        try:
            return _Forward(graph, sharding).run()
        except NeedsNumber as needed:
            graph = _with_numbers(graph, needed.names)


def _of_one_rank(graph: CellGraph, sharding: Sharding, sizes: Mapping[str, int]) -> CellGraph:
    """The whole network with the batch written in samples of one data-parallel rank."""
    symbols = {name: sizes.get(name, value) for name, value in graph.symbols.items()}
    ranks = sharding.data_parallel
    if BATCH not in symbols or ranks == 1:
        return replace(graph, symbols=symbols)
    if BATCH not in sizes:
        if symbols[BATCH] % ranks:
            raise InputError(
                f"config: data_parallel: {ranks} does not divide the traced micro-batch of {symbols[BATCH]}; set "
                "micro_batch_size to the samples of one rank"
            )
        symbols[BATCH] //= ranks
    batch = symbol(BATCH)
    return replace(_substituted(graph, {batch: ranks * batch}), symbols=symbols)


def _with_numbers(graph: CellGraph, names: frozenset[str]) -> CellGraph:
    """The graph with some symbols at their values."""
    values = {symbol(name): graph.symbols[name] for name in names}
    fixed = ", ".join(f"{name} = {graph.symbols[name]}" for name in sorted(names))
    return replace(
        _substituted(graph, values),
        symbols={name: value for name, value in graph.symbols.items() if name not in names},
        notes=(*graph.notes, f"sharding is that at {fixed} on one rank: how layouts change depends on it"),
    )


def _substituted(graph: CellGraph, values: Mapping[Any, Any]) -> CellGraph:
    def changed(size: Any) -> Any:
        if isinstance(size, int):
            return size
        found = size.subs(values, simultaneous=True)
        return int(found) if found.is_Integer else found

    tensors = tuple(
        replace(tensor, type=TensorType(tuple(map(changed, tensor.type.shape)), tensor.type.dtype))
        for tensor in graph.tensors
    )
    return replace(graph, tensors=tensors)


@dataclass(frozen=True)
class _Share:
    """What a rank holds of a tensor of the whole network."""

    tensor: int
    """Its tensor in the graph of one rank."""
    shape: Shape
    """Whole shape that the layout is given in."""
    layout: Layout
    """How it is cut."""
    renamed: Operation | None = None
    """Operation that gives it another shape, if the layout under that shape is still open."""


class _Forward:
    def __init__(self, graph: CellGraph, sharding: Sharding) -> None:
        self._graph = graph
        self._sharding = sharding
        self._tape = Tape()
        self._shares: dict[int, _Share] = {}
        # Weights, and casts of them: their layout is that which their reader needs.
        self._open: dict[int, tuple[int, tuple[Operation, ...]]] = {}
        self._weights: dict[str, _Share] = {}
        self._cast: dict[int, int] = {}
        self._uses: list[str] = []
        self._most_ranks = 0

    def run(self) -> CellGraph:
        graph = self._graph
        for number in graph.inputs:
            kind = graph.tensors[number].type
            self._shares[number] = _Share(self._tape.tensor(kind), kind.shape, whole(len(kind.shape)))
        inputs = tuple(self._shares[number].tensor for number in graph.inputs)
        for number, tensor in enumerate(graph.tensors):
            if tensor.parameter is not None:
                self._open[number] = (number, ())
        for operation in graph.operations:
            if operation.phase is Phase.FORWARD:
                self._run(operation)
        self._require_all_ranks()
        columns = self._sharding.tensor_parallel
        held = {name: share.layout for name, share in self._weights.items()}
        parameters = {
            name: replace(
                info,
                shares=shares(held[name]),
                data_shares=shares_apart(held[name], columns),
                row_shares=parts(held[name][0]) if held[name] else 1,
            )
            if name in held
            else info
            for name, info in graph.parameters.items()
        }
        return replace(
            graph,
            operations=tuple(self._tape.operations),
            tensors=self._tape.tensors(),
            inputs=inputs,
            parameters=parameters,
            notes=(*graph.notes, *self._synchronisation_note()),
            has_backward=False,
            sharding=self._sharding,
        )

    def _run(self, operation: Operation) -> None:
        read = read_tensors(operation)
        first = read[0] if len(read) == 1 else -1
        follows = operation.primitive == _COPY or (operation.primitive == _CAST and not _has_strategy(operation))
        if first in self._open and follows:
            weight, casts = self._open[first]
            own = () if operation.primitive == _COPY else (operation,)
            self._open[operation.outputs[0]] = (weight, (*casts, *own))
        elif first in self._shares and operation.primitive == _RENAMED:
            self._shares[operation.outputs[0]] = replace(self._shares[first], renamed=operation)
        elif first in self._shares and follows:
            self._follow(operation, first)
        else:
            self._place(operation)

    def _follow(self, operation: Operation, read: int) -> None:
        """An operation on every element, in whatever layout its operand has."""
        share = self._shares[read]
        (output,) = operation.outputs
        kind = TensorType(self._tape.kind(share.tensor).shape, self._graph.tensors[output].type.dtype)
        self._shares[output] = replace(share, tensor=self._tape.emit(operation, {read: share.tensor}, (kind,))[0])

    def _place(self, operation: Operation) -> None:
        graph, tape = self._graph, self._tape
        read = read_tensors(operation)
        site = Site(
            operation,
            tuple(graph.tensors[number].type.shape for number in read),
            tuple(graph.tensors[number].type.shape for number in operation.outputs),
            self._sharding.ranks,
            self._value,
        )
        rule = RULES.get(operation.primitive)
        if rule is None:
            raise InputError(
                f"{site.where}: no rule says how ranks share {operation.primitive}; give the file of 'bmpipe trace "
                "--sharded', which MindSpore compiles, or add a rule to sharding/placements.py"
            )
        placement = rule(site)
        if _has_strategy(operation):
            self._most_ranks = max(self._most_ranks, _told_apart(placement))
        local = {
            number: self._local(number, _normal(layout), operation)
            for number, layout in zip(read, placement.operands, strict=True)
        }
        kinds = []
        for number, layout in zip(operation.outputs, placement.results, strict=True):
            kind = graph.tensors[number].type
            held = _without(layout, placement.sums) if placement.scatters else layout
            kinds.append(TensorType(local_shape(kind.shape, held), kind.dtype))
        if placement.table_rows is not None:
            made: Sequence[int] = (tape.looked_up(operation, local, kinds[0]),)
        else:
            made = tape.emit(placement.compiled or operation, local, kinds)
        for number, tensor, layout in zip(operation.outputs, made, placement.results, strict=True):
            complete = tape.summed(tensor, placement, operation)
            self._shares[number] = _Share(complete, graph.tensors[number].type.shape, _normal(layout))

    def _local(self, number: int, layout: Layout, reader: Operation) -> int:
        """Tensor that holds the rank's share of an operand in a layout."""
        tensor = self._graph.tensors[number]
        shape = tensor.type.shape
        if number in self._open:
            return self._weight(number, layout, reader)
        if number not in self._shares:
            # Constants are cut while compiling.
            assert tensor.is_constant, f"{reader.scope} reads a tensor that nothing makes"
            kind = TensorType(local_shape(shape, layout), tensor.type.dtype)
            self._shares[number] = _Share(self._tape.tensor(kind, is_constant=True), shape, layout)
        share = self._shares[number]
        if share.renamed is None and share.layout == layout:
            return share.tensor
        owner = share.renamed or reader
        moved = share.tensor
        where = f"{owner.primitive} in cell {owner.cell}"
        spreads = self._sharding.all_to_all
        for change in changes(share.layout, share.shape, layout, shape, self._value, where, spreads):
            moved = self._tape.changed(moved, change, owner)
        moved = self._tape.reshaped(moved, local_shape(shape, layout), owner)
        if share.renamed is not None:
            self._shares[number] = _Share(moved, shape, layout)
        return moved

    def _weight(self, number: int, layout: Layout, reader: Operation) -> int:
        """Share of a weight, cut as its reader needs it, in the type that casts before the reader give it."""
        weight, casts = self._open[number]
        name = self._graph.tensors[weight].parameter or ""
        kind = self._graph.tensors[weight].type
        share = self._weights.get(name)
        if share is None:
            local = TensorType(local_shape(kind.shape, layout), kind.dtype)
            share = _Share(self._tape.tensor(local, parameter=name), kind.shape, layout)
            self._weights[name] = share
        if share.layout != layout:
            raise InputError(
                f"{reader.primitive} in cell {reader.cell}: reads weight {name} cut into {_counts(layout)} parts, "
                f"another operation reads it cut into {_counts(share.layout)}; give both the same strategy for it"
            )
        self._uses.append(name)
        tensor = share.tensor
        for cast in casts:
            (output,) = cast.outputs
            made = TensorType(self._tape.kind(tensor).shape, self._graph.tensors[output].type.dtype)
            if output not in self._cast:
                self._cast[output] = self._tape.emit(cast, {read_tensors(cast)[0]: tensor}, (made,))[0]
            tensor = self._cast[output]
        return tensor

    def _require_all_ranks(self) -> None:
        if 0 < self._most_ranks < self._sharding.ranks:
            raise InputError(
                f"the strategies of {self._graph.name} share work among at most {self._most_ranks} ranks, but "
                f"data_parallel x context_parallel x tensor_parallel are {self._sharding.ranks}; build the network for "
                "these degrees, or change them"
            )

    def _value(self, size: Any) -> int:
        return size if isinstance(size, int) else evaluate_dimension(size, self._graph.symbols, self._graph.name)

    def _synchronisation_note(self) -> tuple[str, ...]:
        """What ranks that hold the same weights add up of their gradients, once for every use of a weight."""
        sums = []
        for name in self._uses:
            share = self._weights[name]
            ranks = self._sharding.ranks // shares(share.layout)
            if self._graph.parameters[name].trainable and ranks > 1:
                kind = self._tape.kind(share.tensor)
                sums.append((ranks, int(sympy.prod(kind.shape)) * BYTES_PER_ELEMENT.get(kind.dtype, 4)))
        return (synchronisation_text(sums),) if sums else ()


def _told_apart(placement: Placement) -> int:
    """Ranks with work of their own."""
    layouts = (*placement.operands, *placement.results, (placement.sums,))
    return math.prod(cut.size for cut in {cut for layout in layouts for axis in layout for cut in axis})


def _counts(layout: Layout) -> str:
    return " x ".join(str(parts(axis)) for axis in layout)


def _normal(layout: Layout) -> Layout:
    return tuple(merged(axis) for axis in layout)


def _without(layout: Layout, cuts: Sequence[Split]) -> Layout:
    return tuple(tuple(cut for cut in axis if cut not in cuts) for axis in layout)
