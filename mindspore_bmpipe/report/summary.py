"""The JSON objects that ``--json`` prints; their keys are an interface."""

from __future__ import annotations

import dataclasses
from typing import Any

from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.planner import Solution
from mindspore_bmpipe.report.plan_times import exchange_summary


def plan_summary(plan: Plan) -> dict[str, Any]:
    """What ``bmpipe plan --json`` prints."""
    solver = plan.solver
    return {
        "status": solver.status,
        "step_time_ms": solver.step_time_ms,
        "bound_ms": solver.bound_ms,
        "gap": solver.gap,
        "solve_seconds": solver.solve_seconds,
        "planner": solver.planner,
        "message": solver.message,
        "stopped_by": solver.stopped_by,
        "bubble": dataclasses.asdict(plan.bubble),
        "stages": [dataclasses.asdict(stage) for stage in plan.stages],
        "exchange": exchange_summary(plan),
        "notes": list(plan.notes),
    }


def no_plan_summary(solution: Solution) -> dict[str, Any]:
    """What ``bmpipe plan --json`` prints when there is no plan."""
    return {
        "status": solution.status.value,
        "step_time_ms": None,
        "bound_ms": solution.bound_ms,
        "gap": None,
        "solve_seconds": solution.solve_seconds,
        "planner": solution.planner,
        "message": solution.message,
        "stopped_by": solution.stopped_by.value,
        "needed_bytes": None if solution.needed_bytes is None else list(solution.needed_bytes),
        "bubble": None,
        "stages": [],
        "notes": [],
    }
