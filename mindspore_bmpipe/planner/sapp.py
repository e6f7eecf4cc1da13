"""SAPP, the pipeline-balancing tool of MindFormers: units and recomputation together, on a surrogate of the step time.

Algorithm: an integer program over units per (stage, chunk, recompute option). With F and B of the chunks it minimises

    tau >= F[s, c] + B[s, c']        for every stage s and all pairs of its chunks c, c'

so for one chunk the slowest stage. With several chunks and as many micro-batches as stages (m = p) it minimises x + y,

    x >= B[s, c] for c < v - 1,   y >= x,   y >= B[s, v-1] + g_s / m * F[s, v-1]

where g_s, forwards between backwards, is s in a less-memory schedule, else |p - 1 - 2s| and 0 for s < p / 2. Memory is
linear in the counts for the in-flight numbers of the schedule. Here it is the project's own program (`milp_counts`)
with these rows in place of paths, so in-flight rows, pins and cuts are the exact ones of the problem; for one chunk a
dynamic program over groups gives the same optimum at once. Many plans share the least value, and the tool takes any;
here the options of each stage are chosen afterwards with the least recomputation that keeps the value.

Source: MindFormers, branch r1.6.0-beta1, `toolkit/pipeline_balance/sapp/sapp_solver.py` (public), with its default
optimisation level 1. Its layer description is read by `layer_table`. Left out: level 2, and its bound on memory between
chunks, since our rows are exact; the tail's forward counts g / m in y, where the tool counts it whole. Recompute
policy: any mixture of the options of a unit.
"""

from __future__ import annotations

import itertools

import numpy as np

from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits, Status, needs_message, without_plan
from mindspore_bmpipe.planner.chunk_options import ChunkOptions
from mindspore_bmpipe.planner.milp import least_excess
from mindspore_bmpipe.planner.milp_backend import SolverError
from mindspore_bmpipe.planner.milp_counts import CountModel
from mindspore_bmpipe.planner.milp_memory import over_limit
from mindspore_bmpipe.planner.recipe_groups import fitting_split, require_listable
from mindspore_bmpipe.planner.recipes import judged
from mindspore_bmpipe.planner.splits import Bounds, Groups, SplitRules, best_split
from mindspore_bmpipe.planner.stage_options import StageOptions
from mindspore_bmpipe.problem import Decision, Problem, schedule_of, virtual_stage_times
from mindspore_bmpipe.schedule import PathCounts

NAME = "sapp"

_ROUNDS = 20
"""Integer programs solved, at most: one more for every answer that exceeds memory by the solver's tolerance."""
_SLACK = 1e-9
_LESS_MEMORY = ("interleaved_less_memory", "seqsmartvpp")
_MESSAGE = "least value of its objective"


def _between_backwards(problem: Problem) -> list[int] | None:
    """The g of every stage where the second objective applies, else `None`."""
    stages = problem.stages
    if problem.chunks == 1 or problem.micro_batches != stages:
        return None
    if problem.schedule in _LESS_MEMORY:
        return list(range(stages))
    return [0 if stage < stages // 2 else abs(stages - 1 - 2 * stage) for stage in range(stages)]


def objective_rows(problem: Problem) -> list[PathCounts]:
    """Rows whose largest value, for a plan's F and B, is the objective (times m for the second one)."""
    chunks_of = schedule_of(problem).virtual_of_chunk
    size, between = problem.virtual_stages, _between_backwards(problem)
    if between is None:
        return [
            _row(size, {forward: 1}, {backward: 1})
            for virtuals in chunks_of
            for forward, backward in itertools.product(virtuals, repeat=2)
        ]
    many = problem.micro_batches
    rows = []
    for early in (virtual for virtuals in chunks_of for virtual in virtuals[:-1]):
        rows.append(_row(size, {}, {early: 2 * many}))
        for virtuals, forwards in zip(chunks_of, between, strict=True):
            rows.append(_row(size, {virtuals[-1]: forwards}, {early: many, virtuals[-1]: many}))
    return rows


def objective_ms(problem: Problem, decision: Decision) -> float:
    """The largest row of a decision."""
    forward, backward = (np.array(times) for times in virtual_stage_times(problem, decision))
    return max(
        float(np.array(row.forward) @ forward + np.array(row.backward) @ backward) for row in objective_rows(problem)
    )


def _row(size: int, forward: dict[int, int], backward: dict[int, int]) -> PathCounts:
    counts = [tuple(times.get(virtual, 0) for virtual in range(size)) for times in (forward, backward)]
    # Whole backwards, also where a schedule runs weight gradients apart.
    return PathCounts(counts[0], counts[1], counts[1], (0,) * size, (0,) * (size - 1))


def _backward_caps(problem: Problem, decision: Decision) -> list[float]:
    """What the backward of every virtual stage may grow to without a larger objective, others unchanged or lower."""
    forward, backward = virtual_stage_times(problem, decision)
    chunks_of, between = schedule_of(problem).virtual_of_chunk, _between_backwards(problem)
    caps = [0.0] * problem.virtual_stages
    if between is None:
        value = objective_ms(problem, decision)
        for virtuals in chunks_of:
            for virtual in virtuals:
                caps[virtual] = value - max(forward[other] for other in virtuals)
        return caps
    ahead = [
        forward[virtuals[-1]] * many / problem.micro_batches for virtuals, many in zip(chunks_of, between, strict=True)
    ]
    x = max(backward[virtual] for virtuals in chunks_of for virtual in virtuals[:-1])
    y = max(x, *(backward[virtuals[-1]] + part for virtuals, part in zip(chunks_of, ahead, strict=True)))
    for virtuals, part in zip(chunks_of, ahead, strict=True):
        for virtual in virtuals[:-1]:
            caps[virtual] = x
        caps[virtuals[-1]] = y - part
    return caps


def plan(problem: Problem, limits: SolveLimits) -> Solution:
    """The plan above; the message says whether tau is proved least.

    Raises:
        InputError: too many groups for one chunk per stage.
    """
    clock = Clock(limits)
    return _one_chunk(problem, clock) if problem.chunks == 1 else _several_chunks(problem, limits, clock)


def _one_chunk(problem: Problem, clock: Clock) -> Solution:
    require_listable(problem, NAME)
    options = StageOptions(problem)
    groups = Groups(options, SplitRules(problem))
    closest = fitting_split(NAME, options, groups, clock)
    if isinstance(closest, Solution):
        return closest
    bounds = _least_slowest(options, groups)
    return judged(NAME, problem, options.decision(bounds), clock, f"{_MESSAGE}, proved least")


def _least_slowest(options: StageOptions, groups: Groups) -> Bounds:
    """The min-max split with the exact best options of every stage."""
    times = groups.forward_ms + groups.backward_bound_ms
    _, split = best_split(times, additive=False)
    assert split is not None
    most = max(_exact_ms(options, stage, low, high) for stage, (low, high) in enumerate(itertools.pairwise(split)))
    for stage, low, high in np.argwhere(times <= most).tolist():
        times[stage, low, high] = _exact_ms(options, stage, low, high)
    _, split = best_split(times, additive=False)
    assert split is not None
    return split


def _exact_ms(options: StageOptions, stage: int, low: int, high: int) -> float:
    choice = options.choice(stage, low, high)
    return float("inf") if choice is None else choice.forward_ms + choice.backward_ms


def _several_chunks(problem: Problem, limits: SolveLimits, clock: Clock) -> Solution:
    try:
        model = CountModel(problem, limits)
        for row in objective_rows(problem):
            model.add_path(row)
        for _ in range(_ROUNDS):
            decision, bound, complete = model.solve(clock, limits.node_limit)
            if decision is None:
                break
            over = over_limit(problem, decision)
            if not over:
                value = objective_ms(problem, decision)
                proved = complete and bound >= value * (1 - limits.accepted_gap)
                ended = "proved least" if proved else f"at most {1 - max(bound, 0.0) / value:.2%} above the least"
                return judged(NAME, problem, _least_recompute(problem, decision), clock, f"{_MESSAGE}, {ended}")
            for stage in over:
                model.exclude(decision, stage)
        if complete and decision is None:
            needed = least_excess(problem, limits, None)
            return without_plan(NAME, Status.INFEASIBLE, clock, needs_message(problem, needed), needed)
    except SolverError as error:
        return without_plan(NAME, Status.UNKNOWN, clock, str(error))
    return without_plan(NAME, Status.UNKNOWN, clock, "the solver found no plan within its limits")


def _least_recompute(problem: Problem, decision: Decision) -> Decision:
    """The same units on every virtual stage, with the least recomputation that keeps the objective."""
    options = ChunkOptions(problem)
    table = [[list(by_option) for by_option in placed] for placed in decision.counts]
    _, backward = virtual_stage_times(problem, decision)
    caps = np.array(_backward_caps(problem, decision))
    for stage, virtuals in enumerate(schedule_of(problem).virtual_of_chunk):
        segments = tuple(
            tuple((run, sum(placed[virtual])) for run, placed in enumerate(decision.counts) if sum(placed[virtual]))
            for virtual in virtuals
        )
        listed = options.patterns(stage, segments)
        held = np.array([_extra(problem, decision, virtual) for virtual in virtuals])
        plain = np.array([backward[virtual] for virtual in virtuals]) - held / problem.speeds[stage]
        slower = plain + listed.extra_ms / problem.speeds[stage]
        keeps = (slower <= caps[list(virtuals)] * (1 + _SLACK)).all(axis=1)
        usable = np.flatnonzero(keeps & (listed.excess_bytes == 0))
        if not usable.size:
            continue
        chosen = int(usable[np.argmin(listed.extra_ms[usable].sum(axis=1))])
        if listed.extra_ms[chosen].sum() >= held.sum():
            continue
        for virtual, chunk, counts in zip(virtuals, segments, listed.counts(chosen), strict=True):
            for (run, _), by_option in zip(chunk, counts, strict=True):
                table[run][virtual] = list(by_option)
    return Decision(tuple(tuple(tuple(row) for row in placed) for placed in table))


def _extra(problem: Problem, decision: Decision, virtual: int) -> float:
    """Recomputation in one virtual stage, at speed 1."""
    return sum(
        count * option.extra_backward_ms
        for run, placed in zip(problem.runs, decision.counts, strict=True)
        for count, option in zip(placed[virtual], run.options, strict=True)
    )
