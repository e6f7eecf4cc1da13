"""Collectives on weights and their gradients among ranks that hold the same weights, as MindSpore compiles them.

Read off compiled pipelines with `parallel_optimizer` and without (`tests/test_verify_weight_exchange.py`); g is the
buffer in which the gradients of a step's micro-batches are added up, w the weight in the type in which it is used:

    level                     start of the step   forward       backward                        end of the step
    0, weights not shared                                                                       AllReduce g
    1                         AllGather w                                                       ReduceScatter g
    2                         AllGather w                       ReduceScatter g
    3                                             AllGather w   AllGather w, ReduceScatter g

Forward and backward are those of every micro-batch. Weights that are not trained are gathered like others. Backward
gathers only what it reads: not the table of an embedding. Recomputation changes nothing, since what backward has
gathered serves the forward that runs again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mindspore_bmpipe.costs.held_weights import weight_behind
from mindspore_bmpipe.costs.static_memory import (
    StaticSettings,
    element_bytes,
    gradient_bytes,
    held_elements,
    sharing_level,
)
from mindspore_bmpipe.costs.weight_holders import weight_holders
from mindspore_bmpipe.graph.cell_graph import CellGraph, Operation, ParameterInfo, read_tensors
from mindspore_bmpipe.graph.mindir import BYTES_PER_ELEMENT
from mindspore_bmpipe.graph.units import Unit, UnitSplit


class Moment(Enum):
    """When a collective runs."""

    START = "start of the step"
    FORWARD = "forward"
    BACKWARD = "backward"
    END = "end of the step"


@dataclass(frozen=True)
class WeightCollective:
    """One collective on a weight or its gradient."""

    moment: Moment
    """When it runs: once a step, or in every micro-batch."""
    primitive: str
    """`AllReduce`, `AllGather` or `ReduceScatter`."""
    ranks: tuple[int, ...]
    """Ranks that take part, counted within one stage."""
    volume_bytes: int
    """Bytes of the whole tensor."""
    weight: str
    """Name of the weight."""

    @property
    def is_gradient(self) -> bool:
        """Whether gradients are exchanged, not weights."""
        return self.primitive != "AllGather"


def weight_collectives(
    graph: CellGraph, split: UnitSplit, number: int, settings: StaticSettings
) -> tuple[WeightCollective, ...]:
    """Collectives on the weights of a unit.

    A weight that an earlier unit reads too arrives as a copy at the start of a step, and its gradient goes back at its
    end. Nothing else is exchanged of a whole one; a shared one is gathered, and its gradient shared out, on both sides.

    Args:
        graph: the network, or what one rank runs of it.
        split: its units.
        number: the unit.
        settings: ranks of a stage, and what those share out that hold the same.
    """
    if settings.sharding.ranks < 2:
        return ()
    unit = split.units[number]
    uses = _Uses(graph, unit)
    found: list[WeightCollective] = []
    for name in unit.parameters:
        weight = graph.parameters[name]
        ranks = weight_holders(weight, settings.sharding)
        if len(ranks) < 2:
            continue
        level = sharing_level(weight, settings)
        if level == 0 and split.owner(name, number) != number:
            continue
        gradient = gradient_bytes(weight, StaticSettings(float32_state=settings.float32_state))
        moments = {
            0: ((Moment.END, "AllReduce"),),
            1: ((Moment.START, "AllGather"), (Moment.END, "ReduceScatter")),
            2: ((Moment.START, "AllGather"), (Moment.BACKWARD, "ReduceScatter")),
            3: (
                (Moment.FORWARD, "AllGather"),
                *(((Moment.BACKWARD, "AllGather"),) if name in uses.in_backward else ()),
                (Moment.BACKWARD, "ReduceScatter"),
            ),
        }
        for moment, primitive in moments[level]:
            if primitive != "AllGather" and not weight.trainable:
                continue
            volume = uses.gathered_bytes(weight) if primitive == "AllGather" else gradient
            found.append(WeightCollective(moment, primitive, ranks, volume, name))
    return tuple(found)


class _Uses:
    """How a unit uses weights."""

    def __init__(self, graph: CellGraph, unit: Unit) -> None:
        self._graph = graph
        self._readers: dict[str, list[Operation]] = {}
        for position in unit.forward:
            operation = graph.operations[position]
            for tensor in dict.fromkeys(read_tensors(operation)):
                name = graph.tensors[tensor].parameter
                if name is not None:
                    self._readers.setdefault(name, []).append(operation)
        self.in_backward = {
            weight_behind(graph, tensor)
            for position in unit.backward
            for tensor in read_tensors(graph.operations[position])
        }
        """Weights that backward reads, perhaps in another type."""

    def gathered_bytes(self, weight: ParameterInfo) -> int:
        """Bytes of a gathered weight: after the cast, if it is cast to a smaller type and read nowhere else."""
        size = element_bytes(weight)
        readers = self._readers.get(weight.name, [])
        if len(readers) == 1 and readers[0].primitive == "Cast":
            made = self._graph.tensors[readers[0].outputs[0]].type.dtype
            size = min(size, BYTES_PER_ELEMENT.get(made, 4))
        return held_elements(weight) * size
