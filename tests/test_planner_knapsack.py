"""Options of one stage against plain enumeration."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from mindspore_bmpipe.planner.knapsack import CapTable, RunFrontiers, cheapest_choice
from mindspore_bmpipe.planner.stage_options import StageOptions
from mindspore_bmpipe.problem import Option, Problem, Run


def random_runs(rng: random.Random) -> tuple[Run, ...]:
    runs = []
    for index in range(rng.randint(1, 3)):
        options = tuple(
            Option(str(number), rng.randint(0, 20), rng.choice([0.0, rng.random() * 9]), rng.choice([0, 0, 3, 8]))
            for number in range(rng.randint(1, 4))
        )
        runs.append(Run(f"r{index}", rng.randint(1, 3), 1.0, 2.0, rng.randint(0, 5), options))
    return tuple(runs)


@pytest.mark.parametrize("seed", range(80))
def test_choice_and_bound_against_enumeration(seed: int) -> None:
    rng = random.Random(seed)
    runs = random_runs(rng)
    units = [run for run in runs for _ in range(run.count)]
    in_flight = rng.randint(1, 4)
    limit = rng.randint(1, 30 * in_flight * len(units) // 2 + 20)
    problem = Problem(runs, "1f1b", 1, 1, in_flight, (limit,))
    static = sum(run.static_bytes for run in units)
    best, least = None, None
    for chosen in product(*(run.options for run in units)):
        saved = sum(option.saved_bytes for option in chosen)
        peak = static + in_flight * saved + max(option.working_set_bytes for option in chosen)
        extra = sum(option.extra_backward_ms for option in chosen)
        least = peak if least is None else min(least, peak)
        if peak <= limit and (best is None or extra < best):
            best = extra
    stage_options = StageOptions(problem)
    # One stage keeps one micro-batch in flight; as many as a stage of a longer pipeline are wanted.
    stage_options.in_flight[0] = in_flight
    choice = stage_options.choice(0, 0, len(units))
    assert stage_options.least_bytes_from(0)[-1, 0] == least
    bound = stage_options.backward_bound_from(0)[-1, 0] - 2.0 * len(units)
    if best is None:
        assert choice is None
        return
    assert choice is not None
    assert choice.extra_ms == pytest.approx(best)
    assert choice.peak_bytes <= limit
    assert bound <= best + 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_many_units_agree_with_a_table_over_bytes(seed: int) -> None:
    rng = random.Random(seed)
    runs = tuple(
        Run(
            f"r{index}",
            rng.randint(5, 12),
            1.0,
            2.0,
            0,
            tuple(Option(str(number), rng.randint(0, 9), float(rng.randint(0, 30))) for number in range(3)),
        )
        for index in range(3)
    )
    problem = Problem(runs, "gpipe", 1, 1, 1, (10**6,))
    table = np.full(400, np.inf)
    table[0] = 0.0
    for run in runs:
        for _ in range(run.count):
            after = np.full(400, np.inf)
            for option in run.options:
                shifted = table[: 400 - option.saved_bytes] + option.extra_backward_ms
                after[option.saved_bytes :] = np.minimum(after[option.saved_bytes :], shifted)
            table = after
    segments = tuple((index, run.count) for index, run in enumerate(runs))
    caps, frontiers = CapTable(problem, 0, 0), RunFrontiers(problem)
    for budget in range(0, 330, 17):
        found = cheapest_choice(caps, frontiers, segments, budget, float("inf"))
        expected = table[: budget + 1].min()
        assert (found is None) == np.isinf(expected)
        if found is not None:
            assert found[0] == pytest.approx(expected)
            assert [sum(counts) for counts in found[2]] == [run.count for run in runs]
