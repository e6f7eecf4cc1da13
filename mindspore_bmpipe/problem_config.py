"""Settings and costs -> a :class:`~mindspore_bmpipe.problem_data.Problem`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from mindspore_bmpipe.config import AUTO, OVERLAP_TRANSFERS, Config, PinSpec, require_settled
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.problem_data import Pin, Problem, Run
from mindspore_bmpipe.schedule import lookup

_UNIT_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_RUN_RANGE = re.compile(r"(.+)\[(\d+)(?:-(\d+))?\]")


def resolve_pin(runs: Sequence[Run], pin: PinSpec, where: str = "pins") -> Pin:
    """Global unit indices of a pin written as indices, as a run's name, or as part of a run.

    Part of a run is written `body[0-3]`, counted from 0 within the run.

    Raises:
        InputError: no such run or units, or a name that several runs share.
    """
    first_of_run = 0
    named: dict[str, list[tuple[int, int]]] = {}
    for run in runs:
        named.setdefault(run.name, []).append((first_of_run, run.count))
        first_of_run += run.count
    if pin.units in named:
        name, low, high = pin.units, 0, None
    elif match := _UNIT_RANGE.fullmatch(pin.units):
        first = int(match.group(1))
        return Pin(first, int(match.group(2) or first), pin.stage)
    elif match := _RUN_RANGE.fullmatch(pin.units):
        name, low = match.group(1), int(match.group(2))
        high = int(match.group(3) or low)
    else:
        name, low, high = pin.units, 0, None
    if name not in named:
        raise InputError(f"{where}: {pin.units!r} is no unit range and no run; the runs are {', '.join(named)}")
    if len(named[name]) > 1:
        raise InputError(f"{where}: several runs are named {name}; pin by unit index instead")
    start, count = named[name][0]
    last = count - 1 if high is None else high
    if not low <= last < count:
        raise InputError(f"{where}: {pin.units!r} is outside run {name}, whose units are 0-{count - 1}")
    return Pin(start + low, start + last, pin.stage)


def usable_bytes(limits: tuple[int, ...], margin: float | None) -> tuple[int, ...]:
    """What a plan may use of limits so that it still fits if bytes turn out higher by a share at most.

    A peak is a maximum of sums of bytes, so it grows by no more than that share: `limit / (1 + margin)`, rounded down.
    """
    return tuple(math.floor(limit / (1 + margin)) for limit in limits) if margin else limits


def problem_from_config(
    runs: Sequence[Run],
    config: Config,
    stage_constant_bytes: int = 0,
    transfer_ms: float = 0.0,
    shared_saved_bytes: int = 0,
    forbidden_cuts: frozenset[int] = frozenset(),
) -> Problem:
    """The planning problem of evaluated costs and a CONFIG.

    `chunks` defaults to the fewest of the schedule, `schedule` to 1f1b for one chunk and to interleaved for more.

    `memory_margin` lowers the limits of the problem, see `usable_bytes`.

    `recompute_options` keeps the named options of each run; a run that has none of them keeps all of its own, so that
    embeddings and heads with a single option need not be named.

    Raises:
        InputError: a needed key is missing or not settled, or MindSpore refuses the schedule.
    """
    require_settled(config)
    stages, micro_batches, limit = config.stages, config.micro_batches, config.memory_limit
    missing = [key for key in ("stages", "micro_batches", "memory_limit") if getattr(config, key) is None]
    if stages is None or micro_batches is None or limit is None:
        raise InputError(f"config: {', '.join(missing)} is missing; a plan needs it")
    assert config.chunks != AUTO and config.schedule != AUTO
    _require_ranks(config, stages)
    chunks = int(config.chunks or lookup(config.schedule or "1f1b").min_chunks)
    schedule = config.schedule or ("1f1b" if chunks == 1 else "interleaved")
    kept = tuple(runs)
    if config.recompute_options is not None:
        kept = _with_options(kept, config.recompute_options)
    return Problem(
        runs=kept,
        schedule=schedule,
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        memory_limit_bytes=usable_bytes((limit,) * stages if isinstance(limit, int) else limit, config.memory_margin),
        stage_constant_bytes=stage_constant_bytes,
        shared_saved_bytes=shared_saved_bytes,
        transfer_ms=transfer_ms,
        forbidden_cuts=forbidden_cuts,
        stage_speeds=config.stage_speeds or (),
        sends_block=config.overlap is not None and OVERLAP_TRANSFERS not in config.overlap,
        pins=tuple(resolve_pin(kept, pin, f"pins[{index}]") for index, pin in enumerate(config.pins or ())),
    )


def _require_ranks(config: Config, stages: int) -> None:
    """Refuse a cluster that MindSpore refuses; its size is known only if the data-parallel degree is given."""
    if config.data_parallel is None:
        return
    ranks = stages * config.data_parallel * (config.tensor_parallel or 1) * (config.context_parallel or 1)
    if ranks not in (1, 2, 4) and ranks % 8:
        raise InputError(
            f"config: {stages} stages with these parallel degrees take {ranks} ranks, and MindSpore takes 1, 2, 4 or a "
            "multiple of 8; change stages or data_parallel, or leave data_parallel out to plan without a cluster"
        )


def _with_options(runs: tuple[Run, ...], names: tuple[str, ...]) -> tuple[Run, ...]:
    known = {option.name for run in runs for option in run.options}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(
            f"recompute_options: no unit has an option {', '.join(unknown)}; the options are {', '.join(sorted(known))}"
        )
    result = []
    for run in runs:
        options = tuple(option for option in run.options if option.name in names) or run.options
        result.append(replace(run, options=options))
    return tuple(result)
