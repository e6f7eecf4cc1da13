"""bmpipe against every other planner on public models and layouts, simulated; prints tables, or writes docs/results.md.

python tools/bench/headline.py                                   # tables on stdout
python tools/bench/headline.py --write docs/results.md           # the page, from this run
python tools/bench/headline.py llama3-70b --json                 # one layout, one JSON object a line
python tools/bench/headline.py --only llama3-70b/medium --seeds 0        # one instance, no wrong costs
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mindspore_bmpipe.comparison import REFERENCE, default_planners
from mindspore_bmpipe.costs.hardware import load_hardware
from mindspore_bmpipe.planner import SolveLimits
from mindspore_bmpipe.planner.choices import MOST_CHUNKS
from mindspore_bmpipe.planner.even import even_bounds
from mindspore_bmpipe.planner.recipes import FULL, kept_recipe, recipe_decision, required_recipe
from mindspore_bmpipe.problem import Decision, Problem, stage_memory
from mindspore_bmpipe.report.comparison import recomputed_share
from tools.bench.joint import answer, joint_choice, label, mean_memory
from tools.bench.models import LAYOUTS, problem_of
from tools.bench.results_page import render
from tools.bench.wrong_costs import DRAWS, MEMORY_ERROR, TIME_ERROR, wrong_costs

HARDWARE = "ascend910b"
ROOM = {"tight": 0.15, "medium": 0.5, "loose": 0.9}
"""Where the limit lies between what an even split needs with everything recomputed (0) and with nothing (1)."""
MOST_GIB = 58
"""Highest limit, of the 64 GB of a device."""


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


@dataclass(frozen=True)
class Task:
    """One instance and how much to do on it."""

    layout: str
    room: str
    time_limit_s: float
    """Seconds of each planner on the instance's own schedule."""
    joint_limit_s: float
    """Seconds of bmpipe on all schedules together."""
    wrong_limit_s: float
    """Seconds of each plan with wrong costs."""
    most_chunks: int
    seeds: int


def measure(task: Task) -> dict[str, Any]:
    """Every planner on one instance, the joint choice, and plans made with wrong costs."""
    problem = limited(problem_of(LAYOUTS[task.layout], load_hardware(HARDWARE)), ROOM[task.room])
    limits = SolveLimits(time_limit_s=task.time_limit_s)
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
        rows[planner] |= {
            "step_time_ms": solution.step_time_ms,
            "bound_ms": solution.bound_ms,
            "gap": solution.gap,
            "seconds": solution.solve_seconds,
            "memory": mean_memory(problem, solution.decision),
            "recomputed": recomputed_share(problem, solution.decision),
        }
    seconds = {"planners": time.perf_counter() - start}
    result: dict[str, Any] = {
        "instance": f"{task.layout}/{task.room}",
        "layout": task.layout,
        "schedule": label(problem),
        "limit_gib": problem.memory_limit_bytes[0] / (1 << 30),
        "planners": rows,
    }
    if task.joint_limit_s:
        begin = time.perf_counter()
        joint_limits = SolveLimits(time_limit_s=task.joint_limit_s)
        result["joint"] = joint_choice(problem, plans.values(), joint_limits, task.most_chunks)
        seconds["joint"] = time.perf_counter() - begin
    if task.seeds:
        begin = time.perf_counter()
        wrong_limits = SolveLimits(time_limit_s=task.wrong_limit_s, prove=False)
        # Errors of their own for every instance, the same in every run.
        first = zlib.crc32(result["instance"].encode())
        result["wrong"] = wrong_costs(problem, plans, range(first, first + task.seeds), wrong_limits)
        seconds["wrong"] = time.perf_counter() - begin
    return result | {"seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the instances and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--room", action="append", choices=ROOM)
    parser.add_argument("--only", action="append", metavar="LAYOUT/ROOM", help="this instance; may be given again")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of each planner (default %(default)s)")
    parser.add_argument(
        "--joint-limit", type=float, default=8.0, help="seconds for all schedules, 0 for none (default %(default)s)"
    )
    parser.add_argument(
        "--wrong-limit", type=float, default=2.0, help="seconds of a plan with wrong costs (default %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="draws of wrong costs, 0 for none (default %(default)s)")
    parser.add_argument("--most-chunks", type=int, default=MOST_CHUNKS, help="of all schedules (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.layouts if name not in LAYOUTS]
    if unknown:
        parser.error(f"unknown layout {', '.join(unknown)}; there are {', '.join(LAYOUTS)}")
    instances = [(name, room) for name in options.layouts or LAYOUTS for room in options.room or ROOM]
    if options.only:
        instances = [(name, room) for name, room in instances if f"{name}/{room}" in options.only]
        if len(instances) < len(set(options.only)):
            parser.error(f"--only: {', '.join(options.only)} are not all among the instances")
    how_much = (
        options.time_limit,
        options.joint_limit,
        options.wrong_limit,
        options.most_chunks,
        options.seeds,
    )
    tasks = [Task(name, room, *how_much) for name, room in instances]
    start = time.perf_counter()
    results = []
    with ProcessPoolExecutor(max_workers=options.jobs) as pool:
        for result in pool.map(measure, tasks):
            results.append(result)
            parts = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in result["seconds"].items())
            print(f"{result['instance']}: {parts}", file=sys.stderr, flush=True)
            if options.json:
                print(json.dumps(result), flush=True)
    if options.json:
        return 0
    settings = {
        "hardware": HARDWARE, "room": ROOM, "most_gib": MOST_GIB, "draws": DRAWS, "time_limit": options.time_limit,
        "joint_limit": options.joint_limit, "wrong_limit": options.wrong_limit, "seeds": options.seeds,
        "most_chunks": options.most_chunks, "jobs": options.jobs, "seconds": time.perf_counter() - start,
        "time_error": TIME_ERROR, "memory_error": MEMORY_ERROR,
    }  # fmt: skip
    page = render(results, settings)
    if options.write:
        options.write.write_text(page)
    else:
        print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
