"""The variables of the integer program over counts, and the values they take for a known decision.

    n[r,k,o]  integer   units of run r in virtual stage k with option o

Every other variable follows from the counts. Whoever adds one says how, so that a solver can start from a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import mip

from mindspore_bmpipe.planner.base import SolveLimits
from mindspore_bmpipe.planner.milp_backend import new_model
from mindspore_bmpipe.problem import Decision, Problem, schedule_of

Place = tuple[int, int]
"""(run, virtual stage)."""


@dataclass(frozen=True, eq=False)
class Placed:
    """A decision, and what other variables derive from it."""

    decision: Decision
    """The decision."""
    until: tuple[int, ...]
    """Units up to and including each virtual stage."""

    def units(self, places: Iterable[Place]) -> int:
        """Units of runs in virtual stages."""
        return sum(sum(self.decision.counts[index][virtual]) for index, virtual in places)


class CountVariables:
    """A model with the counts of one problem in it."""

    def __init__(self, problem: Problem, limits: SolveLimits, solver: str | None) -> None:
        self.problem = problem
        self.schedule = schedule_of(problem)
        self.model = new_model(limits, solver)
        self.first, self.last = _virtual_ranges(problem)
        """First and last virtual stage of each unit."""
        self.counts = self._add_counts()
        """Variables by run and virtual stage, one per option; absent where none of the run can be."""
        self._derived: list[tuple[mip.Var, Callable[[Placed], float]]] = []

    def _add_counts(self) -> dict[Place, list[mip.Var]]:
        problem = self.problem
        counts = {}
        firsts = problem.first_units
        for index, run in enumerate(problem.runs):
            for virtual in range(problem.virtual_stages):
                units = sum(
                    self.first[unit] <= virtual <= self.last[unit] for unit in range(firsts[index], firsts[index + 1])
                )
                if units:
                    counts[index, virtual] = [
                        self.model.add_var(name=f"n_{index}_{virtual}_{option}", var_type=mip.INTEGER, lb=0, ub=units)
                        for option in range(len(run.options))
                    ]
        return counts

    def derive(self, var: mip.Var, value: Callable[[Placed], float]) -> mip.Var:
        """Remember how a variable follows from a decision."""
        self._derived.append((var, value))
        return var

    def add_binary(self, name: str, value: Callable[[Placed], bool]) -> mip.Var:
        """A binary that follows from the counts."""
        return self.derive(self.model.add_var(name=name, var_type=mip.BINARY), lambda placed: float(value(placed)))

    def add_integer(self, name: str, places: Sequence[Place], low: int, high: float) -> mip.Var:
        """The number of units of some places as a variable of its own."""
        var = self.model.add_var(name=name, var_type=mip.INTEGER, lb=low, ub=high)
        self.model.add_constr(var == self.units_at(places), name=f"sum_{name}")
        return self.derive(var, lambda placed: placed.units(places))

    def units_at(self, places: Iterable[Place]) -> mip.LinExpr:
        """Units of some places."""
        return mip.xsum(var for place in places for var in self.counts.get(place, []))

    def run_until(self, index: int, virtual: int) -> mip.LinExpr:
        """Units of a run up to and including a virtual stage."""
        return self.units_at((index, before) for before in range(virtual + 1))

    def all_until(self, virtual: int) -> mip.LinExpr:
        """Units of all runs up to and including a virtual stage."""
        return mip.xsum(self.run_until(index, virtual) for index in range(len(self.problem.runs)))

    def values(self, decision: Decision) -> list[tuple[mip.Var, float]]:
        """Value of every count and derived variable; solvers take a partial start, but zero for what is left out."""
        virtual_stages = range(self.problem.virtual_stages)
        held = [sum(sum(placed[virtual]) for placed in decision.counts) for virtual in virtual_stages]
        placed = Placed(decision, tuple(sum(held[: virtual + 1]) for virtual in virtual_stages))
        found: list[tuple[mip.Var, float]] = [
            (var, count)
            for (index, virtual), variables in self.counts.items()
            for var, count in zip(variables, decision.counts[index][virtual], strict=True)
        ]
        return found + [(var, value(placed)) for var, value in self._derived]

    def decision(self) -> Decision:
        """The decision of the answer found last, rounded."""
        problem = self.problem
        return Decision(
            tuple(
                tuple(
                    tuple(round(var.x) for var in self.counts[index, virtual])
                    if (index, virtual) in self.counts
                    else (0,) * len(run.options)
                    for virtual in range(problem.virtual_stages)
                )
                for index, run in enumerate(problem.runs)
            )
        )


def _virtual_ranges(problem: Problem) -> tuple[list[int], list[int]]:
    """First and last virtual stage each unit can be in, since every virtual stage needs a unit of its own."""
    units, size = problem.units, problem.virtual_stages
    first = [max(0, size - units + unit) for unit in range(units)]
    last = [min(size - 1, unit) for unit in range(units)]
    return first, last


def intervals(positions: Iterable[int]) -> list[tuple[int, int]]:
    """Maximal intervals of consecutive integers, of increasing ones."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and position == found[-1][1] + 1:
            found[-1] = (found[-1][0], position)
        else:
            found.append((position, position))
    return found
