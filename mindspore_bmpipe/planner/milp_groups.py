"""The integer program over groups of units, for one chunk per stage.

One binary per surviving group g = (stage, low, high), whose forward and backward times are known exactly
(`stage_options`):

    sum of g on stage s = 1                                                      every stage holds one group
    sum of g on stage s ending at c = sum of g on stage s + 1 starting at c      groups meet
    F[s] = sum forward(g) g,  B[s] = sum backward(g) g,  C[s] = sum transfer(s, end of g) g
    T >= sum over s of f[s] F[s] + b[s] B[s] + c[s] C[s]                         for every known path

The first two rows are a network flow, so memory, working sets, pins and forbidden cuts, which only decide what groups
there are, cost nothing in tightness: the relaxation is the hull of all splits, cut by the path rows. Paths are added
as they are violated, first by the relaxation, then by integer solutions.
"""

from __future__ import annotations

import mip
import numpy as np

from mindspore_bmpipe.planner.base import Clock, SolveLimits
from mindspore_bmpipe.planner.elimination import Survivors, eliminate
from mindspore_bmpipe.planner.local_search import PathPool, SplitSearch, Times
from mindspore_bmpipe.planner.milp_backend import TIME_SCALE, affordable, new_model, optimize, relax
from mindspore_bmpipe.planner.quiet import silenced
from mindspore_bmpipe.planner.splits import Bounds
from mindspore_bmpipe.problem import Problem
from mindspore_bmpipe.schedule import PathCounts, step_times

_RELAXATION_ROUNDS = 60
_ROUNDS = 40
_FEWER = 0.9
"""Share of groups left at which it is worth starting over with those."""
_ROUNDING = 1e-9
"""Relative rounding of solver values; bounds are lowered by it."""


class GroupModel:
    """The integer program of some groups, growing by paths."""

    def __init__(self, problem: Problem, survivors: Survivors, limits: SolveLimits, solver: str | None) -> None:
        self._problem = problem
        self._survivors = survivors
        self._unit = problem.ideal_ms / TIME_SCALE
        self.model = new_model(limits, solver)
        with silenced():
            self._step = self.model.add_var(name="T", lb=0.0)
            self._groups = [
                self.model.add_var(name=f"g_{stage}_{low}_{high}", var_type=mip.BINARY)
                for stage, low, high in zip(
                    survivors.stage.tolist(), survivors.low.tolist(), survivors.high.tolist(), strict=True
                )
            ]
            self._forward = [self.model.add_var(name=f"F_{stage}", lb=0.0) for stage in range(problem.stages)]
            self._backward = [self.model.add_var(name=f"B_{stage}", lb=0.0) for stage in range(problem.stages)]
            self._transfer = [self.model.add_var(name=f"C_{stage}", lb=0.0) for stage in range(problem.stages)]
            self._add_rows()
            self.model.objective = mip.minimize(self._step)

    def _add_rows(self) -> None:
        survivors, unit = self._survivors, self._unit
        members: list[list[int]] = [[] for _ in range(self._problem.stages)]
        meeting: dict[tuple[int, int], list[mip.LinExpr]] = {}
        for index, stage in enumerate(survivors.stage.tolist()):
            members[stage].append(index)
            var = self._groups[index]
            meeting.setdefault((stage, int(survivors.low[index])), []).append(-1 * var)
            meeting.setdefault((stage + 1, int(survivors.high[index])), []).append(1 * var)
        for stage, indices in enumerate(members):
            self.model.add_constr(mip.xsum(self._groups[index] for index in indices) == 1, name=f"stage_{stage}")
            for label, total, times in (
                ("forward", self._forward[stage], survivors.forward_ms),
                ("backward", self._backward[stage], survivors.backward_ms),
                ("transfer", self._transfer[stage], survivors.transfer_ms),
            ):
                terms = [float(times[index]) / unit * self._groups[index] for index in indices]
                self.model.add_constr(total == mip.xsum(terms), name=f"{label}_{stage}")
        for (stage, boundary), terms in sorted(meeting.items()):
            if 0 < stage < self._problem.stages:
                self.model.add_constr(mip.xsum(terms) == 0, name=f"meet_{stage}_{boundary}")

    def add_path(self, path: PathCounts) -> None:
        """T is at least as long as this path."""
        terms = [count * var for count, var in zip(path.forward, self._forward, strict=True) if count]
        terms += [count * var for count, var in zip(path.backward, self._backward, strict=True) if count]
        terms += [count * var for count, var in zip(path.transfers, self._transfer[:-1], strict=True) if count]
        with silenced():
            self.model.add_constr(self._step >= mip.xsum(terms))

    def relax(self, clock: Clock) -> tuple[float, Times, Times, Times] | None:
        """Step time, stage times and transfers of the linear relaxation; `None` if the groups make no split."""
        if not relax(self.model, clock):
            return None
        forward, backward, transfers = (
            np.array([max(0.0, float(var.x)) * self._unit for var in variables])
            for variables in (self._forward, self._backward, self._transfer[:-1])
        )
        return float(self._step.x) * self._unit, forward, backward, transfers

    def solve(self, clock: Clock, nodes: int) -> tuple[Bounds | None, float, bool]:
        """The best split found or `None`, a lower bound in milliseconds, and whether the solver ended by itself."""
        answer = optimize(self.model, clock, nodes)
        bound = answer.bound * self._unit
        if not answer.has_solution:
            return None, bound, answer.complete
        chosen = [index for index, var in enumerate(self._groups) if var.x > 0.5]
        split = (0, *(int(high) for high in sorted(self._survivors.high[chosen].tolist())))
        return split, bound, answer.complete


def prove(
    survivors: Survivors,
    search: SplitSearch,
    pool: PathPool,
    limits: SolveLimits,
    clock: Clock,
    solver: str | None = None,
) -> float:
    """Lower bound on the step time of every split of the given groups; improves the search's best split on the way.

    Args:
        survivors: all groups that fit, or all that a faster split than the best may contain.
        search: holds the best split so far.
        pool: known paths; violated ones are added.
        limits: gap, nodes and seed.
        clock: counts the work, and ends it.
        solver: name of the solver, for tests.

    Returns:
        The bound, at most the best step time.
    """
    proved = 0.0
    for _ in range(_ROUNDS):
        best = search.best_time
        target = best * (1 - _ROUNDING)
        survivors = eliminate(survivors, pool, target, clock)
        if not len(survivors):
            return target
        if clock.ends():
            return proved
        model = GroupModel(pool.problem, survivors, limits, solver)
        for path in pool.paths:
            model.add_path(path)
        relaxed = _tighten(model, search, pool, clock)
        proved = max(proved, min(target, relaxed * (1 - _ROUNDING)))
        if proved >= best * (1 - limits.accepted_gap):
            return proved
        # What the relaxation taught often leaves far fewer groups, or none: cheaper than any branching.
        left = eliminate(survivors, pool, target, clock)
        if not len(left):
            return target
        if len(left) < _FEWER * len(survivors):
            survivors = left
            continue
        if not affordable(model.model, clock):
            return proved
        split, bound, _ = model.solve(clock, limits.node_limit)
        proved = max(proved, min(target, bound * (1 - _ROUNDING)))
        grown = False
        if split is not None:
            times = search.times(split)
            assert times is not None
            grown = pool.separate(*times)
            search.offer([split])
        if proved >= search.best_time * (1 - limits.accepted_gap):
            return proved
        if not grown and search.best_time >= best:
            # A limit ended the solver, and there is nothing to add: more rounds would repeat it.
            return proved
    return proved


def _tighten(model: GroupModel, search: SplitSearch, pool: PathPool, clock: Clock) -> float:
    """Add paths that the relaxation violates until there are none; its step time, infinite if it is infeasible."""
    objective = 0.0
    for _ in range(_RELAXATION_ROUNDS):
        relaxed = model.relax(clock)
        if relaxed is None:
            return float("inf")
        objective, forward, backward, transfers = relaxed
        real = float(step_times(pool.schedule, forward, backward, transfers)[0])
        known = len(pool.paths)
        pool.separate(forward, backward, None, transfers)
        times = search.times(search.best) if search.best else None
        if times is not None:
            # A point on the way to the incumbent gives deeper cuts than the relaxation's corner alone.
            pool.separate((forward + times[0]) / 2, (backward + times[1]) / 2, None, (transfers + times[3]) / 2)
        for path in pool.paths[known:]:
            model.add_path(path)
        if len(pool.paths) == known or real <= objective * (1 + 1e-7) or clock.ends():
            break
    return objective
