"""Writing a plan onto the cells of a network.

Recomputation cannot be switched off again, so everything is checked before the first attribute is written.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mindspore import nn, ops

from mindspore_bmpipe.apply.recorded import (
    RECOMPUTE_COMMUNICATION,
    is_recomputed,
    keeps_its_outputs,
    named_cells,
    own_parameters,
    own_primitives,
    primitive_recompute,
    recomputes_communication,
    segment_of,
    stage_of,
    starts_recompute,
)
from mindspore_bmpipe.apply.stages import is_segmented, list_names, stage_violations
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.plan import Plan, UnitPlan

_applied: weakref.WeakKeyDictionary[nn.Cell, Plan] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Network:
    """The network as it is now, and what the plan wants of it."""

    plan: Plan
    """The plan to write."""
    cells: Mapping[str, nn.Cell]
    """Attribute path -> cell, MindSpore's helper cells left out."""
    unit_of: Mapping[str, UnitPlan]
    """Attribute path -> unit, for each cell in a unit, at any depth."""
    primitives: Mapping[str, ops.Primitive]
    """Attribute path -> primitive for the primitives the plan recomputes and the network has."""
    exchanging: Mapping[str, ops.Primitive]
    """Attribute path -> primitive for those around which the plan recomputes communication."""


def apply(network: nn.Cell, plan: Plan) -> None:
    """Write the plan's stages and recomputation onto the cells of `network`.

    Sets `pipeline_stage` on the cells of every unit (and `pipeline_segment` for `zero_bubble_v`), calls `recompute()`
    on the cells and `recompute(True)` on the primitives the plan lists, and gives `recompute_comm_op` to the primitives
    of the cells whose communication it recomputes. Writing a plan that the network already follows does nothing.

    Args:
        network: The network the plan was made for: the cell inside `PipelineCell`, not the cell around it.
        plan: A plan made from a network or its MindIR file; a plan made from a layer table names no cells.

    Raises:
        InputError: The plan does not fit the network, or the network already has settings of its own. The message
            lists everything that is wrong, and nothing has been written.
    """
    if not isinstance(network, nn.Cell):
        raise InputError(f"apply: the network must be a mindspore.nn.Cell, got {type(network).__name__}")
    if not isinstance(plan, Plan):
        raise InputError(f"apply: the plan must be a Plan (see load_plan), got {type(plan).__name__}")
    if not plan.units or not all(unit.cells for unit in plan.units):
        raise InputError(
            f"the plan of {plan.source} names no cells for its units, as plans made from a layer table do, so it "
            "cannot be written onto a network; plan the network itself, or export this plan to a launcher's format"
        )
    found = _survey(network, plan)
    mismatches = _mismatches(found)
    if not mismatches and _follows(found):
        _applied[network] = plan
        return
    violations = [
        *mismatches,
        *stage_violations(plan, found.unit_of, found.cells),
        *_recompute_places(found),
        *_own_settings(found),
        *_shared(found),
    ]
    if violations:
        head = f"the plan of {plan.source} cannot be written onto {type(network).__name__}; nothing has been changed:"
        if mismatches:
            head = (
                f"the plan of {plan.source} was made for another network than this {type(network).__name__}; nothing "
                "has been changed. Plan this network, or give the one that was planned (it is inside PipelineCell):"
            )
        raise InputError("\n  - ".join([head, *violations]))
    _write(found)
    _applied[network] = plan


def applied_plan(network: nn.Cell) -> Plan | None:
    """The plan last written onto this very network object, or `None`."""
    return _applied.get(network)


def _survey(network: nn.Cell, plan: Plan) -> _Network:
    cells = named_cells(network)
    roots = {path: unit for unit in plan.units for path in unit.cells}
    unit_of = {}
    for path in cells:
        above = next((prefix for prefix in _path_and_above(path) if prefix in roots), None)
        if above is not None:
            unit_of[path] = roots[above]
    primitives = {}
    for unit in plan.units:
        for path in unit.recompute_primitives:
            primitive = _primitive(cells, path)
            if primitive is not None:
                primitives[path] = primitive
    exchanging = {
        _join(path, attribute): primitive
        for unit in plan.units
        for path in unit.recompute_communication
        if path in cells
        for attribute, primitive in own_primitives(cells[path])
    }
    return _Network(plan, cells, unit_of, primitives, exchanging)


def _primitive(cells: Mapping[str, nn.Cell], path: str) -> ops.Primitive | None:
    holder, _, name = path.rpartition(".")
    value = getattr(cells[holder], name, None) if holder in cells else None
    return value if isinstance(value, ops.Primitive) else None


def _path_and_above(path: str) -> Iterable[str]:
    """The path itself, then each path above it, the network (`""`) last."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _mismatches(found: _Network) -> list[str]:
    """What shows that the plan belongs to another network."""
    violations = []
    units = found.plan.units
    listed = Counter(path for unit in units for path in unit.cells)
    for path, times in listed.items():
        above = [prefix for prefix in _path_and_above(path) if prefix in listed and prefix != path]
        if times > 1:
            violations.append(f"cell {path!r} belongs to {times} units; a cell can be on one stage only")
        if above:
            violations.append(f"cell {path!r} is inside {above[0]!r}, which is listed as well; list the outer one only")
    for unit in units:
        missing = [path for path in unit.cells if path not in found.cells]
        if missing:
            violations.append(f"unit {unit.name!r}: the network has no cell {list_names(missing)}")
            continue
        parameters, elements = _trainable(found, unit)
        if (parameters, elements) != (unit.parameters, unit.parameter_elements):
            violations.append(
                f"unit {unit.name!r}: the network has {parameters} trainable parameters with {elements} elements here, "
                f"the plan {unit.parameters} with {unit.parameter_elements}"
            )
    # A cell around several units has no stage of its own; MindSpore puts its parameters where they are used.
    around = {prefix for path in listed for prefix in _path_and_above(path)}
    for path, cell in found.cells.items():
        names = [name for name, _ in own_parameters(cell)]
        if names and path not in found.unit_of and path not in around:
            violations.append(
                f"no unit of the plan covers the cell {path!r}, which holds the trainable parameter {list_names(names)}"
            )
    return violations


def _trainable(found: _Network, unit: UnitPlan) -> tuple[int, int]:
    """Number of distinct trainable parameters of the unit, and of their elements."""
    parameters = {
        id(parameter): math.prod(getattr(parameter, "shape", ()))
        for path, owner in found.unit_of.items()
        if owner is unit
        for _, parameter in own_parameters(found.cells[path])
    }
    return len(parameters), sum(parameters.values())


def _recompute_places(found: _Network) -> list[str]:
    """Recomputation the plan asks for where it cannot be."""
    violations = []
    listed = Counter(path for unit in found.plan.units for path in unit.recompute_cells)
    for unit in found.plan.units:
        for path in unit.recompute_cells:
            if path not in found.cells:
                violations.append(f"unit {unit.name!r}: the network has no cell {path!r} to recompute")
            elif found.unit_of.get(path) is not unit:
                violations.append(f"unit {unit.name!r}: the recomputed cell {path!r} is not inside the unit")
            elif isinstance(found.cells[path], (nn.CellList, nn.CellDict)):
                violations.append(
                    f"recomputed cell {path!r} is a container, to which recompute() would add an item; list its items"
                )
            above = [prefix for prefix in _path_and_above(path) if prefix in listed and prefix != path]
            if above:
                violations.append(
                    f"recomputed cell {path!r} is inside the recomputed cell {above[0]!r}; MindSpore ignores "
                    "the inner one"
                )
            if listed[path] > 1:
                violations.append(f"recomputed cell {path!r} is listed {listed[path]} times")
        for path in unit.recompute_primitives:
            if path not in found.primitives:
                violations.append(f"unit {unit.name!r}: the network has no primitive {path!r} to recompute")
            elif found.unit_of.get(path.rpartition(".")[0]) is not unit:
                violations.append(f"unit {unit.name!r}: the recomputed primitive {path!r} is not inside the unit")
        for path in unit.recompute_communication:
            if found.unit_of.get(path) is not unit:
                violations.append(f"unit {unit.name!r}: the unit has no cell {path!r} to recompute communication of")
            elif not any(own_primitives(found.cells[path])):
                violations.append(
                    f"unit {unit.name!r}: cell {path!r} holds no primitive to recompute the communication of"
                )
    return list(dict.fromkeys(violations))


def _own_settings(found: _Network) -> list[str]:
    """Stages and recomputation that someone else has already set on the network."""
    violations = []
    segmented = is_segmented(found.plan)
    for path, cell in found.cells.items():
        owner = found.unit_of.get(path)
        name = repr(path) if path else "the network itself"
        stage, segment = stage_of(cell), segment_of(cell)
        if stage is not None and (owner is None or stage != owner.stage):
            wanted = f"the plan puts it on stage {owner.stage}" if owner else "the plan sets no stage there"
            violations.append(
                f"{name} already has pipeline_stage {stage} and {wanted}; remove it from the network's code (and from "
                "stage_config), the planner decides it"
            )
        if segmented and segment is not None and (owner is None or segment != owner.chunk):
            violations.append(
                f"{name} already has pipeline_segment {segment}; remove it from the network's code (and from "
                "segment_config), the planner decides it"
            )
        # Below such a cell every cell is flagged too; one line for the topmost says enough.
        above = found.cells.get(path.rpartition(".")[0]) if path else None
        if is_recomputed(cell) and (starts_recompute(cell) or above is None or not is_recomputed(above)):
            violations.append(
                f"{name} is already recomputed; MindSpore would ignore the plan there and cannot undo it, so build the "
                "network without its recompute() calls, the planner decides them"
            )
    wanted_primitives = {id(primitive) for primitive in found.primitives.values()}
    recompute_cells = {path for unit in found.plan.units for path in unit.recompute_cells}
    for path, cell in found.cells.items():
        for attribute, primitive in own_primitives(cell):
            mode = primitive_recompute(primitive)
            planned = id(primitive) in wanted_primitives
            in_recomputed = any(prefix in recompute_cells for prefix in _path_and_above(path))
            if (mode is True and not planned) or (mode is False and (planned or in_recomputed)):
                violations.append(
                    f"primitive {_join(path, attribute)!r} was told recompute({mode}), which the plan did not count "
                    "on; remove that call, the planner decides it"
                )
            exchange = recomputes_communication(primitive)
            if exchange is not None and exchange != (_join(path, attribute) in found.exchanging):
                violations.append(
                    f"primitive {_join(path, attribute)!r} already has {RECOMPUTE_COMMUNICATION} {exchange}, which the "
                    "plan did not count on; remove it, the planner decides it"
                )
    return violations


def _shared(found: _Network) -> list[str]:
    """Recomputed primitive objects that other places of the network use as well."""
    planned: dict[int, set[str]] = {}
    for path, primitive in (*found.primitives.items(), *found.exchanging.items()):
        planned.setdefault(id(primitive), set()).add(path)
    elsewhere: dict[int, list[str]] = {}
    for path, cell in found.cells.items():
        for attribute, primitive in own_primitives(cell):
            place = _join(path, attribute)
            if id(primitive) in planned and place not in planned[id(primitive)]:
                elsewhere.setdefault(id(primitive), []).append(place)
    return [
        f"primitive {list_names(sorted(planned[key]))} is one object that {list_names(places)} uses too, so "
        "recomputing it would recompute it there as well; give each place its own primitive"
        for key, places in elsewhere.items()
    ]


def _follows(found: _Network) -> bool:
    """Whether the network is already exactly as the plan wants it."""
    segmented = is_segmented(found.plan)
    unit_roots = {path: unit for unit in found.plan.units for path in unit.cells}
    recompute_cells = {path for unit in found.plan.units for path in unit.recompute_cells}
    if not recompute_cells <= set(found.cells):
        return False
    for path, cell in found.cells.items():
        unit = unit_roots.get(path)
        if stage_of(cell) != (None if unit is None else unit.stage):
            return False
        if segmented and segment_of(cell) != (None if unit is None else unit.chunk):
            return False
        if is_recomputed(cell) and not any(prefix in recompute_cells for prefix in _path_and_above(path)):
            return False
        if path in recompute_cells and not keeps_its_outputs(cell):
            return False
    wanted = {id(primitive) for primitive in found.primitives.values()}
    listed = [path for unit in found.plan.units for path in unit.recompute_primitives]
    if len(found.primitives) != len(set(listed)):
        return False
    exchanging = {id(primitive) for primitive in found.exchanging.values()}
    return all(
        (primitive_recompute(primitive) is True) == (id(primitive) in wanted)
        and (recomputes_communication(primitive) is True) == (id(primitive) in exchanging)
        for cell in found.cells.values()
        for _, primitive in own_primitives(cell)
    )


def _write(found: _Network) -> None:
    segmented = is_segmented(found.plan)
    for unit in found.plan.units:
        for path in unit.cells:
            # MindSpore refuses numpy integers.
            found.cells[path].pipeline_stage = int(unit.stage)
            if segmented:
                found.cells[path].pipeline_segment = int(unit.chunk)
    for unit in found.plan.units:
        for path in unit.recompute_cells:
            found.cells[path].recompute()
    for primitive in {id(primitive): primitive for primitive in found.primitives.values()}.values():
        # The call hides the method behind an attribute of the same name, so a second one would fail.
        if primitive_recompute(primitive) is None:
            primitive.recompute(True)
    for primitive in {id(primitive): primitive for primitive in found.exchanging.values()}.values():
        primitive.add_prim_attr(RECOMPUTE_COMMUNICATION, True)


def _join(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute
