"""Planners of other systems: their own objectives against enumeration, and figures derived by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from problem_samples import case_b, random_chunked_problem, random_problem, small, with_full, with_known_recipes

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner import (
    SolveLimits,
    Status,
    adapipe,
    autopipe,
    dapple,
    even,
    galvatron_even,
    megatron_even_full,
    megatron_even_selective,
    megatron_layouts,
    megatron_manual,
    merak,
    pipedream,
    recipes,
    sapp,
    solve,
)
from mindspore_bmpipe.planner.starts import split_of
from mindspore_bmpipe.problem import (
    Decision,
    Option,
    Problem,
    Run,
    check,
    evaluate,
    recompute_ms,
    schedule_of,
    stage_memory,
    virtual_stage_times,
)

ONE_CHUNK = (adapipe, autopipe, dapple, galvatron_even, merak, pipedream)
GB = 10**9


def llama(**changes: object) -> Problem:
    """An embedding, twelve equal layers and a head on four stages.

    A layer takes 1 + 2 ms and keeps 4 GB, 2 GB when the attention is recomputed in 0.5 ms, 0 GB in full in 1 ms.
    """
    layer = (Option("none", 4 * GB, 0.0), Option("select", 2 * GB, 0.5), Option("full", 0, 1.0))
    plain = (Option("none", 0, 0.0),)
    runs = (
        Run("embedding", 1, 0.5, 1.0, 3 * GB, plain),
        Run("layer", 12, 1.0, 2.0, 1 * GB, layer),
        Run("head", 1, 1.0, 2.0, 3 * GB, plain),
    )
    problem = Problem(runs, "1f1b", 4, 1, 8, (100 * GB,) * 4)
    return replace(problem, **changes)  # type: ignore[arg-type]


def layers(solution_decision: Decision | None) -> list[tuple[int, ...]]:
    """Options of the layers of every virtual stage."""
    assert solution_decision is not None
    return list(solution_decision.counts[1])


def splits(problem: Problem) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, problem.units), problem.virtual_stages - 1):
        yield (0, *cuts, problem.units)


def decisions(problem: Problem, uniform: bool) -> Iterator[Decision]:
    """Every feasible decision; with one option name for all units if uniform, others keeping their cheapest."""
    unit_runs = [index for index, run in enumerate(problem.runs) for _ in range(run.count)]
    if uniform:
        names = {option.name for run in problem.runs for option in run.options}
        choices = []
        for name in sorted(names):
            by_run = []
            for run in problem.runs:
                named = [index for index, option in enumerate(run.options) if option.name == name]
                by_run.append(
                    named[0]
                    if named
                    else min(
                        range(len(run.options)),
                        key=lambda i, r=run: (r.options[i].extra_backward_ms, r.options[i].saved_bytes),
                    )
                )
            choices.append([by_run[run] for run in unit_runs])
    else:
        choices = [list(c) for c in itertools.product(*(range(len(problem.runs[run].options)) for run in unit_runs))]
    seen = set()
    for bounds in splits(problem):
        for chosen in choices:
            table = [[[0] * len(run.options) for _ in range(problem.virtual_stages)] for run in problem.runs]
            for virtual, (low, high) in enumerate(itertools.pairwise(bounds)):
                for unit in range(low, high):
                    table[unit_runs[unit]][virtual][chosen[unit]] += 1
            decision = Decision(tuple(tuple(map(tuple, placed)) for placed in table))
            if decision not in seen:
                seen.add(decision)
                if not check(problem, decision):
                    yield decision


def stage_times(problem: Problem, decision: Decision) -> list[float]:
    forward, backward = virtual_stage_times(problem, decision)
    return [ahead + back for ahead, back in zip(forward, backward, strict=True)]


def least(problem: Problem, value: Callable[[Decision], float], uniform: bool) -> float | None:
    return min((value(decision) for decision in decisions(problem, uniform)), default=None)


def test_megatron_full_and_selective_by_hand() -> None:
    full = solve(llama(), "megatron_even_full")
    assert layers(full.decision) == [(0, 0, 3)] * 4
    assert layers(solve(llama(), "megatron_even_selective").decision) == [(0, 3, 0)] * 4
    # Static 3 + 3 and 4 in flight of 3 layers of 2 GB on stage 0: 30 GB.
    tight = llama(memory_limit_bytes=(30 * GB - 1, *(100 * GB,) * 3))
    answer = solve(tight, "megatron_even_selective")
    assert answer.status is Status.INFEASIBLE
    assert f"stage 0 {30 * GB} > {30 * GB - 1}" in answer.message
    assert answer.needed_bytes == (30 * GB, 21 * GB, 15 * GB, 12 * GB)


def test_one_stage_in_megatron_takes_the_layers_that_do_not_divide() -> None:
    run = Run("layer", 5, 1.0, 2.0, 0, (Option("none", 0, 0.0), Option("full", 0, 1.0)))
    problem = Problem((run,), "interleaved", 2, 2, 4, (1, 1))
    assert split_of(solve(problem, "megatron_even_full").decision or Decision(())) in [(0, 1, 2, 3, 5)]


def test_megatron_manual_counts_the_loss_as_a_layer() -> None:
    # A head as long as a layer: eleven layers in twelve places, one fewer beside the head.
    problem = llama()
    problem = replace(
        problem,
        runs=(
            replace(problem.runs[0], forward_ms=0.0, backward_ms=0.0),
            replace(problem.runs[1], count=11),
            problem.runs[2],
        ),
    )
    solution = solve(problem, "megatron_manual")
    assert solution.decision is not None
    assert [sum(row) for row in layers(solution.decision)] == [3, 3, 3, 2]
    # Equal stages of 9 ms without recomputation: (m + p - 1) * 9.
    assert solution.step_time_ms == pytest.approx(11 * 9)


def manual_grid(problem: Problem) -> Iterator[Decision]:
    """Counts with any first and last, the rest within one of each other, by every recompute setting of one chunk."""
    count, options = problem.runs[1].count, [option.name for option in problem.runs[1].options]
    size = problem.virtual_stages
    for counts in itertools.product(range(count + 1), repeat=size):
        middle = counts[1:-1]
        if (
            sum(counts) != count
            or max(middle) - min(middle) > 1
            or list(middle) not in (sorted(middle), sorted(middle)[::-1])
        ):
            continue
        for name, first in [("select", count), *(("full", first) for first in range(count + 1))]:
            rows = []
            for held in counts:
                again = min(first, held)
                row = [0] * len(options)
                row[options.index("none")] += held - again
                row[options.index(name)] += again
                rows.append(tuple(row))
            ends = [tuple((int(virtual == place),) for virtual in range(size)) for place in (0, size - 1)]
            decision = Decision((ends[0], tuple(rows), ends[1]))
            if not check(problem, decision):
                yield decision


@pytest.mark.parametrize("limit", [12, 20, 26, 34, 60])
@pytest.mark.parametrize("head_ms", [0.5, 2.5])
def test_megatron_manual_finds_the_best_of_its_grid(limit: int, head_ms: float) -> None:
    problem = llama(memory_limit_bytes=(limit * GB,) * 4, transfer_ms=0.25)
    head = replace(problem.runs[2], forward_ms=head_ms, backward_ms=2 * head_ms)
    problem = replace(problem, runs=(problem.runs[0], replace(problem.runs[1], count=10), head))
    times = [evaluate(problem, decision).step_time_ms for decision in manual_grid(problem)]
    solution = solve(problem, "megatron_manual")
    if not times:
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.step_time_ms == pytest.approx(min(times), rel=1e-9)


def test_megatron_manual_without_time_is_not_infeasible() -> None:
    solution = megatron_manual.plan(llama(), SolveLimits(time_limit_s=1e-9))
    assert solution.status is Status.FEASIBLE
    assert "the wall clock" in solution.message


def test_megatron_manual_covers_counts_of_first_and_last_stage_with_chunks() -> None:
    # Two chunks on three stages: the first stage holds 2, the last 2, the middle one 6 of 10 layers, two chunks each.
    found = {
        tuple(row)
        for row in megatron_layouts.Layouts(
            replace(
                llama(),
                runs=(Run("layer", 10, 1.0, 2.0, 0, (Option("none", 0, 0.0),)),),
                schedule="interleaved",
                stages=3,
                chunks=2,
                memory_limit_bytes=(1,) * 3,
            )
        )
        .bounds(10, 10)
        .tolist()
    }
    assert (0, 1, 4, 5, 6, 9, 10) in found
    # Loss as a layer: 11 does not divide into 6; embedding and loss: 12 = 6 * 2.
    assert (0, 1, 3, 5, 7, 9, 10) in found


@pytest.mark.parametrize("seed", range(40))
def test_pipedream_finds_the_fastest_slowest_stage(seed: int) -> None:
    problem = with_known_recipes(random_problem(seed))
    expected = least(problem, lambda decision: max(stage_times(problem, decision)), uniform=True)
    decision = pipedream.plan(problem, SolveLimits()).decision
    assert (decision is None) == (expected is None)
    if decision is not None:
        assert max(stage_times(problem, decision)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_dapple_finds_the_least_latency(seed: int) -> None:
    problem = with_known_recipes(random_problem(seed))
    if seed % 2:
        problem = replace(problem, stage_speeds=tuple(1 + 0.3 * stage for stage in range(problem.stages)))

    def latency(decision: Decision) -> float:
        times = stage_times(problem, decision)
        return sum(times) + (problem.micro_batches - 1) * max(times)

    expected = least(problem, latency, uniform=True)
    decision = dapple.plan(problem, SolveLimits()).decision
    assert (decision is None) == (expected is None)
    if decision is not None:
        assert latency(decision) == pytest.approx(expected, rel=1e-9)


def test_adapipe_model_by_hand() -> None:
    # Equal stages: (m + p - 1) t.
    assert adapipe.modelled_ms([1.0] * 4, [2.0] * 4, 9) == pytest.approx(12 * 3.0)
    # Stages of 1 + 1 and 2 + 2, five micro-batches: W0 = 1 + 2 + 2, E0 = 1 + 2 + 2, X = 4 three times.
    assert adapipe.modelled_ms([1.0, 2.0], [1.0, 2.0], 5) == pytest.approx(5 + 5 + 3 * 4)
    # Fewer than four micro-batches on two stages: X counts twice.
    assert adapipe.modelled_ms([1.0, 2.0], [1.0, 2.0], 2) == pytest.approx(5 + 5 + 2 * 4)
    # A slow first stage: its own forwards fill the warm-up, W0 = 4 + max(1 + 1, 4), E0 = 2 + max(2, 2), X = 6.
    assert adapipe.modelled_ms([4.0, 1.0], [2.0, 1.0], 5) == pytest.approx(8 + 4 + 3 * 6)


@pytest.mark.parametrize("seed", range(60))
def test_adapipe_finds_the_least_of_its_model(seed: int) -> None:
    problem = with_known_recipes(random_problem(seed))
    if problem.units > 7:
        problem = replace(problem, runs=tuple(replace(run, options=run.options[:2]) for run in problem.runs))

    def modelled(decision: Decision) -> float:
        return adapipe.modelled_ms(*virtual_stage_times(problem, decision), problem.micro_batches)

    expected = least(problem, modelled, uniform=False)
    decision = adapipe.plan(problem, SolveLimits()).decision
    assert (decision is None) == (expected is None)
    if decision is not None:
        assert modelled(decision) == pytest.approx(expected, rel=1e-9)


def pair_objective(problem: Problem, decision: Decision) -> float:
    forward, backward = virtual_stage_times(problem, decision)
    return max(
        forward[one] + backward[other]
        for virtuals in schedule_of(problem).virtual_of_chunk
        for one in virtuals
        for other in virtuals
    )


def test_sapp_finds_the_least_pair_on_a_stage() -> None:
    solved = 0
    for seed in range(40):
        problem = with_known_recipes(random_chunked_problem(seed))
        if problem.units > 6 or problem.micro_batches == problem.stages:
            continue
        expected = least(problem, lambda decision, p=problem: pair_objective(p, decision), uniform=False)
        solution = sapp.plan(problem, SolveLimits(relative_gap=1e-7))
        assert (solution.decision is None) == (expected is None)
        if solution.decision is not None:
            solved += 1
            assert pair_objective(problem, solution.decision) == pytest.approx(expected, rel=1e-6)
    assert solved >= 8


@pytest.mark.parametrize("seed", range(30))
def test_sapp_with_one_chunk_finds_the_fastest_slowest_stage(seed: int) -> None:
    problem = with_known_recipes(random_problem(seed))
    if problem.units > 7:
        problem = replace(problem, runs=tuple(replace(run, options=run.options[:2]) for run in problem.runs))
    expected = least(problem, lambda decision: max(stage_times(problem, decision)), uniform=False)
    decision = sapp.plan(problem, SolveLimits()).decision
    assert (decision is None) == (expected is None)
    if decision is not None:
        assert max(stage_times(problem, decision)) == pytest.approx(expected, rel=1e-9)


def test_sapp_second_objective_by_hand() -> None:
    # Two stages of two chunks, two micro-batches: g = 0 on stage 0, |2 - 1 - 2| = 1 on stage 1.
    run = Run("layer", 7, 1.0, 2.0, 0, (Option("none", 0, 0.0),))
    problem = Problem((run,), "interleaved", 2, 2, 2, (1, 1))
    # Virtual stages of 2, 1, 1, 3 units: x = 4; y = max(4, 2, 6 + 3 / 2) = 7.5; times m = 2.
    decision = Decision((((2,), (1,), (1,), (3,)),))
    assert sapp.objective_ms(problem, decision) == pytest.approx(2 * (4 + 7.5))
    # Less memory: g = 0, 1 as well; four micro-batches: pairs, stage 1 has F = 3 and B = 6.
    assert sapp.objective_ms(replace(problem, micro_batches=4), decision) == pytest.approx(9)
    found = sapp.plan(problem, SolveLimits()).decision
    # Every other cut is worse or equal: 7 units need a chunk of two, of which x sees both and y only the last.
    assert found is not None
    assert sapp.objective_ms(problem, found) == min(
        sapp.objective_ms(problem, Decision((tuple((count,) for count in counts),)))
        for counts in itertools.product(range(1, 5), repeat=4)
        if sum(counts) == 7
    )


def test_sapp_recomputes_no_more_than_its_value_needs() -> None:
    problem = case_b(micro_batches=24)
    solution = solve(problem, "sapp", SolveLimits(time_limit_s=20, node_limit=50))
    assert solution.decision is not None
    # Two layers with one recomputed or more, none of it below what memory asks of each stage: taking one layer's
    # recomputation away anywhere breaks memory, or there is none on the stage.
    for stage in range(problem.stages):
        for virtual in schedule_of(problem).virtual_of_chunk[stage]:
            row = list(solution.decision.counts[1][virtual])
            for option in range(1, 4):
                if row[option]:
                    less = [*row]
                    less[option] -= 1
                    less[0] += 1
                    table = [list(placed) for placed in solution.decision.counts]
                    table[1][virtual] = tuple(less)
                    peak = stage_memory(problem, Decision(tuple(map(tuple, table))))[stage][1]
                    assert peak > problem.memory_limit_bytes[stage]


def test_merak_takes_the_smallest_share_that_fits() -> None:
    for gigabytes in (12, 16, 20, 25, 30, 40, 60):
        problem = llama(memory_limit_bytes=(gigabytes * GB,) * 4)
        problem = replace(problem, runs=(problem.runs[0], replace(problem.runs[1], count=14), problem.runs[2]))
        fitting = []
        for thousandth in range(1001):
            ratio = Fraction(thousandth, 1000)
            shares = [1 - (1 - ratio) * Fraction(3, 4 - number) for number in (1, 2, 3)] + [Fraction(0)]
            # Sixteen units, four a stage: stage 0 has the embedding and three layers, the last one a head.
            again = [int(max(0, share) * 4) for share in shares]
            rows = [(3 - min(again[0], 3), 0, min(again[0], 3)), (4 - again[1], 0, again[1])]
            rows += [(4 - again[2], 0, again[2]), (3, 0, 0)]
            ends = [tuple((int(stage == place),) for stage in range(4)) for place in (0, 3)]
            decision = Decision((ends[0], tuple(rows), ends[1]))
            if not check(problem, decision):
                fitting.append(decision)
        solution = solve(problem, "merak")
        assert (solution.decision is None) == (not fitting)
        if fitting:
            assert solution.decision is not None
            assert recompute_ms(problem, solution.decision) == recompute_ms(problem, fitting[0])


def test_galvatron_recomputes_the_fewest_layers_of_every_stage() -> None:
    problem = llama(memory_limit_bytes=(30 * GB,) * 4)
    # Three layers a stage. Stage 0: 6 GB static, 4 in flight, 16 GB a kept layer: one of three is kept. Stage 1:
    # 3 static, 12 a layer: two. Stage 2: 3 static, 8 a layer: all. Stage 3: 6 static, 4 a layer: all.
    assert layers(solve(problem, "galvatron_even").decision) == [(1, 0, 2), (2, 0, 1), (3, 0, 0), (3, 0, 0)]
    # What does not divide goes to the last stage.
    wide = replace(problem, runs=(problem.runs[0], replace(problem.runs[1], count=15), problem.runs[2]))
    assert [sum(row) for row in layers(solve(wide, "galvatron_even").decision)] == [3, 3, 3, 6]


def test_autopipe_recurrence_gives_the_time_of_equal_stages() -> None:
    units = autopipe.make_units([3] * 8, [5] * 8, 4)
    # m = 2p = 8 micro-batches, p = 4 stages of 2 units: (8 + 4 - 1) * 16, critical to the last stage.
    assert autopipe.score(units, (0, 2, 4, 6, 8)) == (11 * 16, 3)


@pytest.mark.parametrize("module", ONE_CHUNK, ids=lambda module: module.NAME)
def test_methods_for_one_chunk_say_so(module: object) -> None:
    with pytest.raises(
        InputError, match="knows one chunk per stage only, the problem has 3; compare it with chunks: 1"
    ):
        module.plan(with_full(case_b()), SolveLimits())  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", [megatron_even_full, merak, galvatron_even], ids=lambda module: module.NAME)
def test_methods_that_need_full_recomputation_say_so(module: object) -> None:
    problem = small()
    problem = replace(
        problem, runs=(replace(problem.runs[0], options=(Option("none", 5, 0.0), Option("part", 1, 1.0))),)
    )
    with pytest.raises(
        InputError, match="no unit has an option named full, which it recomputes with; the options are none, part"
    ):
        module.plan(problem, SolveLimits())  # type: ignore[attr-defined]


def test_selective_recomputation_needs_its_name() -> None:
    with pytest.raises(InputError, match="named select or selective or both"):
        megatron_even_selective.plan(small(), SolveLimits())
    body = small().runs[0]
    named = replace(
        small(), runs=(replace(body, options=(*body.options, Option("both", 3, 0.5))),), memory_limit_bytes=(60, 60)
    )
    decision = megatron_even_selective.plan(named, SolveLimits()).decision
    assert decision is not None
    assert decision.counts == (((0, 0, 2), (0, 0, 2)),)


def test_even_split_and_megatron_agree_on_layers() -> None:
    problem = llama()
    assert split_of(megatron_even_full.plan(problem, SolveLimits()).decision or Decision(())) == even.even_bounds(
        problem
    )


@pytest.mark.parametrize("seed", range(60))
def test_layout_costs_are_those_of_the_plans(seed: int) -> None:
    problem = with_known_recipes(random_chunked_problem(seed))
    kept, full = recipes.kept_recipe(problem), recipes.named_recipe(problem, recipes.FULL)
    if full is None:
        return
    before, after = even.end_units(problem)
    unit_runs = [index for index, run in enumerate(problem.runs) for _ in range(run.count)]
    costs = megatron_layouts.LayoutCosts(problem, kept, full)
    some = list(splits(problem))[:40]
    for layers_again in (0, 1, problem.units):
        table = np.array(some)
        times = costs.times(table, layers_again)
        excess = costs.excess_bytes(table, layers_again)
        for place, bounds in enumerate(some):
            options = [kept[run] for run in unit_runs]
            for low, high in itertools.pairwise(bounds):
                inside = [unit for unit in range(low, high) if before <= unit < problem.units - after]
                for unit in inside[:layers_again]:
                    options[unit] = full[unit_runs[unit]]
            decision = recipes.split_decision(problem, bounds, options)
            forward, backward = virtual_stage_times(problem, decision)
            assert times[0][place] == pytest.approx(forward)
            assert times[1][place] == pytest.approx(backward)
            peaks = [peak for _, peak in stage_memory(problem, decision)]
            assert (excess[place] + np.array(problem.memory_limit_bytes)).tolist() == peaks
