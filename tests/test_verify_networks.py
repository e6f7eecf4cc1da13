"""Whole example networks compiled for Ascend with mixed plans, many stages, and a very large cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from verify_plans import hand_plan, keep_all, mixed, needs_compiler

from mindspore_bmpipe.sources import load_costs
from mindspore_bmpipe.verify.run import Verification, verify

pytestmark = [needs_compiler, pytest.mark.long]


def verified(
    folder: Path,
    source: str,
    settings: dict[str, Any],
    cuts: tuple[int, ...],
    choose: Any = mixed,
    stages: tuple[int, ...] | None = None,
    ranks: int | None = None,
    **config: Any,
) -> Verification:
    plan = hand_plan(load_costs(source, settings), cuts, choose, **config)
    plan.save(folder / "plan.json")
    return verify(plan, str(folder / "plan.json"), source, settings, stages, ranks)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("network", "settings", "cuts"),
    [
        ("llama", {"layers": 6}, (3, 5, 6)),
        ("gpt", {"layers": 6}, (2, 4, 6)),
        ("bert", {"layers": 4}, (3, 4, 5)),
        ("vision_language", {}, (3, 4, 7)),
    ],
)
def test_every_stage_of_a_mixed_plan_passes(
    tmp_path: Path, network: str, settings: dict[str, Any], cuts: tuple[int, ...], schedule: str
) -> None:
    started = time.monotonic()
    result = verified(tmp_path, f"tools.examples.{network}:factory", settings, cuts, schedule=schedule)
    print(f"{network}, {schedule}: {time.monotonic() - started:.0f} s")
    assert [str(finding) for finding in result.findings] == []
    assert len(result.stages) == 4


def test_a_mask_made_on_another_stage_is_warned_of(tmp_path: Path) -> None:
    result = verified(tmp_path, "tools.examples.bert:factory", {"layers": 2}, (3,), keep_all)
    assert result.findings == ()
    assert any("stage 1 sends gradients to stage 0 that are never received" in text for text in result.warnings)


def test_sixteen_stages_take_minutes(tmp_path: Path) -> None:
    started = time.monotonic()
    cuts = tuple(range(3, 33, 2))
    result = verified(tmp_path, "tools.examples.llama:factory", {"layers": 32}, cuts, micro_batches=16)
    assert [str(finding) for finding in result.findings] == []
    assert len(result.stages) == 16
    print(f"16 stages of 32 layers: {time.monotonic() - started:.0f} s")


def test_one_rank_of_sixteen_thousand(tmp_path: Path) -> None:
    settings = {"size": "70b", "tensor_parallel": 8, "data_parallel": 128, "batch": 128}
    cuts = tuple(range(6, 81, 5))
    source = "tools.examples.llama_sharded:factory"
    config = {"data_parallel": 128, "micro_batches": 16, "memory_limit": "2000GB"}
    result = verified(tmp_path, source, settings, cuts, keep_all, (7,), 16384, **config)
    assert [str(finding) for finding in result.findings] == []
    (stage,) = result.stages
    assert stage.rank == 7 * 1024
    print(f"rank {stage.rank} of 16384: {stage.seconds:.0f} s, {stage.compiler_bytes / 2**30:.1f} GiB")
