"""`bmpipe compare`: its interface, its table, and that bmpipe's plan is never worse than another."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspore_bmpipe.cli import main
from mindspore_bmpipe.comparison import default_planners
from mindspore_bmpipe.planner import registered

ROOT = Path(__file__).parent.parent
LAYER = {
    "name": "layer",
    "count": 12,
    "forward_ms": 1,
    "backward_ms": 2,
    "static_bytes": 1000,
    "options": [
        {"name": "none", "saved_bytes": 4000, "extra_backward_ms": 0},
        {"name": "select", "saved_bytes": 2000, "extra_backward_ms": 0.5},
        {"name": "full", "saved_bytes": 0, "extra_backward_ms": 1},
    ],
}
HEAD = {"name": "head", "count": 1, "forward_ms": 1, "backward_ms": 2, "static_bytes": 3000,
        "options": [{"name": "none", "saved_bytes": 0, "extra_backward_ms": 0}]}  # fmt: skip
TABLE = {"format": "bmpipe-layers/1", "units": [LAYER, HEAD], "transfer_ms": 0.1}
CONFIG = {"stages": 4, "micro_batches": 8, "memory_limit": 32000}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "net.json"
    path.write_text(json.dumps(TABLE))
    return path


def settings(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, **changes}))
    return str(path)


def compared(arguments: list[str], capfd: pytest.CaptureFixture[str], code: int = 0) -> dict[str, dict[str, Any]]:
    capfd.readouterr()
    assert main(["compare", *arguments, "--json"]) == code
    document = json.loads(capfd.readouterr().out)
    return {row["name"]: row for row in document["planners"]}


def test_interface(table: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = compared([str(table), "-c", settings(tmp_path)], capfd)
    assert set(rows) == set(registered()) - {"exhaustive"}
    for row in rows.values():
        assert {"name", "status", "step_time_ms", "peak_bytes", "gap", "bubble", "memory", "speedup"} <= set(row)
        if row["step_time_ms"] is not None:
            assert len(row["peak_bytes"]) == 4
            assert all(peak <= 32000 for peak in row["peak_bytes"])
            assert row["speedup"] >= 1
            assert row["memory"]["max"] == max(row["peak_bytes"]) / 32000
            parts = sum(value for part, value in row["bubble"].items() if part != "total")
            assert parts == pytest.approx(row["bubble"]["total"])
            assert 0 <= row["gap"] < 1
    # Recomputing everything on the even split, by hand: layers of 4 ms, three a stage, 15 ms with the head:
    # ideal 8 / 4 * 39 = 78, recomputation 8 / 4 * 12 = 24 of it, every layer and not the head.
    full = rows["megatron_even_full"]
    assert full["bubble"]["recompute"] == pytest.approx(24 / 78)
    assert full["recomputed_units"] == pytest.approx(12 / 13)
    assert full["peak_bytes"] == [3000, 3000, 3000, 6000]


def test_bmpipe_comes_first_and_then_the_fastest(
    table: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = list(compared([str(table), "-c", settings(tmp_path)], capfd).values())
    assert rows[0]["name"] == "bmpipe"
    times = [row["step_time_ms"] for row in rows]
    found = [time for time in times if time is not None]
    assert found == sorted(found)
    assert times[: len(found)] == found


def test_several_chunks_say_who_does_not_know_them(
    table: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path, stages=2, chunks=2, schedule="interleaved", memory_limit=90000)
    rows = compared([str(table), "-c", config], capfd)
    assert {name for name, row in rows.items() if row["status"] == "not applicable"} == {
        "adapipe", "autopipe", "dapple", "galvatron_even", "merak", "pipedream",
    }  # fmt: skip
    assert "knows one chunk per stage only" in rows["pipedream"]["message"]
    assert all(row["speedup"] >= 1 for row in rows.values() if row["step_time_ms"] is not None)
    assert rows["sapp"]["step_time_ms"] is not None


def test_infeasible_baselines_say_where_and_by_how_much(
    table: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path, memory_limit=[26000, 40000, 40000, 40000])
    rows = compared([str(table), "-c", config, "--planner", "megatron_even_selective"], capfd)
    row = rows["megatron_even_selective"]
    # Three layers of 1000, and four in flight of three times 2000.
    assert (row["status"], row["needed_bytes"][0], row["peak_bytes"]) == ("infeasible", 27000, None)
    assert "stage 0 27000 > 26000" in row["message"]
    assert main(["compare", str(table), "-c", config, "--planner", "megatron_even_selective"]) == 0
    assert "memory limits exceeded on stage 0 by 0.00 GiB" in capfd.readouterr().out


def test_nobody_fits(table: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path, memory_limit=2000)
    rows = compared([str(table), "-c", config], capfd, code=1)
    assert {row["status"] for row in rows.values()} == {"infeasible"}


def test_named_planners_and_bmpipe(table: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path)
    assert set(compared([str(table), "-c", config, "--planner", "sapp", "even"], capfd)) == {"sapp", "even", "bmpipe"}
    with pytest.raises(SystemExit) as caught:
        main(["compare", str(table), "-c", config, "--planner", "guess"])
    assert caught.value.code == 2
    assert "exhaustive" not in default_planners()


def test_settings_left_open_are_settled_for_every_planner(
    table: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path, stages=2, chunks="auto", memory_limit=90000)
    rows = compared([str(table), "-c", config, "--time-limit", "20"], capfd)
    assert rows["pipedream"]["chunks"] == 1
    assert rows["bmpipe"]["chunks"] > 1
    assert all(row["speedup"] >= 1 for row in rows.values() if row["step_time_ms"] is not None)


def test_csv_holds_the_same(table: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path)
    arguments = [str(table), "-c", config, "--planner", "pipedream", "merak"]
    rows = compared(arguments, capfd)
    assert main(["compare", *arguments, "--csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capfd.readouterr().out)))
    assert [line["name"] for line in lines] == list(rows)
    for line in lines:
        assert float(line["step_time_ms"]) == rows[line["name"]]["step_time_ms"]
        assert [int(peak) for peak in line["peak_bytes"].split()] == rows[line["name"]]["peak_bytes"]
        assert float(line["bubble_imbalance"]) == rows[line["name"]]["bubble"]["imbalance"]


def test_only_the_table_reaches_stdout(table: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mindspore_bmpipe.cli", "compare", str(table), "-c", settings(tmp_path)]
    run = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["planners"][0]["name"] == "bmpipe"
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.stdout.startswith("planners on net.json")
    assert "megatron_manual" in run.stdout


def test_the_description_of_the_sapp_tool_is_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    row = json.loads((ROOT / "tests" / "data" / "originals" / "sapp.json").read_text())["instances"][0]
    source = tmp_path / "layers.json"
    source.write_text(json.dumps(row["layers"]))
    config = settings(tmp_path, stages=4, micro_batches=8, memory_limit=f"{row['limit_mb']}MB")
    rows = compared([str(source), "-c", config], capfd)
    assert rows["sapp"]["status"] == "feasible"
    assert rows["bmpipe"]["status"] == "optimal"


def test_help_teaches_how_to_read_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    said = capfd.readouterr().out
    assert "how to read the table" in said
    assert "megatron_manual" in said
