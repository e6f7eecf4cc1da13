"""One way in which a compiled graph is not what the plan says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One way in which the compiled graph is not what the plan says."""

    stage: int
    """Stage whose graph shows it."""
    check: str
    """`placement`, `recompute`, `weights`, `transfers` or `order`."""
    cell: str
    """Cell or unit concerned; empty if it is the stage as a whole."""
    message: str
    """What is wrong."""
    nodes: tuple[str, ...] = ()
    """Scopes of compiled nodes that show it; not all if there are many."""

    def __str__(self) -> str:
        where = f"stage {self.stage}" + (f", {self.cell}" if self.cell else "")
        nodes = f" [{'; '.join(self.nodes)}]" if self.nodes else ""
        return f"{where}: {self.message}{nodes}"
