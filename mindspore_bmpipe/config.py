"""The CONFIG file: what the user asks of the planner, read and checked but not yet combined with costs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from mindspore_bmpipe.errors import InputError

AUTO = "auto"
"""Value of a key that leaves the choice to the planner."""

MINDSPORE_SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "interleaved_less_memory",
    "seqpipe",
    "seqvpp",
    "seqsmartvpp",
    "zero_bubble_v",
)
"""Every pipeline schedule MindSpore can compile."""

OVERLAP_WEIGHTS = "weights"
"""Gathers of weights that optimizer sharding has spread over ranks."""
OVERLAP_GRADIENTS = "gradients"
"""Sums of the gradients of weights over ranks."""
OVERLAP_TENSOR_PARALLEL = "tensor_parallel"
"""Exchanges between the ranks that share operations."""
OVERLAP_TRANSFERS = "transfers"
"""Messages between pipeline stages."""
OVERLAPS = (OVERLAP_WEIGHTS, OVERLAP_GRADIENTS, OVERLAP_TENSOR_PARALLEL, OVERLAP_TRANSFERS)
"""Kinds of communication that may run beside computation."""

_BYTE_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000 ** (power + 1) for power, prefix in enumerate("kmgt")},
    **{f"{prefix}ib": 1024 ** (power + 1) for power, prefix in enumerate("kmgt")},
}
_BYTES_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_PERCENT_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_BYTES_HELP = (
    "write a positive number of bytes or a size such as 58GB, 56000MB (powers of 1000), 56000MiB (powers of 1024)"
)


@dataclass(frozen=True)
class PinSpec:
    """Units the user ties to one stage, as written; resolved once the runs are known."""

    units: str
    """A unit index (`5`), an inclusive range of indices (`0-3`), the name of a run, or part of a run (`body[0-3]`)."""
    stage: int
    """Stage the units must be on, 0 to stages - 1."""


@dataclass(frozen=True)
class Config:
    """One CONFIG file. `None` always means that the key was not given."""

    stages: int | None = None
    """Pipeline stages, at least 1."""
    chunks: int | str | None = None
    """Virtual stages per stage, at least 1, or `auto`."""
    micro_batches: int | None = None
    """Micro-batches per step, at least 1."""
    schedule: str | None = None
    """One of `MINDSPORE_SCHEDULES`, or `auto`."""
    memory_limit: int | tuple[int, ...] | None = None
    """Bytes a plan may use per device: one size for all stages, or one per stage."""
    memory_margin: float | None = None
    """Share, from 0 to below 1, by which all bytes may turn out higher than planned with without exceeding a limit."""
    hardware: str | None = None
    """Name of a file in `configs/hardware`, or a path to one."""
    micro_batch_size: int | str | None = None
    """Samples of one micro-batch on one data-parallel rank, at least 1, or `auto`."""
    sequence_length: int | None = None
    """Tokens per sample, at least 1."""
    data_parallel: int | None = None
    """Data-parallel ranks, at least 1."""
    tensor_parallel: int | None = None
    """Tensor-parallel ranks, at least 1."""
    expert_parallel: int | None = None
    """Data- and context-parallel ranks among which experts are shared out, at least 1; divides their number."""
    context_parallel: int | None = None
    """Ranks that share the tokens of each sample, at least 1."""
    all_to_all: bool | None = None
    """Whether layouts change by `AlltoAll` where that does (MindSpore's `enable_alltoall`)."""
    optimizer_shard_level: int | None = None
    """What data-parallel ranks share, 0 (nothing) to 3 (MindSpore `parallel_optimizer` levels)."""
    overlap: tuple[str, ...] | None = None
    """Kinds of communication, of `OVERLAPS`, that run beside computation; transfers only by default."""
    recompute_options: tuple[str, ...] | None = None
    """Names of the recompute options the planner may use."""
    pins: tuple[PinSpec, ...] | None = None
    """Units tied to stages."""
    stage_speeds: tuple[float, ...] | None = None
    """Speed of each stage's devices relative to those the costs are for, one per stage, above 0."""
    time_limit: float | None = None
    """Seconds the planner may take, greater than 0."""
    seed: int | None = None
    """Seed of everything random in the planner, at least 0."""


def parse_bytes(value: object, where: str = "size") -> int:
    """Bytes of `58GB`, `56000MiB` or a plain integer.

    A size with a fraction of a byte is rounded down, so a limit is never read as more than was written.

    Raises:
        InputError: not a positive size; the message starts with `where`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _BYTES_PATTERN.fullmatch(value.strip())):
        unit = match.group(2).lower() or "b"
        if unit not in _BYTE_UNITS:
            raise InputError(f"{where}: unknown unit in {value!r}; {_BYTES_HELP}")
        size = math.floor(Fraction(match.group(1)) * _BYTE_UNITS[unit])
    else:
        raise InputError(f"{where}: {value!r} is not a size; {_BYTES_HELP}")
    if size <= 0:
        raise InputError(f"{where}: {value!r} is not a positive size; {_BYTES_HELP}")
    return size


def _integer(minimum: int, maximum: int | None = None, auto: bool = False) -> Callable[[object, str], int | str]:
    allowed = f"an integer of at least {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"
    allowed += f", or {AUTO}" if auto else ""

    def parse(value: object, where: str) -> int | str:
        if auto and value == AUTO:
            return AUTO
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{where}: {value!r} is not allowed; give {allowed}")
        if value < minimum or (maximum is not None and value > maximum):
            raise InputError(f"{where}: {value} is out of range; give {allowed}")
        return value

    return parse


def _schedule(value: object, where: str) -> str:
    name = value.strip().lower() if isinstance(value, str) else value
    if name == AUTO or name in MINDSPORE_SCHEDULES:
        return str(name)
    raise InputError(
        f"{where}: MindSpore has no pipeline schedule {value!r}; it has {', '.join(MINDSPORE_SCHEDULES)} "
        f"(or give {AUTO})"
    )


def _memory_limit(value: object, where: str) -> int | tuple[int, ...]:
    if not isinstance(value, list):
        return parse_bytes(value, where)
    if not value:
        raise InputError(f"{where}: the list is empty; give one size, or one size per stage")
    return tuple(parse_bytes(entry, f"{where}[{index}]") for index, entry in enumerate(value))


def _share(value: object, where: str) -> float:
    help_text = "give a share from 0 to below 1, such as 0.05 or 5%"
    if isinstance(value, str) and (match := _PERCENT_PATTERN.fullmatch(value.strip())):
        share = float(Fraction(match.group(1)) / 100)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        share = float(value)
    else:
        raise InputError(f"{where}: {value!r} is not allowed; {help_text}")
    if not 0 <= share < 1:
        raise InputError(f"{where}: {value!r} is out of range; {help_text}")
    return share


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: {value!r} is not a name; give a non-empty text")
    return value


def _names(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(
            f"{where}: {value!r} is not allowed; give a list of option names, such as [none, select, full]"
        )
    names = tuple(_text(entry, f"{where}[{index}]") for index, entry in enumerate(value))
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"{where}: {', '.join(repeated)} is listed more than once; list each option once")
    return names


def _overlaps(value: object, where: str) -> tuple[str, ...]:
    wanted = f"give a list of {', '.join(OVERLAPS)}, or [] for none"
    if not isinstance(value, list):
        raise InputError(f"{where}: {value!r} is not allowed; {wanted}")
    for index, entry in enumerate(value):
        if entry not in OVERLAPS:
            raise InputError(f"{where}[{index}]: {entry!r} is no kind of communication; {wanted}")
    return tuple(kind for kind in OVERLAPS if kind in value)


def _pins(value: object, where: str) -> tuple[PinSpec, ...]:
    if not isinstance(value, list):
        raise InputError(f'{where}: {value!r} is not allowed; give a list such as [{{units: "0-3", stage: 0}}]')
    pins = []
    for index, entry in enumerate(value):
        place = f"{where}[{index}]"
        if not isinstance(entry, dict) or set(entry) != {"units", "stage"}:
            raise InputError(f"{place}: {entry!r} is not allowed; a pin has exactly the keys units and stage")
        units = entry["units"]
        if isinstance(units, bool) or not isinstance(units, int | str):
            raise InputError(
                f"{place}.units: {units!r} is not allowed; give an index (5), a range (0-3), a run's name, or body[0-3]"
            )
        stage = _integer(0)(entry["stage"], f"{place}.stage")
        assert isinstance(stage, int)
        pins.append(PinSpec(units=str(units).strip(), stage=stage))
    return tuple(pins)


def _speeds(value: object, where: str) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: {value!r} is not allowed; give one number above 0 per stage, such as [1, 1, 0.8]")
    for index, entry in enumerate(value):
        number = isinstance(entry, int | float) and not isinstance(entry, bool)
        if not number or not math.isfinite(entry) or entry <= 0:
            raise InputError(f"{where}[{index}]: {entry!r} is not allowed; give a number above 0")
    return tuple(float(entry) for entry in value)


def _seconds(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{where}: {value!r} is not allowed; give a number of seconds greater than 0")
    return float(value)


def _switch(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{where}: {value!r} is not allowed; give true or false")
    return value


_PARSERS: dict[str, Callable[[object, str], Any]] = {
    "stages": _integer(1),
    "chunks": _integer(1, auto=True),
    "micro_batches": _integer(1),
    "schedule": _schedule,
    "memory_limit": _memory_limit,
    "memory_margin": _share,
    "hardware": _text,
    "micro_batch_size": _integer(1, auto=True),
    "sequence_length": _integer(1),
    "data_parallel": _integer(1),
    "tensor_parallel": _integer(1),
    "expert_parallel": _integer(1),
    "context_parallel": _integer(1),
    "all_to_all": _switch,
    "optimizer_shard_level": _integer(0, 3),
    "overlap": _overlaps,
    "recompute_options": _names,
    "pins": _pins,
    "stage_speeds": _speeds,
    "time_limit": _seconds,
    "seed": _integer(0, 2**31 - 1),
}
assert set(_PARSERS) == {field.name for field in fields(Config)}


def parse_config(mapping: Mapping[str, object], where: str = "config") -> Config:
    """A checked `Config` of a mapping; a key whose value is null counts as not given.

    Raises:
        InputError: an unknown key or a wrong value; the message names `where`, the key and what is allowed.
    """
    if not isinstance(mapping, Mapping):
        raise InputError(f"{where}: expected a mapping of keys, got {type(mapping).__name__}; {_keys_help()}")
    unknown = [str(key) for key in mapping if key not in _PARSERS]
    if unknown:
        raise InputError(f"{where}: unknown key {', '.join(unknown)}; {_keys_help()}")
    values = {key: _PARSERS[key](value, f"{where}: {key}") for key, value in mapping.items() if value is not None}
    config = Config(**values)
    limits = config.memory_limit
    if isinstance(limits, tuple) and config.stages is not None and len(limits) != config.stages:
        raise InputError(
            f"{where}: memory_limit has {len(limits)} sizes for {config.stages} stages; give one size, or one per stage"
        )
    speeds = config.stage_speeds
    if speeds is not None and config.stages is not None and len(speeds) != config.stages:
        raise InputError(
            f"{where}: stage_speeds has {len(speeds)} speeds for {config.stages} stages; give one per stage"
        )
    return config


def _keys_help() -> str:
    return f"the keys are {', '.join(_PARSERS)}"


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML that refuses a mapping with the same key twice, which YAML would silently resolve to the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise InputError(f"line {line}: the key {key} is given twice; keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def load_config(path: str | Path) -> Config:
    """Read a CONFIG YAML file.

    Raises:
        InputError: the file cannot be read, is not YAML, or holds something `parse_config` refuses.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read the configuration ({error}); give a YAML file") from error
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    return parse_config({} if data is None else data, str(path))


def require_settled(config: Config, where: str = "config") -> None:
    """Refuse what is still left to the planner where one problem is posed.

    Raises:
        InputError: an `auto` value.
    """
    for key, remedy in (
        ("chunks", "give a number"),
        ("schedule", f"give one of {', '.join(MINDSPORE_SCHEDULES)}"),
        ("micro_batch_size", "give a number"),
    ):
        if getattr(config, key) == AUTO:
            raise InputError(f"{where}: {key}: {AUTO} is not settled here; {remedy}")
