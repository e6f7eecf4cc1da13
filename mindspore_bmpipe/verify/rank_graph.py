"""What a compiled rank runs: its actions and transfers in order, read from the optimised graph.

Every chunk is a forward function, called once for each micro-batch. It returns its results and closures over what its
backward reads; calling a closure is that micro-batch's backward. Zero-bubble schedules return three closures: the whole
backward, the part that makes the gradients of inputs, and the part that makes those of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.mindir import OPAQUE, Constant, Module, Node, TensorType
from mindspore_bmpipe.schedule.actions import BACKWARD, FORWARD, WEIGHT, WHOLE, Action

FORWARD_MARK = "▸"
BACKWARD_MARK = "◂"
_KINDS_OF_CLOSURES = {1: (BACKWARD,), 3: (WHOLE, BACKWARD, WEIGHT)}
_FIRST_INPUT = frozenset({"Load", "Depend", "TensorMove", "Return", "return", "Identity"})
_TUPLES = frozenset({"MakeTuple", "MakeList"})
_ITEMS = frozenset({"TupleGetItem", "ListGetItem"})


@dataclass(frozen=True)
class ChunkCall:
    """One call of a chunk's forward or backward function."""

    action: Action
    """Which action of the schedule it is."""
    sequence_chunk: int
    """Part of the sequence it works on; 0 unless the schedule splits sequences."""
    function: str
    """Name of the function called."""
    node: int
    """Index among the nodes of the entry function."""


@dataclass(frozen=True)
class Transfer:
    """One message to or from another rank."""

    sends: bool
    """Whether this rank is the sender."""
    peer: int
    """The other rank."""
    tag: int
    """Number that pairs a Send with its Receive."""
    type: TensorType
    """What is sent."""
    action: Action | None
    """The action that made it (sent) or the first that reads it (received); `None` if neither is an action."""
    node: int
    """Index among the nodes of the entry function."""


@dataclass(frozen=True)
class RankGraph:
    """The optimised training step of one rank."""

    module: Module
    """All functions."""
    calls: tuple[ChunkCall, ...]
    """Calls of chunks in the order of the graph."""
    transfers: tuple[Transfer, ...]
    """Messages in the order of the graph."""
    forward: Mapping[int, str]
    """Chunk -> name of its forward function."""
    is_ordered: bool
    """Whether each call depends on the one before it, so that the order is the only one possible."""


@dataclass(frozen=True)
class _Made:
    """A value that comes out of a call of a chunk."""

    call: int
    item: int | None


def read_rank_graph(module: Module) -> RankGraph:
    """Find actions and transfers in a compiled graph.

    Raises:
        InputError: the graph has no chunk functions, or their calls do not carry micro-batch and chunk.
    """
    nodes = module.entry.nodes
    position = {node.output: index for index, node in enumerate(nodes)}
    made: dict[str, Any] = {}
    calls: list[ChunkCall] = []
    transfers: list[Transfer] = []
    closures: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if node.is_call:
            call = _call(module, node, index, made, calls, closures)
            if call is not None:
                made[node.output] = _Made(len(calls), None)
                calls.append(call)
        elif node.operation in _ITEMS:
            made[node.output] = _item(module, node, made)
        elif node.operation in _TUPLES:
            made[node.output] = tuple(made.get(name) for name in node.inputs)
        elif node.operation in _FIRST_INPUT:
            made[node.output] = made.get(node.inputs[0])
        elif node.operation in ("Send", "Receive"):
            transfers.append(_transfer(node, index, made, calls))
    if not calls:
        raise InputError("the compiled graph calls no chunk of the network; the network was not compiled as one cell")
    forward = {call.action.chunk: call.function for call in calls if call.action.kind == FORWARD}
    read = _first_readers(nodes, calls, transfers)
    return RankGraph(
        module=module,
        calls=tuple(calls),
        transfers=tuple(
            transfer if transfer.sends else Transfer(**{**vars(transfer), "action": read.get(transfer.node)})
            for transfer in transfers
        ),
        forward=forward,
        is_ordered=_is_ordered(nodes, position, [call.node for call in calls]),
    )


def compiled_order(graph: RankGraph) -> tuple[Action, ...]:
    """Actions in the order of the graph."""
    return tuple(call.action for call in graph.calls)


def closure_functions(module: Module, forward: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Backward functions that a forward function returns, each with the names of the values bound to it."""
    function = module.functions[forward]
    by_output = {node.output: node for node in function.nodes}
    returned = by_output[function.output]
    found = []
    for name in returned.inputs if returned.operation in _TUPLES else ():
        node = by_output.get(name)
        if node is not None and node.operation == "Partial":
            found.append((node.inputs[0].removeprefix("REF::"), node.inputs[1:]))
        elif node is None and name.removeprefix("REF::") in module.functions:
            found.append((name.removeprefix("REF::"), ()))
    return tuple(found)


def _call(
    module: Module,
    node: Node,
    index: int,
    made: Mapping[str, Any],
    calls: Sequence[ChunkCall],
    closures: dict[str, int],
) -> ChunkCall | None:
    sequence = _integer(node.attributes.get("seq_chunk")) or 0
    if node.operation in module.functions:
        if FORWARD_MARK not in node.operation:
            return None
        micro, chunk = (_integer(node.attributes.get(name)) for name in ("micro", "chunk"))
        if micro is None or chunk is None:
            raise InputError(f"{node.scope}: a call of {node.operation} says neither micro-batch nor chunk")
        return ChunkCall(Action(FORWARD, chunk, micro), sequence, node.operation, index)
    target = made.get(node.operation)
    if not isinstance(target, _Made) or target.item is None:
        return None
    source = calls[target.call]
    returned = closure_functions(module, source.function)
    outputs = _returned(module, source.function)
    number = target.item - (outputs - len(returned))
    kinds = _KINDS_OF_CLOSURES.get(len(returned))
    if source.action.kind != FORWARD or kinds is None or not 0 <= number < len(returned):
        raise InputError(f"{node.scope}: calls a closure of {source.function} that no known schedule has")
    return ChunkCall(source.action._replace(kind=kinds[number]), source.sequence_chunk, returned[number][0], index)


def _returned(module: Module, name: str) -> int:
    function = module.functions[name]
    node = next(node for node in function.nodes if node.output == function.output)
    return len(node.inputs)


def _item(module: Module, node: Node, made: Mapping[str, Any]) -> Any:
    source, index = made.get(node.inputs[0]), _constant(module, node.inputs[1])
    if isinstance(source, tuple) and isinstance(index, int):
        return source[index]
    if isinstance(source, _Made) and source.item is None and isinstance(index, int):
        return _Made(source.call, index)
    return source if isinstance(source, _Made) else None


def _constant(module: Module, name: str) -> Any:
    for function in (module.entry, *module.functions.values()):
        constant = function.constants.get(name)
        if isinstance(constant, Constant):
            return constant.value
    return None


def _transfer(node: Node, index: int, made: Mapping[str, Any], calls: Sequence[ChunkCall]) -> Transfer:
    sends = node.operation == "Send"
    source = made.get(node.inputs[0]) if sends and node.inputs else None
    peer = _peer(node, "dst_global_rank" if sends else "src_global_rank", "dest_rank" if sends else "src_rank")
    tag = _integer(node.attributes.get("sr_tag"))
    return Transfer(
        sends=sends,
        peer=peer,
        tag=-1 if tag is None else tag,
        type=node.type if isinstance(node.type, TensorType) else TensorType((), "float32"),
        action=calls[source.call].action if isinstance(source, _Made) else None,
        node=index,
    )


def _peer(node: Node, in_cluster: str, in_group: str) -> int:
    """Rank of the other side in the whole cluster; -1 if the node does not say."""
    rank = _integer(node.attributes.get(in_cluster))
    if rank is not None:
        return rank
    place = _integer(node.attributes.get(in_group))
    members = node.attributes.get("group_rank_ids")
    if place is not None and isinstance(members, tuple) and place < len(members):
        return int(members[place])
    return -1 if place is None else place


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value is not OPAQUE else None


def _first_readers(
    nodes: Sequence[Node], calls: Sequence[ChunkCall], transfers: Sequence[Transfer]
) -> dict[int, Action]:
    """Node of each Receive -> the first action that reads its data; an order without data, as in Depend, is no read."""
    action = {call.node: call.action for call in calls}
    source: dict[str, set[int]] = {}
    found: dict[int, Action] = {}
    received = {transfer.node for transfer in transfers if not transfer.sends}
    for index, node in enumerate(nodes):
        data = node.inputs[:1] if node.operation in _FIRST_INPUT else node.inputs
        behind: set[int] = set()
        for name in data:
            behind |= source.get(name, set())
        if index in received:
            behind = {index}
        elif index in action:
            for receive in behind:
                found.setdefault(receive, action[index])
            behind = set()
        elif node.operation in ("Send", "UpdateState"):
            behind = set()
        if behind:
            source[node.output] = behind
    return found


def _is_ordered(nodes: Sequence[Node], position: Mapping[str, int], marked: Sequence[int]) -> bool:
    """Whether each marked node depends on the marked node before it, directly or through others."""
    latest: list[int] = []
    rank = {index: number for number, index in enumerate(marked)}
    ordered = True
    for index, node in enumerate(nodes):
        # In a chain, depending on the latest marked node means depending on all before it.
        reached = max(
            (latest[position[name]] for name in (*node.inputs, node.operation) if name in position), default=-1
        )
        number = rank.get(index)
        if number is not None:
            ordered &= reached == number - 1
            reached = number
        latest.append(reached)
    return ordered
