"""The command line on real files: answers, exit codes, what goes to stdout, and every kind of bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspore_bmpipe.cli import main
from mindspore_bmpipe.graph.compile_private import joint_graph_bytes, training_flags
from tests.graph_networks import build

ROOT = Path(__file__).parent.parent
TABLE = {
    "format": "bmpipe-layers/1",
    "units": [
        {
            "name": "body", "count": 6, "forward_ms": 1, "backward_ms": 2, "static_bytes": 100,
            "options": [{"name": "none", "saved_bytes": 50, "extra_backward_ms": 0},
                        {"name": "full", "saved_bytes": 5, "extra_backward_ms": 1}],
        },
    ],
}  # fmt: skip
CONFIG = {"stages": 2, "micro_batches": 4, "schedule": "1f1b", "memory_limit": 500}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write(tmp_path / "net.json", TABLE)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path / "config.yaml", CONFIG)


def write(path: Path, document: Any) -> Path:
    path.write_text(yaml.safe_dump(document) if path.suffix == ".yaml" else json.dumps(document))
    return path


@pytest.fixture(scope="module")
def traced_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `bmpipe trace` writes for a small network."""
    path = tmp_path_factory.mktemp("trace") / "llama.mindir"
    assert main(["trace", "tools.examples.llama:factory", "--set", "size=tiny", "-q", "-o", str(path)]) == 0
    return path


NETWORK = {"stages": 2, "micro_batches": 4, "memory_limit": "1GB", "hardware": "a100"}


def test_published_instance_is_proved_optimal(capfd: pytest.CaptureFixture[str], data: Path) -> None:
    code = main(["plan", str(data / "case_a_v1.layers.json"), "-c", str(data / "case_a_v1.pipeline.yaml"), "--json"])
    answer = json.loads(capfd.readouterr().out)
    expected = json.loads((data / "case_a_v1.expected.json").read_text())["plans"]["proved_optimum"]
    assert code == 0
    assert answer["status"] == "optimal"
    assert answer["step_time_ms"] == pytest.approx(expected["step_time_ms"], rel=1e-3)
    assert answer["bubble"]["total"] == pytest.approx(expected["bubble"], abs=1e-4)
    assert answer["gap"] <= 1e-4
    assert set(answer) >= {"status", "step_time_ms", "bound_ms", "gap", "solve_seconds", "planner", "bubble", "stages"}
    assert set(answer["stages"][0]) == {"stage", "peak_bytes", "static_bytes", "limit_bytes", "chunks"}
    assert set(answer["stages"][0]["chunks"][0]) == {"chunk", "units", "forward_ms", "backward_ms"}
    units = [chunk["units"] for stage in answer["stages"] for chunk in stage["chunks"]]
    assert sum(count for unit in units for count in unit.get("body", {}).values()) == 96


def test_layer_tables_are_planned_without_importing_mindspore(table: Path, config: Path) -> None:
    script = (
        "import sys; from mindspore_bmpipe.cli import main; code = main(sys.argv[1:]);"
        "assert 'mindspore' not in sys.modules; sys.exit(code)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, "plan", str(table), "-c", str(config)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "step time" in run.stdout


def test_plan_save_and_check(table: Path, config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", str(table), "-c", str(config), "-o", str(plan)]) == 0
    assert main(["check", str(plan), str(table), "-c", str(config)]) == 0
    assert "feasible" in capfd.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_check_names_every_violation(
    table: Path, config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", str(table), "-c", str(config), "-o", str(plan)]) == 0
    tight = write(tmp_path / "tight.yaml", {**CONFIG, "memory_limit": 350, "micro_batches": 9})
    capfd.readouterr()
    assert main(["check", str(plan), str(table), "-c", str(tight)]) == 1
    said = capfd.readouterr().err
    assert "stage 0 needs" in said
    assert "stage 1 needs" in said
    assert "records a step of" in said


def test_traced_file_is_planned_explained_and_checked(
    traced_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = write(tmp_path / "net.yaml", NETWORK)
    plan = tmp_path / "plan.json"
    assert main(["plan", str(traced_file), "-c", str(settings), "-o", str(plan), "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["status"] == "optimal"
    assert main(["check", str(plan), str(traced_file), "-c", str(settings)]) == 0
    capfd.readouterr()
    assert main(["explain", str(traced_file), "-c", str(settings), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["symbols"] == {"b": 2, "s": 16}
    assert document["unknown_primitives"] == {}
    blocks = document["units"][1]
    assert (blocks["name"], blocks["last"], blocks["count"]) == ("blocks.0", "blocks.1", 2)
    assert [option["name"] for option in blocks["options"]][:: len(blocks["options"]) - 1] == ["none", "full"]
    # Hidden 64 and 4 heads of 16, float32: scores b * 4 * s * s, among others.
    assert "b*s**2" in blocks["saved_bytes"]
    assert main(["explain", str(traced_file)]) == 0
    assert "hardware was not given" in capfd.readouterr().out


def test_sizes_in_config_replan_without_tracing(
    traced_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = []
    for batch in (2, 4):
        settings = write(tmp_path / "net.yaml", {**NETWORK, "micro_batch_size": batch, "sequence_length": 32})
        assert main(["explain", str(traced_file), "-c", str(settings), "--json"]) == 0
        saved.append(json.loads(capfd.readouterr().out)["units"][1]["options"][0]["saved_bytes"])
    # Rotary tables and constants aside, every kept tensor has a batch axis.
    assert saved[0] < saved[1] <= 2 * saved[0]


def bad(arguments: list[str], capfd: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Run a command that must fail, and return the one error it prints."""
    capfd.readouterr()
    assert main(arguments) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("bmpipe ")
    assert "Traceback" not in err
    return err


def test_empty_truncated_and_foreign_mindir(
    traced_file: Path, config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    contents = traced_file.read_bytes()
    for name, data, message in (
        ("empty", b"", "the file is empty"),
        ("half", contents[: len(contents) // 2], "truncated or not a MindIR file"),
        ("other", b"not a protobuf at all", "truncated or not a MindIR file"),
    ):
        path = tmp_path / f"{name}.mindir"
        path.write_bytes(data)
        said = bad(["plan", str(path), "-c", str(config)], capfd)
        assert message in said
        assert str(path) in said
    assert "cannot be read" in bad(["plan", str(tmp_path / "none.mindir"), "-c", str(config)], capfd)


def test_mindir_without_shapes(config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shapeless.mindir"
    path.write_bytes(edited_export(tmp_path, drop_shapes))
    said = bad(["plan", str(path), "-c", str(config)], capfd)
    assert "shape" in said
    assert "MatMul" in said


def test_unknown_primitives_are_named_together(config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "unknown.mindir"
    path.write_bytes(edited_export(tmp_path, rename_primitives))
    said = bad(["plan", str(path), "-c", str(config)], capfd)
    assert "Riddle" in said
    assert "Mystery" in said
    assert "--assume-elementwise" in said


def edited_export(folder: Path, edit: Any) -> bytes:
    """A real exported file of a small network, edited as a protobuf."""
    mindspore = pytest.importorskip("mindspore")
    from mindspore.train import mind_ir_pb2

    from tests.graph_networks import stack

    network, states = stack(layers=4)
    network.set_train()
    mindspore.export(network, states, file_name=str(folder / "export"), file_format="MINDIR")
    model = mind_ir_pb2.ModelProto()
    model.ParseFromString((folder / "export.mindir").read_bytes())
    edit(model)
    return bytes(model.SerializeToString())


def drop_shapes(model: Any) -> None:
    for node in model.graph.node:
        kept = [attribute for attribute in node.attribute if attribute.name != "shape"]
        del node.attribute[:]
        node.attribute.extend(kept)


def rename_primitives(model: Any) -> None:
    names = {"Tanh": "Riddle", "Square": "Mystery"}
    for primitive in model.primitives:
        primitive.op_type = names.get(primitive.op_type, primitive.op_type)
    for node in model.graph.node:
        node.op_type = names.get(node.op_type, node.op_type)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_ms": -1}, "units[0].forward_ms"),
        ({"static_bytes": "many"}, "units[0].static_bytes"),
        ({"count": 0}, "units[0].count"),
        ({"backward_ms": None}, "units[0].backward_ms"),
    ],
)
def test_bad_layer_tables(
    change: dict[str, Any], message: str, config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    unit = {key: value for key, value in {**TABLE["units"][0], **change}.items() if value is not None}
    path = write(tmp_path / "bad.json", {**TABLE, "units": [unit]})
    assert message in bad(["plan", str(path), "-c", str(config)], capfd)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 7}, "stages: 7"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"micro_batches": None}, "micro_batches is missing"),
        ({"schedule": "zigzag"}, "MindSpore has no pipeline schedule 'zigzag'"),
        ({"schedule": "1f1b", "chunks": 2}, "at most 1 chunk"),
        ({"memory_limit": "lots"}, "memory_limit"),
        ({"stagse": 2}, "unknown key stagse"),
    ],
)
def test_bad_settings(
    change: dict[str, Any], message: str, table: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {key: value for key, value in {**CONFIG, **change}.items() if value is not None}
    path = write(tmp_path / "bad.yaml", settings)
    assert message in bad(["plan", str(table), "-c", str(path)], capfd)


def test_too_little_memory_says_per_stage_what_would_fit(
    table: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tight = write(tmp_path / "tight.yaml", {**CONFIG, "memory_limit": 310})
    said = bad(["plan", str(table), "-c", str(tight)], capfd, code=1)
    # Three units of 100 and two micro-batches of three times 5 on stage 0, one on stage 1.
    assert "stage 0 330 > 310" in said
    assert "stage 1 315 > 310" in said
    assert main(["plan", str(table), "-c", str(tight), "--json"]) == 1
    answer = json.loads(capfd.readouterr().out)
    assert (answer["status"], answer["needed_bytes"]) == ("infeasible", [330, 315])
    fitting = write(tmp_path / "fits.yaml", {**CONFIG, "memory_limit": [330, 315]})
    assert main(["plan", str(table), "-c", str(fitting)]) == 0


def test_no_plan_found_in_time_is_an_answer_of_its_own(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case B with 52 GB: the relaxation has a plan, and a millisecond finds none with whole units."""
    settings = yaml.safe_load((data / "case_b.pipeline.yaml").read_text())
    path = write(tmp_path / "tight.yaml", {**settings, "memory_limit": 52_000_000_000})
    layers = str(data / "case_b.layers.json")
    assert main(["plan", layers, "-c", str(path), "--time-limit", "0.001", "--json"]) == 3
    answer = json.loads(capfd.readouterr().out)
    assert (answer["status"], answer["stopped_by"]) == ("no plan found in the time limit", "time")
    assert "wall clock" in answer["message"]


def test_unwritable_output_is_refused_before_the_work(
    table: Path, config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for output in (tmp_path / "missing" / "plan.json", tmp_path):
        assert "cannot be written" in bad(["plan", str(table), "-c", str(config), "-o", str(output)], capfd)
    assert "cannot be written" in bad(
        ["trace", "tools.examples.llama:factory", "-o", str(tmp_path / "missing" / "net.mindir")], capfd
    )
    assert not (tmp_path / "missing").exists()


def test_a_layer_table_has_nothing_to_explain(table: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "a layer table has no graph" in bad(["explain", str(table)], capfd)


def test_a_plan_for_another_network_is_refused(
    table: Path, config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", str(table), "-c", str(config), "-o", str(plan)]) == 0
    unit = {**TABLE["units"][0], "forward_ms": 3}
    other = write(tmp_path / "other.json", {**TABLE, "units": [unit]})
    assert "another network" in bad(["check", str(plan), str(other), "-c", str(config)], capfd)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no_such_module:factory", "cannot import no_such_module"),
        ("tools.examples.llama:nothing", "has no function nothing"),
        ("tests.test_cli:write", "failed with TypeError"),
        ("tests.test_cli:returns_no_network", "must return (network, inputs)"),
        ("training.yaml", "training YAMLs cannot be read"),
        ("net.onnx", "not a source"),
    ],
)
def test_sources_that_cannot_be(source: str, message: str, config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert message in bad(["plan", source, "-c", str(config)], capfd)


def returns_no_network() -> int:
    """A factory that does not do what factories do."""
    return 3


def test_settings_that_a_network_cannot_honour(
    traced_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for change, message in (
        ({"tensor_parallel": 2}, "has a strategy, so nothing says what each rank would run"),
        ({"expert_parallel": 2}, "expert_parallel: 2, but no operation of Llama has a strategy"),
        ({"context_parallel": 2}, "context_parallel: 2, but no operation of Llama has a strategy"),
        ({"data_parallel": 3}, "does not divide the traced micro-batch of 2"),
        ({"hardware": "abacus"}, "'abacus' is unknown; known are"),
    ):
        path = write(tmp_path / "bad.yaml", {**NETWORK, **change})
        assert message in bad(["plan", str(traced_file), "-c", str(path)], capfd)


def test_nothing_but_json_reaches_stdout(table: Path, config: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "mindspore_bmpipe.cli", "plan", str(table), "-c", str(config), "--json"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["status"] == "optimal"


def test_help_teaches(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in ((["--help"], "exit codes"), (["plan", "--help"], "SOURCE")):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert expected in capfd.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["fly"])
    assert caught.value.code == 2


def test_a_forward_graph_is_not_taken_for_a_joint_one(tmp_path: Path) -> None:
    """`joint_graph_bytes` gives gradients, which the files of `mindspore.export` do not have."""
    network, inputs = build("llama")
    with training_flags(network):
        assert b"Gradients/" in joint_graph_bytes(network, inputs)
    assert b"Gradients/" not in edited_export(tmp_path, lambda model: None)
