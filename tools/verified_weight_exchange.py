"""Collectives on weights and gradients of data-parallel ranks: predicted, and in the graphs that MindSpore compiles.

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
from mindspore import Tensor, nn, ops  # noqa: E402
from mindspore.nn.utils import no_init_parameters  # noqa: E402

from mindspore_bmpipe.costs.network import NetworkCosts, network_costs  # noqa: E402
from mindspore_bmpipe.costs.static_memory import StaticSettings  # noqa: E402
from mindspore_bmpipe.costs.weight_exchange import Moment, weight_collectives  # noqa: E402
from mindspore_bmpipe.graph.mindir import BYTES_PER_ELEMENT, Function, Module, Node, load_module  # noqa: E402
from mindspore_bmpipe.graph.trace import trace  # noqa: E402
from mindspore_bmpipe.sources import build_factory  # noqa: E402
from mindspore_bmpipe.verify.children import Rank, compile_ranks  # noqa: E402
from mindspore_bmpipe.verify.jobs import Answer, Compile  # noqa: E402
from mindspore_bmpipe.verify.stand_in import stand_in  # noqa: E402

STAGES = 2
MICRO_BATCHES = 3
LLAMA = "tools.examples.llama:factory"
CAST = "tools.verified_weight_exchange:factory"
_LARGE = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 512}
"""Products of 64 KB and more, which are shared out, and smaller ones, which are not."""
NETWORKS: Mapping[str, tuple[str, dict[str, Any], Mapping[str, int]]] = {
    name: (source, settings, cells)
    for name, source, settings, cells in (
        ("llama", LLAMA, _LARGE, {"embedding": 0, "blocks.0": 0, "blocks.1": 1, "norm": 1, "head": 1, "loss": 1}),
        ("llama, tied", LLAMA, {**_LARGE, "tied": True},
         {"embedding": 0, "blocks.0": 0, "blocks.1": 1, "norm": 1, "head": 1, "loss": 1}),
        ("cast to float16", CAST, {}, {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}),
    )
}  # fmt: skip
"""Name -> factory, its settings, and the stage of each cell."""

Found = Counter[tuple[str, str, int, int]]
"""(moment, primitive, ranks, bytes of the whole tensor) -> how often."""


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


CASES = tuple(
    Case(network, ranks, level, stage)
    for network in NETWORKS
    for ranks in (2, 4)
    for level in range(4)
    for stage in range(STAGES)
    # MindSpore 2.10 fails on the first stage of a tied table where gradients are shared out: it adds shares to a whole.
    if not (network == "llama, tied" and level > 1)
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


def compiled(cases: Sequence[Case]) -> dict[Case, Found]:
    """What MindSpore's graphs hold."""
    # One process for each: a second compile of shared weights in one process fails on their shapes.
    ranks = [Rank(case.stage * case.data_parallel, STAGES * case.data_parallel, (_compile(case),)) for case in cases]
    with tempfile.TemporaryDirectory(prefix="bmpipe-") as folder:
        answers = compile_ranks(ranks, stand_in(), Path(folder))
        return {case: in_module(_module(case, answers[case.name])) for case in cases}


def _module(case: Case, answer: Answer) -> Module:
    if answer.graph is None:
        raise RuntimeError(f"{case.name}: {answer.error}")
    return load_module(answer.graph)


def _compile(case: Case) -> Compile:
    source, settings, cells = NETWORKS[case.network]
    return Compile(
        name=case.name,
        source=source,
        settings={**settings, "batch": case.data_parallel},
        stages=STAGES,
        micro_batches=MICRO_BATCHES,
        cells={name: (stage, 0) for name, stage in cells.items()},
        optimizer_shard_level=case.level,
    )


def in_module(module: Module) -> Found:
    """Collectives on weights and gradients in one rank's graph."""
    found: Found = Counter()
    for function in (module.entry, *module.functions.values()):
        for node in function.nodes:
            if node.operation in ("AllGather", "AllReduce", "ReduceScatter") and _is_of_weights(node):
                ranks = len(node.attributes["group_rank_ids"])
                size = math.prod(node.type.shape) * BYTES_PER_ELEMENT[node.type.dtype]
                volume = size * (ranks if node.operation == "ReduceScatter" else 1)
                found[_moment(function, node).value, node.operation, ranks, volume] += 1
    return found


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
    cells = NETWORKS[case.network][2]
    costs = _costs(case.network, case.data_parallel)
    # MindSpore's own accumulation keeps gradients in the type of the weight.
    static = StaticSettings(case.data_parallel, case.level, float32_state=False)
    found: Found = Counter()
    for number, unit in enumerate(costs.split.units):
        stage = next(stage for cell, stage in cells.items() if cell in unit.cells)
        if stage == case.stage:
            for item in weight_collectives(costs.graph, costs.split, number, static):
                found[item.moment.value, item.primitive, len(item.ranks), item.volume_bytes] += 1
    return found


@lru_cache
def _costs(name: str, data_parallel: int) -> NetworkCosts:
    source, settings, cells = NETWORKS[name]
    with no_init_parameters():
        network, inputs = build_factory(source, {**settings, "batch": data_parallel})
    return network_costs(trace(network, *inputs), units=sorted(cells) if source == CAST else None)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(2, 4), help="only so many data-parallel ranks")
    wanted = parser.parse_args().ranks
    cases = [case for case in CASES if wanted in (None, case.data_parallel)]
    print("| network | ranks | level | stage | start | forward | backward | end | predicted |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case, found in compiled(cases).items():
        columns = [_text(found, moment) for moment in Moment]
        verdict = "same" if predicted(case) == found else "differs"
        print("| " + " | ".join(map(str, (*case, *columns, verdict))) + " |")


def _text(found: Found, moment: Moment) -> str:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for (when, primitive, _, volume), count in found.items():
        if when == moment.value:
            counts[primitive] += count
            sizes[primitive] += count * volume
    return ", ".join(f"{counts[name]} {name} {sizes[name] / 1024:.0f} KB" for name in sorted(counts))


if __name__ == "__main__":
    main()
