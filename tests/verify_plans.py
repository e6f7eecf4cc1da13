"""Plans made by hand, and what tests of verification share."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mindspore_bmpipe.config import parse_config
from mindspore_bmpipe.costs.network import NetworkCosts
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.planner import Solution, Status
from mindspore_bmpipe.planning import plan_of, pose
from mindspore_bmpipe.problem import Decision, check, evaluate
from mindspore_bmpipe.subjects import subject_of_network
from mindspore_bmpipe.verify.stand_in import COMPILER_VARIABLE, COMPILERS, real_toolkit

Choose = Callable[[int, list[str]], str]
"""Recompute option of a unit, from its index and the names it may choose from."""

needs_compiler = pytest.mark.skipif(
    real_toolkit() is None and not any(map(shutil.which, (os.environ.get(COMPILER_VARIABLE) or "g++", *COMPILERS))),
    reason="compiling for Ascend without CANN needs a C++ compiler",
)


def keep_all(unit: int, names: list[str]) -> str:
    """No recomputation."""
    del unit, names
    return "none"


def mixed(unit: int, names: list[str]) -> str:
    """Other options for neighbouring units: `none` for the second, `full` for the third, and so on."""
    return names[(1 - unit) % len(names)]


def hand_plan(costs: NetworkCosts, cuts: Sequence[int], choose: Choose = keep_all, **config: Any) -> Plan:
    """A plan with the given first units of virtual stages 1, 2, ... and the chosen options; one chunk unless told."""
    settings = {"schedule": "1f1b", "hardware": "ascend910b", "memory_limit": "60GB", "micro_batches": 4, **config}
    settings.setdefault("stages", (len(cuts) + 1) // int(settings.setdefault("chunks", 1)))
    subject = subject_of_network(costs, parse_config(settings))
    problem = pose(subject)
    counts = [[[0] * len(run.options) for _ in range(problem.virtual_stages)] for run in problem.runs]
    unit = 0
    for index, run in enumerate(problem.runs):
        names = [option.name for option in run.options]
        for _ in range(run.count):
            counts[index][sum(unit >= cut for cut in cuts)][names.index(choose(unit, names))] += 1
            unit += 1
    decision = Decision(tuple(tuple(tuple(row) for row in placed) for placed in counts))
    assert check(problem, decision) == ()
    step = evaluate(problem, decision).step_time_ms
    solution = Solution(
        planner="hand", status=Status.FEASIBLE, decision=decision, step_time_ms=step, bound_ms=None, gap=None,
        solve_seconds=0.0, needed_bytes=None, message="",
    )  # fmt: skip
    return plan_of(subject, problem, solution)


def with_unit(plan: Plan, name: str, **changes: Any) -> Plan:
    """The plan with one unit changed, and nothing else adapted to it."""
    units = tuple(dataclasses.replace(unit, **changes) if unit.name == name else unit for unit in plan.units)
    return dataclasses.replace(plan, units=units)


def processes_about(folder: Path) -> list[str]:
    """Command lines of running processes that name a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found
