"""Which operation of the traced network each operation of a compiled chunk is.

Scopes cannot tell, they lie (docs/graphs.md). Both graphs come from one network, so an operation is recognised by what
it computes: its primitive, and what each of its tensors is, down to weights, inputs of the network and tensors received
from other stages. Constants and shapes do not take part, and views and copies are looked through.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspore_bmpipe.graph.cell_graph import EXCHANGES, CellGraph, Phase, TensorRef, is_inserted_exchange
from mindspore_bmpipe.graph.mindir import Function, Module, Node, TensorType
from mindspore_bmpipe.schedule.actions import FORWARD
from mindspore_bmpipe.verify.rank_graph import RankGraph, closure_functions

TRANSPARENT = frozenset(
    {"Load", "Depend", "TensorMove", "Identity", "Return", "return", "Reshape", "ExpandDims", "Squeeze", "StopGradient"}
)
"""Operations that hand on their first input: the compiler adds, joins and drops them freely."""
TUPLES = frozenset({"MakeTuple", "MakeList", "make_tuple", "make_list"})
"""Operations that only put values together."""
ITEMS = frozenset({"TupleGetItem", "ListGetItem", "tuple_getitem", "list_getitem"})
"""Operations that only take values apart."""
BOOKKEEPING = frozenset({"UpdateState", "Partial", "Assign", "AssignAdd", "AssignSub"})
"""Operations that compute nothing of the network."""
COLLECTIVES = frozenset(
    {"AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "AllSwap", "Broadcast", "MirrorOperator"}
)
"""Operations between ranks of a stage; what they hand on is the same value, whole or in shares."""
RESHARDING = frozenset({"Split", "Concat", "StridedSlice", "Slice", "VirtualDiv", "RealDiv"})
"""Operations that the compiler adds around collectives to cut and join shares."""
_CONSTANT: Hashable = ("constant",)
_NOTHING = -1
_MOST_ORDERS = 120


@dataclass(frozen=True)
class Identities:
    """What every forward operation of a traced network computes."""

    of_operation: Mapping[int, int]
    """Index of a forward operation -> its identity."""
    operations: Mapping[int, tuple[int, ...]]
    """Identity -> operations that compute it; several where cells compute the same."""
    of_tensor: Mapping[int, int]
    """Tensor -> identity of its value."""
    interned: dict[Hashable, int]
    """Description of a value -> identity."""


@dataclass(frozen=True)
class ChunkOperation:
    """One operation of a compiled chunk."""

    node: Node
    """The node."""
    operations: tuple[int, ...]
    """Traced operations that compute the same; empty if there is none."""
    is_backward: bool
    """Whether it stands in the backward function."""


@dataclass(frozen=True)
class MatchedBackward:
    """A backward function with its operations recognised."""

    operations: tuple[Node, ...]
    """All nodes that compute something."""
    recomputed: tuple[ChunkOperation, ...]
    """Those that repeat forward operations."""
    accumulated: frozenset[str]
    """Weights whose gradients it adds up."""
    exchanges: tuple[Node, ...]
    """Exchanges of shares between ranks that run again."""


@dataclass(frozen=True)
class MatchedChunk:
    """A compiled chunk with its operations recognised."""

    chunk: int
    """Chunk of the stage."""
    forward: tuple[ChunkOperation, ...]
    """Operations of the forward function."""
    backward: MatchedBackward
    """The whole backward."""
    parts: tuple[MatchedBackward, ...]
    """Where the schedule splits it: the part that makes gradients of inputs, and that of weights; else empty."""
    results: Any
    """Identity of what the forward function returns; a tuple where it returns several values."""


@dataclass(frozen=True)
class Arriving:
    """A value that a chunk may receive from another stage."""

    identity: int
    """What it is."""
    type: TensorType | None
    """Its type; `None` if ranks of a stage share tensors, so that the compiled type differs."""


def identities_of(graph: CellGraph) -> Identities:
    """Describe every forward operation of a traced network."""
    interned: dict[Hashable, int] = {}
    of_tensor: dict[int, int] = {}
    for position, given in enumerate(graph.inputs):
        of_tensor[given] = _intern(interned, ("input", position))
    for index, tensor in enumerate(graph.tensors):
        if tensor.parameter is not None:
            of_tensor[index] = _intern(interned, ("weight", tensor.parameter))
        elif tensor.is_constant:
            of_tensor[index] = _intern(interned, _CONSTANT)
    of_operation: dict[int, int] = {}
    found: dict[int, list[int]] = defaultdict(list)
    for index, operation in enumerate(graph.operations):
        if operation.phase is not Phase.FORWARD:
            continue
        values = [_argument(argument, of_tensor, interned) for argument in operation.arguments]
        if operation.primitive in TRANSPARENT and values:
            for output in operation.outputs:
                of_tensor[output] = values[0]
            continue
        if graph.sharding is not None and is_inserted_exchange(operation):
            # Shares of one value are one value; a whole compile exchanges them in other places than a cell alone.
            for output in operation.outputs:
                of_tensor[output] = _first(values, _intern(interned, _CONSTANT))
            continue
        identity = _intern(interned, (operation.primitive, *_significant(values, interned)))
        of_operation[index] = identity
        found[identity].append(index)
        for position, output in enumerate(operation.outputs):
            several = len(operation.outputs) > 1
            of_tensor[output] = _intern(interned, ("item", identity, position)) if several else identity
    return Identities(of_operation, {key: tuple(value) for key, value in found.items()}, of_tensor, interned)


def match_chunk(
    rank: RankGraph,
    chunk: int,
    identities: Identities,
    planned: Sequence[Arriving],
    others: Sequence[Arriving] = (),
    sharded: bool = False,
    before: Mapping[int, MatchedChunk] | None = None,
) -> MatchedChunk:
    """Recognise the operations of one chunk.

    Args:
        rank: compiled graph.
        chunk: chunk of the stage.
        identities: what the traced network computes.
        planned: what the chunk receives according to the plan.
        others: what it may receive instead, looked at where the planned leave operations unrecognised.
        sharded: whether ranks of a stage share tensors, so that the compiler adds collectives.
        before: chunks of this rank recognised so far; where a V turns, one chunk hands its results to the next.
    """
    inputs = [name for name, _ in rank.module.entry.inputs]
    call = next(call for call in rank.calls if call.action.kind == FORWARD and call.action.chunk == chunk)
    passed = _Arguments(rank, call.node, inputs)
    function = rank.module.functions[call.function]

    def described(labels: Mapping[int, int]) -> _Chunk:
        made = _Chunk(rank.module, identities, labels, sharded, before or {})
        made.run_forward(function, [made.leaf(passed.leaves[name]) for name in passed.names])
        return made

    choices = _choices(rank, passed.receives, planned)
    tried = itertools.islice(itertools.product(*choices.values()), _MOST_ORDERS)
    best = min((described(dict(zip(choices, chosen, strict=True))) for chosen in tried), key=_Chunk.missed)
    if best.missed():
        for receive, candidates in _choices(rank, passed.receives, [*planned, *others]).items():
            for identity in candidates:
                best = min(best, described({**best.received, receive: identity}), key=_Chunk.missed)
    whole, *parts = (
        best.run_backward(rank.module.functions[name], bound)
        for name, bound in closure_functions(rank.module, call.function)
    )
    return MatchedChunk(chunk, tuple(best.forward), whole, tuple(parts), best.results)


def _choices(rank: RankGraph, receives: Sequence[int], arriving: Sequence[Arriving]) -> dict[int, list[int]]:
    """What each Receive may bring: values of its type, or any if there is none."""
    found: dict[int, list[int]] = {}
    for receive in receives:
        kind = rank.module.entry.nodes[receive].type
        fitting = [item.identity for item in arriving if item.type == kind]
        found[receive] = fitting or [item.identity for item in arriving] or [_NOTHING]
    return found


def _intern(interned: dict[Hashable, int], description: Hashable) -> int:
    return interned.setdefault(description, len(interned))


def _argument(argument: Any, of_tensor: Mapping[int, int], interned: dict[Hashable, int]) -> Any:
    if isinstance(argument, TensorRef):
        return of_tensor.get(argument.tensor, _intern(interned, ("unknown", argument.tensor)))
    if isinstance(argument, tuple):
        return tuple(_argument(item, of_tensor, interned) for item in argument)
    return _intern(interned, _CONSTANT)


def _significant(values: Sequence[Any], interned: dict[Hashable, int]) -> tuple[int, ...]:
    """Identities of tensors among the values of arguments, flattened; the graphs pass constants in different ways."""
    constant = _intern(interned, _CONSTANT)
    flat: list[int] = []
    for value in values:
        if isinstance(value, tuple):
            flat.extend(_significant(value, interned))
        elif value is not None and value != constant:
            flat.append(value)
    return tuple(flat)


class _Arguments:
    """What a call in the entry function passes to a chunk."""

    def __init__(self, rank: RankGraph, call: int, inputs: Sequence[str]) -> None:
        nodes = rank.module.entry.nodes
        made = {node.output: (index, node) for index, node in enumerate(nodes)}
        self._chunk_at = {call.node: call.action.chunk for call in rank.calls if call.action.kind == FORWARD}
        self.names = nodes[call].inputs
        self.receives: list[int] = []
        self.leaves: dict[str, Hashable] = {}
        for name in self.names:
            leaf = self._leaf(rank.module, name, made, inputs)
            self.leaves[name] = leaf
            if isinstance(leaf, tuple) and leaf[0] == "receive" and leaf[1] not in self.receives:
                self.receives.append(int(str(leaf[1])))

    def _leaf(self, module: Module, name: str, made: Mapping[str, tuple[int, Node]], inputs: Sequence[str]) -> Hashable:
        item: int | None = None
        while True:
            if name in module.parameters:
                return ("weight", name)
            if name in inputs:
                return ("input", list(inputs).index(name))
            if name not in made:
                return _CONSTANT
            index, node = made[name]
            if node.operation == "Receive":
                return ("receive", index)
            if index in self._chunk_at:
                return ("result", self._chunk_at[index], item)
            if node.operation in BOOKKEEPING or not node.inputs:
                return _CONSTANT
            if node.operation in ITEMS:
                item = constant_value(module, module.entry, node.inputs[1])
            taken = item if node.operation in TUPLES and item is not None and item < len(node.inputs) else 0
            name = node.inputs[taken]


class _Chunk:
    """Runs the functions of a chunk on identities."""

    def __init__(
        self,
        module: Module,
        identities: Identities,
        received: Mapping[int, int],
        sharded: bool,
        before: Mapping[int, MatchedChunk],
    ) -> None:
        self._module = module
        self._before = before
        self._sharded = sharded
        self._identities = identities
        self.received = received
        self._values: dict[str, Any] = {}
        self.results: Any = None
        self.forward: list[ChunkOperation] = []
        self._backward: list[ChunkOperation] = []
        self._exchanges: list[Node] = []
        self._shares: set[tuple[str, str]] = set()

    def missed(self) -> int:
        """Number of forward operations that the traced network does not have."""
        return sum(not item.operations for item in self.forward)

    def leaf(self, description: Hashable) -> int:
        """Identity of a value that the entry function passes."""
        if isinstance(description, tuple) and description[0] == "result" and description[1] in self._before:
            _, chunk, item = description
            results = self._before[chunk].results
            result = results[item] if isinstance(results, tuple) and item is not None else results
            if isinstance(result, int):
                return result
        if isinstance(description, tuple) and description[0] == "receive":
            known = self.received.get(int(description[1]))
            if known is not None and known != _NOTHING:
                return known
        return _intern(self._identities.interned, description)

    def run_forward(self, function: Function, arguments: Sequence[int]) -> None:
        """Describe every operation of the forward function."""
        values = {name: value for (name, _), value in zip(function.inputs, arguments, strict=True)}
        for node in function.nodes:
            self._node(function, node, values, False)
        self._values = values
        self.results = values.get(function.output)

    def run_backward(self, function: Function, bound: Sequence[str]) -> MatchedBackward:
        """Describe every operation of a backward function; ``bound`` are its first arguments."""
        interned = self._identities.interned
        values: dict[str, Any] = {}
        for position, (name, _) in enumerate(function.inputs):
            if position < len(bound):
                values[name] = self._values.get(bound[position], _intern(interned, _CONSTANT))
            else:
                values[name] = _intern(interned, ("gradient", position - len(bound)))
        self._backward, self._exchanges = [], []
        accumulated: set[str] = set()
        for node in function.nodes:
            self._node(function, node, values, True)
            if node.operation == "AssignAdd":
                target = values.get(node.inputs[0])
                name = str(next((d[1] for d, i in interned.items() if i == target and isinstance(d, tuple)), ""))
                accumulated.add(name.removeprefix("accu_grads."))
        return MatchedBackward(
            operations=tuple(item.node for item in self._backward),
            recomputed=tuple(item for item in self._backward if is_repeated(item.node)),
            accumulated=frozenset(accumulated),
            exchanges=tuple(self._exchanges),
        )

    def _node(self, function: Function, node: Node, values: dict[str, Any], is_backward: bool) -> None:
        interned = self._identities.interned
        constant = _intern(interned, _CONSTANT)
        arguments = [values.get(name, constant) for name in node.inputs]
        if node.operation in TUPLES:
            values[node.output] = tuple(arguments)
        elif node.operation in ITEMS:
            values[node.output] = self._item(function, node, arguments)
        elif node.operation in TRANSPARENT:
            values[node.output] = arguments[0] if arguments else constant
        elif node.operation in BOOKKEEPING or node.is_call:
            values[node.output] = constant
        else:
            identity = _intern(interned, (node.operation, *_significant(arguments, interned)))
            values[node.output] = identity
            matches = self._identities.operations.get(identity, ())
            if self._sharded and not matches and node.operation in COLLECTIVES | RESHARDING:
                values[node.output] = _first(arguments, constant)
                self._shares.add((function.name, node.output))
                if is_backward and is_repeated(node) and node.operation in EXCHANGES:
                    self._exchanges.append(node)
                return
            (self._backward if is_backward else self.forward).append(ChunkOperation(node, matches, is_backward))

    def _item(self, function: Function, node: Node, arguments: Sequence[Any]) -> Any:
        index = constant_value(self._module, function, node.inputs[1])
        source = arguments[0]
        if (function.name, node.inputs[0]) in self._shares:
            return source
        if isinstance(source, tuple):
            return source[index] if isinstance(index, int) else source
        return _intern(self._identities.interned, ("item", source, index))


def constant_value(module: Module, function: Function, name: str) -> Any:
    """Value of a constant read in a function; `None` if there is none."""
    for place in (function, *module.functions.values(), module.entry):
        if name in place.constants:
            return place.constants[name].value
    return None


def _first(arguments: Sequence[Any], constant: int) -> Any:
    """The first value that is not a constant."""
    for argument in arguments:
        value = _first(argument, constant) if isinstance(argument, tuple) else argument
        if value != constant:
            return value
    return constant


def is_repeated(node: Node) -> bool:
    """Whether the compiler made a node by repeating a forward operation for recomputation."""
    return bool(node.attributes.get("duplicated"))
