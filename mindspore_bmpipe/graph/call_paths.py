"""Which cell a call of a shared function is: equal cells share one function, the call's weights tell them apart."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import CellInfo
from mindspore_bmpipe.graph.mindir import Function

FORWARD_MARK = "▸"
"""Part of the name of the forward function of a cell that is compiled once for all its uses."""
BACKWARD_MARK = "◂"
"""The same for the backward function."""

_NOT_WORD = re.compile(r"\W+")


def is_cell_function(name: str) -> bool:
    """Whether a function of this name is the forward half of a cell."""
    return FORWARD_MARK in name and "CR_" in name


class CallPaths:
    """Finds the cell of each call from the class in the function's name, the weights passed and the scopes inside."""

    def __init__(self, cells: Sequence[CellInfo]) -> None:
        self._candidates = [
            (cell, frozenset(cell.parameters), _NOT_WORD.sub("_", cell.class_name)) for cell in cells if cell.path
        ]
        self._matching: dict[str, list[tuple[CellInfo, frozenset[str]]]] = {}
        self._scope_names: dict[str, str] = {}

    def resolve(self, function: Function, weights: Sequence[str], caller: str, used: set[str]) -> str:
        """Return the path of the called cell.

        Args:
            function: the forward function called.
            weights: names of the weights among the call's arguments.
            caller: path of the cell whose code makes the call.
            used: paths already called from this run of the caller; the result is added to it. It only decides
                between equal cells without weights, which a plan cannot tell apart either.

        Raises:
            InputError: no cell fits, so the file and the cell tree do not belong together.
        """
        inside = caller + "." if caller else ""
        given = frozenset(weights)
        fitting = self._of_class(function.name)
        if not fitting:
            raise InputError(
                f"no cell of the network fits the compiled function {function.name!r} called in "
                f"{caller or 'the network itself'!r}; trace the network again with this version"
            )
        local_name = self._scope_name(function)
        # A cell inside the caller that gets all its weights fits whatever further weights it is passed (another cell's
        # table); only where there is none, a cell elsewhere that several parents hold may be meant.
        below = [item for item in fitting if item[0].path.startswith(inside)]
        if any(own <= given for _, own in below):
            fitting = below
        # A call may pass weights of other cells too (tied embeddings), and leave out weights it does not read.
        best = min(
            fitting,
            key=lambda item: (
                -len(item[1] & given),
                not item[0].path.startswith(inside),
                len(item[1] - given),
                item[0].path in used,
                item[0].path.rsplit(".", 1)[-1] != local_name,
                item[0].path.count("."),
            ),
        )[0]
        used.add(best.path)
        return best.path

    def _of_class(self, function: str) -> list[tuple[CellInfo, frozenset[str]]]:
        """Cells whose class is the one in the function's name, or all when the name does not tell."""
        found = self._matching.get(function)
        if found is None:
            found = [(cell, own) for cell, own, name in self._candidates if f"CR_{name}_construct" in function]
            if not found:
                found = [
                    (cell, own)
                    for cell, own, name in self._candidates
                    if f"_{name.rsplit('_', 1)[-1]}_construct" in function
                ]
            self._matching[function] = found
        return found

    def _scope_name(self, function: Function) -> str:
        """Attribute name of the cell by the last scope component of most operations in its function."""
        name = self._scope_names.get(function.name)
        if name is None:
            counts: dict[str, int] = {}
            for node in function.nodes:
                parts = node.scope.split("/")
                if len(parts) >= 2 and "-" in parts[-2]:
                    last = parts[-2].rsplit("-", 1)[0]
                    counts[last] = counts.get(last, 0) + 1
            name = max(counts, key=lambda key: (counts[key], key)) if counts else ""
            self._scope_names[function.name] = name
        return name
