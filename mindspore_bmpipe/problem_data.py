"""What every planner is given: runs of units, a schedule and limits; validated when made.

Plain integers and floats only. Units are in network order and grouped in runs of equal costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule import Schedule, make_schedule


@dataclass(frozen=True)
class Option:
    """One way to recompute a unit."""

    name: str
    """Name within the run, such as `none` or `full`."""
    saved_bytes: int
    """Activation bytes a unit keeps per micro-batch in flight, at least 0."""
    extra_backward_ms: float
    """Time recomputation adds to the backward of a unit, at least 0."""
    working_set_bytes: int = 0
    """Bytes alive only while a unit's backward runs, at least 0."""
    repeated_ms: float | None = None
    """What a separate weight gradient runs again of a unit, if nothing before it in its chunk runs again; at least 0,
    and `None` for all of `extra_backward_ms`. Only schedules that split backwards need it."""
    repeated_after_ms: float | None = None
    """The same if something before it does, so that gradients of the unit's inputs are made again too; at least that,
    and `None` for all of `extra_backward_ms` and all of the backward but its weight gradients."""


@dataclass(frozen=True)
class Run:
    """Neighbouring units of equal costs."""

    name: str
    """Name for reports; runs that are not neighbours may share one."""
    count: int
    """Units in the run, at least 1."""
    forward_ms: float
    """Forward time of one unit and one micro-batch, at least 0."""
    backward_ms: float
    """Backward time of one unit without recomputation, at least 0."""
    static_bytes: int
    """Parameters, gradients and optimizer state of one unit on one device, at least 0."""
    options: tuple[Option, ...]
    """Ways to recompute a unit, at least one, with distinct names."""
    trainable: bool = True
    """Whether a unit has trainable parameters."""
    weight_gradient_ms: float | None = None
    """Part of `backward_ms` that makes the gradients of weights, which some schedules run apart; `None` for half."""
    update_bytes: int = 0
    """What one unit needs beyond its static bytes while weights are updated, when no micro-batch is in flight; at least
    0. Gradients are scaled into new tensors, all there at once."""

    gather_ms: float = 0.0
    """What gathering the weights of one unit adds to the start of a step, before its stage computes anything; at least
    0. Planners leave it out of the step time."""
    reduce_ms: float = 0.0
    """What summing its gradients over ranks adds to the end of a step, after the last backward of its stage; at least
    0. Planners leave it out of the step time."""

    @property
    def split_weight_ms(self) -> float:
        """Time of the weight gradients of one unit where the schedule runs them apart."""
        return self.backward_ms / 2 if self.weight_gradient_ms is None else self.weight_gradient_ms


@dataclass(frozen=True)
class Pin:
    """Units tied to one stage (any of its chunks)."""

    first_unit: int
    """First unit, 0 to units - 1."""
    last_unit: int
    """Last unit, inclusive."""
    stage: int
    """Stage they must be on, 0 to stages - 1."""


@dataclass(frozen=True)
class Problem:
    """One planning problem; validated when made."""

    runs: tuple[Run, ...]
    """Runs in network order, at least one."""
    schedule: str
    """Name of a registered schedule."""
    stages: int
    """Pipeline stages p, at least 1."""
    chunks: int
    """Chunks per stage v, at least 1."""
    micro_batches: int
    """Micro-batches per step m, at least 1."""
    memory_limit_bytes: tuple[int, ...]
    """Bytes a plan may use, one per stage, each above 0."""
    stage_constant_bytes: int = 0
    """Bytes every stage uses whatever is placed on it, at least 0."""
    shared_saved_bytes: int = 0
    """Bytes every stage keeps once per micro-batch in flight whatever is placed on it, at least 0: what many units
    read, such as a mask."""
    transfer_ms: float = 0.0
    """Time of one transfer between virtual stages on different stages, at least 0; unused if `cut_transfers_ms` is not
    empty."""
    forbidden_cuts: frozenset[int] = frozenset()
    """Each entry u keeps units u and u + 1 in one virtual stage; 0 to units - 2."""
    pins: tuple[Pin, ...] = ()
    """Units tied to stages."""
    cut_transfers_ms: tuple[tuple[float, ...], ...] = ()
    """Time of one transfer between virtual stages k and k + 1 if they are cut after unit u, entry [k][u], each at least
    0; empty for `transfer_ms` everywhere. What is sent depends on the cut, how fast on where the stages are."""
    stage_speeds: tuple[float, ...] = ()
    """Speed of each stage's device, above 0: what runs there takes the time of its units over this. Empty for all 1."""

    sends_block: bool = False
    """Whether a stage is busy while it sends to another; otherwise messages occupy no stage."""

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def units(self) -> int:
        """Number of units."""
        return sum(run.count for run in self.runs)

    @property
    def virtual_stages(self) -> int:
        """Number of virtual stages, p * v."""
        return self.stages * self.chunks

    @property
    def first_units(self) -> tuple[int, ...]:
        """First unit of each run, and the number of units at the end."""
        firsts = [0]
        for run in self.runs:
            firsts.append(firsts[-1] + run.count)
        return tuple(firsts)

    @property
    def ideal_ms(self) -> float:
        """Time of a step without any bubble or recomputation: micro-batches * (forward + backward) / sum of speeds."""
        work = sum(run.count * (run.forward_ms + run.backward_ms) for run in self.runs)
        return self.micro_batches / sum(self.speeds) * work

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each stage, written out."""
        return self.stage_speeds or (1.0,) * self.stages


def schedule_of(problem: Problem) -> Schedule:
    """The problem's schedule (cached)."""
    return make_schedule(
        problem.schedule, problem.stages, problem.chunks, problem.micro_batches, sends_block=problem.sends_block
    )


def _validate(problem: Problem) -> None:
    if not problem.runs:
        raise InputError("runs: there are none; give at least one run of units")
    for index, run in enumerate(problem.runs):
        _validate_run(f"runs[{index}] ({run.name})", run)
    _require_integer("stages", problem.stages, 1)
    _require_integer("chunks", problem.chunks, 1)
    _require_integer("micro_batches", problem.micro_batches, 1)
    _require_integer("stage_constant_bytes", problem.stage_constant_bytes, 0)
    _require_integer("shared_saved_bytes", problem.shared_saved_bytes, 0)
    _require_time("transfer_ms", problem.transfer_ms)
    _validate_cut_transfers(problem)
    if problem.virtual_stages > problem.units:
        raise InputError(
            f"stages: {problem.stages} stages of {problem.chunks} chunk(s) need at least {problem.virtual_stages} "
            "units, "
            f"the network has {problem.units}; lower stages or chunks, or split the network into more units"
        )
    trainable = sum(run.count for run in problem.runs if run.trainable)
    if trainable < problem.virtual_stages:
        raise InputError(
            f"stages: MindSpore needs a trainable weight on every one of {problem.stages} stages of {problem.chunks} "
            f"chunk(s), and {trainable} of the {problem.units} units have one; lower stages or chunks"
        )
    if problem.stages > 1 and problem.micro_batches == 1:
        raise InputError(
            "micro_batches: MindSpore refuses a pipeline with 1 micro-batch; give at least 2, smaller ones if need be"
        )
    schedule_of(problem)
    if len(problem.memory_limit_bytes) != problem.stages:
        raise InputError(
            f"memory_limit_bytes: {len(problem.memory_limit_bytes)} limits for {problem.stages} stages; "
            "give one per stage"
        )
    if problem.stage_speeds and len(problem.stage_speeds) != problem.stages:
        raise InputError(
            f"stage_speeds: {len(problem.stage_speeds)} speeds for {problem.stages} stages; give one per stage, or none"
        )
    for stage, speed in enumerate(problem.stage_speeds):
        _require_time(f"stage_speeds[{stage}]", speed)
        if speed <= 0:
            raise InputError(f"stage_speeds[{stage}]: {speed!r} is not allowed; give a number above 0")
    for stage, limit in enumerate(problem.memory_limit_bytes):
        _require_integer(f"memory_limit_bytes[{stage}]", limit, 1)
    if problem.ideal_ms <= 0:
        raise InputError("runs: all forward and backward times are 0; give the times of the units")
    for cut in problem.forbidden_cuts:
        if isinstance(cut, bool) or not isinstance(cut, int) or not 0 <= cut < problem.units - 1:
            raise InputError(f"forbidden_cuts: {cut!r} is no cut; give the unit before it, 0 to {problem.units - 2}")
    for index, pin in enumerate(problem.pins):
        if not 0 <= pin.first_unit <= pin.last_unit < problem.units:
            raise InputError(
                f"pins[{index}]: units {pin.first_unit}-{pin.last_unit} do not exist; give a range within "
                f"0-{problem.units - 1}"
            )
        if not 0 <= pin.stage < problem.stages:
            raise InputError(f"pins[{index}]: there is no stage {pin.stage}; give 0 to {problem.stages - 1}")


def _validate_cut_transfers(problem: Problem) -> None:
    table = problem.cut_transfers_ms
    if not table:
        return
    rows, columns = problem.virtual_stages - 1, problem.units - 1
    if len(table) != rows or any(len(row) != columns for row in table):
        raise InputError(
            f"cut_transfers_ms: give {rows} rows, one for each virtual stage but the last, of {columns} times, one for "
            "each unit but the last; or leave it empty"
        )
    for k, row in enumerate(table):
        for unit, time in enumerate(row):
            _require_time(f"cut_transfers_ms[{k}][{unit}]", time)


def _validate_run(where: str, run: Run) -> None:
    _require_integer(f"{where}.count", run.count, 1)
    _require_time(f"{where}.forward_ms", run.forward_ms)
    _require_time(f"{where}.backward_ms", run.backward_ms)
    _require_time(f"{where}.gather_ms", run.gather_ms)
    _require_time(f"{where}.reduce_ms", run.reduce_ms)
    if run.weight_gradient_ms is not None:
        _require_time(f"{where}.weight_gradient_ms", run.weight_gradient_ms)
        if run.weight_gradient_ms > run.backward_ms:
            raise InputError(
                f"{where}.weight_gradient_ms: {run.weight_gradient_ms} is more than the backward time it is part of "
                f"({run.backward_ms})"
            )
    _require_integer(f"{where}.static_bytes", run.static_bytes, 0)
    _require_integer(f"{where}.update_bytes", run.update_bytes, 0)
    if not run.options:
        raise InputError(f"{where}.options: there are none; give at least the option of recomputing nothing")
    names = [option.name for option in run.options]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"{where}.options: {', '.join(repeated)} appears more than once; names must be distinct")
    for option in run.options:
        place = f"{where}.options ({option.name})"
        _require_integer(f"{place}.saved_bytes", option.saved_bytes, 0)
        _require_time(f"{place}.extra_backward_ms", option.extra_backward_ms)
        _require_integer(f"{place}.working_set_bytes", option.working_set_bytes, 0)
        for name in ("repeated_ms", "repeated_after_ms"):
            if getattr(option, name) is not None:
                _require_time(f"{place}.{name}", getattr(option, name))


def _require_integer(where: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InputError(f"{where}: {value!r} is not allowed; give an integer of at least {minimum}")


def _require_time(where: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InputError(f"{where}: {value!r} is not allowed; give a finite number of milliseconds, at least 0")
