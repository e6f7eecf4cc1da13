"""Predicted memory against stages that MindSpore compiled: tied tables, what recomputation leaves, two chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from verify_plans import Choose, hand_plan, keep_all, mixed, needs_compiler

from mindspore_bmpipe.sources import load_costs
from mindspore_bmpipe.verify.run import StageMemory, verify

pytestmark = needs_compiler


def memory_of(
    folder: Path,
    network: str,
    settings: dict[str, Any],
    cuts: tuple[int, ...],
    stage: int,
    choose: Choose,
    **config: Any,
) -> StageMemory:
    source = f"tools.examples.{network}:factory"
    plan = hand_plan(load_costs(source, settings), cuts, choose, **config)
    plan.save(folder / "plan.json")
    result = verify(plan, str(folder / "plan.json"), source, settings, (stage,))
    (verified,) = result.stages
    assert result.findings == () and verified.memory is not None
    return verified.memory


@pytest.mark.parametrize(("stage", "choose"), [(0, keep_all), (1, mixed)], ids=["owner", "reader"])
def test_stages_of_a_tied_table(tmp_path: Path, stage: int, choose: Choose) -> None:
    """A table larger than all activations: its gradients and the received copy are what counts."""
    settings = {"layers": 2, "hidden": 64, "vocab": 8192, "sequence": 32}
    memory = memory_of(tmp_path, "gpt", settings, (3,), stage, choose)
    table = 4 * 8192 * 64
    assert memory.peak.activation_bytes > table
    assert memory.predicted.activations == pytest.approx(memory.peak.activation_bytes, rel=0.02)
    assert memory.predicted.update == pytest.approx(memory.peak.update_bytes, rel=0.02)
    assert memory.peak.update_bytes > table


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1])
def test_stages_of_two_chunks(tmp_path: Path, stage: int) -> None:
    """Whichever chunk runs, only its own units' working sets count; the planner adds the largest of both chunks."""
    settings = {"layers": 6, "hidden": 128, "sequence": 64}
    config = {"schedule": "interleaved", "stages": 2, "chunks": 2}
    memory = memory_of(tmp_path, "llama", settings, (3, 4, 6), stage, mixed, **config)
    # What the compiler sends it sends an action later, so some results of chunks are there a little longer.
    assert memory.predicted.activations == pytest.approx(memory.peak.activation_bytes, rel=0.05)
    assert memory.predicted.planned_activations >= memory.peak.activation_bytes
