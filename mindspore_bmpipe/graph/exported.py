"""File written by ``mindspore.export`` -> :class:`CellGraph` of forward operations.

Such a file holds neither cells nor gradients: cells are read off scope names and parameter names, and put right by data
flow. What it does not hold at all (which weights are trained, ``stop_gradient``, other sizes of the inputs) is said in
the notes of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.call_order import in_call_order
from mindspore_bmpipe.graph.cell_graph import CellGraph, CellInfo, Operation, ParameterInfo, tensor_arguments
from mindspore_bmpipe.graph.inline import FlatModule, build_cell_graph, inline_module
from mindspore_bmpipe.graph.mindir import OPAQUE, Function, Module, TensorType, is_fixed
from mindspore_bmpipe.graph.scope_repair import repaired_cells
from mindspore_bmpipe.graph.scopes import CONTAINERS, CellNames, cell_names
from mindspore_bmpipe.graph.unshare import unshared

_FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})
_WITHOUT_TYPE = frozenset({"UpdateState", "Depend", "Load", "Return", "return", "MakeTuple", "TupleGetItem", "Partial"})
_REMEDY = "export the network again with inputs of fixed size, or trace it with 'bmpipe trace'"
_AVERAGES_BEGIN, _AVERAGES_END = 3, 5
"""Which arguments of batch normalisation are its running mean and variance."""

TRAINABLE_NOTE = "the file does not say which weights are trained: all floating-point weights are taken as trained"
AXES_NOTE = "all axes are fixed at the exported sizes; trace the network itself to plan for other sizes"
STOP_GRADIENT_NOTE = "the file does not hold stop_gradient: gradients are taken to flow through everything"
DROPOUT_NOTE = (
    "the file holds no dropout; if training drops out, call set_train() before the first compile or export of the "
    "network"
)


def exported_graph(module: Module, name: str) -> CellGraph:
    """Build the forward graph of an exported training network, whose call returns the loss.

    Args:
        module: a decoded file.
        name: what to call the graph in messages, for example the file's name.

    Raises:
        InputError: a tensor without shape or with a size that is not fixed, or control flow that depends on values.
    """
    _require_shapes(module, name)
    names = cell_names(module)
    flat = inline_module(module, ())
    names = names.with_paths(paths := repaired_cells(flat.operations, flat.tensors, names))
    separate = unshared(_placed(flat, paths), names.classes)
    names = names.with_paths(operation.cell for operation in separate.operations)
    separate = in_call_order(separate, lambda path: names.classes[path] not in CONTAINERS)
    ordered = _in_order_of_use(names, separate.operations)
    averages = _running_averages(separate)
    parameters = {
        parameter: ParameterInfo(parameter, kind, kind.dtype in _FLOATING and parameter not in averages)
        for parameter, kind in module.parameters.items()
    }
    notes = [AXES_NOTE, TRAINABLE_NOTE, STOP_GRADIENT_NOTE]
    if not any(operation.primitive.startswith("Dropout") for operation in separate.operations):
        notes.append(DROPOUT_NOTE)
    return build_cell_graph(name, separate, _cell_tree(ordered, module.parameters), parameters, {}, notes)


def _require_shapes(module: Module, name: str) -> None:
    for function in (module.entry, *module.functions.values()):
        read = _value_reads(function)
        for node in function.nodes:
            opaque = node.type is OPAQUE and not node.is_call and node.operation not in _WITHOUT_TYPE
            if opaque and node.output in read:
                raise InputError(f"{name}: {node.scope} ({node.operation}) has no shape in the file; {_REMEDY}")
            if not is_fixed(node.type):
                raise InputError(f"{name}: {node.scope} ({node.operation}) has a size that is not fixed; {_REMEDY}")
        for label, kind in function.inputs:
            if not is_fixed(kind):
                raise InputError(f"{name}: input {label!r} has a size that is not fixed; {_REMEDY}")


def _value_reads(function: Function) -> set[str]:
    """Names of values that some operation computes with; ordering alone needs no shape."""
    read: set[str] = set()
    for node in function.nodes:
        if node.operation == "UpdateState":
            continue
        read.update(node.inputs[:1] if node.operation in ("Depend", "Load") else node.inputs)
    return read


def _running_averages(flat: FlatModule) -> set[str]:
    """Weights that no optimizer touches because normalisation keeps them itself."""
    found: set[str] = set()
    for operation in flat.operations:
        if operation.primitive == "BatchNorm":
            averages = tensor_arguments(operation.arguments[_AVERAGES_BEGIN:_AVERAGES_END])
            found.update(name for index in averages if (name := flat.tensors[index].parameter) is not None)
    return found


def _placed(flat: FlatModule, paths: Sequence[str]) -> FlatModule:
    operations = tuple(replace(operation, cell=path) for operation, path in zip(flat.operations, paths, strict=True))
    return replace(flat, operations=operations)


def _in_order_of_use(names: CellNames, operations: Sequence[Operation]) -> CellNames:
    """Cells of one parent in the order in which they run; cells that never run keep their place at the end."""
    first: dict[str, int] = {}
    for index, operation in enumerate(operations):
        path = operation.cell
        while path:
            first.setdefault(path, index)
            path = path.rpartition(".")[0]
    never = len(operations)
    paths = list(names.classes)
    place = {path: (first.get(path, never), number) for number, path in enumerate(paths)}

    def order(path: str) -> tuple[tuple[int, int], ...]:
        parts = path.split(".")
        return tuple(_rank(".".join(parts[: i + 1]), place) for i in range(len(parts))) if path else ()

    return replace(names, classes={path: names.classes[path] for path in sorted(paths, key=order)})


def _rank(path: str, place: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    last = path.rpartition(".")[2]
    return (int(last), -1) if last.isdigit() else place[path]


def _cell_tree(names: CellNames, parameters: Mapping[str, TensorType]) -> tuple[CellInfo, ...]:
    weights: dict[str, list[str]] = {path: [] for path in names.classes}
    for parameter in parameters:
        path = names.owners[parameter]
        weights[""].append(parameter)
        while path:
            weights[path].append(parameter)
            path = path.rpartition(".")[0]
    return tuple(CellInfo(path, kind, tuple(weights[path]), kind in CONTAINERS) for path, kind in names.classes.items())
