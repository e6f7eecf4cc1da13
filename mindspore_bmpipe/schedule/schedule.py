"""A pipeline schedule as plain data, and the check that it is one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule.actions import BACKWARD, FORWARD, KINDS, WEIGHT, WHOLE, Action, format_order, parse_order


@dataclass(frozen=True)
class Schedule:
    """The order of actions of every stage, for fixed numbers of stages, chunks and micro-batches."""

    kind: str
    """Registered name, or any name for an order made by hand."""
    stages: int
    """Stages p, at least 1."""
    chunks: int
    """Chunks per stage v, at least 1."""
    micro_batches: int
    """Micro-batches m, at least 1; where sequences pass in k parts, the m k parts."""
    orders: tuple[tuple[Action, ...], ...]
    """Actions of each stage, in the order the stage runs them."""
    stage_of_virtual: tuple[int, ...]
    """Stage of each virtual stage, in network order; the c-th virtual stage on a stage is its chunk c."""
    sequence_parts: int = 1
    """Parts k of each sequence: part r of micro-batch j has the number j k + r."""
    sends_block: bool = False
    """Whether a stage is busy until what it sends to another has arrived; otherwise messages occupy no stage."""

    def __hash__(self) -> int:
        # The orders follow from the rest for every registered kind, and hashing thousands of actions on each cache
        # look-up would cost more than the look-up saves.
        return hash((self.kind, self.stages, self.chunks, self.micro_batches, self.sequence_parts, self.sends_block))

    @property
    def virtual_stages(self) -> int:
        """Number of virtual stages, p * v."""
        return self.stages * self.chunks

    @cached_property
    def chunk_of_virtual(self) -> tuple[int, ...]:
        """Chunk of each virtual stage on its stage."""
        seen = [0] * self.stages
        chunks = []
        for stage in self.stage_of_virtual:
            chunks.append(seen[stage])
            seen[stage] += 1
        return tuple(chunks)

    @cached_property
    def virtual_of_chunk(self) -> tuple[tuple[int, ...], ...]:
        """Virtual stage of [stage][chunk]."""
        table: list[list[int]] = [[] for _ in range(self.stages)]
        for virtual, stage in enumerate(self.stage_of_virtual):
            table[stage].append(virtual)
        return tuple(tuple(row) for row in table)


def looped_placement(stages: int, chunks: int) -> tuple[int, ...]:
    """Stage of virtual stage k = chunk * stages + stage, the placement of every schedule but the V-shaped ones."""
    return tuple(virtual % stages for virtual in range(stages * chunks))


def format_schedule(schedule: Schedule) -> str:
    """One line of text per stage."""
    return "\n".join(format_order(order) for order in schedule.orders)


def parse_schedule(
    text: str, chunks: int, micro_batches: int, kind: str = "custom", stage_of_virtual: tuple[int, ...] | None = None
) -> Schedule:
    """A validated schedule of one line of text per stage; placement is looped unless given.

    Raises:
        InputError: a word is not an action, or the orders are not a schedule.
    """
    orders = []
    for stage, line in enumerate(line for line in text.splitlines() if line.strip()):
        try:
            orders.append(parse_order(line))
        except InputError as error:
            raise InputError(f"stage {stage}, {error}") from error
    placement = looped_placement(len(orders), chunks) if stage_of_virtual is None else stage_of_virtual
    schedule = Schedule(kind, len(orders), chunks, micro_batches, tuple(orders), placement)
    validate_schedule(schedule)
    return schedule


@lru_cache(maxsize=32)
def splits_backward(schedule: Schedule) -> bool:
    """Whether weight gradients are actions of their own somewhere, so that `B` is only the gradient of inputs."""
    return any(action.kind in (WEIGHT, WHOLE) for order in schedule.orders for action in order)


def releasing_kinds(schedule: Schedule) -> tuple[str, ...]:
    """Kinds of actions whose end frees what a micro-batch keeps: the weight gradient, where that is separate."""
    return (WEIGHT, WHOLE) if splits_backward(schedule) else (BACKWARD,)


def validate_schedule(schedule: Schedule) -> None:
    """Check that every stage runs each of its actions once, forward before backward before weight gradient.

    Whether the orders of different stages fit together (no deadlock) is found when the dependency graph is built.

    Raises:
        InputError: the message names the stage and marks the wrong step in its order.
    """
    if min(schedule.stages, schedule.chunks, schedule.micro_batches) < 1:
        raise InputError(
            f"schedule {schedule.kind}: stages, chunks and micro-batches must all be at least 1, got "
            f"{schedule.stages}, {schedule.chunks}, {schedule.micro_batches}"
        )
    if len(schedule.orders) != schedule.stages:
        raise InputError(f"schedule {schedule.kind}: {len(schedule.orders)} orders for {schedule.stages} stages")
    if sorted(schedule.stage_of_virtual) != sorted(looped_placement(schedule.stages, schedule.chunks)):
        raise InputError(
            f"schedule {schedule.kind}: stage_of_virtual must name each stage {schedule.chunks} times, "
            f"got {schedule.stage_of_virtual}"
        )
    has_weight = splits_backward(schedule)
    for stage, order in enumerate(schedule.orders):
        _validate_order(schedule, stage, order, has_weight)


_HAS_RUN = {FORWARD: 1, BACKWARD: 2, WEIGHT: 4, WHOLE: 8}
"""Bit of each kind in what has run of one chunk and micro-batch."""
_MAY_FOLLOW = {FORWARD: 0, BACKWARD: 1, WEIGHT: 1 | 2, WHOLE: 1}
"""What must have run of it, and nothing else, before a kind."""


def _validate_order(schedule: Schedule, stage: int, order: tuple[Action, ...], has_weight: bool) -> None:
    micro_batches = schedule.micro_batches
    done = [0] * (schedule.chunks * micro_batches)
    for step, (kind, chunk, micro_batch) in enumerate(order):
        problem = None
        if kind not in KINDS:
            problem = f"unknown kind {kind!r}"
        elif not 0 <= chunk < schedule.chunks:
            problem = f"there is no chunk {chunk} (chunks: {schedule.chunks})"
        elif not 0 <= micro_batch < micro_batches:
            problem = f"there is no micro-batch {micro_batch} (micro-batches: {micro_batches})"
        else:
            place = chunk * micro_batches + micro_batch
            if done[place] != _MAY_FOLLOW[kind]:
                problem = _wrong_turn(kind, done[place])
            done[place] |= _HAS_RUN[kind]
        if problem is not None:
            raise InputError(f"{_at_step(schedule, stage, step)}: {problem}")
    parts = (FORWARD, BACKWARD, WEIGHT) if has_weight else (FORWARD, BACKWARD)
    for part in parts:
        instead = 0 if part == FORWARD else _HAS_RUN[WHOLE]
        for place, ran in enumerate(done):
            if not ran & (_HAS_RUN[part] | instead):
                missing = Action(part, *divmod(place, micro_batches))
                raise InputError(f"{_at_step(schedule, stage, len(order))}: the order ends without {missing}")


def _wrong_turn(kind: str, done: int) -> str:
    """Why a kind may not run when this has."""
    if done & _HAS_RUN[kind]:
        return "it has already run"
    if kind in (BACKWARD, WHOLE) and not done & _HAS_RUN[FORWARD]:
        return "its forward has not run yet"
    if kind == WHOLE:
        return "its backward has already run"
    if done & _HAS_RUN[WHOLE]:
        return "its whole backward has already run"
    return "its backward has not run yet"


def _at_step(schedule: Schedule, stage: int, step: int) -> str:
    """Where a step is, with the neighbouring steps and the wrong one in brackets."""
    order = schedule.orders[stage]
    shown = str(order[step]) if step < len(order) else "end"
    before = format_order(order[max(0, step - 3) : step])
    after = format_order(order[step + 1 : step + 4])
    context = " ".join(part for part in (before, f"[{shown}]", after) if part)
    return f"schedule {schedule.kind}, stage {stage}, step {step} ({context})"
