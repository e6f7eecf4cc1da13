"""What one unit keeps for its backward, tensor by tensor: where its memory goes, and which recomputation frees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspore_bmpipe.costs.network import EvaluatedCosts, NetworkCosts
from mindspore_bmpipe.costs.recompute import RecomputeModel, relative_places
from mindspore_bmpipe.costs.unit_model import indices_of
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.units import Unit
from mindspore_bmpipe.report.tables import render_rows

_MIB = 1 << 20
_ROWS = 20
"""Rows printed for people; JSON holds all."""


def unit_memory(costs: NetworkCosts, evaluated: EvaluatedCosts, sizes: Mapping[str, int], name: str) -> dict[str, Any]:
    """Tensors that a unit keeps for each micro-batch in flight under any of its recompute options, largest first.

    Options that do the same as another are left out.

    Args:
        costs: costs of the network.
        evaluated: the same at given sizes, with the options offered to the planner.
        sizes: value of each symbol.
        name: name of the unit.

    Raises:
        InputError: there is no such unit.
    """
    names = [unit.name for unit in costs.split.units]
    if name not in names:
        raise InputError(f"no unit named {name}; the units are {', '.join(names)}")
    place = names.index(name)
    unit, model, numbers = costs.split.units[place], costs.models[place], evaluated.units[place]
    recompute = RecomputeModel(model)
    kept = {
        option.name: recompute.kept(relative_places(option.cells, option.primitives, option.communication, unit.cells))[
            0
        ]
        for option in numbers.options
        if not option.equals
    }
    # Equal units share a model, whose storages are named after the first of them.
    first = costs.split.units[costs.models.index(model)]
    values = model.basis.values(sizes)
    everything = 0
    for storages in kept.values():
        everything |= storages
    tensors: list[dict[str, Any]] = [
        {
            "made_by": _renamed(model.storage_names[storage], first, unit),
            "shape": f"({', '.join(str(size) for size in model.storage_types[storage].shape)})",
            "dtype": model.storage_types[storage].dtype,
            "bytes": str(model.basis.expression(model.sizes[storage])),
            "bytes_now": round(float(model.sizes[storage] @ values)),
            "shared": bool(model.shared >> storage & 1),
            "kept_under": [option for option, storages in kept.items() if storages >> storage & 1],
        }
        for storage in indices_of(everything)
    ]
    tensors.sort(key=lambda tensor: -tensor["bytes_now"])
    return {"unit": name, "sizes": dict(sizes), "options": list(kept), "tensors": tensors}


def render_unit_memory(document: Mapping[str, Any]) -> str:
    """The same for people: the largest tensors, then the sum of the rest."""
    sizes = ", ".join(f"{name} = {value}" for name, value in document["sizes"].items()) or "fixed sizes"
    tensors, options = document["tensors"], document["options"]
    rows = [
        (
            tensor["made_by"],
            f"{tensor['shape']} {tensor['dtype']}",
            tensor["bytes"] + (" (once a stage)" if tensor["shared"] else ""),
            f"{tensor['bytes_now'] / _MIB:.2f}",
            " ".join(str(options.index(option)) for option in tensor["kept_under"]),
        )
        for tensor in tensors[:_ROWS]
    ]
    table = render_rows("", ("made by", "tensor", "bytes", "MiB", "kept under"), rows).strip("\n")
    parts = [f"{document['unit']} at {sizes}, for each micro-batch in flight", table]
    if len(tensors) > _ROWS:
        rest = sum(tensor["bytes_now"] for tensor in tensors[_ROWS:])
        parts.append(f"and {len(tensors) - _ROWS} more with {rest / _MIB:.2f} MiB")
    parts.extend(f"{number}: recompute {name.replace('+', ', ')}" for number, name in enumerate(options))
    return "\n".join(parts)


def _renamed(text: str, first: Unit, unit: Unit) -> str:
    """A storage's name in the model of the first of several equal units, as it is in another of them."""
    if unit is first:
        return text
    made, of, cell = text.partition(" of ")
    for before, after in zip(first.cells, unit.cells, strict=True):
        if cell == before or cell.startswith(f"{before}."):
            return f"{made}{of}{after}{cell[len(before) :]}"
    return "an earlier unit"
