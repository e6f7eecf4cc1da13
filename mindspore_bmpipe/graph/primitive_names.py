"""Names of the primitives that cells hold, written into the compiled graph while a network is traced.

MindIR keeps a primitive's attributes, but primitives of equal attributes become one, so that the name under which a
cell holds one is lost unless it is an attribute itself.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from mindspore import nn, ops

from mindspore_bmpipe.graph.cell_graph import HELD_AS
from mindspore_bmpipe.graph.scopes import place_of


@contextlib.contextmanager
def named_primitives(network: nn.Cell) -> Iterator[None]:
    """Within the context, primitives held by exactly one attribute of one cell have :data:`HELD_AS`."""
    held: list[tuple[ops.Primitive, str]] = []
    for path, cell in network.cells_and_names():
        for name, value in vars(cell).items():
            if isinstance(value, ops.Primitive):
                held.append((value, f"{place_of(path)}.{name}" if path else name))
    times = Counter(id(primitive) for primitive, _ in held)
    alone = [(primitive, place) for primitive, place in held if times[id(primitive)] == 1]
    try:
        for primitive, place in alone:
            primitive.add_prim_attr(HELD_AS, place)
        yield
    finally:
        for primitive, _ in alone:
            primitive.del_prim_attr(HELD_AS)
