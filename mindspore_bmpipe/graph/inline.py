"""Module of functions -> one flat :class:`CellGraph`, by running the module on symbolic values.

Cells are compiled as functions that return their result and a closure holding exactly the tensors that their backward
function reads. Running every call once, with closures followed, gives each operation the cell whose function it stands
in: no scope name is trusted where a function says it better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.call_paths import BACKWARD_MARK, CallPaths, is_cell_function
from mindspore_bmpipe.graph.cell_graph import (
    IN_PLACE,
    CellGraph,
    CellInfo,
    Operation,
    ParameterInfo,
    Phase,
    Tensor,
    TensorRef,
    read_tensors,
    tensor_arguments,
    writes,
)
from mindspore_bmpipe.graph.mindir import OPAQUE, Constant, Function, Module, Node, TensorType

_TRANSPARENT = frozenset({"Load", "Return", "return", "Identity"})
_TUPLES = frozenset({"MakeTuple", "MakeList", "make_tuple", "make_list"})
_ITEMS = frozenset({"TupleGetItem", "ListGetItem", "tuple_getitem", "list_getitem"})
_CONTROL_FLOW = frozenset({"Switch", "switch", "SwitchLayer", "switch_layer"})
_BACKWARD_SCOPE = "Gradients/"


@dataclass(frozen=True)
class Closure:
    """A function with its first arguments bound."""

    function: str
    captured: tuple[Any, ...]
    cell: str


@dataclass(frozen=True)
class FlatModule:
    """What running a module gives, before it is combined with what is known of the network."""

    operations: tuple[Operation, ...]
    tensors: tuple[Tensor, ...]
    inputs: tuple[int, ...]
    weights: frozenset[str]
    """Names of the weights that some kept operation reads."""
    results: tuple[int, ...] = ()
    """Tensors that the module returns, in order."""


def inline_module(module: Module, cells: Sequence[CellInfo]) -> FlatModule:
    """Run ``module`` and collect every operation that its results depend on.

    Raises:
        InputError: data-dependent control flow, tensors without shapes, or functions that fit no cell.
    """
    inliner = _Inliner(module, cells)
    result = inliner.run()
    return inliner.collect(result)


def build_cell_graph(
    name: str,
    flat: FlatModule,
    cells: Sequence[CellInfo],
    parameters: dict[str, ParameterInfo],
    symbols: dict[str, int],
    notes: Sequence[str],
) -> CellGraph:
    """Combine the operations with the cell tree into the graph that everything downstream reads."""
    has_backward = any(operation.phase is Phase.BACKWARD for operation in flat.operations)
    return CellGraph(
        name=name,
        operations=flat.operations,
        tensors=flat.tensors,
        inputs=flat.inputs,
        cells=tuple(cells),
        parameters=parameters,
        symbols=symbols,
        notes=tuple(notes),
        has_backward=has_backward,
    )


class _Inliner:
    def __init__(self, module: Module, cells: Sequence[CellInfo]) -> None:
        self._module = module
        self._paths = CallPaths(cells)
        self._operations: list[Operation] = []
        self._tensors: list[Tensor] = []
        self._inputs: list[int] = []
        self._constants: dict[int, TensorRef | Constant] = {}
        self._shared_constants = {
            name: constant
            for function in (*module.functions.values(), module.entry)
            for name, constant in function.constants.items()
        }

    def run(self) -> Any:
        entry = self._module.entry
        arguments: list[Any] = []
        for _, kind in entry.inputs:
            value = self._new_tensor(kind, None) if isinstance(kind, TensorType) else OPAQUE
            if isinstance(value, TensorRef):
                self._inputs.append(value.tensor)
            arguments.append(value)
        weights: dict[str, Any] = {}
        for name, kind in self._module.parameters.items():
            self._tensors.append(Tensor(kind, None, parameter=name))
            weights[name] = TensorRef(len(self._tensors) - 1)
        return self._run_function(entry, arguments, "", Phase.FORWARD, weights)

    def collect(self, result: Any) -> FlatModule:
        """Drop what no result needs: MindSpore removes it too once functions are inlined."""
        results = tensor_arguments(result)
        live: set[int] = set(results)
        kept: list[Operation] = []
        for operation in reversed(self._operations):
            if writes(operation.primitive) or not live.isdisjoint(operation.outputs):
                kept.append(operation)
                live.update(read_tensors(operation))
        kept.reverse()
        producers = {output: index for index, operation in enumerate(kept) for output in operation.outputs}
        tensors = tuple(
            Tensor(tensor.type, producers.get(index), tensor.parameter, tensor.is_constant)
            for index, tensor in enumerate(self._tensors)
        )
        weights = frozenset(tensors[index].parameter or "" for index in live) - {""}
        return FlatModule(tuple(kept), tensors, tuple(self._inputs), weights, results)

    def _run_function(
        self, function: Function, arguments: Sequence[Any], cell: str, phase: Phase, extra: dict[str, Any] | None = None
    ) -> Any:
        values: dict[str, Any] = dict(extra or {})
        for (name, _), value in zip(function.inputs, arguments, strict=True):
            values[name] = value
        for name, constant in function.constants.items():
            values[name] = self._constant(constant)
        used: set[str] = set()
        for node in function.nodes:
            values[node.output] = self._run_node(function, node, values, cell, phase, used)
        return values[function.output]

    def _run_node(
        self, function: Function, node: Node, values: dict[str, Any], cell: str, phase: Phase, used: set[str]
    ) -> Any:
        operation = node.operation
        if operation in _TRANSPARENT:
            return self._value(node.inputs[0], values, cell)
        if operation == "Depend":
            return self._after(*(self._value(name, values, cell) for name in node.inputs[:2]))
        if operation == "UpdateState":
            return OPAQUE
        if operation in _CONTROL_FLOW:
            raise InputError(
                f"{node.scope}: control flow that depends on tensor values; its cost differs from step to step. "
                "Make the condition a Python value, or keep that cell out of the planned network"
            )
        arguments = tuple(self._value(name, values, cell) for name in node.inputs)
        if operation in _TUPLES:
            return arguments
        if operation in _ITEMS:
            return self._item(node, arguments)
        if operation == "Partial":
            bound = arguments[0]
            return Closure(bound.function, bound.captured + arguments[1:], bound.cell)
        if node.is_call:
            return self._call(node, values, arguments, cell, phase, used)
        return self._emit(node, arguments, cell, phase)

    def _value(self, name: str, values: dict[str, Any], cell: str) -> Any:
        if name in values:
            return values[name]
        plain = name.removeprefix("REF::")
        if plain in values:
            return values[plain]
        if plain in self._module.functions:
            return Closure(plain, (), cell)
        if plain in self._shared_constants:  # MindSpore writes a constant once, in the first function that reads it
            return self._constant(self._shared_constants[plain])
        raise InputError(f"the graph reads {name!r}, which nothing in it makes; the file is damaged, write it again")

    def _after(self, value: Any, written: Any = OPAQUE) -> Any:
        """What ``value`` is once ``written`` is made: an operation that writes into its argument makes it anew."""
        if not isinstance(value, TensorRef) or not isinstance(written, TensorRef):
            return value
        index = self._tensors[written.tensor].producer
        if index is None or not self._operations[index].primitive.startswith(IN_PLACE):
            return value
        writer = self._operations[index]
        target = writer.arguments[0]
        if target == value:
            return written
        part = self._tensors[target.tensor].producer if isinstance(target, TensorRef) else None
        if part is None or self._operations[part].arguments[:1] != (value,):
            return value
        # It writes into a part of the value, so the whole is one more result of it.
        whole = self._new_tensor(self._tensors[value.tensor].type, index)
        self._operations[index] = replace(writer, outputs=(*writer.outputs, whole.tensor))
        return whole

    def _item(self, node: Node, arguments: tuple[Any, ...]) -> Any:
        items, index = arguments[0], arguments[1]
        if isinstance(items, Constant):
            items = tuple(Constant(item) for item in items.value)
        if not isinstance(items, tuple) or not isinstance(index, Constant):
            return OPAQUE
        return items[index.value]

    def _call(
        self, node: Node, values: dict[str, Any], arguments: tuple[Any, ...], cell: str, phase: Phase, used: set[str]
    ) -> Any:
        target = values.get(node.operation)
        if target is None:
            if node.operation not in self._module.functions:
                raise InputError(f"{node.scope}: calls {node.operation!r}, which the file does not hold")
            target = Closure(node.operation, (), cell)
        if not isinstance(target, Closure):
            raise InputError(f"{node.scope}: calls a value that is not a function; this graph cannot be followed")
        function = self._module.functions[target.function]
        path = target.cell
        if is_cell_function(function.name):
            weights = [
                self._tensors[argument.tensor].parameter or ""
                for argument in arguments
                if isinstance(argument, TensorRef) and self._tensors[argument.tensor].parameter
            ]
            path = self._paths.resolve(function, weights, cell, used)
        elif BACKWARD_MARK in function.name:
            phase = Phase.BACKWARD
        return self._run_function(function, target.captured + arguments, path, phase)

    def _emit(self, node: Node, arguments: tuple[Any, ...], cell: str, phase: Phase) -> Any:
        if phase is Phase.FORWARD and node.scope.startswith(_BACKWARD_SCOPE):
            phase = Phase.BACKWARD
        index = len(self._operations)
        outputs: list[int] = []

        def make(kind: Any) -> Any:
            if isinstance(kind, TensorType):
                reference = self._new_tensor(kind, index)
                outputs.append(reference.tensor)
                return reference
            if isinstance(kind, tuple):
                return tuple(make(item) for item in kind)
            return OPAQUE

        result = make(node.type)
        self._operations.append(
            Operation(
                primitive=node.operation,
                arguments=tuple(_plain(argument) for argument in arguments),
                outputs=tuple(outputs),
                attributes=node.attributes,
                cell=cell,
                phase=phase,
                scope=node.scope,
                unique_id=node.unique_id,
            )
        )
        return result

    def _new_tensor(self, kind: TensorType, producer: int | None) -> TensorRef:
        self._tensors.append(Tensor(kind, producer))
        return TensorRef(len(self._tensors) - 1)

    def _constant(self, constant: Constant) -> TensorRef | Constant:
        """Tensor constants become tensors of the graph, one for each place that writes them."""
        if constant.type is None:
            return constant
        known = self._constants.get(id(constant))
        if known is None:
            self._tensors.append(Tensor(constant.type, None, is_constant=True))
            known = TensorRef(len(self._tensors) - 1)
            self._constants[id(constant)] = known
        return known


def _plain(argument: Any) -> Any:
    """Arguments that carry no tensor and no value are of no interest downstream."""
    if isinstance(argument, tuple):
        return tuple(_plain(item) for item in argument)
    return argument if isinstance(argument, (TensorRef, Constant)) else None
