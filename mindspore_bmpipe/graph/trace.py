"""Live network -> :class:`CellGraph` of forward and backward, without allocating weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mindspore
import numpy as np
from mindspore import nn

from mindspore_bmpipe.errors import BmpipeError, InputError
from mindspore_bmpipe.graph.cell_graph import CellGraph, CellInfo, ParameterInfo, Sharding
from mindspore_bmpipe.graph.cell_keys import structural_keys
from mindspore_bmpipe.graph.compile_private import compiled_once, joint_graph_bytes, training_flags
from mindspore_bmpipe.graph.mindir import Module, TensorType, decode_module
from mindspore_bmpipe.graph.preserve import preserved_state
from mindspore_bmpipe.graph.primitive_names import named_primitives
from mindspore_bmpipe.graph.recorded import Trace, graph_of, solved_module
from mindspore_bmpipe.graph.trace_axes import BATCH, SEQUENCE

Axes = Mapping[str, Sequence[tuple[int, int]]]
"""Symbol name -> places it stands for: (index of the input, axis)."""

Compiler = Callable[[tuple[Any, ...]], bytes]
"""Inputs of a network -> MindIR of its joint graph."""


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
    _require_trainable(network)
    with preserved_state(network), training_flags(network):
        keys = structural_keys(network)

        def compile_joint(sized: tuple[Any, ...]) -> bytes:
            with compiled_once(network, keys), named_primitives(network):
                return joint_graph_bytes(network, sized)

        return record_compiled(network, inputs, compile_joint, symbols)


def record_compiled(
    network: nn.Cell,
    inputs: Sequence[Any],
    compile_joint: Compiler,
    symbols: Axes | None = None,
    sharding: Sharding | None = None,
) -> Trace:
    """Record what a compiler makes of a network at several sizes of its inputs.

    Args:
        network: as in :func:`trace`.
        inputs: as in :func:`trace`.
        compile_joint: compiles the network for inputs of other sizes.
        symbols: as in :func:`trace`.
        sharding: ranks that the compiler compiles for. The symbol ``b`` then counts the samples of one of the
            data-parallel ranks, which is what the shapes of one device depend on.

    Raises:
        InputError: as :func:`trace`, or data-parallel ranks that cannot share the batch evenly.
    """
    _require_trainable(network)
    axes = default_axes(inputs) if symbols is None else symbols
    base = {name: int(inputs[places[0][0]].shape[places[0][1]]) for name, places in axes.items()}
    ranks = 1 if sharding is None else sharding.data_parallel
    if BATCH in base:
        if base[BATCH] % ranks:
            raise InputError(
                f"the factory's batch of {base[BATCH]} cannot be shared evenly by {ranks} data-parallel ranks; give a "
                "batch for all of them together (--set batch=...)"
            )
        base[BATCH] //= ranks
    cells, parameters = describe_cells(network)
    graphs, sizes, module, notes = _compile_at_sizes(type(network).__name__, inputs, axes, base, ranks, compile_joint)
    recorded = Trace(type(network).__name__, graphs, sizes, base, cells, parameters, tuple(notes), module)
    return replace(recorded, sharding=sharding)


def _require_trainable(network: nn.Cell) -> None:
    if not isinstance(network, nn.Cell):
        raise InputError(f"the network must be a mindspore.nn.Cell, got {type(network).__name__}")
    if not network.trainable_params():
        raise InputError(f"{type(network).__name__} has no trainable weight, so there is no training step to plan")


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
    name: str, inputs: Sequence[Any], axes: Axes, base: dict[str, int], ranks: int, compile_joint: Compiler
) -> tuple[tuple[bytes, ...], tuple[Mapping[str, int], ...], Module, list[str]]:
    """Compile at as many sizes as the symbols need, giving up symbols that the network has baked in.

    Sizes of the batch are those of one of ``ranks`` that share it.
    """
    notes: list[str] = []
    varying = dict(axes)
    while varying:
        points = _probe_points({name: base[name] for name in varying})
        try:
            graphs = tuple(compile_joint(_resized(inputs, varying, _together(point, ranks))) for point in points)
            module = solved_module([decode_module(data, name) for data in graphs], points)
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
        graph = compile_joint(tuple(inputs))
        return (graph,), ({},), decode_module(graph, name), notes
    except BmpipeError:
        raise
    except Exception as error:
        raise InputError(f"{name} does not compile for the given inputs: {str(error).strip()[:2000]}") from error


def _together(point: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Sizes of the inputs of all ranks, given those of one."""
    return {name: size * ranks if name == BATCH else size for name, size in point.items()}


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


def _resized(inputs: Sequence[Any], axes: Axes, sizes: Mapping[str, int]) -> tuple[Any, ...]:
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
