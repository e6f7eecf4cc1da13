"""The forward graph of one rank under construction: operations of the network, and what sharding adds to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspore_bmpipe.graph.cell_graph import Operation, Phase, Tensor, TensorRef, read_tensors
from mindspore_bmpipe.graph.mindir import Constant, TensorType
from mindspore_bmpipe.sharding.base import Placement, Shape
from mindspore_bmpipe.sharding.layout import Split, local_shape, merged
from mindspore_bmpipe.sharding.redistribute import Change

_MARK = "added_by_sharding"
"""Attribute of operations that the network does not have."""


class Tape:
    """Tensors and operations so far. Added operations stand in the cell of the one that needs them."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._tensors: list[Tensor] = []

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, with the operations that make them."""
        producers = {output: index for index, item in enumerate(self.operations) for output in item.outputs}
        return tuple(replace(tensor, producer=producers.get(n)) for n, tensor in enumerate(self._tensors))

    def kind(self, tensor: int) -> TensorType:
        """Type of a tensor."""
        return self._tensors[tensor].type

    def tensor(self, kind: TensorType, parameter: str | None = None, is_constant: bool = False) -> int:
        """Add a tensor."""
        self._tensors.append(Tensor(kind, None, parameter, is_constant))
        return len(self._tensors) - 1

    def emit(self, operation: Operation, local: Mapping[int, int], kinds: Sequence[TensorType]) -> tuple[int, ...]:
        """Add an operation of the network that reads shares: whole tensor -> share."""

        def changed(argument: Any) -> Any:
            if isinstance(argument, TensorRef):
                return TensorRef(local[argument.tensor])
            return tuple(map(changed, argument)) if isinstance(argument, tuple) else argument

        outputs = tuple(self.tensor(kind) for kind in kinds)
        arguments = tuple(changed(argument) for argument in operation.arguments)
        self.operations.append(replace(operation, arguments=arguments, outputs=outputs))
        return outputs

    def reshaped(self, tensor: int, shape: Shape, owner: Operation) -> int:
        """The same elements under another shape."""
        kind = self.kind(tensor)
        if kind.shape == shape:
            return tensor
        return self._add("Reshape", owner, (TensorRef(tensor), Constant(shape)), TensorType(shape, kind.dtype))

    def changed(self, tensor: int, change: Change, owner: Operation) -> int:
        """Gather and cut. Parts are gathered along the first axis, so those of another axis are laid along it then."""
        held = list(change.before)
        tensor = self.reshaped(tensor, local_shape(change.shape, change.before), owner)
        for step in change.steps:
            held[step.axis] = () if step.gathers else (step.cut,)
            if step.onto is not None:
                held[step.onto] = (step.cut,)
            kind = self.kind(tensor)
            result = TensorType(local_shape(change.shape, tuple(held)), kind.dtype)
            if not step.gathers:
                tensor = self._add("StridedSlice", owner, (TensorRef(tensor),), result)
            elif step.onto is not None:
                tensor = self._collective("AlltoAll", owner, tensor, result, step.cut)
            elif all(length == 1 for length in kind.shape[: step.axis]):
                tensor = self._collective("AllGather", owner, tensor, result, step.cut)
            else:
                size = step.cut.size
                joined = TensorType((kind.shape[0] * size, *kind.shape[1:]), kind.dtype)
                tensor = self._collective("AllGather", owner, tensor, joined, step.cut)
                split = (TensorRef(tensor), Constant(0), Constant(size))
                pieces = self._append("Split", owner, split, (kind,) * size)
                laid = (tuple(TensorRef(piece) for piece in pieces), Constant(step.axis))
                tensor = self._add("Concat", owner, laid, result)
        return tensor

    def summed(self, tensor: int, placement: Placement, owner: Operation) -> int:
        """Collectives that complete a result."""
        for cut in merged(placement.sums):
            kind = self.kind(tensor)
            if placement.scatters:
                rows = kind.shape[0]
                part = rows // cut.size if isinstance(rows, int) else rows / cut.size
                scattered = TensorType((part, *kind.shape[1:]), kind.dtype)
                tensor = self._collective("ReduceScatter", owner, tensor, scattered, cut)
                continue
            tensor = self._collective("AllReduce", owner, tensor, kind, cut)
            if placement.averages:
                count = self.tensor(TensorType((), kind.dtype), is_constant=True)
                tensor = self._add("RealDiv", owner, (TensorRef(tensor), TensorRef(count)), kind)
        return tensor

    def looked_up(self, operation: Operation, local: Mapping[int, int], kind: TensorType) -> int:
        """MindSpore's lookup in a part of the rows: ids of other ranks' rows give zeros."""
        table, ids = (local[number] for number in read_tensors(operation))
        places = self.kind(ids)
        offset, last = (self.tensor(TensorType((), places.dtype), is_constant=True) for _ in range(2))

        def add(primitive: str, *arguments: Any, result: TensorType = places) -> TensorRef:
            return TensorRef(self._add(primitive, operation, arguments, result))

        lower = add("ReLU", add("Sub", TensorRef(ids), TensorRef(offset)))
        own = add("Minimum", lower, TensorRef(last))
        rows = add("Gather", TensorRef(table), own, *operation.arguments[2:], result=kind)
        is_own = add("Equal", lower, own, result=TensorType(places.shape, "bool"))
        factor = add("Cast", is_own, result=TensorType(places.shape, kind.dtype))
        wide = add("ExpandDims", factor, Constant(-1), result=TensorType((*places.shape, 1), kind.dtype))
        return add("Mul", rows, wide, result=kind).tensor

    def _collective(self, primitive: str, owner: Operation, tensor: int, kind: TensorType, cut: Split) -> int:
        return self._append(primitive, owner, (TensorRef(tensor),), (kind,), {"group_rank_ids": cut.ranks})[0]

    def _add(self, primitive: str, owner: Operation, arguments: tuple[Any, ...], kind: TensorType) -> int:
        return self._append(primitive, owner, arguments, (kind,))[0]

    def _append(
        self,
        primitive: str,
        owner: Operation,
        arguments: tuple[Any, ...],
        kinds: Sequence[TensorType],
        attributes: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        directory = owner.scope.rsplit("/", 1)[0]
        outputs = tuple(self.tensor(kind) for kind in kinds)
        scope = f"{directory}/{primitive}"
        marked = {**(attributes or {}), _MARK: True}
        self.operations.append(Operation(primitive, arguments, outputs, marked, owner.cell, Phase.FORWARD, scope, None))
        return outputs


def is_added(operation: Operation) -> bool:
    """Whether sharding added a forward operation."""
    return operation.phase is Phase.FORWARD and _MARK in operation.attributes
