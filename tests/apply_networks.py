"""Small networks, and plans for them written by hand, for the tests of writing plans back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_bmpipe.plan import PLAN_FORMAT, BubblePlan, Plan, SolverReport, StageLoad, StagePlan, UnitPlan

WIDTH = 8


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Dense(WIDTH, WIDTH)
        self.softmax = ops.Softmax()

    def construct(self, x):
        return self.softmax(self.project(x))


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.drop = nn.Dropout(p=0.5)
        self.feed = nn.Dense(WIDTH, WIDTH, activation="tanh")

    def construct(self, x):
        return x + self.feed(self.drop(self.attention(x)))


class Network(nn.Cell):
    """Embedding, blocks, head and a loss without parameters."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Dense(WIDTH, WIDTH)
        self.blocks = nn.CellList([Block() for _ in range(blocks)])
        self.head = nn.Dense(WIDTH, 1)
        self.loss = nn.MSELoss()

    def construct(self, x, y):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(x), y)


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(5)
    return (
        Tensor(generator.standard_normal((size, WIDTH)), mindspore.float32),
        Tensor(generator.standard_normal((size, 1)), mindspore.float32),
    )


def unit_cells(blocks: int = 4) -> list[str]:
    return ["embedding", *(f"blocks.{index}" for index in range(blocks)), "head"]


def unit(network: nn.Cell, path: str, stage: int, **changes: Any) -> UnitPlan:
    parameters = dict(network.cells_and_names())[path].trainable_params()
    values = {
        "name": path,
        "run": "body",
        "cells": (path,),
        "stage": stage,
        "chunk": 0,
        "option": "none",
        "recompute_cells": (),
        "recompute_primitives": (),
        "parameters": len(parameters),
        "parameter_elements": sum(parameter.size for parameter in parameters),
    }
    return UnitPlan(**{**values, **changes})


def make_plan(
    network: nn.Cell,
    stages: Sequence[int] = (0, 0, 0, 1, 1, 1),
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Plan:
    """A plan of a `Network` with the given stages; `changes` overrides fields of units by name."""
    paths = unit_cells(len(stages) - 2)
    changes = changes or {}
    units = [unit(network, path, stage, **changes.get(path, {})) for path, stage in zip(paths, stages, strict=True)]
    return Plan(
        format=PLAN_FORMAT,
        fingerprint="0",
        source=type(network).__name__,
        settings=settings,
        solver=SolverReport("bmpipe", "optimal", 1.0, 1.0, 0.0, 0.0, ""),
        bubble=BubblePlan(0.0, 0.0, 0.0, 0.0, 0.0),
        stages=tuple(StagePlan(stage, 1, 1, 2, ()) for stage in range(max(stages) + 1)),
        units=tuple(units),
        transfer_ms=(),
        loads=tuple(StageLoad((), (), 0, 0) for _ in range(max(stages) + 1)),
        notes=(),
    )


def change_units(plan: Plan, **units: Mapping[str, Any]) -> Plan:
    """The plan with fields of some units replaced; `blocks_1` stands for the unit `blocks.1`."""
    changed = {name.replace("_", "."): fields for name, fields in units.items()}
    return dataclasses.replace(
        plan, units=tuple(dataclasses.replace(item, **changed.get(item.name, {})) for item in plan.units)
    )


RECOMPUTE = {
    "blocks.0": {"option": "full", "recompute_cells": ("blocks.0",)},
    "blocks.1": {"option": "select", "recompute_cells": ("blocks.1.attention",)},
    "blocks.2": {"option": "softmax", "recompute_primitives": ("blocks.2.attention.softmax",)},
}
"""Each way to recompute, once."""


def written(network: nn.Cell) -> dict[str, Any]:
    """Every stage, segment and recompute flag of the network, read from MindSpore's own records."""
    state: dict[str, Any] = {}
    for path, cell in network.cells_and_names():
        if "_recompute_cell" in path:
            continue
        for name in ("pipeline_stage", "pipeline_segment"):
            if hasattr(cell, "_" + name):
                state[f"{path}:{name}"] = getattr(cell, name)
        if cell._has_config_recompute and "output_recompute" in cell.get_flags():
            state[f"{path}:recompute"] = True
        for name, primitive in cell._primitives.items():
            if primitive is not None and "recompute" in primitive.attrs:
                state[f"{path}.{name}:recompute"] = primitive.attrs["recompute"]
    return state
