"""The recomputation recipes that training frameworks name, found in the data flow of a unit.

| recipe | recomputes |
|---|---|
| ``none`` | nothing |
| ``select`` | the core of attention, and what gates a feed-forward network |
| ``comm`` | exchanges of shares of tensors between ranks |
| ``both`` | ``select`` and ``comm`` |
| ``full`` | the whole unit |

The core of attention is everything between the product of queries and keys and the product with values, both included
(Korthikanti et al., arXiv 2205.05198, section 5), or the fused kernel; heads repeated for groups of queries run again
with it, and a mask made from nothing is kept. A gate is a product of two activations, one of them through an activation
function, that a weight multiplies next (arXiv 2002.05202). ``select_recompute`` and ``select_comm_recompute`` of
MindFormers recompute these primitives by default, and rotary positions beside them, whose repetition saves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from mindspore_bmpipe.costs.recompute import Places, RecomputeModel
from mindspore_bmpipe.costs.unit_model import UnitModel, indices_of

RECIPES = ("none", "comm", "select", "both", "full")
"""Names of recipes, the one that repeats least first."""

_PRODUCTS = frozenset({"BatchMatMul", "BatchMatMulExt", "MatMul", "MatMulExt"})
_SOFTMAX = frozenset({"Softmax", "SoftmaxExt"})
_FUSED_ATTENTION = frozenset({"FlashAttentionScore"})
_REPEATS = frozenset({"Tile", "BroadcastTo", "RepeatInterleave", "RepeatInterleaveInt"})
_ACTIVATIONS = frozenset(
    {"SiLU", "GeLU", "GeluExt", "FastGeLU", "Sigmoid", "ReLU", "Swish", "HSwish", "Mish", "Tanh"}
)  # fmt: skip
_GATED = frozenset({"Swiglu"})
_MULTIPLIES = frozenset({"Mul"})
_CASTS = frozenset({"Cast"})


@dataclass(frozen=True)
class Recipes:
    """The recipes of one unit."""

    places: dict[str, Places]
    """Name -> what it recomputes; all of :data:`RECIPES`."""
    out_of_reach: tuple[str, ...]
    """Operations that ``select`` would repeat, but no cell holds a primitive for: they are kept."""


def recipes_of(model: RecomputeModel, unit: UnitModel) -> Recipes:
    """Find the recipes of a unit."""
    flow = _Flow(unit)
    wanted = sorted(flow.attention_cores() | flow.gates())
    reachable = {number: path for path in model.primitives for number in model.operations_of(path)}
    select = tuple(dict.fromkeys(reachable[number] for number in wanted if number in reachable))
    missing = dict.fromkeys(
        f"{unit.operations[number].primitive} of {unit.operations[number].cell or 'the unit'}"
        for number in wanted
        if number not in reachable
    )
    return Recipes(
        places={
            "none": (),
            "comm": model.communication,
            "select": select,
            "both": (*select, *model.communication),
            "full": model.whole(),
        },
        out_of_reach=tuple(missing),
    )


class _Flow:
    """Forward operations of a unit and what reads what."""

    def __init__(self, unit: UnitModel) -> None:
        self._operations = unit.operations[: unit.forward_count]
        self._maker: dict[int, int] = {}
        self._readers: dict[int, list[int]] = defaultdict(list)
        for number, operation in enumerate(self._operations):
            for storage in indices_of(operation.writes):
                self._maker[storage] = number
            for storage in indices_of(operation.reads):
                self._readers[storage].append(number)

    def attention_cores(self) -> set[int]:
        """Operations of all attention cores."""
        found: set[int] = set()
        for number, operation in enumerate(self._operations):
            if operation.primitive in _FUSED_ATTENTION:
                found.add(number)
            elif operation.primitive in _SOFTMAX:
                before = self._as_far_as_product(number, self._makers)
                after = self._as_far_as_product(number, self._readers_of)
                if before and after:
                    found |= before | after | {number}
        for number in sorted(found):
            for maker in self._makers(number):
                if self._operations[maker].primitive in _REPEATS:
                    found.add(maker)
        return found

    def gates(self) -> set[int]:
        """Products of gates and the activation functions in front of them."""
        found: set[int] = set()
        for number, operation in enumerate(self._operations):
            if not self._is_multiplied_by_a_weight(number):
                continue
            if operation.primitive in _GATED:
                found.add(number)
            elif operation.primitive in _MULTIPLIES and len(indices_of(operation.reads)) == 2:
                chains = [self._through(maker, _CASTS) for maker in self._makers(number)]
                for chain in chains:
                    if self._operations[chain[-1]].primitive in _ACTIVATIONS and len(chains) == 2:
                        found |= {number, *chain}
        return found

    def _makers(self, number: int) -> list[int]:
        """Forward operations of the unit that make what an operation reads."""
        storages = indices_of(self._operations[number].reads)
        return list(dict.fromkeys(self._maker[storage] for storage in storages if storage in self._maker))

    def _readers_of(self, number: int) -> list[int]:
        storages = indices_of(self._operations[number].writes)
        return list(dict.fromkeys(reader for storage in storages for reader in self._readers[storage]))

    def _is_product(self, number: int) -> bool:
        return self._operations[number].primitive in _PRODUCTS

    def _multiplies_activations(self, number: int) -> bool:
        """Whether an operation is a matrix product without a weight; weights are no storages of the model."""
        return self._is_product(number) and len(indices_of(self._operations[number].reads)) > 1

    def _as_far_as_product(self, number: int, following: Callable[[int], list[int]]) -> set[int]:
        """Operations between an operation and products of activations, these included; `following` says which way."""
        found: set[int] = set()
        for other in following(number):
            if self._is_product(other):
                found |= {other} if self._multiplies_activations(other) else set()
            elif beyond := self._as_far_as_product(other, following):
                found |= beyond | {other}
        return found

    def _through(self, number: int, primitives: frozenset[str]) -> tuple[int, ...]:
        """An operation and those in front of it, as long as they are of these primitives."""
        chain = [number]
        while self._operations[chain[-1]].primitive in primitives and len(self._makers(chain[-1])) == 1:
            chain.extend(self._makers(chain[-1]))
        return tuple(chain)

    def _is_multiplied_by_a_weight(self, number: int) -> bool:
        """Whether a matrix product with a weight reads the result, perhaps in another type."""
        readers = self._readers_of(number)
        while readers and all(self._operations[reader].primitive in _CASTS for reader in readers):
            readers = [after for reader in readers for after in self._readers_of(reader)]
        return any(self._is_product(reader) and not self._multiplies_activations(reader) for reader in readers)
