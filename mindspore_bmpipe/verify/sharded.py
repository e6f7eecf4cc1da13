"""Traces one rank of a network that ranks share: MindSpore's parallel passes decide its shapes and its collectives."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import Sharding
from mindspore_bmpipe.graph.mindir import load_module
from mindspore_bmpipe.graph.recorded import Trace, graph_of, recorded_trace
from mindspore_bmpipe.graph.sharded import require_degrees, require_experts
from mindspore_bmpipe.sources import with_degrees
from mindspore_bmpipe.verify.children import Rank, compile_ranks
from mindspore_bmpipe.verify.jobs import Compile, cluster_size
from mindspore_bmpipe.verify.stand_in import stand_in

_NAME = "sharded"


def record_sharded(
    source: str,
    settings: Mapping[str, Any],
    sharding: Sharding,
    time_limit_s: float | None = None,
    varies: bool = True,
) -> tuple[Trace, bytes]:
    """Compile a factory's network as one rank of a single stage and record its joint graph.

    Args:
        source: `pkg.module:factory`. Parallel degrees are passed on under their names (`tensor_parallel` and so on) if
            the factory takes them; its inputs are those of one micro-batch for all data-parallel ranks together.
        settings: settings for the factory.
        sharding: ranks that share the network.
        time_limit_s: seconds that compiling may take; no limit by default.
        varies: whether to compile at several sizes of the inputs, so that their axes become symbols.

    Returns:
        The trace, and the bytes of a file that holds it.

    Raises:
        InputError: a number of ranks that MindSpore does not take, settings that contradict it, no compiler, a network
            that does not compile, or one whose weights no rank shares.
        TimeLimitError: the time limit ended first.
    """
    require_degrees(sharding)
    if cluster_size(1, sharding.ranks) != sharding.ranks:
        raise InputError(
            f"--data-parallel {sharding.data_parallel} --context-parallel {sharding.context_parallel} "
            f"--tensor-parallel {sharding.tensor_parallel}: {sharding.ranks} ranks; MindSpore takes 1, 2, 4 or a "
            "multiple of 8"
        )
    given = with_degrees(source, settings, sharding)
    wanted = Compile(
        name=_NAME, source=source, settings=given, sharding=sharding, records=True, varies=varies,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bmpipe-") as folder:
        answers = compile_ranks([Rank(0, sharding.ranks, (wanted,))], stand_in(), Path(folder), time_limit_s)
        answer = answers[_NAME]
        if answer.graph is None:
            raise InputError(answer.error)
        data = answer.graph.read_bytes()
        recorded = recorded_trace(data, load_module(answer.graph), source)
    _require_shares(source, recorded, sharding)
    return recorded, data


def _require_shares(source: str, recorded: Trace, sharding: Sharding) -> None:
    parameters = graph_of(recorded).parameters
    require_experts(source, parameters, sharding)
    if sharding.tensor_parallel > 1 and all(info.shares == 1 for info in parameters.values()):
        raise InputError(
            f"{source}: no weight is shared by the {sharding.tensor_parallel} tensor-parallel ranks, so each would "
            "run the whole network; set strategies with Primitive.shard in the factory, as "
            "tools.examples.llama_sharded does"
        )
