"""Live network -> :class:`CellGraph` of forward and backward, without allocating weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import nn

from mindspore_bmpipe.errors import BmpipeError, InputError
from mindspore_bmpipe.graph.cell_graph import CellGraph, CellInfo, ParameterInfo
from mindspore_bmpipe.graph.cell_keys import structural_keys
from mindspore_bmpipe.graph.compile_private import compiled_once, joint_graph_bytes, training_flags
from mindspore_bmpipe.graph.mindir import Module, TensorType, decode_module
from mindspore_bmpipe.graph.preserve import preserved_state
from mindspore_bmpipe.graph.recorded import Trace, graph_of, solved_module
from mindspore_bmpipe.graph.trace_axes import BATCH, SEQUENCE

Axes = Mapping[str, Sequence[tuple[int, int]]]
"""Symbol name -> places it stands for: (index of the input, axis)."""


def trace(network: nn.Cell, *inputs: Any, symbols: Axes | None = None) -> CellGraph:
    """Trace loss and gradients of ``network`` for one micro-batch.

    Args:
        network: cell whose call returns the loss. Its weights are not read and need not be allocated
            (build it under ``mindspore.nn.utils.no_init_parameters()``).
        inputs: tensors of one micro-batch at their unsharded size.
        symbols: axes that vary. By default ``b`` is axis 0 of all inputs that agree with the first one, and ``s`` is
            axis 1 of the first input of integers with two axes, together with every equal axis of the others.

    Raises:
        InputError: the network does not compile, has no trainable weight, or has data-dependent control flow.
    """
    return graph_of(record(network, *inputs, symbols=symbols))


def record(network: nn.Cell, *inputs: Any, symbols: Axes | None = None) -> Trace:
    """Like :func:`trace`, but return what is needed to build the graph again later or elsewhere."""
    if not isinstance(network, nn.Cell):
        raise InputError(f"the network must be a mindspore.nn.Cell, got {type(network).__name__}")
    if not network.trainable_params():
        raise InputError(f"{type(network).__name__} has no trainable weight, so there is no training step to plan")
    axes = default_axes(inputs) if symbols is None else symbols
    base = {name: int(inputs[places[0][0]].shape[places[0][1]]) for name, places in axes.items()}
    cells, parameters = describe_cells(network)
    with preserved_state(network), training_flags(network):
        graphs, sizes, module, notes = _compile_at_sizes(network, inputs, axes, base)
    return Trace(type(network).__name__, graphs, sizes, base, cells, parameters, tuple(notes), module)


def default_axes(inputs: Sequence[Any]) -> dict[str, list[tuple[int, int]]]:
    """Axes that vary when the user names none; see :func:`trace`."""
    tensors = [(index, item) for index, item in enumerate(inputs) if isinstance(item, mindspore.Tensor) and item.ndim]
    if not tensors:
        raise InputError("the network takes no tensor with an axis, so there is no micro-batch to vary")
    batch = tensors[0][1].shape[0]
    axes = {BATCH: [(index, 0) for index, item in tensors if item.shape[0] == batch]}
    integers = (mindspore.int32, mindspore.int64, mindspore.int16, mindspore.uint8)
    tokens = next((item for _, item in tensors if item.ndim == 2 and item.dtype in integers), None)
    if tokens is not None and tokens.shape[1] > 1:
        axes[SEQUENCE] = [
            (index, axis)
            for index, item in tensors
            if item.ndim == 2 or item.dtype in integers
            for axis in range(1, item.ndim)
            if item.shape[axis] == tokens.shape[1]
        ]
    return axes


def describe_cells(network: nn.Cell) -> tuple[tuple[CellInfo, ...], dict[str, ParameterInfo]]:
    """Return the cell tree and the weights of a live network."""
    trainable = {id(weight) for weight in network.trainable_params()}
    weights = {
        weight.name: ParameterInfo(
            weight.name, TensorType(tuple(weight.shape), _dtype_name(weight.dtype)), id(weight) in trainable
        )
        for weight in network.get_parameters()
    }
    cells = tuple(
        CellInfo(
            path=path,
            class_name=f"{type(cell).__module__}.{type(cell).__qualname__}",
            parameters=tuple(weight.name for weight in cell.get_parameters()),
            is_container=isinstance(cell, (nn.CellList, nn.CellDict)),
        )
        for path, cell in network.cells_and_names()
    )
    return cells, weights


def _dtype_name(dtype: Any) -> str:
    return str(dtype).lower().replace("mindspore.", "")


def _compile_at_sizes(
    network: nn.Cell, inputs: tuple[Any, ...], axes: Axes, base: dict[str, int]
) -> tuple[tuple[bytes, ...], tuple[Mapping[str, int], ...], Module, list[str]]:
    """Compile at as many sizes as the symbols need, giving up symbols that the network has baked in."""
    notes: list[str] = []
    varying = dict(axes)
    keys = structural_keys(network)
    while varying:
        points = _probe_points({name: base[name] for name in varying})
        try:
            graphs = tuple(_compile(network, _resized(inputs, varying, point), keys) for point in points)
            module = solved_module([decode_module(data, type(network).__name__) for data in graphs], points)
        except BmpipeError:
            raise
        except Exception as error:  # MindSpore raises many types when a size does not fit the network
            dropped = list(varying)[-1]
            del varying[dropped]
            base_size = base.pop(dropped)
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            notes.append(
                f"axis {dropped} is fixed at {base_size}: the network does not trace at other sizes of it ({reason})"
            )
            continue
        return graphs, tuple(points), module, notes
    try:
        graph = _compile(network, inputs, keys)
        return (graph,), ({},), decode_module(graph, type(network).__name__), notes
    except BmpipeError:
        raise
    except Exception as error:
        raise InputError(
            f"{type(network).__name__} does not compile for the given inputs: {str(error).strip()[:2000]}"
        ) from error


def _compile(network: nn.Cell, inputs: tuple[Any, ...], keys: Mapping[str, str]) -> bytes:
    with compiled_once(network, keys):
        return joint_graph_bytes(network, inputs)


def _probe_points(base: Mapping[str, int]) -> list[dict[str, int]]:
    """Three sizes, distinct in every symbol at once.

    The batch is never 1, where MindSpore drops broadcasts that other sizes have. Sequences only shrink, so that
    constants of that size (masks, position tables) stay within what the network allows.
    """
    points: list[dict[str, int]] = [{}, {}, {}]
    for name, value in base.items():
        if name == BATCH:
            choices = [2, 3, 5] if value == 1 else [value, value * 3, value * 5]
        elif value % 4 == 0 and value >= 16:
            choices = [value, value // 2, value // 4 * 3]
        else:
            choices = [value, value * 2, value * 3]
        for point, choice in zip(points, choices, strict=True):
            point[name] = choice
    return points


def _resized(inputs: tuple[Any, ...], axes: Axes, sizes: Mapping[str, int]) -> tuple[Any, ...]:
    shapes = {index: list(item.shape) for index, item in enumerate(inputs) if isinstance(item, mindspore.Tensor)}
    for name, places in axes.items():
        for index, axis in places:
            shapes[index][axis] = sizes[name]
    return tuple(
        _zeros(shapes[index], item.dtype) if index in shapes and shapes[index] != list(item.shape) else item
        for index, item in enumerate(inputs)
    )


def _zeros(shape: Sequence[int], dtype: Any) -> Any:
    return mindspore.Tensor(np.zeros(tuple(shape), np.int8), dtype)
