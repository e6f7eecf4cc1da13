"""Memory rows of the integer program over counts.

    constant + sum static n + sum row * saved n + W[s] <= limit[s]                  for every in-flight row of stage s
    constant + sum (static + update) n                 <= limit[s]                  while weights are updated

Rows are scaled, since 1e11 bytes against a tolerance of 1e-6 is beyond double precision: every answer is checked in
exact integers, and one that the tolerance let through is excluded.
"""

from __future__ import annotations

import itertools

import mip

from mindspore_bmpipe.planner.milp_variables import CountVariables, Place, Placed
from mindspore_bmpipe.problem import Decision, Problem, check, stage_constants, stage_memory
from mindspore_bmpipe.schedule import extreme_rows, in_flight_rows

_SCALE = 1e4
"""What a stage's limit becomes in the model: large against the solver's tolerance, small enough to stay well scaled."""


def add_memory(variables: CountVariables, excess: mip.Var | None) -> None:
    """The rows of all stages; `excess` is what every limit may be exceeded by, in units of the largest limit."""
    problem, schedule = variables.problem, variables.schedule
    constants = stage_constants(problem)
    largest = max(problem.memory_limit_bytes)
    for stage, rows in enumerate(in_flight_rows(schedule)):
        limit = problem.memory_limit_bytes[stage]
        scale = _SCALE / limit
        virtuals = schedule.virtual_of_chunk[stage]
        places = [(index, virtual) for virtual in virtuals for index in range(len(problem.runs))]
        places = [place for place in places if place in variables.counts]
        working_set, constant = _add_working_set(variables, stage, places)
        for number, row in enumerate(extreme_rows(rows)):
            terms = [
                scale * (problem.runs[index].static_bytes + row[virtuals.index(virtual)] * option.saved_bytes) * var
                for index, virtual in places
                for option, var in zip(problem.runs[index].options, variables.counts[index, virtual], strict=True)
            ]
            terms += [scale * size * var for size, var in working_set]
            if excess is not None:
                terms.append(-scale * largest * excess)
            fixed = scale * (limit - constants[stage] - constant)
            variables.model.add_constr(mip.xsum(terms) <= fixed, name=f"memory_{stage}_{number}")
        if any(run.update_bytes for run in problem.runs):
            terms = [
                scale * (problem.runs[place[0]].static_bytes + problem.runs[place[0]].update_bytes) * var
                for place in places
                for var in variables.counts[place]
            ]
            if excess is not None:
                terms.append(-scale * largest * excess)
            fixed = scale * (limit - problem.stage_constant_bytes)
            variables.model.add_constr(mip.xsum(terms) <= fixed, name=f"update_{stage}")


def _add_working_set(
    variables: CountVariables, stage: int, places: list[Place]
) -> tuple[list[tuple[int, mip.Var]], int]:
    """Largest working set of a stage: (bytes, binary) terms and a constant.

    With sizes w0 < w1 < ..., it is w0 plus (w_i - w_(i-1)) for every i such that an option of size w_i or more is used.
    """
    runs, model = variables.problem.runs, variables.model
    sizes = sorted({option.working_set_bytes for index, _ in places for option in runs[index].options})
    terms: list[tuple[int, mip.Var]] = []
    for level, (below, size) in enumerate(itertools.pairwise(sizes)):

        def is_used(placed: Placed, size: int = size) -> bool:
            return any(
                count and option.working_set_bytes >= size
                for index, virtual in places
                for count, option in zip(placed.decision.counts[index][virtual], runs[index].options, strict=True)
            )

        used = variables.add_binary(f"working_{stage}_{level}", is_used)
        if terms:
            model.add_constr(used <= terms[-1][1], name=f"level_{stage}_{level}")
        terms.append((size - below, used))
        for index, virtual in places:
            counts = variables.counts[index, virtual]
            large = [
                var for var, option in zip(counts, runs[index].options, strict=True) if option.working_set_bytes >= size
            ]
            if large:
                name = f"uses_{stage}_{level}_{index}_{virtual}"
                model.add_constr(mip.xsum(large) <= int(counts[0].ub) * used, name=name)
    return terms, sizes[0] if sizes else 0


def over_limit(problem: Problem, decision: Decision) -> list[int]:
    """Stages that exceed their limit in exact integers; any other violation would be an error of the model."""
    kinds = {violation.kind for violation in check(problem, decision)}
    assert kinds <= {"memory"}, f"the integer program broke {kinds}"
    return [
        stage
        for stage, (_, peak) in enumerate(stage_memory(problem, decision))
        if peak > problem.memory_limit_bytes[stage]
    ]


def exclude(variables: CountVariables, decision: Decision, stage: int) -> None:
    """Exclude every decision that puts at least these counts on a stage.

    Memory only grows with counts, so none of them fits if this one does not; one count must be lower.
    """
    model = variables.model
    lower = []
    for virtual in variables.schedule.virtual_of_chunk[stage]:
        for index in range(len(variables.problem.runs)):
            counts = variables.counts.get((index, virtual), [])
            for var, count in zip(counts, decision.counts[index][virtual], strict=False):
                if count:
                    below = model.add_var(var_type=mip.BINARY)
                    most = int(var.ub)
                    model.add_constr(var <= most - (most - count + 1) * below)
                    lower.append(below)
    model.add_constr(mip.xsum(lower) >= 1)
