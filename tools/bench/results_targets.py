"""What was aimed at, what was reached, and the bound that shows how much was possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tools.bench.figures import (
    PUBLISHED,
    REFERENCE,
    Result,
    fastest,
    geometric_mean,
    highest,
    lowest,
    others,
    possible,
    ratio,
    table,
)
from tools.bench.results_joint import added, against_published, on_same_schedule, possible_over_published
from tools.bench.results_wrong import CASES, failed, kept_gain

MOST_SECONDS = 1200
FULL = "megatron_even_full"
MANUAL = "megatron_manual"

_TEXT = """\
## Targets

What this comparison was to show, and what it shows. `possible`: the same figure with bmpipe's proved lower bound in
place of its step time (no plan of the schedule does better, whoever makes it), or with all memory of all stages used.
"""


def section(results: Sequence[Result], settings: Mapping[str, Any]) -> str:
    """The section."""
    return "\n".join((_TEXT, table(("target", "wanted", "found", "", "possible"), _rows(results, settings))))


def utilisation(result: Result) -> float | None:
    """Mean share of memory that bmpipe's plan uses over that of Megatron's with full recomputation."""
    mine, other = (result["planners"][name].get("memory") for name in (REFERENCE, FULL))
    return None if mine is None or other is None else mine / other


def _rows(results: Sequence[Result], settings: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = [
        _most("best over Megatron, full recomputation", 1.36, _each(results, lambda it: ratio(it, FULL)),
              _each(results, lambda it: possible(it, FULL))),
        _most(f"best over the fastest of {', '.join(PUBLISHED)}, same schedule", 1.27, _each(results, _published),
              _each(results, _published_possible)),
    ]  # fmt: skip
    if any(result.get("joint") for result in results):
        rows.append(
            _most("the same, bmpipe choosing the schedule as well", 1.27, _each(results, against_published),
                  _each(results, possible_over_published))
        )  # fmt: skip
    rows.append(
        _most("memory used over Megatron, full recomputation", 1.42, _each(results, utilisation), _each(results, _full))
    )
    by_hand = [found for result in results if (found := ratio(result, MANUAL)) is not None]
    most = [found for result in results if (found := possible(result, MANUAL)) is not None]
    rows.append(
        _row("geometric mean over `megatron_manual`", 1.05, geometric_mean(by_hand), "", f"{geometric_mean(most):.3f}")
    )
    least, where = lowest(
        {f"{it['instance']}, {planner}": ratio(it, planner) for it in results for planner in others(results)}
    )
    rows.append(_row("least over any planner, same schedule", 1.0, least, where, ""))
    if any(result.get("joint") for result in results):
        least, where = lowest(_each(results, added))
        rows.append(_row("least of the joint choice over the own schedule", 1.0, least, where, ""))
        least, where = lowest(_each(results, on_same_schedule))
        rows.append(_row("least over any planner, schedule of the joint choice", 1.0, least, where, ""))
    held = [result for result in results if result.get("wrong")]
    for error in ("kinds", "units") if held else ():
        for mine, other, text in CASES:
            kept = kept_gain(held, error, mine, other).kept
            fails, draws = failed(held, error, mine)
            where = f"fails in {fails} of {draws} draws"
            rows.append(_row(f"gain kept with wrong costs ({error}), {text}", 0.8, kept, where, "", percent=True))
    met = "yes" if settings["seconds"] < MOST_SECONDS else "no"
    rows.append(
        (f"{len(results)} instances, {settings['jobs']} processes", f"< {MOST_SECONDS} s",
         f"{settings['seconds']:.0f} s: {met}", "", "")
    )  # fmt: skip
    return rows


def _each(results: Sequence[Result], figure: Any) -> dict[str, float | None]:
    return {result["instance"]: figure(result) for result in results}


def _most(
    text: str, wanted: float, found: Mapping[str, float | None], bound: Mapping[str, float | None]
) -> tuple[str, ...]:
    most, where = highest(found)
    limit, place = highest(bound)
    return _row(text, wanted, most, where, f"{limit:.3f} ({place})")


def _row(text: str, wanted: float, found: float, where: str, bound: str, percent: bool = False) -> tuple[str, ...]:
    # Equal step times may differ by rounding.
    met = "yes" if found >= wanted * (1 - 1e-9) else "no"
    if np.isnan(found):
        return text, f">= {wanted:.2f}", "nothing to compare", where, bound
    shown = (f">= {wanted:.0%}", f"{found:.0%}: {met}") if percent else (f">= {wanted:.2f}", f"{found:.3f}: {met}")
    return (text, *shown, where, bound)


def _published(result: Result) -> float | None:
    name = fastest(result, PUBLISHED)
    return None if name is None else ratio(result, name)


def _published_possible(result: Result) -> float | None:
    name = fastest(result, PUBLISHED)
    return None if name is None else possible(result, name)


def _full(result: Result) -> float | None:
    share = result["planners"][FULL].get("memory")
    return None if share is None else 1 / share
