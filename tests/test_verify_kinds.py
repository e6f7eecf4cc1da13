"""One mixed plan for every kind of schedule, compiled for Ascend; zero bubble schedules with their split backwards."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
from verify_plans import Choose, hand_plan, mixed, needs_compiler, with_unit

from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.schedule.actions import BACKWARD, WEIGHT, WHOLE
from mindspore_bmpipe.sources import load_costs
from mindspore_bmpipe.verify.children import Rank, compile_ranks
from mindspore_bmpipe.verify.expected import expect
from mindspore_bmpipe.verify.jobs import SCHEDULERS, Answer, Compile
from mindspore_bmpipe.verify.run import Verification, compare
from mindspore_bmpipe.verify.stand_in import stand_in

pytestmark = needs_compiler

LLAMA, VISION = "tools.examples.llama:factory", "tools.examples.vision_language:factory"


def all_of(option: str) -> Choose:
    """That option for every block, and no recomputation elsewhere."""
    return lambda unit, names: option if option in names and len(names) > 6 else "none"


class Compiled:
    """Plans of one network and cluster, all compiled by the same child processes."""

    def __init__(self, folder: Path, source: str, settings: dict[str, Any], plans: dict[str, dict[str, Any]]) -> None:
        started = time.monotonic()
        self.costs = load_costs(source, settings)
        self.plans: dict[str, Plan] = {}
        for name, planned in plans.items():
            self.plans[name] = hand_plan(self.costs, **{"choose": mixed, **planned})
            self.plans[name].save(folder / f"{name}.json")
        self.stages = len(next(iter(self.plans.values())).stages)
        ranks = [
            Rank(stage, self.stages, tuple(
                Compile(
                    f"{name}_{stage}", source, settings, str(plan.settings["schedule"]), self.stages,
                    int(plan.settings["micro_batches"]), str(folder / f"{name}.json"),
                )
                for name, plan in self.plans.items()
            ))
            for stage in range(self.stages)
        ]  # fmt: skip
        self._answers = compile_ranks(ranks, stand_in(), folder)
        print(f"{source}, {len(plans)} plans of {self.stages} stages: {time.monotonic() - started:.0f} s")

    def answers(self, name: str) -> dict[str, Answer]:
        return {f"stage_{stage}": self._answers[f"{name}_{stage}"] for stage in range(self.stages)}

    def against(self, name: str, plan: Plan) -> Verification:
        return compare(expect(self.costs, plan), range(self.stages), self.stages, self.answers(name))

    def verified(self, name: str) -> Verification:
        return self.against(name, self.plans[name])


def every_kind(cuts: tuple[int, ...], chunks: int, micro_batches: int) -> dict[str, dict[str, Any]]:
    """A plan for every kind, with the same cuts wherever several chunks are possible."""
    middle = cuts[chunks - 1 :: chunks]
    return {
        kind: {
            "cuts": middle if kind == "1f1b" else cuts,
            "chunks": 1 if kind == "1f1b" else chunks,
            "schedule": kind,
            "micro_batches": micro_batches,
        }
        for kind in SCHEDULERS
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "settings", "cuts", "micro_batches"),
    [
        (LLAMA, {"layers": 6}, (2, 4, 6), 4),
        (LLAMA, {"layers": 7}, (2, 3, 4, 5, 6, 7, 8), 8),
        (VISION, {}, (3, 5, 7), 4),
    ],
    ids=["llama_p2", "llama_p4", "vision_language_p2"],
)
def test_a_mixed_plan_of_every_kind_passes(
    tmp_path: Path, source: str, settings: dict[str, Any], cuts: tuple[int, ...], micro_batches: int
) -> None:
    compiled = Compiled(tmp_path, source, settings, every_kind(cuts, 2, micro_batches))
    options = {unit.option for unit in compiled.plans["zero_bubble_v"].units}
    assert len(options) >= 4
    for name in compiled.plans:
        assert (name, [str(finding) for finding in compiled.verified(name).findings]) == (name, [])


@pytest.fixture(scope="module")
def zero_bubble(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Embedding, block 0 and then blocks 3 to loss on stage 0 of a V; blocks 1 and 2 on stage 1, a chunk each."""
    plan = {"cuts": (2, 3, 4), "chunks": 2, "schedule": "zero_bubble_v", "micro_batches": 4}
    return Compiled(tmp_path_factory.mktemp("v"), LLAMA, {"layers": 4}, {"v": plan})


def test_where_a_v_turns_one_chunk_reads_the_other_without_a_message(zero_bubble: Compiled) -> None:
    assert [unit.chunk for unit in zero_bubble.plans["v"].units if unit.stage == 1] == [0, 1]
    result = zero_bubble.verified("v")
    assert [str(finding) for finding in result.findings] == []


def test_chunks_swapped_where_a_v_turns_are_caught(zero_bubble: Compiled) -> None:
    plan = zero_bubble.plans["v"]
    swapped = with_unit(with_unit(plan, "blocks.1", chunk=1), "blocks.2", chunk=0)
    found = {(f.check, f.stage, f.cell) for f in zero_bubble.against("v", swapped).findings}
    assert {("placement", 1, "blocks.1"), ("placement", 1, "blocks.2")} <= found
    assert all(stage == 1 for check, stage, _ in found if check == "placement")


@pytest.mark.long
def test_what_runs_again_is_what_the_costs_say(tmp_path: Path) -> None:
    """Every option of a block by itself, and twice in one chunk, where the later block's gradients run again too."""
    costs = load_costs(LLAMA, {"layers": 5})
    names: list[str] = []
    hand_plan(costs, (2, 4, 5), lambda unit, known: names.extend(known) or "none", chunks=2, schedule="zero_bubble_v")
    options = list(dict.fromkeys(name for name in names if name in ("none", "select", "both", "full")))
    assert len(options) == 4
    plans = {
        name: {"cuts": (2, 4, 5), "chunks": 2, "schedule": "zero_bubble_v", "micro_batches": 4, "choose": all_of(name)}
        for name in options
    }
    compiled = Compiled(tmp_path, LLAMA, {"layers": 5}, plans)
    for name in options:
        result = compiled.verified(name)
        assert [str(finding) for finding in result.findings] == []
        assert [text for text in result.warnings if "step time is off" in text] == []
        assert _says(result, 1, 0) == _says(result, 1, 1) == (name != "none")
    # The later of two blocks makes its gradients of inputs again: seven products with a weight and four without. They
    # read its softmax, which takes one product; where all is recomputed, eight of either block (all but the last).
    for name, products in (("select", 7 + 4 + 1), ("full", 7 + 4 + 8 + 8)):
        warnings = compiled.verified(name).warnings
        assert [
            text for text in warnings if "stage 1, chunk 0" in text and f" {products} of them matrix products" in text
        ]


def test_what_a_split_backward_recomputes_twice_is_said(zero_bubble: Compiled) -> None:
    result = zero_bubble.verified("v")
    split = [stage.checked.order for stage in result.stages if stage.checked is not None]
    assert all({WHOLE, BACKWARD, WEIGHT} <= {action.kind for action in order} for order in split)
    recomputed = {(unit.stage, unit.chunk) for unit in zero_bubble.plans["v"].units if unit.recompute_cells}
    said = {place for place in [(0, 0), (0, 1), (1, 0), (1, 1)] if _says(result, *place)}
    assert said and said <= recomputed
    assert not [text for text in result.warnings if "step time is off" in text]


def test_what_runs_apart_is_what_the_costs_say(zero_bubble: Compiled) -> None:
    """The chunk that recomputes nothing: seven products of a LLaMA block with weights."""
    said = "that makes gradients of weights (W) runs"
    assert not [text for text in zero_bubble.verified("v").warnings if said in text]
    costs = zero_bubble.costs
    unpriced = dataclasses.replace(
        costs, models=tuple(dataclasses.replace(model, discarded=0) for model in costs.models)
    )
    result = compare(expect(unpriced, zero_bubble.plans["v"]), range(2), 2, zero_bubble.answers("v"))
    assert [text for text in result.warnings if said in text and "7 MatMul as compiled, and 0 as priced" in text]


def _says(result: Verification, stage: int, chunk: int) -> bool:
    return any(text.startswith(f"stage {stage}, chunk {chunk}: a split backward") for text in result.warnings)


def test_an_order_of_another_kind_is_caught(zero_bubble: Compiled) -> None:
    plan = zero_bubble.plans["v"]
    other = dataclasses.replace(plan, settings={**plan.settings, "schedule": "gpipe"})
    assert {f.stage for f in zero_bubble.against("v", other).findings if f.check == "order"} == {0, 1}
