"""Plans as plain JSON for other launchers: where every unit goes and what of it runs again."""

from __future__ import annotations

import json
from typing import Any

from mindspore_bmpipe.plan import Plan

EXPORT_FORMAT = "bmpipe-export/1"


def plan_json(plan: Plan, round_up: bool = False) -> str:
    """Everything a launcher needs of a plan, as one JSON object; there is nothing to round up."""
    del round_up
    document: dict[str, Any] = {
        "format": EXPORT_FORMAT,
        "source": plan.source,
        "stages": len(plan.stages),
        "chunks": plan.settings["chunks"],
        "schedule": plan.settings["schedule"],
        "micro_batches": plan.settings["micro_batches"],
        "step_time_ms": plan.solver.step_time_ms,
        "peak_bytes": [stage.peak_bytes for stage in plan.stages],
        "units": [
            {
                "name": unit.name,
                "stage": unit.stage,
                "chunk": unit.chunk,
                "cells": list(unit.cells),
                "recompute": unit.option,
                "recompute_cells": list(unit.recompute_cells),
                "recompute_primitives": list(unit.recompute_primitives),
                "recompute_communication": list(unit.recompute_communication),
            }
            for unit in plan.units
        ],
    }
    return json.dumps(document, indent=1) + "\n"
