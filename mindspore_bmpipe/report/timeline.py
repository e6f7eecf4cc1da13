"""Pictures of a simulated step: a trace for Perfetto or chrome://tracing, an SVG, and a page with both tables."""

from __future__ import annotations

import html
import json
from typing import Any

from mindspore_bmpipe.report.simulation import PlanSimulation, render_simulation

NAMES = {"F": "forward", "B": "backward", "W": "weight gradients", "BW": "backward"}
COLOURS = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b", "BW": "#f58518"}

_WIDTH, _ROW, _GAP, _LEFT, _CURVE = 1100, 22, 4, 60, 60


def trace_events(simulation: PlanSimulation) -> str:
    """A trace in the Trace Event Format (JSON object form): one thread per stage, memory as counters.

    Times are microseconds, as the format demands; actions on the longest path say so in their arguments.
    """
    critical = {(entry.stage, entry.action) for entry in simulation.critical}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": f"step of {simulation.plan.source}"}}
    ]
    for stage in range(simulation.schedule.stages):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}})
    for entry in simulation.timed:
        arguments = {"chunk": entry.action.chunk, "micro_batch": entry.action.micro_batch}
        events.append(
            {
                "ph": "X",
                "name": str(entry.action),
                "cat": NAMES[entry.action.kind],
                "pid": 0,
                "tid": entry.stage,
                "ts": entry.start_ms * 1e3,
                "dur": (entry.end_ms - entry.start_ms) * 1e3,
                "args": {**arguments, "on_longest_path": (entry.stage, entry.action) in critical},
            }
        )
    for stage, curve in enumerate(simulation.memory):
        for point in curve:
            events.append(
                {
                    "ph": "C",
                    "name": f"memory of stage {stage}",
                    "pid": 0,
                    "ts": point.time_ms * 1e3,
                    "args": {"bytes": point.bytes},
                }
            )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def step_svg(simulation: PlanSimulation) -> str:
    """Every action of the step as a bar, one row per stage; actions on the longest path have a dark edge."""
    critical = {(entry.stage, entry.action) for entry in simulation.critical}
    scale = (_WIDTH - _LEFT) / simulation.step_time_ms
    height = simulation.schedule.stages * (_ROW + _GAP) + _ROW
    parts = [_svg_start(height)]
    for stage in range(simulation.schedule.stages):
        parts.append(_label(stage * (_ROW + _GAP) + _ROW * 0.7, f"stage {stage}"))
    for entry in simulation.timed:
        edge = ' stroke="#222"' if (entry.stage, entry.action) in critical else ""
        opacity = f' opacity="{1 - 0.5 * entry.action.chunk / simulation.schedule.chunks:.2f}"'
        parts.append(
            f'<rect x="{_LEFT + entry.start_ms * scale:.2f}" y="{entry.stage * (_ROW + _GAP)}" '
            f'width="{(entry.end_ms - entry.start_ms) * scale:.2f}" height="{_ROW}" '
            f'fill="{COLOURS[entry.action.kind]}"{opacity}{edge}>'
            f"<title>{entry.action}: {entry.start_ms:.2f}-{entry.end_ms:.2f} ms</title></rect>"
        )
    parts.append(_label(height - 4, f"0 to {simulation.step_time_ms:.2f} ms", _LEFT))
    return "\n".join([*parts, "</svg>\n"])


def memory_svg(simulation: PlanSimulation) -> str:
    """Memory of each stage over the step; the top of each row is its limit."""
    scale = (_WIDTH - _LEFT) / simulation.step_time_ms
    parts = [_svg_start(simulation.schedule.stages * (_CURVE + _GAP))]
    for stage, (curve, limits) in enumerate(zip(simulation.memory, simulation.plan.stages, strict=True)):
        top = stage * (_CURVE + _GAP)
        highest = max(limits.limit_bytes, *(point.bytes for point in curve))
        path = f"M{_LEFT} {top + _CURVE}"
        for point in curve:
            path += f"H{_LEFT + point.time_ms * scale:.2f}V{top + _CURVE * (1 - point.bytes / highest):.2f}"
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT}" height="{_CURVE}" fill="#eee"/>')
        parts.append(f'<path d="{path}H{_WIDTH}" fill="none" stroke="#4c78a8"/>')
        parts.append(_label(top + _CURVE / 2, f"stage {stage}"))
    return "\n".join([*parts, "</svg>\n"])


def step_page(simulation: PlanSimulation) -> str:
    """One page without scripts or outside files: the table, the bars, the memory."""
    title = f"Step of {simulation.plan.source}"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{html.escape(title)}</title></head>\n'
        f'<body style="font-family: sans-serif">\n<h1>{html.escape(title)}</h1>\n'
        f"<pre>{html.escape(render_simulation(simulation))}</pre>\n"
        f"<h2>Actions</h2>\n{step_svg(simulation)}<h2>Memory</h2>\n{memory_svg(simulation)}</body>\n</html>\n"
    )


def _svg_start(height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" '
        f'height="{height:g}" font-family="sans-serif" font-size="12">'
    )


def _label(y: float, text: str, x: float = 0.0) -> str:
    return f'<text x="{x:g}" y="{y:g}">{html.escape(text)}</text>'
