"""What a derivative rule sees and gives: one forward operation, and the backward operations it emits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from mindspore_bmpipe.graph.cell_graph import Operation, Phase, Tensor, TensorRef, constant_value, tensor_arguments
from mindspore_bmpipe.graph.mindir import Constant, TensorType

Contribution = tuple[TensorRef, TensorRef]
"""A forward tensor, and what one of its readers adds to its gradient."""

BACKWARD_SCOPE = "Gradients/"
"""What MindSpore puts before the scope of every backward operation."""


class Tape:
    """The graph under construction: forward tensors and operations, to which rules append."""

    def __init__(self, tensors: Sequence[Tensor], operations: Sequence[Operation]) -> None:
        self.tensors = list(tensors)
        self.operations = list(operations)
        self._fills: dict[Any, tuple[TensorRef, ...]] = {}

    def kind(self, reference: TensorRef) -> TensorType:
        """Type of a tensor."""
        return self.tensors[reference.tensor].type

    def constant(self, kind: TensorType) -> TensorRef:
        """A tensor written into the graph, such as the gradient of the loss itself."""
        self.tensors.append(Tensor(kind, None, is_constant=True))
        return TensorRef(len(self.tensors) - 1)

    def append(
        self,
        primitive: str,
        arguments: tuple[Any, ...],
        kinds: Sequence[TensorType],
        *,
        cell: str,
        scope: str,
        attributes: Mapping[str, Any] | None = None,
        unique_id: str | None = None,
    ) -> tuple[TensorRef, ...]:
        """Add a backward operation and return what it makes.

        What depends on constants alone is a constant: MindSpore folds it while compiling. Equal tensors of one number
        within a cell are one.
        """
        wrapped = tuple(_wrap(argument) for argument in arguments)
        read = tensor_arguments(wrapped)
        if read and all(self.tensors[index].is_constant for index in read):
            return tuple(self.constant(kind) for kind in kinds)
        fill = (cell, wrapped) if primitive == "FillV2" and not read else None
        if fill in self._fills:
            return self._fills[fill]
        index = len(self.operations)
        outputs = range(len(self.tensors), len(self.tensors) + len(kinds))
        self.tensors.extend(Tensor(kind, index) for kind in kinds)
        self.operations.append(
            Operation(
                primitive=primitive,
                arguments=wrapped,
                outputs=tuple(outputs),
                attributes=attributes or {},
                cell=cell,
                phase=Phase.BACKWARD,
                scope=f"{BACKWARD_SCOPE}{scope}/{primitive}",
                unique_id=unique_id,
            )
        )
        made = tuple(TensorRef(output) for output in outputs)
        if fill is not None:
            self._fills[fill] = made
        return made


class Site:
    """One forward operation with the gradients of its outputs, as its rule sees it."""

    def __init__(self, tape: Tape, operation: Operation, gradients: Mapping[int, TensorRef], wanted: Set[int]) -> None:
        self._tape = tape
        self._operation = operation
        self._gradients = gradients
        self._wanted = wanted
        directory = operation.scope.rsplit("/", 1)[0]
        self._scope = f"{directory}/Grad_{operation.primitive}"

    @property
    def primitive(self) -> str:
        """Primitive of the forward operation."""
        return self._operation.primitive

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the forward operation."""
        return self._operation.arguments

    @property
    def outputs(self) -> tuple[TensorRef, ...]:
        """Tensors that the forward operation makes."""
        return tuple(TensorRef(output) for output in self._operation.outputs)

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes of the forward operation."""
        return self._operation.attributes

    @property
    def operands(self) -> tuple[TensorRef, ...]:
        """All tensors the forward operation reads, in order."""
        return tuple(TensorRef(index) for index in tensor_arguments(self._operation.arguments))

    def value(self, position: int, default: Any = None) -> Any:
        """Python value of the constant argument at a position; ``default`` where there is none."""
        if position >= len(self.arguments):
            return default
        found = constant_value(self.arguments[position])
        return default if found is None else found

    def needs(self, argument: Any) -> bool:
        """Whether the gradient of an argument is wanted."""
        return isinstance(argument, TensorRef) and argument.tensor in self._wanted

    def kind(self, reference: TensorRef) -> TensorType:
        """Type of a tensor."""
        return self._tape.kind(reference)

    def shape(self, reference: TensorRef) -> tuple[Any, ...]:
        """Shape of a tensor."""
        return self._tape.kind(reference).shape

    def has_gradient(self, output: int = 0) -> bool:
        """Whether anything adds to the gradient of an output."""
        return self._operation.outputs[output] in self._gradients

    def gradient(self, output: int = 0) -> TensorRef:
        """Gradient of an output; zeros, which MindSpore writes as a constant, where nothing adds to it."""
        index = self._operation.outputs[output]
        return (
            self._gradients[index] if index in self._gradients else self._tape.constant(self._tape.tensors[index].type)
        )

    def constant(self, kind: TensorType) -> TensorRef:
        """A tensor written into the graph."""
        return self._tape.constant(kind)

    def emit_many(
        self,
        primitive: str,
        arguments: tuple[Any, ...],
        kinds: Sequence[TensorType],
        keep_attributes: bool = False,
        attributes: Mapping[str, Any] | None = None,
    ) -> tuple[TensorRef, ...]:
        """Add a backward operation in the cell of the forward one.

        Args:
            primitive: its name in MindSpore's own gradient graph.
            arguments: :class:`TensorRef` for tensors; everything else is a constant.
            kinds: types of its outputs.
            keep_attributes: whether it has the attributes of the forward operation, as kernels with windows do.
            attributes: attributes of its own, which come before those.
        """
        return self._tape.append(
            primitive,
            arguments,
            kinds,
            cell=self._operation.cell,
            scope=self._scope,
            attributes={**(self._operation.attributes if keep_attributes else {}), **(attributes or {})},
            unique_id=self._operation.unique_id,
        )

    def emit(
        self, primitive: str, arguments: tuple[Any, ...], kind: TensorType, keep_attributes: bool = False
    ) -> TensorRef:
        """Like :meth:`emit_many` for one output."""
        return self.emit_many(primitive, arguments, (kind,), keep_attributes)[0]

    def like(self, primitive: str, arguments: tuple[Any, ...], model: TensorRef, dtype: str | None = None) -> TensorRef:
        """Emit an operation whose result has the shape of ``model``, and its element type unless one is given."""
        kind = self.kind(model)
        return self.emit(primitive, arguments, TensorType(kind.shape, dtype or kind.dtype))

    def shaped(self, source: TensorRef, shape: tuple[Any, ...]) -> TensorRef:
        """The same elements under another shape."""
        if self.shape(source) == shape:
            return source
        return self.emit("Reshape", (source, shape), TensorType(shape, self.kind(source).dtype))

    def reduced(self, gradient: TensorRef, target: TensorRef) -> TensorRef:
        """Sum a gradient over the axes along which forward broadcast ``target``."""
        shape, wanted = self.shape(gradient), self.shape(target)
        if shape == wanted:
            return gradient
        extra = len(shape) - len(wanted)
        axes = (*range(extra), *(extra + i for i, size in enumerate(wanted) if size == 1 and shape[extra + i] != 1))
        dtype = self.kind(gradient).dtype
        keep = extra == 0
        kept = tuple(1 if i in axes else size for i, size in enumerate(shape))
        summed = kept if keep else tuple(size for i, size in enumerate(shape) if i not in axes)
        total = self.emit("SumExt", (gradient, axes, keep, dtype), TensorType(summed, dtype)) if axes else gradient
        return self.shaped(total, wanted)


Rule = Callable[[Site], Iterable[Contribution]]
"""A derivative rule: emits operations at its site and gives what they add to the gradients of the operands."""


def _wrap(argument: Any) -> Any:
    if isinstance(argument, (TensorRef, Constant)):
        return argument
    if isinstance(argument, tuple) and tensor_arguments(argument):
        return tuple(_wrap(item) for item in argument)
    return Constant(argument)
