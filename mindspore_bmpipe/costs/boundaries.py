"""What crosses a cut between two units, and how long the longest transfer takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore_bmpipe.costs.graph_index import GraphIndex
from mindspore_bmpipe.costs.hardware import Link
from mindspore_bmpipe.costs.rules.base import size_bytes
from mindspore_bmpipe.graph.cell_graph import Phase, read_tensors
from mindspore_bmpipe.graph.units import Unit


def boundary_tensors(index: GraphIndex, units: Sequence[Unit]) -> tuple[tuple[Any, ...], ...]:
    """For every cut after a unit, the bytes of each tensor that later units read: numbers or expressions."""
    last_reader: dict[int, int] = {}
    for position, operation in enumerate(index.graph.operations):
        if operation.phase is Phase.FORWARD:
            for tensor in read_tensors(operation):
                storage = index.storage[tensor]
                last_reader[storage] = max(last_reader.get(storage, 0), index.unit_of[position])
    crossing: list[list[Any]] = [[] for _ in range(len(units) - 1)]
    for storage, reader in last_reader.items():
        producer = index.made_by(storage)
        if producer is None or index.graph.operations[producer].phase is not Phase.FORWARD:
            continue
        for cut in range(index.unit_of[producer], reader):
            crossing[cut].append(size_bytes(index.graph.tensors[storage].type))
    return tuple(tuple(sizes) for sizes in crossing)


def longest_transfer_ms(trainable: Sequence[bool], cut_bytes: Sequence[int], links: Sequence[Link]) -> float:
    """Time of the largest boundary with a trained unit on both sides, over the slowest link to a next stage."""
    allowed = [cut for cut in range(len(cut_bytes)) if any(trainable[: cut + 1]) and any(trainable[cut + 1 :])]
    if not allowed:
        return 0.0
    return max(link.transfer_ms(max(cut_bytes[cut] for cut in allowed)) for link in links[:-1] or links)
