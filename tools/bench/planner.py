"""Every registered planner on every instance, one line each: step time, bound, gap, seconds, memory.

python tools/bench/planner.py                                   # all
python tools/bench/planner.py case_b --planner bmpipe --time-limit 120 --json
python tools/bench/planner.py interleaved-p8-v3-m32-u96-k2-r30-s5       # a random one: 30 % room, seed 5
python tools/bench/planner.py --simulator                       # plan evaluations per second
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner import SolveLimits, registered, solve
from mindspore_bmpipe.problem import stage_memory
from mindspore_bmpipe.schedule import dependency_graph, make_schedule, step_times
from mindspore_bmpipe.schedule.sweep import end_times, slot_durations
from tools.bench.instances import FAMILY_FORM, INSTANCES, instance

HEADER = ("instance", "planner", "status", "step_ms", "bound_ms", "gap", "vs_best", "seconds", "cpu_s", "peak_GB",
          "rss_GB", "stopped_by")  # fmt: skip


def measure(name: str, planner: str, limits: SolveLimits) -> dict[str, Any]:
    """Figures of one planner on one instance; memory is that of this process."""
    problem = instance(name)
    assert problem is not None
    start, start_cpu = time.perf_counter(), time.process_time()
    row: dict[str, Any] = {"instance": name, "planner": planner}
    try:
        solution = solve(problem, planner, limits)
    except InputError as error:
        return {**row, "status": f"refused: {str(error)[:40]}"}
    row |= {
        "status": solution.status.name.lower(),
        "step_ms": solution.step_time_ms,
        "bound_ms": solution.bound_ms,
        "gap": solution.gap,
        "seconds": time.perf_counter() - start,
        "cpu_s": time.process_time() - start_cpu,
        "stopped_by": solution.stopped_by.value,
        "rss_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2,
    }
    if solution.decision is not None:
        row["peak_GB"] = max(peak for _, peak in stage_memory(problem, solution.decision)) / 1e9
    return row


def measured_apart(name: str, planner: str, limits: SolveLimits) -> dict[str, Any]:
    """The same from a process of its own, so that no planner's memory counts for another."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (name, planner, limits))


def simulator_rate(stages: int = 16, chunks: int = 3, micro_batches: int = 16, plans: int = 4000) -> float:
    """Plans simulated per second in one batch."""
    schedule = make_schedule("interleaved", stages, chunks, micro_batches)
    times = np.random.default_rng(0).random((plans, stages * chunks))
    step_times(schedule, times[:10], times[:10])
    start = time.process_time()
    step_times(schedule, times, 2 * times)
    return plans / (time.process_time() - start)


def long_schedule(schedule: str, stages: int, chunks: int, micro_batches: int) -> str:
    """Milliseconds for one plan of a long schedule, all actions simulated against by its bounds."""
    start = time.process_time()
    orders = make_schedule(schedule, stages, chunks, micro_batches)
    graph = dependency_graph(orders)
    built = time.process_time() - start
    rng = np.random.default_rng(0)
    seconds = {"all": 0.0, "bounds": 0.0}
    size, worst, plans = stages * chunks, 0.0, 20
    for _ in range(plans):
        forward = 30.0 * rng.integers(3, 6, size)
        backward = 2 * forward + 7.5 * rng.integers(0, 4, size)
        durations = slot_durations(graph, forward, backward, None, 0.5)
        start = time.process_time()
        full = end_times(graph, durations).max()
        seconds["all"] += time.process_time() - start
        start = time.process_time()
        bounded = step_times(orders, forward, backward, 0.5)[0]
        seconds["bounds"] += time.process_time() - start
        worst = max(worst, abs(bounded - full) / full)
    return (
        f"{schedule}, p = {stages}, v = {chunks}, m = {micro_batches}: {graph.size} actions, built in {built:.2f} s; "
        f"{1e3 * seconds['all'] / plans:.1f} ms a plan simulated whole, {1e3 * seconds['bounds'] / plans:.1f} ms with "
        f"bounds, largest relative difference {worst:.0e}"
    )


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) and value < 1000 else (
        f"{value:.1f}" if isinstance(value, float) else str(value)
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instances", nargs="*", metavar="INSTANCE", help=f"of {', '.join(INSTANCES)}, or {FAMILY_FORM}")
    parser.add_argument("--planner", action="append", choices=registered())
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--relative-gap", type=float, default=1e-4)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--simulator", action="store_true")
    options = parser.parse_args(arguments)
    if options.simulator:
        print(f"{simulator_rate():.0f} plans a second of processor time (interleaved, p = 16, v = 3, m = 16)")
        for setting in (("1f1b", 64, 1, 1024), ("interleaved", 16, 3, 512), ("seqsmartvpp", 16, 2, 512)):
            print(long_schedule(*setting))
        return 0
    unknown = [name for name in options.instances if instance(name) is None]
    if unknown:
        parser.error(f"unknown instance {', '.join(unknown)}; there are {', '.join(INSTANCES)}, and {FAMILY_FORM}")
    limits = SolveLimits(time_limit_s=options.time_limit, relative_gap=options.relative_gap)
    if not options.json:
        print("\t".join(HEADER))
    for name in options.instances or INSTANCES:
        rows = [measured_apart(name, planner, limits) for planner in options.planner or registered()]
        best = min((row["step_ms"] for row in rows if row.get("step_ms")), default=None)
        for row in rows:
            row["vs_best"] = row["step_ms"] / best if row.get("step_ms") and best else None
            print(json.dumps(row) if options.json else "\t".join(_cell(row.get(key)) for key in HEADER), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
