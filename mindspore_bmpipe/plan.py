"""The plan: what goes to which stage and what is recomputed, with its proof; as data and as a file.

A plan file is one JSON object with exactly the keys of :class:`Plan`. Files of another version, with missing or
unknown keys, or edited so that they contradict themselves are refused with the place and the remedy.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspore_bmpipe.errors import InputError

PLAN_FORMAT = "bmpipe-plan/1"


@dataclass(frozen=True)
class UnitPlan:
    """Where one unit goes and how it is recomputed."""

    name: str
    """Name of the unit: the path of its first cell (``blocks.3``) or the name given in a layer table."""
    run: str
    """Name shared by all neighbouring units of equal cost; the key under ``units`` in the JSON summary."""
    cells: tuple[str, ...]
    """Paths of the cells that get ``pipeline_stage``, relative to the planned network; empty for layer tables."""
    stage: int
    """Pipeline stage, 0-based."""
    chunk: int
    """Chunk of the stage (virtual pipeline), 0-based."""
    option: str
    """Name of the recompute option chosen."""
    recompute_cells: tuple[str, ...]
    """Paths of the cells on which ``Cell.recompute()`` is called."""
    recompute_primitives: tuple[str, ...]
    """Paths of primitives held as cell attributes (``blocks.3.attention.softmax``) that are recomputed."""
    parameters: int
    """Number of trainable parameter tensors inside the unit; 0 for layer tables."""
    parameter_elements: int
    """Number of elements of these tensors, to recognise a network of other sizes; 0 for layer tables."""
    recompute_communication: tuple[str, ...] = ()
    """Paths of cells whose own primitives are told ``recompute_comm_op``: what the compiler inserts around them to
    exchange shares of tensors between ranks runs again."""


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk of one stage."""

    chunk: int
    """Chunk index, 0-based."""
    units: Mapping[str, Mapping[str, int]]
    """Run name -> option name -> number of units."""
    forward_ms: float
    """Forward time of one micro-batch."""
    backward_ms: float
    """Backward time of one micro-batch, recomputation included."""


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage."""

    stage: int
    """Stage index, 0-based."""
    peak_bytes: int
    """Predicted peak memory of one device of the stage."""
    static_bytes: int
    """Share of the peak that does not depend on micro-batches: weights, gradients, optimizer state."""
    limit_bytes: int
    """Bytes the plan was allowed: the memory limit, less what `memory_margin` keeps free of it."""
    chunks: tuple[ChunkPlan, ...]
    """Chunks in order."""


@dataclass(frozen=True)
class BubblePlan:
    """Idle share of the step, ``step time / ideal time - 1``, and its parts, which add up to ``total``."""

    total: float
    """Whole bubble."""
    preparation: float
    """Warm-up and cool-down: (stages - 1) / (chunks * micro-batches)."""
    imbalance: float
    """What uneven stages add."""
    recompute: float
    """What recomputation adds."""
    communication: float
    """What transfers between stages add."""


@dataclass(frozen=True)
class SolverReport:
    """How the plan was found and what was proved about it."""

    planner: str
    """Registered name of the planner."""
    status: str
    """``optimal`` or ``feasible``."""
    step_time_ms: float
    """Exact step time of the schedule."""
    bound_ms: float
    """Proved lower bound of the step time under the same costs."""
    gap: float
    """``(step_time_ms - bound_ms) / step_time_ms``."""
    solve_seconds: float
    """Wall time of the planner. With bound and gap, where the time limit ended the proof, all that differs between
    identical runs."""
    message: str
    """What the planner has to say about its answer; may be empty."""
    stopped_by: str = "proof"
    """What ended the planner: ``proof``, ``work``, or ``time`` if the wall clock ended even its search, so that another
    run may give another plan."""


@dataclass(frozen=True)
class StageLoad:
    """What one stage computes with and holds, beside the times under ``stages``: all that a simulation needs."""

    weight_ms: tuple[float, ...]
    """Part of each chunk's backward that makes weight gradients, where the schedule can run it apart; else 0."""
    saved_bytes: tuple[int, ...]
    """Bytes each chunk keeps for one micro-batch, from its forward until its backward has ended."""
    shared_bytes: int
    """Bytes kept for all micro-batches together, all step long."""
    working_set_bytes: int
    """Bytes alive only while a backward runs."""
    update_bytes: int = 0
    """Bytes alive only while weights are updated, when no micro-batch is in flight."""
    gather_ms: float = 0.0
    """Time before the first forward in which ranks gather shared weights; no part of the step time."""
    reduce_ms: float = 0.0
    """Time after the last backward in which ranks add up gradients; no part of the step time."""
    repeated_ms: tuple[float, ...] = ()
    """What weight gradients of each chunk run again where they run apart; empty if the schedule never does that."""


@dataclass(frozen=True)
class Plan:
    """A complete plan."""

    format: str
    """Always :data:`PLAN_FORMAT`."""
    fingerprint: str
    """Digest of the planned network's structure (units, parameter shapes, operations), or of the layer table."""
    source: str
    """What was planned, for people: a class name or a file name without its folder."""
    settings: Mapping[str, Any]
    """Settings the plan was made with: the CONFIG keys that matter, with their resolved values."""
    solver: SolverReport
    """How good the plan is."""
    bubble: BubblePlan
    """Where the idle time is."""
    stages: tuple[StagePlan, ...]
    """One entry per stage."""
    units: tuple[UnitPlan, ...]
    """One entry per unit, in network order."""
    transfer_ms: tuple[float, ...]
    """One transfer between each virtual stage and the next, in either direction; without meaning where both are on one
    stage."""
    loads: tuple[StageLoad, ...]
    """One entry per stage."""
    notes: tuple[str, ...]
    """Assumptions a reader should know (baked-in axes, assumed primitives)."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file; raises :class:`InputError` when the place cannot be written."""
        write_text_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file written by :meth:`Plan.save`.

    Raises:
        InputError: the file cannot be read, is not JSON, has another version, or has missing, unknown or
            ill-typed keys, or stages that contradict each other.
    """
    name = os.fspath(path)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{name}: cannot read the plan file ({error}); give the path of a file bmpipe wrote"
        ) from error
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{name}: not valid JSON at line {error.lineno} ({error.msg}); write the plan again"
        ) from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != PLAN_FORMAT:
        raise InputError(f"{name}: format is {found!r}, this version reads {PLAN_FORMAT!r}; plan the network again")
    plan = _decode(Plan, document, name)
    _validate(plan, name)
    return typing.cast(Plan, plan)


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to a temporary file beside ``path`` and rename it, so that no reader sees half a file.

    Raises:
        InputError: the folder is missing or cannot be written.
    """
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Like :func:`write_text_atomically`, for bytes."""
    target = Path(path)
    temporary: str | None = None
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "is a folder")
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise InputError(f"{target}: cannot be written ({error.strerror}); choose another path with -o") from error


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Build ``kind`` from decoded JSON, refusing anything that is not exactly of its shape."""
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), value, where)
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise InputError(f"{where}: must be a list, got {type(value).__name__}; plan the network again")
        return tuple(_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, dict):
            raise InputError(f"{where}: must be an object, got {type(value).__name__}; plan the network again")
        decoded = {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
        return decoded
    if kind is Any:
        return value
    wanted = (int, float) if kind is float else (kind,)
    if not isinstance(value, wanted) or isinstance(value, bool) is not (kind is bool):
        raise InputError(f"{where}: must be {kind.__name__}, got {value!r}; plan the network again")
    if kind is float and not math.isfinite(value):
        raise InputError(f"{where}: must be finite, got {value!r}; plan the network again")
    return kind(value)


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{where}: must be an object, got {type(value).__name__}; plan the network again")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in value]
    unknown = [name for name in value if name not in hints]
    if missing or unknown:
        raise InputError(f"{where}: missing keys {missing}, unknown keys {unknown}; plan the network again")
    given = [name for name in names if name in value]
    return kind(**{name: _decode(hints[name], value[name], f"{where}.{name}") for name in given})


def _validate(plan: Plan, where: str) -> None:
    """Refuse a file whose parts contradict each other, as hand edits leave it."""
    if [stage.stage for stage in plan.stages] != list(range(len(plan.stages))) or not plan.stages:
        raise InputError(f"{where}: stages are not numbered 0..{len(plan.stages) - 1}; plan the network again")
    listed: dict[tuple[int, int], dict[str, dict[str, int]]] = {}
    for index, unit in enumerate(plan.units):
        if not 0 <= unit.stage < len(plan.stages):
            raise InputError(f"{where}.units[{index}].stage: {unit.stage} is not a stage of this plan")
        options = listed.setdefault((unit.stage, unit.chunk), {}).setdefault(unit.run, {})
        options[unit.option] = options.get(unit.option, 0) + 1
    for stage in plan.stages:
        for chunk in stage.chunks:
            summary = {run: dict(options) for run, options in chunk.units.items()}
            if summary != listed.pop((stage.stage, chunk.chunk), {}):
                raise InputError(
                    f"{where}.stages[{stage.stage}].chunks[{chunk.chunk}]: its units differ from the list under "
                    "'units'; a plan edited by hand is not applied, plan the network again with pins instead"
                )
    if len(plan.loads) != len(plan.stages):
        raise InputError(f"{where}: {len(plan.loads)} loads for {len(plan.stages)} stages; plan the network again")
    if listed:
        raise InputError(f"{where}: units are placed on chunks that 'stages' does not list: {sorted(listed)}")
