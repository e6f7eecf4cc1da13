"""Plans in launchers' formats, against published configurations."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_plans import LayerRow, table_plan

from mindspore_bmpipe.apply.formats import FORMATS
from mindspore_bmpipe.cli import main
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.plan import Plan


def fragment(plan: Plan, round_up: bool = False) -> dict[str, Any]:
    document = yaml.safe_load(FORMATS["mindformers"](plan, round_up))
    assert isinstance(document, dict)
    return document


def per_stage(layers: Sequence[int], **counts: Sequence[int]) -> list[LayerRow]:
    """Layers of each virtual stage: so many of each named option, the rest of option none."""
    rows = []
    for stage, total in enumerate(layers):
        row = {name: values[stage] for name, values in counts.items() if values[stage]}
        rows.append({**row, "none": total - sum(row.values())})
    return rows


def test_the_fragment_of_glm4_9b() -> None:
    """configs/glm4/finetune_glm4_9b.yaml: 40 layers, offset [-1, 0, 2, -1], recompute [6, 3, 2, 3]."""
    plan = table_plan(per_stage([9, 10, 12, 9], full=[6, 3, 2, 3]), micro_batches=64)
    assert fragment(plan) == {
        "parallel_config": {"pipeline_stage": 4, "micro_batch_num": 64},
        "model": {"model_config": {"offset": [-1, 0, 2, -1]}},
        "recompute_config": {"recompute": [6, 3, 2, 3], "select_recompute": False, "select_comm_recompute": False},
    }


def test_the_fragment_of_llama3_1_70b() -> None:
    """research/llama3_1/llama3_1_70b/finetune_llama3_1_70b.yaml: 80 layers, both on the first 10, 8, 6, ..."""
    first = [10, 8, 6, 4, 2, 0, 0, 0]
    found = fragment(table_plan(per_stage([10] * 8, both=first), micro_batches=256))
    assert found["model"] == {"model_config": {"offset": 0}}
    assert found["recompute_config"] == {
        "recompute": False, "select_recompute": first, "select_comm_recompute": first
    }  # fmt: skip


def test_the_fragment_of_qwen2_5_14b() -> None:
    """research/qwen2_5/finetune_qwen2_5_14b_8k.yaml: 48 layers, recompute [3, 2, 0, 0], select on all of them."""
    layers, whole = [11, 13, 13, 11], [3, 2, 0, 0]
    selected = [total - full for total, full in zip(layers, whole, strict=True)]
    found = fragment(table_plan(per_stage(layers, full=whole, select=selected), micro_batches=128))
    assert found["model"]["model_config"]["offset"] == [-1, 1, 1, -1]
    assert found["recompute_config"]["recompute"] == whole
    assert found["recompute_config"]["select_recompute"] == layers


def test_several_chunks_are_lists_of_lists() -> None:
    """`LayerSetting`: offset and counts of shape (pp_interleave_num, pp), counted from the first layer of a chunk."""
    rows = per_stage([3, 2, 2, 2, 1, 2], full=[1, 0, 0, 0, 1, 0], select=[0, 2, 0, 1, 0, 0])
    found = fragment(table_plan(rows, stages=3, chunks=2, schedule="interleaved", micro_batches=6))
    assert found["parallel"]["pipeline_config"] == {"pipeline_interleave": True, "pipeline_scheduler": "1f1b"}
    assert found["model"]["model_config"] == {"offset": [[1, 0, 0], [0, -1, 0]], "pp_interleave_num": 2}
    assert found["recompute_config"]["recompute"] == [[1, 0, 0], [0, 1, 0]]
    assert found["recompute_config"]["select_recompute"] == [[0, 2, 0], [1, 0, 0]]


def test_what_mindformers_counts_cannot_say() -> None:
    """One layer `select` and one `comm`: both counts start at the first layer of the chunk."""
    plan = table_plan(per_stage([4, 4], select=[1, 0], comm=[1, 0]))
    with pytest.raises(InputError, match=r"stage 0: .*1 x (select|comm).*--round-up"):
        fragment(plan)
    rounded = fragment(plan, round_up=True)["recompute_config"]
    assert sorted([rounded["select_recompute"], rounded["select_comm_recompute"]]) == [[1, 0], [2, 0]]


def test_options_without_a_pattern_are_refused_or_recomputed_wholly() -> None:
    plan = table_plan(per_stage([3, 3], odd=[1, 0]))
    with pytest.raises(InputError, match="no option 'odd'"):
        fragment(plan)
    assert fragment(plan, round_up=True)["recompute_config"]["recompute"] == [1, 0]


def test_ends_that_a_launcher_keeps_elsewhere_are_refused() -> None:
    plan = table_plan(per_stage([0, 4, 4]), stages=3)
    moved = table_plan(per_stage([0, 4]), apart=True)
    assert fragment(plan)["model"]["model_config"]["offset"] == [-2, 2, 2]
    with pytest.raises(InputError, match=r"unit 'table' is on stage 1.*pins"):
        fragment(moved)


@pytest.mark.parametrize("to", ["mindformers", "megatron"])
def test_schedules_that_a_launcher_lacks_are_refused(to: str) -> None:
    plan = table_plan(per_stage([2, 2, 2, 2]), stages=2, chunks=2, schedule="zero_bubble_v")
    with pytest.raises(InputError, match="no schedule zero_bubble_v; plan with schedule: 1f1b"):
        FORMATS[to](plan, False)


def expanded(layout: str) -> list[tuple[str, ...]]:
    """Symbols of each virtual stage, as Megatron-LM's guide describes the string: `(..)*n` and `x*n` repeat."""
    text = layout.replace(",", "")
    while (found := re.search(r"\(([^()]*)\)\*(\d+)", text)) is not None:
        text = text[: found.start()] + found[1] * int(found[2]) + text[found.end() :]
    text = re.sub(r"([a-zA-Z])\*(\d+)", lambda match: match[1] * int(match[2]), text)
    return [tuple(part) for part in text.split("|")]


@pytest.mark.parametrize(
    ("published", "stages", "layers"),
    [
        # The guide's notation, in a public training script for 14 layers on 4 stages of two chunks.
        ("Ett|(tt|)*6L", 4, [2] * 7 + [0]),
        ("Et|(t|)*30tL", 8, [1] * 32),
        ("E,t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4,L", 4, [4] * 8),
    ],
)
def test_the_layout_is_the_published_one(published: str, stages: int, layers: list[int]) -> None:
    chunks = len(layers) // stages
    plan = table_plan(per_stage(layers), stages=stages, chunks=chunks, schedule="interleaved", micro_batches=2 * stages)
    text = FORMATS["megatron"](plan, False)
    found = re.search(r'--pipeline-model-parallel-layout "([^"]*)"', text)
    assert found is not None and expanded(found[1]) == expanded(published)
    assert f"--pipeline-model-parallel-size {stages} " in text
    assert "recompute" not in text


@pytest.mark.parametrize(
    ("counts", "flags"),
    [
        ({"select": [3, 3]}, ["--recompute-granularity selective", "--recompute-modules core_attn"]),
        (
            {"full": [2, 2]},
            ["--recompute-granularity full", "--recompute-method block", "--recompute-num-layers 2"],
        ),
    ],
)
def test_recompute_flags(counts: dict[str, list[int]], flags: list[str]) -> None:
    lines = FORMATS["megatron"](table_plan(per_stage([3, 3], **counts)), False).replace(" \\", "").splitlines()
    assert lines[2:] == flags


@pytest.mark.parametrize(
    ("counts", "message", "rounded"),
    [
        ({"full": [2, 1]}, "first N layers of every chunk wholly, with one N", "--recompute-num-layers 2"),
        ({"select": [1, 3]}, "of all layers or of none", "--recompute-modules core_attn"),
        ({"both": [1, 0]}, "no recomputation like option 'both'", "--recompute-num-layers 1"),
    ],
)
def test_what_megatron_cannot_say(counts: dict[str, list[int]], message: str, rounded: str) -> None:
    plan = table_plan(per_stage([3, 3], **counts))
    with pytest.raises(InputError, match=f"{message}.*--round-up"):
        FORMATS["megatron"](plan, False)
    assert rounded in FORMATS["megatron"](plan, True)


def test_the_command_writes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = table_plan(per_stage([2, 3], both=[1, 0]))
    plan.save(tmp_path / "plan.json")
    assert main(["export", str(tmp_path / "plan.json"), "--to", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [unit["stage"] for unit in document["units"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [unit["recompute"] for unit in document["units"]].count("both") == 1
    target = tmp_path / "pipeline.yaml"
    assert main(["export", str(tmp_path / "plan.json"), "--to", "mindformers", "-o", str(target)]) == 0
    assert yaml.safe_load(target.read_text())["model"]["model_config"]["offset"] == [0, 1]
    assert main(["export", str(tmp_path / "plan.json"), "--to", "megatron", "-o", str(tmp_path / "no.sh")]) == 2
    assert "bmpipe export" in capsys.readouterr().err
    assert not (tmp_path / "no.sh").exists()
