"""Problems shared by the tests of the numeric core."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from mindspore_bmpipe.config import load_config
from mindspore_bmpipe.layer_table import load_layer_table
from mindspore_bmpipe.problem import Option, Pin, Problem, Run, problem_from_config

DATA = Path(__file__).parent / "data"


def case_a(**changes: object) -> Problem:
    """LLaMA-175B on 16 stages, from the public example of the SAPP tool."""
    table = load_layer_table(DATA / "case_a_v1.layers.json")
    config = load_config(DATA / "case_a_v1.pipeline.yaml")
    problem = problem_from_config(table.runs, config, table.stage_constant_bytes, table.transfer_ms)
    return replace(problem, **changes)  # type: ignore[arg-type]


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
        options = tuple(
            Option(
                f"o{number}",
                rng.choice([0, rng.randint(0, 10) * 10**8, rng.randint(1, 10**9)]),
                rng.choice([rng.random() * 5, float(rng.randint(0, 4))]) if number else 0.0,
                rng.choice([0, 0, rng.randint(0, 10**9)]),
            )
            for number in range(rng.randint(1, 3))
        )
        forward = rng.choice([0.0, rng.random() * 10, float(rng.randint(1, 5))])
        static = rng.randint(0, 3 * 10**9)
        runs.append(Run(f"r{index}", count, forward, rng.random() * 20 + 0.1, static, options, rng.random() > 0.15))
    stages = min(rng.randint(1, 4), units)
    pins: tuple[Pin, ...] = ()
    if rng.random() < 0.3:
        first = rng.randrange(units)
        pins = (Pin(first, rng.randint(first, min(units - 1, first + 1)), rng.randrange(stages)),)
    limits = tuple(rng.randint(6, 40) * 10**9 // 2 + rng.randint(0, 999) for _ in range(stages))
    return Problem(
        runs=tuple(runs),
        schedule=rng.choice(["1f1b", "gpipe"]),
        stages=stages,
        chunks=1,
        micro_batches=rng.randint(1, 6),
        memory_limit_bytes=limits if rng.random() < 0.5 else (limits[0],) * stages,
        stage_constant_bytes=rng.choice([0, 10**8]),
        shared_saved_bytes=rng.choice([0, 0, 3 * 10**7]),
        transfer_ms=rng.choice([0.0, rng.random()]),
        forbidden_cuts=frozenset(unit for unit in range(units - 1) if rng.random() < 0.12),
        pins=pins,
    )
