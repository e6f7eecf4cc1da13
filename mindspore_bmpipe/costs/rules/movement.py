"""Operations that move or make data without arithmetic, and those that only rename memory."""

from __future__ import annotations

from mindspore_bmpipe.costs.rules.base import (
    NO_WORK,
    Engine,
    OperationView,
    Rule,
    Work,
    elements,
    size_bytes,
    total_bytes,
)

VIEWS = frozenset(
    {
        "Reshape", "ExpandDims", "Squeeze", "Flatten", "FlattenExt", "ExpandDimsView", "StopGradient",
        # Copies of weights that MindSpore puts between cells compiled alone; a whole-network compile has none.
        "TensorMove",
    }
)  # fmt: skip
"""Primitives whose result is their first argument's memory."""


def renaming(_: OperationView) -> Work:
    """No work: the result is the argument under another shape."""
    return NO_WORK


def copy(view: OperationView) -> Work:
    """Read all inputs, write all outputs."""
    return Work(Engine.VECTOR, 0, total_bytes(view.inputs), total_bytes(view.outputs))


def selection(view: OperationView) -> Work:
    """Read only what is written, and the small operands that say where."""
    written = total_bytes(view.outputs)
    return Work(Engine.VECTOR, 0, written + total_bytes(view.inputs[1:]), written)


def filling(view: OperationView) -> Work:
    """Write without reading."""
    return Work(Engine.VECTOR, 0, 0, total_bytes(view.outputs))


def scatter_sum(view: OperationView) -> Work:
    """Clear the result, then add every row of the first input to it."""
    source = view.inputs[0]
    return Work(
        Engine.VECTOR,
        elements(source),
        total_bytes(view.inputs) + size_bytes(source),
        total_bytes(view.outputs) + size_bytes(source),
    )


def scatter_same_shape(view: OperationView) -> Work:
    """Clear the result, then write the gradient's elements into it."""
    gradient = view.inputs[-1]
    return Work(Engine.VECTOR, 0, total_bytes(view.inputs[1:]), total_bytes(view.outputs) + size_bytes(gradient))


def part_written(view: OperationView) -> Work:
    """Clear the whole, then write the last input into a part of it."""
    return Work(Engine.VECTOR, 0, size_bytes(view.inputs[-1]), total_bytes(view.outputs))


def weighted_rows(view: OperationView) -> Work:
    """A product and a sum for every element of the rows that experts made."""
    rows = view.inputs[0]
    return Work(Engine.VECTOR, 2 * elements(rows), total_bytes(view.inputs), total_bytes(view.outputs))


COPIES = (
    "TransposeView", "TransposeExtView", "BroadcastToView", "ChunkView", "SplitTensorView", "SplitWithSizeView",
    "StackExt", "UnstackExtView", "RepeatInterleaveInt", "TensorScatterAdd", "InplaceScatterSrc", "Generator",
    "Transpose", "Concat", "Chunk", "Stack", "Cast", "Tile", "BroadcastTo", "Pad", "PadV3", "Roll", "ReverseV2",
    "StridedSliceGrad", "SliceGrad", "Split", "SplitWithSize", "SplitTensor", "Unstack", "Repeat", "Contiguous",
    "ScalarToTensor", "TupleToTensor", "Tril", "Triu", "TopK", "TopkExt", "Sort", "SortExt", "ResizeBilinearV2",
    "ResizeBilinearGrad", "Im2Col", "ScatterNd", "TensorScatterUpdate", "ScatterNdUpdate", "MoeTokenPermute",
)  # fmt: skip
SELECTIONS = (
    "Slice", "SliceExt", "StridedSlice", "Gather", "GatherD", "GatherNd", "GatherNdExt", "Narrow", "NarrowView",
    "IndexSelect", "Embedding", "Index",
)  # fmt: skip
FILLINGS = (
    "ZerosLike", "OnesLike", "Zeros", "Ones", "Fill", "FillV2", "FillScalar", "FullLike", "Range", "Arange", "OneHot",
    "OneHotExt", "Eye", "LinSpace", "LinSpaceExt", "StandardNormal", "UniformReal", "UniformInt", "ZerosLikeExt",
    "OnesLikeExt", "TensorShape",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **dict.fromkeys(VIEWS, renaming),
    **dict.fromkeys(COPIES, copy),
    **dict.fromkeys(SELECTIONS, selection),
    **dict.fromkeys(FILLINGS, filling),
    "UnsortedSegmentSum": scatter_sum,
    "EmbeddingDenseBackward": scatter_sum,
    "InplaceIndexAddExt": scatter_sum,
    "GatherDGradV2": scatter_same_shape,
    "InplaceIndexPut": scatter_same_shape,
    "InplaceCopy": part_written,
    "MoeTokenPermuteGrad": weighted_rows,
    "InnerMoeTokenUnpermute": weighted_rows,
    "MoeTokenUnpermuteGrad": weighted_rows,
}
