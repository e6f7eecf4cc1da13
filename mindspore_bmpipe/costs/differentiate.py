"""Backward operations of a graph that has forward only, from one rule per primitive.

A file that a user exported holds no gradients. The rules emit what MindSpore's own gradient emits; what backward then
reads of forward is what a pipeline stage keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mindspore_bmpipe.costs.derivatives import WITHOUT_GRADIENT, Rule, Site, Tape, rule_of
from mindspore_bmpipe.costs.derivatives.base import Contribution
from mindspore_bmpipe.errors import InputError, UnknownPrimitiveError
from mindspore_bmpipe.graph.cell_graph import CellGraph, Operation, Tensor, TensorRef, read_tensors, writes
from mindspore_bmpipe.graph.mindir import TensorType

_DIFFERENTIABLE_TYPES = frozenset({"float16", "bfloat16", "float32", "float64", "complex64", "complex128"})


def differentiate(graph: CellGraph, assume_elementwise: bool = False) -> CellGraph:
    """Append the backward operations of a forward graph.

    Gradients are derived towards trainable parameters only, in reverse order of forward. Each backward operation
    stands in the cell of its forward operation; the sum of several contributions stands in the innermost cell that
    holds all their readers.

    Args:
        graph: a graph without backward operations; its results are the tensors that nothing reads.
        assume_elementwise: whether a primitive without a rule is taken to keep all it reads and makes, and to need one
            backward operation per gradient; a note says so.

    Raises:
        InputError: the graph has backward operations already, or no trainable weight reaches its results.
        UnknownPrimitiveError: primitives on the way to trainable weights have no rule; all of them are named.
    """
    if graph.has_backward:
        raise InputError(f"{graph.name}: has backward operations already; differentiate forward graphs only")
    wanted = _towards_weights(graph)
    results = _results(graph, wanted)
    if not results:
        raise InputError(
            f"{graph.name}: no trainable weight reaches its result; export the network whose call returns the loss"
        )
    active = _active(graph, wanted, results)
    unknown = Counter(
        graph.operations[index].primitive for index in active if rule_of(graph.operations[index].primitive) is None
    )
    if unknown and not assume_elementwise:
        raise _unknown_primitives(graph.name, unknown)
    backward = _Backward(graph, wanted)
    for tensor in results:
        backward.seed(tensor)
    for index in reversed(active):
        backward.run(graph.operations[index])
    operations, tensors = backward.finish()
    notes = [
        f"{name} ({count} times) has no derivative rule: taken to keep all it reads and makes"
        for name, count in sorted(unknown.items())
    ]
    return replace(
        graph,
        operations=operations,
        tensors=tensors,
        notes=(*graph.notes, *notes),
        has_backward=True,
    )


def _towards_weights(graph: CellGraph) -> set[int]:
    """Tensors that depend on a trainable weight in a way that gradients pass."""
    trainable = {name for name, info in graph.parameters.items() if info.trainable}
    kinds = [tensor.type.dtype in _DIFFERENTIABLE_TYPES for tensor in graph.tensors]
    wanted = {index for index, tensor in enumerate(graph.tensors) if tensor.parameter in trainable and kinds[index]}
    for operation in graph.operations:
        operands = wanted.intersection(read_tensors(operation))
        if operation.primitive in WITHOUT_GRADIENT or not operands:
            continue
        # MindSpore's gradients pass integers that were cast from other numbers, but not places that kernels return.
        if operation.primitive == "Cast":
            wanted.update(operation.outputs)
        elif any(kinds[operand] for operand in operands):
            wanted.update(output for output in operation.outputs if kinds[output])
        elif rule_of(operation.primitive) is not None:
            wanted.update(operation.outputs)
    return wanted


def _results(graph: CellGraph, wanted: set[int]) -> list[int]:
    """First wanted output of every operation whose outputs nothing reads: further outputs are kernels' by-products."""
    read = {tensor for operation in graph.operations for tensor in read_tensors(operation)}
    results: list[int] = []
    for operation in graph.operations:
        if not writes(operation.primitive) and read.isdisjoint(operation.outputs):
            results.extend([output for output in operation.outputs if output in wanted][:1])
    return results


def _active(graph: CellGraph, wanted: set[int], results: Sequence[int]) -> list[int]:
    """Operations on a way from trainable weights to the results, in forward order."""
    reached = set(results)
    active: list[int] = []
    for index in range(len(graph.operations) - 1, -1, -1):
        operation = graph.operations[index]
        if reached.isdisjoint(operation.outputs):
            continue
        operands = [tensor for tensor in read_tensors(operation) if tensor in wanted]
        if operands:
            reached.update(operands)
            active.append(index)
    active.reverse()
    return active


def _unknown_primitives(name: str, counts: Counter[str]) -> UnknownPrimitiveError:
    listed = ", ".join(f"{primitive} ({count} times)" for primitive, count in sorted(counts.items()))
    return UnknownPrimitiveError(
        f"{name}: no derivative rule for {listed}; trace the network itself instead of an exported file, add a rule "
        "under costs/derivatives, or accept that they keep all they read and make with --assume-elementwise "
        "(assume_elementwise=True), which the plan records",
        dict(counts),
    )


def _keep_everything(site: Site) -> list[Contribution]:
    """Rule of unknown primitives: one backward operation per gradient, reading everything that forward touched."""
    gradients = tuple(site.gradient(number) for number in range(len(site.outputs)) if site.has_gradient(number))
    found: list[Contribution] = []
    for operand in dict.fromkeys(site.operands):
        if site.needs(operand):
            arguments = (*gradients, *site.operands, *site.outputs)
            found.append((operand, site.like(f"{site.primitive}Grad", arguments, operand)))
    return found


class _Backward:
    """Gradients collected so far, by forward tensor."""

    def __init__(self, graph: CellGraph, wanted: set[int]) -> None:
        self.tape = Tape(graph.tensors, graph.operations)
        self._graph = graph
        self._wanted = wanted
        self._parts: dict[int, list[tuple[TensorRef, Operation]]] = {}

    def seed(self, tensor: int) -> None:
        """Start from a result: its gradient is a constant of ones."""
        operation = self._graph.operations[self._graph.tensors[tensor].producer or 0]
        kind = self._graph.tensors[tensor].type
        self._parts.setdefault(tensor, []).append((self.tape.constant(TensorType(kind.shape, kind.dtype)), operation))

    def run(self, operation: Operation) -> None:
        """Apply the rule of one operation; all readers of its outputs have been run."""
        gradients = {output: self._sum(output) for output in operation.outputs if output in self._parts}
        if not gradients:
            return
        rule: Rule = rule_of(operation.primitive) or _keep_everything
        for target, gradient in rule(Site(self.tape, operation, gradients, self._wanted)):
            self._parts.setdefault(target.tensor, []).append((gradient, operation))

    def finish(self) -> tuple[tuple[Operation, ...], tuple[Tensor, ...]]:
        """Sum what remains, the gradients of weights, and drop the backward operations that none of them needs."""
        live = {self._sum(tensor).tensor for tensor in list(self._parts)}
        count = len(self._graph.operations)
        kept: list[Operation] = []
        for operation in reversed(self.tape.operations[count:]):
            if not live.isdisjoint(operation.outputs):
                live.update(read_tensors(operation))
                kept.append(operation)
        operations = (*self._graph.operations, *reversed(kept))
        producers = {output: index for index, operation in enumerate(operations) for output in operation.outputs}
        tensors = tuple(
            replace(tensor, producer=producers.get(index)) for index, tensor in enumerate(self.tape.tensors)
        )
        return operations, tensors

    def _sum(self, tensor: int) -> TensorRef:
        parts = self._parts.pop(tensor)
        if len(parts) == 1:
            return parts[0][0]
        return self._sum_inside_out(self.tape.tensors[tensor].type, parts)

    def _sum_inside_out(self, kind: TensorType, parts: Sequence[tuple[TensorRef, Operation]]) -> TensorRef:
        """Each cell adds up what its own operations give before its parent does, as cells compiled alone must."""
        cell = common_cell([reader.cell for _, reader in parts])
        groups: dict[str, list[tuple[TensorRef, Operation]]] = {}
        for number, (gradient, reader) in enumerate(parts):
            below = reader.cell[len(cell) :].lstrip(".")
            groups.setdefault(below.split(".")[0] if below else f"own {number}", []).append((gradient, reader))
        gradients = tuple(
            group[0][0] if len(group) == 1 else self._sum_inside_out(kind, group) for group in groups.values()
        )
        scope = parts[0][1].scope.rsplit("/", 1)[0]
        return self.tape.append("AddN", (gradients,), (kind,), cell=cell, scope=scope)[0]


def common_cell(paths: Sequence[str]) -> str:
    """Path of the innermost cell that holds all given ones."""
    common = paths[0].split(".") if paths[0] else []
    for path in paths[1:]:
        parts = path.split(".") if path else []
        length = 0
        while length < min(len(common), len(parts)) and common[length] == parts[length]:
            length += 1
        common = common[:length]
    return ".".join(common)
