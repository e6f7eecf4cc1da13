"""Plans of several planners side by side: a table, JSON, CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mindspore_bmpipe.planner import Solution
from mindspore_bmpipe.problem import Decision, Evaluation, Problem, evaluate

NOT_APPLICABLE = "not applicable"
"""Status of a planner that does not take the problem; its message says why."""

_GIB = 1 << 30
_WIDTH = 200
_WORST = 4
"""Stages listed where limits are exceeded."""
_COLUMNS = (
    "planner",
    "step ms",
    "/ bmpipe",
    "bubble %",
    "preparation",
    "imbalance",
    "recompute",
    "communic.",
    "memory mean %",
    "max %",
    "units rec. %",
    "seconds",
)
_CSV_COLUMNS = (
    "name",
    "status",
    "step_time_ms",
    "speedup",
    "gap",
    "bubble_total",
    "bubble_preparation",
    "bubble_imbalance",
    "bubble_recompute",
    "bubble_communication",
    "memory_mean",
    "memory_max",
    "recomputed_units",
    "solve_seconds",
    "schedule",
    "chunks",
    "micro_batches",
    "peak_bytes",
    "message",
)


@dataclass(frozen=True)
class Entry:
    """What one planner answered."""

    name: str
    """Registered name."""
    problem: Problem | None
    """The problem it planned, with open settings settled; `None` if it takes none of them."""
    solution: Solution | None
    """Its answer; `None` with the problem."""
    message: str
    """Why there is no plan, or what the planner says of its plan."""

    @property
    def status(self) -> str:
        """The solution's status, or `not applicable`."""
        return NOT_APPLICABLE if self.solution is None else self.solution.status.value

    @property
    def step_time_ms(self) -> float | None:
        """Step time, if there is a plan."""
        return None if self.solution is None else self.solution.step_time_ms

    @property
    def evaluation(self) -> Evaluation | None:
        """What the plan costs, if there is one."""
        if self.problem is None or self.solution is None or self.solution.decision is None:
            return None
        return evaluate(self.problem, self.solution.decision)


def ranked(entries: Sequence[Entry], first: str = "bmpipe") -> list[Entry]:
    """The named planner first, then by step time, then those without a plan."""

    def key(entry: Entry) -> tuple[bool, float, bool, str]:
        time = float("inf") if entry.step_time_ms is None else entry.step_time_ms
        return entry.name != first, time, entry.solution is None, entry.name

    return sorted(entries, key=key)


def comparison_summary(source: str, entries: Sequence[Entry], notes: Sequence[str]) -> dict[str, Any]:
    """What ``bmpipe compare --json`` prints; `planners` is an interface.

    Of every planner: `speedup` is its step time over that of bmpipe, `gap` its distance from the best proved bound,
    `memory` the mean and the largest share of the limits used, `recomputed_units` the share of units with any
    recomputation. Without a plan they are null, and `needed_bytes` says what would fit, if known.
    """
    reference = next((entry.step_time_ms for entry in entries if entry.name == "bmpipe"), None)
    bound = _best_bound(entries)
    return {
        "source": source,
        "planners": [_row(entry, reference, bound) for entry in ranked(entries)],
        "notes": list(notes),
    }


def _best_bound(entries: Sequence[Entry]) -> float | None:
    """The highest proved bound: it holds for the plans of all planners, since all plan the same problems."""
    bounds = [
        entry.solution.bound_ms
        for entry in entries
        if entry.solution is not None and entry.solution.bound_ms is not None
    ]
    return max(bounds, default=None)


def _row(entry: Entry, reference: float | None, bound: float | None) -> dict[str, Any]:
    evaluation, solution, problem = entry.evaluation, entry.solution, entry.problem
    time = entry.step_time_ms
    row: dict[str, Any] = {
        "name": entry.name,
        "status": entry.status,
        "step_time_ms": time,
        "speedup": time / reference if time is not None and reference else None,
        "bound_ms": None if solution is None else solution.bound_ms,
        "gap": None if time is None or bound is None else max(0.0, 1 - bound / time),
        "bubble": None,
        "peak_bytes": None,
        "limit_bytes": None if problem is None else list(problem.memory_limit_bytes),
        "memory": None,
        "recomputed_units": None,
        "needed_bytes": None,
        "solve_seconds": None if solution is None else solution.solve_seconds,
        "schedule": None if problem is None else problem.schedule,
        "chunks": None if problem is None else problem.chunks,
        "micro_batches": None if problem is None else problem.micro_batches,
        "message": entry.message,
    }
    if evaluation is not None and problem is not None and solution is not None and solution.decision is not None:
        shares = [stage.peak_bytes / stage.limit_bytes for stage in evaluation.stages]
        row["bubble"] = asdict(evaluation.bubble)
        row["peak_bytes"] = [stage.peak_bytes for stage in evaluation.stages]
        row["memory"] = {"mean": sum(shares) / len(shares), "max": max(shares)}
        row["recomputed_units"] = recomputed_share(problem, solution.decision)
    elif solution is not None and solution.needed_bytes is not None:
        row["needed_bytes"] = list(solution.needed_bytes)
    return row


def recomputed_share(problem: Problem, decision: Decision) -> float:
    """Share of all units that recompute anything."""
    recomputed = sum(
        count
        for run, placed in zip(problem.runs, decision.counts, strict=True)
        for by_option in placed
        for count, option in zip(by_option, run.options, strict=True)
        if option.extra_backward_ms > 0
    )
    return recomputed / problem.units


def render_comparison(document: dict[str, Any]) -> str:
    """The table of a summary: times, losses and memory, then the peaks of every stage, then what did not work."""
    planned = [row for row in document["planners"] if row["step_time_ms"] is not None]
    others = [row for row in document["planners"] if row["step_time_ms"] is None]
    parts = []
    if planned:
        parts.append(_table(document["source"], [_cells(row) for row in planned]))
        parts.append("peak memory of the stages, GiB")
        width = max(len(row["name"]) for row in planned)
        for row in planned:
            peaks = " ".join(f"{peak / _GIB:.1f}" for peak in row["peak_bytes"])
            parts.append(f"  {row['name']:<{width}}  {peaks}")
    settings = {(row["schedule"], row["chunks"], row["micro_batches"]) for row in planned}
    if len(settings) > 1:
        parts.append("settings chosen")
        parts.extend(
            f"  {row['name']}: {row['schedule']}, {row['chunks']} chunk(s), {row['micro_batches']} micro-batches"
            for row in planned
        )
    parts.extend(f"{row['name']}: {row['status']}: {_reason(row)}" for row in others)
    parts.extend(f"note: {note}" for note in document["notes"])
    return "\n".join(parts)


def _reason(row: dict[str, Any]) -> str:
    """Why there is no plan: the stages that are furthest over their limits, if it is memory."""
    if row["needed_bytes"] is None:
        return str(row["message"])
    over = [
        (need - limit, stage)
        for stage, (need, limit) in enumerate(zip(row["needed_bytes"], row["limit_bytes"], strict=True))
        if need > limit
    ]
    worst = sorted(over, reverse=True)[:_WORST]
    listed = ", ".join(
        f"stage {stage} by {excess / _GIB:.2f} GiB" for excess, stage in sorted(worst, key=lambda e: e[1])
    )
    most = f" (the worst of {len(over)} stages)" if len(over) > len(worst) else ""
    return f"memory limits exceeded on {listed}{most}"


def _table(source: str, rows: Sequence[Sequence[str]]) -> str:
    """A table as wide as its contents, so that numbers are never broken."""
    table = Table(title=f"planners on {source}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    stream = io.StringIO()
    Console(file=stream, width=_WIDTH, no_color=True, emoji=False, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip().splitlines())


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    bubble, memory = row["bubble"], row["memory"]
    speedup = "-" if row["speedup"] is None else f"{row['speedup']:.3f}"
    return (
        row["name"],
        f"{row['step_time_ms']:.2f}",
        speedup,
        *(f"{100 * bubble[part]:.1f}" for part in ("total", "preparation", "imbalance", "recompute", "communication")),
        f"{100 * memory['mean']:.1f}",
        f"{100 * memory['max']:.1f}",
        f"{100 * row['recomputed_units']:.0f}",
        f"{row['solve_seconds']:.1f}",
    )


def comparison_csv(document: dict[str, Any]) -> str:
    """One line per planner; peaks are separated by spaces."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_CSV_COLUMNS)
    for row in document["planners"]:
        flat = {key: "" if row.get(key) is None else row.get(key) for key in _CSV_COLUMNS}
        for part, value in (row["bubble"] or {}).items():
            flat[f"bubble_{part}"] = value
        for part, value in (row["memory"] or {}).items():
            flat[f"memory_{part}"] = value
        flat["peak_bytes"] = " ".join(map(str, row["peak_bytes"] or ()))
        writer.writerow([flat[key] for key in _CSV_COLUMNS])
    return stream.getvalue()
