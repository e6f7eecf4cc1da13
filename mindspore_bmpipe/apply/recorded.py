"""How MindSpore records pipeline stages and recomputation on cells and primitives.

The names read here are private to MindSpore; no other module of `apply` uses them.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspore import nn, ops

RECOMPUTE_CHILD = "_recompute_cell"
"""Name of the child that `Cell.recompute` adds to the cell; neither it nor what is below it belongs to the network."""


RECOMPUTE_COMMUNICATION = "recompute_comm_op"
"""Attribute of a primitive that has exchanges of shares which the compiler inserts beside it run again in backward."""


def named_cells(network: nn.Cell) -> dict[str, nn.Cell]:
    """Attribute path -> cell for the network (path `""`) and everything below it, without MindSpore's helper cells."""
    return {path: cell for path, cell in network.cells_and_names() if RECOMPUTE_CHILD not in path.split(".")}


def own_parameters(cell: nn.Cell) -> list[tuple[str, object]]:
    """Attribute name and trainable parameter for every one held by the cell itself, not by its children."""
    return [
        (name, parameter)
        for name, parameter in cell.parameters_and_names(expand=False)
        if parameter is not None and parameter.requires_grad
    ]


def stage_of(cell: nn.Cell) -> int | None:
    """Stage set on this very cell; `None` when unset (children do not inherit it)."""
    return vars(cell).get("_pipeline_stage")


def segment_of(cell: nn.Cell) -> int | None:
    """Segment set on this very cell; `None` when unset."""
    return vars(cell).get("_pipeline_segment")


def is_recomputed(cell: nn.Cell) -> bool:
    """Whether `recompute` was called on this cell or on one above it."""
    return bool(vars(cell).get("_has_config_recompute", False))


def starts_recompute(cell: nn.Cell) -> bool:
    """Whether `recompute` took effect on this very cell; for cells below it, MindSpore leaves the flag away."""
    return is_recomputed(cell) and "output_recompute" in cell.get_flags()


def keeps_its_outputs(cell: nn.Cell) -> bool:
    """Whether the recomputed cell keeps its outputs, which is what plans are made for."""
    return cell.get_flags().get("output_recompute") is False


def primitive_recompute(primitive: ops.Primitive) -> bool | None:
    """What `Primitive.recompute` was told; `None` when it was never called."""
    mode = primitive.attrs.get("recompute")
    return mode if mode is None else bool(mode)


def recomputes_communication(primitive: ops.Primitive) -> bool | None:
    """What the primitive was told of communication beside it; `None` when nothing."""
    mode = primitive.attrs.get(RECOMPUTE_COMMUNICATION)
    return mode if mode is None else bool(mode)


def own_primitives(cell: nn.Cell) -> Iterator[tuple[str, ops.Primitive]]:
    """Attribute name and primitive for every one held by the cell itself, those in lists and tuples included."""
    for name, value in vars(cell).items():
        if isinstance(value, ops.Primitive):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                if isinstance(item, ops.Primitive):
                    yield f"{name}.{index}", item
