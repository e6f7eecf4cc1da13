"""A plan as launchers see it: a row of layers that they cut and recompute, with fixed ends."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.plan import Plan, UnitPlan

_LISTED = 5


@dataclass(frozen=True)
class LauncherLayers:
    """The layers of a plan by virtual stage."""

    stages: int
    """Pipeline stages p."""
    chunks: int
    """Chunks per stage v."""
    held: tuple[tuple[UnitPlan, ...], ...]
    """Layers of each virtual stage c * p + s, those of one run in any order that suits."""

    @property
    def count(self) -> int:
        """Layers in total."""
        return sum(map(len, self.held))

    def by_chunk(self, values: Sequence[int]) -> list[int] | list[list[int]]:
        """Numbers of virtual stages as launchers list them: one a stage, or for several chunks one list a chunk."""
        rows = [list(values[chunk * self.stages : (chunk + 1) * self.stages]) for chunk in range(self.chunks)]
        return rows[0] if self.chunks == 1 else rows


def layers_of(plan: Plan, launcher: str, schedules: Sequence[str]) -> LauncherLayers:
    """Find the layers of a plan.

    Layers are the elements of the cell list that most units stand in; in a plan of a layer table, the units from the
    first to the last run of several units. What stands before them (embedding) the launcher keeps on the first virtual
    stage, what comes after (norm, head, loss) on the last.

    Args:
        plan: the plan.
        launcher: its name, for messages.
        schedules: schedules that it has.

    Raises:
        InputError: a schedule or a place that the launcher does not have.
    """
    schedule, stages = str(plan.settings["schedule"]), len(plan.stages)
    if schedule not in schedules:
        raise InputError(f"{launcher} has no schedule {schedule}; plan with schedule: {' or '.join(schedules)}")
    chunks = int(plan.settings["chunks"])
    first, last = _ends(plan, launcher)
    held: list[list[UnitPlan]] = [[] for _ in range(stages * chunks)]
    for number, unit in enumerate(plan.units):
        virtual = unit.chunk * stages + unit.stage
        if first <= number <= last:
            held[virtual].append(unit)
        elif virtual != (0 if number < first else len(held) - 1):
            end = "first" if number < first else "last"
            raise InputError(
                f"unit {unit.name!r} is on stage {unit.stage}, and {launcher} keeps what is no layer on the {end} one; "
                f"plan again with pins: [{{units: {unit.name}, stage: {0 if number < first else stages - 1}}}]"
            )
    return LauncherLayers(stages, chunks, tuple(map(tuple, held)))


def _ends(plan: Plan, launcher: str) -> tuple[int, int]:
    """First and last layer."""
    if all(unit.cells for unit in plan.units):
        lists = [_list_of(unit) for unit in plan.units]
        counts = Counter(name for name in lists if name is not None)
        main = counts.most_common(1)[0][0] if counts else None
        inside = [number for number, name in enumerate(lists) if name is not None and name == main]
    else:
        runs = Counter(unit.run for unit in plan.units)
        inside = [number for number, unit in enumerate(plan.units) if runs[unit.run] > 1]
    if not inside:
        raise InputError(f"the plan of {plan.source} has no row of layers that {launcher} could cut")
    first, last = inside[0], inside[-1]
    between = [
        unit.name
        for unit in plan.units[first : last + 1]
        if unit.cells and _list_of(unit) != _list_of(plan.units[first])
    ]
    if between:
        raise InputError(
            f"unit {between[0]!r} stands between layers, where {launcher} has none; write the cells instead"
        )
    return first, last


def _list_of(unit: UnitPlan) -> str | None:
    parent, _, last = unit.cells[0].rpartition(".")
    return parent if last.isdigit() else None


Strength = Callable[[UnitPlan], float]
"""How much an option recomputes, for sorting: the largest number first."""


def strongest_first(held: Sequence[UnitPlan], strength: Strength) -> tuple[UnitPlan, ...]:
    """Layers of one virtual stage with options exchanged within each run, so that what recomputes most comes first.

    Neighbouring layers of one run cost the same, so which of them has which option makes no difference.
    """
    found: list[UnitPlan] = []
    for _, group in itertools.groupby(held, key=lambda unit: unit.run):
        members = list(group)
        ordered = sorted(members, key=strength, reverse=True)
        for place, taken in zip(members, ordered, strict=True):
            found.append(_with_recomputation_of(place, taken))
    return tuple(found)


def _with_recomputation_of(place: UnitPlan, taken: UnitPlan) -> UnitPlan:
    if place is taken:
        return place
    old, new = (taken.cells[0], place.cells[0]) if taken.cells else ("", "")

    def moved(paths: Sequence[str]) -> tuple[str, ...]:
        return tuple(new + path.removeprefix(old) for path in paths)

    return replace(
        place,
        option=taken.option,
        recompute_cells=moved(taken.recompute_cells),
        recompute_primitives=moved(taken.recompute_primitives),
        recompute_communication=moved(taken.recompute_communication),
    )


def place_name(layers: LauncherLayers, virtual: int) -> str:
    """A virtual stage for messages."""
    chunk, stage = divmod(virtual, layers.stages)
    return f"stage {stage}" if layers.chunks == 1 else f"chunk {chunk} of stage {stage}"


def options_text(held: Sequence[UnitPlan]) -> str:
    """Options of layers in order, for messages."""
    runs = [(name, len(list(group))) for name, group in itertools.groupby(unit.option for unit in held)]
    shown = ", ".join(f"{count} x {name}" for name, count in runs[:_LISTED])
    return shown if len(runs) <= _LISTED else f"{shown}, ..."
