"""The section of docs/results.md on choosing the schedule together with the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.bench.figures import PUBLISHED, REFERENCE, Result, fastest, geometric_mean, table

_TEXT = """\
## Schedule and plan together

The same instances with `schedule: auto, chunks: auto`: every order that MindSpore accepts for the stages and
micro-batches, up to {most_chunks} chunks, same memory limit, {joint_limit:.0f} s for all together. The first columns
are bmpipe's step time with its own schedule over that with others (`none`: no plan fits, or it is not accepted; most
are first looks only). `auto` is the best, so what the joint choice adds; `at most` what the proved bounds leave.
Transfers between stages cost the same in every schedule and overlap with computation, which favours many chunks.
"""

_AGAINST = """\
The joint choice against others. `published`: the fastest of {published}, which plan one chunk and keep
`1f1b`, on instances whose own schedule that is. This compares a planner that may choose the schedule with planners that
may not. `by hand`: `megatron_manual` with the best of `1f1b` and `interleaved` with any number of chunks, so it may
choose as well. `same schedule`: the fastest other planner on the very schedule that bmpipe chose.
"""


def over(result: Result, step_time_ms: float | None) -> float | None:
    """A step time over that of the joint choice."""
    mine = result.get("joint", {}).get("step_time_ms")
    return None if not mine or step_time_ms is None else step_time_ms / mine


def added(result: Result) -> float | None:
    """Bmpipe's step time with the instance's own schedule over that of the joint choice."""
    return over(result, result["planners"][REFERENCE].get("step_time_ms"))


def against_published(result: Result) -> float | None:
    """Step time of the fastest planner of the literature, on its own schedule, over the joint choice's."""
    name = fastest(result, PUBLISHED)
    return None if name is None else over(result, result["planners"][name]["step_time_ms"])


def possible_over_published(result: Result) -> float | None:
    """The same over the least bound of all schedules."""
    name, bound = fastest(result, PUBLISHED), result.get("joint", {}).get("bound_ms")
    return None if name is None or not bound else result["planners"][name]["step_time_ms"] / bound


def against_by_hand(result: Result) -> float | None:
    """Step time of Megatron's grid with its best schedule over the joint choice's."""
    return over(result, result.get("joint", {}).get("by_hand", {}).get("step_time_ms"))


def on_same_schedule(result: Result) -> float | None:
    """Step time of the fastest other planner on the chosen schedule over the joint choice's."""
    times = result.get("joint", {}).get("same_schedule")
    return over(result, min(times.values())) if times else None


def section(results: Sequence[Result], settings: Mapping[str, Any]) -> str:
    """The section."""
    held = [result for result in results if result.get("joint")]
    if not held:
        return ""
    return "\n".join(
        (_TEXT.format(**settings), _added(held), _AGAINST.format(published=", ".join(PUBLISHED)), _against(held))
    )


def _kinds(results: Sequence[Result]) -> list[str]:
    names = dict.fromkeys(name.split(" x ")[0] for result in results for name in result["joint"]["choices"])
    return list(names)


def _added(results: Sequence[Result]) -> str:
    kinds = _kinds(results)
    rows = []
    for result in results:
        own, joint = result["planners"][REFERENCE].get("step_time_ms"), result["joint"]
        row = [result["instance"], result["schedule"]]
        for kind in kinds:
            times = {
                name: time
                for name, time in joint["choices"].items()
                if name.split(" x ")[0] == kind and time is not None
            }
            best = min(times, key=lambda name: times[name]) if times else None
            row.append("none" if best is None or own is None else f"{own / times[best]:.3f} (x {best.split(' x ')[1]})")
        row += [
            joint["schedule"],
            _text(added(result)),
            _text(own / joint["bound_ms"] if own and joint["bound_ms"] else None),
        ]
        rows.append(row)
    gains = [gain for result in results if (gain := added(result)) is not None]
    summary = f"\nGeometric mean of what the joint choice adds: {geometric_mean(gains):.3f}.\n"
    columns = ("instance", "own schedule", *(f"{kind}" for kind in kinds), "chosen", "auto", "at most")
    return table(columns, rows) + summary


def _against(results: Sequence[Result]) -> str:
    rows: list[tuple[str, ...]] = []
    for result in results:
        joint = result["joint"]
        same = joint["same_schedule"]
        name = fastest(result, PUBLISHED)
        rows.append(
            (
                result["instance"],
                joint["schedule"],
                "n/a" if name is None else f"{_text(against_published(result))} ({name})",
                f"{_text(against_by_hand(result))} ({joint.get('by_hand', {}).get('schedule', 'none')})",
                "none" if not same else f"{_text(on_same_schedule(result))} ({min(same, key=lambda key: same[key])})",
                f"{joint['memory']:.0%}",
            )
        )
    means = [
        geometric_mean([value for result in results if (value := figure(result)) is not None])
        for figure in (against_published, against_by_hand, on_same_schedule)
    ]
    rows.append(("geometric mean", "", *(f"{mean:.3f}" for mean in means), ""))
    return table(("instance", "chosen", "published", "by hand", "same schedule", "memory"), rows)


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
