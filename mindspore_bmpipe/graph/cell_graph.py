"""The graph that everything downstream reads: operations on tensors, each belonging to a cell and a phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mindspore_bmpipe.graph.mindir import Constant, TensorType

HELD_AS = "bmpipe_primitive"
"""Attribute that tracing gives to primitives held by cells: the place of the cell, list positions left open, and the
name it is held under (``blocks.*.attention.softmax``)."""


_ASSIGNMENTS = frozenset({"Assign", "AssignAdd", "AssignSub"})
IN_PLACE = "Inplace"
"""What names of primitives begin with that write into their first argument."""


class Phase(str, Enum):
    """Which half of the training step an operation belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class TensorRef:
    """An argument of an operation that is a tensor of the graph."""

    tensor: int
    """Index into :attr:`CellGraph.tensors`."""


Argument = Any
"""An argument of an operation: :class:`TensorRef`, :class:`Constant`, ``None``, or a tuple of arguments."""


@dataclass(frozen=True)
class Tensor:
    """One tensor value."""

    type: TensorType
    """Shape and element type."""
    producer: int | None
    """Index of the operation that makes it; ``None`` for network inputs, parameters and constants."""
    parameter: str | None = None
    """Name of the weight, if it is one."""
    is_constant: bool = False
    """Whether it is written into the graph."""


@dataclass(frozen=True)
class Operation:
    """One primitive applied once."""

    primitive: str
    """Primitive type, for example ``MatMul``."""
    arguments: tuple[Argument, ...]
    """Its arguments in order."""
    outputs: tuple[int, ...]
    """Indices of the tensors it makes."""
    attributes: Mapping[str, Any]
    """Attributes such as ``transpose_b``; shared with all uses of the same primitive."""
    cell: str
    """Path of the innermost cell it runs in; empty for the network's own ``construct``."""
    phase: Phase
    """Forward or backward."""
    scope: str
    """Scope as MindSpore wrote it, for messages."""
    unique_id: str | None
    """Id that links a backward operation to its forward operation inside one cell."""


@dataclass(frozen=True)
class CellInfo:
    """One cell of the network's tree."""

    path: str
    """Attribute path from the network (``blocks.3.attention``); empty for the network itself."""
    class_name: str
    """Module and qualified name of its class."""
    parameters: tuple[str, ...]
    """Names of all weights in it and below."""
    is_container: bool = False
    """Whether it only lists other cells and is never called (``CellList``, ``CellDict``)."""


@dataclass(frozen=True)
class ParameterInfo:
    """One weight."""

    name: str
    """Name as MindSpore knows it."""
    type: TensorType
    """Shape and element type."""
    trainable: bool
    """Whether the step computes its gradient."""
    shares: int = 1
    """Equal parts that ranks of a stage hold of it, one each; ``type`` is the whole weight."""
    data_shares: int = 1
    """Of these, parts that data- and context-parallel ranks tell apart, as they do experts; divides :attr:`shares`."""
    row_shares: int = 1
    """Of these, parts that its first axis is cut into; divides :attr:`shares`."""


@dataclass(frozen=True)
class Sharding:
    """Ranks that a graph was compiled for; every shape in it is then that of one of them."""

    data_parallel: int
    """Ranks that share the samples of a micro-batch, at least 1."""
    tensor_parallel: int
    """Ranks that share the operations on each sample, at least 1."""
    context_parallel: int = 1
    """Ranks that share the tokens of each sample, at least 1."""
    expert_parallel: int = 1
    """Data- and context-parallel ranks among which experts are shared out; divides their number."""
    all_to_all: bool = False
    """Whether layouts change by `AlltoAll` where that does (MindSpore's `enable_alltoall`)."""

    @property
    def ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data_parallel * self.context_parallel * self.tensor_parallel

    @property
    def is_shared(self) -> bool:
        """Whether ranks share more than samples."""
        return max(self.tensor_parallel, self.context_parallel, self.expert_parallel) > 1


@dataclass(frozen=True)
class CellGraph:
    """Forward and backward operations of one micro-batch, with the cells they belong to."""

    name: str
    """Class or file name, for people."""
    operations: tuple[Operation, ...]
    """In an order in which every tensor is made before it is used."""
    tensors: tuple[Tensor, ...]
    """All tensors."""
    inputs: tuple[int, ...]
    """Tensors of the network's inputs."""
    cells: tuple[CellInfo, ...]
    """The cell tree in depth-first order; the network itself first."""
    parameters: Mapping[str, ParameterInfo]
    """Weights by name."""
    symbols: Mapping[str, int]
    """Symbols that shapes are written in, with the value of each in the traced inputs."""
    notes: tuple[str, ...]
    """What a reader should know: axes that the network has baked in, cells without reuse."""
    has_backward: bool
    """Whether backward operations are real; if not, they must be derived by rule."""
    sharding: Sharding | None = None
    """Ranks that share the network; ``None`` where all shapes are those of the whole network."""


def writes(primitive: str) -> bool:
    """Whether a primitive writes into a weight or a tensor, so that it runs whether its result is read or not."""
    return primitive in _ASSIGNMENTS or primitive.startswith(IN_PLACE)


def tensor_arguments(argument: Argument) -> tuple[int, ...]:
    """Indices of all tensors inside an argument."""
    if isinstance(argument, TensorRef):
        return (argument.tensor,)
    if isinstance(argument, tuple):
        return tuple(index for item in argument for index in tensor_arguments(item))
    return ()


def read_tensors(operation: Operation) -> tuple[int, ...]:
    """Indices of the tensors an operation reads, in order, repeated if read twice."""
    return tensor_arguments(operation.arguments)


def primitive_path(operation: Operation) -> str:
    """Path of the primitive that a cell holds for this operation; empty for functional forms, and if nothing tells."""
    place = operation.attributes.get(HELD_AS)
    if not isinstance(place, str):
        return ""
    parts, inside = place.split("."), operation.cell.split(".")
    for number, part in enumerate(parts):
        if part == "*":
            if number >= len(inside) or not inside[number].isdigit():
                return ""
            parts[number] = inside[number]
    return ".".join(parts)


EXCHANGES = frozenset({"AllGather", "AlltoAll"})
"""Collectives that hand on shares of a tensor as they are; those that add up are parts of an operation."""
SHARES = frozenset({"Split", "Concat", "StridedSlice", "Slice"})
"""Operations that the compiler inserts beside them to cut and join shares."""


def is_inserted_exchange(operation: Operation) -> bool:
    """Whether the compiler inserted an operation to exchange, cut or join shares of a tensor between ranks.

    A functional form of a network's own looks the same, and is taken for one.
    """
    return operation.primitive in EXCHANGES | SHARES and not primitive_path(operation)


def constant_value(argument: Argument) -> Any:
    """Python value of a constant argument; ``None`` for anything else."""
    if isinstance(argument, Constant):
        return argument.value
    if isinstance(argument, tuple):
        return tuple(constant_value(item) for item in argument)
    return None
