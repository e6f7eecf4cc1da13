"""What is planned: numbers for the planner and names for its answer, from layer tables and from networks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindspore_bmpipe.config import AUTO, OVERLAP_TRANSFERS, Config
from mindspore_bmpipe.costs.hardware import Hardware, Link, load_hardware
from mindspore_bmpipe.costs.held_weights import held_weights, product_weights
from mindspore_bmpipe.costs.logical import sharding_of, with_degrees_of
from mindspore_bmpipe.costs.network import EvaluatedCosts, NetworkCosts, UnitCost, evaluate_costs
from mindspore_bmpipe.costs.static_memory import StaticSettings
from mindspore_bmpipe.costs.weight_holders import is_shared_out
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import CellGraph, Sharding
from mindspore_bmpipe.graph.trace_axes import BATCH, SEQUENCE
from mindspore_bmpipe.layer_table import LayerTable
from mindspore_bmpipe.problem import (
    Option,
    Run,
)

DEFAULT_HARDWARE = "ascend910b"
"""Machine assumed when none is given; a note in the plan says so."""
DEFAULT_MEMORY_SHARE = 0.9
"""Share of device memory a plan may use when no limit is given; the rest is for the runtime and fragmentation."""


@dataclass(frozen=True)
class UnitName:
    """What a plan file says of a unit beside where it goes."""

    name: str
    """Name of the unit."""
    cells: tuple[str, ...]
    """Paths of its cells; empty for layer tables."""
    recompute_cells: Mapping[str, tuple[str, ...]]
    """Option name -> cells recomputed."""
    parameters: int
    """Trainable weights inside."""
    parameter_elements: int
    """Elements of these weights."""
    has_product: bool = True
    """Whether one of them is a factor of a matrix product, whose gradient a split backward can put off."""
    has_shared_product: bool = False
    """Whether ranks share out one of these where `optimizer_shard_level` has them do so."""
    recompute_primitives: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Option name -> primitives recomputed."""
    recompute_communication: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Option name -> cells whose exchanges between ranks run again."""


@dataclass(frozen=True)
class SharedWeight:
    """A weight that several units read."""

    name: str
    """Name of the weight."""
    units: tuple[int, ...]
    """The units, in order."""
    is_borrowed: bool
    """Whether one cell holds it and the others get it in their calls; MindSpore can send it only then."""
    is_trainable: bool = True
    """Whether the step computes its gradient."""
    is_shared_out: bool = False
    """Whether the ranks of a stage that hold it share it out where `optimizer_shard_level` has them do so."""


@dataclass(frozen=True)
class Subject:
    """What is planned: numbers for the planner and names for its answer."""

    source: str
    """Name for people."""
    fingerprint: str
    """Digest of its structure."""
    runs: tuple[Run, ...]
    """Units in order, grouped."""
    units: tuple[UnitName, ...]
    """One entry per unit, in order."""
    stage_constant_bytes: int
    """Bytes every stage needs."""
    shared_saved_bytes: int
    """Bytes every stage keeps once per micro-batch in flight."""
    transfer_ms: float
    """Time of one transfer between stages, the longest where cuts differ."""
    config: Config
    """Settings, with everything resolved that the costs were evaluated for."""
    notes: tuple[str, ...]
    """What a reader should know."""
    shared_weights: tuple[SharedWeight, ...] = ()
    """Weights that several units read."""
    cut_bytes: tuple[int, ...] = ()
    """For every cut after a unit, the bytes that one rank sends; empty where all transfers take the same."""
    stage_links: tuple[Link, ...] = ()
    """Slowest link from each stage to the next one, and from the last to the first."""
    alternatives: tuple[Subject, ...] = ()
    """The same with other micro-batch sizes and numbers, where the planner may choose."""


def subject_of_layers(table: LayerTable, source: str, config: Config) -> Subject:
    """What a layer table says."""
    document = [
        [
            run.name, run.count, run.forward_ms, run.backward_ms, run.static_bytes,
            [[o.name, o.saved_bytes, o.extra_backward_ms, o.working_set_bytes] for o in run.options],
        ]
        for run in table.runs
    ]  # fmt: skip
    units = tuple(
        UnitName(run.name if run.count == 1 else f"{run.name}[{index}]", (), {}, 0, 0)
        for run in table.runs
        for index in range(run.count)
    )
    return Subject(
        source, _digest(document), table.runs, units, table.stage_constant_bytes, 0, table.transfer_ms, config, ()
    )


def subject_of_network(costs: NetworkCosts, config: Config) -> Subject:
    """Evaluate the costs of a network for the settings.

    Raises:
        InputError: settings that the network or this version cannot honour.
    """
    if config.micro_batch_size == AUTO:
        first, *others = (subject_of_network(costs, sized) for sized in _micro_batch_sizes(costs.graph, config))
        return replace(first, alternatives=tuple(others))
    settled = settle(costs, config)
    evaluated = settled.evaluated
    sharding = sharding_of(settled.config)
    return Subject(
        source=costs.graph.name,
        fingerprint=network_fingerprint(costs),
        runs=_runs(evaluated),
        units=tuple(_unit_name(costs, unit, sharding) for unit in evaluated.units),
        stage_constant_bytes=0,
        shared_saved_bytes=evaluated.shared_saved_bytes,
        transfer_ms=evaluated.transfer_ms,
        cut_bytes=evaluated.cut_bytes,
        stage_links=evaluated.stage_links,
        config=settled.config,
        notes=evaluated.notes,
        shared_weights=_shared_weights(costs, sharding),
    )


@dataclass(frozen=True)
class Settled:
    """Costs of a network in numbers, with everything they were evaluated for."""

    config: Config
    """Settings with nothing left out that the costs depend on."""
    hardware: Hardware
    """Machine."""
    sizes: Mapping[str, int]
    """Value of every symbol on one device."""
    evaluated: EvaluatedCosts
    """The numbers; their notes include what was assumed of the settings."""


def settle(costs: NetworkCosts, config: Config) -> Settled:
    """Evaluate the costs of a network for settings whose micro-batch size is not left to the planner.

    Raises:
        InputError: settings that the network or this version cannot honour.
    """
    resolved, hardware, notes = resolve_config(costs.graph, config)
    sizes = input_sizes(costs.graph, resolved)
    sharding = sharding_of(resolved)
    static = StaticSettings(sharding, resolved.optimizer_shard_level or 0)
    links = hardware.stage_links(resolved.stages or 1, sharding.ranks)
    overlap = [kind for kind in resolved.overlap or () if kind != OVERLAP_TRANSFERS]
    evaluated = evaluate_costs(costs, hardware, sizes, static, links, overlap=overlap)
    return Settled(resolved, hardware, sizes, replace(evaluated, notes=(*evaluated.notes, *notes)))


def network_fingerprint(costs: NetworkCosts) -> str:
    """Digest of units, cells and weights; the same for a live network, its traced file and its exported file."""
    known = costs.graph.parameters
    document = [
        [
            unit.name,
            list(unit.cells),
            sorted([name, list(known[name].type.shape), known[name].type.dtype] for name in unit.parameters),
        ]
        for unit in costs.split.units
    ]
    return _digest(document)


def resolve_config(graph: CellGraph, config: Config) -> tuple[Config, Hardware, list[str]]:
    """Fill in what the settings leave out, refuse what cannot be honoured, and say what was assumed.

    Raises:
        InputError: parallel degrees for which the network has no strategies, or unknown hardware.
    """
    notes = []
    config = with_degrees_of(graph, config)
    name = config.hardware
    if name is None:
        name = DEFAULT_HARDWARE
        notes.append(f"hardware was not given; {DEFAULT_HARDWARE} is assumed")
    hardware = load_hardware(name)
    limit = config.memory_limit
    if limit is None:
        limit = int(hardware.memory_capacity_bytes * DEFAULT_MEMORY_SHARE)
        notes.append(
            f"memory_limit was not given; {DEFAULT_MEMORY_SHARE:.0%} of the {hardware.memory_capacity_bytes} bytes of "
            f"{hardware.name} are assumed"
        )
    return replace(config, hardware=name, memory_limit=limit), hardware, notes


def input_sizes(graph: CellGraph, config: Config) -> dict[str, int]:
    """Value of every symbol of the graph on one device.

    Inputs are traced at the size of a micro-batch over all data-parallel ranks; ``micro_batch_size`` is that of one.
    In a sharded graph the symbol counts the samples of one rank.

    Raises:
        InputError: a size that the graph has fixed, or a batch that the ranks cannot share evenly.
    """
    sizes = dict(graph.symbols)
    for key, name in (("micro_batch_size", BATCH), ("sequence_length", SEQUENCE)):
        value = getattr(config, key)
        if value is None:
            continue
        if name not in sizes:
            fixed = _fixed_size(graph, name)
            if fixed != value:
                raise InputError(
                    f"config: {key}: {value}, but {graph.name} has its axis {name} fixed"
                    f"{'' if fixed is None else f' at {fixed}'}; trace it at that size"
                )
            continue
        sizes[name] = int(value)
    ranks = 1 if graph.sharding is not None else config.data_parallel or 1
    if config.micro_batch_size is None and BATCH in sizes and ranks > 1:
        if sizes[BATCH] % ranks:
            raise InputError(
                f"config: data_parallel: {ranks} does not divide the traced micro-batch of {sizes[BATCH]}; set "
                "micro_batch_size to the samples of one rank"
            )
        sizes[BATCH] //= ranks
    return sizes


def _micro_batch_sizes(graph: CellGraph, config: Config) -> list[Config]:
    """Every way to cut the samples of a step, micro_batches times the size without `auto`, into micro-batches."""
    default = replace(config, micro_batch_size=None)
    if config.micro_batches is None or BATCH not in graph.symbols:
        return [default]
    samples = config.micro_batches * input_sizes(graph, default)[BATCH]
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    return [replace(config, micro_batch_size=size, micro_batches=samples // size) for size in sizes]


def _runs(evaluated: EvaluatedCosts) -> tuple[Run, ...]:
    """Group neighbouring units of equal costs; names are those of the list they stand in."""
    groups: list[list[UnitCost]] = []
    for unit in evaluated.units:
        if groups and groups[-1][0].kind == unit.kind:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    names = [_run_name(group) for group in groups]
    runs = []
    for group, name in zip(groups, names, strict=True):
        first = group[0]
        if names.count(name) > 1:
            name = f"{name}[{group[0].unit.name.rpartition('.')[2]}-{group[-1].unit.name.rpartition('.')[2]}]"
        runs.append(
            Run(
                name=name,
                count=len(group),
                forward_ms=first.forward_ms,
                backward_ms=first.backward_ms,
                static_bytes=first.static_bytes,
                options=tuple(
                    Option(
                        o.name,
                        o.saved_bytes,
                        o.extra_backward_ms,
                        o.working_set_bytes,
                        o.repeated_ms,
                        o.repeated_after_ms,
                    )
                    for o in first.options
                ),
                trainable=first.trainable,
                weight_gradient_ms=first.weight_gradient_ms,
                update_bytes=first.update_bytes,
                gather_ms=first.gather_ms,
                reduce_ms=first.reduce_ms,
            )
        )
    return tuple(runs)


def _run_name(group: Sequence[UnitCost]) -> str:
    name = group[0].unit.name
    parent, _, last = name.rpartition(".")
    return parent if parent and last.isdigit() else name


def _shared_weights(costs: NetworkCosts, sharding: Sharding) -> tuple[SharedWeight, ...]:
    holders = Counter(name for unit in costs.split.units for name in held_weights(costs.graph, unit))
    known = costs.graph.parameters
    return tuple(
        SharedWeight(name, units, holders[name] < 2, known[name].trainable, is_shared_out(known[name], sharding))
        for name, units in costs.split.shared_parameters.items()
    )


def _unit_name(costs: NetworkCosts, unit: UnitCost, sharding: Sharding) -> UnitName:
    products = product_weights(costs.graph, unit.unit)
    held = [costs.graph.parameters[name] for name in held_weights(costs.graph, unit.unit)]
    trainable = [weight for weight in held if weight.trainable]
    elements = 0
    for weight in trainable:
        count = 1
        for length in weight.type.shape:
            count *= length
        elements += count
    return UnitName(
        name=unit.unit.name,
        cells=unit.unit.cells,
        recompute_cells={option.name: option.cells for option in unit.options},
        parameters=len(trainable),
        parameter_elements=elements,
        has_product=bool(products),
        has_shared_product=any(is_shared_out(costs.graph.parameters[name], sharding) for name in products),
        recompute_primitives={option.name: option.primitives for option in unit.options},
        recompute_communication={option.name: option.communication for option in unit.options},
    )


def _fixed_size(graph: CellGraph, name: str) -> int | None:
    """Size of an axis that is not a symbol, read off the first input that has it."""
    axis = 0 if name == BATCH else 1
    for tensor in graph.inputs:
        shape = graph.tensors[tensor].type.shape
        if len(shape) > axis and isinstance(shape[axis], int):
            ranks = graph.sharding.data_parallel if graph.sharding is not None and name == BATCH else 1
            return int(shape[axis]) // ranks
    return None


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
