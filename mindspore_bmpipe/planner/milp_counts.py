"""The integer program over counts.

Variables, for run r, virtual stage k and option o:

    n[r,k,o]  integer   units of run r in virtual stage k with option o
    done[r,k] binary    run r has no units after virtual stage k (only where it is not known beforehand)
    F[k], B[k]          forward and backward time of virtual stage k
    T                   step time, minimised

    sum over k, o of n[r,k,o] = count[r]                                            every unit is placed once
    count[r] * done[r,k] <= sum over j <= k, o of n[r,j,o]                          done means done
    sum over o of n[r+1,k,o] <= count[r+1] * done[r,k]                              units stay in order across runs
    sum over trainable r and o of n[r,k,o] >= 1                                     every virtual stage has parameters
    constant + sum static n + sum row * saved n + W[s] <= limit[s]                  for every in-flight row of stage s
    T >= sum over k of f[k] F[k] + b[k] B[k] + transfers                            for every path through the schedule

T is exactly the step time once all paths are there. There are far too many, so they are added as they are violated;
with any subset the optimum is a lower bound. Memory rows are scaled, since 1e11 bytes against a tolerance of 1e-6 is
beyond double precision: every answer is checked in exact integers, and one that the tolerance let through is excluded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mip
import numpy as np

from mindspore_bmpipe.planner.base import SolveLimits
from mindspore_bmpipe.planner.local_search import Times
from mindspore_bmpipe.planner.milp_backend import TIME_SCALE, new_model, optimize, relax, skip_heuristics
from mindspore_bmpipe.planner.quiet import silenced
from mindspore_bmpipe.problem import Decision, Problem, schedule_of, stage_constants
from mindspore_bmpipe.schedule import PathCounts, dependency_graph, extreme_rows, in_flight_rows, splits_backward

_MEMORY_SCALE = 1e4
"""What a stage's limit becomes in the model: large against the solver's tolerance, small enough to stay well scaled."""


class CountModel:
    """The integer program of one problem, growing by paths and exclusions."""

    def __init__(self, problem: Problem, limits: SolveLimits, solver: str | None = None, elastic: bool = False) -> None:
        """Build the program; an elastic one minimises the worst excess over the memory limits instead of time."""
        self.problem = problem
        self._largest_limit = max(problem.memory_limit_bytes)
        self.schedule = schedule_of(problem)
        self._splits = splits_backward(self.schedule)
        self._time_unit = problem.ideal_ms / TIME_SCALE
        with silenced():
            self.model = new_model(limits, solver)
            self._first, self._last = _virtual_ranges(problem)
            self._excess = self.model.add_var(name="excess", lb=-mip.INF) if elastic else None
            self._counts = self._add_counts()
            self._done: dict[tuple[int, int], mip.Var] = {}
            self._levels: dict[tuple[int, int], mip.Var] = {}
            self._cut_sides: list[tuple[mip.Var, int, int]] = []
            self._pin_choices: list[tuple[mip.Var, int, int, int]] = []
            self._totals: list[tuple[mip.Var, tuple[tuple[int, int], ...]]] = []
            self._run_totals: list[tuple[mip.Var, tuple[tuple[int, int], ...]]] = []
            self._add_totals()
            self._add_placement()
            self._add_order()
            self._add_memory()
            self._add_update_memory()
            self._add_forbidden_cuts()
            self._add_pins()
            self._forward, self._backward = self._add_times()
            self.step = self.model.add_var(name="T", lb=0.0)
            self.model.objective = mip.minimize(self.step if self._excess is None else self._excess)

    def _add_counts(self) -> dict[tuple[int, int], list[mip.Var]]:
        problem = self.problem
        counts = {}
        firsts = problem.first_units
        for index, run in enumerate(problem.runs):
            for virtual in range(problem.virtual_stages):
                units = sum(
                    self._first[unit] <= virtual <= self._last[unit] for unit in range(firsts[index], firsts[index + 1])
                )
                if units:
                    counts[index, virtual] = [
                        self.model.add_var(name=f"n_{index}_{virtual}_{option}", var_type=mip.INTEGER, lb=0, ub=units)
                        for option in range(len(run.options))
                    ]
        return counts

    def _add_totals(self) -> None:
        """Integer numbers of units per virtual stage and per stage: what the solver should branch on first.

        Times depend on them far more than on the option of one unit, and with several chunks a stage's total decides
        its steady state. The relaxation is the same with and without them.
        """
        problem = self.problem
        if problem.chunks == 1:
            return
        for stage, virtuals in enumerate(self.schedule.virtual_of_chunk):
            groups = [(f"units_{virtual}", (virtual,)) for virtual in virtuals] + [(f"stage_units_{stage}", virtuals)]
            for name, members in groups:
                keys = tuple(
                    (index, v) for v in members for index in range(len(problem.runs)) if (index, v) in self._counts
                )
                total = self.model.add_var(name=name, var_type=mip.INTEGER, lb=len(members), ub=problem.units)
                self.model.add_constr(
                    total == mip.xsum(var for key in keys for var in self._counts[key]), name=f"sum_{name}"
                )
                self._totals.append((total, keys))
        for index in range(len(problem.runs) if len(problem.runs) > 1 else 0):
            for virtual in range(problem.virtual_stages):
                if (index, virtual) in self._counts:
                    units = self.model.add_var(name=f"units_{index}_{virtual}", var_type=mip.INTEGER, lb=0)
                    self.model.add_constr(
                        units == mip.xsum(self._counts[index, virtual]), name=f"sum_units_{index}_{virtual}"
                    )
                    self._run_totals.append((units, ((index, virtual),)))
        for size in (1, problem.chunks):
            some = [total for total, keys in self._totals if len({virtual for _, virtual in keys}) == size]
            self.model.add_constr(mip.xsum(some) == problem.units, name=f"all_units_{size}")

    def _units_until(self, index: int, virtual: int) -> mip.LinExpr:
        return mip.xsum(var for before in range(virtual + 1) for var in self._counts.get((index, before), []))

    def _add_placement(self) -> None:
        problem = self.problem
        for index, run in enumerate(problem.runs):
            self.model.add_constr(
                self._units_until(index, problem.virtual_stages - 1) == run.count, name=f"placed_{index}"
            )
        for virtual in range(problem.virtual_stages):
            trainable = [index for index, run in enumerate(problem.runs) if run.trainable]
            variables = [var for index in trainable for var in self._counts.get((index, virtual), [])]
            self._require(mip.xsum(variables) - 1, variables, f"trainable_{virtual}")

    def _require(self, expression: mip.LinExpr, variables: Sequence[mip.Var], name: str) -> None:
        """Expression >= 0; without variables python-mip would take the comparison for a plain truth value."""
        if variables:
            self.model.add_constr(expression >= 0, name=name)
        elif expression.const < 0:
            impossible = self.model.add_var(name=f"impossible_{name}", lb=0.0, ub=0.0)
            self.model.add_constr(impossible >= 1, name=name)

    def _add_order(self) -> None:
        problem = self.problem
        firsts = problem.first_units
        for index in range(len(problem.runs) - 1):
            last_unit = firsts[index + 1] - 1
            following = problem.runs[index + 1]
            for virtual in range(problem.virtual_stages - 1):
                later = self._counts.get((index + 1, virtual), [])
                if virtual >= self._last[last_unit]:
                    break
                if virtual < self._first[last_unit]:
                    for var in later:
                        self.model.add_constr(var <= 0, name=f"order_{index}_{virtual}_{var.name}")
                    continue
                done = self.model.add_var(name=f"done_{index}_{virtual}", var_type=mip.BINARY)
                self._done[index, virtual] = done
                count = problem.runs[index].count
                self.model.add_constr(
                    self._units_until(index, virtual) >= count * done, name=f"finished_{index}_{virtual}"
                )
                most = min(following.count, int(later[0].ub)) if later else 0
                if later:
                    self.model.add_constr(mip.xsum(later) <= most * done, name=f"order_{index}_{virtual}")
                if (index, virtual - 1) in self._done:
                    self.model.add_constr(done >= self._done[index, virtual - 1], name=f"stays_{index}_{virtual}")

    def _add_memory(self) -> None:
        problem = self.problem
        constants = stage_constants(problem)
        for stage, rows in enumerate(in_flight_rows(self.schedule)):
            limit, unchanging = problem.memory_limit_bytes[stage], constants[stage]
            scale = _MEMORY_SCALE / limit
            virtuals = self.schedule.virtual_of_chunk[stage]
            present = [(index, virtual) for virtual in virtuals for index in range(len(problem.runs))]
            present = [key for key in present if key in self._counts]
            working_set, constant = self._add_working_set(stage, present)
            for number, row in enumerate(extreme_rows(rows)):
                terms = [
                    scale * (problem.runs[index].static_bytes + row[virtuals.index(virtual)] * option.saved_bytes) * var
                    for index, virtual in present
                    for option, var in zip(problem.runs[index].options, self._counts[index, virtual], strict=True)
                ]
                fixed = scale * (limit - unchanging - constant)
                terms += [scale * size * var for size, var in working_set]
                if self._excess is not None:
                    # In units of the largest limit, the same bytes for all stages.
                    terms.append(-_MEMORY_SCALE / limit * self._largest_limit * self._excess)
                self.model.add_constr(mip.xsum(terms) <= fixed, name=f"memory_{stage}_{number}")

    def _add_update_memory(self) -> None:
        """Memory while weights are updated, which options have no part in."""
        problem = self.problem
        if not any(run.update_bytes for run in problem.runs):
            return
        for stage, limit in enumerate(problem.memory_limit_bytes):
            scale = _MEMORY_SCALE / limit
            terms = [
                scale * (problem.runs[index].static_bytes + problem.runs[index].update_bytes) * var
                for virtual in self.schedule.virtual_of_chunk[stage]
                for index in range(len(problem.runs))
                for var in self._counts.get((index, virtual), [])
            ]
            if self._excess is not None:
                terms.append(-scale * self._largest_limit * self._excess)
            fixed = scale * (limit - problem.stage_constant_bytes)
            self.model.add_constr(mip.xsum(terms) <= fixed, name=f"update_{stage}")

    def _add_working_set(self, stage: int, present: list[tuple[int, int]]) -> tuple[list[tuple[int, mip.Var]], int]:
        """Largest working set of a stage: (bytes, binary) terms and a constant.

        With sizes w0 < w1 < ..., it is w0 plus (w_i - w_(i-1)) for every i such that an option of size w_i or more is
        used.
        """
        runs = self.problem.runs
        sizes = sorted({option.working_set_bytes for index, _ in present for option in runs[index].options})
        terms = []
        for level, (below, size) in enumerate(itertools.pairwise(sizes)):
            used = self.model.add_var(name=f"working_{stage}_{level}", var_type=mip.BINARY)
            self._levels[stage, level] = used
            terms.append((size - below, used))
            if level:
                self.model.add_constr(used <= self._levels[stage, level - 1], name=f"level_{stage}_{level}")
            for index, virtual in present:
                variables = self._counts[index, virtual]
                large = [
                    var
                    for var, option in zip(variables, runs[index].options, strict=True)
                    if option.working_set_bytes >= size
                ]
                if large:
                    most = int(variables[0].ub)
                    name = f"uses_{stage}_{level}_{index}_{virtual}"
                    self.model.add_constr(mip.xsum(large) <= most * used, name=name)
        return terms, sizes[0] if sizes else 0

    def _add_forbidden_cuts(self) -> None:
        """Units before a cut never number P for P in a forbidden interval [low, high]: below low, or above high."""
        problem = self.problem
        for low, high in _intervals(sorted(cut + 1 for cut in problem.forbidden_cuts)):
            for virtual in range(problem.virtual_stages - 1):
                before = mip.xsum(self._units_until(index, virtual) for index in range(len(problem.runs)))
                above = self.model.add_var(name=f"above_{low}_{virtual}", var_type=mip.BINARY)
                self._cut_sides.append((above, virtual, high))
                self.model.add_constr(before >= (high + 1) * above, name=f"cut_above_{low}_{virtual}")
                self.model.add_constr(
                    before <= low - 1 + (problem.units - low + 1) * above, name=f"cut_below_{low}_{virtual}"
                )

    def _add_pins(self) -> None:
        """A pinned range lies in neighbouring virtual stages of its stage: others' units lie between the rest."""
        problem = self.problem
        for number, pin in enumerate(problem.pins):
            choices = []
            for virtual, final in _intervals(list(self.schedule.virtual_of_chunk[pin.stage])):
                chosen = self.model.add_var(name=f"pin_{number}_{virtual}", var_type=mip.BINARY)
                choices.append(chosen)
                self._pin_choices.append((chosen, virtual, final, pin.first_unit))
                through = mip.xsum(self._units_until(index, final) for index in range(len(problem.runs)))
                self.model.add_constr(through >= (pin.last_unit + 1) * chosen, name=f"pin_end_{number}_{virtual}")
                if virtual:
                    before = mip.xsum(self._units_until(index, virtual - 1) for index in range(len(problem.runs)))
                    self.model.add_constr(
                        before <= problem.units - (problem.units - pin.first_unit) * chosen,
                        name=f"pin_start_{number}_{virtual}",
                    )
            self.model.add_constr(mip.xsum(choices) == 1, name=f"pin_{number}")

    def _add_times(self) -> tuple[list[mip.Var], list[mip.Var]]:
        problem = self.problem
        forward, backward = [], []
        self._weight: list[mip.Var] = []
        for virtual, stage in enumerate(self.schedule.stage_of_virtual):
            unit = self._time_unit * problem.speeds[stage]
            forward.append(self.model.add_var(name=f"F_{virtual}", lb=0.0))
            backward.append(self.model.add_var(name=f"B_{virtual}", lb=0.0))
            forward_terms, backward_terms, weight_terms = [], [], []
            for index, run in enumerate(problem.runs):
                for option, var in zip(run.options, self._counts.get((index, virtual), []), strict=False):
                    forward_terms.append(run.forward_ms / unit * var)
                    weight_terms.append(run.split_weight_ms / unit * var)
                    backward_terms.append((run.backward_ms + option.extra_backward_ms) / unit * var)
            self.model.add_constr(forward[-1] == mip.xsum(forward_terms), name=f"forward_{virtual}")
            self.model.add_constr(backward[-1] == mip.xsum(backward_terms), name=f"backward_{virtual}")
            if self._splits:
                self._weight.append(self.model.add_var(name=f"W_{virtual}", lb=0.0))
                self.model.add_constr(self._weight[-1] == mip.xsum(weight_terms), name=f"weight_{virtual}")
        return forward, backward

    def add_path(self, path: PathCounts) -> None:
        """T is at least as long as this path."""
        terms = [count * var for count, var in zip(path.forward, self._forward, strict=True) if count]
        terms += [count * var for count, var in zip(path.backward, self._backward, strict=True) if count]
        for virtual, var in enumerate(self._weight):
            apart = path.weight[virtual] - path.backward[virtual]
            if apart:
                terms.append(apart * var)
        constant = path.transfers * self.problem.transfer_ms / self._time_unit
        with silenced():
            self.model.add_constr(self.step >= mip.xsum(terms) + constant)

    def add_start_times(self) -> int:
        """One end time per action and one row per dependency: all paths at once. Returns the number of actions."""
        graph, unit = dependency_graph(self.schedule), self._time_unit
        durations = [*self._forward, *self._backward]
        if self._splits:
            durations[len(self._forward) :] = [
                *(whole - part for whole, part in zip(self._backward, self._weight, strict=True)),
                *self._weight,
                *self._backward,
            ]
        transfer = self.problem.transfer_ms / unit
        followed = set(graph.stage_predecessor.tolist()) | set(graph.data_predecessor.tolist())
        with silenced():
            ends = [self.model.add_var(name=f"end_{number}", lb=0.0) for number in range(graph.size)]
            for number, end in enumerate(ends):
                before, source = int(graph.stage_predecessor[number]), int(graph.data_predecessor[number])
                duration = durations[graph.slot[number]]
                if before < graph.size:
                    self.model.add_constr(end >= ends[before] + duration)
                if source < graph.size and source != before:
                    delay = transfer * float(graph.transfers[number])
                    self.model.add_constr(end >= ends[source] + duration + delay)
                if before == source == graph.size:
                    self.model.add_constr(end >= duration)
                if number not in followed:
                    self.model.add_constr(self.step >= end)
        return graph.size

    def cut_off(self, step_ms: float, heuristics: bool) -> None:
        """Only plans at most this long are of interest, and perhaps there are none, so heuristics may waste time."""
        if not heuristics:
            skip_heuristics(self.model)
        with silenced():
            self.step.ub = step_ms / self._time_unit

    def let_options_vary(self, vary: bool) -> None:
        """Let shares of units take different options, or not. Units per virtual stage stay whole numbers."""
        kind = mip.CONTINUOUS if vary else mip.INTEGER
        with silenced():
            for variables in self._counts.values():
                for var in variables:
                    var.var_type = kind

    def relax(self) -> float | None:
        """Step time of the linear relaxation; `None` if it has no feasible point. `times` gives those of its stages."""
        return float(self.step.x) * self._time_unit if relax(self.model) else None

    def step_ms(self) -> float:
        """Step time of what was solved last, as far as the known paths tell."""
        return float(self.step.x) * self._time_unit

    def times(self) -> tuple[Times, Times, Times | None]:
        """Forward, whole backward and weight gradients in it of each virtual stage, of what was solved last."""
        forward, backward, weight = (
            np.array([max(0.0, float(var.x)) * self._time_unit for var in variables])
            for variables in (self._forward, self._backward, self._weight)
        )
        return forward, backward, weight if self._splits else None

    def relaxed_units(self) -> list[float]:
        """Units of each virtual stage in the relaxation solved last."""
        return [
            sum(
                float(var.x)
                for index in range(len(self.problem.runs))
                for var in self._counts.get((index, virtual), [])
            )
            for virtual in range(self.problem.virtual_stages)
        ]

    def rounded_split(self) -> list[int]:
        """First unit of each virtual stage, and the number of units, of the answer found last."""
        return [0, *np.cumsum(np.round(self.relaxed_units())).astype(int).tolist()]

    def solve(
        self, start: Decision | None, start_ms: float, seconds: float, nodes: int
    ) -> tuple[Decision | None, float, bool]:
        """Solve the integer program with the paths known so far.

        Args:
            start: a feasible decision to start from, or `None`.
            start_ms: its step time.
            seconds: wall-clock limit.
            nodes: node limit.

        Returns:
            The rounded solution or `None`, a lower bound in milliseconds (infinite if the program is infeasible), and
            whether the solver ended by itself rather than at a limit.
        """
        if start is not None:
            with silenced():
                self.model.start = self._values(start, start_ms)
        answer = optimize(self.model, seconds, nodes)
        bound = answer.bound * self._time_unit
        if not answer.has_solution:
            return None, bound, answer.complete
        table = []
        for index, run in enumerate(self.problem.runs):
            row = []
            for virtual in range(self.problem.virtual_stages):
                variables = self._counts.get((index, virtual))
                row.append(tuple(round(var.x) for var in variables) if variables else (0,) * len(run.options))
            table.append(tuple(row))
        return Decision(tuple(table)), bound, answer.complete

    def _values(self, decision: Decision, step_ms: float) -> list[tuple[mip.Var, float]]:
        """Value of every variable for a decision; solvers take a partial start, but zero for what is left out."""
        problem, unit = self.problem, self._time_unit
        values: list[tuple[mip.Var, float]] = [(self.step, step_ms / unit)]
        until: dict[int, int] = {}
        total = 0
        for virtual in range(problem.virtual_stages):
            forward = backward = weight = 0.0
            unit = self._time_unit * problem.speeds[self.schedule.stage_of_virtual[virtual]]
            for index, run in enumerate(problem.runs):
                by_option = decision.counts[index][virtual]
                total += sum(by_option)
                forward += sum(by_option) * run.forward_ms
                weight += sum(by_option) * run.split_weight_ms
                backward += sum(
                    count * (run.backward_ms + option.extra_backward_ms)
                    for count, option in zip(by_option, run.options, strict=True)
                )
                for var, count in zip(self._counts.get((index, virtual), []), by_option, strict=False):
                    values.append((var, count))
            until[virtual] = total
            values += [(self._forward[virtual], forward / unit), (self._backward[virtual], backward / unit)]
            if self._splits:
                values.append((self._weight[virtual], weight / unit))
        for (index, virtual), var in self._done.items():
            placed = sum(sum(by_option) for by_option in decision.counts[index][: virtual + 1])
            values.append((var, float(placed == problem.runs[index].count)))
        for total_var, keys in (*self._totals, *self._run_totals):
            values.append((total_var, sum(sum(decision.counts[index][virtual]) for index, virtual in keys)))
        for (stage, level), var in self._levels.items():
            values.append((var, float(self._uses_level(decision, stage, level))))
        for var, virtual, high in self._cut_sides:
            values.append((var, float(until[virtual] > high)))
        for var, virtual, final, first in self._pin_choices:
            before = until[virtual - 1] if virtual else 0
            values.append((var, float(before <= first < until[final])))
        return values

    def _uses_level(self, decision: Decision, stage: int, level: int) -> bool:
        runs = self.problem.runs
        virtuals = self.schedule.virtual_of_chunk[stage]
        sizes = sorted(
            {
                option.working_set_bytes
                for index, virtual in self._counts
                if virtual in virtuals
                for option in runs[index].options
            }
        )
        return any(
            count and option.working_set_bytes >= sizes[level + 1]
            for index, run in enumerate(runs)
            for virtual in virtuals
            for count, option in zip(decision.counts[index][virtual], run.options, strict=True)
        )

    def exclude(self, decision: Decision, stage: int, number: int) -> None:
        """Exclude every decision that puts at least these counts on a stage.

        Memory only grows with counts, so none of them fits if this one does not; one count must be lower.
        """
        with silenced():
            lower = []
            for virtual in self.schedule.virtual_of_chunk[stage]:
                for index in range(len(self.problem.runs)):
                    variables = self._counts.get((index, virtual), [])
                    for option, (var, count) in enumerate(
                        zip(variables, decision.counts[index][virtual], strict=False)
                    ):
                        if count:
                            name = f"lower_{number}_{index}_{virtual}_{option}"
                            below = self.model.add_var(name=name, var_type=mip.BINARY)
                            most = int(var.ub)
                            self.model.add_constr(var <= most - (most - count + 1) * below, name=f"row_{name}")
                            lower.append(below)
            self.model.add_constr(mip.xsum(lower) >= 1, name=f"exclude_{number}")


def _virtual_ranges(problem: Problem) -> tuple[list[int], list[int]]:
    """First and last virtual stage each unit can be in, since every virtual stage needs a unit of its own."""
    units, size = problem.units, problem.virtual_stages
    first = [max(0, size - units + unit) for unit in range(units)]
    last = [min(size - 1, unit) for unit in range(units)]
    return first, last


def _intervals(positions: list[int]) -> list[tuple[int, int]]:
    """Maximal intervals of consecutive integers."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and position == found[-1][1] + 1:
            found[-1] = (found[-1][0], position)
        else:
            found.append((position, position))
    return found
