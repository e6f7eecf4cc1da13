"""Arguments of ``bmpipe trace --sharded``: ranks of a stage, one of which is traced."""

from __future__ import annotations

import argparse

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import Sharding

_DEGREES = {
    "data_parallel": ("D", "ranks that share a micro-batch"),
    "tensor_parallel": ("T", "ranks that share each layer"),
    "context_parallel": ("C", "ranks that share the tokens of each sample"),
    "expert_parallel": ("E", "data- and context-parallel ranks among which experts are shared out"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All that belongs to one rank."""
    parser.add_argument(
        "--sharded", action="store_true",
        help="trace one rank of a network with strategies, as MindSpore's Ascend front end compiles it: shapes of one "
        "device, with collectives",
    )  # fmt: skip
    for name, (letter, text) in _DEGREES.items():
        parser.add_argument(_option(name), type=int, metavar=letter, help=f"with --sharded: {text}")
    parser.add_argument(
        "--all-to-all", action="store_true", default=None,
        help="with --sharded: change layouts by AlltoAll where that does (MindSpore's enable_alltoall)",
    )  # fmt: skip
    parser.add_argument("--time-limit", type=float, metavar="S", help="with --sharded: seconds that compiling may take")


def sharding_of_options(options: argparse.Namespace) -> Sharding | None:
    """Ranks of a stage; ``None`` without ``--sharded``.

    Raises:
        InputError: ranks without ``--sharded``, or none.
    """
    degrees = {name: getattr(options, name) for name in _DEGREES}
    if not options.sharded:
        given = [
            _option(name) for name in (*_DEGREES, "all_to_all", "time_limit") if getattr(options, name) is not None
        ]
        if given:
            raise InputError(f"{', '.join(given)}: only with --sharded")
        return None
    for name, value in degrees.items():
        if value is not None and value < 1:
            raise InputError(f"{_option(name)} {value}: give a number of ranks above 0")
    return Sharding(**{name: value or 1 for name, value in degrees.items()}, all_to_all=bool(options.all_to_all))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
