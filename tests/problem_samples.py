"""Problems shared by the tests of the numeric core."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspore_bmpipe.config import load_config
from mindspore_bmpipe.layer_table import load_layer_table
from mindspore_bmpipe.problem import (
    Decision,
    Option,
    Pin,
    Problem,
    Run,
)
from mindspore_bmpipe.problem_config import problem_from_config

DATA = Path(__file__).parent / "data"


def batches(seeds: int, size: int, everyday: int) -> list[Any]:
    """Ranges of seeds as parameters of a test; those after the first `everyday` seeds are left to the long run."""
    found: list[Any] = []
    for first in range(0, seeds, size):
        part = range(first, min(first + size, seeds))
        found.append(part if first < everyday else pytest.param(part, marks=pytest.mark.long))
    return found


def case_a(**changes: object) -> Problem:
    """LLaMA-175B on 16 stages, from the public example of the SAPP tool."""
    table = load_layer_table(DATA / "case_a_v1.layers.json")
    config = load_config(DATA / "case_a_v1.pipeline.yaml")
    problem = problem_from_config(table.runs, config, table.stage_constant_bytes, table.transfer_ms)
    return replace(problem, **changes)  # type: ignore[arg-type]


def case_b(**changes: object) -> Problem:
    """Ninety-six equal layers on 16 stages of 3 chunks, from the public test data of the SAPP tool."""
    table = load_layer_table(DATA / "case_b.layers.json")
    config = load_config(DATA / "case_b.pipeline.yaml")
    problem = problem_from_config(table.runs, config, table.stage_constant_bytes, table.transfer_ms)
    return replace(problem, **changes)  # type: ignore[arg-type]


def even_decision(problem: Problem, option: str) -> Decision:
    """As many units of the second run on every virtual stage, all with one option; the ends ride along."""
    body = problem.runs[1]
    index = [entry.name for entry in body.options].index(option)
    each = [0] * len(body.options)
    each[index] = body.count // problem.virtual_stages
    first = tuple((int(virtual == 0),) for virtual in range(problem.virtual_stages))
    last = tuple((int(virtual == problem.virtual_stages - 1),) for virtual in range(problem.virtual_stages))
    return Decision((first, (tuple(each),) * problem.virtual_stages, last))


def random_chunked_problem(seed: int) -> Problem:
    """A small problem of any schedule with several chunks; some are infeasible, some have unequal devices."""
    rng = random.Random(10_000 + seed)
    stages, chunks, schedule = rng.choice(
        [
            (1, 2, "interleaved"), (2, 2, "interleaved"), (2, 3, "interleaved"), (3, 2, "interleaved"),
            (2, 2, "gpipe"), (2, 2, "seqpipe"), (3, 2, "seqpipe"), (2, 2, "seqvpp"), (2, 2, "seqsmartvpp"),
            (2, 2, "zero_bubble_v"), (2, 2, "interleaved_less_memory"), (3, 2, "seqsmartvpp"), (3, 2, "zero_bubble_v"),
            (3, 1, "1f1b"), (4, 1, "seqpipe"),
        ]
    )  # fmt: skip
    runs: list[Run] = []
    least = stages * chunks
    left = least + rng.randint(0, 2)
    while left:
        count = min(left, rng.choice([1, 1, 2, 3, 4]))
        left -= count
        options = _random_options(rng, 2)
        backward = rng.random() * 20 + 0.1
        weight = rng.choice([None, backward * rng.random()])
        forward = rng.choice([0.0, rng.random() * 10, float(rng.randint(1, 5))])
        trainable = rng.random() > 0.1
        runs.append(Run(f"r{len(runs)}", count, forward, backward, rng.randint(0, 10**9), options, trainable, weight))
    units = sum(run.count for run in runs)
    pins: tuple[Pin, ...] = ()
    if rng.random() < 0.2:
        first = rng.randrange(units)
        pins = (Pin(first, rng.randint(first, min(units - 1, first + 1)), rng.randrange(stages)),)
    limits = tuple(rng.randint(6, 40) * 10**9 // 2 + rng.randint(0, 999) for _ in range(stages))
    fewest = {"zero_bubble_v": 2 * stages, "seqpipe": 1}.get(schedule, stages)
    problem = Problem(
        runs=_trainable_enough(runs, least),
        schedule=schedule,
        stages=stages,
        chunks=chunks,
        micro_batches=max(rng.randint(fewest, fewest + 4), min(stages, 2)),
        memory_limit_bytes=limits if rng.random() < 0.5 else (limits[0],) * stages,
        shared_saved_bytes=rng.choice([0, 0, 3 * 10**7]),
        transfer_ms=rng.choice([0.0, rng.random()]),
        forbidden_cuts=frozenset(unit for unit in range(units - 1) if rng.random() < 0.05),
        pins=pins,
        stage_speeds=tuple(rng.choice([1.0, 0.7, 1.3]) for _ in range(stages)) if rng.random() < 0.4 else (),
    )
    return _with_repeats(_with_updates(problem, seed), seed)


def small(**changes: object) -> Problem:
    """Four units of 1 ms + 2 ms on two stages; 10 bytes static, 5 or 1 saved."""
    options = (Option("none", 5, 0.0), Option("full", 1, 1.0, 2))
    run = Run("body", 4, 1.0, 2.0, 10, options)
    problem = Problem((run,), "1f1b", 2, 1, 4, (40, 40))
    return replace(problem, **changes)  # type: ignore[arg-type]


def random_problem(seed: int) -> Problem:
    """A small problem with any mix of rules; about half of them are infeasible."""
    rng = random.Random(seed)
    runs: list[Run] = []
    units = 0
    for index in range(rng.randint(1, 4)):
        count = rng.choice([1, 1, 2, 3, 4])
        if units + count > 8:
            break
        units += count
        options = _random_options(rng, 3)
        forward = rng.choice([0.0, rng.random() * 10, float(rng.randint(1, 5))])
        static = rng.randint(0, 3 * 10**9)
        runs.append(Run(f"r{index}", count, forward, rng.random() * 20 + 0.1, static, options, rng.random() > 0.15))
    stages = min(rng.randint(1, 4), units)
    pins: tuple[Pin, ...] = ()
    if rng.random() < 0.3:
        first = rng.randrange(units)
        pins = (Pin(first, rng.randint(first, min(units - 1, first + 1)), rng.randrange(stages)),)
    limits = tuple(rng.randint(6, 40) * 10**9 // 2 + rng.randint(0, 999) for _ in range(stages))
    problem = Problem(
        runs=_trainable_enough(runs, stages),
        schedule=rng.choice(["1f1b", "gpipe"]),
        stages=stages,
        chunks=1,
        micro_batches=max(rng.randint(1, 6), min(stages, 2)),
        memory_limit_bytes=limits if rng.random() < 0.5 else (limits[0],) * stages,
        stage_constant_bytes=rng.choice([0, 10**8]),
        shared_saved_bytes=rng.choice([0, 0, 3 * 10**7]),
        transfer_ms=rng.choice([0.0, rng.random()]),
        forbidden_cuts=frozenset(unit for unit in range(units - 1) if rng.random() < 0.12),
        pins=pins,
    )
    return _with_updates(problem, seed)


def _with_updates(problem: Problem, seed: int) -> Problem:
    """Half of the problems need memory to update weights, from none to more than their activations."""
    rng = random.Random(f"updates {seed}")
    if rng.random() < 0.5:
        return problem
    return replace(problem, runs=tuple(replace(run, update_bytes=rng.randint(0, 4 * 10**9)) for run in problem.runs))


def _with_repeats(problem: Problem, seed: int) -> Problem:
    """Two of three problems say what weight gradients run again, which need not be what options recompute."""
    rng = random.Random(f"repeats {seed}")
    if rng.random() < 1 / 3:
        return problem

    def saying(option: Option) -> Option:
        first = rng.choice([0.0, option.extra_backward_ms, rng.random() * 5])
        return replace(option, repeated_ms=first, repeated_after_ms=first + rng.choice([0.0, rng.random() * 8]))

    runs = tuple(replace(run, options=tuple(map(saying, run.options))) for run in problem.runs)
    return replace(problem, runs=runs)


def with_full(problem: Problem) -> Problem:
    """The same with an option `full` on its body: 40 MB kept, the forward again, the most any option keeps to work."""
    body = problem.runs[1]
    full = Option("full", 40 * 10**6, body.forward_ms, max(option.saved_bytes for option in body.options))
    runs = (problem.runs[0], replace(body, options=(*body.options, full)), *problem.runs[2:])
    return replace(problem, runs=runs)


def with_known_recipes(problem: Problem) -> Problem:
    """The same with options named as other systems know them: the last one `full`, one between `select`."""
    names = {1: ("none",), 2: ("none", "full"), 3: ("none", "select", "full")}
    runs = tuple(
        replace(
            run,
            options=tuple(
                replace(option, name=name) for option, name in zip(run.options, names[len(run.options)], strict=True)
            ),
        )
        for run in problem.runs
    )
    return replace(problem, runs=runs)


def _trainable_enough(runs: list[Run], units: int) -> tuple[Run, ...]:
    """The runs, with the first ones made trainable until enough units are."""
    made = list(runs)
    for index, run in enumerate(made):
        if sum(other.count for other in made if other.trainable) < units:
            made[index] = replace(run, trainable=True)
    return tuple(made)


def _random_options(rng: random.Random, most: int) -> tuple[Option, ...]:
    """One to ``most`` options; the first recomputes nothing."""
    return tuple(
        Option(
            f"o{number}",
            rng.choice([0, rng.randint(0, 10) * 10**8, rng.randint(1, 10**9)]),
            rng.choice([rng.random() * 5, float(rng.randint(0, 4))]) if number else 0.0,
            rng.choice([0, 0, rng.randint(0, 10**9)]),
        )
        for number in range(rng.randint(1, most))
    )
