"""Layer tables: the smallest input, a JSON list of runs of units with their times and bytes.

Two formats are read. `bmpipe-layers/1` is the project's own. The other is the layer description of the SAPP
pipeline-balancing tool (a JSON object with `layers_description`): its `time` is the forward time of one layer and
backward takes twice that, memory is in MB (10^6 bytes here), and a recompute option exists where its memory is given
and above 0. Its backward time is the option's own time if given, else (1 + coefficient) times the backward time, with
the tool's default coefficients where none is given.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.problem import Option, Run

FORMAT = "bmpipe-layers/1"

SAPP_BACKWARD_PER_FORWARD = 2.0
"""Backward time over forward time where a SAPP description does not give it."""
SAPP_BYTES_PER_MB = 1_000_000
"""Bytes of SAPP's unit of memory."""


@dataclass(frozen=True)
class _SappOption:
    name: str
    memory_key: str
    time_key: str
    coefficient_key: str
    default_coefficient: float


_SAPP_OPTIONS = (
    _SappOption("none", "memory_activation", "backward_time", "backward_coef", 0.0),
    _SappOption("select", "memory_select_rec", "select_rec_time", "select_rec_coef", 0.04),
    _SappOption("comm", "memory_select_comm", "select_comm_time", "select_comm_coef", 0.125),
    _SappOption("both", "memory_both_comm_select", "both_comm_select_time", "both_comm_select_coef", 0.165),
    _SappOption("full", "memory_recompute", "recompute_time", "recompute_coef", 0.5),
)

_TABLE_KEYS = {"format", "source", "units", "stage_constant_bytes", "transfer_ms"}
_UNIT_KEYS = {
    "name",
    "count",
    "forward_ms",
    "backward_ms",
    "static_bytes",
    "options",
    "trainable",
    "weight_gradient_ms",
    "update_bytes",
}
_REPEATED_KEYS = ("repeated_ms", "repeated_after_ms")
_OPTION_KEYS = {"name", "saved_bytes", "extra_backward_ms", "working_set_bytes", *_REPEATED_KEYS}
_SAPP_TABLE_KEYS = {"name", "stage_const_mem", "layers_description", "body_layer_names", "pre_defined_layer"}
_SAPP_LAYER_KEYS = {"name", "type", "model_name", "nb_layer", "time", "forward_time", "memory_parameter"} | {
    key for option in _SAPP_OPTIONS for key in (option.memory_key, option.time_key, option.coefficient_key)
}
_SAPP_TYPES = {"HEAD": 0, "BODY": 1, "TAIL": 2}


@dataclass(frozen=True)
class LayerTable:
    """Costs read from a layer table."""

    runs: tuple[Run, ...]
    """Runs in network order."""
    stage_constant_bytes: int
    """Bytes every stage uses whatever is placed on it."""
    transfer_ms: float
    """Time of one transfer between stages."""
    source: str
    """Where the numbers come from; the table's own words, else its path."""


def is_layer_table(mapping: object) -> bool:
    """Whether parsed JSON is in one of the two formats (not whether it is valid)."""
    if not isinstance(mapping, Mapping):
        return False
    layout = mapping.get("format")
    return (isinstance(layout, str) and layout.startswith("bmpipe-layers/")) or "layers_description" in mapping


def load_layer_table(path: str | Path) -> LayerTable:
    """Read a layer table.

    Raises:
        InputError: the file cannot be read, is not JSON, or something in it is missing or impossible; the message
        gives the
            place (`units[1].options[0].saved_bytes`) and the remedy.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read the layer table ({error}); give a JSON file") from error
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}); is the file complete?"
        ) from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return parse_layer_table(data, str(path))


def parse_layer_table(data: object, where: str = "layer table") -> LayerTable:
    """A layer table of parsed JSON; errors as in `load_layer_table`."""
    if not isinstance(data, Mapping) or not is_layer_table(data):
        raise InputError(
            f'{where}: not a layer table; give an object with "format": "{FORMAT}" and "units", '
            'or with "layers_description"'
        )
    try:
        return _parse_sapp(data, where) if "layers_description" in data else _parse_own(data, where)
    except _PlaceError as error:
        raise InputError(f"{where}: {error}") from error


class _PlaceError(Exception):
    """What is wrong at one place of the table."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise InputError(f"the key {key} is given twice in one object; keep one of them")
        result[key] = value
    return result


def _parse_own(data: Mapping[str, Any], where: str) -> LayerTable:
    if data["format"] != FORMAT:
        raise _PlaceError(f"format: {data['format']!r} is not supported; this version reads {FORMAT}")
    _refuse_unknown("", data, _TABLE_KEYS)
    runs = []
    for index, unit in enumerate(_list(data, "units", "")):
        place = f"units[{index}]"
        _refuse_unknown(place, _object(unit, place), _UNIT_KEYS)
        options = []
        for number, option in enumerate(_list(unit, "options", place)):
            spot = f"{place}.options[{number}]"
            _refuse_unknown(spot, _object(option, spot), _OPTION_KEYS)
            options.append(
                Option(
                    name=_name(option, spot),
                    saved_bytes=_bytes(option, "saved_bytes", spot),
                    extra_backward_ms=_number(option, "extra_backward_ms", spot),
                    working_set_bytes=_bytes(option, "working_set_bytes", spot, 0),
                    **{key: _number(option, key, spot) for key in _REPEATED_KEYS if key in option},
                )
            )
        _refuse_repeated(place, [option.name for option in options])
        trainable = unit.get("trainable", True)
        if not isinstance(trainable, bool):
            raise _PlaceError(f"{place}.trainable: {trainable!r} is not allowed; give true or false")
        runs.append(
            Run(
                name=_name(unit, place),
                count=_count(unit, "count", place),
                forward_ms=_number(unit, "forward_ms", place),
                backward_ms=_number(unit, "backward_ms", place),
                static_bytes=_bytes(unit, "static_bytes", place),
                options=tuple(options),
                trainable=trainable,
                weight_gradient_ms=_number(unit, "weight_gradient_ms", place) if "weight_gradient_ms" in unit else None,
                update_bytes=_bytes(unit, "update_bytes", place, 0),
            )
        )
    return LayerTable(
        runs=tuple(runs),
        stage_constant_bytes=_bytes(data, "stage_constant_bytes", "", 0),
        transfer_ms=_number(data, "transfer_ms", "", 0.0),
        source=str(data.get("source", where)),
    )


def _parse_sapp(data: Mapping[str, Any], where: str) -> LayerTable:
    _refuse_unknown("", data, _SAPP_TABLE_KEYS)
    runs = []
    order: list[tuple[int, str]] = []
    for index, layer in enumerate(_list(data, "layers_description", "")):
        place = f"layers_description[{index}]"
        # The tool itself writes one of its keys with a space at the end.
        tidy = {key.strip(): value for key, value in _object(layer, place).items() if value is not None}
        _refuse_unknown(place, tidy, _SAPP_LAYER_KEYS)
        kind = tidy.get("type")
        if kind not in _SAPP_TYPES:
            raise _PlaceError(f"{place}.type: {kind!r} is not allowed; give HEAD, BODY or TAIL")
        order.append((_SAPP_TYPES[kind], place))
        runs.append(_sapp_run(tidy, place))
    for (before, _), (after, place) in itertools.pairwise(order):
        if after < before:
            raise _PlaceError(f"{place}.type: layers are in network order, HEAD before BODY before TAIL; reorder them")
    constant = {key: value for key, value in data.items() if value is not None}
    return LayerTable(
        runs=tuple(runs),
        stage_constant_bytes=_megabytes(constant, "stage_const_mem", "", 0),
        transfer_ms=0.0,
        source=str(data.get("name", where)),
    )


def _sapp_run(layer: Mapping[str, Any], place: str) -> Run:
    time = _number(layer, "time", place)
    forward = _number(layer, "forward_time", place, time)
    by_default = SAPP_BACKWARD_PER_FORWARD * time
    plain = _number(layer, "backward_time", place, 0.0) or by_default * (
        1 + _number(layer, "backward_coef", place, _SAPP_OPTIONS[0].default_coefficient)
    )
    options = []
    for known in _SAPP_OPTIONS:
        saved = _megabytes(layer, known.memory_key, place, 0)
        if saved == 0:
            continue
        coefficient = _number(layer, known.coefficient_key, place, known.default_coefficient)
        backward = _number(layer, known.time_key, place, 0.0) or by_default * (1 + coefficient)
        extra = 0.0 if known.name == "none" else backward - plain
        if extra < 0:
            raise _PlaceError(
                f"{place}.{known.time_key}: recomputing takes {backward} for backward, less than {plain} without; "
                "check the times or coefficients"
            )
        options.append(Option(known.name, saved, extra))
    return Run(
        name=_name(layer, place),
        count=_count(layer, "nb_layer", place),
        forward_ms=forward,
        backward_ms=plain,
        static_bytes=_megabytes(layer, "memory_parameter", place, 0),
        # A layer without activation memory is one the tool never recomputes, such as an embedding.
        options=tuple(options) or (Option("none", 0, 0.0),),
    )


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _object(value: object, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _PlaceError(f"{place}: {value!r} is not an object; give one in braces")
    return value


def _refuse_unknown(place: str, mapping: Mapping[str, Any], allowed: set[str]) -> None:
    unknown = [str(key) for key in mapping if key not in allowed]
    if unknown:
        raise _PlaceError(f"{_join(place, unknown[0])}: unknown key; the keys are {', '.join(sorted(allowed))}")


def _refuse_repeated(place: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _PlaceError(f"{place}.options[{index}].name: {name} is already taken; give every option its own name")


def _get(mapping: Mapping[str, Any], key: str, place: str, default: object = None) -> Any:
    value = mapping.get(key, default)
    if value is None:
        raise _PlaceError(f"{_join(place, key)}: missing; add it")
    return value


def _list(mapping: Mapping[str, Any], key: str, place: str) -> list[Any]:
    value = _get(mapping, key, place)
    if not isinstance(value, list) or not value:
        raise _PlaceError(f"{_join(place, key)}: {value!r} is not allowed; give a list with at least one entry")
    return value


def _name(mapping: Mapping[str, Any], place: str) -> str:
    value = _get(mapping, "name", place)
    if not isinstance(value, str) or not value.strip():
        raise _PlaceError(f"{_join(place, 'name')}: {value!r} is not a name; give a non-empty text")
    return value


def _number(mapping: Mapping[str, Any], key: str, place: str, default: float | None = None) -> float:
    value = _get(mapping, key, place, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise _PlaceError(f"{_join(place, key)}: {value!r} is not allowed; give a finite number, at least 0")
    return float(value)


def _bytes(mapping: Mapping[str, Any], key: str, place: str, default: int | None = None) -> int:
    value = _number(mapping, key, place, default)
    if value != int(value):
        raise _PlaceError(f"{_join(place, key)}: {value!r} is not allowed; give a whole number of bytes")
    raw = mapping.get(key, default)
    return raw if isinstance(raw, int) else int(value)


def _megabytes(mapping: Mapping[str, Any], key: str, place: str, default: int | None = None) -> int:
    return round(_number(mapping, key, place, default) * SAPP_BYTES_PER_MB)


def _count(mapping: Mapping[str, Any], key: str, place: str) -> int:
    value = _get(mapping, key, place)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _PlaceError(f"{_join(place, key)}: {value!r} is not allowed; give a whole number of at least 1")
    return value
