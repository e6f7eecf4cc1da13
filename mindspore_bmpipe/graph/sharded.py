"""What sets the graph of one rank apart: shares of weights, and gradients that ranks add up once a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import Operation, ParameterInfo, Phase, read_tensors
from mindspore_bmpipe.graph.inline import FlatModule
from mindspore_bmpipe.graph.mindir import BYTES_PER_ELEMENT, TensorType

COLLECTIVES = frozenset({"AllReduce", "AllGather", "ReduceScatter", "AlltoAll"})
"""Primitives in which all ranks of a group exchange data."""

_MIRROR = "Mirror"
"""Part of the scope of what MindSpore's mirror operators become: sums of a weight's gradient over ranks."""


def sharded_parameters(
    parameters: Mapping[str, ParameterInfo], compiled: Mapping[str, TensorType]
) -> dict[str, ParameterInfo]:
    """Weights with the number of shares that a rank's graph holds one of.

    Args:
        parameters: whole weights of the network by name.
        compiled: weights of the rank's graph; the network's own that nothing reads may be missing.

    Raises:
        InputError: a weight is not cut evenly, so the file and its description do not belong together.
    """
    found = {}
    for name, info in parameters.items():
        shares = 1
        if name in compiled:
            whole, part = math.prod(info.type.shape), math.prod(compiled[name].shape)
            if whole % part:
                raise InputError(
                    f"weight {name} of {list(info.type.shape)} is compiled as {list(compiled[name].shape)}, which is "
                    "no share of it; write the file again with 'bmpipe trace --sharded'"
                )
            shares = whole // part
        found[name] = replace(info, shares=shares)
    return found


def without_synchronisation(flat: FlatModule) -> tuple[FlatModule, tuple[Operation, ...]]:
    """Take out the sums of weight gradients over ranks, and what is done with their results.

    A pipeline adds up the gradients of all micro-batches first and exchanges the sums once a step. The graph of one
    micro-batch holds them because it is a whole step.

    Returns:
        The rest, and the collectives taken out.
    """
    removed: list[Operation] = []
    synchronised: set[int] = set()
    kept: list[Operation] = []
    for operation in flat.operations:
        is_mirror = (
            operation.phase is Phase.BACKWARD and operation.primitive in COLLECTIVES and _MIRROR in operation.scope
        )
        if is_mirror:
            removed.append(operation)
        if is_mirror or not synchronised.isdisjoint(read_tensors(operation)):
            synchronised.update(operation.outputs)
        else:
            kept.append(operation)
    producers = {output: index for index, operation in enumerate(kept) for output in operation.outputs}
    tensors = tuple(replace(tensor, producer=producers.get(index)) for index, tensor in enumerate(flat.tensors))
    return replace(flat, operations=tuple(kept), tensors=tensors), tuple(removed)


def synchronisation_note(flat: FlatModule, synchronised: Sequence[Operation]) -> tuple[str, ...]:
    """What a reader should know of the collectives that :func:`without_synchronisation` took out.

    The gradient of a weight that several cells read is summed for each of them.
    """
    if not synchronised:
        return ()
    volume = 0
    for operation in synchronised:
        for output in operation.outputs:
            kind = flat.tensors[output].type
            volume += math.prod(kind.shape) * BYTES_PER_ELEMENT.get(kind.dtype, 4)
    return (synchronisation_text(len(synchronised), volume),)


def synchronisation_text(count: int, volume: int) -> str:
    """The note for so many sums of so many bytes together."""
    return (
        f"{count} sums of weight gradients over ranks ({volume} bytes) are taken out of the graph of one micro-batch: "
        "they are counted as a pipeline runs them, by default once a step, after the last micro-batch"
    )
