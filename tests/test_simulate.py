"""`bmpipe simulate`: a plan file's own numbers give its step time and peaks, as a table, JSON, a trace and pictures."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_schedule_simulate import event_simulation

from mindspore_bmpipe.cli import main
from mindspore_bmpipe.config import parse_config
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.layer_table import parse_layer_table
from mindspore_bmpipe.plan import Plan, load_plan
from mindspore_bmpipe.planning import make_plan
from mindspore_bmpipe.report.simulation import simulate_plan
from mindspore_bmpipe.schedule import make_schedule, splits_backward
from mindspore_bmpipe.subjects import subject_of_layers

LAYERS = {
    "format": "bmpipe-layers/1",
    "transfer_ms": 0.25,
    "stage_constant_bytes": 7,
    "units": [
        {
            "name": "body", "count": 9, "forward_ms": 1, "backward_ms": 2, "static_bytes": 100,
            "options": [{"name": "none", "saved_bytes": 50, "extra_backward_ms": 0, "working_set_bytes": 4},
                        {"name": "full", "saved_bytes": 5, "extra_backward_ms": 1, "working_set_bytes": 30}],
        },
    ],
}  # fmt: skip
SETTINGS: tuple[dict[str, Any], ...] = (
    {"stages": 2, "micro_batches": 4, "schedule": "1f1b", "memory_limit": 800},
    {"stages": 2, "micro_batches": 6, "schedule": "interleaved", "chunks": 2, "memory_limit": 900},
    {"stages": 2, "micro_batches": 6, "schedule": "zero_bubble_v", "memory_limit": 900},
    {"stages": 2, "micro_batches": 6, "schedule": "zero_bubble_v", "memory_limit": 700},
)


def plan_of(settings: dict[str, Any]) -> Plan:
    return make_plan(subject_of_layers(parse_layer_table(LAYERS), "net", parse_config(settings)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan_of(SETTINGS[1]).save(path)
    return path


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s['schedule']}_{s['memory_limit']}")
def test_a_saved_plan_holds_all_that_its_simulation_needs(settings: dict[str, Any], tmp_path: Path) -> None:
    plan_of(settings).save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    simulation = simulate_plan(plan)
    schedule = make_schedule(settings["schedule"], 2, plan.settings["chunks"], settings["micro_batches"])
    size = schedule.virtual_stages
    forward, whole, weight, repeated = ([0.0] * size for _ in range(4))
    for stage, virtuals in enumerate(schedule.virtual_of_chunk):
        for chunk, virtual in enumerate(virtuals):
            units = plan.stages[stage].chunks[chunk].units.get("body", {})
            forward[virtual] = float(sum(units.values()))
            whole[virtual] = 2.0 * sum(units.values()) + units.get("full", 0)
            # Half of the backward of a unit without recomputation.
            weight[virtual] = float(sum(units.values())) if splits_backward(schedule) else 0.0
            # Recomputation, and behind the first unit that has any the gradients of inputs, half of the backward too.
            again = units.get("full", 0)
            repeated[virtual] = again + 1.0 * max(0, again - 1) if splits_backward(schedule) else 0.0
    inputs = [total - part for total, part in zip(whole, weight, strict=True)]
    expected = event_simulation(schedule, forward, inputs, weight, [0.25] * (schedule.virtual_stages - 1), repeated)
    assert any(repeated) == (settings["memory_limit"] == 700)
    assert simulation.step_time_ms == pytest.approx(max(end for _, end in expected.values()))
    assert simulation.step_time_ms == pytest.approx(plan.solver.step_time_ms)
    for entry in simulation.timed:
        assert (entry.start_ms, entry.end_ms) == pytest.approx(expected[entry.stage, entry.action])
    for stage, curve in zip(plan.stages, simulation.memory, strict=True):
        assert max(point.bytes for point in curve) == stage.peak_bytes
        assert curve[-1].bytes == stage.static_bytes
    for idle in simulation.idle:
        assert idle.busy_ms + idle.idle_ms == pytest.approx(simulation.step_time_ms)


def test_a_plan_from_before_split_backwards_said_what_runs_again_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of(SETTINGS[2]).save(path)
    document = json.loads(path.read_text())
    for load in document["loads"]:
        # It recomputes nothing, so nothing runs again.
        assert load.pop("repeated_ms") == [0.0, 0.0]
    path.write_text(json.dumps(document))
    plan = load_plan(path)
    assert simulate_plan(plan).step_time_ms == pytest.approx(plan.solver.step_time_ms)
    wrong = [{**load, "repeated_ms": [0.0]} for load in document["loads"]]
    path.write_text(json.dumps({**document, "loads": wrong}))
    with pytest.raises(InputError, match="2 stages of 2 chunks"):
        simulate_plan(load_plan(path))


def test_json_and_table_say_the_same(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(saved), "--json", "-q"]) == 0
    answer = json.loads(capfd.readouterr().out)
    plan = load_plan(saved)
    assert answer["step_time_ms"] == pytest.approx(plan.solver.step_time_ms)
    assert [stage["peak_bytes"] for stage in answer["stages"]] == [stage.peak_bytes for stage in plan.stages]
    for stage in answer["stages"]:
        assert set(stage) == {
            "stage", "busy_ms", "warm_up_ms", "waiting_ms", "cool_down_ms", "communication_ms", "peak_bytes",
            "peak_at_ms", "limit_bytes", "memory",
        }  # fmt: skip
        assert [stage["peak_at_ms"], stage["peak_bytes"]] in stage["memory"]
    assert answer["critical_path"][-1]["end_ms"] == pytest.approx(answer["step_time_ms"])
    assert main(["simulate", str(saved)]) == 0
    table = capfd.readouterr().out
    assert f"step time {plan.solver.step_time_ms:.2f} ms" in table
    assert all(f"{stage['cool_down_ms']:.2f}" in table for stage in answer["stages"])
    assert "longest path: stage" in table


def test_the_trace_is_what_perfetto_reads(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    assert main(["simulate", str(saved), "--trace", str(target), "-q"]) == 0
    events = json.loads(target.read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    # Two stages, two chunks, six micro-batches, forward and backward.
    assert len(bars) == 2 * 2 * 6 * 2
    for stage in (0, 1):
        own = sorted((bar["ts"], bar["ts"] + bar["dur"]) for bar in bars if bar["tid"] == stage)
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(own))
    step_ms = load_plan(saved).solver.step_time_ms
    assert max(bar["ts"] + bar["dur"] for bar in bars) == pytest.approx(step_ms * 1e3)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"stage 0", "stage 1"}
    peaks = [stage.peak_bytes for stage in load_plan(saved).stages]
    counters = [event for event in events if event["ph"] == "C"]
    assert [
        max(event["args"]["bytes"] for event in counters if event["name"] == f"memory of stage {stage}")
        for stage in (0, 1)
    ] == peaks


def test_pictures_show_every_action(saved: Path, tmp_path: Path) -> None:
    picture, page = tmp_path / "step.svg", tmp_path / "step.html"
    assert main(["simulate", str(saved), "--svg", str(picture), "--html", str(page), "-q"]) == 0
    bars = [item for item in ElementTree.parse(picture).getroot() if item.tag.endswith("rect")]
    assert len(bars) == 48
    right = max(float(bar.get("x", 0)) + float(bar.get("width", 0)) for bar in bars)
    assert right == pytest.approx(1100, abs=0.1)
    text = page.read_text()
    assert text.count("<svg") == 2 and "<script" not in text and "longest path" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: dataclasses.replace(plan, transfer_ms=(9.0,) * len(plan.transfer_ms)), "records a step of"),
        (lambda plan: dataclasses.replace(plan, settings={"stages": 2}), "do not give schedule"),
        (lambda plan: dataclasses.replace(plan, settings=plan.settings | {"chunks": 3}), "2 stages of 3 chunks"),
        (
            lambda plan: dataclasses.replace(
                plan, loads=(dataclasses.replace(plan.loads[0], working_set_bytes=0), *plan.loads[1:])
            ),
            "stage 0 records a peak of",
        ),
    ],
)
def test_plans_that_contradict_themselves_are_refused(change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate_plan(change(plan_of(SETTINGS[1])))


def test_bad_files_end_with_2_and_write_nothing(saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(saved), "--trace", str(tmp_path / "no" / "trace.json")]) == 2
    document = json.loads(saved.read_text())
    del document["loads"]
    saved.write_text(json.dumps(document))
    target = tmp_path / "step.svg"
    assert main(["simulate", str(saved), "--svg", str(target)]) == 2
    assert "missing keys ['loads']" in capfd.readouterr().err
    assert not target.exists()
