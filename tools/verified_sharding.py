"""Logical against compiled sharding of whole networks, as the table of docs/graphs.md.

python tools/verified_sharding.py                # all degrees; a quarter of an hour on two cores
python tools/verified_sharding.py --ranks 4      # only degrees of 4 ranks
python tools/verified_sharding.py --network gpt  # only this network
python tools/verified_sharding.py --keep FOLDER  # keeps what it compiled, and does not compile it again
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from mindspore_bmpipe.costs.logical import logical_graph  # noqa: E402 -- found through the path set above
from mindspore_bmpipe.costs.network import network_costs, unit_static_bytes  # noqa: E402
from mindspore_bmpipe.costs.recompute import RecomputeModel  # noqa: E402
from mindspore_bmpipe.costs.static_memory import StaticSettings  # noqa: E402
from mindspore_bmpipe.graph.cell_graph import CellGraph, Sharding  # noqa: E402
from mindspore_bmpipe.graph.mindir import load_module  # noqa: E402
from mindspore_bmpipe.graph.recorded import graph_of, recorded_trace  # noqa: E402
from mindspore_bmpipe.graph.trace import trace  # noqa: E402
from mindspore_bmpipe.sources import build_factory  # noqa: E402
from mindspore_bmpipe.verify.children import Rank, compile_ranks  # noqa: E402
from mindspore_bmpipe.verify.jobs import Compile, read_answer  # noqa: E402
from mindspore_bmpipe.verify.stand_in import stand_in  # noqa: E402

NETWORKS: Mapping[str, dict[str, Any]] = {
    "llama": {"kv_heads": 4},
    "gpt": {},
    "mixtral": {},
    "llama_context": {"kv_heads": 4},
}
"""Settings of each network beside those of the case: 4 tensor-parallel ranks need 4 key/value heads."""
EXPERTS = "mixtral"
"""The network of experts."""
CONTEXT = "llama_context"
"""The network of long samples."""
DEGREES = (1, 2, 4)
MOST_RANKS = 4
"""Ranks of the largest case with experts or shared tokens."""
MEASURES = ("forward flops", "backward flops", "saved bytes", "static bytes", "forward sent", "backward sent",
            "forward moved", "backward moved", "working set")  # fmt: skip
"""Numbers compared for every unit; the last three are no part of the equality that is claimed."""


class Case(NamedTuple):
    """One network under one way to share it."""

    network: str
    data_parallel: int
    tensor_parallel: int
    sequence_parallel: bool = False
    expert_parallel: int = 1
    all_to_all: bool = False
    context_parallel: int = 1
    heads_exchanged: bool = False

    @property
    def name(self) -> str:
        """Name of the compiled file."""
        return "-".join(str(int(value)) if isinstance(value, bool) else str(value) for value in self)

    @property
    def sharding(self) -> Sharding:
        """Ranks of the case."""
        return Sharding(
            self.data_parallel, self.tensor_parallel, self.context_parallel, self.expert_parallel, self.all_to_all
        )

    @property
    def source(self) -> str:
        """Factory of the network."""
        return f"tools.examples.{self.network}_sharded:factory"


Numbers = dict[str, dict[str, float]]
"""Unit -> measure -> value."""


def all_cases() -> list[Case]:
    """Every network and degree, with and without sequence parallelism; experts with and without `AlltoAll`."""
    dense = [Case(*case) for case in itertools.product(("llama", "gpt"), DEGREES, DEGREES, (False, True))]
    experts = [
        Case(EXPERTS, data_parallel, tensor_parallel, False, expert_parallel, all_to_all)
        for data_parallel, tensor_parallel, expert_parallel in itertools.product(DEGREES, DEGREES, DEGREES)
        if data_parallel * tensor_parallel <= MOST_RANKS and data_parallel % expert_parallel == 0
        for all_to_all in (False, True)
    ]
    context = [
        Case(
            CONTEXT,
            data_parallel,
            tensor_parallel,
            context_parallel=tokens,
            heads_exchanged=heads,
            all_to_all=exchanges,
        )
        for data_parallel, tensor_parallel, tokens in itertools.product(DEGREES, DEGREES, DEGREES)
        if data_parallel * tensor_parallel * tokens <= MOST_RANKS
        for heads, exchanges in ((False, False), (True, False), (True, True))[: 3 if tokens > 1 else 1]
    ]
    return dense + experts + context


def factory_settings(case: Case) -> dict[str, Any]:
    """Settings for the factory of a case: two layers, one sample a rank."""
    further = {EXPERTS: ("expert_parallel",), CONTEXT: ("context_parallel", "heads_exchanged")}
    names = ("data_parallel", "tensor_parallel", *further.get(case.network, ("sequence_parallel",)))
    degrees = {name: getattr(case, name) for name in names}
    return {"layers": 2, "batch": case.data_parallel, **degrees, **NETWORKS.get(case.network, {})}


def compile_cases(cases: Sequence[Case], folder: Path, at_once: int | None = None) -> None:
    """Have MindSpore compile rank 0 of every case that the folder does not hold yet.

    Each is compiled in a process of its own: MindSpore fails at a second network of the same cells and other shapes.
    """
    ranks: list[Rank] = []
    for case in cases:
        known = read_answer(folder, case.name)
        if known is None or known.graph is None:
            wanted = Compile(
                case.name, case.source, factory_settings(case), sharding=case.sharding, records=True, varies=False
            )
            ranks.append(Rank(0, case.sharding.ranks, (wanted,)))
    answers = compile_ranks(ranks, stand_in(), folder, at_once=at_once)
    wrong = [f"{answer.name}: {answer.error}" for answer in answers.values() if answer.error]
    if wrong:
        raise RuntimeError("\n".join(wrong))


def compiled(case: Case, folder: Path) -> CellGraph:
    """The graph that MindSpore compiled."""
    path = folder / f"{case.name}.mindir"
    return graph_of(recorded_trace(path.read_bytes(), load_module(path), str(path)))


def logical(case: Case) -> CellGraph:
    """The graph derived from the network traced whole and its strategies."""
    network, inputs = build_factory(case.source, factory_settings(case))
    return logical_graph(trace(network, *inputs, symbols={}), case.sharding)


def numbers_of(graph: CellGraph) -> Numbers:
    """Costs of every unit at the traced sizes, and its collectives."""
    costs = network_costs(graph)
    found: Numbers = {}
    for number, (unit, model) in enumerate(zip(costs.split.units, costs.models, strict=True)):
        values = model.basis.values(costs.graph.symbols)
        plain = RecomputeModel(model).option(())
        parts = (slice(0, model.forward_count), slice(model.forward_count, None))
        by_half = [(rows @ values)[part].sum() for rows in (model.flops, model.sent_bytes, model.bytes_moved)
                   for part in parts]  # fmt: skip
        saved, working = plain.saved @ values, max(row @ values for row in plain.working_set)
        static = unit_static_bytes(costs, number, StaticSettings())[0]
        found[unit.name] = dict(zip(MEASURES, (*by_half[:2], saved, static, *by_half[2:], working), strict=True))
        collectives = Counter(f"{item.primitive}({len(item.ranks)})" for item in model.operations if item.ranks)
        found[unit.name] |= {f"number of {name}": count for name, count in collectives.items()}
    return found


def differences(ours: Numbers, theirs: Numbers) -> dict[str, float]:
    """Largest difference of any unit by measure, as a share of the compiled value; infinity where that is 0."""
    found: dict[str, float] = dict.fromkeys(MEASURES, 0.0)
    for unit in ours.keys() | theirs.keys():
        left, right = ours.get(unit, {}), theirs.get(unit, {})
        for measure in left.keys() | right.keys():
            own, other = left.get(measure, 0.0), right.get(measure, 0.0)
            if own != other:
                share = abs(own - other) / other if other else float("inf")
                found[measure] = max(found.get(measure, 0.0), share)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="only degrees whose product is this")
    parser.add_argument("--network", nargs="+", choices=NETWORKS, help="only these networks")
    parser.add_argument("--keep", type=Path, help="folder for compiled graphs")
    options = parser.parse_args(arguments)
    chosen = options.network or tuple(NETWORKS)
    cases = [case for case in all_cases() if options.ranks in (None, case.sharding.ranks) and case.network in chosen]
    with tempfile.TemporaryDirectory(prefix="bmpipe-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        compile_cases(cases, folder)
        print(
            "network D T | block 0: flops, saved, static, sent bytes | units that differ: measure, logical - compiled"
        )
        for case in cases:
            print(_row(case, numbers_of(logical(case)), numbers_of(compiled(case, folder))))
    return 0


def _row(case: Case, ours: Numbers, theirs: Numbers) -> str:
    block = theirs["blocks.0"]
    shown = (
        block["forward flops"] + block["backward flops"], block["saved bytes"], block["static bytes"],
        block["forward sent"] + block["backward sent"],
    )  # fmt: skip
    wrong = [
        f"{unit}: {measure} {ours[unit].get(measure, 0):.0f} - {value:.0f}"
        for unit in theirs
        for measure, value in theirs[unit].items()
        if ours[unit].get(measure, 0) != value
    ]
    options = {
        "SP": case.sequence_parallel, f"E={case.expert_parallel}": case.expert_parallel > 1,
        f"C={case.context_parallel}": case.context_parallel > 1, "heads": case.heads_exchanged, "A2A": case.all_to_all,
    }  # fmt: skip
    label = f"{case.network} {case.data_parallel} {case.tensor_parallel}"
    label = f"{label} {' '.join(name for name, given in options.items() if given) or '-'}"
    return f"{label:30} | {', '.join(f'{value:.0f}' for value in shown)} | {'; '.join(wrong) or 'none'}"


if __name__ == "__main__":
    sys.exit(main())
