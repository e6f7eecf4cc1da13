"""Tables in text: a plan, the costs of units."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from mindspore_bmpipe.plan import ChunkPlan, Plan
from mindspore_bmpipe.report.plan_times import exchange_text

_GIB = 1 << 30
_WIDTH = 118
_LONGEST_LABEL = 16
"""Longer names of recompute options would break the lines of the table."""


def render_plan(plan: Plan) -> str:
    """A plan as a short table: units, recomputation, times and peak memory of each stage, then the step time."""
    settings = plan.settings
    table = Table(
        title=f"bmpipe plan of {plan.source}: {settings.get('stages')} stages, {settings.get('micro_batches')} "
        f"micro-batches, {settings.get('schedule')}",
        title_justify="left",
    )
    table.add_column("stage", justify="right")
    table.add_column("units and recomputation", ratio=1)
    table.add_column("forward ms", justify="right")
    table.add_column("backward ms", justify="right")
    table.add_column("peak / limit GiB", justify="right")
    labels = _option_labels(plan)
    for stage in plan.stages:
        for place, chunk in enumerate(stage.chunks):
            label = str(stage.stage) if len(stage.chunks) == 1 else f"{stage.stage}.{chunk.chunk}"
            memory = f"{stage.peak_bytes / _GIB:.2f} / {stage.limit_bytes / _GIB:.2f}" if place == 0 else ""
            units = _units_text(chunk.units, labels)
            table.add_row(label, units, f"{chunk.forward_ms:.2f}", f"{chunk.backward_ms:.2f}", memory)
    bubble, solver = plan.bubble, plan.solver
    lines = [
        _text(table),
        *(f"{label}: recompute {name.replace('+', ', ')}" for name, label in labels.items() if label != name),
        f"step time {solver.step_time_ms:.2f} ms, proved bound {solver.bound_ms:.2f} ms (gap {solver.gap:.3%}), "
        f"{solver.status} after {solver.solve_seconds:.1f} s",
        f"bubble {bubble.total:.2%} = preparation {bubble.preparation:.2%} + imbalance {bubble.imbalance:.2%} + "
        f"recompute {bubble.recompute:.2%} + communication {bubble.communication:.2%}",
        *exchange_text(plan),
    ]
    lines.extend(f"note: {note}" for note in plan.notes)
    if solver.message:
        lines.append(f"planner: {solver.message}")
    return "\n".join(lines)


def render_rows(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of text; the first column is left-aligned, the others right-aligned."""
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return _text(table)


def _option_labels(plan: Plan) -> dict[str, str]:
    """Option name -> what the table calls it: itself where it is short, else a letter explained below the table."""
    names = dict.fromkeys(option for stage in plan.stages for chunk in stage.chunks for option in _options(chunk))
    labels: dict[str, str] = {}
    for name in names:
        lettered = sum(label != known for known, label in labels.items())
        labels[name] = name if len(name) <= _LONGEST_LABEL else _letters(lettered)
    return labels


def _options(chunk: ChunkPlan) -> list[str]:
    return [option for options in chunk.units.values() for option in options]


def _letters(number: int) -> str:
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("A") + rest) + text
    return text


def _units_text(units: Mapping[str, Mapping[str, int]], labels: Mapping[str, str]) -> str:
    parts = []
    for run, options in units.items():
        total = sum(options.values())
        recomputed = ", ".join(f"{count} x {labels[name]}" for name, count in options.items() if name != "none")
        parts.append(f"{total} {run}" + (f" (recompute {recomputed})" if recomputed else ""))
    return "; ".join(parts) if parts else "nothing"


def _text(table: Table) -> str:
    # Written to a string so that the caller decides where it goes, and the same everywhere it goes.
    stream = io.StringIO()
    Console(file=stream, width=_WIDTH, no_color=True, emoji=False, highlight=False, markup=False).print(table)
    return stream.getvalue().rstrip("\n")
