"""One network, three ways in: live cells, the file of `bmpipe trace`, the file of `mindspore.export`."""

from __future__ import annotations

from pathlib import Path

import mindspore
import pytest

from mindspore_bmpipe.config import Config, parse_config
from mindspore_bmpipe.costs.network import network_costs
from mindspore_bmpipe.graph.recorded import graph_of, traced_file
from mindspore_bmpipe.graph.trace import record
from mindspore_bmpipe.plan import Plan, write_bytes_atomically
from mindspore_bmpipe.planning import make_plan
from mindspore_bmpipe.sources import load_subject
from mindspore_bmpipe.subjects import subject_of_network
from tests.graph_networks import FACTORIES

# Sizes at which arithmetic and not launches decides, with few enough weights to allocate: export needs them.
SIZES = {
    "llama": {"layers": 6, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 1000, "sequence": 128},
    "gpt": {"layers": 6, "hidden": 256, "heads": 4, "vocab": 1000, "sequence": 128},
    "bert": {"layers": 6, "hidden": 256, "heads": 4, "vocab": 1000, "sequence": 128},
    "vision_language": {},
}


def settings(limit: int) -> Config:
    return parse_config(
        {"stages": 3, "micro_batches": 6, "hardware": "a100", "memory_limit": limit, "micro_batch_size": 2}
    )


def placed(plan: Plan) -> list[tuple[str, int]]:
    return [(unit.name, unit.stage) for unit in plan.units]


@pytest.mark.parametrize("name", FACTORIES)
def test_three_ways_in_give_the_same_stages_and_step_time(name: str, tmp_path: Path) -> None:
    network, inputs = FACTORIES[name](size="tiny", batch=2, **SIZES[name])
    network.set_train()
    mindspore.export(network, *inputs, file_name=str(tmp_path / "export"), file_format="MINDIR")
    recorded = record(network, *inputs)
    write_bytes_atomically(tmp_path / "trace.mindir", traced_file(recorded))

    costs = network_costs(graph_of(recorded))
    plain = make_plan(subject_of_network(costs, settings(1 << 40)))
    # Tight enough that some units must be recomputed.
    limit = (3 * max(s.peak_bytes for s in plain.stages) + max(s.static_bytes for s in plain.stages)) // 4
    config = settings(limit)
    live = make_plan(subject_of_network(costs, config))
    assert live.solver.status == "optimal"
    assert any(unit.option != "none" for unit in live.units)
    for file in ("trace.mindir", "export.mindir"):
        plan = make_plan(load_subject(str(tmp_path / file), config))
        assert placed(plan) == placed(live), file
        assert plan.solver.step_time_ms == pytest.approx(live.solver.step_time_ms, rel=0.01), file
        assert plan.fingerprint == live.fingerprint, file
