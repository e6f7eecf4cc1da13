"""Dependencies between the actions of a schedule, laid out for array sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule.actions import FORWARD, KINDS, WEIGHT
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
    boundary: IntArray
    """Shape (A,): k if the data comes from another stage and crosses from virtual stage k to k + 1 or back, else -1."""
    slot: IntArray
    """Shape (A,): row of its duration, kind index * virtual stages + virtual stage."""
    stage: IntArray
    """Shape (A,): stage that runs it."""
    virtual_stages: int
    """Number of virtual stages K."""
    sequence_parts: int
    """Parts of each sequence, which are micro-batches of their own here."""
    sends_block: tuple[bool, ...]
    """Shape (K - 1,): whether a stage is busy while a message crosses from virtual stage k to k + 1 or back."""
    of_stage: tuple[IntArray, ...]
    """Numbers of each stage's actions, in the order it runs them."""


@lru_cache(maxsize=32)
def dependency_graph(schedule: Schedule) -> DependencyGraph:
    """The graph of a validated schedule.

    Forward of virtual stage k waits for forward of k - 1, backward for backward of k + 1; the last backward and every
    weight gradient wait only for actions of their own stage, which the order already puts first.

    Raises:
        InputError: the stages wait for each other in a circle; the message says where each one is stuck.
    """
    virtual_of_chunk = schedule.virtual_of_chunk
    last = schedule.virtual_stages - 1
    # Actions are found in some order that respects the dependencies; what is known of the i-th found one:
    levels: list[int] = []
    stages: list[int] = []
    slots: list[int] = []
    sources: list[int] = []
    # Which one sent a message, per virtual stage and micro-batch.
    forwards, backwards = (
        [[-1] * schedule.micro_batches for _ in range(schedule.virtual_stages)] for _ in range(2)
    )  # fmt: skip
    runs: list[list[int]] = [[] for _ in range(schedule.stages)]
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(schedule.orders):
            run, virtuals = runs[stage], virtual_of_chunk[stage]
            depth = levels[run[-1]] + 1 if run else 0
            for position in range(len(run), len(order)):
                kind, chunk, micro_batch = order[position]
                virtual = virtuals[chunk]
                source = -1
                if kind == FORWARD:
                    if virtual > 0:
                        source = forwards[virtual - 1][micro_batch]
                        if source < 0:
                            break
                    forwards[virtual][micro_batch] = len(levels)
                elif kind != WEIGHT:
                    if virtual < last:
                        source = backwards[virtual + 1][micro_batch]
                        if source < 0:
                            break
                    backwards[virtual][micro_batch] = len(levels)
                if source >= 0 and levels[source] >= depth:
                    depth = levels[source] + 1
                run.append(len(levels))
                levels.append(depth)
                stages.append(stage)
                slots.append(KIND_INDEX[kind] * schedule.virtual_stages + virtual)
                sources.append(source)
                depth += 1
                progress = True
    stuck = [
        f"stage {stage} waits at step {len(run)} ({order[len(run)]})"
        for stage, (order, run) in enumerate(zip(schedule.orders, runs, strict=True))
        if len(run) < len(order)
    ]
    if stuck:
        raise InputError(f"schedule {schedule.kind}: deadlock, {'; '.join(stuck)}")
    return _laid_out(schedule, np.array(levels), np.array(stages), np.array(slots), np.array(sources), runs)


def _laid_out(
    schedule: Schedule, levels: IntArray, stages: IntArray, slots: IntArray, sources: IntArray, runs: list[list[int]]
) -> DependencyGraph:
    """The graph of actions as they were found, renumbered by level and stage."""
    size = len(levels)
    found = np.lexsort((stages, levels))
    # One entry more, so that "none", which is -1, becomes `size`.
    number = np.full(size + 1, size, dtype=np.intp)
    number[found] = np.arange(size)
    of_stage = tuple(number[run] for run in runs)
    stage_predecessor = np.full(size, size, dtype=np.intp)
    for numbers in of_stage:
        stage_predecessor[numbers[1:]] = numbers[:-1]
    stage, source, slot = stages[found], sources[found], slots[found]
    kind, virtual = np.divmod(slot, schedule.virtual_stages)
    crossed = np.where(kind == KIND_INDEX[FORWARD], virtual - 1, virtual)
    return DependencyGraph(
        size=size,
        level_starts=(*np.flatnonzero(np.diff(levels[found], prepend=-1)).tolist(), size),
        stage_predecessor=stage_predecessor,
        data_predecessor=number[source],
        boundary=np.where((source >= 0) & (stages[source] != stage), crossed, -1),
        slot=slot,
        stage=stage,
        virtual_stages=schedule.virtual_stages,
        sequence_parts=schedule.sequence_parts,
        sends_block=tuple(schedule.sends_block and one != other for one, other in pairwise(schedule.stage_of_virtual)),
        of_stage=of_stage,
    )
