"""The section of docs/results.md on plans made with wrong costs, and its figures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.bench.figures import REFERENCE, Result, geometric_mean, ratio, table

MANUAL = "megatron_manual"
CASES = (
    ("bmpipe", "megatron_manual", "no margins"),
    ("bmpipe half margin", "megatron_manual", "bmpipe half margin"),
    ("bmpipe half margin", "megatron_manual half margin", "both half margin"),
    ("bmpipe margin", "megatron_manual", "bmpipe margin"),
    ("bmpipe margin", "megatron_manual margin", "both margin"),
)
"""Whose plan against whose, and what the pair is called."""

_TEXT = """\
## Costs that are wrong

Times {time_error:.0%} and bytes {memory_error:.0%} off at most, evenly spread, between planning and simulation.
`kinds`: every kind of unit (embedding, layer, head) has its own errors, both planners plan with the wrong costs,
{seeds} draws an instance. `units`: planned with the right costs, every single unit has its own errors, {draws} draws
an instance. Forward, backward, weights and activations are each wrong by themselves. A plan that exceeds a limit has
failed, whatever its time.

`margin` is [`memory_margin`](planning.md#costs-that-are-wrong) {memory_error:.0%}, with which no such error makes a
plan exceed a limit; `half margin` half of it. Gain: geometric mean over all instances, each with the mean of its draws,
of `megatron_manual`'s step time over bmpipe's, less 1; kept: what share of the gain without errors, on the same
instances, that is. Draws in which bmpipe's plan fails do not count; those in which Megatron's fails do, so where only
bmpipe keeps a margin it is compared with plans that may not run.
"""


@dataclass(frozen=True)
class Kept:
    """What is left of bmpipe's gain over Megatron's grid."""

    gain: float
    """Geometric mean of the ratio with errors, less 1."""
    kept: float
    """The same over the gain without errors."""
    instances: int
    """Instances with at least one draw that counts."""
    draws: int
    """Draws that count."""


def kept_gain(results: Sequence[Result], error: str, mine: str, other: str) -> Kept:
    """Gain with one kind of error; draws in which bmpipe's plan fails or there is no plan do not count."""
    means, before, draws = [], [], 0
    for result in results:
        rows = result["wrong"][error]
        ratios = [
            theirs / ours
            for ours, fits, theirs in zip(
                rows[mine]["times_ms"], rows[mine]["fits"], rows[other]["times_ms"], strict=False
            )
            if ours is not None and theirs is not None and fits
        ]
        planned = ratio(result, MANUAL)
        if ratios and planned is not None:
            means.append(geometric_mean(ratios))
            before.append(planned)
            draws += len(ratios)
    gain, without = geometric_mean(means) - 1, geometric_mean(before) - 1
    return Kept(gain, gain / without if without else float("nan"), len(means), draws)


def failed(results: Sequence[Result], error: str, name: str) -> tuple[int, int]:
    """Draws in which a plan exceeds a limit, and draws with a plan."""
    fits = [entry for result in results for entry in result["wrong"][error][name]["fits"] if entry is not None]
    return sum(not entry for entry in fits), len(fits)


def section(results: Sequence[Result], settings: Mapping[str, Any]) -> str:
    """The section."""
    held = [result for result in results if result.get("wrong")]
    if not held:
        return ""
    parts = [_TEXT.format(**settings), _kept(held), _by_instance(held)]
    missing = _without_plan(held)
    if missing:
        parts.append(missing)
    return "\n".join(parts)


def _kept(results: Sequence[Result]) -> str:
    rows = []
    for error, (mine, other, text) in itertools.product(("kinds", "units"), CASES):
        found = kept_gain(results, error, mine, other)
        fails = [f"{count} of {draws}" for count, draws in (failed(results, error, name) for name in (mine, other))]
        of = f"{found.instances} of {len(results)}"
        kept = "none" if np.isnan(found.kept) else f"{found.kept:.0%}"
        rows.append((error, text, f"{found.gain:.3f}", kept, of, *fails))
    columns = ("errors", "margins", "gain", "kept", "instances", "bmpipe's plan fails", "Megatron's fails")
    return table(columns, rows)


def _by_instance(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        planned = ratio(result, MANUAL)
        row = [result["instance"], "" if planned is None else f"{planned:.3f}"]
        for error in ("kinds", "units"):
            count, draws = failed([result], error, REFERENCE)
            row.append(f"{count} of {draws}")
            for mine, other, _ in CASES[-2:]:
                found = kept_gain([result], error, mine, other)
                row.append("no plan" if np.isnan(found.gain) else f"{1 + found.gain:.3f}")
        rows.append(row)
    columns = ["instance", "no errors"]
    for error in ("kinds", "units"):
        columns += [f"{error}: bmpipe exceeds", "with margin", "both with margin"]
    text = "`megatron_manual`'s step time over bmpipe's, and the draws in which bmpipe's plan without margin fails:\n\n"
    return text + table(columns, rows)


def _without_plan(results: Sequence[Result]) -> str:
    """Instances on which a margin leaves no plan."""
    names = [
        result["instance"]
        for result in results
        if any(None in rows["bmpipe margin"]["times_ms"] for rows in result["wrong"].values())
        or not result["wrong"]["units"]["bmpipe margin"]["times_ms"]
    ]
    return f"With the margin bmpipe has no plan in some draws of {', '.join(names)}.\n" if names else ""
