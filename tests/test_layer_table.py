"""Layer tables in both formats."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from problem_samples import DATA

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.layer_table import is_layer_table, load_layer_table, parse_layer_table
from mindspore_bmpipe.problem import Option, Run

OWN: dict[str, Any] = {
    "format": "bmpipe-layers/1",
    "units": [
        {
            "name": "head",
            "count": 1,
            "forward_ms": 30,
            "backward_ms": 60.5,
            "static_bytes": 4245000000,
            "options": [{"name": "none", "saved_bytes": 0, "extra_backward_ms": 0}],
            "trainable": False,
        },
        {
            "name": "body",
            "count": 2,
            "forward_ms": 30,
            "backward_ms": 60,
            "static_bytes": 1e9,
            "options": [
                {"name": "none", "saved_bytes": 5, "extra_backward_ms": 0, "working_set_bytes": 3},
                {"name": "both", "saved_bytes": 2, "extra_backward_ms": 9.9},
            ],
        },
    ],
    "stage_constant_bytes": 7,
    "transfer_ms": 0.5,
}
SAPP: dict[str, Any] = {
    "name": "llama",
    "stage_const_mem": 10,
    "layers_description": [
        {"name": "emb", "type": "HEAD", "model_name": "llama", "time": 2, "nb_layer": 1, "memory_parameter": 100},
        {
            "name": "dec",
            "type": "BODY",
            "model_name": "llama",
            "time": 10,
            "nb_layer": 4,
            "memory_parameter": 50,
            "memory_activation": 9,
            "memory_select_rec": 7.5,
            "memory_both_comm_select": 5,
            "memory_recompute": 1,
            "both_comm_select_coef": 0.2,
            "recompute_time ": 31,
        },
        {"name": "out", "type": "TAIL", "time": 3, "nb_layer": 1, "memory_parameter": None, "forward_time": 4},
    ],
}


def test_own_format() -> None:
    table = parse_layer_table(OWN)
    assert table.runs == (
        Run("head", 1, 30.0, 60.5, 4245000000, (Option("none", 0, 0.0),), trainable=False),
        Run("body", 2, 30.0, 60.0, 10**9, (Option("none", 5, 0.0, 3), Option("both", 2, 9.9))),
    )
    assert (table.stage_constant_bytes, table.transfer_ms) == (7, 0.5)


@pytest.mark.parametrize(("name", "constant"), [("case_a_v1", 1206000000), ("case_b", 0)])
def test_published_tables(name: str, constant: int) -> None:
    table = load_layer_table(DATA / f"{name}.layers.json")
    assert [run.count for run in table.runs] == [1, 96, 1]
    assert [option.name for option in table.runs[1].options] == ["none", "select", "comm", "both"]
    assert table.stage_constant_bytes == constant
    assert table.source.startswith("SAPP")


def test_sapp_format() -> None:
    table = parse_layer_table(SAPP)
    mb = 10**6
    assert table.stage_constant_bytes == 10 * mb
    assert table.runs[0] == Run("emb", 1, 2.0, 4.0, 100 * mb, (Option("none", 0, 0.0),))
    body = table.runs[1]
    assert (body.count, body.forward_ms, body.backward_ms, body.static_bytes) == (4, 10.0, 20.0, 50 * mb)
    assert [(o.name, o.saved_bytes) for o in body.options] == [
        ("none", 9 * mb),
        ("select", 7_500_000),
        ("both", 5 * mb),
        ("full", mb),
    ]
    # The tool's default of 4 % for selective recompute, a given coefficient, and a given time.
    assert [o.extra_backward_ms for o in body.options] == pytest.approx([0, 0.04 * 20, 0.2 * 20, 31 - 20])
    assert (table.runs[2].forward_ms, table.runs[2].backward_ms) == (4.0, 6.0)


def test_recognition() -> None:
    assert is_layer_table(OWN)
    assert is_layer_table(SAPP)
    assert not is_layer_table({"format": "other"})
    assert not is_layer_table([])
    with pytest.raises(InputError, match="not a layer table"):
        parse_layer_table({"units": []})


def edited(table: dict[str, Any], path: tuple[Any, ...], value: object) -> dict[str, Any]:
    result = copy.deepcopy(table)
    target: Any = result
    for key in path[:-1]:
        target = target[key]
    if value is KeyError:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return result


@pytest.mark.parametrize(
    ("table", "path", "value", "words"),
    [
        (OWN, ("units", 1, "options", 0, "saved_bytes"), -1, r"units\[1\].options\[0\].saved_bytes: -1.*at least 0"),
        (OWN, ("units", 1, "options", 0, "saved_bytes"), 1.5, "whole number of bytes"),
        (OWN, ("units", 1, "options", 0, "saved_bytes"), KeyError, r"options\[0\].saved_bytes: missing; add it"),
        (OWN, ("units", 0, "forward_ms"), float("nan"), r"units\[0\].forward_ms: nan"),
        (OWN, ("units", 0, "backward_ms"), float("inf"), r"units\[0\].backward_ms: inf"),
        (OWN, ("units", 0, "forward_ms"), "30", r"units\[0\].forward_ms: '30'"),
        (OWN, ("units", 0, "count"), 0, r"units\[0\].count: 0"),
        (OWN, ("units", 0, "count"), True, r"units\[0\].count: True"),
        (OWN, ("units", 0, "name"), "", r"units\[0\].name: ''"),
        (OWN, ("units", 0, "weight"), 1, r"units\[0\].weight: unknown key; the keys are"),
        (OWN, ("units", 1, "options", 1, "name"), "none", r"options\[1\].name: none is already taken"),
        (OWN, ("units", 1, "options"), [], r"units\[1\].options: \[\]"),
        (OWN, ("units", 1), 5, r"units\[1\]: 5 is not an object"),
        (OWN, ("units",), [], r"units: \[\] is not allowed"),
        (OWN, ("units", 0, "trainable"), 1, r"trainable: 1 is not allowed"),
        (OWN, ("extra",), 1, "extra: unknown key"),
        (OWN, ("format",), "bmpipe-layers/2", "this version reads bmpipe-layers/1"),
        (SAPP, ("layers_description", 1, "type"), "NECK", r"layers_description\[1\].type: 'NECK'.*HEAD, BODY or TAIL"),
        (SAPP, ("layers_description", 1, "type"), "TAIL", None),
        (SAPP, ("layers_description", 2, "type"), "HEAD", "HEAD before BODY before TAIL"),
        (SAPP, ("layers_description", 1, "memory_select_rec"), -7, "memory_select_rec: -7"),
        (SAPP, ("layers_description", 1, "time"), KeyError, r"\[1\].time: missing"),
        (SAPP, ("layers_description", 1, "nb_layer"), 1.5, r"\[1\].nb_layer: 1.5"),
        (SAPP, ("layers_description", 1, "both_comm_select_time"), 19, "less than 20.0 without"),
    ],
)
def test_errors_give_the_place(table: dict[str, Any], path: tuple[Any, ...], value: object, words: str | None) -> None:
    changed = edited(table, path, value)
    if words is None:
        parse_layer_table(changed)
        return
    with pytest.raises(InputError, match=words):
        parse_layer_table(changed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps(OWN)[:-20], "not valid JSON at line 1, column .*is the file complete"),
        ('{"format": "bmpipe-layers/1", "units": [], "units": []}', "units is given twice"),
        ("[]", "not a layer table"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "layers.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        load_layer_table(path)
    assert str(path) in str(caught.value)


def test_what_weight_gradients_run_again_may_be_given() -> None:
    table = copy.deepcopy(OWN)
    table["units"][1]["options"][1] |= {"repeated_ms": 1.5, "repeated_after_ms": 4}
    kept, both = parse_layer_table(table).runs[1].options
    assert (kept.repeated_ms, kept.repeated_after_ms) == (None, None)
    assert (both.repeated_ms, both.repeated_after_ms) == (1.5, 4.0)
    table["units"][1]["options"][1]["repeated_ms"] = "1.5"
    with pytest.raises(InputError, match=r"units\[1\].options\[1\].repeated_ms"):
        parse_layer_table(table)
