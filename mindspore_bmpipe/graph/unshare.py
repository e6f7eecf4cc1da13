"""Operations that depend on nothing but constants, given back to every cell that computes them.

Compiling a whole network at once finds that all layers build the same mask and the same rotation, and keeps the first
layer's. Stages do not share memory, so each layer makes its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mindspore_bmpipe.graph.cell_graph import Operation, Tensor, TensorRef, read_tensors
from mindspore_bmpipe.graph.inline import FlatModule
from mindspore_bmpipe.graph.scopes import CONTAINERS, UNKNOWN_CLASS, within

_MOST_MOVES = 8
"""Steps from one layer to another and inside it; more would mean classes that hold each other in turn."""


def unshared(flat: FlatModule, classes: Mapping[str, str]) -> FlatModule:
    """Copy input-free operations into the cells of equal class that read their results.

    A result made in ``blocks.0.mask`` and read in ``blocks.5`` is made again in ``blocks.5.mask`` if ``blocks.0`` and
    ``blocks.5`` are cells of one class.
    """
    free = _input_free(flat)
    if not free:
        return flat
    copies = _cells_of_copies(flat, free, classes)
    tensors = list(flat.tensors)
    operations: list[Operation] = []
    renamed: dict[tuple[int, str], int] = {}
    for index, operation in enumerate(flat.operations):
        for cell in copies.get(index, (operation.cell,)):
            outputs = operation.outputs
            if cell != operation.cell:
                outputs = tuple(range(len(tensors), len(tensors) + len(outputs)))
                tensors.extend(flat.tensors[output] for output in operation.outputs)
                renamed.update({(old, cell): new for old, new in zip(operation.outputs, outputs, strict=True)})
            operations.append(replace(operation, cell=cell, outputs=outputs))
    operations = [
        replace(operation, arguments=_renamed(operation.arguments, operation.cell, flat, free, classes, renamed))
        for operation in operations
    ]
    producers = {output: index for index, operation in enumerate(operations) for output in operation.outputs}
    placed = tuple(
        Tensor(tensor.type, producers.get(index), tensor.parameter, tensor.is_constant)
        for index, tensor in enumerate(tensors)
    )
    return replace(flat, operations=tuple(operations), tensors=placed)


def _input_free(flat: FlatModule) -> set[int]:
    """Operations that depend on no input and no weight, and are not random."""
    bound = set(flat.inputs) | {index for index, tensor in enumerate(flat.tensors) if tensor.parameter is not None}
    free: set[int] = set()
    for index, operation in enumerate(flat.operations):
        random = "Dropout" in operation.primitive or "Random" in operation.primitive
        if random or not bound.isdisjoint(read_tensors(operation)):
            bound.update(operation.outputs)
        else:
            free.add(index)
    return free


def _cells_of_copies(flat: FlatModule, free: set[int], classes: Mapping[str, str]) -> dict[int, tuple[str, ...]]:
    """Cells in which each input-free operation is needed, its own first if it still is."""
    wanted: dict[int, dict[str, None]] = defaultdict(dict)
    for index in range(len(flat.operations) - 1, -1, -1):
        operation = flat.operations[index]
        readers = wanted[index] if index in free and wanted[index] else {operation.cell: None}
        for tensor in read_tensors(operation):
            producer = flat.tensors[tensor].producer
            if producer in free and producer is not None:
                for reader in readers:
                    wanted[producer][_copy_cell(flat.operations[producer].cell, reader, classes)] = None
    return {index: tuple(wanted[index]) for index in free if wanted[index]}


def _copy_cell(made: str, read: str, classes: Mapping[str, str]) -> str:
    """The cell that makes its own copy of what ``made`` makes, for use in ``read``; ``made`` if they may share."""
    for _ in range(_MOST_MOVES):
        moved = _moved(made, read, classes)
        if moved == made:
            break
        # From the first layer's rotation of queries to the fifth's, and from there to that of keys.
        made = moved
    return made


def _moved(made: str, read: str, classes: Mapping[str, str]) -> str:
    """``made`` in the place of the outermost pair of cells of one class that hold one of the two each."""
    ours, theirs = made.split("."), read.split(".")
    for depth in range(1, len(ours) + 1):
        own = ".".join(ours[:depth])
        kind = classes.get(own, UNKNOWN_CLASS)
        if kind == UNKNOWN_CLASS or kind in CONTAINERS or within(read, own):
            continue
        for length in range(1, len(theirs) + 1):
            other = ".".join(theirs[:length])
            if classes.get(other) == kind and not within(made, other):
                return ".".join([other, *ours[depth:]])
    return made


def _renamed(
    argument: Any,
    cell: str,
    flat: FlatModule,
    free: set[int],
    classes: Mapping[str, str],
    renamed: Mapping[tuple[int, str], int],
) -> Any:
    if isinstance(argument, tuple):
        return tuple(_renamed(item, cell, flat, free, classes, renamed) for item in argument)
    if not isinstance(argument, TensorRef) or argument.tensor >= len(flat.tensors):
        return argument
    producer = flat.tensors[argument.tensor].producer
    if producer is None or producer not in free:
        return argument
    wanted = _copy_cell(flat.operations[producer].cell, cell, classes)
    return TensorRef(renamed.get((argument.tensor, wanted), argument.tensor))
