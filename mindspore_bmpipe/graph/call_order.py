"""Operations of an exported graph in an order in which cells could have been called, one after the other.

The file lists operations in the order in which its result needs them, so that a mask may come in the middle of the
first layer that reads it. Execution order of units is read off the order of operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from mindspore_bmpipe.graph.cell_graph import Operation, Tensor, read_tensors
from mindspore_bmpipe.graph.inline import FlatModule


def in_call_order(flat: FlatModule, is_called: Callable[[str], bool]) -> FlatModule:
    """Sort operations so that those of one cell are neighbours wherever data flow allows it.

    Args:
        flat: operations with their cells, each after all it reads.
        is_called: whether a path is a cell that is called, unlike a list of cells.
    """
    order = _sorted(range(len(flat.operations)), "", flat.operations, flat.tensors, is_called)
    operations = tuple(flat.operations[index] for index in order)
    producers = {output: index for index, operation in enumerate(operations) for output in operation.outputs}
    tensors = tuple(replace(tensor, producer=producers.get(index)) for index, tensor in enumerate(flat.tensors))
    return replace(flat, operations=operations, tensors=tensors)


def _sorted(
    indices: Sequence[int],
    cell: str,
    operations: Sequence[Operation],
    tensors: Sequence[Tensor],
    is_called: Callable[[str], bool],
) -> list[int]:
    """Order of the operations of one cell: calls of inner cells and its own operations, by data flow, then by place."""
    group_of: dict[int, int] = {}
    leaders: dict[str, int] = {}
    members: dict[int, list[int]] = defaultdict(list)
    inner: dict[int, str] = {}
    for index in indices:
        path = _call_below(cell, operations[index].cell, is_called)
        leader = index if path is None else leaders.setdefault(path, index)
        if path is not None:
            inner[leader] = path
        group_of[index] = leader
        members[leader].append(index)
    following: dict[int, set[int]] = defaultdict(set)
    waiting: dict[int, int] = dict.fromkeys(members, 0)
    for index in indices:
        for tensor in read_tensors(operations[index]):
            producer = tensors[tensor].producer
            source = group_of.get(producer) if producer is not None else None
            target = group_of[index]
            if source is not None and source != target and target not in following[source]:
                following[source].add(target)
                waiting[target] += 1
    ready = [leader for leader, count in waiting.items() if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        leader = heappop(ready)
        if leader in inner:
            order.extend(_sorted(members[leader], inner[leader], operations, tensors, is_called))
        else:
            order.append(leader)
        for target in following[leader]:
            waiting[target] -= 1
            if not waiting[target]:
                heappush(ready, target)
    # Cells that need each other's results cannot be neighbours: leave them as the file has them.
    return order if len(order) == len(indices) else list(indices)


def _call_below(cell: str, path: str, is_called: Callable[[str], bool]) -> str | None:
    """The outermost called cell below ``cell`` on the way to ``path``."""
    depth = len(cell.split(".")) if cell else 0
    parts = path.split(".") if path else []
    for length in range(depth + 1, len(parts) + 1):
        inner = ".".join(parts[:length])
        if is_called(inner):
            return inner
    return None
