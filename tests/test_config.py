"""The CONFIG file."""

from __future__ import annotations

from pathlib import Path

import pytest
from problem_samples import DATA

from mindspore_bmpipe.config import Config, PinSpec, load_config, parse_bytes, parse_config, require_settled
from mindspore_bmpipe.errors import InputError


def test_reads_every_key(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "stages: 4\nchunks: auto\nmicro_batches: 8\nschedule: 1F1B\nmemory_limit: [58GB, 56000MiB, 7, 1.5KB]\n"
        "memory_margin: 2.5%\n"
        "hardware: ascend910b\nmicro_batch_size: auto\nsequence_length: 4096\ndata_parallel: 2\ntensor_parallel: 8\n"
        "expert_parallel: 1\ncontext_parallel: 1\noptimizer_shard_level: 2\nrecompute_options: [none, full]\n"
        "pins:\n- {units: 0-3, stage: 0}\n- {units: 5, stage: 1}\ntime_limit: 30\nseed: 7\n"
    )
    assert load_config(path) == Config(
        stages=4,
        chunks="auto",
        micro_batches=8,
        schedule="1f1b",
        memory_limit=(58 * 1000**3, 56000 * 1024**2, 7, 1500),
        memory_margin=0.025,
        hardware="ascend910b",
        micro_batch_size="auto",
        sequence_length=4096,
        data_parallel=2,
        tensor_parallel=8,
        expert_parallel=1,
        context_parallel=1,
        optimizer_shard_level=2,
        recompute_options=("none", "full"),
        pins=(PinSpec("0-3", 0), PinSpec("5", 1)),
        time_limit=30.0,
        seed=7,
    )


def test_nothing_given_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("")
    assert load_config(path) == Config() == parse_config({"stages": None})
    assert load_config(DATA / "case_b.pipeline.yaml").schedule == "interleaved"


@pytest.mark.parametrize(
    ("text", "size"),
    [("58GB", 58 * 10**9), ("1 kib", 1024), ("2TiB", 2 * 1024**4), ("12", 12), (3, 3), ("0.5MB", 500000)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("12.5 %", 0.125), (0.05, 0.05), (0, 0.0)])
def test_shares(text: object, share: float) -> None:
    assert parse_config({"memory_margin": text}).memory_margin == share


@pytest.mark.parametrize("text", ["5", "-5%", "100%", 1, -0.1, True, "x", [0.1], float("nan")])
def test_impossible_shares(text: object) -> None:
    with pytest.raises(InputError, match=r"memory_margin: .* such as 0\.05 or 5%"):
        parse_config({"memory_margin": text})


@pytest.mark.parametrize("text", ["x", "-1GB", "GB", "1XB", 0, -3, True, 1.5, None, "0.1B", "nanGB"])
def test_impossible_sizes(text: object) -> None:
    with pytest.raises(InputError, match="limit: "):
        parse_bytes(text, "limit")


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"stage": 4}, "unknown key stage; the keys are stages, chunks"),
        ({"stages": "four"}, "stages: 'four' is not allowed; give an integer of at least 1"),
        ({"stages": True}, "stages: True"),
        ({"stages": 0}, "stages: 0 is out of range"),
        ({"stages": "auto"}, "stages: 'auto'"),
        ({"optimizer_shard_level": 4}, "an integer from 0 to 3"),
        (
            {"schedule": "dualpipe"},
            "MindSpore has no pipeline schedule 'dualpipe'; it has gpipe, 1f1b, .*zero_bubble_v",
        ),
        ({"memory_limit": []}, "the list is empty"),
        ({"memory_limit": ["1GB", "x"]}, r"memory_limit\[1\]: 'x'"),
        ({"stages": 3, "memory_limit": ["1GB", "1GB"]}, "2 sizes for 3 stages"),
        ({"time_limit": 0}, "time_limit: 0"),
        ({"time_limit": float("inf")}, "time_limit: inf"),
        ({"recompute_options": "full"}, "give a list of option names"),
        ({"recompute_options": ["full", "full"]}, "full is listed more than once"),
        ({"pins": {"units": 1}}, "give a list such as"),
        ({"pins": [{"units": 1}]}, r"pins\[0\].*exactly the keys units and stage"),
        ({"pins": [{"units": 1.5, "stage": 0}]}, r"pins\[0\].units: 1.5"),
        ({"pins": [{"units": 1, "stage": -1}]}, r"pins\[0\].stage: -1"),
        ({"hardware": ""}, "hardware: '' is not a name"),
        ({"seed": -1}, "seed: -1"),
    ],
)
def test_errors_name_the_key_and_what_is_allowed(mapping: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=f"here: .*{words}"):
        parse_config(mapping, "here")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stages: 4\nstages: 8\n", "line 2: the key stages is given twice"),
        ("stages: [4\n", "not valid YAML"),
        ("- stages\n", "expected a mapping"),
        ("pins:\n- {units: 1, stage: 0, stage: 1}\n", "stage is given twice"),
        ("x: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the configuration"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"chunks": "auto"}, "chunks: auto is not settled here; give a number"),
        ({"schedule": "auto"}, "schedule: auto .*give one of gpipe, 1f1b"),
        ({"micro_batch_size": "auto"}, "micro_batch_size: auto"),
    ],
)
def test_what_one_problem_cannot_leave_open(mapping: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        require_settled(parse_config(mapping))
    require_settled(parse_config({"chunks": 2, "schedule": "gpipe", "micro_batch_size": 2}))
