"""What the planner knows of each unit: symbolic expressions, numbers where sizes and a machine are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sympy

from mindspore_bmpipe.costs.collectives import algorithms_of
from mindspore_bmpipe.costs.hardware import Hardware
from mindspore_bmpipe.costs.network import EvaluatedCosts, NetworkCosts, UnitCost
from mindspore_bmpipe.costs.recompute import RecomputeModel
from mindspore_bmpipe.costs.rules import unknown_primitives
from mindspore_bmpipe.costs.rules.base import Engine
from mindspore_bmpipe.costs.unit_model import UnitModel
from mindspore_bmpipe.costs.weight_exchange import Moment, WeightCollective
from mindspore_bmpipe.report.tables import render_rows

_MIB = 1 << 20


def explain(
    costs: NetworkCosts,
    hardware: Hardware,
    evaluated: EvaluatedCosts,
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """Expressions, options, symbols and unknown primitives of a network: what ``bmpipe explain --json`` prints."""
    units: list[dict[str, Any]] = []
    previous: tuple[int, int] | None = None
    for unit, model, numbers in zip(costs.split.units, costs.models, evaluated.units, strict=True):
        if previous == (id(model), numbers.kind):
            units[-1]["count"] += 1
            units[-1]["last"] = unit.name
            continue
        previous = (id(model), numbers.kind)
        units.append(
            {
                "name": unit.name,
                "last": unit.name,
                "count": 1,
                "cells": list(unit.cells),
                "trainable": numbers.trainable,
                **{key: str(value) for key, value in unit_expressions(model, hardware).items()},
                "static_bytes": numbers.static_bytes,
                "update_bytes": numbers.update_bytes,
                "forward_ms": numbers.forward_ms,
                "backward_ms": numbers.backward_ms,
                **_communication_ms(model, hardware, sizes),
                "collectives": _collectives(model),
                **_weight_times(numbers),
                "options": [
                    {
                        "name": option.name,
                        "equals": option.equals or None,
                        "cells": list(option.cells),
                        "primitives": list(option.primitives),
                        "communication": list(option.communication),
                        "saved_bytes": option.saved_bytes,
                        "extra_backward_ms": option.extra_backward_ms,
                        "working_set_bytes": option.working_set_bytes,
                    }
                    for option in numbers.options
                ],
            }
        )
    return {
        "source": costs.graph.name,
        "symbols": dict(costs.graph.symbols),
        "sizes": dict(sizes),
        "hardware": hardware.name,
        "units": units,
        "transfer_ms": evaluated.transfer_ms,
        "cut_bytes": list(evaluated.cut_bytes),
        "shared_saved_bytes": evaluated.shared_saved_bytes,
        "unknown_primitives": unknown_primitives(operation.primitive for operation in costs.graph.operations),
        "notes": list(evaluated.notes),
    }


def unit_expressions(model: UnitModel, hardware: Hardware) -> dict[str, Any]:
    """Symbolic costs of one unit without recomputation: flops, bytes, milliseconds as sympy expressions."""
    basis, forward = model.basis, model.forward_count
    plain = RecomputeModel(model).option(())
    return {
        "forward_flops": basis.expression(model.forward_flops),
        "backward_flops": basis.expression(model.backward_flops),
        "forward_bytes_moved": basis.expression(model.bytes_moved[:forward].sum(axis=0)),
        "backward_bytes_moved": basis.expression(model.bytes_moved[forward:].sum(axis=0)),
        "forward_sent_bytes": basis.expression(model.sent_bytes[:forward].sum(axis=0)),
        "backward_sent_bytes": basis.expression(model.sent_bytes[forward:].sum(axis=0)),
        "forward_time_ms": _time(model, hardware, slice(0, forward)),
        "backward_time_ms": _time(model, hardware, slice(forward, None)),
        "saved_bytes": basis.expression(plain.saved),
        "working_set_bytes": _largest([basis.expression(row) for row in plain.working_set]),
    }


def _communication_ms(model: UnitModel, hardware: Hardware, sizes: Mapping[str, int]) -> dict[str, float]:
    """Part of the times in which the unit exchanges data with other ranks of its stage."""
    times = model.link_ms(hardware, sizes)
    return {
        "forward_communication_ms": float(times[: model.forward_count].sum()),
        "backward_communication_ms": float(times[model.forward_count :].sum()),
    }


def _weight_times(numbers: UnitCost) -> dict[str, Any]:
    """Collectives on the unit's weights: what each takes by itself, and what they add to a step."""
    exchange = numbers.times.weights
    return {
        "weight_collectives": [
            {"moment": moment.value, "primitive": primitive, "ranks": ranks, "count": count, "bytes": volume}
            for (moment, primitive, ranks), (count, volume) in _grouped(numbers.weight_collectives).items()
        ],
        "forward_weights_ms": exchange.forward_ms,
        "backward_weights_ms": exchange.backward_weights_ms + exchange.backward_gradients_ms,
        "gather_ms": numbers.gather_ms,
        "reduce_ms": numbers.reduce_ms,
    }


def _grouped(collectives: Sequence[WeightCollective]) -> dict[tuple[Moment, str, int], tuple[int, int]]:
    """Number and bytes of collectives of one kind."""
    found: dict[tuple[Moment, str, int], tuple[int, int]] = {}
    for item in collectives:
        key = (item.moment, item.primitive, len(item.ranks))
        count, volume = found.get(key, (0, 0))
        found[key] = (count + 1, volume + item.volume_bytes)
    return found


def _collectives(model: UnitModel) -> list[dict[str, Any]]:
    """Exchanges with other ranks of the stage, in order of first use, equal ones together."""
    found: dict[tuple[str, str, int, str], int] = {}
    for operation, sent in zip(model.operations, model.sent_bytes, strict=True):
        if operation.ranks:
            size = str(model.basis.expression(sent))
            key = (operation.phase.value, operation.primitive, len(operation.ranks), size)
            found[key] = found.get(key, 0) + 1
    return [
        {"phase": phase, "primitive": primitive, "ranks": ranks, "sent_bytes": size, "count": count}
        for (phase, primitive, ranks, size), count in found.items()
    ]


def render_explanation(document: Mapping[str, Any]) -> str:
    """The same for people."""
    sizes = ", ".join(f"{name} = {value}" for name, value in document["sizes"].items()) or "fixed sizes"
    parts = [f"{document['source']} on {document['hardware']}, {sizes}"]
    for unit in document["units"]:
        name = unit["name"] if unit["count"] == 1 else f"{unit['name']} .. {unit['last']} ({unit['count']} units)"
        parts.append(f"\n{name}")
        for key in ("forward_flops", "backward_flops", "forward_bytes_moved", "backward_bytes_moved", "saved_bytes",
                    "working_set_bytes", "forward_time_ms", "backward_time_ms"):  # fmt: skip
            parts.append(f"  {key:<21} {unit[key]}")
        if unit["forward_communication_ms"] or unit["backward_communication_ms"]:
            for key in ("forward_sent_bytes", "backward_sent_bytes"):
                parts.append(f"  {key:<21} {unit[key]}")
            for item in unit["collectives"]:
                parts.append(
                    f"  {item['phase']:<21} {item['count']} x {item['primitive']} among {item['ranks']} ranks, "
                    f"{item['sent_bytes']} bytes sent each"
                )
            for part in ("forward", "backward"):
                parts.append(
                    f"  {part + '_link_ms':<21} {unit[part + '_communication_ms']:.3f} of {unit[part + '_ms']:.3f}"
                )
        for item in unit["weight_collectives"]:
            parts.append(
                f"  {item['moment']:<21} {item['count']} x {item['primitive']} of weights among {item['ranks']} ranks, "
                f"{item['bytes']} bytes in all"
            )
        if unit["weight_collectives"]:
            for key in ("forward_weights_ms", "backward_weights_ms", "gather_ms", "reduce_ms"):
                parts.append(f"  {key:<21} {unit[key]:.3f}")
        parts.append(f"  {'static_bytes':<21} {unit['static_bytes']}")
        rows = [
            (
                option["name"] + (f" (= {option['equals']})" if option["equals"] else ""),
                f"{option['saved_bytes'] / _MIB:.2f}",
                f"{option['working_set_bytes'] / _MIB:.2f}",
                f"{unit['forward_ms']:.3f}",
                f"{unit['backward_ms'] + option['extra_backward_ms']:.3f}",
            )
            for option in unit["options"]
        ]
        columns = ("recompute", "saved MiB", "working set MiB", "forward ms", "backward ms")
        parts.append(render_rows("", columns, rows).lstrip("\n"))
    unknown = document["unknown_primitives"]
    if unknown:
        listed = ", ".join(f"{name} ({count} times)" for name, count in sorted(unknown.items()))
        parts.append(f"\nno cost rule, taken as element-wise here: {listed}")
    parts.extend(f"note: {note}" for note in document["notes"])
    return "\n".join(parts)


def _time(model: UnitModel, hardware: Hardware, part: slice) -> Any:
    """Roofline time of some operations.

    Where one side of the roofline is larger coefficient by coefficient it is larger at all sizes, so only the others
    stay as a maximum.
    """
    basis = model.basis
    plain = np.zeros(model.flops.shape[1])
    mixed: list[Any] = []
    launches = 0
    rows = zip(
        model.operations[part], model.flops[part], model.bytes_moved[part], model.volume_bytes[part], strict=True
    )
    for operation, flops, moved, volume in rows:
        if not flops.any() and not moved.any():
            continue
        launches += 1
        memory = moved / hardware.bytes_per_ms
        if operation.rounds:
            found = algorithms_of(hardware, operation.primitive, operation.ranks)
            ways = [[line.ms_per_byte * volume + _constant(line.latency_ms, volume) for line in way] for way in found]
            if len(ways) == len(ways[0]) == 1 and np.all(ways[0][0] >= memory):
                plain += ways[0][0]
            else:
                ways_ms = [_largest([_rounded(basis, line) for line in lines]) for lines in ways]
                quickest = ways_ms[0] if len(ways_ms) == 1 else sympy.Min(*ways_ms, evaluate=False)
                mixed.append(sympy.Max(quickest, _rounded(basis, memory), evaluate=False))
            continue
        arithmetic = flops / hardware.rate(operation.engine.value, operation.dtype) if flops.any() else flops
        if operation.engine is Engine.NONE or np.all(memory >= arithmetic):
            plain += memory
        elif np.all(arithmetic >= memory):
            plain += arithmetic
        else:
            mixed.append(sympy.Max(_rounded(basis, arithmetic), _rounded(basis, memory), evaluate=False))
    plain[0] += launches * hardware.launch_ms
    return sympy.Add(_rounded(basis, plain), *mixed)


def _constant(value: float, like: Any) -> Any:
    """The polynomial of a number, among those of a basis whose first monomial is 1."""
    vector = np.zeros_like(like)
    vector[0] = value
    return vector


def _rounded(basis: Any, vector: Any) -> Any:
    """An expression with four significant digits, enough to read."""
    return sum(
        (
            sympy.Float(float(coefficient), 4) * monomial
            for coefficient, monomial in zip(vector, basis.monomials(), strict=True)
            if coefficient
        ),
        start=sympy.Integer(0),
    )


def _largest(expressions: list[Any]) -> Any:
    return expressions[0] if len(expressions) == 1 else sympy.Max(*expressions, evaluate=False)
