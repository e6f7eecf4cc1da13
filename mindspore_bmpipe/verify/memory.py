"""Peak memory of a compiled rank graph, by liveness of every tensor over the order of the graph.

Every call is followed into its function, so a tensor is freed after its last reader wherever that stands. Views, loads
of weights and updates in place take no memory of their own; weights, accumulated gradients and optimizer state are
counted apart, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspore_bmpipe.costs.rules import VIEWS
from mindspore_bmpipe.graph.mindir import BYTES_PER_ELEMENT, Function, Module, Node, TensorType
from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.verify.matching import ITEMS, TRANSPARENT, TUPLES
from mindspore_bmpipe.verify.rank_graph import RankGraph

_IN_PLACE = frozenset({"Assign", "AssignAdd", "AssignSub", "Adam", "AdamWeightDecay", "UpdateState", "Send"})
"""Operations whose result is one of their inputs, or nothing."""
_ALIASES = TRANSPARENT | VIEWS | _IN_PLACE


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory is in use."""

    activation_bytes: int
    """Bytes of all tensors alive while chunks run, weights and optimizer state left out."""
    update_bytes: int
    """The same after the last backward, while weights are updated."""
    during: Action | None
    """Action that runs; `None` between actions."""
    operation: str
    """Scope of the operation that runs."""
    largest: tuple[tuple[str, int, int], ...]
    """Scope, number and bytes of what takes most: one entry for each operation that made tensors alive at the peak."""


@dataclass(frozen=True)
class _Closure:
    function: str
    bound: tuple[Any, ...]


@dataclass
class _Step:
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    scope: str
    call: int


def parameter_bytes(module: Module) -> dict[str, int]:
    """Bytes of every parameter that the rank holds: weights, accumulated gradients, optimizer state."""
    return {name: _bytes(kind) for name, kind in module.parameters.items()}


def memory_peaks(rank: RankGraph) -> Peak:
    """Run the graph on sizes and find the peaks."""
    runner = _Runner(rank)
    runner.run()
    return runner.peak()


def _bytes(kind: TensorType) -> int:
    count = 1
    for size in kind.shape:
        count *= int(size)
    return count * BYTES_PER_ELEMENT.get(kind.dtype, 4)


class _Runner:
    def __init__(self, rank: RankGraph) -> None:
        self._rank = rank
        self._sizes: list[int] = []
        self._steps: list[_Step] = []
        self._call_at = {call.node: number for number, call in enumerate(rank.calls)}
        self._constants = {
            name: constant.value
            for function in (*rank.module.functions.values(), rank.module.entry)
            for name, constant in function.constants.items()
        }

    def run(self) -> None:
        entry = self._rank.module.entry
        self._run(entry, [None] * len(entry.inputs), -1, True)

    def peak(self) -> Peak:
        last: dict[int, int] = {}
        for number, step in enumerate(self._steps):
            for tensor in (*step.reads, *step.writes):
                last[tensor] = number
        last_of_chunks = max((number for number, step in enumerate(self._steps) if step.call >= 0), default=-1)
        alive = peak = update = 0
        best = 0
        for number, step in enumerate(self._steps):
            alive += sum(self._sizes[tensor] for tensor in step.writes)
            if number > last_of_chunks:
                update = max(update, alive)
            elif alive > peak:
                peak, best = alive, number
            alive -= sum(self._sizes[t] for t in {*step.reads, *step.writes} if last[t] == number)
        makers: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for step in self._steps[: best + 1]:
            for tensor in step.writes:
                if last[tensor] >= best:
                    makers[step.scope] += 1
                    sizes[step.scope] += self._sizes[tensor]
        calls = self._rank.calls
        at = self._steps[best] if self._steps else _Step((), (), "", -1)
        return Peak(
            activation_bytes=peak,
            update_bytes=update,
            during=calls[at.call].action if at.call >= 0 else None,
            operation=at.scope,
            largest=tuple((scope, makers[scope], size) for scope, size in sizes.most_common(40)),
        )

    def _run(self, function: Function, arguments: Sequence[Any], call: int, is_entry: bool = False) -> Any:
        values: dict[str, Any] = {}
        for (name, _), value in zip(function.inputs, arguments, strict=True):
            values[name] = value
        for index, node in enumerate(function.nodes):
            number = self._call_at.get(index, call) if is_entry else call
            values[node.output] = self._node(node, values, number)
        return values.get(function.output)

    def _node(self, node: Node, values: Mapping[str, Any], call: int) -> Any:
        operation = node.operation
        arguments = [self._value(name, values) for name in node.inputs]
        if operation in TUPLES:
            return tuple(arguments)
        if operation in ITEMS:
            index = self._constants.get(node.inputs[1])
            source = arguments[0]
            return source[index] if isinstance(source, tuple) and isinstance(index, int) else source
        if operation == "Partial":
            bound = arguments[0]
            assert isinstance(bound, _Closure)
            return _Closure(bound.function, (*bound.bound, *arguments[1:]))
        if node.is_call:
            target = self._value(operation, values)
            if isinstance(target, _Closure):
                inputs = (*target.bound, *arguments)
                return self._run(self._rank.module.functions[target.function], inputs, call)
            return None
        reads = tuple(dict.fromkeys(_tensors(arguments)))
        if operation in _ALIASES:
            if operation in _IN_PLACE:
                self._steps.append(_Step(reads, (), node.scope, call))
            return arguments[0] if arguments else None
        made: list[int] = []
        result = self._allocate(node.type, made)
        self._steps.append(_Step(reads, tuple(made), node.scope, call))
        return result

    def _value(self, name: str, values: Mapping[str, Any]) -> Any:
        if name in values:
            return values[name]
        plain = name.removeprefix("REF::")
        if plain in values:
            return values[plain]
        return _Closure(plain, ()) if plain in self._rank.module.functions else None

    def _allocate(self, kind: Any, made: list[int]) -> Any:
        if isinstance(kind, TensorType):
            self._sizes.append(_bytes(kind))
            made.append(len(self._sizes) - 1)
            return made[-1]
        if isinstance(kind, tuple):
            return tuple(self._allocate(item, made) for item in kind)
        return None


def _tensors(value: Any) -> list[int]:
    if isinstance(value, bool):
        return []
    if isinstance(value, int):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, _Closure):
        return []
    return []
