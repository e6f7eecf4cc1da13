"""Ratios, means and tables of the figures of `headline`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Result = Mapping[str, Any]
"""What `headline.measure` gives for one instance."""

REFERENCE = "bmpipe"
MEGATRON = ("megatron_even_full", "megatron_even_selective", "megatron_manual")
PUBLISHED = ("pipedream", "merak", "adapipe")
"""Planners of the literature with which the best of several is compared."""
SAME = 5e-4
"""Relative difference that a page with three decimals does not show."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join("---" for _ in columns) + "|"]
    lines.extend("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join(lines) + "\n"


def others(results: Sequence[Result]) -> list[str]:
    """Every planner but bmpipe."""
    return sorted({planner for result in results for planner in result["planners"] if planner != REFERENCE})


def ratio(result: Result, planner: str) -> float | None:
    """Step time of a planner over bmpipe's; `None` where one has no plan."""
    mine = result["planners"][REFERENCE].get("step_time_ms")
    other = result["planners"][planner].get("step_time_ms")
    return None if mine is None or other is None else other / mine


def possible(result: Result, planner: str) -> float | None:
    """Step time of a planner over the proved bound: no plan is faster than that by more."""
    bound = result["planners"][REFERENCE].get("bound_ms")
    other = result["planners"][planner].get("step_time_ms")
    return None if not bound or other is None else other / bound


def fastest(result: Result, planners: Iterable[str]) -> str | None:
    """The planner of the shortest step among these."""
    timed = [planner for planner in planners if ratio(result, planner) is not None]
    return min(timed, key=lambda planner: result["planners"][planner]["step_time_ms"]) if timed else None


def geometric_mean(ratios: Sequence[float]) -> float:
    """Geometric mean; not a number for none."""
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else float("nan")


def highest(values: Mapping[str, float | None]) -> tuple[float, str]:
    """Largest value and where; not a number if there is none."""
    held = {where: value for where, value in values.items() if value is not None}
    return max(((value, where) for where, value in held.items()), default=(float("nan"), "no instance"))


def lowest(values: Mapping[str, float | None]) -> tuple[float, str]:
    """Smallest value and where; not a number if there is none."""
    held = {where: value for where, value in values.items() if value is not None}
    return min(((value, where) for where, value in held.items()), default=(float("nan"), "no instance"))
