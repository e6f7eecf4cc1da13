"""The simulated step of a plan file: where each stage's time goes, what it holds when, and the longest path."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.report.plan_times import exchange_summary, exchange_text, plan_schedule, plan_times
from mindspore_bmpipe.report.tables import render_rows
from mindspore_bmpipe.schedule import (
    MemoryPoint,
    Schedule,
    StageIdle,
    TimedAction,
    critical_actions,
    memory_curve,
    stage_idle,
    timeline,
)

_GIB = 1 << 30
_TOLERANCE = 1e-6
"""Relative difference of step times above which a plan contradicts itself."""
_SHOWN = 4
"""Stages of the longest path that the table names."""


@dataclass(frozen=True)
class PlanSimulation:
    """One step of a plan, action by action."""

    plan: Plan
    """What was simulated."""
    schedule: Schedule
    """Its orders."""
    step_time_ms: float
    """From the first start to the last end."""
    timed: tuple[TimedAction, ...]
    """Every action, by stage and then in the order the stage runs them."""
    idle: tuple[StageIdle, ...]
    """Where the time of each stage goes."""
    memory: tuple[tuple[MemoryPoint, ...], ...]
    """Memory of each stage over the step, as steps; at its end weights are updated."""
    critical: tuple[TimedAction, ...]
    """The actions along a longest path."""


def simulate_plan(plan: Plan) -> PlanSimulation:
    """Simulate one step with the times and bytes recorded in the plan.

    Raises:
        InputError: the plan lacks its schedule, or its times give another step time or peak than it records.
    """
    schedule = plan_schedule(plan)
    times = plan_times(plan, schedule)
    timed = timeline(schedule, *times)
    step = max(entry.end_ms for entry in timed)
    memory = tuple(
        (
            *memory_curve(
                schedule, timed, stage.stage, stage.static_bytes + load.shared_bytes, load.saved_bytes,
                load.working_set_bytes,
            ),
            MemoryPoint(step, stage.static_bytes + load.update_bytes),
        )
        for stage, load in zip(plan.stages, plan.loads, strict=True)
    )  # fmt: skip
    _require_recorded(plan, step, [max(point.bytes for point in curve) for curve in memory])
    idle = stage_idle(schedule, timed, 0.0 if schedule.sends_block else plan.transfer_ms)
    return PlanSimulation(plan, schedule, step, timed, idle, memory, critical_actions(schedule, *times))


def _require_recorded(plan: Plan, step_ms: float, peaks: list[int]) -> None:
    recorded = plan.solver.step_time_ms
    if abs(step_ms - recorded) > _TOLERANCE * recorded:
        raise InputError(f"plan: it records a step of {recorded} ms, its own times give {step_ms}; plan again")
    for stage, peak in zip(plan.stages, peaks, strict=True):
        if peak != stage.peak_bytes:
            raise InputError(
                f"plan: stage {stage.stage} records a peak of {stage.peak_bytes} bytes, its own loads give {peak}; "
                "plan again"
            )


def peak_of(curve: tuple[MemoryPoint, ...]) -> MemoryPoint:
    """The first moment of the largest memory."""
    return max(curve, key=lambda point: point.bytes)


def simulation_summary(simulation: PlanSimulation) -> dict[str, Any]:
    """What ``bmpipe simulate --json`` prints."""
    stages = []
    for stage, idle, curve in zip(simulation.plan.stages, simulation.idle, simulation.memory, strict=True):
        peak = peak_of(curve)
        stages.append(
            {
                **dataclasses.asdict(idle),
                "peak_bytes": peak.bytes,
                "peak_at_ms": peak.time_ms,
                "limit_bytes": stage.limit_bytes,
                "memory": [[point.time_ms, point.bytes] for point in curve],
            }
        )
    return {
        "source": simulation.plan.source,
        "schedule": simulation.schedule.kind,
        "step_time_ms": simulation.step_time_ms,
        "transfer_ms": simulation.plan.transfer_ms,
        "exchange": exchange_summary(simulation.plan),
        "stages": stages,
        "critical_path": [
            {"stage": entry.stage, "action": str(entry.action), "start_ms": entry.start_ms, "end_ms": entry.end_ms}
            for entry in simulation.critical
        ],
    }


def render_simulation(simulation: PlanSimulation) -> str:
    """The same for people."""
    schedule, step = simulation.schedule, simulation.step_time_ms
    rows = []
    for stage, idle, curve in zip(simulation.plan.stages, simulation.idle, simulation.memory, strict=True):
        peak = peak_of(curve)
        parts = (idle.busy_ms, idle.warm_up_ms, idle.waiting_ms, idle.cool_down_ms, idle.communication_ms)
        rows.append(
            (
                str(stage.stage),
                *(f"{part:.2f}" for part in parts),
                f"{idle.idle_ms / step:.2%}",
                f"{peak.bytes / _GIB:.2f} / {stage.limit_bytes / _GIB:.2f}",
                f"{peak.time_ms:.2f}",
            )
        )
    columns = (
        "stage", "busy ms", "warm-up", "waiting", "cool-down", "transfers", "idle", "peak / limit GiB", "first at ms",
    )  # fmt: skip
    title = (
        f"one step of {simulation.plan.source}: {schedule.stages} stages, {schedule.chunks} chunk(s), "
        f"{schedule.micro_batches} micro-batches, {schedule.kind}"
    )
    lines = [render_rows(title, columns, rows), f"step time {step:.2f} ms", *exchange_text(simulation.plan)]
    return "\n".join((*lines, _path_text(simulation)))


def _path_text(simulation: PlanSimulation) -> str:
    """Where the longest path spends its time, longest stage first."""
    spent: dict[int, float] = {}
    for entry in simulation.critical:
        spent[entry.stage] = spent.get(entry.stage, 0.0) + entry.end_ms - entry.start_ms
    step = simulation.step_time_ms
    longest = sorted(spent.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"stage {stage} {share / step:.1%}" for stage, share in longest[:_SHOWN]]
    if longest[_SHOWN:]:
        parts.append(f"other stages {sum(share for _, share in longest[_SHOWN:]) / step:.1%}")
    if any(simulation.plan.transfer_ms):
        parts.append(f"transfers {1 - sum(spent.values()) / step:.1%}")
    return f"longest path: {', '.join(parts)}"
