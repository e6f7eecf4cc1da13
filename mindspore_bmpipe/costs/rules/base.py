"""What a cost rule is: from one operation's types and attributes to its work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import sympy

from mindspore_bmpipe.graph.cell_graph import constant_value, tensor_arguments
from mindspore_bmpipe.graph.mindir import BYTES_PER_ELEMENT, TensorType

FLOPS_PER_MULTIPLY_ADD = 2
"""A multiply and an add count as two, as all published model formulas do."""


class Engine(str, Enum):
    """Which part of a device does the arithmetic."""

    MATMUL = "matmul"
    VECTOR = "vector"
    NONE = "none"


@dataclass(frozen=True)
class OperationView:
    """What a rule sees of an operation."""

    primitive: str
    """Primitive type."""
    arguments: tuple[Any, ...]
    """Arguments: :class:`TensorType` for tensors, Python values for constants, tuples of these."""
    inputs: tuple[TensorType, ...]
    """Types of all tensors read, in order."""
    outputs: tuple[TensorType, ...]
    """Types of all tensors made, in order."""
    attributes: Mapping[str, Any]
    """Attributes of the primitive."""


@dataclass(frozen=True)
class Traffic:
    """What one rank exchanges with others in one operation."""

    ranks: tuple[int, ...]
    """Ranks that take part, counted within one stage."""
    rounds: int
    """Messages that one rank sends one after the other, each after it has received the one before."""
    sent_bytes: Any
    """Bytes that one rank sends in all rounds, as a number or sympy expression."""


@dataclass(frozen=True)
class Work:
    """Work of one operation, as numbers or sympy expressions."""

    engine: Engine
    """Where its arithmetic runs."""
    flops: Any
    """Floating-point operations, a multiply-add counting as two."""
    read_bytes: Any
    """Bytes read from device memory."""
    written_bytes: Any
    """Bytes written to device memory."""
    traffic: Traffic | None = None
    """What is exchanged with other ranks; ``None`` if nothing."""


Rule = Callable[[OperationView], Work]
"""A cost rule."""

NO_WORK = Work(Engine.NONE, 0, 0, 0)
"""Work of operations that only rename memory."""


def elements(kind: TensorType) -> Any:
    """Number of elements of a tensor."""
    return sympy.prod(kind.shape) if any(not isinstance(size, int) for size in kind.shape) else _product(kind.shape)


def size_bytes(kind: TensorType) -> Any:
    """Bytes of a tensor."""
    return elements(kind) * BYTES_PER_ELEMENT.get(kind.dtype, 4)


def total_bytes(kinds: Iterable[TensorType]) -> Any:
    """Bytes of several tensors."""
    return sum((size_bytes(kind) for kind in kinds), start=0)


def moved(view: OperationView, engine: Engine, flops: Any) -> Work:
    """Work of an operation that reads every input and writes every output once."""
    return Work(engine, flops, total_bytes(view.inputs), total_bytes(view.outputs))


def flag(view: OperationView, name: str, position: int | None = None) -> bool:
    """A boolean that MindSpore stores as an attribute or passes as an argument, by version."""
    if name in view.attributes:
        return bool(view.attributes[name])
    if position is not None and position < len(view.arguments):
        return bool(view.arguments[position])
    return False


def argument_values(arguments: Any, kinds: Mapping[int, TensorType]) -> Any:
    """Replace tensor references by their types and constants by their values."""
    if isinstance(arguments, tuple):
        return tuple(argument_values(item, kinds) for item in arguments)
    indices = tensor_arguments(arguments)
    return kinds[indices[0]] if indices else constant_value(arguments)


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
