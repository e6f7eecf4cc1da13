"""The solvers behind python-mip: loading, settings, silence, and what their answers mean."""

from __future__ import annotations

from dataclasses import dataclass

import mip

from mindspore_bmpipe.errors import BmpipeError
from mindspore_bmpipe.planner.base import Clock, SolveLimits
from mindspore_bmpipe.planner.milp_private import iterations, nodes_visited, set_seed
from mindspore_bmpipe.planner.quiet import silenced

SOLVERS = (mip.HIGHS, mip.CBC)
"""Solvers in order of preference."""

TIME_SCALE = 1e3
"""What a problem's ideal time becomes in a model, so that coefficients stay near 1 whatever the unit of time."""

_ITERATION_S, _ENTRY_S = 1e-4, 2e-6
"""Seconds of an iteration of the simplex method, branching and cuts included, and more for each entry that an average
column has. Measured over the instances of `tools/bench/planner.py`: within a factor of 1.5 of nearly all."""

_NODE_ITERATIONS = 500
"""Iterations that a node takes before more is known of a model."""
_TELLING_NODES = 10
"""Nodes after which a call tells what a node takes."""
_ROOT_ITERATIONS = 10
"""Iterations of the root per row and column."""
_WORTH_ANOTHER = 2
"""How many times as many nodes must be affordable for a call to be made again."""

_SOLVER_GAP_SHARE = 0.25
"""Share of the relative gap given to one solver call; the rest is for what its model leaves out."""


class SolverError(BmpipeError):
    """A solver is missing, or ended in a way that says nothing about the problem."""


@dataclass(frozen=True)
class SolverAnswer:
    """How one solver call ended."""

    has_solution: bool
    """Whether the variables hold a feasible solution."""
    bound: float
    """Lower bound on the objective; infinite if the model is infeasible, minus infinity if nothing is known."""
    complete: bool
    """Whether the solver ended by itself (gap reached, or infeasible) rather than at a limit."""


def new_model(limits: SolveLimits, solver: str | None = None) -> mip.Model:
    """An empty minimisation with the named solver, or with the first of `SOLVERS` that loads.

    Raises:
        SolverError: none loads.
    """
    model = None
    with silenced():
        for name in SOLVERS if solver is None else (solver,):
            try:
                model = mip.Model(sense=mip.MINIMIZE, solver_name=name)
            except Exception:
                continue
            break
    if model is None:
        raise SolverError("no solver could be loaded; install highsbox (HiGHS), or reinstall mip (CBC)")
    model.verbose = 0
    model.threads = limits.threads
    model.max_mip_gap = limits.relative_gap * _SOLVER_GAP_SHARE
    model.max_mip_gap_abs = 0.0
    set_seed(model, limits.seed % 2**31)
    return model


def relax(model: mip.Model, clock: Clock | None = None) -> bool:
    """Solve the linear relaxation; whether it has a feasible point. The work is counted on the clock, if there is one.

    Raises:
        SolverError: it ended in another way.
    """
    with silenced():
        status = model.optimize(relax=True)
    if clock is not None:
        clock.spend(iterations(model) * _iteration_s(model))
    if status == mip.OptimizationStatus.INFEASIBLE:
        return False
    if status != mip.OptimizationStatus.OPTIMAL:
        raise SolverError(f"the relaxation ended with status {status.name}")
    return True


def optimize(model: mip.Model, clock: Clock, nodes: int, share: float = 1.0) -> SolverAnswer:
    """Solve the integer program within what a clock leaves of work and time.

    In a search the node limit follows from the work left and from what a node of this model turns out to take; a call
    that ended early for a poor guess is made again.

    Args:
        model: what to solve.
        clock: the planner's clock, on which the work is counted.
        nodes: most nodes.
        share: share of the clock's remaining time that the call may take.

    Raises:
        SolverError: the solver failed.
    """
    node_iterations = clock.node_iterations or _NODE_ITERATIONS
    while True:
        allowed = int(min(nodes, max(1.0, clock.work_left() / (node_iterations * _iteration_s(model)))))
        answer = _optimize(model, share * clock.remaining(), allowed)
        clock.spend(iterations(model) * _iteration_s(model))
        visited = nodes_visited(model)
        node_iterations = max(1, iterations(model)) / (visited or allowed)
        if visited >= _TELLING_NODES:
            clock.node_iterations = node_iterations
        if answer.complete or allowed == nodes or clock.ends():
            return answer
        if clock.work_left() < _WORTH_ANOTHER * allowed * node_iterations * _iteration_s(model):
            return answer


def affordable(model: mip.Model, clock: Clock) -> bool:
    """Whether the work left is enough for the root of the search tree, which no limit interrupts."""
    return _ROOT_ITERATIONS * (model.num_rows + model.num_cols) * _iteration_s(model) <= clock.work_left()


def _optimize(model: mip.Model, seconds: float, nodes: int) -> SolverAnswer:
    outcome = mip.OptimizationStatus
    with silenced():
        model.max_nodes = nodes
        status = model.optimize(max_seconds=max(seconds, 0.01))
        if status in (outcome.INFEASIBLE, outcome.INT_INFEASIBLE):
            return SolverAnswer(False, float("inf"), True)
        if status in (outcome.ERROR, outcome.OTHER, outcome.UNBOUNDED, outcome.LOADED):
            raise SolverError(f"the solver ended with status {status.name}")
        has_solution = status in (outcome.OPTIMAL, outcome.FEASIBLE) and model.num_solutions > 0
        bound = model.objective_bound
        return SolverAnswer(has_solution, float("-inf") if bound is None else float(bound), status == outcome.OPTIMAL)


def _iteration_s(model: mip.Model) -> float:
    return _ITERATION_S + _ENTRY_S * model.num_nz / max(1, model.num_cols)
