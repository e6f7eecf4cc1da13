"""Costs of a whole network: one model per distinct unit, what passes between units, and the numbers for a planner."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspore_bmpipe.costs.boundaries import boundary_tensors, longest_transfer_ms
from mindspore_bmpipe.costs.graph_index import index_graph
from mindspore_bmpipe.costs.hardware import Hardware, Link
from mindspore_bmpipe.costs.held_weights import held_weights
from mindspore_bmpipe.costs.options import NamedOption, named_options
from mindspore_bmpipe.costs.recipes import RECIPES, Recipes, recipes_of
from mindspore_bmpipe.costs.recompute import COMMUNICATION, RecomputeModel, absolute_places, evaluate_rows
from mindspore_bmpipe.costs.repeated import repeated_by_weights
from mindspore_bmpipe.costs.rules import require_known, unknown_primitives
from mindspore_bmpipe.costs.static_memory import StaticSettings, gradient_bytes, static_bytes, weight_bytes
from mindspore_bmpipe.costs.unit_builder import build_unit_model, unit_signature
from mindspore_bmpipe.costs.unit_model import UnitModel
from mindspore_bmpipe.costs.unit_times import Exchange, UnitTimes, exchange_of
from mindspore_bmpipe.costs.weight_exchange import WeightCollective, weight_collectives
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import CellGraph
from mindspore_bmpipe.graph.symbols import evaluate_dimension
from mindspore_bmpipe.graph.units import Unit, UnitSplit, split_units

MOST_OPTIONS = 4
"""Recompute options offered per kind of unit beside the named recipes; the planner's tables grow with them, plans
hardly do."""


@dataclass(frozen=True)
class NetworkCosts:
    """Costs of a network before sizes, machine and settings are fixed."""

    graph: CellGraph
    """The graph they were derived from."""
    split: UnitSplit
    """Its units."""
    models: tuple[UnitModel, ...]
    """Model of each unit; equal units share one."""
    boundaries: tuple[tuple[Any, ...], ...]
    """For every cut after a unit, the bytes of each tensor that later units read: numbers or expressions."""
    notes: tuple[str, ...]
    """What a reader should know."""

    @property
    def parameters_trainable(self) -> tuple[bool, ...]:
        """For every unit, whether its own cells hold a trainable weight."""
        known = self.graph.parameters
        return tuple(any(known[name].trainable for name in held_weights(self.graph, unit)) for unit in self.split.units)


@dataclass(frozen=True)
class UnitOption:
    """One recompute option of a unit with its numbers."""

    name: str
    """A recipe (:data:`~mindspore_bmpipe.costs.recipes.RECIPES`), or what it recomputes."""
    cells: tuple[str, ...]
    """Paths of the recomputed cells in the network."""
    primitives: tuple[str, ...]
    """Paths of recomputed primitives that cells hold."""
    communication: tuple[str, ...]
    """Paths of cells in which exchanges of shares between ranks run again."""
    saved_bytes: int
    """Bytes kept per micro-batch in flight."""
    extra_backward_ms: float
    """Time of what runs again."""
    working_set_bytes: int
    """Bytes needed only while the unit runs."""
    repeated_ms: float
    """What weight gradients that run apart run again, if nothing before it in its chunk runs again."""
    repeated_after_ms: float
    """The same if something does."""
    equals: str = ""
    """Name of an option before it that does exactly the same; empty if there is none."""


@dataclass(frozen=True)
class UnitCost:
    """One unit with its numbers."""

    unit: Unit
    """The unit."""
    times: UnitTimes
    """What its times are made of."""
    weight_collectives: tuple[WeightCollective, ...]
    """Collectives on its weights and their gradients."""
    forward_ms: float
    """Forward time of one micro-batch."""
    backward_ms: float
    """Backward time of one micro-batch without recomputation."""
    gather_ms: float
    """What gathering its weights adds to the start of a step."""
    reduce_ms: float
    """What summing gradients over ranks adds to the end of a step."""
    weight_gradient_ms: float
    """Part of it that makes gradients of weights and may run apart."""
    static_bytes: int
    """Weights, gradients and optimizer state."""
    update_bytes: int
    """Bytes needed beyond that while weights are updated: the scaled gradients."""
    trainable: bool
    """Whether it has a trainable weight."""
    options: tuple[UnitOption, ...]
    """Recompute options."""
    kind: int
    """Equal for units of equal costs."""


@dataclass(frozen=True)
class EvaluatedCosts:
    """Numbers of a network for one machine, sizes and settings."""

    units: tuple[UnitCost, ...]
    """Units in order."""
    transfer_ms: float
    """Time to send the largest boundary of any cut a plan may make over the slowest link between neighbours."""
    cut_bytes: tuple[int, ...]
    """For every cut after a unit, the bytes that one rank sends."""
    stage_links: tuple[Link, ...]
    """Slowest link from each stage to the next one, and from the last to the first."""
    shared_saved_bytes: int
    """Bytes that every stage keeps once per micro-batch in flight: tensors that many units read."""
    notes: tuple[str, ...]
    """What a reader should know."""


def network_costs(
    graph: CellGraph, units: Sequence[str] | None = None, assume_elementwise: bool = False
) -> NetworkCosts:
    """Split a graph into units and build their models.

    Raises:
        UnknownPrimitiveError: primitives without a cost rule, unless ``assume_elementwise``.
        InputError: named units that do not exist, or a graph without backward operations.
    """
    if not graph.has_backward:
        raise InputError(f"{graph.name}: the graph has no backward; differentiate it first")
    primitives = [operation.primitive for operation in graph.operations]
    notes = list(graph.notes)
    if assume_elementwise:
        for name, count in sorted(unknown_primitives(primitives).items()):
            notes.append(f"{name} ({count} times) has no cost rule and is taken as element-wise")
    else:
        require_known(primitives)
    split = split_units(graph, units)
    notes.extend(split.notes)
    index = index_graph(graph, split.units)
    known: dict[Hashable, UnitModel] = {}
    models = []
    for unit in split.units:
        signature = unit_signature(index, unit)
        if signature not in known:
            known[signature] = build_unit_model(index, unit, tuple(graph.symbols), assume_elementwise)
        models.append(known[signature])
    return NetworkCosts(graph, split, tuple(models), boundary_tensors(index, split.units), tuple(notes))


def evaluate_costs(
    costs: NetworkCosts,
    hardware: Hardware,
    sizes: Mapping[str, int],
    static: StaticSettings,
    links: Sequence[Link],
    most_options: int = MOST_OPTIONS,
    overlap: Collection[str] = (),
) -> EvaluatedCosts:
    """Numbers of every unit at given sizes on a given machine.

    Args:
        costs: costs of the network.
        hardware: machine.
        sizes: value of every symbol.
        static: what static memory depends on.
        links: slowest link from each stage to the next one, and from the last to the first.
        most_options: recompute options of a unit.
        overlap: kinds of communication (`OVERLAPS` of the settings) that run beside the computation of their unit.
    """
    numbers_of: dict[int, _ModelNumbers] = {}
    kinds: dict[Hashable, int] = {}
    shared_bytes = 0
    found: list[UnitCost] = []
    for number, (unit, model, trainable) in enumerate(
        zip(costs.split.units, costs.models, costs.parameters_trainable, strict=True)
    ):
        if id(model) not in numbers_of:
            recompute = RecomputeModel(model)
            numbers_of[id(model)] = _evaluate_model(model, recompute, hardware, sizes, most_options)
            shared_bytes = max(shared_bytes, numbers_of[id(model)].shared_bytes)
        numbers = numbers_of[id(model)]
        fixed, update = unit_static_bytes(costs, number, static)
        collectives = weight_collectives(costs.graph, costs.split, number, static)
        exchange = exchange_of(collectives, hardware)
        times = replace(numbers.times, weights=exchange, overlap=overlap)
        kind = kinds.setdefault((id(model), fixed, update, trainable, exchange), len(kinds))
        found.append(
            UnitCost(
                unit=unit,
                times=times,
                weight_collectives=collectives,
                forward_ms=times.forward(),
                backward_ms=times.backward(),
                gather_ms=times.gather_ms,
                reduce_ms=times.reduce_ms,
                weight_gradient_ms=numbers.weight_gradient_ms,
                static_bytes=fixed,
                update_bytes=update,
                trainable=trainable,
                options=tuple(_in_network(option, unit.cells, times) for option in numbers.options),
                kind=kind,
            )
        )
    cut_bytes = tuple(
        int(sum(evaluate_dimension(item, sizes, f"boundary after unit {cut}") for item in tensors))
        for cut, tensors in enumerate(costs.boundaries)
    )
    transfer = longest_transfer_ms(costs.parameters_trainable, cut_bytes, links)
    notes = (*costs.notes, *_recipe_notes(found, numbers_of, costs))
    return EvaluatedCosts(tuple(found), transfer, cut_bytes, tuple(links), shared_bytes, notes)


def unit_static_bytes(costs: NetworkCosts, number: int, settings: StaticSettings) -> tuple[int, int]:
    """Static bytes of a unit, and what it needs beyond them while weights are updated.

    A weight that an earlier unit reads too is received as a copy in every step, and has gradient and optimizer state of
    its own on each stage. Where both units share a stage, this counts it twice. Gradients are scaled into new tensors
    before the update, when copies are free again.
    """
    known = costs.graph.parameters
    names = costs.split.units[number].parameters
    copies = sum(weight_bytes(known[name]) for name in names if costs.split.owner(name, number) != number)
    static = sum(static_bytes(known[name], settings) for name in names) + copies
    return static, max(0, sum(gradient_bytes(known[name], settings) for name in names) - copies)


@dataclass(frozen=True)
class _ModelNumbers:
    """Numbers of all units of one model; paths in their options are relative to a unit."""

    times: UnitTimes
    weight_gradient_ms: float
    options: tuple[_ModelOption, ...]
    recipes: Recipes
    shared_bytes: int
    """What this kind of unit shares with others and keeps with one of its options."""


@dataclass(frozen=True)
class _ModelOption:
    """A recompute option with the times of what runs again, by itself: (computation, exchange)."""

    option: UnitOption
    extra_ms: tuple[float, float]
    repeated_ms: tuple[float, float]
    repeated_after_ms: tuple[float, float]


def _evaluate_model(
    model: UnitModel, recompute: RecomputeModel, hardware: Hardware, sizes: Mapping[str, int], most: int
) -> _ModelNumbers:
    values = model.basis.values(sizes)
    times = model.operation_ms(hardware, sizes)
    recipes = recipes_of(recompute, model)
    named = named_options(recompute, recipes, times, values, model, most)
    options = tuple(_numbers(entry, model, recompute, values, times) for entry in named)
    exchanged = model.is_collective
    forward = np.arange(len(times)) < model.forward_count
    unit_times = UnitTimes(
        forward_ms=float(times[forward & ~exchanged].sum()),
        forward_exchange_ms=float(times[forward & exchanged].sum()),
        backward_ms=float(times[~forward & ~exchanged].sum()),
        backward_exchange_ms=float(times[~forward & exchanged].sum()),
        weights=Exchange(),
        overlap=(),
    )
    kept = 0
    for entry in named:
        kept |= recompute.kept(entry.option.places)[0]
    shared = _whole_bytes(float(model.bytes_of(kept & model.shared) @ values))
    return _ModelNumbers(unit_times, float(times[list(model.weight_gradients)].sum()), options, recipes, shared)


def _numbers(
    named: NamedOption,
    model: UnitModel,
    recompute: RecomputeModel,
    values: NDArray[np.float64],
    times: NDArray[np.float64],
) -> _ModelOption:
    option = named.option
    extra, repeated, repeated_after = (
        _sums(times, model.is_collective, operations)
        for operations in (
            option.repeated,
            repeated_by_weights(model, recompute, option.places),
            repeated_by_weights(model, recompute, option.places, hands_on=True),
        )
    )
    held = [place for place in option.places if place in recompute.views]
    exchanged = [place for place in option.places if place.endswith(COMMUNICATION)]
    numbers = UnitOption(
        name=named.name,
        cells=tuple(place for place in option.places if place not in held and place not in exchanged),
        primitives=tuple(dict.fromkeys((*held, *(view for place in held for view in recompute.views[place])))),
        communication=tuple(place.removesuffix(COMMUNICATION) for place in exchanged),
        saved_bytes=_whole_bytes(float(option.saved @ values)),
        extra_backward_ms=sum(extra),
        working_set_bytes=max(0, _whole_bytes(evaluate_rows(option.working_set, values))),
        repeated_ms=sum(repeated),
        repeated_after_ms=sum(repeated_after),
        equals=named.equals,
    )
    return _ModelOption(numbers, extra, repeated, repeated_after)


def _sums(
    times: NDArray[np.float64], is_collective: NDArray[np.bool_], operations: Collection[int]
) -> tuple[float, float]:
    """Computation and exchange of some operations."""
    chosen = np.zeros(len(times), dtype=bool)
    chosen[list(operations)] = True
    return float(times[chosen & ~is_collective].sum()), float(times[chosen & is_collective].sum())


def _in_network(known: _ModelOption, unit_cells: Sequence[str], times: UnitTimes) -> UnitOption:
    option = known.option
    return replace(
        option,
        extra_backward_ms=times.extra_backward(*known.extra_ms),
        repeated_ms=times.alone(*known.repeated_ms),
        repeated_after_ms=times.alone(*known.repeated_after_ms),
        cells=absolute_places(option.cells, unit_cells),
        primitives=absolute_places(option.primitives, unit_cells),
        communication=absolute_places(option.communication, unit_cells),
    )


def _recipe_notes(found: Sequence[UnitCost], numbers: Mapping[int, _ModelNumbers], costs: NetworkCosts) -> list[str]:
    """Which recipes are others under another name, and what a recipe cannot reach."""
    same: dict[str, list[str]] = {}
    missed: dict[str, list[str]] = {}
    seen: set[int] = set()
    for unit, model in zip(found, costs.models, strict=True):
        if id(model) in seen:
            continue
        seen.add(id(model))
        equal = [f"{option.name} = {option.equals}" for option in unit.options if option.equals in RECIPES]
        if equal:
            same.setdefault(", ".join(equal), []).append(unit.unit.name)
        for operation in numbers[id(model)].recipes.out_of_reach:
            missed.setdefault(operation, []).append(unit.unit.name)
    notes = [f"recompute recipes that do the same in {', '.join(units)}: {equal}" for equal, units in same.items()]
    if missed:
        listed = "; ".join(
            f"{operation.replace(' 0.', ' ')} in {', '.join(units)}" for operation, units in missed.items()
        )
        notes.append(
            "the recipe select keeps what no cell is known to hold a primitive for (functional forms, files of "
            f"mindspore.export): {listed}"
        )
    return notes


def _whole_bytes(value: float) -> int:
    return int(np.ceil(value - 1e-6))
