"""Memory that the cost model predicts for a stage of a plan, at the sizes of the traced network."""

from __future__ import annotations

from mindspore_bmpipe.costs.network import NetworkCosts
from mindspore_bmpipe.costs.recompute import RecomputeModel, evaluate_rows
from mindspore_bmpipe.costs.static_memory import StaticSettings, static_bytes
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.schedule import in_flight_rows, make_schedule
from mindspore_bmpipe.verify.expected import relative_cell


def static_settings(plan: Plan) -> StaticSettings:
    """What static memory depends on, as the plan was made."""
    return StaticSettings(
        int(plan.settings.get("data_parallel") or 1), int(plan.settings.get("optimizer_shard_level") or 0)
    )


def predicted_memory(costs: NetworkCosts, plan: Plan, stage: int) -> tuple[int, int]:
    """Static bytes, and peak bytes of everything else, of one stage."""
    sizes = dict(costs.graph.symbols)
    chunks = 1 + max(unit.chunk for unit in plan.units)
    saved = [0.0] * chunks
    weights = 0
    working = shared = 0.0
    settings = static_settings(plan)
    for planned, unit, model in zip(plan.units, costs.split.units, costs.models, strict=True):
        known = RecomputeModel(model)
        values = model.basis.values(sizes)
        kept = known.kept(())[0] | known.kept(known.whole())[0]
        shared = max(shared, float(model.bytes_of(kept & model.shared) @ values))
        if planned.stage != stage:
            continue
        option = known.option(tuple(relative_cell(cell, unit.cells) for cell in planned.recompute_cells))
        saved[planned.chunk] += float(option.saved @ values)
        working = max(working, evaluate_rows(option.working_set, values))
        weights += sum(static_bytes(costs.graph.parameters[name], settings) for name in unit.parameters)
    schedule = make_schedule(
        str(plan.settings["schedule"]), len(plan.stages), chunks, int(plan.settings["micro_batches"])
    )
    rows = in_flight_rows(schedule)[stage]
    activations = max(sum(number * (size + shared) for number, size in zip(row, saved, strict=True)) for row in rows)
    return weights, round(activations + working)
