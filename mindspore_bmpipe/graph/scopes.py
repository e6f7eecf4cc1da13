"""Cells by the names that an exported file holds: of scopes, and of parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mindspore_bmpipe.graph.mindir import Function, Module

Component = tuple[str, str]
"""Attribute name and class of one cell in a scope."""

UNKNOWN_CLASS = "Cell"
"""Class of a cell that only parameter names tell of."""

CONTAINERS = frozenset({"CellList", "CellDict"})
"""Classes that only list other cells and are never called."""

_LIST_CLASS = "CellList"
_TOP = "Default"
_ENTRY_CLASS = re.compile(r"([A-Za-z0-9]+)_construct")
_TRANSPARENT = frozenset({"Load", "Depend", "TupleGetItem", "MakeTuple", "UpdateState"})


@dataclass(frozen=True)
class CellNames:
    """Cells of an exported network as far as names tell."""

    classes: Mapping[str, str]
    """Class without module of every cell by its path, parents first; the network itself is the empty path."""
    owners: Mapping[str, str]
    """Path of the cell that holds each parameter."""
    root: Component | None
    """The component that stands first in all scopes and is the network itself."""

    def path(self, components: tuple[Component, ...]) -> str:
        """Path of the cell that a scope names."""
        if self.root is not None and components[:1] == (self.root,):
            components = components[1:]
        return ".".join(attribute for attribute, _ in components)

    def with_paths(self, paths: Iterable[str]) -> CellNames:
        """Add cells found elsewhere."""
        classes = dict(self.classes)
        for path in paths:
            _add_path(classes, path)
        return replace(self, classes=_parents_first(classes))


def scope_path(scope: str) -> tuple[Component, ...]:
    """The cells in a scope, outermost first; the operation's own name and the top are left out."""
    parts = scope.split("/")
    top = next((number for number, part in enumerate(parts) if part.endswith(_TOP)), -1)
    components: list[Component] = []
    for part in parts[top + 1 : -1]:
        attribute, dash, kind = part.partition("-")
        if dash:
            components.append((attribute, kind))
    return tuple(components)


def place_of(path: str) -> str:
    """The path with the numbers of list elements left open: equal for the same cell of repeated cells."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def within(cell: str, outer: str) -> bool:
    """Whether a cell is another one or lies inside it."""
    return not outer or cell == outer or cell.startswith(outer + ".")


def cell_names(module: Module) -> CellNames:
    """Collect cells from all scopes and all parameter names of a module."""
    scopes = [scope_path(node.scope) for function in _functions(module) for node in function.nodes]
    root = _root(scopes, module.parameters)
    names = CellNames({"": root[1] if root else _entry_class(module.entry.name)}, {}, root)
    classes = dict(names.classes)
    for components in scopes:
        if root is not None and components[:1] == (root,):
            components = components[1:]
        for depth in range(1, len(components) + 1):
            path = names.path(components[:depth])
            classes.setdefault(path, components[depth - 1][1])
    prefix, dropped = _parameter_prefix(module, names, classes)
    owners: dict[str, str] = {}
    for parameter in module.parameters:
        owners[parameter] = _owner(parameter, prefix, dropped)
        _add_path(classes, owners[parameter])
    return replace(names, classes=_parents_first(classes), owners=owners)


def _entry_class(function: str) -> str:
    """Class of the network, which stands before ``construct`` in the name of the outermost function."""
    found = _ENTRY_CLASS.search(function)
    return found[1] if found else UNKNOWN_CLASS


def _functions(module: Module) -> tuple[Function, ...]:
    return (module.entry, *module.functions.values())


def _root(scopes: Iterable[tuple[Component, ...]], parameters: Iterable[str]) -> Component | None:
    """The first component shared by all scopes, unless parameter names start with it, so that it is a cell like any."""
    firsts = {components[0] for components in scopes if components}
    if len(firsts) != 1:
        return None
    root = next(iter(firsts))
    if root[0].isdigit() or any(name.startswith(root[0] + ".") for name in parameters):
        return None
    return root


def _owner(parameter: str, prefix: str, dropped: int) -> str:
    parts = parameter.split(".")[:-1][dropped:]
    return ".".join([prefix, *parts] if prefix else parts)


def _parameter_prefix(module: Module, names: CellNames, classes: Mapping[str, str]) -> tuple[str, int]:
    """How parameter names differ from cell paths: wrappers add a component to one and not to the other.

    Returns:
        What to put before a parameter's path, and how many of its first components to leave out.
    """
    reads = list(_parameter_reads(module, names))
    tops = sorted({path.split(".")[0] for path in classes if path})
    choices = [("", 0), *((top, 0) for top in tops if not top.isdigit()), ("", 1)]
    scores = Counter[tuple[str, int]]()
    for choice in choices:
        scores[choice] = sum(place_of(_owner(parameter, *choice)) == place_of(path) for parameter, path in reads)
    return max(choices, key=lambda choice: (scores[choice], -choices.index(choice)))


def _parameter_reads(module: Module, names: CellNames) -> Iterable[tuple[str, str]]:
    """Parameters and the cell in the scope of each operation that reads them."""
    for function in _functions(module):
        holds = {name: name for name in module.parameters}
        for node in function.nodes:
            for value in node.inputs:
                parameter = holds.get(value)
                if parameter is not None and node.operation in ("Load", "Depend"):
                    holds[node.output] = parameter
                elif parameter is not None and node.operation not in _TRANSPARENT:
                    yield parameter, names.path(scope_path(node.scope))


def _add_path(classes: dict[str, str], path: str) -> None:
    """Add a cell and its parents, with the class of the same cell of a repeated parent where that is known."""
    parts = path.split(".") if path else []
    for depth in range(1, len(parts) + 1):
        inner = ".".join(parts[:depth])
        if inner in classes:
            continue
        place = place_of(inner)
        twin = next((kind for other, kind in classes.items() if other and place_of(other) == place), None)
        numbered = depth < len(parts) and parts[depth].isdigit()
        classes[inner] = twin or (_LIST_CLASS if numbered else UNKNOWN_CLASS)


def _parents_first(classes: Mapping[str, str]) -> dict[str, str]:
    """Depth-first, in the order in which each parent's cells were first named."""
    number = {path: index for index, path in enumerate(classes)}

    def order(path: str) -> tuple[int, ...]:
        parts = path.split(".") if path else []
        return tuple(number[".".join(parts[: depth + 1])] for depth in range(len(parts)))

    return {path: classes[path] for path in sorted(classes, key=order)}
