"""Settings left open for a real network: every one is planned, and the choice is the best of all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspore_bmpipe.config import AUTO, MINDSPORE_SCHEDULES, Config, parse_config
from mindspore_bmpipe.costs.network import NetworkCosts, network_costs
from mindspore_bmpipe.errors import InfeasibleError, InputError
from mindspore_bmpipe.graph.trace import trace
from mindspore_bmpipe.planning import check_plan, make_plan
from mindspore_bmpipe.subjects import subject_of_network
from tools.examples.llama import factory

MOST_CHUNKS = 6


@pytest.fixture(scope="module")
def costs() -> NetworkCosts:
    network, inputs = factory(
        size="tiny", layers=4, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=1000, sequence=128, batch=2
    )
    return network_costs(trace(network, *inputs))


def settings(samples: int, limit: int) -> Config:
    return parse_config(
        {
            "stages": 2, "micro_batches": samples // 2, "hardware": "a100", "memory_limit": limit,
            "chunks": AUTO, "schedule": AUTO, "micro_batch_size": AUTO,
        }
    )  # fmt: skip


def single_settings(costs: NetworkCosts, config: Config, sizes: list[int]) -> dict[tuple[str, int, int], float]:
    """Step time of every schedule, number of chunks and micro-batch size that has a plan, each planned on its own."""
    times = {}
    for name in MINDSPORE_SCHEDULES:
        for chunks in range(1, MOST_CHUNKS + 1):
            for size in sizes:
                micro_batches = sizes[-1] // size
                single = replace(
                    config, schedule=name, chunks=chunks, micro_batch_size=size, micro_batches=micro_batches
                )
                try:
                    plan = make_plan(subject_of_network(costs, single))
                except (InputError, InfeasibleError):
                    continue
                times[name, chunks, size] = plan.solver.step_time_ms
    return times


@pytest.mark.long
@pytest.mark.parametrize("samples", [4, 8])
def test_the_choice_is_the_best_of_all_single_settings(costs: NetworkCosts, samples: int) -> None:
    sizes = [size for size in (1, 2, 4, 8) if size <= samples]
    roomy = make_plan(subject_of_network(costs, settings(samples, 1 << 40)))
    # Some of the combinations no longer fit, and others must recompute.
    peak, static = (max(getattr(stage, key) for stage in roomy.stages) for key in ("peak_bytes", "static_bytes"))
    config = settings(samples, static + (peak - static) * 2 // 3)
    subject = subject_of_network(costs, config)
    plan = make_plan(subject)
    times = single_settings(costs, config, sizes)
    chosen = plan.settings["schedule"], plan.settings["chunks"], plan.settings["micro_batch_size"]
    assert plan.solver.step_time_ms == pytest.approx(min(times.values()), rel=1e-4)
    assert times[chosen] == pytest.approx(plan.solver.step_time_ms, rel=1e-4)
    # It was a choice: sizes, chunks and schedules all differ in time.
    for part in range(3):
        best: dict[str | int, float] = {}
        for setting, time in times.items():
            best[setting[part]] = min(time, best.get(setting[part], time))
        assert len({round(time, 6) for time in best.values()}) > 1
    # MindSpore refuses a single micro-batch.
    for size in sizes[:-1]:
        assert f"{samples // size} micro-batches of {size}" in plan.solver.message
    assert check_plan(plan, subject) == []
