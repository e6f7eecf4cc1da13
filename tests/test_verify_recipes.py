"""Plans that use the named recipes, compiled for Ascend: what runs again is exactly what each recipe says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from verify_plans import hand_plan, needs_compiler

from mindspore_bmpipe.costs.network import NetworkCosts, network_costs
from mindspore_bmpipe.graph.cell_graph import Sharding
from mindspore_bmpipe.graph.recorded import graph_of
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.sources import load_costs
from mindspore_bmpipe.verify.run import Verification, verify
from mindspore_bmpipe.verify.sharded import record_sharded

pytestmark = needs_compiler

RECIPES = ("none", "select", "comm", "both", "full")


def recipe_of(costs: NetworkCosts) -> Any:
    """One recipe after the other on the blocks, none elsewhere."""
    names = [unit.name for unit in costs.split.units]
    blocks = [number for number, name in enumerate(names) if name.startswith("blocks.")]

    def choose(unit: int, options: list[str]) -> str:
        assert set(RECIPES) <= set(options)
        return RECIPES[blocks.index(unit) % len(RECIPES)] if unit in blocks else "none"

    return choose


def verified(
    folder: Path, source: str, settings: dict[str, Any], costs: NetworkCosts, cuts: tuple[int, ...], **config: Any
) -> tuple[Plan, Verification]:
    plan = hand_plan(costs, cuts, recipe_of(costs), **config)
    plan.save(folder / "plan.json")
    return plan, verify(plan, str(folder / "plan.json"), source, settings)


@pytest.mark.long
@pytest.mark.parametrize(("network", "cuts"), [("gpt", (6,)), ("llama", (4,))])
def test_every_recipe_of_a_whole_network_is_what_mindspore_compiles(
    tmp_path: Path, network: str, cuts: tuple[int, ...]
) -> None:
    source, settings = f"tools.examples.{network}:factory", {"layers": 5}
    plan, result = verified(tmp_path, source, settings, load_costs(source, settings), cuts)
    recomputed = {unit.option: unit for unit in plan.units if unit.name.startswith("blocks.")}
    assert set(recomputed) == set(RECIPES)
    assert len(recomputed["select"].recompute_primitives) == len(recomputed["both"].recompute_primitives) > 4
    assert [str(finding) for finding in result.findings] == []
    repeated = sum(stage.checked.repeated for stage in result.stages if stage.checked is not None)
    assert repeated > 0


@pytest.mark.long
def test_exchanges_between_ranks_run_again_where_the_recipe_says_so(tmp_path: Path) -> None:
    """With sequence parallelism each half of a block gathers its tokens, and the recipe `comm` gathers them again."""
    source = "tools.examples.gpt_sharded:factory"
    settings = {"layers": 5, "sequence": 32, "sequence_parallel": True}
    sharding = Sharding(1, 2)
    costs = network_costs(graph_of(record_sharded(source, settings, sharding)[0]))
    plan, result = verified(tmp_path, source, settings, costs, (5,), tensor_parallel=2)
    recomputed = {unit.option: unit for unit in plan.units if unit.name.startswith("blocks.")}
    for name in ("comm", "both"):
        unit = recomputed[name]
        gathering = tuple(f"{unit.name}.{cell}" for cell in ("attention.qkv_proj", "feed_forward.up"))
        assert set(gathering) <= set(unit.recompute_communication)
    assert recomputed["comm"].recompute_primitives == ()
    assert [str(finding) for finding in result.findings] == []
