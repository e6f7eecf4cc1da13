"""bmpipe against every other planner on public models and layouts, simulated; prints tables, or writes docs/results.md.

python tools/bench/headline.py                                   # tables on stdout
python tools/bench/headline.py --write docs/results.md           # the page, from this run
python tools/bench/headline.py llama3-70b --json                 # one layout, one JSON object a line
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mindspore_bmpipe.comparison import REFERENCE, default_planners
from mindspore_bmpipe.costs.hardware import load_hardware
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner import Solution, SolveLimits, solve
from mindspore_bmpipe.planner.even import even_bounds
from mindspore_bmpipe.planner.recipes import FULL, kept_recipe, recipe_decision, required_recipe
from mindspore_bmpipe.problem import (
    Decision,
    Problem,
    simulated_ms,
    stage_memory,
    virtual_stage_times,
    virtual_stage_weights,
)
from mindspore_bmpipe.report.comparison import recomputed_share
from mindspore_bmpipe.transfers import decision_transfers
from tools.bench.models import LAYOUTS, problem_of
from tools.bench.results_page import render

HARDWARE = "ascend910b"
ROOM = {"tight": 0.15, "medium": 0.5, "loose": 0.9}
"""Where the limit lies between what an even split needs with everything recomputed (0) and with nothing (1)."""
MOST_GIB = 58
"""Highest limit, of the 64 GB of a device."""
TIME_NOISE, MEMORY_NOISE = 0.10, 0.05
DRAWS = 40


def limited(problem: Problem, room: float) -> Problem:
    """The problem with the memory limit of a room."""
    bounds = even_bounds(problem)
    assert bounds is not None
    least, most = (
        max(peak for _, peak in stage_memory(problem, recipe_decision(problem, bounds, recipe)))
        for recipe in (required_recipe(problem, FULL, "headline"), kept_recipe(problem))
    )
    most = min(most, MOST_GIB << 30)
    return with_limit(problem, int(least + room * (most - least)))


def with_limit(problem: Problem, limit: int) -> Problem:
    """The problem with one limit for all stages."""
    return replace(problem, memory_limit_bytes=(limit,) * problem.stages)


def noisy_ms(problem: Problem, decision: Decision, seed: int) -> np.ndarray:
    """Step times when each virtual stage's forward and backward turn out up to 10 % shorter or longer, by draw."""
    generator = np.random.default_rng(seed)
    shape = (2, DRAWS, problem.virtual_stages)
    factors = generator.uniform(1 - TIME_NOISE, 1 + TIME_NOISE, shape)
    forward, backward = virtual_stage_times(problem, decision)
    weight = virtual_stage_weights(problem, decision)
    noisy_weight = None if weight is None else np.array(weight) * factors[1]
    transfers = decision_transfers(problem, decision.counts)
    return simulated_ms(
        problem, np.array(forward) * factors[0], np.array(backward) * factors[1], noisy_weight, transfers
    )


def overflows(problem: Problem, decision: Decision, seed: int) -> float:
    """Share of draws in which some stage needs more than its limit, peaks being up to 5 % lower or higher."""
    generator = np.random.default_rng(seed)
    factors = generator.uniform(1 - MEMORY_NOISE, 1 + MEMORY_NOISE, (DRAWS, problem.stages))
    peaks = np.array([peak for _, peak in stage_memory(problem, decision)]) * factors
    return float((peaks > np.array(problem.memory_limit_bytes)).any(axis=1).mean())


def answer(problem: Problem, planner: str, limits: SolveLimits) -> tuple[Solution | None, str]:
    """A planner's solution, or why it does not apply."""
    try:
        solution = solve(problem, planner, limits)
    except InputError as error:
        return None, str(error)
    return solution, solution.message


def measure(task: tuple[str, str, float]) -> dict[str, Any]:
    """Every planner on one instance."""
    name, room, seconds = task
    problem = limited(problem_of(LAYOUTS[name], load_hardware(HARDWARE)), ROOM[room])
    limits = SolveLimits(time_limit_s=seconds)
    start = time.perf_counter()
    rows: dict[str, dict[str, Any]] = {}
    plans: dict[str, Decision] = {}
    for planner in (*(planner for planner in default_planners() if planner != REFERENCE), REFERENCE):
        asked = replace(limits, starts=tuple(plans.values())) if planner == REFERENCE else limits
        solution, message = answer(problem, planner, asked)
        rows[planner] = {"status": "not applicable" if solution is None else str(solution.status), "message": message}
        if solution is None or solution.decision is None:
            continue
        plans[planner] = solution.decision
        peaks = [peak for _, peak in stage_memory(problem, solution.decision)]
        rows[planner] |= {
            "step_time_ms": solution.step_time_ms,
            "gap": solution.gap,
            "seconds": solution.solve_seconds,
            "memory": float(np.mean(peaks)) / problem.memory_limit_bytes[0],
            "recomputed": recomputed_share(problem, solution.decision),
            "overflows": overflows(problem, solution.decision, 0),
        }
    result = {
        "instance": f"{name}/{room}",
        "layout": name,
        "limit_gib": problem.memory_limit_bytes[0] / (1 << 30),
        "planners": rows,
    }
    if REFERENCE in plans:
        result |= sensitivity(problem, plans, rows, limits)
    return result | {"seconds": time.perf_counter() - start}


def sensitivity(
    problem: Problem, plans: dict[str, Decision], rows: dict[str, dict[str, Any]], limits: SolveLimits
) -> dict[str, Any]:
    """Noise in times for bmpipe and the fastest other, and bmpipe with 5 % of the memory held back."""
    found: dict[str, Any] = {}
    others = [planner for planner in plans if planner != REFERENCE]
    if others:
        closest = min(others, key=lambda planner: rows[planner]["step_time_ms"])
        ratios = noisy_ms(problem, plans[closest], 1) / noisy_ms(problem, plans[REFERENCE], 1)
        found["noise"] = {
            "against": closest,
            "mean": float(ratios.mean()),
            "least": float(ratios.min()),
            "faster": float((ratios >= 1).mean()),
        }
    lower = with_limit(problem, int(problem.memory_limit_bytes[0] * (1 - MEMORY_NOISE) / (1 + 1e-9)))
    held = solve(lower, REFERENCE, limits)
    if held.step_time_ms is not None:
        found["held_back"] = held.step_time_ms / rows[REFERENCE]["step_time_ms"]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the instances and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--room", action="append", choices=ROOM)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of each planner (default 20)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.layouts if name not in LAYOUTS]
    if unknown:
        parser.error(f"unknown layout {', '.join(unknown)}; there are {', '.join(LAYOUTS)}")
    tasks = [(name, room, options.time_limit) for name in options.layouts or LAYOUTS for room in options.room or ROOM]
    start = time.perf_counter()
    results = []
    with ProcessPoolExecutor(max_workers=options.jobs) as pool:
        for result in pool.map(measure, tasks):
            results.append(result)
            print(f"{result['instance']}: {result['seconds']:.0f} s", file=sys.stderr)
    if options.json:
        for result in results:
            print(json.dumps(result))
        return 0
    settings = {
        "hardware": HARDWARE, "room": ROOM, "most_gib": MOST_GIB, "draws": DRAWS, "time_limit": options.time_limit,
        "seconds": time.perf_counter() - start, "time_noise": TIME_NOISE, "memory_noise": MEMORY_NOISE,
    }  # fmt: skip
    page = render(results, settings)
    if options.write:
        options.write.write_text(page)
    else:
        print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
