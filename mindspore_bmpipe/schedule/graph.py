"""Dependencies between the actions of a schedule, laid out for array sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule.actions import BACKWARD, FORWARD, KINDS, WHOLE, Action
from mindspore_bmpipe.schedule.schedule import Schedule

IntArray = npt.NDArray[np.intp]

KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}


@dataclass(frozen=True, eq=False)
class DependencyGraph:
    """Actions numbered level by level: every action's predecessors lie in earlier levels.

    An action has at most two predecessors: the one before it on its stage, and the one whose data it needs.
    """

    size: int
    """Number of actions A."""
    level_starts: tuple[int, ...]
    """First action of each level, and A at the end."""
    stage_predecessor: IntArray
    """Shape (A,): the action before it on its stage, or A if none."""
    data_predecessor: IntArray
    """Shape (A,): the action whose output it receives, or A if none."""
    transfers: npt.NDArray[np.float64]
    """Shape (A,): 1 if the data comes from another stage, else 0."""
    slot: IntArray
    """Shape (A,): row of its duration, kind index * virtual stages + virtual stage."""
    stage: IntArray
    """Shape (A,): stage that runs it."""
    virtual_stages: int
    """Number of virtual stages K."""
    number: dict[tuple[int, Action], int]
    """Number of an action, by (stage, action)."""


@lru_cache(maxsize=32)
def dependency_graph(schedule: Schedule) -> DependencyGraph:
    """The graph of a validated schedule.

    Forward of virtual stage k waits for forward of k - 1, backward for backward of k + 1; the last backward and every
    weight gradient wait only for actions of their own stage, which the order already puts first.

    Raises:
        InputError: the stages wait for each other in a circle; the message says where each one is stuck.
    """
    virtual_of_chunk = schedule.virtual_of_chunk
    chunk_of_virtual = schedule.chunk_of_virtual
    stage_of_virtual = schedule.stage_of_virtual
    last = schedule.virtual_stages - 1
    level: dict[tuple[int, Action], int] = {}
    position = [0] * schedule.stages
    rows: list[tuple[int, int, Action, int]] = []
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(schedule.orders):
            while position[stage] < len(order):
                action = order[position[stage]]
                kind, chunk, micro_batch = action
                virtual = virtual_of_chunk[stage][chunk]
                depth = level[stage, order[position[stage] - 1]] + 1 if position[stage] else 0
                source = -1
                if kind == FORWARD and virtual > 0:
                    source = virtual - 1
                elif kind in (BACKWARD, WHOLE) and virtual < last:
                    source = virtual + 1
                if source >= 0:
                    found = _found(level, stage_of_virtual[source], kind, chunk_of_virtual[source], micro_batch)
                    if found is None:
                        break
                    depth = max(depth, found + 1)
                level[stage, action] = depth
                rows.append((depth, stage, action, source))
                position[stage] += 1
                progress = True
    stuck = [
        f"stage {stage} waits at step {position[stage]} ({order[position[stage]]})"
        for stage, order in enumerate(schedule.orders)
        if position[stage] < len(order)
    ]
    if stuck:
        raise InputError(f"schedule {schedule.kind}: deadlock, {'; '.join(stuck)}")
    rows.sort(key=lambda row: (row[0], row[1]))
    return _laid_out(schedule, rows)


def _found(table: dict[tuple[int, Action], int], stage: int, kind: str, chunk: int, micro_batch: int) -> int | None:
    """Entry of the action that sends to one of this kind: a forward, or a backward in either form."""
    kinds = (FORWARD,) if kind == FORWARD else (BACKWARD, WHOLE)
    for sender in kinds:
        entry = table.get((stage, Action(sender, chunk, micro_batch)))
        if entry is not None:
            return entry
    return None


def _laid_out(schedule: Schedule, rows: list[tuple[int, int, Action, int]]) -> DependencyGraph:
    """The graph of (level, stage, action, virtual stage of the data or -1) rows sorted by level."""
    size = len(rows)
    number = {(stage, action): index for index, (_, stage, action, _) in enumerate(rows)}
    levels = [row[0] for row in rows]
    starts = [index for index in range(size) if index == 0 or levels[index] != levels[index - 1]]
    stage_predecessor = np.full(size, size, dtype=np.intp)
    data_predecessor = np.full(size, size, dtype=np.intp)
    transfers = np.zeros(size)
    slot = np.zeros(size, dtype=np.intp)
    latest = [size] * schedule.stages
    virtual_of_chunk, chunk_of_virtual = schedule.virtual_of_chunk, schedule.chunk_of_virtual
    for index, (_, stage, action, source) in enumerate(rows):
        stage_predecessor[index], latest[stage] = latest[stage], index
        virtual = virtual_of_chunk[stage][action.chunk]
        slot[index] = KIND_INDEX[action.kind] * schedule.virtual_stages + virtual
        if source >= 0:
            other = schedule.stage_of_virtual[source]
            found = _found(number, other, action.kind, chunk_of_virtual[source], action.micro_batch)
            assert found is not None
            data_predecessor[index] = found
            transfers[index] = float(other != stage)
    return DependencyGraph(
        size=size,
        level_starts=(*starts, size),
        stage_predecessor=stage_predecessor,
        data_predecessor=data_predecessor,
        transfers=transfers,
        slot=slot,
        stage=np.array([row[1] for row in rows], dtype=np.intp),
        virtual_stages=schedule.virtual_stages,
        number=number,
    )
