"""Memory that the cost model predicts for a stage of a plan, at the sizes of the traced network.

The numbers of a unit are those the planner gets. How they add up is exact here: while a unit runs, what the units after
it keep of the same micro-batch is not there yet, or is free again. The planner adds the largest working set to all that
is kept (`mindspore_bmpipe.problem`), which is never less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspore_bmpipe.costs.network import NetworkCosts
from mindspore_bmpipe.costs.recipes import recipes_of
from mindspore_bmpipe.costs.recompute import RecomputeModel, evaluate_rows, relative_places
from mindspore_bmpipe.costs.static_memory import StaticSettings, gradient_bytes, static_bytes, weight_bytes
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.schedule import FORWARD, Schedule, in_flight_rows, make_schedule, releasing_kinds

COMPILED = StaticSettings(float32_state=False)
"""What holds for the step that `verify` compiles: one rank a stage, with MindSpore's own Adam."""


@dataclass(frozen=True)
class Prediction:
    """Predicted bytes of one stage."""

    static: int
    """Weights, gradients and optimizer state."""
    activations: int
    """Peak of everything else while chunks run."""
    planned_activations: int
    """The same as the planner counts it."""
    update: int
    """What updating the weights takes beyond the static bytes."""

    @property
    def peak(self) -> int:
        """All bytes at the larger of both moments."""
        return self.static + max(self.activations, self.update)

    @property
    def planned_peak(self) -> int:
        """The same as the planner counts it."""
        return self.static + max(self.planned_activations, self.update)


class _UnitMemory(NamedTuple):
    saved: float
    forward_set: float
    backward_set: float
    held: float


def predicted_memory(costs: NetworkCosts, plan: Plan, stage: int) -> Prediction:
    """Predict the memory of one stage."""
    sizes = dict(costs.graph.symbols)
    chunks: list[list[_UnitMemory]] = [[] for _ in range(1 + max(unit.chunk for unit in plan.units))]
    weights: dict[str, int] = {}
    shared = counted = 0.0
    for number, (planned, unit, model) in enumerate(zip(plan.units, costs.split.units, costs.models, strict=True)):
        recompute = RecomputeModel(model)
        values = model.basis.values(sizes)
        kept = recompute.kept(())[0] | recompute.kept(recompute.whole())[0]
        if planned.stage == stage:
            places = relative_places(
                planned.recompute_cells, planned.recompute_primitives, planned.recompute_communication, unit.cells
            )
            kept |= recompute.kept(places)[0]
            option = recompute.option(places)
            chunks[planned.chunk].append(
                _UnitMemory(
                    saved=float(option.saved @ values),
                    forward_set=evaluate_rows(option.forward_set, values),
                    backward_set=evaluate_rows(option.backward_set, values),
                    held=float(model.bytes_of(model.held) @ values),
                )
            )
            weights.update((name, costs.split.owner(name, number)) for name in unit.parameters)
        shared = max(shared, float(model.bytes_of(kept & model.shared) @ values))
        # Plans count what any recipe would keep, since the planner chooses after the limits are set.
        for named in recipes_of(recompute, model).places.values():
            kept |= recompute.kept(named)[0]
        counted = max(counted, float(model.bytes_of(kept & model.shared) @ values))
    schedule = make_schedule(
        str(plan.settings["schedule"]), len(plan.stages), len(chunks), int(plan.settings["micro_batches"])
    )
    known = costs.graph.parameters
    copies = sum(weight_bytes(known[name]) for name, owner in weights.items() if plan.units[owner].stage != stage)
    return Prediction(
        static=sum(static_bytes(known[name], COMPILED) for name in weights),
        activations=copies + round(_peak(chunks, _moments(schedule, stage), shared)),
        planned_activations=copies + round(_bound(chunks, in_flight_rows(schedule)[stage], counted)),
        update=sum(gradient_bytes(known[name], COMPILED) for name in weights),
    )


def _in_flight(chunks: Sequence[Sequence[_UnitMemory]], row: Sequence[int], shared: float) -> float:
    return sum(number * (shared + sum(unit.saved for unit in units)) for number, units in zip(row, chunks, strict=True))


def _moments(schedule: Schedule, stage: int) -> set[tuple[bool, int, tuple[int, ...]]]:
    """Whether a forward runs, of which chunk, and the micro-batches of each chunk in flight then, itself included."""
    release = releasing_kinds(schedule)
    counts = [0] * schedule.chunks
    found = set()
    for action in schedule.orders[stage]:
        counts[action.chunk] += action.kind == FORWARD
        found.add((action.kind == FORWARD, action.chunk, tuple(counts)))
        counts[action.chunk] -= action.kind in release
    return found


def _peak(
    chunks: Sequence[Sequence[_UnitMemory]], moments: Iterable[tuple[bool, int, tuple[int, ...]]], shared: float
) -> float:
    """Largest of all moments at which a unit runs: everything in flight, less what later units of its chunk keep."""
    peak = 0.0
    for is_forward, chunk, row in moments:
        whole = _in_flight(chunks, row, shared)
        later = 0.0
        for unit in reversed(chunks[chunk]):
            peak = max(peak, whole - later + (unit.forward_set if is_forward else unit.backward_set))
            later += unit.saved - (0.0 if is_forward else unit.held)
    return peak


def _bound(chunks: Sequence[Sequence[_UnitMemory]], rows: Sequence[Sequence[int]], shared: float) -> float:
    kept = max(_in_flight(chunks, row, 0.0) for row in rows) + max(map(sum, rows)) * shared
    return kept + max(max(unit.forward_set, unit.backward_set) for units in chunks for unit in units)
