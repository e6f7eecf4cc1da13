"""Equal changes of layout in one cell, which MindSpore makes once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mindspore_bmpipe.graph.cell_graph import CellGraph, Operation, TensorRef
from mindspore_bmpipe.sharding.tape import is_added


def without_repetition(graph: CellGraph) -> CellGraph:
    """Leave out forward operations that change a layout as another one of their cell does.

    MindSpore changes layouts for every reader alone and differentiates that; equal operations of forward are made one
    later. So backward keeps one change for every reader.
    """
    known: dict[Any, tuple[int, ...]] = {}
    same: dict[int, int] = {}
    kept: list[Operation] = []

    def changed(argument: Any) -> Any:
        if isinstance(argument, TensorRef):
            return TensorRef(same.get(argument.tensor, argument.tensor))
        return tuple(map(changed, argument)) if isinstance(argument, tuple) else argument

    for operation in graph.operations:
        operation = replace(operation, arguments=tuple(map(changed, operation.arguments)))
        if is_added(operation):
            kinds = tuple(graph.tensors[output].type for output in operation.outputs)
            ranks = operation.attributes.get("group_rank_ids")
            key = (operation.primitive, operation.arguments, operation.cell, kinds, ranks)
            first = known.setdefault(key, operation.outputs)
            if first != operation.outputs:
                same.update(zip(operation.outputs, first, strict=True))
                continue
        kept.append(operation)
    producers = {output: index for index, operation in enumerate(kept) for output in operation.outputs}
    tensors = tuple(replace(tensor, producer=producers.get(number)) for number, tensor in enumerate(graph.tensors))
    return replace(graph, operations=tuple(kept), tensors=tensors)
