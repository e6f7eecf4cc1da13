"""Plans made with costs that are wrong: forward and backward times by up to 10 %, bytes by up to 5 %, evenly spread.

Two ways to be wrong, because errors of many units partly cancel and errors of a kind of unit do not:

- kinds: the costs that are planned with have an error for each kind of unit, the same for all its units; every planner
  plans with them, and the plans are judged with the right ones. The right figure is within the range around the
  planned one.
- units: planned with the right costs, judged with an error for each single unit.

Forward, backward, weights with what belongs to them, and activations are wrong each by themselves; recomputation is
wrong as the forward it repeats. A plan that exceeds a limit counts as failed, whatever its time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.comparison import REFERENCE
from mindspore_bmpipe.planner import SolveLimits
from mindspore_bmpipe.problem import (
    Decision,
    Problem,
    Run,
    check,
    evaluate,
    expand_decision,
    schedule_of,
    simulated_ms,
)
from mindspore_bmpipe.problem_config import usable_bytes
from mindspore_bmpipe.schedule import in_flight_rows, splits_backward
from mindspore_bmpipe.split_backward import repeats_of
from mindspore_bmpipe.transfers import decision_transfers
from tools.bench.joint import MANUAL, answer

TIME_ERROR, MEMORY_ERROR = 0.10, 0.05
DRAWS = 40
"""Draws of errors of single units; plans are made once for all of them."""


MARGINS = {"": 0.0, " half margin": MEMORY_ERROR / 2, " margin": MEMORY_ERROR}
"""`memory_margin` by what it adds to the name of a plan: as large as the error, so that none makes a plan fail, and
half of it, which is enough where errors cancel."""


@dataclass(frozen=True)
class Judged:
    """One plan with the costs of every draw."""

    times_ms: list[float]
    """Step times."""
    fits: list[bool]
    """Whether every stage stays within its limit."""


def with_margin(problem: Problem, margin: float) -> Problem:
    """The problem planned with `memory_margin`."""
    return replace(problem, memory_limit_bytes=usable_bytes(problem.memory_limit_bytes, margin))


def wrong_kinds(problem: Problem, seed: int) -> Problem:
    """The problem with other costs of each kind of unit, so that the right ones are within the errors around them."""
    generator = np.random.default_rng(seed)

    def less(size: int, factor: float) -> int:
        return math.ceil(size / factor)

    runs = []
    for run in problem.runs:
        forward, backward = generator.uniform(1 - TIME_ERROR, 1 + TIME_ERROR, 2).tolist()
        static, saved = generator.uniform(1 - MEMORY_ERROR, 1 + MEMORY_ERROR, 2).tolist()
        options = tuple(
            replace(
                option,
                saved_bytes=less(option.saved_bytes, saved),
                working_set_bytes=less(option.working_set_bytes, saved),
                extra_backward_ms=option.extra_backward_ms / forward,
                repeated_ms=first / forward,
                repeated_after_ms=first / forward + (after - first) / backward,
            )
            for option, first, after in zip(run.options, *_repeated(run), strict=True)
        )
        runs.append(
            replace(
                run,
                forward_ms=run.forward_ms / forward,
                backward_ms=run.backward_ms / backward,
                weight_gradient_ms=None if run.weight_gradient_ms is None else run.weight_gradient_ms / backward,
                static_bytes=less(run.static_bytes, static),
                update_bytes=less(run.update_bytes, static),
                options=options,
            )
        )
    return replace(problem, runs=tuple(runs))


def _repeated(run: Run) -> tuple[list[float], list[float]]:
    """What separate weight gradients run again of a unit, by option: as the first of its chunk, and behind it."""
    repeats = repeats_of(run)
    return repeats.first.tolist(), repeats.after.tolist()


def judged_by_units(problem: Problem, decision: Decision, seed: int, draws: int = DRAWS) -> Judged:
    """A plan with errors of every single unit; the same errors for every plan of a problem with the seed."""
    places = expand_decision(problem, decision)
    runs = [problem.runs[place.run] for place in places]
    options = [problem.runs[place.run].options[place.option_index] for place in places]
    virtual = np.array([place.virtual_stage for place in places])
    generator = np.random.default_rng(seed)
    shape = (draws, len(places))
    forward, backward = generator.uniform(1 - TIME_ERROR, 1 + TIME_ERROR, (2, *shape))
    static, saved = generator.uniform(1 - MEMORY_ERROR, 1 + MEMORY_ERROR, (2, *shape))

    def on_virtual(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        sums = np.zeros((draws, problem.virtual_stages))
        for unit, place in enumerate(virtual.tolist()):
            sums[:, place] += values[:, unit]
        return sums

    speeds = np.array([problem.speeds[stage] for stage in schedule_of(problem).stage_of_virtual])
    forward_ms = on_virtual(forward * [run.forward_ms for run in runs]) / speeds
    extra = forward * [option.extra_backward_ms for option in options]
    backward_ms = on_virtual(backward * [run.backward_ms for run in runs] + extra) / speeds
    weight_ms = None
    if splits_backward(schedule_of(problem)):
        repeated = np.zeros(shape)
        started: set[int] = set()
        for unit, place in enumerate(places):
            first, after = (times[place.option_index] for times in _repeated(runs[unit]))
            behind = place.virtual_stage in started
            # Recomputation is wrong as forwards are, gradients as backwards are.
            repeated[:, unit] = forward[:, unit] * first + backward[:, unit] * (after - first) * behind
            started.update([place.virtual_stage] if first else [])
        parts = on_virtual(backward * [run.split_weight_ms for run in runs]), on_virtual(repeated)
        weight_ms = np.stack(parts, axis=1) / speeds
    fits = np.ones(draws, dtype=bool)
    on_stage = np.array([place.stage for place in places])
    static_bytes = static * [run.static_bytes for run in runs]
    updating = static * [run.static_bytes + run.update_bytes for run in runs]
    kept = on_virtual(saved * [option.saved_bytes for option in options])
    working = saved * [option.working_set_bytes for option in options]
    for stage, rows in enumerate(in_flight_rows(schedule_of(problem))):
        here = on_stage == stage
        chunks = list(schedule_of(problem).virtual_of_chunk[stage])
        in_flight = (kept[:, chunks] @ np.array(rows).T).max(axis=1)
        shared = problem.shared_saved_bytes * max(map(sum, rows))
        running = static_bytes[:, here].sum(axis=1) + shared + in_flight + working[:, here].max(axis=1)
        peak = problem.stage_constant_bytes + np.maximum(running, updating[:, here].sum(axis=1))
        fits &= peak <= problem.memory_limit_bytes[stage]
    transfers = decision_transfers(problem, decision.counts)
    times = simulated_ms(problem, forward_ms, backward_ms, weight_ms, transfers)
    return Judged(times.tolist(), fits.tolist())


def judged(problem: Problem, decision: Decision) -> tuple[float, bool]:
    """Step time of a plan, and whether it fits."""
    fits = all(violation.kind != "memory" for violation in check(problem, decision))
    return evaluate(problem, decision).step_time_ms, fits


def wrong_costs(
    problem: Problem, plans: dict[str, Decision], seeds: Sequence[int], limits: SolveLimits
) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """Bmpipe and Megatron's grid, each with and without a margin, with both kinds of errors.

    Args:
        problem: with the right costs.
        plans: those of both planners without errors.
        seeds: one per draw of errors of kinds, with each of which both plan; the first also for errors of units.
        limits: of each plan.

    Returns:
        By kind of error and plan (planner and margin) step times and whether it fits, one per draw;
        `None` where there is no plan.
    """
    names = [f"{planner}{suffix}" for planner in (MANUAL, REFERENCE) for suffix in MARGINS]
    kinds: dict[str, dict[str, list[Any]]] = {name: {"times_ms": [], "fits": []} for name in names}
    for seed in seeds:
        found = _plans(wrong_kinds(problem, seed), {}, limits)
        for name in names:
            time, fits = judged(problem, found[name]) if name in found else (None, None)
            kinds[name]["times_ms"].append(time)
            kinds[name]["fits"].append(fits)
    units: dict[str, dict[str, list[Any]]] = {}
    found = _plans(problem, plans, limits)
    for name in names:
        result = judged_by_units(problem, found[name], seeds[0]) if name in found else Judged([], [])
        units[name] = {"times_ms": result.times_ms, "fits": result.fits}
    return {"kinds": kinds, "units": units}


def _plans(problem: Problem, known: dict[str, Decision], limits: SolveLimits) -> dict[str, Decision]:
    """Plans by planner and margin; known ones are not made again."""
    found = {name: known[name] for name in (MANUAL, REFERENCE) if name in known}
    for suffix, margin in MARGINS.items():
        posed = with_margin(problem, margin)
        for planner in (MANUAL, REFERENCE):
            if planner + suffix not in found:
                solution, _ = answer(posed, planner, limits)
                if solution is not None and solution.decision is not None:
                    found[planner + suffix] = solution.decision
    return found
