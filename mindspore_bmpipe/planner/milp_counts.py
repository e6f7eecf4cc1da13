"""The integer program over counts: its times, its paths, and solving it.

Where units may be is in `milp_placement`, what fits in `milp_memory`. For virtual stage k, besides the counts n[r,k,o]:

    F[k], B[k]          forward and backward time of virtual stage k
    W[k], R[k]          weight gradients in B and what they run again apart, if the schedule splits backwards
    T                   step time, minimised

    F[k] = sum over r, o of forward[r] n[r,k,o],  B[k] = sum over r, o of (backward[r] + extra[r,o]) n[r,k,o]
    T >= sum over k of f[k] F[k] + b[k] B[k] + transfers                            for every path through the schedule

and where backwards are split, W is a sum like B, R is in `milp_repeated`, and a path has (w[k] - b[k]) W[k] more for
its w weight gradients and a[k] R[k] for those of them that are apart. T is exactly the step time once all paths are
there. There are far too many, so they are added as they are violated; with any subset the optimum is a lower bound.
Transfers are in `milp_transfers`.
"""

from __future__ import annotations

import mip
import numpy as np

from mindspore_bmpipe.planner.base import Clock, SolveLimits
from mindspore_bmpipe.planner.local_search import Times
from mindspore_bmpipe.planner.milp_backend import TIME_SCALE, optimize, relax
from mindspore_bmpipe.planner.milp_memory import add_memory, exclude
from mindspore_bmpipe.planner.milp_placement import add_placement
from mindspore_bmpipe.planner.milp_private import skip_heuristics
from mindspore_bmpipe.planner.milp_repeated import add_repeated
from mindspore_bmpipe.planner.milp_transfers import TransferTimes
from mindspore_bmpipe.planner.milp_variables import CountVariables
from mindspore_bmpipe.planner.quiet import silenced
from mindspore_bmpipe.problem import Decision, Problem, schedule_of, virtual_stage_times, virtual_stage_weights
from mindspore_bmpipe.schedule import PathCounts, dependency_graph, splits_backward


class CountModel:
    """The integer program of one problem, growing by paths and exclusions."""

    def __init__(self, problem: Problem, limits: SolveLimits, solver: str | None = None, elastic: bool = False) -> None:
        """Build the program; an elastic one minimises the worst excess over the memory limits instead of time."""
        self.problem = problem
        self._splits = splits_backward(schedule_of(problem))
        self._time_unit = problem.ideal_ms / TIME_SCALE
        with silenced():
            self._variables = CountVariables(problem, limits, solver)
            self.model = self._variables.model
            excess = self.model.add_var(name="excess", lb=-mip.INF) if elastic else None
            add_placement(self._variables)
            add_memory(self._variables, excess)
            self._transfers = TransferTimes(self._variables)
            self._forward, self._backward, self._weight = self._add_times()
            self._repeated = self._add_repeated() if self._splits else []
            self.step = self.model.add_var(name="T", lb=0.0)
            self.model.objective = mip.minimize(self.step if excess is None else excess)

    def _add_times(self) -> tuple[list[mip.Var], list[mip.Var], list[mip.Var]]:
        problem, schedule = self.problem, self._variables.schedule
        forward: list[mip.Var] = []
        backward: list[mip.Var] = []
        weight: list[mip.Var] = []
        for virtual, stage in enumerate(schedule.stage_of_virtual):
            unit = self._time_unit * problem.speeds[stage]
            places = [(index, virtual) for index in range(len(problem.runs)) if (index, virtual) in self._counts]
            forward_terms, backward_terms, weight_terms = [], [], []
            for place in places:
                run = problem.runs[place[0]]
                for option, var in zip(run.options, self._counts[place], strict=True):
                    forward_terms.append(run.forward_ms / unit * var)
                    weight_terms.append(run.split_weight_ms / unit * var)
                    backward_terms.append((run.backward_ms + option.extra_backward_ms) / unit * var)
            for name, total, terms in (
                ("forward", forward, forward_terms),
                ("backward", backward, backward_terms),
                *((("weight", weight, weight_terms),) if self._splits else ()),
            ):
                total.append(self.model.add_var(name=f"{name}_{virtual}", lb=0.0))
                self.model.add_constr(total[-1] == mip.xsum(terms), name=f"sum_{name}_{virtual}")
        return forward, backward, weight

    def _add_repeated(self) -> list[mip.Var]:
        schedule = self._variables.schedule
        repeated = []
        for virtual, total in enumerate(add_repeated(self._variables)):
            repeated.append(self.model.add_var(name=f"repeated_{virtual}", lb=0.0))
            unit = self._time_unit * self.problem.speeds[schedule.stage_of_virtual[virtual]]
            self.model.add_constr(repeated[-1] == (1 / unit) * total, name=f"sum_repeated_{virtual}")
        return repeated

    @property
    def _counts(self) -> dict[tuple[int, int], list[mip.Var]]:
        return self._variables.counts

    def add_path(self, path: PathCounts) -> None:
        """T is at least as long as this path."""
        terms = [count * var for count, var in zip(path.forward, self._forward, strict=True) if count]
        terms += [count * var for count, var in zip(path.backward, self._backward, strict=True) if count]
        for virtual, var in enumerate(self._weight):
            part = path.weight[virtual] - path.backward[virtual]
            if part:
                terms.append(part * var)
        terms += [count * var for count, var in zip(path.apart, self._repeated, strict=False) if count]
        with silenced():
            sent = self._transfers.weighted(path.transfers, self._time_unit)
            self.model.add_constr(self.step >= mip.xsum(terms) + sent)

    def add_start_times(self) -> int:
        """One end time per action and one row per dependency: all paths at once. Returns the number of actions."""
        graph, unit = dependency_graph(self._variables.schedule), self._time_unit
        durations = [*self._forward, *self._backward]
        if self._splits:
            durations[len(self._forward) :] = [
                *(whole - part for whole, part in zip(self._backward, self._weight, strict=True)),
                *(part + again for part, again in zip(self._weight, self._repeated, strict=True)),
                *self._backward,
            ]
        single = np.eye(self.problem.virtual_stages - 1, dtype=int).tolist()
        sent = [self._transfers.weighted(one, unit) for one in single]
        size = self.problem.virtual_stages
        for boundary, blocks in enumerate(graph.sends_block):
            if blocks:
                # Kinds of actions follow each other in `durations`: forward, then backward, separate weights, whole.
                senders = (boundary, size + boundary + 1, 3 * size + boundary + 1)
                for sender in senders[: 3 if self._splits else 2]:
                    durations[sender] = durations[sender] + sent[boundary]
                sent[boundary] = 0.0
        followed = set(graph.stage_predecessor.tolist()) | set(graph.data_predecessor.tolist())
        with silenced():
            ends = [self.model.add_var(name=f"end_{number}", lb=0.0) for number in range(graph.size)]
            for number, end in enumerate(ends):
                before, source = int(graph.stage_predecessor[number]), int(graph.data_predecessor[number])
                duration = durations[graph.slot[number]]
                if before < graph.size:
                    self.model.add_constr(end >= ends[before] + duration)
                if source < graph.size and source != before:
                    crossed = int(graph.boundary[number])
                    delay = sent[crossed] if crossed >= 0 else 0.0
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

    def times(self) -> tuple[Times, Times, Times | None, Times]:
        """Forward, whole backward and weight gradients of each virtual stage, of what was solved last.

        And the transfers between them, as :meth:`~mindspore_bmpipe.planner.local_search.PathPool.separate` takes them.
        """
        forward, backward, weight, repeated = (
            np.array([max(0.0, float(var.x)) * self._time_unit for var in variables])
            for variables in (self._forward, self._backward, self._weight, self._repeated)
        )
        parts = np.stack((weight, repeated)) if self._splits else None
        return forward, backward, parts, self._transfers.solved()

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
        self, clock: Clock, nodes: int, start: Decision | None = None, start_ms: float = 0.0, share: float = 1.0
    ) -> tuple[Decision | None, float, bool]:
        """Solve the integer program with the paths known so far.

        Args:
            clock: the last resort; the work done is counted on it.
            nodes: node limit.
            start: a feasible decision to start from, or `None`.
            start_ms: its step time.
            share: share of the clock's remaining time that this call may take.

        Returns:
            The rounded solution or `None`, a lower bound in milliseconds (infinite if the program is infeasible), and
            whether the solver ended by itself rather than at a limit.
        """
        if start is not None:
            with silenced():
                self.model.start = self._values(start, start_ms)
        answer = optimize(self.model, clock, nodes, share)
        bound = answer.bound * self._time_unit
        if not answer.has_solution:
            return None, bound, answer.complete
        return self._variables.decision(), bound, answer.complete

    def _values(self, decision: Decision, step_ms: float) -> list[tuple[mip.Var, float]]:
        """Value of every variable for a decision."""
        values = [(self.step, step_ms / self._time_unit), *self._variables.values(decision)]
        forward, backward = virtual_stage_times(self.problem, decision)
        weight, repeated = virtual_stage_weights(self.problem, decision) or ([], [])
        for variables, times in (
            (self._forward, forward),
            (self._backward, backward),
            (self._weight, weight),
            (self._repeated, repeated),
        ):
            values += [(var, time / self._time_unit) for var, time in zip(variables, times, strict=True)]
        return values

    def exclude(self, decision: Decision, stage: int) -> None:
        """Exclude every decision that puts at least these counts on a stage, which do not fit."""
        with silenced():
            exclude(self._variables, decision, stage)
