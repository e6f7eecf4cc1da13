"""Cells of operations whose scopes lie.

MindSpore parses a function that is not a cell's own ``construct`` once, so that all its uses carry the scope of the
first. Repair goes by data flow. An operation that alone reads a weight stands in the weight's cell. Every cell is
called once, so whatever lies on a path that leaves a cell cannot lie in that cell again; a scope that says so is a lie,
and with it the scopes of all operations of that primitive and scope. Operations whose scopes lie go where their tensors
cross the fewest cell borders. Where that does not decide (a chain of single operations between two cells), the
cell whose class is that of the first use wins.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from mindspore_bmpipe.graph.cell_graph import Operation, Tensor, read_tensors
from mindspore_bmpipe.graph.scopes import CONTAINERS, CellNames, place_of, scope_path, within

_PLACE_WEIGHT = 1.5
"""Border crossings that the place of the first use outweighs."""
_WEIGHTLESS_PLACE_WEIGHT = 2.0
"""The same for a cell without weights: entering and leaving it costs two crossings, and nothing else tells of it."""
_LARGEST_FAN_OUT = 64
"""Readers above which a tensor (a mask of all layers) says nothing about where one of them stands."""
_MOST_SWEEPS = 12


def repaired_cells(operations: Sequence[Operation], tensors: Sequence[Tensor], names: CellNames) -> list[str]:
    """Return the path of the cell of every operation of an exported graph."""
    flow = _flow(operations, tensors, names)
    lies = {key for index, key in enumerate(flow.keys) if flow.contradicts(index)}
    uses = Counter(flow.keys)
    while True:
        apart = {
            key
            for index, key in enumerate(flow.keys)
            if uses[key] > 1 and key not in lies and flow.is_apart(index, lies)
        }
        if not apart:
            break
        lies |= apart
    return _Placement(flow, lies, names).run()


@dataclass(frozen=True)
class _Flow:
    """Data flow between operations, and what it says about cells."""

    operations: Sequence[Operation]
    producers: tuple[int | None, ...]
    """Producer of every tensor."""
    readers: dict[int, list[int]]
    """Operations that read each tensor that some operation makes, or that is an input."""
    claims: tuple[str, ...]
    """Cell that the scope of each operation names."""
    keys: tuple[tuple[str, str], ...]
    """What may lie together: claim and primitive."""
    anchors: dict[int, str]
    """Operations that alone read a weight, and the cell of the weight."""
    before: tuple[int, ...]
    """For each operation, the anchors it depends on, as bits."""
    after: tuple[int, ...]
    """For each operation, the anchors that depend on it, as bits."""
    inside: dict[str, int]
    """Anchors in each cell and below, as bits."""
    beyond: dict[str, int]
    """Anchors outside of each cell that depend on one inside, as bits."""
    ahead: dict[str, int]
    """Anchors outside of each cell that one inside depends on, as bits."""
    children: dict[str, list[str]]
    """Cells with anchors, by parent."""
    called: frozenset[str]
    """Cells that are called, unlike lists of cells."""

    def contradicts(self, index: int) -> bool:
        """Whether data flow rules out the cell that the scope names."""
        if index in self.anchors:
            claim = self.claims[index]
            return not within(claim, self.anchors[index]) and bool(claim)
        return not self.allows(index, self.claims[index])

    def is_apart(self, index: int, lies: Set[tuple[str, str]]) -> bool:
        """Whether an operation reads nothing of the cell its scope names, and nothing there reads it.

        Neighbours whose scopes are known to lie are no evidence.
        """
        claim = self.claims[index]
        if claim not in self.inside or index in self.anchors:
            return False
        operation = self.operations[index]
        sources = (self.producers[tensor] for tensor in read_tensors(operation))
        around = [source for source in sources if source is not None]
        around.extend(reader for output in operation.outputs for reader in self.readers.get(output, ()))
        return bool(around) and not any(
            within(self.anchors.get(other, self.claims[other]), claim)
            for other in around
            if other in self.anchors or self.keys[other] not in lies
        )

    def allows(self, index: int, cell: str) -> bool:
        """Whether an operation may stand in a cell."""
        if not within(cell, self.enclosing(index)):
            return False
        for path in _upwards(cell):
            if path in self.inside and (self.before[index] & self.beyond[path] or self.after[index] & self.ahead[path]):
                return False
        return True

    def enclosing(self, index: int) -> str:
        """Innermost called cell that the operation must lie in: it has anchors on both sides of it."""
        found, cell = "", ""
        while True:
            inner = next(
                (
                    child
                    for child in self.children.get(cell, ())
                    if self.before[index] & self.inside[child] and self.after[index] & self.inside[child]
                ),
                None,
            )
            if inner is None:
                return found
            cell = inner
            if cell in self.called:
                found = cell


def _flow(operations: Sequence[Operation], tensors: Sequence[Tensor], names: CellNames) -> _Flow:
    claims = tuple(names.path(scope_path(operation.scope)) for operation in operations)
    anchors = _anchors(operations, tensors, names, claims)
    bits = {index: 1 << number for number, index in enumerate(anchors)}
    producers = tuple(tensor.producer for tensor in tensors)
    readers: dict[int, list[int]] = defaultdict(list)
    before = [0] * len(operations)
    after = [0] * len(operations)
    for index, operation in enumerate(operations):
        for tensor in dict.fromkeys(read_tensors(operation)):
            if tensors[tensor].parameter is None and not tensors[tensor].is_constant:
                readers[tensor].append(index)
            producer = producers[tensor]
            if producer is not None:
                before[index] |= before[producer] | bits.get(producer, 0)
    for index in range(len(operations) - 1, -1, -1):
        for output in operations[index].outputs:
            for reader in readers.get(output, ()):
                after[index] |= after[reader] | bits.get(reader, 0)
    inside: dict[str, int] = defaultdict(int)
    beyond: dict[str, int] = defaultdict(int)
    ahead: dict[str, int] = defaultdict(int)
    for index, path in anchors.items():
        for cell in _upwards(path):
            inside[cell] |= bits[index]
            beyond[cell] |= after[index]
            ahead[cell] |= before[index]
    children: dict[str, list[str]] = defaultdict(list)
    for cell, own in inside.items():
        beyond[cell] &= ~own
        ahead[cell] &= ~own
        children[cell.rpartition(".")[0]].append(cell)
    called = frozenset(path for path, kind in names.classes.items() if kind not in CONTAINERS)
    keys = tuple((claim, operation.primitive) for claim, operation in zip(claims, operations, strict=True))
    return _Flow(
        operations, producers, dict(readers), claims, keys, anchors, tuple(before), tuple(after), dict(inside),
        dict(beyond), dict(ahead), dict(children), called,
    )  # fmt: skip


def _anchors(
    operations: Sequence[Operation], tensors: Sequence[Tensor], names: CellNames, claims: Sequence[str]
) -> dict[int, str]:
    """Operations that alone read a weight. The reader of a weight that several read may stand anywhere."""
    reads: dict[str, list[int]] = defaultdict(list)
    for index, operation in enumerate(operations):
        for tensor in dict.fromkeys(read_tensors(operation)):
            parameter = tensors[tensor].parameter
            if parameter is not None:
                reads[parameter].append(index)
    anchors: dict[int, str] = {}
    for parameter, found in reads.items():
        if len(found) == 1:
            owner = names.owners[parameter]
            # A cell may hand its weight to a cell inside it.
            cell = claims[found[0]] if within(claims[found[0]], owner) else owner
            anchors.setdefault(found[0], cell)
    return anchors


class _Placement:
    """Moves operations between cells until no move saves a border crossing."""

    def __init__(self, flow: _Flow, lies: set[tuple[str, str]], names: CellNames) -> None:
        self._flow = flow
        self._names = names
        self._around: dict[str, frozenset[str]] = {}
        self._cells: list[str | None] = []
        self._open: list[int] = []
        for index, key in enumerate(flow.keys):
            if index in flow.anchors:
                self._cells.append(flow.anchors[index])
            elif key in lies:
                self._cells.append(None)
                self._open.append(index)
            else:
                self._cells.append(flow.claims[index])

    def run(self) -> list[str]:
        for sweep in range(_MOST_SWEEPS):
            order = reversed(self._open) if sweep % 2 == 0 else self._open
            if not self._sweep(order) and sweep > 1:
                break
        return [cell if cell is not None else claim for cell, claim in zip(self._cells, self._flow.claims, strict=True)]

    def _sweep(self, order: Iterable[int]) -> bool:
        changed = False
        for index in order:
            options = self._options(index)
            if not options:
                continue
            best = min(options, key=lambda cell: self._price(index, cell))
            changed |= best != self._cells[index]
            self._cells[index] = best
        return changed

    def _options(self, index: int) -> dict[str, None]:
        """Cells of the neighbours and what encloses them, and the same place as the claim's next to them."""
        flow = self._flow
        enclosing = flow.enclosing(index)
        claim = flow.claims[index]
        found: dict[str, None] = {}
        for cell in self._neighbours(index):
            for path in (*_upwards(cell), ""):
                found.setdefault(path)
            relocated = _relocated(claim, cell)
            if relocated is not None:
                found.setdefault(relocated)
        found.setdefault(claim)
        found.setdefault(enclosing)
        return {cell: None for cell in found if self._is_called(cell) and flow.allows(index, cell)}

    def _is_called(self, cell: str) -> bool:
        return self._names.classes.get(cell) not in CONTAINERS

    def _neighbours(self, index: int) -> Iterator[str]:
        flow = self._flow
        operation = flow.operations[index]
        for tensor in read_tensors(operation):
            producer = flow.producers[tensor]
            cell = self._cells[producer] if producer is not None else None
            if cell is not None:
                yield cell
        for output in operation.outputs:
            for reader in flow.readers.get(output, ())[:_LARGEST_FAN_OUT]:
                found = self._cells[reader]
                if found is not None:
                    yield found

    def _price(self, index: int, cell: str) -> tuple[float, int, int]:
        """Borders crossed, then how much the cell resembles the claim, then depth: shallow cells keep loose ends."""
        flow = self._flow
        operation = flow.operations[index]
        crossings: float = 0
        # Results of the network are read by its caller; by-products that nothing reads cross nothing.
        used = [output for output in operation.outputs if output in flow.readers] or operation.outputs[:1]
        for tensor in dict.fromkeys((*read_tensors(operation), *used)):
            if tensor in flow.readers or tensor in used:
                crossings += self._crossings(tensor, index, cell)
        claim = flow.claims[index]
        if claim and place_of(cell) != place_of(claim):
            crossings += _PLACE_WEIGHT if claim in flow.inside else _WEIGHTLESS_PLACE_WEIGHT
        return crossings, self._strangeness(cell, claim), cell.count(".") + bool(cell)

    def _strangeness(self, cell: str, claim: str) -> int:
        if cell == claim:
            return 0
        if place_of(cell) == place_of(claim):
            return 1
        kinds = self._names.classes
        return 2 if claim and kinds.get(cell, "") == kinds.get(claim) else 3

    def _crossings(self, tensor: int, index: int, cell: str) -> int:
        """Cells that a tensor leaves or enters if operation ``index`` stands in ``cell``."""
        flow = self._flow
        readers = flow.readers.get(tensor, [])
        if len(readers) > _LARGEST_FAN_OUT:
            return 0
        producer = flow.producers[tensor]
        made = cell if producer == index else "" if producer is None else self._cells[producer]
        ends = [cell if reader == index else self._cells[reader] for reader in readers] or [""]
        targets = [self._borders(end) for end in ends if end is not None]
        if made is None:
            # Where it comes from is not known yet; no closer than what its readers share.
            return len(frozenset().union(*targets) - frozenset.intersection(*targets))
        source = self._borders(made)
        left = frozenset().union(*(source - target for target in targets))
        entered = frozenset().union(*(target - source for target in targets))
        return len(left) + len(entered)

    def _borders(self, cell: str) -> frozenset[str]:
        """Called cells around an operation in ``cell``."""
        found = self._around.get(cell)
        if found is None:
            found = frozenset(path for path in _upwards(cell) if self._is_called(path))
            self._around[cell] = found
        return found


def _upwards(cell: str) -> Iterator[str]:
    """The cell and all that enclose it, but for the network."""
    while cell:
        yield cell
        cell = cell.rpartition(".")[0]


def _relocated(claim: str, neighbour: str) -> str | None:
    """The claimed cell in the list elements that a neighbour stands in."""
    ours, theirs = claim.split("."), neighbour.split(".")
    moved = list(ours)
    for depth, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        if own == other:
            continue
        if not (own.isdigit() and other.isdigit()):
            break
        moved[depth] = other
    return ".".join(moved) if moved != ours else None
