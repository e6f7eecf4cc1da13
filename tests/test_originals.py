"""Planners of other systems against the answers of the public programs, run elsewhere on the same layer costs.

Each file under `tests/data/originals` names its repository, commit, license and program, and holds costs and answers.
"""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any

import pytest

from mindspore_bmpipe.layer_table import parse_layer_table
from mindspore_bmpipe.planner import SolveLimits, autopipe, galvatron_even, merak, pipedream, sapp
from mindspore_bmpipe.planner.base import Clock
from mindspore_bmpipe.planner.starts import split_of
from mindspore_bmpipe.problem import Decision, Option, Problem, Run, check, schedule_of

FOLDER = Path(__file__).parent / "data" / "originals"
MB = 10**6
TIME_LIMIT_S = 90
"""Seconds the solver of the SAPP tool was given."""


def answers(name: str, key: str = "instances") -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{name}.json").read_text())[key]


def chain(forward: list[float], backward: list[float], stages: int) -> Problem:
    runs = tuple(
        Run(f"u{index}", 1, ahead, back, 0, (Option("none", 0, 0.0),))
        for index, (ahead, back) in enumerate(zip(forward, backward, strict=True))
    )
    return Problem(runs, "1f1b", stages, 1, 4 * stages, (1,) * stages)


def slowest_ms(forward: list[float], backward: list[float], bounds: Any) -> float:
    return max(sum(forward[low:high]) + sum(backward[low:high]) for low, high in itertools.pairwise(bounds))


def test_every_answer_has_its_provenance() -> None:
    files = sorted(FOLDER.glob("*.json"))
    assert len(files) >= 5
    for file in files:
        document = json.loads(file.read_text())
        assert document["repository"].startswith("https://")
        assert len(document["commit"]) == 40
        assert document["license"] in ("MIT", "Apache-2.0")


@pytest.mark.parametrize("row", answers("pipedream"), ids=lambda row: f"{len(row['forward_ms'])}x{row['stages']}")
def test_pipedream_has_the_same_slowest_stage(row: dict[str, Any]) -> None:
    solution = pipedream.plan(chain(row["forward_ms"], row["backward_ms"], row["stages"]), SolveLimits())
    assert solution.decision is not None
    mine = slowest_ms(row["forward_ms"], row["backward_ms"], split_of(solution.decision))
    assert mine == pytest.approx(slowest_ms(row["forward_ms"], row["backward_ms"], row["bounds"]), rel=1e-12)
    assert mine == pytest.approx(row["slowest_stage_ms"], rel=1e-9)


@pytest.mark.parametrize("row", answers("autopipe"), ids=lambda row: f"{len(row['forward'])}x{row['stages']}")
def test_autopipe_gives_the_same_split(row: dict[str, Any]) -> None:
    bounds, _ = autopipe.partition(row["forward"], row["backward"], row["stages"], Clock(SolveLimits()))
    assert list(bounds) == row["bounds"]


@pytest.mark.parametrize("row", answers("merak", "uniform"), ids=lambda row: f"{row['units']}x{row['stages']}")
def test_merak_splits_alike(row: dict[str, Any]) -> None:
    assert list(merak.uniform_bounds(row["units"], row["stages"])) == row["bounds"]


@pytest.mark.parametrize("row", answers("merak", "ratios"), ids=lambda row: f"{row['stages']}-{row['first']}")
def test_merak_recomputes_the_same_shares(row: dict[str, Any]) -> None:
    # The original leaves a negative share as it is and recomputes nothing then.
    expected = [max(0.0, ratio) for ratio in row["ratios"]]
    mine = merak.stage_ratios(Fraction(row["first"]), row["stages"])
    assert [float(ratio) for ratio in mine] == pytest.approx(expected, abs=1e-12)
    assert [floor(24 * ratio) for ratio in mine] == [int(24 * ratio + 1e-9) for ratio in expected]


@pytest.mark.parametrize("row", answers("galvatron"), ids=lambda row: f"{len(row['layers'])}x{row['stages']}")
def test_galvatron_recomputes_as_much_on_every_stage(row: dict[str, Any]) -> None:
    runs = []
    for layer, group in itertools.groupby(row["layers"]):
        options = (
            Option("none", layer["saved_mb"] * MB, 0.0),
            Option("full", layer["full_mb"] * MB, layer["forward_ms"]),
        )
        ahead = layer["forward_ms"]
        runs.append(Run(f"r{len(runs)}", len(list(group)), ahead, 2 * ahead, layer["static_mb"] * MB, options))
    stages = row["stages"]
    # Every kind is repeated, or none is, so that no layer is taken for an embedding or a head.
    problem = Problem(tuple(runs), "1f1b", stages, 1, 4 * stages, (row["limit_mb"] * MB,) * stages)
    solution = galvatron_even.plan(problem, SolveLimits())
    assert (solution.decision is None) == any(answer["recomputed"] is None for answer in row["answer"])
    if solution.decision is None:
        return
    assert [high - low for low, high in itertools.pairwise(split_of(solution.decision))] == row["division"]
    for stage, answer in enumerate(row["answer"]):
        time = sum(
            count * (3 * run.forward_ms + option.extra_backward_ms)
            for run, placed in zip(problem.runs, solution.decision.counts, strict=True)
            for count, option in zip(placed[stage], run.options, strict=True)
        )
        # The original adds 2e-9 where recomputation starts, to order equals.
        assert time == pytest.approx(answer["time_ms"], abs=1e-6)


def sapp_problem(row: dict[str, Any]) -> Problem:
    table = parse_layer_table(row["layers"])
    schedule = "1f1b" if row["chunks"] == 1 else "interleaved"
    limits = (row["limit_mb"] * MB,) * row["stages"]
    return Problem(table.runs, schedule, row["stages"], row["chunks"], row["micro_batches"], limits)


def sapp_decision(problem: Problem, counts: dict[str, list[list[int]]]) -> Decision:
    """The original's answer: head and tail ride along."""
    schedule = schedule_of(problem)
    body = [
        tuple(
            counts.get(option.name, [[0] * problem.stages] * problem.chunks)[chunk][stage]
            for option in problem.runs[1].options
        )
        for stage, chunk in zip(schedule.stage_of_virtual, schedule.chunk_of_virtual, strict=True)
    ]
    size = problem.virtual_stages
    first = tuple((int(virtual == 0),) for virtual in range(size))
    last = tuple((int(virtual == size - 1),) for virtual in range(size))
    return Decision((first, tuple(body), last))


@pytest.mark.parametrize(
    "row", answers("sapp"), ids=lambda row: f"{row['stages']}x{row['chunks']}x{row['micro_batches']}"
)
def test_sapp_reaches_the_same_objective(row: dict[str, Any]) -> None:
    problem = sapp_problem(row)
    theirs = sapp_decision(problem, row["counts"])
    # Its in-flight numbers and ours agree: what fits there fits here.
    assert check(problem, theirs) == ()
    scale = row["micro_batches"] if row["chunks"] > 1 and row["micro_batches"] == row["stages"] else 1
    assert sapp.objective_ms(problem, theirs) / scale == pytest.approx(row["objective"], rel=1e-9)
    solution = sapp.plan(problem, SolveLimits())
    assert solution.decision is not None
    mine = sapp.objective_ms(problem, solution.decision) / scale
    if row["seconds"] < TIME_LIMIT_S:
        assert mine == pytest.approx(row["objective"], rel=1e-4)
    else:
        # Its time limit ended the original's solver, so a better plan may exist.
        assert mine <= row["objective"] * (1 + 1e-9)
