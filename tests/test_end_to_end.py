"""One network, three ways in: live cells, the file of `bmpipe trace`, the file of `mindspore.export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore
import pytest

from mindspore_bmpipe.config import Config, parse_config
from mindspore_bmpipe.costs.network import network_costs
from mindspore_bmpipe.graph.exported import TRAINABLE_NOTE
from mindspore_bmpipe.graph.recorded import graph_of, traced_file
from mindspore_bmpipe.graph.trace import record
from mindspore_bmpipe.plan import Plan, write_bytes_atomically
from mindspore_bmpipe.planning import make_plan
from mindspore_bmpipe.sources import load_subject
from mindspore_bmpipe.subjects import subject_of_network
from tests.example_families import FAMILIES
from tools.examples import vision_language

# Sizes at which arithmetic and not launches decides, with few enough weights to allocate: export needs them.
_WIDE = {"layers": 6, "hidden": 256, "heads": 4, "vocab": 1000, "sequence": 128}
_IMAGE = {"image": 64, "patch": 4, "layers": 6, "hidden": 256, "heads": 4, "ffn": 1024}
_EXPERTS = {"layers": 4, "hidden": 256, "ffn": 1024, "expert_ffn": 256, "vocab": 1000, "sequence": 128}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {**_WIDE, "kv_heads": 2, "ffn": 512},
    "qwen2.5": {**_WIDE, "kv_heads": 2, "ffn": 512},
    "gpt": _WIDE,
    "bloom": _WIDE,
    "palm": {**_WIDE, "head_size": 64, "ffn": 1024},
    "pangu-alpha": {**_WIDE, "ffn": 1024},
    "bert": _WIDE,
    "vit": _IMAGE,
    "swin": {"image": 64, "layers": "2,4", "hidden": 128, "heads": 2},
    "vision_language": {},
    "llava": {},
    "blip-2": {"query_layers": 6, "query_hidden": 192, "query_ffn": 768, "queries": 32, "image": 64, "sequence": 64},
    "deepseek": _EXPERTS,
    "deepseek-dropless": _EXPERTS,
}
NETWORKS = {**FAMILIES, "vision_language": (vision_language.factory, {})}
# An exported file does not say which weights are frozen.
FROZEN = ("llava", "blip-2")
QUICK = ("llama", "gpt", "bert", "vision_language")


def settings(limit: int) -> Config:
    return parse_config(
        {"stages": 3, "micro_batches": 6, "hardware": "a100", "memory_limit": limit, "micro_batch_size": 2}
    )


def placed(plan: Plan) -> list[tuple[str, int]]:
    return [(unit.name, unit.stage) for unit in plan.units]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in SIZES if name not in QUICK)]
)
def test_three_ways_in_give_the_same_stages_and_step_time(name: str, tmp_path: Path) -> None:
    build, given = NETWORKS[name]
    network, inputs = build(batch=2, **{**given, **SIZES[name]})
    network.set_train()
    mindspore.export(network, *inputs, file_name=str(tmp_path / "export"), file_format="MINDIR")
    recorded = record(network, *inputs)
    write_bytes_atomically(tmp_path / "trace.mindir", traced_file(recorded))

    costs = network_costs(graph_of(recorded))
    plain = make_plan(subject_of_network(costs, settings(1 << 40)))
    peak, static = (max(getattr(stage, key) for stage in plain.stages) for key in ("peak_bytes", "static_bytes"))
    # The loosest of these limits under which some units must be recomputed.
    for quarters in (3, 2, 1):
        config = settings(static + (peak - static) * quarters // 4)
        live = make_plan(subject_of_network(costs, config))
        assert live.solver.status == "optimal"
        if any(unit.option != "none" for unit in live.units):
            break
    else:
        raise AssertionError("no limit makes the plan recompute")
    if name in FROZEN:
        plan = make_plan(load_subject(str(tmp_path / "export.mindir"), settings(1 << 40)))
        assert TRAINABLE_NOTE in plan.notes
        assert sum(stage.static_bytes for stage in plan.stages) > sum(stage.static_bytes for stage in live.stages)
    for file in ("trace.mindir",) if name in FROZEN else ("trace.mindir", "export.mindir"):
        plan = make_plan(load_subject(str(tmp_path / file), config))
        assert placed(plan) == placed(live), file
        assert plan.solver.step_time_ms == pytest.approx(live.solver.step_time_ms, rel=0.01), file
        assert plan.fingerprint == live.fingerprint, file
