"""Memory that the cost model predicts for a stage of a plan, at the sizes of the traced network.

The numbers of a unit are those the planner gets. How they add up is exact here: while a unit runs, what the units after
it keep of the same micro-batch is not there yet, or is free again. The planner adds the largest working set to all that
is kept (`mindspore_bmpipe.problem`), which is never less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspore_bmpipe.costs.network import NetworkCosts
from mindspore_bmpipe.costs.recompute import RecomputeModel, evaluate_rows
from mindspore_bmpipe.costs.static_memory import StaticSettings, gradient_bytes, static_bytes, weight_bytes
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.schedule import in_flight_rows, make_schedule
from mindspore_bmpipe.verify.expected import relative_cell


@dataclass(frozen=True)
class Prediction:
    """Predicted bytes of one stage."""

    static: int
    """Weights, gradients and optimizer state."""
    activations: int
    """Peak of everything else while chunks run."""
    planned_activations: int
    """The same as the planner counts it."""
    update: int
    """What updating the weights takes beyond the static bytes."""


class _UnitMemory(NamedTuple):
    saved: float
    working_set: float


def static_settings(plan: Plan) -> StaticSettings:
    """What static memory depends on, as the plan was made."""
    return StaticSettings(
        int(plan.settings.get("data_parallel") or 1), int(plan.settings.get("optimizer_shard_level") or 0)
    )


def predicted_memory(costs: NetworkCosts, plan: Plan, stage: int) -> Prediction:
    """Predict the memory of one stage."""
    sizes = dict(costs.graph.symbols)
    chunks: list[list[_UnitMemory]] = [[] for _ in range(1 + max(unit.chunk for unit in plan.units))]
    weights: dict[str, None] = {}
    shared = 0.0
    for planned, unit, model in zip(plan.units, costs.split.units, costs.models, strict=True):
        known = RecomputeModel(model)
        values = model.basis.values(sizes)
        kept = known.kept(())[0] | known.kept(known.whole())[0]
        shared = max(shared, float(model.bytes_of(kept & model.shared) @ values))
        if planned.stage == stage:
            option = known.option(tuple(relative_cell(cell, unit.cells) for cell in planned.recompute_cells))
            chunks[planned.chunk].append(
                _UnitMemory(float(option.saved @ values), max(0.0, evaluate_rows(option.working_set, values)))
            )
            weights.update(dict.fromkeys(unit.parameters))
    schedule = make_schedule(
        str(plan.settings["schedule"]), len(plan.stages), len(chunks), int(plan.settings["micro_batches"])
    )
    rows = in_flight_rows(schedule)[stage]
    settings = static_settings(plan)
    owners = {name: plan.units[min(users)].stage for name, users in costs.split.shared_parameters.items()}
    copies = sum(weight_bytes(costs.graph.parameters[name]) for name in weights if owners.get(name, stage) != stage)
    return Prediction(
        static=sum(static_bytes(costs.graph.parameters[name], settings) for name in weights),
        activations=copies + round(_peak(chunks, rows, shared)),
        planned_activations=copies + round(_bound(chunks, rows, shared)),
        update=sum(gradient_bytes(costs.graph.parameters[name], settings) for name in weights),
    )


def _in_flight(chunks: Sequence[Sequence[_UnitMemory]], row: Sequence[int], shared: float) -> float:
    return sum(
        number * (shared + sum(unit.saved for unit in units)) for number, units in zip(row, chunks, strict=True)
    )


def _peak(chunks: Sequence[Sequence[_UnitMemory]], rows: Sequence[Sequence[int]], shared: float) -> float:
    """Largest of all moments at which a unit runs: everything in flight, less what later units of its chunk keep."""
    peak = 0.0
    for row in rows:
        whole = _in_flight(chunks, row, shared)
        for number, units in zip(row, chunks, strict=True):
            later = 0.0
            for unit in reversed(units) if number else ():
                peak = max(peak, whole - later + unit.working_set)
                later += unit.saved
    return peak


def _bound(chunks: Sequence[Sequence[_UnitMemory]], rows: Sequence[Sequence[int]], shared: float) -> float:
    return max(_in_flight(chunks, row, shared) for row in rows) + max(
        unit.working_set for units in chunks for unit in units
    )
