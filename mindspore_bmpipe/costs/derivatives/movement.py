"""Operations that move elements: nothing is kept but where they went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site
from mindspore_bmpipe.graph.cell_graph import TensorRef
from mindspore_bmpipe.graph.mindir import TensorType


def same(site: Site) -> Iterator[Contribution]:
    """The operand itself: copies of weights between cells."""
    if site.needs(site.arguments[0]):
        yield site.arguments[0], site.gradient()


def reshape(site: Site) -> Iterator[Contribution]:
    """The same elements under another shape."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, site.shaped(site.gradient(), site.shape(operand))


def transpose(site: Site) -> Iterator[Contribution]:
    """Axes in another order."""
    operand = site.arguments[0]
    if site.needs(operand):
        rank = len(site.shape(operand))
        axes = [axis % rank for axis in site.value(1, tuple(reversed(range(rank))))]
        back = tuple(axes.index(axis) for axis in range(rank))
        yield operand, site.like(site.primitive, (site.gradient(), back), operand)


def swap(site: Site) -> Iterator[Contribution]:
    """Two axes exchanged."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, site.like(site.primitive, (site.gradient(), *site.arguments[1:3]), operand)


def broadcast(site: Site) -> Iterator[Contribution]:
    """A larger shape by repetition; the sum keeps all axes, unlike that of broadcasting operands."""
    operand = site.arguments[0]
    if not site.needs(operand):
        return
    shape, wide = site.shape(operand), site.shape(site.outputs[0])
    extra = len(wide) - len(shape)
    axes = (*range(extra), *(extra + i for i, size in enumerate(shape) if size == 1 and wide[extra + i] != 1))
    gradient = site.gradient()
    if axes:
        kept = tuple(1 if axis in axes else size for axis, size in enumerate(wide))
        dtype = site.kind(operand).dtype
        gradient = site.emit("SumExt", (gradient, axes, True, dtype), TensorType(kept, dtype))
    yield operand, site.shaped(gradient, shape)


def _sum_of_repeats(site: Site, operand: TensorRef, split: tuple[Any, ...], axes: tuple[int, ...]) -> TensorRef:
    """The gradient with every repetition on an axis of its own, summed over those."""
    apart = site.shaped(site.gradient(), split)
    return site.like("SumExt", (apart, axes, False, site.kind(operand).dtype), operand)


def tile(site: Site) -> Iterator[Contribution]:
    """Whole copies side by side."""
    operand = site.arguments[0]
    if not site.needs(operand):
        return
    shape, wide = site.shape(operand), site.shape(site.outputs[0])
    padded = (1,) * (len(wide) - len(shape)) + shape
    split: tuple[Any, ...] = ()
    for size, result in zip(padded, wide, strict=True):
        split += (result // size if isinstance(result, int) and isinstance(size, int) else result / size, size)
    summed = _sum_of_repeats(site, operand, split, tuple(range(0, len(split), 2)))
    yield operand, site.shaped(summed, shape)


def repeat(site: Site) -> Iterator[Contribution]:
    """Whole copies side by side, along axes in front too: those are summed one after the other."""
    operand, repeats = site.arguments[0], site.value(1)
    if not site.needs(operand):
        return
    shape, gradient = site.shape(operand), site.gradient()
    dtype = site.kind(operand).dtype
    for _ in repeats[len(shape) :]:
        kind = TensorType(site.shape(gradient)[1:], dtype)
        gradient = site.emit("SumExt", (gradient, (0,), False, dtype), kind)
    split: tuple[Any, ...] = ()
    axes: tuple[int, ...] = ()
    for count, size in zip(repeats[len(repeats) - len(shape) :], shape, strict=True):
        if count != 1:
            axes += (len(split),)
            split += (count,)
        split += (size,)
    if axes:
        gradient = site.like("SumExt", (site.shaped(gradient, split), axes, False, dtype), operand)
    yield operand, gradient


def repeat_interleave(site: Site) -> Iterator[Contribution]:
    """Copies of every element next to it."""
    operand, repeats, axis = site.arguments[0], site.value(1), site.value(2)
    if site.needs(operand):
        shape = site.shape(operand)
        axis = axis % len(shape)
        split = (*shape[: axis + 1], repeats, *shape[axis + 1 :])
        yield operand, _sum_of_repeats(site, operand, split, (axis + 1,))


def concatenate(site: Site) -> Iterator[Contribution]:
    """Tensors side by side: one split gives all their gradients."""
    operands, axis = site.operands, site.value(1, 0)
    sizes = tuple(site.shape(operand)[axis] for operand in operands)
    parts = site.emit_many("SplitWithSize", (site.gradient(), sizes, axis), [site.kind(item) for item in operands])
    for operand, part in zip(operands, parts, strict=True):
        if site.needs(operand):
            yield operand, part


def stack(site: Site) -> Iterator[Contribution]:
    """Tensors along an axis of their own."""
    operands = site.operands
    inverse = "UnstackExtView" if site.primitive == "StackExt" else "Unstack"
    kinds = [site.kind(item) for item in operands]
    parts = site.emit_many(inverse, (site.gradient(), *site.arguments[1:2]), kinds, keep_attributes=True)
    for operand, part in zip(operands, parts, strict=True):
        if site.needs(operand):
            yield operand, part


def split(site: Site) -> Iterator[Contribution]:
    """Equal or given parts; parts that nothing uses have a gradient of zeros."""
    operand = site.arguments[0]
    if site.needs(operand):
        axis = site.value(2 if site.primitive in _AXIS_SECOND else 1, 0)
        gradients = tuple(site.gradient(number) for number in range(len(site.outputs)))
        yield operand, site.like("Concat", (gradients, axis), operand)


def unstack(site: Site) -> Iterator[Contribution]:
    """Parts without the axis they lay along."""
    operand = site.arguments[0]
    if site.needs(operand):
        gradients = tuple(site.gradient(number) for number in range(len(site.outputs)))
        yield operand, site.emit("Stack", (gradients,), site.kind(operand), keep_attributes=True)


def strided_slice(site: Site) -> Iterator[Contribution]:
    """A part with steps: only its shape is needed."""
    operand = site.arguments[0]
    if site.needs(operand):
        arguments = (site.gradient(), site.shape(operand), *site.arguments[1:4])
        yield operand, site.emit("StridedSliceGrad", arguments, site.kind(operand), keep_attributes=True)


def plain_slice(site: Site) -> Iterator[Contribution]:
    """A part: MindSpore's kernel reads the operand, for its shape."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, site.like("SliceGrad", (site.gradient(), operand, *site.arguments[1:3]), operand)


def narrow(site: Site) -> Iterator[Contribution]:
    """A part along one axis, put back between zeros."""
    operand, axis, start, length = site.arguments[0], site.value(1), site.value(2), site.value(3)
    if not site.needs(operand):
        return
    kind = site.kind(operand)
    after = kind.shape[axis] - start - length
    pieces: list[TensorRef] = [site.gradient()]
    for size, position in ((start, 0), (after, len(pieces) + (start != 0))):
        if size != 0:
            shape = list(kind.shape)
            shape[axis] = size
            pieces.insert(position, site.constant(TensorType(tuple(shape), kind.dtype)))
    yield operand, pieces[0] if len(pieces) == 1 else site.like("Concat", (tuple(pieces), axis), operand)


def view_of_part(site: Site) -> Iterator[Contribution]:
    """A part along one axis: the gradient is written into the same part of zeros."""
    operand = site.arguments[0]
    if site.needs(operand):
        gradient = site.gradient()
        part = site.like("SliceExt", (None, *site.arguments[1:]), gradient)
        kinds = (site.kind(gradient), site.kind(operand))
        yield operand, site.emit_many("InplaceCopy", (part, gradient, False), kinds)[1]


def pad(site: Site) -> Iterator[Contribution]:
    """A frame, cut off again."""
    operand = site.arguments[0]
    if site.needs(operand):
        if site.primitive == "Pad":
            begin = tuple(before for before, _ in site.attributes.get("paddings", ()))
            yield operand, site.like("Slice", (site.gradient(), begin, site.shape(operand)), operand)
        else:
            arguments = (site.gradient(), None, *site.arguments[2:])
            yield operand, site.emit("PadV3", arguments, site.kind(operand), keep_attributes=True)


def mirrored(site: Site) -> Iterator[Contribution]:
    """Operations that undo themselves, or that select a triangle."""
    operand = site.arguments[0]
    if site.needs(operand):
        arguments = (site.gradient(), *site.arguments[1:])
        yield operand, site.emit(site.primitive, arguments, site.kind(operand), keep_attributes=True)


def roll(site: Site) -> Iterator[Contribution]:
    """Elements moved along axes, moved back."""
    operand = site.arguments[0]
    if site.needs(operand):
        shifts = site.value(1, ())
        back = tuple(-shift for shift in shifts) if isinstance(shifts, tuple) else None
        arguments = (site.gradient(), back, *site.arguments[2:])
        yield operand, site.emit("Roll", arguments, site.kind(operand), keep_attributes=True)


_AXIS_SECOND = frozenset({"ChunkView", "SplitTensorView", "SplitTensor", "SplitWithSize", "SplitWithSizeView", "Chunk"})

RULES: dict[str, Rule] = {
    "BroadcastTo": broadcast,
    "BroadcastToView": broadcast,
    "Chunk": split,
    "ChunkView": split,
    "Concat": concatenate,
    "Contiguous": same,
    "ExpandDims": reshape,
    "ExpandDimsView": reshape,
    "Flatten": reshape,
    "FlattenExt": reshape,
    "Narrow": narrow,
    "NarrowView": narrow,
    "Pad": pad,
    "PadV3": pad,
    "Repeat": repeat,
    "RepeatInterleaveInt": repeat_interleave,
    "Reshape": reshape,
    "ReverseV2": mirrored,
    "Roll": roll,
    "Slice": plain_slice,
    "SliceExt": view_of_part,
    "Split": split,
    "SplitTensor": split,
    "SplitTensorView": split,
    "SplitWithSize": split,
    "SplitWithSizeView": split,
    "Squeeze": reshape,
    "Stack": stack,
    "StackExt": stack,
    "StridedSlice": strided_slice,
    "TensorMove": same,
    "Tile": tile,
    "Transpose": transpose,
    "TransposeExtView": swap,
    "TransposeView": transpose,
    "Tril": mirrored,
    "Triu": mirrored,
    "Unstack": unstack,
}
