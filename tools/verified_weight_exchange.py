"""Collectives on weights and gradients of a stage, and what a rank holds: predicted, and in graphs of MindSpore.

python tools/verified_weight_exchange.py                # every case; some minutes on two cores
python tools/verified_weight_exchange.py --ranks 2      # only 2 data-parallel ranks a stage
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import mindspore  # noqa: E402 -- after the path set above, as what follows
import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn, ops  # noqa: E402
from mindspore.common.initializer import initializer  # noqa: E402
from mindspore.nn.utils import no_init_parameters  # noqa: E402

from mindspore_bmpipe.costs.logical import logical_graph  # noqa: E402
from mindspore_bmpipe.costs.network import NetworkCosts, network_costs  # noqa: E402
from mindspore_bmpipe.costs.static_memory import (  # noqa: E402
    StaticSettings,
    sharing_level,
    static_bytes,
    weight_bytes,
)
from mindspore_bmpipe.costs.weight_exchange import Moment, weight_collectives  # noqa: E402
from mindspore_bmpipe.graph.cell_graph import Sharding  # noqa: E402
from mindspore_bmpipe.graph.mindir import (  # noqa: E402
    BYTES_PER_ELEMENT,
    Function,
    Module,
    Node,
    TensorType,
    load_module,
)
from mindspore_bmpipe.graph.trace import trace  # noqa: E402
from mindspore_bmpipe.sources import build_factory  # noqa: E402
from mindspore_bmpipe.verify.children import Rank, compile_ranks  # noqa: E402
from mindspore_bmpipe.verify.jobs import Answer, Compile  # noqa: E402
from mindspore_bmpipe.verify.stand_in import stand_in  # noqa: E402

STAGES = 2
MICRO_BATCHES = 3
LLAMA = "tools.examples.llama:factory"
CAST = "tools.verified_weight_exchange:factory"
MIXTRAL = "tools.examples.mixtral_sharded:factory"
PAIRS = "tools.verified_weight_exchange:pairs"
_LARGE = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 512}
"""Products of 64 KB and more, which are shared out, and smaller ones, which are not."""
_LLAMA_CELLS = {"embedding": 0, "blocks.0": 0, "blocks.1": 1, "norm": 1, "head": 1, "loss": 1}


class Network(NamedTuple):
    """A network to compile."""

    source: str
    settings: Mapping[str, Any]
    """Settings of its factory, without batch and degrees."""
    cells: Mapping[str, int]
    """Stage of each cell."""
    tensor_parallel: int = 1
    expert_parallel: int = 1


NETWORKS: Mapping[str, Network] = {
    "llama": Network(LLAMA, _LARGE, _LLAMA_CELLS),
    "llama, tied": Network(LLAMA, {**_LARGE, "tied": True}, _LLAMA_CELLS),
    "cast to float16": Network(CAST, {}, {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}),
    "mixtral": Network(MIXTRAL, {"layers": 2}, _LLAMA_CELLS, expert_parallel=2),
    "mixtral, pairs": Network(MIXTRAL, {"layers": 2}, _LLAMA_CELLS, 2, expert_parallel=2),
    "pairs": Network(
        PAIRS, {}, {"layers.0": 0, "layers.1": 0, "layers.2": 0, "layers.3": 1, "layers.4": 1, "layers.5": 1}, 2
    ),
    "pairs of 4": Network(
        PAIRS, {}, {"layers.0": 0, "layers.1": 0, "layers.2": 0, "layers.3": 1, "layers.4": 1, "layers.5": 1}, 4
    ),
}

Collective = tuple[str, str, tuple[int, ...], int]
"""Moment, primitive, ranks within the stage, bytes of the whole tensor."""


class Found(NamedTuple):
    """What a rank does with weights."""

    collectives: Counter[Collective]
    """How often each runs."""
    owned_bytes: Mapping[str, int]
    """Weight -> bytes of weight, buffer of gradients, and optimizer state, without what is gathered."""


class Case(NamedTuple):
    """One compile."""

    network: str
    data_parallel: int
    level: int
    stage: int

    @property
    def name(self) -> str:
        """Name of the compiled file."""
        return f"{self.network.replace(', ', '-').replace(' ', '_')}-{self.data_parallel}-{self.level}-{self.stage}"

    @property
    def sharding(self) -> Sharding:
        """Ranks of a stage."""
        return _sharding(NETWORKS[self.network], self.data_parallel)


CASES = tuple(
    Case(network, ranks, level, stage)
    for network in NETWORKS
    for ranks in (2, 4)
    for level in range(4)
    for stage in range(STAGES)
    # MindSpore fails on a table tied over stages where gradients are shared out (`tests/test_verify_rules.py`).
    if not (network == "llama, tied" and level > 1)
    if not (network == "pairs of 4" and ranks > 2)
)


class Products(nn.Cell):
    """Products in float16 with weights kept in float32; the last weight cannot be cut evenly by 4."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (256, 256, 256, 258)
        self.layers = nn.CellList([nn.Dense(256, size, has_bias=False).to_float(mindspore.float16) for size in sizes])
        self.mean = ops.ReduceMean()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, 256) to a scalar."""
        for layer in self.layers:
            states = layer(states)
        return self.mean(states)


def factory(batch: int = 4) -> tuple[nn.Cell, tuple[Tensor, ...]]:
    """The network of such products."""
    return Products(), (Tensor(np.zeros((batch, 256)), mindspore.float32),)


class Pair(nn.Cell):
    """A product to another width and one back, perhaps with a scale between them."""

    def __init__(self, width: int, rows: int, columns: int, repeats: int = 1, **options: bool) -> None:
        super().__init__()
        cut = columns // repeats
        self.is_scaled = options.get("is_scaled", False)
        self.up = nn.Dense(8, width, has_bias=False)
        self.up.matmul.shard(((rows, 1), (cut, 1)))
        self.scale = Parameter(initializer("ones", (width if self.is_scaled else 8,)), name="scale")
        self.multiply = ops.Mul().shard(((rows, 1), (1,)))
        self.down = nn.Dense(width, 8, has_bias=False)
        self.down.matmul.shard(((rows, cut), (1, cut)))
        for weight in self.trainable_params() if options.get("is_frozen", False) else ():
            weight.requires_grad = False

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, 8) to (b, 8)."""
        if self.is_scaled:
            return self.down(self.multiply(self.up(states), self.scale))
        return self.multiply(self.down(self.up(states)), self.scale)


class Pairs(nn.Cell):
    """Weights that all tensor-parallel ranks hold, some of them or one, on both sides of what MindSpore shares out.

    A scale of just 64 KB; products of 96 KB of which each of two ranks holds 48 KB; one of 8194 rows, which go evenly
    among the holders of the whole only; one of 4098, which go evenly among two of four; some that are not trained.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.layers = nn.CellList(
            [
                Pair(16384, rows, columns, repeats=columns, is_scaled=True),
                Pair(3072, rows, columns),
                Pair(8200 if columns == 4 else 8194, rows, columns),
                Pair(4098, rows, columns, repeats=columns),
                Pair(4096, rows, columns, repeats=2),
                Pair(2048, rows, columns, is_scaled=True, is_frozen=True),
            ]
        )
        self.mean = ops.ReduceMean()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, 8) to a scalar."""
        for layer in self.layers:
            states = layer(states)
        return self.mean(states)


def pairs(batch: int = 4, data_parallel: int = 1, tensor_parallel: int = 1) -> tuple[nn.Cell, tuple[Tensor, ...]]:
    """The network of pairs of products."""
    return Pairs(data_parallel, tensor_parallel), (Tensor(np.zeros((batch, 8)), mindspore.float32),)


def compiled(cases: Sequence[Case]) -> dict[Case, Found]:
    """What MindSpore's graphs hold."""
    # One process for each: a second compile of shared weights in one process fails on their shapes.
    ranks = [Rank(case.stage * case.sharding.ranks, STAGES * case.sharding.ranks, (_compile(case),)) for case in cases]
    with tempfile.TemporaryDirectory(prefix="bmpipe-") as folder:
        answers = compile_ranks(ranks, stand_in(), Path(folder))
        return {case: in_module(_module(case, answers[case.name]), case) for case in cases}


def _module(case: Case, answer: Answer) -> Module:
    if answer.graph is None:
        raise RuntimeError(f"{case.name}: {answer.error}")
    return load_module(answer.graph)


def _compile(case: Case) -> Compile:
    network = NETWORKS[case.network]
    return Compile(
        name=case.name,
        source=network.source,
        settings=_settings(network, case.sharding),
        stages=STAGES,
        micro_batches=MICRO_BATCHES,
        cells={name: (stage, 0) for name, stage in network.cells.items()},
        optimizer_shard_level=case.level,
    )


def _settings(network: Network, sharding: Sharding) -> dict[str, Any]:
    names = ["data_parallel", "tensor_parallel", *(["expert_parallel"] if network.expert_parallel > 1 else [])]
    degrees = {name: getattr(sharding, name) for name in names} if sharding.is_shared else {}
    return {**network.settings, "batch": sharding.data_parallel, **degrees}


def _sharding(network: Network, data_parallel: int) -> Sharding:
    return Sharding(data_parallel, network.tensor_parallel, expert_parallel=network.expert_parallel)


def in_module(module: Module, case: Case) -> Found:
    """Collectives on weights and gradients in one rank's graph, and what it holds of every weight."""
    found: Counter[Collective] = Counter()
    first = case.stage * case.sharding.ranks
    for function in (module.entry, *module.functions.values()):
        for node in function.nodes:
            if node.operation in ("AllGather", "AllReduce", "ReduceScatter") and _is_of_weights(node):
                ranks = tuple(rank - first for rank in node.attributes["group_rank_ids"])
                volume = _bytes(node.type) * (len(ranks) if node.operation == "ReduceScatter" else 1)
                found[_moment(function, node).value, node.operation, ranks, volume] += 1
    owned: Counter[str] = Counter()
    weights = _costs(case.network, case.data_parallel).graph.parameters
    for name, kind in module.parameters.items():
        weight = name.removeprefix("moment1.").removeprefix("moment2.").removeprefix("accu_grads.")
        if weight in weights:
            owned[weight] += _bytes(kind)
    return Found(found, owned)


def _bytes(kind: TensorType) -> int:
    return math.prod(kind.shape) * BYTES_PER_ELEMENT[kind.dtype]


def _is_of_weights(node: Node) -> bool:
    """Gathers of weights say whether they are to be recomputed; sums of gradients stand in scopes of their own."""
    if node.operation == "AllGather":
        return "recompute" in node.attributes
    return any(part in node.scope for part in ("Grad__Mirror", "Grad__MicroStepAllGather", "Grad__VirtualAssignAdd"))


def _moment(function: Function, node: Node) -> Moment:
    if "▸" in function.name:
        return Moment.FORWARD
    if "◂" in function.name:
        return Moment.BACKWARD
    return Moment.START if node.operation == "AllGather" else Moment.END


def predicted(case: Case) -> Found:
    """The same as the costs of the network count it."""
    cells = NETWORKS[case.network].cells
    costs = _costs(case.network, case.data_parallel)
    # MindSpore's own accumulation keeps gradients in the type of the weight.
    static = StaticSettings(case.sharding, case.level, float32_state=False)
    found: Counter[Collective] = Counter()
    owned = {}
    for number, unit in enumerate(costs.split.units):
        stage = next(stage for cell, stage in cells.items() if cell in unit.cells)
        if stage == case.stage:
            for item in weight_collectives(costs.graph, costs.split, number, static):
                found[item.moment.value, item.primitive, item.ranks, item.volume_bytes] += 1
            for weight in (costs.graph.parameters[name] for name in unit.parameters):
                gathered = weight_bytes(weight) if sharing_level(weight, static) in (1, 2) else 0
                owned[weight.name] = static_bytes(weight, static) - gathered
    return Found(found, owned)


@lru_cache
def _costs(name: str, data_parallel: int) -> NetworkCosts:
    wanted = NETWORKS[name]
    sharding = _sharding(wanted, data_parallel)
    with no_init_parameters():
        network, inputs = build_factory(wanted.source, _settings(wanted, sharding))
    graph = trace(network, *inputs)
    if sharding.is_shared:
        graph = logical_graph(graph, sharding)
    return network_costs(graph, units=sorted(wanted.cells) if wanted.source in (CAST, PAIRS) else None)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(2, 4), help="only so many data-parallel ranks")
    wanted = parser.parse_args().ranks
    cases = [case for case in CASES if wanted in (None, case.data_parallel)]
    print("| network | ranks | level | stage | start | forward | backward | end | held KB | predicted |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case, found in compiled(cases).items():
        columns = [_text(found.collectives, moment) for moment in Moment]
        columns.append(f"{sum(found.owned_bytes.values()) / 1024:.0f}")
        verdict = "same" if predicted(case) == found else "differs"
        ranks = "x".join(map(str, (case.data_parallel, case.sharding.tensor_parallel)))
        print("| " + " | ".join(map(str, (case.network, ranks, case.level, case.stage, *columns, verdict))) + " |")


def _text(found: Counter[Collective], moment: Moment) -> str:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for (when, primitive, _, volume), count in found.items():
        if when == moment.value:
            counts[primitive] += count
            sizes[primitive] += count * volume
    return ", ".join(f"{counts[name]} {name} {sizes[name] / 1024:.0f} KB" for name in sorted(counts))


if __name__ == "__main__":
    main()
