"""Stages and chunks that MindSpore's compiler refuses, some of them only with an internal error or a crash."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from mindspore import nn

from mindspore_bmpipe.apply.recorded import own_parameters
from mindspore_bmpipe.plan import Plan, UnitPlan

SEGMENTED_SCHEDULE = "zero_bubble_v"
"""The one schedule for which MindSpore reads `pipeline_segment`."""

_LISTED = 5
"""How many names a message gives before it only counts the rest."""


def is_segmented(plan: Plan) -> bool:
    """Whether the cells of the plan need `pipeline_segment`."""
    return plan.settings.get("schedule") == SEGMENTED_SCHEDULE


def list_names(names: Sequence[str]) -> str:
    """Names for people."""
    shown = ", ".join(repr(name) for name in names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def stage_violations(plan: Plan, unit_of: Mapping[str, UnitPlan], cells: Mapping[str, nn.Cell]) -> list[str]:
    """Everything about a plan's stages that the compiler would refuse; `tests/test_verify_rules.py` shows that it does.

    Args:
        plan: the plan.
        unit_of: cell path -> unit, for each cell in a unit.
        cells: cell path -> cell.
    """
    return [*_empty(plan), *_order(plan), *_held_twice(unit_of, cells)]


def _empty(plan: Plan) -> Iterator[str]:
    stages, chunks = len(plan.stages), 1 + max(unit.chunk for unit in plan.units)
    for stage, chunk in itertools.product(range(stages), range(chunks)):
        if not any(unit.parameters for unit in plan.units if (unit.stage, unit.chunk) == (stage, chunk)):
            where = f"stage {stage}" if chunks == 1 else f"chunk {chunk} of stage {stage}"
            yield f"{where} holds no trainable parameter, and MindSpore needs one on every stage and chunk"
    outside = [unit.name for unit in plan.units if not 0 <= unit.stage < stages]
    if outside:
        yield f"unit {list_names(outside)} is on a stage outside 0..{stages - 1}"


def _order(plan: Plan) -> Iterator[str]:
    in_one_chunk = all(unit.chunk == 0 for unit in plan.units)
    for earlier, later in itertools.pairwise(plan.units):
        if _place(plan, later) >= _place(plan, earlier):
            continue
        if in_one_chunk:
            yield (
                f"unit {later.name!r} follows {earlier.name!r} on an earlier stage ({later.stage} < {earlier.stage}); "
                "stages can only go back in an interleaved schedule"
            )
        else:
            yield (
                f"unit {later.name!r} (stage {later.stage}, chunk {later.chunk}) follows {earlier.name!r} (stage "
                f"{earlier.stage}, chunk {earlier.chunk}), which the schedule runs after it"
            )


def _place(plan: Plan, unit: UnitPlan) -> tuple[int, int]:
    """Place of a unit's virtual stage in network order; in a V, odd chunks run through the stages backwards."""
    return unit.chunk, -unit.stage if is_segmented(plan) and unit.chunk % 2 else unit.stage


def _held_twice(unit_of: Mapping[str, UnitPlan], cells: Mapping[str, nn.Cell]) -> Iterator[str]:
    """Weights that cells of several stages hold as one object, which the compiler cannot send."""
    holders: dict[int, dict[str, UnitPlan]] = {}
    for path, unit in unit_of.items():
        for _, parameter in own_parameters(cells[path]):
            holders.setdefault(id(parameter), {})[path] = unit
    for units in holders.values():
        stages = sorted({unit.stage for unit in units.values()})
        if len(stages) > 1:
            yield (
                f"cells {list_names(list(units))} hold one weight and are on stages {', '.join(map(str, stages))}; "
                "MindSpore shares a weight between stages only if one cell holds it and gives it to the others in "
                "their calls"
            )
