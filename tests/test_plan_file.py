"""Plan files: what is written comes back, and whatever was damaged or edited is refused with its place."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mindspore_bmpipe.config import parse_config
from mindspore_bmpipe.errors import InfeasibleError, InputError
from mindspore_bmpipe.layer_table import parse_layer_table
from mindspore_bmpipe.plan import Plan, load_plan, write_text_atomically
from mindspore_bmpipe.planning import check_plan, make_plan
from mindspore_bmpipe.subjects import subject_of_layers

LAYERS = {
    "format": "bmpipe-layers/1",
    "units": [
        {"name": "head", "count": 1, "forward_ms": 1, "backward_ms": 2, "static_bytes": 10,
         "options": [{"name": "none", "saved_bytes": 1, "extra_backward_ms": 0}]},
        {"name": "body", "count": 4, "forward_ms": 2, "backward_ms": 4, "static_bytes": 10,
         "options": [{"name": "none", "saved_bytes": 9, "extra_backward_ms": 0},
                     {"name": "full", "saved_bytes": 1, "extra_backward_ms": 2}]},
    ],
}  # fmt: skip
SETTINGS = {"stages": 2, "micro_batches": 4, "memory_limit": 65, "pins": [{"units": "head", "stage": 0}], "seed": 3}


def plan_of(settings: dict[str, Any] | None = None, layers: dict[str, Any] | None = None) -> Plan:
    table = parse_layer_table(layers or LAYERS)
    return make_plan(subject_of_layers(table, "net", parse_config(settings or SETTINGS)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan_of().save(path)
    return path


def test_what_is_saved_comes_back(saved: Path) -> None:
    again, first = load_plan(saved), plan_of()
    assert again.units == first.units
    assert [stage.chunks for stage in again.stages] == [stage.chunks for stage in first.stages]
    assert (again.fingerprint, again.bubble) == (first.fingerprint, first.bubble)
    assert again.settings == {
        "chunks": 1, "memory_limit": [65, 65], "micro_batches": 4, "pins": [{"stage": 0, "units": "head"}],
        "schedule": "1f1b", "seed": 3, "stages": 2,
    }  # fmt: skip


def test_units_are_named_and_counted_in_order(saved: Path) -> None:
    plan = load_plan(saved)
    assert [unit.name for unit in plan.units] == ["head", "body[0]", "body[1]", "body[2]", "body[3]"]
    assert [unit.stage for unit in plan.units] == sorted(unit.stage for unit in plan.units)
    # Two micro-batches in flight on stage 0: 10 + 2 units * 10 + 2 * (1 + 9 + 9) = 68 > 65, so one is recomputed.
    assert plan.stages[0].peak_bytes == 30 + 2 * (1 + 9 + 1)
    assert plan.stages[0].chunks[0].units == {"head": {"none": 1}, "body": {"none": 1, "full": 1}}


def edited(saved: Path, change: Any) -> Path:
    document = json.loads(saved.read_text())
    change(document)
    saved.write_text(json.dumps(document))
    return saved


def _move(document: dict[str, Any]) -> None:
    document["units"][0]["stage"] = 1


def _drop(document: dict[str, Any]) -> None:
    del document["solver"]["bound_ms"]


def _renumber(document: dict[str, Any]) -> None:
    document["stages"].reverse()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_move, "its units differ from the list under 'units'"),
        (_drop, r"solver: missing keys \['bound_ms'\]"),
        (_renumber, "stages are not numbered"),
        (lambda d: d.update(format="bmpipe-plan/0"), "this version reads 'bmpipe-plan/1'"),
        (lambda d: d.update(extra=1), r"unknown keys \['extra'\]"),
        (lambda d: d["units"][2].update(stage="one"), r"units\[2\].stage: must be int"),
        (lambda d: d["units"][2].update(stage=9), r"units\[2\].stage: 9 is not a stage"),
        (lambda d: d["units"][2].update(stage=True), r"units\[2\].stage: must be int"),
        (lambda d: d["bubble"].update(total=float("nan")), r"bubble.total: must be finite"),
        (lambda d: d.update(units={}), r"units: must be a list"),
    ],
)
def test_edited_files_are_refused(saved: Path, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_plan(edited(saved, change))


@pytest.mark.parametrize(("text", "message"), [("", "not valid JSON"), ("[1]", "format is None"), ("{", "line 1")])
def test_files_that_are_no_plans(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_plan(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json: cannot read the plan file"):
        load_plan(tmp_path / "none.json")


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("before")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="No space left"):
        write_text_atomically(path, "after")
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "before"


def test_written_files_have_ordinary_permissions(saved: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert saved.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_check_finds_what_the_settings_do_not_allow() -> None:
    plan = plan_of()
    table = parse_layer_table(LAYERS)

    def wrong(changes: dict[str, Any]) -> str:
        return "\n".join(check_plan(plan, subject_of_layers(table, "net", parse_config({**SETTINGS, **changes}))))

    assert wrong({}) == ""
    assert "stage 0 needs" in wrong({"memory_limit": 50})
    assert "pinned to stage 1" in wrong({"pins": [{"units": "head", "stage": 1}]})
    assert "2 stages, the settings 3" in wrong({"stages": 3})
    assert "option full is not one of none" in wrong({"recompute_options": ["none"]})


def test_a_plan_for_other_layers_cannot_be_checked() -> None:
    other = copy.deepcopy(LAYERS)
    other["units"][1]["static_bytes"] = 11  # type: ignore[index]
    subject = subject_of_layers(parse_layer_table(other), "other", parse_config(SETTINGS))
    with pytest.raises(InputError, match="another network"):
        check_plan(plan_of(), subject)


def test_equal_input_gives_equal_files_but_for_the_seconds(tmp_path: Path) -> None:
    documents = []
    for _ in range(2):
        plan_of().save(tmp_path / "plan.json")
        document = json.loads((tmp_path / "plan.json").read_text())
        del document["solver"]["solve_seconds"]
        documents.append(document)
    assert documents[0] == documents[1]


def test_infeasible_says_what_would_fit() -> None:
    # Stage 0 needs at least its static bytes and two micro-batches of the smallest options.
    with pytest.raises(InfeasibleError, match=r"stage \d \d+ > 20") as caught:
        plan_of({**SETTINGS, "memory_limit": 20})
    assert caught.value.exit_code == 1


def test_a_margin_stays_free_and_is_recorded_beside_the_limit() -> None:
    # Stage 0 has 52 bytes with one unit recomputed (above), a quarter below the limit of 65; 26 % are too much for it.
    kept = {**SETTINGS, "memory_margin": "25%"}
    plan = plan_of(kept)
    assert plan.stages[0].peak_bytes == plan.stages[0].limit_bytes == 52
    assert (plan.settings["memory_limit"], plan.settings["memory_margin"]) == ([65, 65], 0.25)
    assert check_plan(plan, subject_of_layers(parse_layer_table(LAYERS), "net", parse_config(kept))) == []
    assert plan_of({**SETTINGS, "memory_margin": "26%"}).stages[0].chunks[0].units["body"] == {"full": 2}
    with pytest.raises(InfeasibleError, match=r"memory_margin leaves 50.0% more than the bytes named free"):
        plan_of({**SETTINGS, "memory_limit": 40, "memory_margin": "50%"})
