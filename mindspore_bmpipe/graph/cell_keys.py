"""Keys of cells: two cells with equal keys compute the same function of their inputs and weights.

MindSpore compiles cells of equal key once. A key must therefore differ whenever anything that the compiled code could
depend on differs; when in doubt it is made unique, which costs compile time and nothing else.
"""

from __future__ import annotations

import hashlib
from typing import Any

import mindspore
import numpy as np
from mindspore import nn, ops

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_LARGEST_HASHED_TENSOR = 1 << 24
"""Bytes of a tensor attribute above which it is compared by identity only; hashing more would slow every trace."""


def structural_keys(network: nn.Cell) -> dict[str, str]:
    """Return a key for every cell below ``network`` by its path.

    Only cells at the same place of equal parents share a key (``blocks.0.attention`` and ``blocks.7.attention``).
    MindSpore 2.10 crashes when one compiled cell is called with tensors of different rank, as equal dense layers at
    different places are, and 2.9 and 2.10 pass the first parent's weights to a shared cell inside a parent that is not
    shared itself.
    """
    base = frozenset(vars(nn.Cell()))
    known: dict[int, str] = {}
    keys: dict[str, str] = {}
    inherited: dict[str, str] = {"": ""}
    for path, cell in network.cells_and_names():
        if not path:
            continue
        above = inherited[path.rpartition(".")[0]]
        # A list is never called and its own key holds all its elements, so elements look past it.
        own = _cell_key(cell, base, known, ())
        keys[path] = hashlib.sha256(f"{_place(path)} {own} {above}".encode()).hexdigest()[:32]
        inherited[path] = above if isinstance(cell, (nn.CellList, nn.CellDict)) else keys[path]
    return keys


def _place(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _cell_key(cell: nn.Cell, base: frozenset[str], known: dict[int, str], outer: tuple[int, ...]) -> str:
    key = known.get(id(cell))
    if key is not None:
        return key
    if id(cell) in outer:  # a cell that holds its own parent
        return f"object {id(cell)}"
    inner = (*outer, id(cell))

    def describe(value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return (type(value).__name__, repr(value))
        if isinstance(value, mindspore.Parameter):
            return ("parameter", tuple(value.shape), str(value.dtype), value.requires_grad)
        if isinstance(value, mindspore.Tensor):
            return _tensor_key(value)
        if isinstance(value, np.ndarray):
            return ("array", value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest())
        if isinstance(value, nn.Cell):
            return _cell_key(value, base, known, inner)
        if isinstance(value, ops.Primitive):
            return _primitive_key(value, describe)
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, tuple(describe(item) for item in value))
        if isinstance(value, dict):
            return ("dict", tuple((repr(name), describe(item)) for name, item in value.items()))
        if isinstance(value, type(mindspore.float32)) or type(value).__module__.startswith("mindspore._c_expression"):
            return ("type", str(value))
        if isinstance(value, type) or callable(value):
            return ("code", getattr(value, "__module__", ""), getattr(value, "__qualname__", ""), id(value))
        return ("object", id(value))

    own = {name: value for name, value in vars(cell).items() if name not in base and not _is_seed(name)}
    parts = (
        type(cell).__module__,
        type(cell).__qualname__,
        id(type(cell)),
        cell.training,
        tuple(sorted((name, describe(value)) for name, value in own.items())),
        tuple((name, describe(child)) for name, child in cell.name_cells().items()),
        tuple((name, describe(value)) for name, value in cell._params.items()),
        tuple(sorted((name, describe(value)) for name, value in cell.get_flags().items())),
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    known[id(cell)] = key
    return key


def _is_seed(name: str) -> bool:
    """Whether an attribute only seeds random numbers: equal layers get different seeds, and no cost depends on them."""
    return name.lower().strip("_").rstrip("0123456789") == "seed"


def _tensor_key(value: Any) -> Any:
    size = int(np.prod(value.shape)) * value.itemsize
    if value.has_init or size > _LARGEST_HASHED_TENSOR:
        return ("tensor", id(value))
    contents = value.asnumpy() if value.dtype != mindspore.bfloat16 else value.float().asnumpy()
    return ("tensor", tuple(value.shape), str(value.dtype), hashlib.sha256(contents.tobytes()).hexdigest())


def _primitive_key(value: Any, describe: Any) -> Any:
    attributes = tuple(sorted((name, describe(item)) for name, item in value.attrs.items() if not _is_seed(name)))
    # Arguments of primitives that are not attributes live on the Python object.
    own = tuple(
        sorted(
            (name, describe(item))
            for name, item in vars(value).items()
            if isinstance(item, (*_PLAIN, tuple)) and not _is_seed(name)
        )
    )
    return ("primitive", type(value).__name__, value.name, attributes, own)
