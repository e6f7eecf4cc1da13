"""docs/results.md from the figures of `headline`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tools.bench.models import LAYOUTS

REFERENCE = "bmpipe"

_CODES = {"not applicable": "n/a", "infeasible": "inf.", "no plan found in the time limit": "none"}

_HEAD = """\
# Simulated results

Everything on this page is a simulation of one cost model: plans of different planners, judged by the same exact
simulation of the same schedule on the same layer tables. Nothing was measured on an accelerator. Differences between
plans of one schedule are what it shows; that the machine runs a step in just this time is not claimed. Written by

    python tools/bench/headline.py --write docs/results.md

which took {seconds:.0f} s, with {time_limit:.0f} s for each planner on each instance.

## Instances

Layer times and bytes follow from closed formulas (`tools/bench/models.py`) and `configs/hardware/{hardware}.yaml`,
whose efficiencies are assumptions. The layouts are public, for whatever machine they were made; here all run on
{hardware}. Memory limits lie part of the way from what an even split needs with every layer recomputed to what it
needs with none, or to {most_gib} GiB where that is less:
{rooms}.

Recompute options of a layer: `none`, `select` (the core of attention; with flash attention the product of the gated
feed-forward instead), `comm` (gathered inputs, where they are kept), `both`, `full`.
"""

_READING = """\
## Step times

Milliseconds of bmpipe, the proved gap, and the step time of every other planner over bmpipe's. `inf.`: its plans do not
fit; `n/a`: it does not know several chunks; `none`: nothing found in the time limit. What each planner is, and what is
assumed of it: [comparison](comparison.md). `adapipe` is a reconstruction.
"""

_TOGETHER = """\
## All instances together

Over the instances on which each planner has a plan: how many times longer its step takes than bmpipe's (geometric mean,
least, most), and the mean share of memory used and of units recomputed.
"""

_SENSITIVITY = """\
## Sensitivity

Planned with the table's figures, run with others: the forward and the backward of every virtual stage {time_noise:.0%}
shorter to longer, {draws} draws, the same for both plans. Ratio of the fastest other plan to bmpipe's: mean and least,
and the share of draws in which bmpipe's is still at least as fast. `memory`: share of draws in which some stage of
bmpipe's plan exceeds its limit when peaks turn out {memory_noise:.0%} lower to higher; `held back`: bmpipe's step time
when it plans with {memory_noise:.0%} less memory, so that no draw exceeds the limit, over its time with all of it.
"""


def render(results: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """The page."""
    rooms = ", ".join(f"{value:.0%} ({name})" for name, value in settings["room"].items())
    parts = [
        _HEAD.format(rooms=rooms, **settings),
        _short(results),
        "## Layouts\n",
        _layouts(dict.fromkeys(result["layout"] for result in results)),
        _READING,
        _times(results),
        _TOGETHER,
        _summary(results),
        _SENSITIVITY.format(**settings),
        _sensitivity(results),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join("---" for _ in columns) + "|"]
    lines.extend("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join(lines) + "\n"


def _layouts(names: Iterable[str]) -> str:
    rows = []
    for name in names:
        layout = LAYOUTS[name]
        source = layout.source + (f" ({layout.note})" if layout.note else "")
        degrees = f"{layout.data_parallel} x {layout.tensor_parallel} x {layout.stages}"
        sizes = f"{layout.samples} x {layout.sequence}"
        rows.append(
            (
                name,
                layout.model.name,
                str(layout.devices),
                degrees,
                str(layout.chunks),
                str(layout.micro_batches),
                sizes,
                f"{source}; model: {layout.model.source}",
            )
        )
    return _table(
        ("name", "model", "devices", "data x tensor x stages", "chunks", "micro-batches", "samples x tokens", "source"),
        rows,
    )


def _others(results: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({planner for result in results for planner in result["planners"] if planner != REFERENCE})


def _ratio(result: Mapping[str, Any], planner: str) -> float | None:
    mine = result["planners"][REFERENCE].get("step_time_ms")
    other = result["planners"][planner].get("step_time_ms")
    return None if mine is None or other is None else other / mine


def _times(results: Sequence[Mapping[str, Any]]) -> str:
    others = _others(results)
    rows = []
    for result in results:
        mine = result["planners"][REFERENCE]
        row = [result["instance"], f"{result['limit_gib']:.1f}"]
        if mine.get("step_time_ms") is None:
            row += [_CODES.get(mine["status"], mine["status"]), ""]
        else:
            row += [f"{mine['step_time_ms']:.0f}", f"{mine['gap']:.2%}"]
        for planner in others:
            ratio = _ratio(result, planner)
            status = result["planners"][planner]["status"]
            row.append(_CODES.get(status, status) if ratio is None else f"{ratio:.3f}")
        rows.append(row)
    names = [planner.replace("_", " ") for planner in others]
    return _table(("instance", "limit GiB", "bmpipe ms", "gap", *names), rows)


def _short(results: Sequence[Mapping[str, Any]]) -> str:
    """The figures a reader looks for first, weakest comparison last."""
    lines = [
        "## In short",
        "",
        "How many times faster bmpipe's plan is, geometric mean over the instances with a plan:",
        "",
    ]
    lines.append(f"- than the fastest other planner of each instance: {_mean(_best(results)):.3f}")
    named = ("sapp", "adapipe", "even", "pipedream", "dapple", "megatron_manual", "megatron_even_full")
    for planner in (planner for planner in named if planner in _others(results)):
        ratios = [ratio for result in results if (ratio := _ratio(result, planner)) is not None]
        if ratios:
            lines.append(f"- than {planner}: {_mean(ratios):.3f} ({len(ratios)} of {len(results)})")
    return "\n".join(lines) + "\n"


def _best(results: Sequence[Mapping[str, Any]]) -> list[float]:
    """Ratio of the fastest other planner of each instance."""
    found = []
    for result in results:
        ratios = [ratio for planner in _others(results) if (ratio := _ratio(result, planner)) is not None]
        if ratios:
            found.append(min(ratios))
    return found


def _mean(ratios: Sequence[float]) -> float:
    """Geometric mean."""
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else float("nan")


def _summary(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for planner in (REFERENCE, *_others(results)):
        planned = [result for result in results if _ratio(result, planner) is not None]
        if not planned:
            rows.append((planner, f"0 of {len(results)}", "", "", "", "", "", ""))
            continue
        ratios = {str(result["instance"]): float(_ratio(result, planner) or 0.0) for result in planned}
        least, most = min(ratios, key=lambda key: ratios[key]), max(ratios, key=lambda key: ratios[key])
        held = [result["planners"][planner] for result in planned]
        fair = [result["planners"][REFERENCE] for result in planned]
        mine = planner == REFERENCE
        rows.append(
            (
                planner,
                f"{len(planned)} of {len(results)}",
                f"{_mean(list(ratios.values())):.3f}",
                "" if mine else f"{ratios[least]:.3f} ({least})",
                "" if mine else f"{ratios[most]:.3f} ({most})",
                f"{np.mean([row['memory'] for row in held]):.1%}",
                f"{np.mean([row['memory'] for row in fair]):.1%}",
                f"{np.mean([row['recomputed'] for row in held]):.0%}",
            )
        )
    best = _best(results)
    table = _table(
        ("planner", "plans", "geometric mean", "least", "most", "memory", "bmpipe's there", "units recomputed"), rows
    )
    if not best:
        return table
    return (
        f"{table}\nAgainst the fastest other planner of each instance: geometric mean {_mean(best):.3f}, "
        f"least {min(best):.3f}, most {max(best):.3f}.\n"
    )


def _sensitivity(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for result in results:
        noise = result.get("noise")
        if noise is None:
            continue
        held = result.get("held_back")
        rows.append(
            (
                str(result["instance"]),
                noise["against"],
                f"{_ratio(result, noise['against']):.3f}",
                f"{noise['mean']:.3f}",
                f"{noise['least']:.3f}",
                f"{noise['faster']:.0%}",
                f"{result['planners'][REFERENCE]['overflows']:.0%}",
                "no plan" if held is None else f"{held:.3f}",
            )
        )
    return _table(
        ("instance", "fastest other", "as planned", "mean", "least", "still faster", "memory", "held back"), rows
    )
