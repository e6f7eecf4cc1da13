"""Rows of the integer program over counts that say where units may be.

done[r,k] binary    run r has no units after virtual stage k

the rows are

sum over k, o of n[r,k,o] = count[r]                                            every unit is placed once
sum over trainable r and o of n[r,k,o] >= 1                                     every virtual stage has parameters
count[r] * done[r,k] <= sum over j <= k, o of n[r,j,o]                          done means done
sum over o of n[r+1,k,o] <= count[r+1] * done[r,k]                              units stay in order across runs
"""

from __future__ import annotations

from collections.abc import Sequence

import mip

from mindspore_bmpipe.planner.milp_variables import CountVariables, Placed, intervals


def add_placement(variables: CountVariables) -> None:
    """All rows of this module."""
    _add_totals(variables)
    _add_counts(variables)
    _add_order(variables)
    _add_forbidden_cuts(variables)
    _add_pins(variables)


def _add_totals(variables: CountVariables) -> None:
    """Integer numbers of units per virtual stage and per stage: what the solver should branch on first.

    Times depend on them far more than on the option of one unit, and with several chunks a stage's total decides its
    steady state. The relaxation is the same with and without them.
    """
    problem, model = variables.problem, variables.model
    if problem.chunks == 1:
        return
    by_virtual: list[mip.Var] = []
    by_stage: list[mip.Var] = []
    runs = range(len(problem.runs))
    for stage, virtuals in enumerate(variables.schedule.virtual_of_chunk):
        for total, name, members in (
            *((by_virtual, f"units_{virtual}", (virtual,)) for virtual in virtuals),
            (by_stage, f"stage_units_{stage}", virtuals),
        ):
            places = [(index, virtual) for virtual in members for index in runs if (index, virtual) in variables.counts]
            total.append(variables.add_integer(name, places, len(members), problem.units))
    for index in runs if len(problem.runs) > 1 else ():
        for virtual in range(problem.virtual_stages):
            if (index, virtual) in variables.counts:
                variables.add_integer(f"units_{index}_{virtual}", [(index, virtual)], 0, mip.INF)
    model.add_constr(mip.xsum(by_virtual) == problem.units, name="all_units_by_virtual")
    model.add_constr(mip.xsum(by_stage) == problem.units, name="all_units_by_stage")


def _add_counts(variables: CountVariables) -> None:
    problem = variables.problem
    for index, run in enumerate(problem.runs):
        placed = variables.run_until(index, problem.virtual_stages - 1)
        variables.model.add_constr(placed == run.count, name=f"placed_{index}")
    for virtual in range(problem.virtual_stages):
        trainable = [
            var
            for index, run in enumerate(problem.runs)
            if run.trainable
            for var in variables.counts.get((index, virtual), [])
        ]
        _require_one(variables.model, trainable, f"trainable_{virtual}")


def _require_one(model: mip.Model, wanted: Sequence[mip.Var], name: str) -> None:
    """At least one of some variables; without any python-mip would take the comparison for a plain truth value."""
    if wanted:
        model.add_constr(mip.xsum(wanted) >= 1, name=name)
    else:
        impossible = model.add_var(name=f"impossible_{name}", lb=0.0, ub=0.0)
        model.add_constr(impossible >= 1, name=name)


def _add_order(variables: CountVariables) -> None:
    problem, model = variables.problem, variables.model
    firsts = problem.first_units
    for index in range(len(problem.runs) - 1):
        last_unit = firsts[index + 1] - 1
        count, following = problem.runs[index].count, problem.runs[index + 1]
        before: mip.Var | None = None
        for virtual in range(min(problem.virtual_stages - 1, variables.last[last_unit])):
            later = variables.counts.get((index + 1, virtual), [])
            if virtual < variables.first[last_unit]:
                for var in later:
                    model.add_constr(var <= 0, name=f"order_{index}_{virtual}_{var.name}")
                continue
            places = [(index, earlier) for earlier in range(virtual + 1)]

            def finished(placed: Placed, places: list[tuple[int, int]] = places, count: int = count) -> bool:
                return placed.units(places) == count

            done = variables.add_binary(f"done_{index}_{virtual}", finished)
            model.add_constr(variables.run_until(index, virtual) >= count * done, name=f"finished_{index}_{virtual}")
            if later:
                most = min(following.count, int(later[0].ub))
                model.add_constr(mip.xsum(later) <= most * done, name=f"order_{index}_{virtual}")
            if before is not None:
                model.add_constr(done >= before, name=f"stays_{index}_{virtual}")
            before = done


def _add_forbidden_cuts(variables: CountVariables) -> None:
    """Units before a cut never number P for P in a forbidden interval [low, high]: below low, or above high."""
    problem, model = variables.problem, variables.model
    for low, high in intervals(sorted(cut + 1 for cut in problem.forbidden_cuts)):
        for virtual in range(problem.virtual_stages - 1):

            def is_above(placed: Placed, virtual: int = virtual, high: int = high) -> bool:
                return placed.until[virtual] > high

            above = variables.add_binary(f"above_{low}_{virtual}", is_above)
            before = variables.all_until(virtual)
            model.add_constr(before >= (high + 1) * above, name=f"cut_above_{low}_{virtual}")
            model.add_constr(before <= low - 1 + (problem.units - low + 1) * above, name=f"cut_below_{low}_{virtual}")


def _add_pins(variables: CountVariables) -> None:
    """A pinned range lies in neighbouring virtual stages of its stage: others' units lie between the rest."""
    problem, model = variables.problem, variables.model
    for number, pin in enumerate(problem.pins):
        choices = []
        for virtual, final in intervals(variables.schedule.virtual_of_chunk[pin.stage]):

            def holds(placed: Placed, virtual: int = virtual, final: int = final, unit: int = pin.first_unit) -> bool:
                return (placed.until[virtual - 1] if virtual else 0) <= unit < placed.until[final]

            chosen = variables.add_binary(f"pin_{number}_{virtual}", holds)
            choices.append(chosen)
            through = variables.all_until(final)
            model.add_constr(through >= (pin.last_unit + 1) * chosen, name=f"pin_end_{number}_{virtual}")
            if virtual:
                model.add_constr(
                    variables.all_until(virtual - 1) <= problem.units - (problem.units - pin.first_unit) * chosen,
                    name=f"pin_start_{number}_{virtual}",
                )
        model.add_constr(mip.xsum(choices) == 1, name=f"pin_{number}")
