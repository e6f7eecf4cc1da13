"""MindIR bytes -> :class:`Module`: functions of nodes as plain data. The only place that touches the protobuf."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from mindspore_bmpipe.errors import InputError

BYTES_PER_ELEMENT: Mapping[str, int] = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of one element of each tensor type that MindIR can hold."""

_DATA_TYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16", 17: "float64",
}  # fmt: skip
# Values of AttributeProto.AttributeType that need their own decoding.
_INTEGERS = frozenset({2, 3, 4, 5, 6, 7, 12, 13})
_FLOAT, _STRING, _BOOL, _DOUBLE, _TENSORS, _TUPLE, _LIST, _NONE = 1, 8, 9, 11, 19, 20, 21, 25
_TENSOR = 17
_METADATA_KEY = "mindspore_bmpipe"
_REFERENCE = "REF::"


@dataclass(frozen=True)
class TensorType:
    """Type of one tensor."""

    shape: tuple[Any, ...]
    """Dimensions: integers, or sympy expressions in the input symbols once symbols are solved."""
    dtype: str
    """A key of :data:`BYTES_PER_ELEMENT`."""


def is_fixed(kind: object) -> bool:
    """Whether a type, or every type in a tuple, has no size that MindSpore does not know (it writes -1)."""
    if isinstance(kind, TensorType):
        return all(not isinstance(size, int) or size >= 0 for size in kind.shape)
    return all(is_fixed(item) for item in kind) if isinstance(kind, tuple) else True


@dataclass(frozen=True)
class Constant:
    """A value written into the graph: a number, string, tuple, ``None``, or a tensor."""

    value: Any
    """The Python value; ``None`` for tensors larger than a scalar, whose contents no cost depends on."""
    type: TensorType | None = None
    """Type when the constant is a tensor."""


class Opaque:
    """A value without size: monads, environment, absent gradients."""

    def __repr__(self) -> str:
        return "OPAQUE"


OPAQUE = Opaque()
"""The one opaque value."""

ValueType = Any
"""Type of a node's output: :class:`TensorType`, a tuple of types, or :data:`OPAQUE`."""


@dataclass(frozen=True)
class Node:
    """One node of a function."""

    output: str
    """Name of its value, unique in its function."""
    operation: str
    """Primitive type (``MatMul``), or, for calls, the name of a function or of a value holding a closure."""
    is_call: bool
    """Whether ``operation`` names a function or value instead of a primitive."""
    inputs: tuple[str, ...]
    """Names of values, constants, parameters or functions."""
    type: ValueType
    """Type of the output."""
    scope: str
    """Scope path with the operation's own name last, as MindSpore wrote it."""
    attributes: Mapping[str, Any]
    """Attributes of the primitive and of the node."""
    unique_id: str | None
    """MindSpore's id of a forward node, or of the forward node that a backward node belongs to."""


@dataclass(frozen=True)
class Function:
    """One function graph."""

    name: str
    """Full name; repeated cells have ``▸`` (forward) or ``◂`` (backward) in it."""
    inputs: tuple[tuple[str, ValueType], ...]
    """Names and types of its arguments, in order."""
    constants: Mapping[str, Constant]
    """Constants by name."""
    nodes: tuple[Node, ...]
    """Nodes in an order in which every value is made before it is used."""
    output: str
    """Name of the returned value."""


@dataclass(frozen=True)
class Module:
    """A whole MindIR file."""

    entry: Function
    """The outermost function."""
    functions: Mapping[str, Function]
    """All other functions by name."""
    parameters: Mapping[str, TensorType]
    """Weights by name, as the entry function declares them."""
    metadata: str | None = field(default=None)
    """What bmpipe itself stored in the file (JSON), if it wrote it."""


def load_module(path: str | os.PathLike[str]) -> Module:
    """Read a MindIR file.

    Raises:
        InputError: the file is missing, empty, truncated, not MindIR, or has no nodes.
    """
    name = os.fspath(path)
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror}); give the path of a .mindir file") from error
    return decode_module(data, name)


def decode_module(data: bytes, where: str) -> Module:
    """Decode MindIR bytes; ``where`` names them in errors.

    Raises:
        InputError: as :func:`load_module`.
    """
    remedy = "write it again with 'bmpipe trace' or mindspore.export(..., file_format='MINDIR')"
    if not data:
        raise InputError(f"{where}: the file is empty; {remedy}")
    message = _protobuf().ModelProto()
    try:
        message.ParseFromString(data)
    except (DecodeError, ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: truncated or not a MindIR file ({error}); {remedy}") from error
    if not message.graph.node or not message.graph.output:
        raise InputError(f"{where}: no operations in it, so it is truncated or not a MindIR file; {remedy}")
    decoder = _Decoder(message)
    functions = {proto.name: decoder.function(proto) for proto in message.functions}
    parameters = {_local(proto.name, message.graph.name): _tensor_type(proto) for proto in message.graph.parameter}
    return Module(decoder.function(message.graph), functions, parameters, _metadata(message))


def with_metadata(data: bytes, metadata: str) -> bytes:
    """Return the MindIR bytes with bmpipe's own text stored in them; MindSpore ignores it."""
    message = _protobuf().ModelProto()
    message.ParseFromString(data)
    entries = message.user_info
    if hasattr(entries, "add"):
        entries.add(key=_METADATA_KEY, value=metadata)
    else:
        entries[_METADATA_KEY] = metadata
    return bytes(message.SerializeToString(deterministic=True))


def _metadata(message: Any) -> str | None:
    """What :func:`with_metadata` stored.

    The field is a map. MindSpore 2.9's generated code makes a list of entries of it under protobuf's Python
    implementation; the bytes are the same.
    """
    entries = message.user_info
    if hasattr(entries, "add"):
        return next((str(entry.value) for entry in entries if entry.key == _METADATA_KEY), None)
    return str(entries[_METADATA_KEY]) if _METADATA_KEY in entries else None


def _protobuf() -> Any:
    """MindSpore's generated protobuf module; imported late because it pulls in the whole of MindSpore."""
    return importlib.import_module("mindspore.train.mind_ir_pb2")


def _local(name: str, function: str) -> str:
    """Strip the function's own name, which MindSpore puts before every value of it."""
    return name[len(function) + 1 :] if name.startswith(function + ":") else name


def _tensor_type(proto: Any) -> TensorType:
    return TensorType(tuple(proto.dims), _DATA_TYPES.get(proto.data_type, f"type{proto.data_type}"))


class _Decoder:
    """Holds what all functions of a model share: its primitives."""

    def __init__(self, message: Any) -> None:
        self._primitives = {proto.name: (proto.op_type, _attributes(proto.attribute)) for proto in message.primitives}

    def function(self, graph: Any) -> Function:
        name = graph.name
        constants: dict[str, Constant] = {}
        nodes: list[Node] = []
        for proto in graph.node:
            if proto.op_type == "Constant":
                constants[_local(proto.output[0], name)] = _constant(proto.attribute[0])
            else:
                nodes.append(self._node(proto, name))
        inputs = tuple((_local(proto.name, name), _input_type(proto)) for proto in graph.input)
        return Function(name, inputs, constants, tuple(nodes), _local(graph.output[0].name, name))

    def _node(self, proto: Any, function: str) -> Node:
        target = proto.op_type[len(_REFERENCE) :] if proto.op_type.startswith(_REFERENCE) else proto.op_type
        primitive = self._primitives.get(target)
        shape = next((attribute for attribute in proto.attribute if attribute.name == "shape"), None)
        attributes: dict[str, Any] = dict(primitive[1]) if primitive else {}
        attributes.update(_attributes(a for a in proto.attribute if a.name != "shape"))
        attributes.update(_attributes(proto.node_attr))
        primal = {attribute.name: attribute.s for attribute in proto.primal_attr}
        identity = primal.get("forward_unique_id", primal.get("unique_id"))
        # A primitive stored by plain name (older exports) is neither in the table nor a reference.
        is_call = primitive is None and proto.op_type.startswith(_REFERENCE)
        return Node(
            output=_local(proto.output[0], function),
            operation=primitive[0] if primitive else _local(target, function),
            is_call=is_call,
            inputs=tuple(_local(item, function) for item in proto.input),
            type=OPAQUE if shape is None else _value_type(shape),
            scope=proto.domain,
            attributes=attributes,
            unique_id=identity.decode() if identity else None,
        )


def _input_type(proto: Any) -> ValueType:
    if len(proto.tensor) == 1:
        return _tensor_type(proto.tensor[0])
    if proto.HasField("attr_info"):
        return _value_type(proto.attr_info)
    return OPAQUE


def _value_type(attribute: Any) -> ValueType:
    if attribute.type in (_TENSORS, _TENSOR) and len(attribute.tensors) == 1:
        return _tensor_type(attribute.tensors[0])
    if attribute.type in (_TUPLE, _LIST):
        return tuple(_value_type(item) for item in attribute.values)
    return OPAQUE


def _attributes(protos: Any) -> dict[str, Any]:
    return {proto.name: _plain_value(proto) for proto in protos}


def _plain_value(proto: Any) -> Any:
    kind = proto.type
    if kind in _INTEGERS:
        return proto.ints[0] if proto.ints else proto.i
    if kind == _BOOL:
        return bool(proto.ints[0] if proto.ints else proto.i)
    if kind == _FLOAT:
        return proto.floats[0] if proto.floats else proto.f
    if kind == _DOUBLE:
        return proto.doubles[0] if proto.doubles else proto.d
    if kind == _STRING:
        return (proto.strings[0] if proto.strings else proto.s).decode("utf-8", "replace")
    if kind in (_TUPLE, _LIST):
        return tuple(_plain_value(item) for item in proto.values)
    if kind == _NONE:
        return None
    return OPAQUE


def _constant(proto: Any) -> Constant:
    if proto.type in (_TENSORS, _TENSOR) and len(proto.tensors) == 1:
        tensor = proto.tensors[0]
        return Constant(_scalar(tensor), _tensor_type(tensor))
    return Constant(_plain_value(proto))


def _scalar(tensor: Any) -> Any:
    """Value of a one-element tensor constant, else ``None``."""
    dtype = _DATA_TYPES.get(tensor.data_type)
    if any(size != 1 for size in tensor.dims) or not tensor.raw_data or dtype is None or dtype == "bfloat16":
        return None
    return np.frombuffer(tensor.raw_data, dtype=np.dtype(dtype))[0].item()
