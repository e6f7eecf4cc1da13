"""Times of a unit from its computation and its communication, with the overlap that the settings say.

With C the computation of one direction and kinds of communication that run beside it or not,

    time = max(C, sum of overlapped communication) + sum of the rest

What runs once a step counts as what it adds to one micro-batch: gathers of weights to the first forward, sums of
gradients to the last backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mindspore_bmpipe.config import OVERLAP_GRADIENTS, OVERLAP_TENSOR_PARALLEL, OVERLAP_WEIGHTS
from mindspore_bmpipe.costs.collectives import collective_ms
from mindspore_bmpipe.costs.hardware import Hardware
from mindspore_bmpipe.costs.weight_exchange import Moment, WeightCollective


@dataclass(frozen=True)
class Exchange:
    """Times of collectives on the weights of a unit, by themselves."""

    start_ms: float = 0.0
    """Gathers at the start of a step."""
    forward_ms: float = 0.0
    """Gathers in the forward of every micro-batch."""
    backward_weights_ms: float = 0.0
    """Gathers in the backward of every micro-batch."""
    backward_gradients_ms: float = 0.0
    """Sums of gradients in the backward of every micro-batch."""
    end_ms: float = 0.0
    """Sums of gradients at the end of a step."""


def exchange_of(collectives: Iterable[WeightCollective], hardware: Hardware) -> Exchange:
    """Times of a unit's collectives, one after the other, each with its launch."""
    times = dict.fromkeys(("start", "forward", "weights", "gradients", "end"), 0.0)
    for item in collectives:
        part = {
            Moment.START: "start",
            Moment.FORWARD: "forward",
            Moment.BACKWARD: "gradients" if item.is_gradient else "weights",
            Moment.END: "end",
        }[item.moment]
        times[part] += collective_ms(hardware, item.primitive, item.ranks, item.volume_bytes) + hardware.launch_ms
    return Exchange(*times.values())


@dataclass(frozen=True)
class UnitTimes:
    """What the times of a unit are made of."""

    forward_ms: float
    """Computation of the forward of one micro-batch."""
    forward_exchange_ms: float
    """Exchanges with tensor-parallel ranks in it."""
    backward_ms: float
    """Computation of its backward without recomputation."""
    backward_exchange_ms: float
    """Exchanges with tensor-parallel ranks in it."""
    weights: Exchange
    """Collectives on weights."""
    overlap: Collection[str]
    """Kinds of communication that run beside computation."""

    def forward(self, gathered_ms: float = 0.0) -> float:
        """Forward of one micro-batch, with so much more gathering of weights."""
        gathers = self.weights.forward_ms + gathered_ms
        return self._time(self.forward_ms, self.forward_exchange_ms, gathers, 0.0)

    def backward(self, extra_ms: float = 0.0, extra_exchange_ms: float = 0.0, summed_ms: float = 0.0) -> float:
        """Backward of one micro-batch, with so much more computation, exchange and summing of gradients."""
        weights = self.weights
        return self._time(
            self.backward_ms + extra_ms,
            self.backward_exchange_ms + extra_exchange_ms,
            weights.backward_weights_ms,
            weights.backward_gradients_ms + summed_ms,
        )

    @property
    def gather_ms(self) -> float:
        """What gathers at the start of a step add to it."""
        if not self.overlap:
            return self.weights.start_ms
        return max(0.0, self.forward(self.weights.start_ms) - self.forward())

    @property
    def reduce_ms(self) -> float:
        """What sums of gradients at the end of a step add to it."""
        if not self.overlap:
            return self.weights.end_ms
        return max(0.0, self.backward(summed_ms=self.weights.end_ms) - self.backward())

    def extra_backward(self, extra_ms: float, extra_exchange_ms: float) -> float:
        """What recomputation adds to a backward."""
        if not self.overlap:
            return extra_ms + extra_exchange_ms
        return max(0.0, self.backward(extra_ms, extra_exchange_ms) - self.backward())

    def alone(self, computing_ms: float, exchange_ms: float) -> float:
        """Time of so much computation and exchange with tensor-parallel ranks by themselves."""
        return self._time(computing_ms, exchange_ms, 0.0, 0.0)

    def _time(self, computing_ms: float, tensor_parallel_ms: float, weights_ms: float, gradients_ms: float) -> float:
        hidden = exposed = 0.0
        for kind, time in (
            (OVERLAP_TENSOR_PARALLEL, tensor_parallel_ms),
            (OVERLAP_WEIGHTS, weights_ms),
            (OVERLAP_GRADIENTS, gradients_ms),
        ):
            if kind in self.overlap:
                hidden += time
            else:
                exposed += time
        return max(computing_ms, hidden) + exposed
