"""A pipeline schedule as plain data, and the check that it is one."""

from __future__ import annotations

from dataclasses import dataclass

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

    def __hash__(self) -> int:
        # The orders follow from the rest for every registered kind, and hashing thousands of actions on each cache
        # look-up would cost more than the look-up saves.
        return hash((self.kind, self.stages, self.chunks, self.micro_batches, self.sequence_parts))

    @property
    def virtual_stages(self) -> int:
        """Number of virtual stages, p * v."""
        return self.stages * self.chunks

    @property
    def chunk_of_virtual(self) -> tuple[int, ...]:
        """Chunk of each virtual stage on its stage."""
        seen = [0] * self.stages
        chunks = []
        for stage in self.stage_of_virtual:
            chunks.append(seen[stage])
            seen[stage] += 1
        return tuple(chunks)

    @property
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


def splits_backward(schedule: Schedule) -> bool:
    """Whether weight gradients are actions of their own somewhere, so that `B` is only the gradient of inputs."""
    return any(action.kind in (WEIGHT, WHOLE) for order in schedule.orders for action in order)


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


def _validate_order(schedule: Schedule, stage: int, order: tuple[Action, ...], has_weight: bool) -> None:
    done: set[Action] = set()
    for step, action in enumerate(order):
        problem = None
        if action.kind not in KINDS:
            problem = f"unknown kind {action.kind!r}"
        elif not 0 <= action.chunk < schedule.chunks:
            problem = f"there is no chunk {action.chunk} (chunks: {schedule.chunks})"
        elif not 0 <= action.micro_batch < schedule.micro_batches:
            problem = f"there is no micro-batch {action.micro_batch} (micro-batches: {schedule.micro_batches})"
        elif action in done:
            problem = "it has already run"
        elif action.kind in (BACKWARD, WHOLE) and action._replace(kind=FORWARD) not in done:
            problem = "its forward has not run yet"
        elif action.kind == WHOLE and action._replace(kind=BACKWARD) in done:
            problem = "its backward has already run"
        elif action.kind in (BACKWARD, WEIGHT) and action._replace(kind=WHOLE) in done:
            problem = "its whole backward has already run"
        elif action.kind == WEIGHT and action._replace(kind=BACKWARD) not in done:
            problem = "its backward has not run yet"
        if problem is not None:
            raise InputError(f"{_at_step(schedule, stage, step)}: {problem}")
        done.add(action)
    kinds = (FORWARD, BACKWARD, WEIGHT) if has_weight else (FORWARD, BACKWARD)
    for kind in kinds:
        for chunk in range(schedule.chunks):
            for micro_batch in range(schedule.micro_batches):
                action = Action(kind, chunk, micro_batch)
                whole = kind != FORWARD and action._replace(kind=WHOLE) in done
                if action not in done and not whole:
                    raise InputError(f"{_at_step(schedule, stage, len(order))}: the order ends without {action}")


def _at_step(schedule: Schedule, stage: int, step: int) -> str:
    """Where a step is, with the neighbouring steps and the wrong one in brackets."""
    order = schedule.orders[stage]
    shown = str(order[step]) if step < len(order) else "end"
    before = format_order(order[max(0, step - 3) : step])
    after = format_order(order[step + 1 : step + 4])
    context = " ".join(part for part in (before, f"[{shown}]", after) if part)
    return f"schedule {schedule.kind}, stage {stage}, step {step} ({context})"
