"""Compiling for a trace leaves MindSpore, the network and the random numbers of training as they were."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import mindspore
import numpy as np
import pytest
from apply_networks import Network, batch
from mindspore import Tensor, nn, ops
from mindspore.graph.api import _cell_graph_executor, cells_compile_cache
from mindspore.parallel import _auto_parallel_context as parallel_context

from mindspore_bmpipe.graph.preserve import preserved_state

VERSION = f"MindSpore {mindspore.__version__} has changed what mindspore_bmpipe builds on: "


class Joint(nn.Cell):
    """Loss and gradients in one graph, as a trace compiles them."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.weights = mindspore.ParameterTuple(network.trainable_params())
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, x, y):
        return self.network(x, y), self.gradient(self.network, self.weights)(x, y)

    def init_parameters_data(self, *_, **__):
        return {}


def compile_joint(network: nn.Cell, rename: bool = False) -> str:
    """A real compile that also does what wrapping a network carelessly does; returns the phase."""
    joint = Joint(network)
    if rename:
        network.update_parameters_name("careless.")
    network.set_train(True)
    phase, _ = _cell_graph_executor.compile(joint, *batch(), phase="export.preserve", do_convert=False)
    assert _cell_graph_executor.has_compiled(phase)
    return phase


def parallel_settings() -> dict[str, Any]:
    handle = parallel_context.auto_parallel_context()._context_handle
    names = [name for name in dir(handle) if name.startswith("get_") and name != "get_instance"]
    names = [name for name in names if "fusion_split" not in name]
    return {**{name: getattr(handle, name)() for name in names}, "strategy": handle_strategy()}


def handle_strategy() -> Any:
    return parallel_context._get_auto_parallel_context("dataset_strategy")


@pytest.fixture(autouse=True)
def clean_context() -> Iterator[None]:
    mindspore.reset_auto_parallel_context()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    yield
    mindspore.reset_auto_parallel_context()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)


def train(trace: Callable[[nn.Cell], None] | None) -> tuple[list[bytes], list[bytes]]:
    """Losses of three training steps with dropout, and the weights after them, as bytes."""
    mindspore.set_seed(11)
    mindspore.manual_seed(11)
    network = Network(blocks=2)
    network.blocks[0].extra = mindspore.mint.nn.Dropout(p=0.3)
    network.set_train()
    if trace is not None:
        with preserved_state(network):
            trace(network)
    step = nn.TrainOneStepCell(network, nn.Adam(network.trainable_params(), 0.01)).set_train()
    losses = [step(*batch()).asnumpy().tobytes() for _ in range(3)]
    noise = nn.Dropout(p=0.5).set_train()(Tensor(np.ones((4, 4), np.float32)))
    fresh = nn.Dense(2, 2).weight.asnumpy()
    weights = [parameter.asnumpy().tobytes() for parameter in network.get_parameters()]
    return losses, [*weights, noise.asnumpy().tobytes(), fresh.tobytes(), np.random.rand(3).tobytes()]


def consuming_trace(network: nn.Cell) -> None:
    compile_joint(network, rename=True)
    nn.Dense(3, 3)
    nn.Dropout(p=0.5).set_train()(Tensor(np.ones((4, 4), np.float32)))
    np.random.rand(7)


def test_training_after_a_trace_is_bitwise_the_same() -> None:
    losses, rest = train(None)
    assert len(set(losses)) == 3
    assert train(consuming_trace) == (losses, rest)


def test_without_it_training_would_differ() -> None:
    """The comparison above can fail: what the trace consumes does matter to training."""
    _, rest = train(None)
    mindspore.set_seed(11)
    mindspore.manual_seed(11)
    network = Network(blocks=2)
    consuming_trace(network)
    assert np.random.rand(3).tobytes() != rest[-1]


def snapshot(network: nn.Cell) -> dict[str, Any]:
    return {
        f"{path}:{name}": (id(value), sorted(map(str, value)) if isinstance(value, (dict, set, list)) else None)
        for path, cell in network.cells_and_names()
        for name, value in vars(cell).items()
    }


@pytest.mark.parametrize("mode", [mindspore.GRAPH_MODE, mindspore.PYNATIVE_MODE])
def test_cells_and_parameters_are_untouched(mode: int) -> None:
    mindspore.set_context(mode=mode)
    network = Network(blocks=2)
    names = [parameter.name for parameter in network.get_parameters()]
    before = snapshot(network)
    with preserved_state(network):
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        compile_joint(network, rename=True)
        network.extra = 1
        network.blocks[0].cell_init_args = "lazy_inline_x"
        assert snapshot(network) != before
        assert [parameter.name for parameter in network.get_parameters()] != names
    assert snapshot(network) == before
    assert [parameter.name for parameter in network.get_parameters()] == names
    assert mindspore.get_context("mode") == mode


def test_networks_with_unallocated_weights_stay_unallocated() -> None:
    with nn.utils.no_init_parameters():
        network = Network(blocks=2)
    assert all(parameter.has_init for parameter in network.get_parameters())
    with preserved_state(network):
        compile_joint(network)
    assert all(parameter.has_init for parameter in network.get_parameters())


def test_graphs_compiled_meanwhile_are_released_and_older_ones_kept() -> None:
    network = Network(blocks=2)
    network(*batch())
    kept = set(network.compile_cache)
    assert kept
    with preserved_state(network):
        network(*batch(16))
        phase = compile_joint(network)
        joint = Joint(network)
        joint_phase, _ = _cell_graph_executor.compile(joint, *batch(), phase="export.kept", do_convert=False)
        within = set(network.compile_cache) - kept
    assert len(within) == 1
    assert network.compile_cache == kept
    for gone in (phase, joint_phase, *within):
        assert not _cell_graph_executor.has_compiled(gone)
    assert all(_cell_graph_executor.has_compiled(phase) for phase in kept)
    assert not joint.compile_cache


SETTINGS = {
    "semi-automatic": {"parallel_mode": "semi_auto_parallel", "device_num": 16, "global_rank": 5, "pipeline_stages": 4},
    "full batch": {"parallel_mode": "semi_auto_parallel", "device_num": 8, "full_batch": True},
    "full batch by strategy": {"parallel_mode": "auto_parallel", "device_num": 8, "dataset_strategy": "full_batch"},
    "dataset strategy": {
        "parallel_mode": "semi_auto_parallel",
        "device_num": 8,
        "dataset_strategy": ((4, 1), (4, 1)),
    },
    "broadcast": {"parallel_mode": "data_parallel", "device_num": 8, "parameter_broadcast": True},
    "schedule": {
        "parallel_mode": "semi_auto_parallel",
        "pipeline_stages": 2,
        "device_num": 8,
        "pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "gpipe"},
        "enable_parallel_optimizer": True,
        "parallel_optimizer_config": {"optimizer_level": "level3"},
    },
    "untouched": {},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_parallel_context_is_put_back(name: str) -> None:
    if SETTINGS[name]:
        mindspore.set_auto_parallel_context(**SETTINGS[name])
    network = Network(blocks=2)
    before = parallel_settings()
    with preserved_state(network):
        assert mindspore.get_auto_parallel_context("parallel_mode") == "stand_alone"
        assert mindspore.get_auto_parallel_context("pipeline_stages") == 1
        assert not mindspore.get_auto_parallel_context("full_batch")
        compile_joint(network)
    assert parallel_settings() == before


def test_changes_made_within_are_undone_too() -> None:
    mindspore.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=8, pipeline_stages=2)
    before = parallel_settings()
    with preserved_state():
        mindspore.set_auto_parallel_context(
            parallel_mode="auto_parallel",
            device_num=4,
            global_rank=3,
            strategy_ckpt_config={"save_file": "x.json"},
            pipeline_config={"pipeline_interleave": True, "pipeline_scheduler": "seqpipe"},
        )
    after = parallel_settings()
    # Nothing can clear this mark, and it only says that the rank, 0 again, is not asked of the cluster.
    after.pop("get_global_rank_is_set"), before.pop("get_global_rank_is_set")
    assert after == before


def test_everything_is_put_back_after_an_error() -> None:
    mindspore.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=8, pipeline_stages=2)
    mindspore.set_seed(4)
    random.seed(4)
    network = Network(blocks=2)
    expected = parallel_settings(), snapshot(network), random.getstate(), mindspore.get_seed()

    class Interrupted(BaseException):
        pass

    def interrupted_trace() -> None:
        with preserved_state(network):
            compile_joint(network)
            random.random()
            mindspore.set_seed(9)
            raise Interrupted

    with pytest.raises(Interrupted):
        interrupted_trace()
    assert (parallel_settings(), snapshot(network), random.getstate(), mindspore.get_seed()) == expected


def test_the_planner_key_is_left_alone() -> None:
    getters = parallel_context._get_auto_parallel_context_func_map
    getters["pipeline_planner"] = lambda: pytest.fail("read")
    try:
        with preserved_state():
            pass
    finally:
        del getters["pipeline_planner"]


def test_contexts_can_be_nested() -> None:
    mindspore.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=8, pipeline_stages=2)
    before = parallel_settings()
    network = Network(blocks=2)
    with preserved_state(network):
        with preserved_state(network):
            compile_joint(network)
        assert mindspore.get_auto_parallel_context("parallel_mode") == "stand_alone"
    assert parallel_settings() == before


def test_private_names_exist() -> None:
    seeds = importlib.import_module("mindspore.common.seed")
    assert isinstance(getattr(seeds, "_KERNEL_SEED", None), dict), f"{VERSION}operator seeds are kept elsewhere"
    mindspore.set_seed(12)
    assert getattr(seeds, "_GLOBAL_SEED", None) == 12, f"{VERSION}the global seed is kept elsewhere"
    cell = nn.Dense(1, 1)
    cell.compile_cache.add("phase")
    assert cells_compile_cache.get(id(cell)) == {"phase"}, f"{VERSION}cells_compile_cache does not follow cells"
    cell.compile_cache.clear()
    for table in ("_get_auto_parallel_context_func_map", "_set_auto_parallel_context_func_map"):
        assert {"parallel_mode", "full_batch"} <= set(getattr(parallel_context, table, ())), f"{VERSION}{table} is gone"
    release = getattr(_cell_graph_executor._graph_executor, "del_net_res", None)
    assert callable(release), f"{VERSION}compiled graphs are released another way"
    assert Tensor(1).shape == ()
