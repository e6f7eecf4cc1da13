"""Units: the cells that are never cut across stages, in execution order, with the operations of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import CellGraph, CellInfo, Phase, read_tensors


@dataclass(frozen=True)
class Unit:
    """One unit of a graph."""

    name: str
    """Path of its first cell, or ``network`` if the network is one unit."""
    cells: tuple[str, ...]
    """Paths of its cells; together they hold every cell of the unit."""
    forward: tuple[int, ...]
    """Indices of its forward operations, in order."""
    backward: tuple[int, ...]
    """Indices of its backward operations, in order; empty where the graph has none."""
    parameters: tuple[str, ...]
    """Names of the weights that its operations read or its cells hold."""


@dataclass(frozen=True)
class UnitSplit:
    """All units of a graph."""

    units: tuple[Unit, ...]
    """In execution order."""
    shared_parameters: dict[str, tuple[int, ...]]
    """Weights that more than one unit reads (tied embeddings), with the indices of these units."""
    notes: tuple[str, ...]
    """Units that had to be joined, and why."""

    def owner(self, name: str, unit: int) -> int:
        """The unit whose stage holds a weight that ``unit`` reads: the first of those that read it."""
        return min(self.shared_parameters.get(name, (unit,)))


def split_units(graph: CellGraph, units: Sequence[str] | None = None) -> UnitSplit:
    """Find the units of ``graph``.

    Repeated cells of a ``CellList`` or ``SequentialCell`` are one unit each; what lies before and after is split at
    the borders of the cells that hold them. A repeated cell is split further only where it holds a chain of repeated
    cells that themselves have several layers (as the stages of a hierarchical vision network do).

    Args:
        graph: network to split.
        units: paths of cells to use as units instead. Cells outside all of them join the unit before.

    Raises:
        InputError: a named unit does not exist, lies inside another, or does nothing.
    """
    tree = _Tree(graph.cells)
    roots = tree.automatic_units() if units is None else _named_units(graph, units)
    roots = roots or [""]
    owner = _owners(graph, roots)
    operation_units = _assign_operations(graph, owner, roots)
    order, merged, notes = _execution_order(graph, roots, operation_units)
    return _build(graph, tree, roots, operation_units, order, merged, notes)


class _Tree:
    """Cell tree with children by path."""

    def __init__(self, cells: Sequence[CellInfo]) -> None:
        self.by_path = {cell.path: cell for cell in cells}
        self.children: dict[str, list[str]] = defaultdict(list)
        for cell in cells:
            if cell.path:
                self.children[self.parent(cell.path)].append(cell.path)

    def parent(self, path: str) -> str:
        """Closest enclosing cell that is in the tree."""
        while path:
            path = path.rpartition(".")[0]
            if path in self.by_path:
                return path
        return ""

    def automatic_units(self) -> list[str]:
        return self._expand("", False)

    def _expand(self, path: str, inside_repeated: bool) -> list[str]:
        """Units below ``path``, which is itself expanded."""
        found: list[str] = []
        repeated = self._is_repeated(path)
        for child in self.children[path]:
            inside = inside_repeated or repeated
            if self._holds_chain(child, composite_only=inside):
                found.extend(self._expand(child, inside))
            else:
                found.append(child)
        return found

    def _is_repeated(self, path: str) -> bool:
        """Whether the children of ``path`` are numbered elements with at least two of one class."""
        children = self.children[path]
        if len(children) < 2 or not all(child.rpartition(".")[2].isdigit() for child in children):
            return False
        classes = [self.by_path[child].class_name for child in children if self.by_path[child].parameters]
        return any(classes.count(name) >= 2 for name in set(classes))

    def _holds_chain(self, path: str, composite_only: bool) -> bool:
        """Whether ``path`` is, or holds, a list of repeated cells worth splitting."""
        if self._is_repeated(path):
            return not composite_only or any(self._is_composite(child) for child in self.children[path])
        if not composite_only and self.by_path[path].is_container and self.children[path]:
            return True  # never called itself, so MindSpore would not pass a stage on to what it lists
        if composite_only and not self.by_path[path].is_container and self._weighted_leaves(path) < 2:
            return False
        return any(self._holds_chain(child, composite_only) for child in self.children[path])

    def _is_composite(self, path: str) -> bool:
        return self._weighted_leaves(path) >= 2

    def _weighted_leaves(self, path: str) -> int:
        if not self.by_path[path].parameters:
            return 0
        below = [child for child in self.children[path] if self.by_path[child].parameters]
        return sum(self._weighted_leaves(child) for child in below) if below else 1


def _named_units(graph: CellGraph, units: Sequence[str]) -> list[str]:
    known = {cell.path for cell in graph.cells}
    missing = [path for path in units if path not in known]
    if missing:
        raise InputError(
            f"units: no cell named {', '.join(missing)}; the network's cells are listed by 'bmpipe explain'"
        )
    for path in units:
        for other in units:
            if path != other and path.startswith(other + "."):
                raise InputError(f"units: {path} lies inside {other}; name one of the two")
    if len(set(units)) != len(units):
        raise InputError("units: a cell is named twice")
    return list(units)


def _owners(graph: CellGraph, roots: Sequence[str]) -> dict[str, int]:
    """Unit index of every cell that lies in a unit."""
    index = {path: position for position, path in enumerate(roots)}
    owner: dict[str, int] = {}
    for cell in graph.cells:
        path = cell.path
        while True:
            if path in index:
                owner[cell.path] = index[path]
                break
            if not path:
                break
            path = path.rpartition(".")[0]
    return owner


def _assign_operations(graph: CellGraph, owner: dict[str, int], roots: Sequence[str]) -> list[int]:
    """Unit of every operation; those of no unit's cell go where the latest of their data is made, as MindSpore does."""
    count = len(roots)
    units: list[int | None] = [owner.get(operation.cell) for operation in graph.operations]
    made_in: dict[int, int] = {}
    linked: dict[tuple[str, str], int] = {}
    first = _first_operation(units, count)
    rank = {unit: position for position, unit in enumerate(sorted(range(count), key=lambda item: first[item]))}

    consumers: dict[int, list[int]] = defaultdict(list)
    for index, operation in enumerate(graph.operations):
        for tensor in read_tensors(operation):
            consumers[tensor].append(index)

    for index, operation in enumerate(graph.operations):
        if operation.phase is Phase.FORWARD:
            if units[index] is None:
                sources = [made_in[tensor] for tensor in read_tensors(operation) if tensor in made_in]
                if sources:
                    units[index] = max(sources, key=lambda item: rank[item])
            unit = units[index]
            if unit is not None:
                made_in.update(dict.fromkeys(operation.outputs, unit))
    # Operations before the first unit (casts of inputs, tables) belong to the first unit that reads them.
    for index in reversed(range(len(graph.operations))):
        operation = graph.operations[index]
        if units[index] is None and operation.phase is Phase.FORWARD:
            readers = [
                units[reader]
                for output in operation.outputs
                for reader in consumers[output]
                if units[reader] is not None and graph.operations[reader].phase is Phase.FORWARD
            ]
            units[index] = min((unit for unit in readers if unit is not None), key=lambda item: rank[item], default=0)
    for index, operation in enumerate(graph.operations):
        if operation.phase is Phase.FORWARD and operation.unique_id is not None and operation.cell not in owner:
            linked[operation.cell, operation.unique_id] = units[index] or 0
    for index, operation in enumerate(graph.operations):
        if operation.phase is Phase.BACKWARD:
            if units[index] is None and operation.unique_id is not None:
                units[index] = linked.get((operation.cell, operation.unique_id))
            if units[index] is None:
                sources = [made_in[tensor] for tensor in read_tensors(operation) if tensor in made_in]
                units[index] = min(sources, key=lambda item: rank[item], default=None)
            unit = units[index]
            if unit is not None:
                made_in.update(dict.fromkeys(operation.outputs, unit))
    last = max(range(count), key=lambda item: rank[item])
    return [last if unit is None else unit for unit in units]


def _first_operation(units: Sequence[int | None], count: int) -> list[int]:
    first = [len(units)] * count
    for index, unit in enumerate(units):
        if unit is not None:
            first[unit] = min(first[unit], index)
    return first


def _execution_order(
    graph: CellGraph, roots: Sequence[str], operation_units: Sequence[int]
) -> tuple[list[int], dict[int, int], list[str]]:
    """Units that run, in order, and which units had to be joined because data flows back between them."""
    forward = [index for index, operation in enumerate(graph.operations) if operation.phase is Phase.FORWARD]
    order: list[int] = []
    for index in forward:
        if operation_units[index] not in order:
            order.append(operation_units[index])
    position = {unit: place for place, unit in enumerate(order)}
    made_in = {output: operation_units[index] for index in forward for output in graph.operations[index].outputs}
    joined_until = list(range(len(order)))
    for index in forward:
        reader = position[operation_units[index]]
        for tensor in read_tensors(graph.operations[index]):
            if tensor in made_in:
                source = position[made_in[tensor]]
                if source > reader:
                    joined_until[reader] = max(joined_until[reader], source)
    merged: dict[int, int] = {}
    notes: list[str] = []
    place = 0
    while place < len(order):
        end = joined_until[place]
        inner = place
        while inner <= end:
            end = max(end, joined_until[inner])
            inner += 1
        for member in range(place, end + 1):
            merged[order[member]] = order[place]
        if end > place:
            names = ", ".join(roots[order[member]] for member in range(place, end + 1))
            notes.append(f"{names} are one unit: data flows back and forth between them")
        place = end + 1
    return order, merged, notes


def _build(
    graph: CellGraph,
    tree: _Tree,
    roots: Sequence[str],
    operation_units: Sequence[int],
    order: Sequence[int],
    merged: dict[int, int],
    notes: list[str],
) -> UnitSplit:
    leaders = [unit for unit in order if merged[unit] == unit]
    members: dict[int, list[str]] = {unit: [] for unit in leaders}
    for unit in order:
        members[merged[unit]].append(roots[unit])
    # Cells that run no operation but hold weights still need a stage: the one of the unit written before them.
    for unit, path in enumerate(roots):
        if unit not in merged and tree.by_path[path].parameters:
            before = [other for other in range(unit) if other in merged]
            merged[unit] = merged[before[-1]] if before else leaders[0]
            members[merged[unit]].append(path)
            notes.append(f"{path} holds weights but runs no operation of its own; it goes with {roots[merged[unit]]}")
    forward: dict[int, list[int]] = {unit: [] for unit in leaders}
    backward: dict[int, list[int]] = {unit: [] for unit in leaders}
    parameters: dict[int, dict[str, None]] = {
        unit: dict.fromkeys(name for path in members[unit] for name in tree.by_path[path].parameters)
        for unit in leaders
    }
    for index, operation in enumerate(graph.operations):
        leader = merged[operation_units[index]]
        (forward if operation.phase is Phase.FORWARD else backward)[leader].append(index)
        if operation.phase is Phase.FORWARD:
            for tensor in read_tensors(operation):
                name = graph.tensors[tensor].parameter
                if name is not None:
                    parameters[leader][name] = None
    built = tuple(
        Unit(
            name=members[unit][0] or "network",
            cells=tuple(members[unit]),
            forward=tuple(forward[unit]),
            backward=tuple(backward[unit]),
            parameters=tuple(parameters[unit]),
        )
        for unit in leaders
    )
    users: dict[str, list[int]] = defaultdict(list)
    for index, made in enumerate(built):
        for name in made.parameters:
            users[name].append(index)
    shared = {name: tuple(indices) for name, indices in users.items() if len(indices) > 1}
    for name, indices in shared.items():
        notes.append(f"weight {name} is shared by {', '.join(built[index].name for index in indices)}")
    return UnitSplit(built, shared, tuple(notes))
