"""Layer tables of public models against published sizes."""

from __future__ import annotations

import pytest

from mindspore_bmpipe.costs.hardware import load_hardware
from mindspore_bmpipe.planner import SolveLimits, Status, solve
from mindspore_bmpipe.problem import Problem, check
from tools.bench.headline import ROOM, limited
from tools.bench.models import LAYOUTS, problem_of

GIB = 1 << 30


def table(name: str) -> Problem:
    return problem_of(LAYOUTS[name], load_hardware("ascend910b"))


@pytest.mark.parametrize(
    ("name", "parameters"),
    # Parameters as the checkpoints hold them: LLaMA-2 7B, LLaMA-2 70B, LLaMA-3 70B, LLaMA-3.1 405B.
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-70b", 68_976_648_192),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b-8k", 405_853_388_800),
    ],
)
def test_parameters_are_those_of_the_models(name: str, parameters: int) -> None:
    layout, problem = LAYOUTS[name], table(name)
    held = sum(run.count * run.static_bytes for run in problem.runs)
    counted = held * layout.tensor_parallel / (6 + 12 / layout.data_parallel)
    # The norm before the head is left out.
    assert counted == pytest.approx(parameters, abs=layout.model.hidden * 1.01 + 200)


@pytest.mark.parametrize(
    ("name", "layers", "static_gib", "selective_gib"),
    # arXiv 2205.05198, figure 1: weights and optimizer state, and activations with sequence parallelism and selective
    # recomputation, of the first stage; interleaved it holds activations of L (1 + (p - 1) / (p v)) layers.
    [("gpt3-175b", 96 * (1 + 7 / 24), 45.5625, 12.3516), ("gpt-1t", 128, 32.959, 26.5625)],
)
def test_bytes_of_gpt_layers_are_the_published_ones(
    name: str, layers: float, static_gib: float, selective_gib: float
) -> None:
    problem = table(name)
    layer = problem.runs[1]
    selective = next(option for option in layer.options if option.name == "select")
    assert layer.count / problem.stages * layer.static_bytes / GIB == pytest.approx(static_gib, rel=1e-4)
    assert layers * selective.saved_bytes / GIB == pytest.approx(selective_gib, rel=1e-4)


def test_devices_are_the_published_numbers() -> None:
    devices = {name: layout.devices for name, layout in LAYOUTS.items()}
    assert devices["llama3-405b-16k"] == 16384
    assert devices["llama3-405b-8k"] == devices["pangu-ultra-135b"] == 8192
    assert devices["pangu-200b"] == 2048
    assert devices["gpt-1t"] == 512
    assert min(devices.values()) == 64
    tokens = {
        name: layout.data_parallel * layout.micro_batches * layout.samples * layout.sequence
        for name, layout in LAYOUTS.items()
    }
    assert tokens["llama3-405b-8k"] == tokens["llama3-405b-16k"] == 16 * 1024**2


@pytest.mark.parametrize("name", LAYOUTS)
def test_options_trade_memory_for_time(name: str) -> None:
    problem = table(name)
    options = problem.runs[1].options
    assert (options[0].name, options[-1].name) == ("none", "full")
    assert [option.extra_backward_ms for option in options] == sorted(option.extra_backward_ms for option in options)
    assert options[-1].extra_backward_ms == problem.runs[1].forward_ms
    limits = [limited(problem, room).memory_limit_bytes[0] for room in ROOM.values()]
    assert limits == sorted(limits)
    assert limits[-1] <= 58 * GIB


@pytest.mark.parametrize("name", [name for name in LAYOUTS if table(name).chunks == 1])
def test_plans_with_one_chunk_are_proved_optimal(name: str) -> None:
    for room in ROOM.values():
        problem = limited(table(name), room)
        solution = solve(problem, "bmpipe", SolveLimits(time_limit_s=60))
        assert solution.status is Status.OPTIMAL and solution.decision is not None
        assert check(problem, solution.decision) == ()
