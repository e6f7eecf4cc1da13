"""Memory and layer times of four GPTs beside those of Korthikanti et al. (arXiv 2205.05198), as in docs/costs.md.

    python tools/korthikanti_table.py            # all four; compiles eight graphs, about three minutes on two cores
    python tools/korthikanti_table.py 22B 1T

One layer of the real width is compiled by MindSpore's Ascend front end as one of eight tensor-parallel ranks, with and
without sequence parallelism, and scaled to the first stage by our schedule's in-flight row. Published numbers come from
`tests/data/korthikanti.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from mindspore_bmpipe.costs.hardware import Hardware, load_hardware
from mindspore_bmpipe.costs.network import NetworkCosts, network_costs, unit_static_bytes
from mindspore_bmpipe.costs.recompute import RecomputeModel
from mindspore_bmpipe.costs.static_memory import StaticSettings
from mindspore_bmpipe.costs.unit_model import UnitModel, indices_of
from mindspore_bmpipe.graph.cell_graph import Sharding
from mindspore_bmpipe.graph.recorded import graph_of
from mindspore_bmpipe.schedule import in_flight_rows, make_schedule
from mindspore_bmpipe.verify.sharded import record_sharded

PUBLISHED = Path(__file__).resolve().parent.parent / "tests" / "data" / "korthikanti.json"
GIB = 1 << 30
LAYER = "blocks.0"
CORE = ("0.attention.core",)
"""What the paper's selective recomputation runs again: everything between query, key, value and the last projection."""
MICRO_BATCHES_PER_STAGE = 4
"""Enough micro-batches for the first stage to reach its steady in-flight row."""


def published() -> dict[str, Any]:
    """What the paper says."""
    found: dict[str, Any] = json.loads(PUBLISHED.read_text("utf-8"))
    return found


def layer_costs(model: Mapping[str, int], sequence: int, vocab: int, sequence_parallel: bool) -> NetworkCosts:
    """Costs of one rank of a network with one layer of a model's width.

    Args:
        model: row of the published table: hidden size h, heads a, tensor-parallel ranks t, micro-batch b.
        sequence: tokens of a sample.
        vocab: rows of the embedding table.
        sequence_parallel: whether ranks share the tokens of norms, dropouts and residual sums.
    """
    settings = {
        "layers": 1, "hidden": model["h"], "heads": model["a"], "vocab": vocab, "sequence": sequence,
        "batch": model["b"], "dtype": "float16", "sequence_parallel": sequence_parallel,
    }  # fmt: skip
    sharding = Sharding(data_parallel=1, tensor_parallel=model["t"])
    recorded, _ = record_sharded("tools.examples.gpt_sharded:factory", settings, sharding)
    return network_costs(graph_of(recorded))


def layer_of(costs: NetworkCosts) -> UnitModel:
    """Model of the layer."""
    return costs.models[_layer_number(costs)]


def layers_in_flight(model: Mapping[str, int]) -> float:
    """Layers whose activations the first stage holds at once, each for one micro-batch."""
    stages, chunks = model["p"], model["v"]
    kind = "1f1b" if chunks == 1 else "interleaved"
    schedule = make_schedule(kind, stages, chunks, MICRO_BATCHES_PER_STAGE * stages)
    return model["L"] / (stages * chunks) * max(sum(row) for row in in_flight_rows(schedule)[0])


@dataclass(frozen=True)
class Kept:
    """Bytes a layer keeps of one micro-batch."""

    graph_bytes: float
    """As the graph has it: masks in the type of what they cover, gathered inputs of products kept."""
    paper_bytes: float
    """As the paper counts: masks of one byte; what a product gathers is gathered again in backward."""


def kept(layer: UnitModel, sizes: Mapping[str, int], cells: tuple[str, ...]) -> Kept:
    """What a layer keeps when `cells` are recomputed."""
    storages, _ = RecomputeModel(layer).kept(cells)
    values = layer.sizes @ layer.basis.values(sizes)
    paper = storages
    halved = 0.0
    for operation in layer.operations[: layer.forward_count]:
        if operation.primitive == "AllGather" and operation.writes & paper:
            paper = (paper & ~operation.writes) | (operation.reads & layer.keepable)
        if operation.primitive == "Dropout":
            mask = indices_of(operation.writes)[-1]  # the result comes first
            halved += float(values[mask]) / 2 if storages >> mask & 1 else 0.0
    return Kept(float(values[indices_of(storages)].sum()), float(values[indices_of(paper)].sum()) - halved)


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds of one layer and one micro-batch."""

    forward_ms: float
    """Forward."""
    backward_ms: float
    """Backward without recomputation."""
    full_ms: float
    """What recomputing all of it adds to backward."""
    selective_ms: float
    """What recomputing the core of attention adds."""

    @property
    def none_ms(self) -> float:
        """Forward and backward without recomputation."""
        return self.forward_ms + self.backward_ms

    @property
    def full_ratio(self) -> float:
        """Time with full recomputation over that without."""
        return 1 + self.full_ms / self.none_ms

    @property
    def selective_ratio(self) -> float:
        """Time with selective recomputation over that without."""
        return 1 + self.selective_ms / self.none_ms


def layer_times(layer: UnitModel, hardware: Hardware, sizes: Mapping[str, int]) -> LayerTimes:
    """Times of a layer on a machine."""
    times = layer.operation_ms(hardware, sizes)
    model = RecomputeModel(layer)

    def again(cells: tuple[str, ...]) -> float:
        return float(np.sum(times[list(model.kept(cells)[1])]))

    forward = layer.forward_count
    return LayerTimes(float(times[:forward].sum()), float(times[forward:].sum()), again(model.whole()), again(CORE))


def static_layer_bytes(costs: NetworkCosts) -> int:
    """Weights, gradients and optimizer state of the layer on one device."""
    return unit_static_bytes(costs, _layer_number(costs), StaticSettings())[0]


@dataclass(frozen=True)
class Row:
    """One model: our gibibytes on one device of the first stage, as the paper counts and as the graph has it."""

    static: float
    """Weights, gradients and optimizer state."""
    none: tuple[float, float]
    """Activations with tensor parallelism and no recomputation."""
    selective: tuple[float, float]
    """Activations with sequence parallelism and selective recomputation."""


def measure(model: Mapping[str, int], whole: NetworkCosts, shared: NetworkCosts, sequence: int) -> Row:
    """Numbers of one model.

    Args:
        model: its row of the published table.
        whole: costs of a rank with tensor parallelism alone.
        shared: costs of a rank with sequence parallelism too.
        sequence: tokens of a sample.
    """
    sizes = {"b": model["b"], "s": sequence}
    layers = layers_in_flight(model) / GIB
    none, selective = kept(layer_of(whole), sizes, ()), kept(layer_of(shared), sizes, CORE)
    return Row(
        static_layer_bytes(whole) * model["L"] / model["p"] / GIB,
        (none.paper_bytes * layers, none.graph_bytes * layers),
        (selective.paper_bytes * layers, selective.graph_bytes * layers),
    )


def _layer_number(costs: NetworkCosts) -> int:
    return [unit.name for unit in costs.split.units].index(LAYER)


def _kept_rows(layer: UnitModel, sizes: Mapping[str, int], cells: tuple[str, ...]) -> Iterator[str]:
    storages, _ = RecomputeModel(layer).kept(cells)
    values = layer.sizes @ layer.basis.values(sizes)
    for place in indices_of(storages):
        kind = layer.storage_types[place]
        shape = ", ".join(str(size) for size in kind.shape)
        yield f"| {layer.storage_names[place]} | ({shape}) {kind.dtype} | {values[place] / (1 << 20):.3f} |"


def main() -> None:
    """Compile and print."""
    data = published()
    order = data["analytic_gib"]["order"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(order))
    parser.add_argument("--kept", action="store_true", help="list what a layer of each model keeps, tensor by tensor")
    options = parser.parse_args()
    unknown = sorted(set(options.models) - set(order))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; choose from {', '.join(order)}")
    sequence = data["s"]
    print("| model | what | published GiB | ours, counted alike | error | as the graph has it |")
    print("|---|---|---|---|---|---|", flush=True)
    first = None
    details: list[str] = []
    for name in options.models or order:
        model = data["models"][name]
        whole, shared = (layer_costs(model, sequence, data["vocab"], flag) for flag in (False, True))
        first = first or (name, model, whole, shared)
        row = measure(model, whole, shared, sequence)
        analytic = {key: values[order.index(name)] for key, values in data["analytic_gib"].items() if key != "order"}
        for what, expected, (alike, graph) in (
            ("weights and optimizer", analytic["parameters_and_optimizer"], (row.static, row.static)),
            ("activations, tensor parallel", analytic["activations_none"], row.none),
            ("activations, sequence parallel + selective", analytic["activations_sp_selective"], row.selective),
        ):
            error = alike / expected - 1
            print(f"| {name} | {what} | {expected:.3f} | {alike:.3f} | {error:+.2%} | {graph:.3f} |", flush=True)
        for title, costs, cells in (("tensor parallel", whole, ()), ("sequence parallel + selective", shared, CORE)):
            details += [f"\n{name}, {title}:\n", "| kept | shape | MiB |", "|---|---|---|"]
            details += _kept_rows(layer_of(costs), {"b": model["b"], "s": sequence}, cells)
    if first is not None and first[0] == "22B":
        _print_times(first[1], first[2], first[3], sequence, data["measured_layer_ms_22B"])
    if options.kept:
        print("\n".join(details))


def _print_times(
    model: Mapping[str, int], whole: NetworkCosts, shared: NetworkCosts, sequence: int, measured: Mapping[str, Any]
) -> None:
    sizes, machine = {"b": model["b"], "s": sequence}, load_hardware("a100")
    plain, split = (layer_times(layer_of(costs), machine, sizes) for costs in (whole, shared))
    none = sum(measured["none"])
    print("\n| 22B layer | measured forward, backward ms | ours | measured ratio | ours | error |")
    print("|---|---|---|---|---|---|")
    for name, times, extra in (
        ("none", plain, 0.0),
        ("full", plain, plain.full_ms),
        ("selective", plain, plain.selective_ms),
        ("sequence_parallel", split, 0.0),
        ("selective_sp", split, split.selective_ms),
    ):
        forward, backward = measured[name]
        ratio, ours = (forward + backward) / none, (times.none_ms + extra) / plain.none_ms
        print(
            f"| {name} | {forward}, {backward} | {times.forward_ms:.2f}, {times.backward_ms + extra:.2f} | "
            f"{ratio:.3f} | {ours:.3f} | {ours / ratio - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
