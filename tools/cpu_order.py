"""Units of a network as MindSpore's CPU backend runs them, for predictions of what a CPU holds.

Two things differ from the order of the compiled graph, which the cost model follows:

- An operation runs as soon as its operands are there. What a backward makes of kept forward results alone (`2 x` for
  the gradient of `Square`) is made in the forward, and kept until the backward reads it.
- `SiLU` and its gradient have no kernel and are put together from others, so the sigmoid is a tensor of its own, once
  for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mindspore_bmpipe.costs.network import NetworkCosts
from mindspore_bmpipe.costs.recompute import Places, RecomputeModel, relative_places
from mindspore_bmpipe.costs.unit_model import ModelOperation, UnitModel, indices_of
from mindspore_bmpipe.graph.cell_graph import Phase
from mindspore_bmpipe.plan import Plan


def as_cpu_runs(costs: NetworkCosts, plan: Plan) -> NetworkCosts:
    """The network with the memory of its units as a CPU runs them under a plan; their times mean nothing then."""
    models = []
    for planned, unit, model in zip(plan.units, costs.split.units, costs.models, strict=True):
        places = relative_places(
            planned.recompute_cells, planned.recompute_primitives, planned.recompute_communication, unit.cells
        )
        models.append(_when_ready(_with_kernels(model), places))
    return replace(costs, models=tuple(models))


def _when_ready(model: UnitModel, places: Places) -> UnitModel:
    """Backward operations that read nothing but what the forward leaves, moved to the end of the forward."""
    there, _ = RecomputeModel(model).kept(places)
    early, late = [], []
    for operation in model.operations[model.forward_count :]:
        if operation.reads & ~there or operation.writes & (model.leaving | model.discarded):
            late.append(operation)
        else:
            # Outside all cells: whatever recomputes a cell does not run this again.
            early.append(replace(operation, phase=Phase.FORWARD, cell="", held_as=""))
            there |= operation.writes
    made = sum(operation.writes for operation in early)
    forward = [*model.operations[: model.forward_count], *early]
    return _rebuilt(model, forward, late, keepable=model.keepable | made)


def _with_kernels(model: UnitModel) -> UnitModel:
    """`SiLU` and `SiLUGrad` as the operations that stand in for them."""
    sizes, names, types = list(model.sizes), list(model.storage_names), list(model.storage_types)
    keepable = model.keepable

    def like(storages: int) -> int:
        (storage,) = indices_of(storages)
        sizes.append(model.sizes[storage])
        names.append(f"sigmoid beside {model.storage_names[storage]}")
        types.append(model.storage_types[storage])
        return 1 << (len(sizes) - 1)

    forward, backward = [], []
    for operation in model.operations:
        made = operation.writes
        if operation.primitive == "SiLU":
            sigmoid = like(made)
            keepable |= sigmoid
            forward.append(replace(operation, primitive="Sigmoid", writes=sigmoid))
            forward.append(replace(operation, primitive="Mul", reads=operation.reads | sigmoid))
        elif operation.primitive == "SiLUGrad":
            states = operation.reads & model.keepable
            gradient = operation.reads & ~states
            sigmoid, through, beside, inner = (like(made) for _ in range(4))
            backward += [
                replace(operation, primitive="Sigmoid", reads=states, writes=sigmoid),
                replace(operation, primitive="Mul", reads=states | gradient, writes=through),
                replace(operation, primitive="Mul", reads=sigmoid | gradient, writes=beside),
                replace(operation, primitive="SigmoidGrad", reads=sigmoid | through, writes=inner),
                replace(operation, primitive="Add", reads=beside | inner),
            ]
        elif operation.phase is Phase.FORWARD:
            forward.append(operation)
        else:
            backward.append(operation)
    grown = replace(
        model, sizes=np.array(sizes), storage_names=tuple(names), storage_types=tuple(types), keepable=keepable
    )
    return _rebuilt(grown, forward, backward)


def _rebuilt(
    model: UnitModel, forward: Sequence[ModelOperation], backward: Sequence[ModelOperation], keepable: int | None = None
) -> UnitModel:
    nothing = np.zeros((len(forward) + len(backward), model.sizes.shape[1]))
    return replace(
        model,
        operations=(*forward, *backward),
        forward_count=len(forward),
        flops=nothing,
        bytes_moved=nothing,
        sent_bytes=nothing,
        keepable=model.keepable if keepable is None else keepable,
    )
