"""What sets the graph of one rank apart: shares of weights, and gradients that ranks add up once a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import Operation, ParameterInfo, Phase, Sharding, read_tensors
from mindspore_bmpipe.graph.inline import FlatModule
from mindspore_bmpipe.graph.mindir import BYTES_PER_ELEMENT, TensorType

COLLECTIVES = frozenset({"AllReduce", "AllGather", "ReduceScatter", "AlltoAll"})
"""Primitives in which all ranks of a group exchange data."""

_MIRROR = "Mirror"
"""Part of the scope of what MindSpore's mirror operators become: sums of a weight's gradient over ranks."""


def require_degrees(sharding: Sharding) -> None:
    """Refuse experts that are shared out among another number of ranks than a stage has for them.

    Raises:
        InputError: the number of expert-parallel ranks does not divide theirs.
    """
    ranks = sharding.data_parallel * sharding.context_parallel
    if ranks % sharding.expert_parallel:
        raise InputError(
            f"expert_parallel: {sharding.expert_parallel} does not divide the {ranks} ranks of data_parallel "
            f"{sharding.data_parallel} x context_parallel {sharding.context_parallel}, among which experts are shared "
            "out; change one of them"
        )


def require_experts(name: str, parameters: Mapping[str, ParameterInfo], sharding: Sharding) -> None:
    """Refuse a network whose strategies share out no experts as the degrees say.

    Raises:
        InputError: no weight is cut among so many expert-parallel ranks.
    """
    found = {info.data_shares for info in parameters.values()} - {1}
    if sharding.expert_parallel > 1 and sharding.expert_parallel not in found:
        others = f", but among {', '.join(map(str, sorted(found)))}" if found else ""
        raise InputError(
            f"expert_parallel: {sharding.expert_parallel}, but the strategies of {name} cut no weight among so many "
            f"data-parallel ranks{others}; build the network for that degree, cut the axis of experts in strategies "
            "with Primitive.shard as tools.examples.mixtral_sharded does, or leave expert_parallel out"
        )


def gradient_groups(flat: FlatModule, parameters: Mapping[str, ParameterInfo]) -> dict[str, tuple[int, ...]]:
    """Ranks that add up the gradient of each weight, and so hold the same share of it.

    Weights whose gradient no ranks add up are left out. The results of the graph are the loss and all gradients.
    """
    group: dict[int, tuple[int, ...]] = {}
    for operation in flat.operations:
        own = operation.attributes.get("group_rank_ids") if _is_mirror(operation) else None
        known = own or next((group[number] for number in read_tensors(operation) if number in group), None)
        if known:
            group.update(dict.fromkeys(operation.outputs, known))
    trainable = [name for name, info in parameters.items() if info.trainable]
    gradients = flat.results[-len(trainable) :] if len(flat.results) > len(trainable) else ()
    return {name: group[result] for name, result in zip(trainable, gradients, strict=False) if result in group}


def _is_mirror(operation: Operation) -> bool:
    return operation.phase is Phase.BACKWARD and operation.primitive in COLLECTIVES and _MIRROR in operation.scope


def sharded_parameters(
    parameters: Mapping[str, ParameterInfo],
    compiled: Mapping[str, TensorType],
    groups: Mapping[str, tuple[int, ...]],
    sharding: Sharding,
) -> dict[str, ParameterInfo]:
    """Weights with the number of shares that a rank's graph holds one of.

    Args:
        parameters: whole weights of the network by name.
        compiled: weights of the rank's graph; the network's own that nothing reads may be missing.
        groups: ranks that hold the same share of a weight, from :func:`gradient_groups`.
        sharding: ranks of the stage.

    Raises:
        InputError: a weight is not cut evenly, so the file and its description do not belong together.
    """
    found = {}
    for name, info in parameters.items():
        shares = row_shares = 1
        if name in compiled:
            whole, part = math.prod(info.type.shape), math.prod(compiled[name].shape)
            if whole % part:
                raise InputError(
                    f"weight {name} of {list(info.type.shape)} is compiled as {list(compiled[name].shape)}, which is "
                    "no share of it; write the file again with 'bmpipe trace --sharded'"
                )
            shares = whole // part
            if shares > 1:
                row_shares = info.type.shape[0] // compiled[name].shape[0]
        data_shares = _data_shares(shares, groups.get(name), sharding)
        found[name] = replace(info, shares=shares, data_shares=data_shares, row_shares=row_shares)
    return found


def _data_shares(shares: int, group: tuple[int, ...] | None, sharding: Sharding) -> int:
    """Parts that ranks tell apart which do not share the operations on a sample.

    These are numbered in steps of the tensor-parallel ranks. Where no ranks hold the same share, all tell them apart.
    """
    columns = sharding.tensor_parallel
    if group is not None:
        return sharding.ranks // columns // len({rank // columns for rank in group})
    return sharding.ranks // columns if shares == sharding.ranks else shares // math.gcd(shares, columns)


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
        is_mirror = _is_mirror(operation)
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
    sums = []
    for operation in synchronised:
        for output in operation.outputs:
            kind = flat.tensors[output].type
            ranks = len(operation.attributes.get("group_rank_ids", ()))
            sums.append((ranks, math.prod(kind.shape) * BYTES_PER_ELEMENT.get(kind.dtype, 4)))
    return (synchronisation_text(sums),)


def synchronisation_text(sums: Sequence[tuple[int, int]]) -> str:
    """The note for sums, each among so many ranks and of so many bytes."""
    among = []
    for ranks in sorted({ranks for ranks, _ in sums}, reverse=True):
        volumes = [volume for others, volume in sums if others == ranks]
        among.append(f"{len(volumes)} among {ranks} ranks of {sum(volumes)} bytes")
    return (
        f"{len(sums)} sums of weight gradients over ranks ({sum(volume for _, volume in sums)} bytes) are taken out of "
        f"the graph of one micro-batch ({', '.join(among)}): they are counted as a pipeline runs them, by default once "
        "a step, after the last micro-batch"
    )
