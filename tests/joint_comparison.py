"""What tests compare of two graphs: kept tensors and backward operations, by what they are, not by their numbers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from mindspore_bmpipe.costs.rules import work_of
from mindspore_bmpipe.costs.rules.base import OperationView, argument_values
from mindspore_bmpipe.graph.cell_graph import CellGraph, Phase, read_tensors
from mindspore_bmpipe.graph.mindir import BYTES_PER_ELEMENT

VIEWS = frozenset({"ExpandDims", "ExpandDimsView", "Flatten", "Reshape", "Squeeze", "TensorMove"})
MATRIX_PRIMITIVES = frozenset(
    {
        "BatchMatMul", "BatchMatMulExt", "Conv2DBackpropFilter", "Conv2DBackpropInput", "ConvolutionGrad",
        "EinsumGrad", "FlashAttentionScoreGrad", "GroupedMatmul", "GroupedMatmulV2", "GroupedMatmulV4", "MatMul",
        "MatMulExt", "Mm",
    }
)  # fmt: skip

CellKey = Callable[[str], str]


def forward_only(graph: CellGraph) -> CellGraph:
    """The graph without its backward operations."""
    kept = tuple(operation for operation in graph.operations if operation.phase is Phase.FORWARD)
    return replace(graph, operations=kept, has_backward=False)


def kept_tensors(graph: CellGraph, key: CellKey) -> dict[str, set[int]]:
    """By cell: tensors that its backward operations read and that forward made, or that are weights or inputs."""
    storage = list(range(len(graph.tensors)))
    for operation in graph.operations:
        read = read_tensors(operation)
        if operation.primitive in VIEWS and read:
            storage[operation.outputs[0]] = storage[read[0]]
    made = {out for operation in graph.operations if operation.phase is Phase.FORWARD for out in operation.outputs}
    kept: dict[str, set[int]] = defaultdict(set)
    for operation in graph.operations:
        if operation.phase is Phase.BACKWARD and operation.primitive not in VIEWS:
            for tensor in read_tensors(operation):
                source = storage[tensor]
                if source in made or graph.tensors[source].parameter or source in graph.inputs:
                    kept[key(operation.cell)].add(source)
    return dict(kept)


def kept_labels(graph: CellGraph, key: CellKey) -> dict[str, Counter[Any]]:
    """Kept tensors as multisets of (producer, shape, dtype)."""

    def label(index: int) -> tuple[Any, ...]:
        tensor = graph.tensors[index]
        if tensor.producer is not None:
            source = graph.operations[tensor.producer].primitive
        else:
            source = "weight" if tensor.parameter else "input"
        return source, tensor.type.shape, tensor.type.dtype

    return {cell: Counter(map(label, kept)) for cell, kept in kept_tensors(graph, key).items()}


def kept_bytes(graph: CellGraph, key: CellKey) -> dict[str, int]:
    """Bytes of kept tensors that forward made, at fixed sizes; cells that keep nothing are left out."""
    found = {
        cell: sum(
            math.prod(graph.tensors[index].type.shape) * BYTES_PER_ELEMENT[graph.tensors[index].type.dtype]
            for index in kept
            if graph.tensors[index].producer is not None
        )
        for cell, kept in kept_tensors(graph, key).items()
    }
    return {cell: size for cell, size in found.items() if size}


def matrix_operations(graph: CellGraph, key: CellKey) -> Counter[Any]:
    """Backward operations of the matrix engine by cell, with the shapes of what they read and make."""
    return Counter(
        (
            key(operation.cell),
            operation.primitive,
            tuple(graph.tensors[index].type.shape for index in read_tensors(operation)),
            tuple(graph.tensors[index].type.shape for index in operation.outputs),
        )
        for operation in graph.operations
        if operation.phase is Phase.BACKWARD and operation.primitive in MATRIX_PRIMITIVES
    )


def vector_operations(graph: CellGraph, key: CellKey) -> Counter[Any]:
    """All other backward operations but views, with the shapes of what they make."""
    return Counter(
        (
            key(operation.cell),
            operation.primitive,
            tuple(graph.tensors[index].type.shape for index in operation.outputs),
        )
        for operation in graph.operations
        if operation.phase is Phase.BACKWARD and operation.primitive not in MATRIX_PRIMITIVES | VIEWS
    )


def backward_flops(graph: CellGraph, key: CellKey, left_out: Collection[tuple[str, str]] = ()) -> dict[str, float]:
    """Flops of backward operations by cell; ``left_out`` are primitives of cells that do not count."""
    found: dict[str, float] = defaultdict(float)
    for operation in graph.operations:
        cell = key(operation.cell)
        if operation.phase is not Phase.BACKWARD or (cell, operation.primitive) in left_out:
            continue
        kinds = {tensor: graph.tensors[tensor].type for tensor in read_tensors(operation)}
        view = OperationView(
            primitive=operation.primitive,
            arguments=tuple(argument_values(argument, kinds) for argument in operation.arguments),
            inputs=tuple(kinds[tensor] for tensor in read_tensors(operation)),
            outputs=tuple(graph.tensors[tensor].type for tensor in operation.outputs),
            attributes=operation.attributes,
        )
        found[cell] += float(work_of(view).flops)
    return {cell: flops for cell, flops in found.items() if flops}


def forward_operations(graph: CellGraph, key: CellKey) -> Counter[Any]:
    """Forward operations by cell, with the shapes of what they make; copies of weights between cells are left out."""
    return Counter(
        (
            key(operation.cell),
            operation.primitive,
            tuple(graph.tensors[index].type.shape for index in operation.outputs),
        )
        for operation in graph.operations
        if operation.phase is Phase.FORWARD and operation.primitive != "TensorMove"
    )


def whole(_: str) -> str:
    """Key that does not tell cells apart."""
    return ""


def unit_of(cell: str) -> str:
    """Key of top-level cells, with the elements of lists apart."""
    parts = cell.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1].isdigit() else parts[0]


def leaf_of(cell: str) -> str:
    """Key of the innermost cell."""
    return cell
