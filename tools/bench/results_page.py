"""docs/results.md from the figures of `headline`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tools.bench import results_joint, results_targets, results_wrong
from tools.bench.figures import MEGATRON, REFERENCE, SAME, Result, fastest, geometric_mean, others, ratio, table
from tools.bench.models import LAYOUTS

_CODES = {"not applicable": "n/a", "infeasible": "inf.", "no plan found in the time limit": "none"}

_HEAD = """\
# Simulated results

Everything on this page is a simulation of one cost model: plans of different planners, judged by the same exact
simulation of the same schedule on the same layer tables. Nothing was measured on an accelerator. Differences between
plans of one schedule are what it shows; that the machine runs a step in just this time is not claimed. Written by

    python tools/bench/headline.py --write docs/results.md

which took {seconds:.0f} s in {jobs} processes, with {time_limit:.0f} s for each planner on each instance,
{joint_limit:.0f} s for all its schedules together, and {wrong_limit:.0f} s for each plan with wrong costs.

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

_MEGATRON = """\
## Megatron's three ways

Step time over bmpipe's of an even split with full recomputation of all layers, with selective recomputation of all
layers, and of the best of a grid that holds both (`megatron_manual`). Memory: mean over the stages of peak over limit.
"""


def render(results: Sequence[Result], settings: Mapping[str, Any]) -> str:
    """The page."""
    rooms = ", ".join(f"{value:.0%} ({name})" for name, value in settings["room"].items())
    parts = [
        _HEAD.format(rooms=rooms, **settings),
        _short(results),
        results_targets.section(results, settings),
        _nothing_gained(results),
        "## Layouts\n",
        _layouts(dict.fromkeys(result["layout"] for result in results)),
        _READING,
        _times(results),
        _MEGATRON,
        _megatron(results),
        _TOGETHER,
        _summary(results),
        results_joint.section(results, settings),
        results_wrong.section(results, settings),
    ]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _nothing_gained(results: Sequence[Result]) -> str:
    """The instances on which another planner is as good."""
    equal = {}
    for result in results:
        names = [name for name in others(results) if (found := ratio(result, name)) is not None and found < 1 + SAME]
        if names:
            equal[result["instance"]] = names
    lines = [
        "## Where bmpipe gains nothing",
        "",
        f"On {len(equal)} of {len(results)} instances another planner's plan is as fast, to three decimals:",
        "",
        *(f"- {instance}: {', '.join(names)}" for instance, names in equal.items()),
    ]
    by_hand = [result["instance"] for result in results if (ratio(result, "megatron_manual") or 2.0) < 1.01]
    if by_hand:
        lines += ["", f"Less than 1 % over `megatron_manual`: {', '.join(by_hand)}."]
    return "\n".join(lines) + "\n"


def _megatron(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        row = [result["instance"]]
        for planner in MEGATRON:
            found, status = ratio(result, planner), result["planners"][planner]["status"]
            row.append(_CODES.get(status, status) if found is None else f"{found:.3f}")
        shares = [result["planners"][name].get("memory") for name in (REFERENCE, "megatron_even_full")]
        row += ["" if share is None else f"{share:.1%}" for share in shares]
        used = results_targets.utilisation(result)
        row.append("" if used is None else f"{used:.2f}")
        rows.append(row)
    names = [planner.removeprefix("megatron_").replace("_", " ") for planner in MEGATRON]
    return table(("instance", *names, "memory, bmpipe", "memory, even full", "ratio"), rows)


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
    return table(
        ("name", "model", "devices", "data x tensor x stages", "chunks", "micro-batches", "samples x tokens", "source"),
        rows,
    )


def _times(results: Sequence[Result]) -> str:
    names = others(results)
    rows = []
    for result in results:
        mine = result["planners"][REFERENCE]
        row = [result["instance"], f"{result['limit_gib']:.1f}"]
        if mine.get("step_time_ms") is None:
            row += [_CODES.get(mine["status"], mine["status"]), ""]
        else:
            row += [f"{mine['step_time_ms']:.0f}", f"{mine['gap']:.2%}"]
        for planner in names:
            found = ratio(result, planner)
            status = result["planners"][planner]["status"]
            row.append(_CODES.get(status, status) if found is None else f"{found:.3f}")
        rows.append(row)
    columns = ("instance", "limit GiB", "bmpipe ms", "gap", *(name.replace("_", " ") for name in names))
    return table(columns, rows)


def _short(results: Sequence[Result]) -> str:
    """The figures a reader looks for first, weakest comparison last."""
    lines = [
        "## In short",
        "",
        "How many times faster bmpipe's plan is, geometric mean over the instances with a plan:",
        "",
    ]
    lines.append(f"- than the fastest other planner of each instance: {geometric_mean(_best(results)):.3f}")
    named = ("sapp", "adapipe", "even", "pipedream", "dapple", "megatron_manual", "megatron_even_full")
    for planner in (planner for planner in named if planner in others(results)):
        ratios = [found for result in results if (found := ratio(result, planner)) is not None]
        if ratios:
            lines.append(f"- than {planner}: {geometric_mean(ratios):.3f} ({len(ratios)} of {len(results)})")
    return "\n".join(lines) + "\n"


def _best(results: Sequence[Result]) -> list[float]:
    """Ratio of the fastest other planner of each instance."""
    found = []
    for result in results:
        name = fastest(result, others(results))
        if name is not None:
            found.append(ratio(result, name) or 0.0)
    return found


def _summary(results: Sequence[Result]) -> str:
    rows = []
    for planner in (REFERENCE, *others(results)):
        planned = [result for result in results if ratio(result, planner) is not None]
        if not planned:
            rows.append((planner, f"0 of {len(results)}", "", "", "", "", "", ""))
            continue
        ratios = {str(result["instance"]): float(ratio(result, planner) or 0.0) for result in planned}
        least, most = min(ratios, key=lambda key: ratios[key]), max(ratios, key=lambda key: ratios[key])
        held = [result["planners"][planner] for result in planned]
        fair = [result["planners"][REFERENCE] for result in planned]
        mine = planner == REFERENCE
        rows.append(
            (
                planner,
                f"{len(planned)} of {len(results)}",
                f"{geometric_mean(list(ratios.values())):.3f}",
                "" if mine else f"{ratios[least]:.3f} ({least})",
                "" if mine else f"{ratios[most]:.3f} ({most})",
                f"{np.mean([row['memory'] for row in held]):.1%}",
                f"{np.mean([row['memory'] for row in fair]):.1%}",
                f"{np.mean([row['recomputed'] for row in held]):.0%}",
            )
        )
    best = _best(results)
    page = table(
        ("planner", "plans", "geometric mean", "least", "most", "memory", "bmpipe's there", "units recomputed"), rows
    )
    if not best:
        return page
    return (
        f"{page}\nAgainst the fastest other planner of each instance: geometric mean {geometric_mean(best):.3f}, "
        f"least {min(best):.3f}, most {max(best):.3f}.\n"
    )
