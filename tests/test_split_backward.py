"""What separate weight gradients run again: steps by hand, and every way to deal out options to units."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner.chunk_options import ChunkOptions
from mindspore_bmpipe.planner.split_frontiers import SplitFrontiers
from mindspore_bmpipe.problem import (
    Decision,
    Option,
    Problem,
    Run,
    evaluate,
    expand_decision,
    schedule_of,
    virtual_stage_weights,
)
from mindspore_bmpipe.split_backward import chunk_repeated, repeats_of

KEPT, AGAIN = (1, 0), (0, 1)


def least_repeated(held: list[tuple[Run, list[int]]]) -> float:
    """What runs again of a chunk, unit by unit, for the best way to deal out the options of each run to its units."""
    ways = [set(itertools.permutations(options)) for _, options in held]
    totals = []
    for dealt in itertools.product(*ways):
        total, started = 0.0, False
        for (run, _), options in zip(held, dealt, strict=True):
            for option in options:
                chosen = run.options[option]
                assert chosen.repeated_ms is not None
                assert chosen.repeated_after_ms is not None
                total += chosen.repeated_after_ms if started else chosen.repeated_ms
                started = started or chosen.repeated_ms > 0
        totals.append(total)
    return min(totals)


def random_run(rng: random.Random, name: str) -> Run:
    def option(number: int) -> Option:
        first = rng.choice([0.0, float(rng.randint(1, 4))])
        after = first + rng.randint(0, 5)
        return Option(str(number), rng.randint(0, 9), float(rng.randint(0, 5)), 0, first, after)

    return Run(name, 3, 1.0, 2.0, 0, tuple(map(option, range(rng.randint(1, 3)))))


def four_units(first: float, after: float, **changes: object) -> Problem:
    """A V of two stages with four equal units of 1 ms forward, 1 ms for inputs and 1 ms for weights."""
    options = (Option("none", 5, 0.0), Option("full", 1, 0.0, 0, first, after))
    problem = Problem((Run("body", 4, 1.0, 2.0, 10, options),), "zero_bubble_v", 2, 2, 4, (1000,) * 2)
    return replace(problem, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("virtual", "expected"), [(0, 26 + 2 * 3.0), (1, 25 + 3.0), (2, 25 + 3.0)])
def test_a_step_by_hand(virtual: int, expected: float) -> None:
    """Stage 1 starts after one forward and never waits: it ends with `W3 W3/1` of its two chunks at 1 + 8 * 3 = 25.

    Its last gradient leaves before these two, at 23; stage 0 then runs `B3 W2 W3` of chunk 0, to 26. So what runs again
    before a weight gradient counts twice on stage 0, and once after 25 on stage 1.
    """
    placed = tuple(AGAIN if k == virtual else KEPT for k in range(4))
    problem = four_units(3.0, 9.0)
    evaluation = evaluate(problem, Decision((placed,)))
    assert evaluation.step_time_ms == pytest.approx(expected)
    assert evaluate(problem, Decision(((KEPT,) * 4,))).step_time_ms == pytest.approx(26)
    # Two separate weight gradients of chunk 0 of stage 0, one of either chunk of stage 1; the ideal step takes 24 ms.
    assert evaluation.bubble.recompute == pytest.approx((2 if virtual == 0 else 1) * 3.0 / 2 / 24)


def test_a_faster_stage_runs_them_faster() -> None:
    decision = Decision(((AGAIN, KEPT, KEPT, KEPT),))
    weights = virtual_stage_weights(four_units(3.0, 9.0, stage_speeds=(2.0, 1.0)), decision)
    assert weights == [[0.5, 1.0, 1.0, 0.5], [1.5, 0.0, 0.0, 0.0]]


def test_schedules_that_never_split_have_none() -> None:
    problem = four_units(3.0, 9.0, schedule="interleaved")
    assert virtual_stage_weights(problem, Decision(((AGAIN,) * 4,))) is None


def test_without_figures_all_recomputation_runs_again_and_behind_it_gradients_of_inputs() -> None:
    run = Run("body", 2, 1.0, 5.0, 0, (Option("none", 5, 0.0), Option("full", 1, 2.0)), weight_gradient_ms=2.0)
    repeats = [repeats_of(run)]
    assert chunk_repeated(repeats, [(0, (2, 0))]) == 0
    assert chunk_repeated(repeats, [(0, (1, 1))]) == 2
    assert chunk_repeated(repeats, [(0, (0, 3))]) == 2 + 2 * (2 + 3)
    # The unit behind is another run's, so it cannot be dealt out before.
    assert chunk_repeated([*repeats, *repeats], [(0, (0, 1)), (1, (1, 0))]) == 2 + 3


@pytest.mark.parametrize("seed", range(60))
def test_options_are_dealt_out_so_that_least_runs_again(seed: int) -> None:
    rng = random.Random(seed)
    runs = [random_run(rng, f"r{index}") for index in range(rng.randint(1, 3))]
    chosen = [[rng.randrange(len(run.options)) for _ in range(rng.randint(1, 3))] for run in runs]
    counts = [
        [options.count(number) for number in range(len(run.options))] for run, options in zip(runs, chosen, strict=True)
    ]
    found = chunk_repeated([repeats_of(run) for run in runs], enumerate(counts))
    assert found == least_repeated(list(zip(runs, chosen, strict=True)))


def test_a_plan_names_the_units_in_that_order() -> None:
    options = (Option("full", 1, 2.0), Option("none", 5, 0.0), Option("half", 3, 1.0, 0, 0.5, 4.0))
    problem = Problem((Run("body", 6, 1.0, 5.0, 0, options),), "zero_bubble_v", 2, 2, 4, (1000,) * 2)
    decision = Decision((((1, 1, 1), (0, 1, 0), (0, 1, 0), (0, 1, 0)),))
    names = [options[placement.option_index].name for placement in expand_decision(problem, decision)]
    # Half is the first that runs again: 0.5 instead of 4 saves more than 2 instead of 2 + 2.5.
    assert names[:3] == ["none", "half", "full"]


@pytest.mark.parametrize("seed", range(40))
def test_every_unbeaten_choice_of_a_stage_is_listed(seed: int) -> None:
    rng = random.Random(seed)
    runs = tuple(replace(random_run(rng, f"r{index}"), count=4) for index in range(2))
    problem = Problem(runs, "zero_bubble_v", 2, 2, 4, (rng.randint(20, 80),) * 2)
    segments = tuple(
        tuple((index, rng.randint(1, 2)) for index in sorted(rng.sample(range(2), rng.randint(1, 2)))) for _ in range(2)
    )
    by_chunk: list[dict[tuple[float, float, int], None]] = []
    for chunk in segments:
        ways = [itertools.combinations_with_replacement(range(len(runs[index].options)), n) for index, n in chunk]
        found: dict[tuple[float, float, int], None] = {}
        for chosen in itertools.product(*ways):
            held = [(runs[index], list(options)) for (index, _), options in zip(chunk, chosen, strict=True)]
            picked = [run.options[option] for run, options in held for option in options]
            extra, saved = sum(o.extra_backward_ms for o in picked), sum(o.saved_bytes for o in picked)
            found[extra, least_repeated(held), saved] = None
        by_chunk.append(found)
    fitting = set()
    for one, other in itertools.product(*by_chunk):
        held_bytes, most = 0, 0
        for action in schedule_of(problem).orders[0]:
            size = (one, other)[action.chunk][2]
            held_bytes += size if action.kind == "F" else -size if action.kind in ("W", "BW") else 0
            most = max(most, held_bytes)
        if most <= problem.memory_limit_bytes[0]:
            fitting.add((one[0], other[0], one[1], other[1]))
    unbeaten = {
        cost for cost in fitting if not any(than != cost and all(map(float.__le__, than, cost)) for than in fitting)
    }
    listed = ChunkOptions(problem).patterns(0, segments)
    if not fitting:
        assert listed.excess_bytes > 0
        return
    assert listed.repeated_ms is not None
    rows = [(*e, *r) for e, r in zip(listed.extra_ms.tolist(), listed.repeated_ms.tolist(), strict=True)]
    assert set(rows) == unbeaten


def test_long_frontiers_are_thinned_from_end_to_end() -> None:
    options = tuple(Option(str(saved), saved, 9.0 - saved**0.5, 0, float(saved), 2.0 * saved) for saved in (0, 1, 4, 9))
    run = Run("r", 8, 1.0, 2.0, 0, options)
    problem = Problem((run,), "zero_bubble_v", 2, 2, 4, (1000,) * 2)
    long = SplitFrontiers(problem, 10**6).of(((0, 5),), [tuple(range(4))])
    short = SplitFrontiers(problem, 5).of(((0, 5),), [tuple(range(4))])
    assert len(long.saved) > 5 >= len(short.saved)
    assert (short.saved[0], short.saved[-1]) == (long.saved[0], long.saved[-1])


@pytest.mark.parametrize("name", ["repeated_ms", "repeated_after_ms"])
def test_negative_times_are_refused(name: str) -> None:
    option = replace(Option("none", 5, 0.0), **{name: -1.0})
    with pytest.raises(InputError, match=f"{name}: -1.0 is not allowed"):
        Problem((Run("body", 4, 1.0, 2.0, 10, (option,)),), "zero_bubble_v", 2, 2, 4, (1000,) * 2)
