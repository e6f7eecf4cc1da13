"""Small real networks that graph and cost tests trace."""

from __future__ import annotations

import functools
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters

from mindspore_bmpipe.costs.network import NetworkCosts, network_costs
from mindspore_bmpipe.graph.cell_graph import CellGraph
from mindspore_bmpipe.graph.trace import trace
from tools.examples import bert, gpt, llama, vision_language

FACTORIES = {
    "llama": llama.factory,
    "gpt": gpt.factory,
    "bert": bert.factory,
    "vision_language": vision_language.factory,
}


def build(name: str, **settings: Any) -> tuple[nn.Cell, tuple[Tensor, ...]]:
    """An example network without allocated weights, and its inputs."""
    with no_init_parameters():
        network, inputs = FACTORIES[name](size="tiny", **settings)
    return network, tuple(inputs)


@functools.cache
def traced(name: str) -> CellGraph:
    """Joint graph of an example network at its smallest size."""
    network, inputs = build(name)
    return trace(network, *inputs)


@functools.cache
def costs_of(name: str) -> NetworkCosts:
    """Costs of an example network at its smallest size."""
    return network_costs(traced(name))


class Layer(nn.Cell):
    """Dense, tanh, dense: every kept tensor can be told by hand."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Dense(width, inner, has_bias=False)
        self.activation = nn.Tanh()
        self.down = nn.Dense(inner, width, has_bias=False)

    def construct(self, states: Tensor) -> Tensor:
        return self.down(self.activation(self.up(states)))


class Stack(nn.Cell):
    """Layers in a list, then the mean of squares as loss."""

    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.CellList([Layer(width, inner) for _ in range(layers)])
        self.square = ops.Square()
        self.mean = ops.ReduceMean()

    def construct(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = layer(states)
        return self.mean(self.square(states))


def stack(layers: int = 3, width: int = 8, inner: int = 32, batch: int = 4) -> tuple[Stack, Tensor]:
    """A :class:`Stack` and its input."""
    return Stack(layers, width, inner), Tensor(np.zeros((batch, width)), ms.float32)
