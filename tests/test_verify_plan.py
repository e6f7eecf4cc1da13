"""Plans compiled by MindSpore for Ascend: right ones pass, wrong ones are caught with cell and stage."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from verify_plans import hand_plan, mixed, needs_compiler, processes_about, with_unit

from mindspore_bmpipe.cli import main
from mindspore_bmpipe.costs.network import NetworkCosts
from mindspore_bmpipe.errors import InputError, TimeLimitError
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.sources import load_costs
from mindspore_bmpipe.verify.children import Rank, compile_ranks, interrupts_wait
from mindspore_bmpipe.verify.expected import expect
from mindspore_bmpipe.verify.finding import Finding
from mindspore_bmpipe.verify.jobs import Answer, Compile, cluster_size, write_compiles
from mindspore_bmpipe.verify.run import Verification, compare, verify
from mindspore_bmpipe.verify.stand_in import stand_in

SOURCE = "tools.examples.llama:factory"
SETTINGS = {"layers": 4}
CUTS = (3,)
"""Embedding and two blocks; two blocks, norm, head and loss."""

pytestmark = needs_compiler


class Compiled:
    """One plan compiled once, for all tests that look at it."""

    def __init__(self, folder: Path) -> None:
        self.costs: NetworkCosts = load_costs(SOURCE, SETTINGS)
        self.plan: Plan = hand_plan(self.costs, CUTS, mixed)
        self.path = folder / "plan.json"
        self.plan.save(self.path)
        ranks = [
            Rank(
                stage, 2,
                (Compile(f"stage_{stage}", SOURCE, SETTINGS, "1f1b", 2, 4, str(self.path)),),
            )
            for stage in (0, 1)
        ]  # fmt: skip
        self.answers: dict[str, Answer] = compile_ranks(ranks, stand_in(), folder)

    def against(self, plan: Plan, stages: Sequence[int] = (0, 1)) -> Verification:
        return compare(expect(self.costs, plan), stages, 2, self.answers)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("compiled"))


def found(result: Verification, check: str, stage: int) -> list[Finding]:
    return [finding for finding in result.findings if (finding.check, finding.stage) == (check, stage)]


def test_the_plan_itself_passes(compiled: Compiled) -> None:
    result = compiled.against(compiled.plan)
    assert result.findings == ()
    options = [unit.option for unit in compiled.plan.units]
    assert len(set(options)) >= 4  # not only one way to recompute
    assert all(stage.checked is not None and stage.checked.repeated > 0 for stage in result.stages)


def test_swapped_stages_are_caught(compiled: Compiled) -> None:
    swapped = with_unit(with_unit(compiled.plan, "blocks.1", stage=1), "blocks.2", stage=0)
    result = compiled.against(swapped)
    for stage, there, missing in ((0, "blocks.1", "blocks.2"), (1, "blocks.2", "blocks.1")):
        placed = {finding.cell: finding for finding in found(result, "placement", stage)}
        assert set(placed) >= {there, missing}
        assert "its operations run here" in placed[there].message and placed[there].nodes
        assert "not in the compiled graph" in placed[missing].message
        assert any(f"{missing}." in finding.message for finding in found(result, "weights", stage))


def test_a_dropped_recompute_flag_is_caught(compiled: Compiled) -> None:
    """The plan asks for a cell that was compiled without the flag."""
    unit = next(unit for unit in compiled.plan.units if unit.option == "none" and unit.name.startswith("blocks"))
    cell = f"{unit.name}.feed_forward"
    result = compiled.against(with_unit(compiled.plan, unit.name, recompute_cells=(cell,), option="feed_forward"))
    (finding,) = result.findings
    assert (finding.check, finding.stage, finding.cell) == ("recompute", unit.stage, cell)
    assert "4 of 4 operations do not run again" in finding.message
    assert f"MatMul of {cell}.gate" in finding.message


def test_recomputation_that_no_plan_asks_for_is_caught(compiled: Compiled) -> None:
    unit = next(unit for unit in compiled.plan.units if len(unit.recompute_cells) == 1 and "blocks" in unit.name)
    result = compiled.against(with_unit(compiled.plan, unit.name, recompute_cells=(), option="none"))
    assert result.findings
    assert {(finding.check, finding.stage) for finding in result.findings} == {("recompute", unit.stage)}
    assert all(finding.nodes for finding in result.findings)
    assert any(finding.cell.startswith(unit.recompute_cells[0]) for finding in result.findings)


def test_a_moved_cut_is_caught(compiled: Compiled) -> None:
    result = compiled.against(with_unit(compiled.plan, "blocks.2", stage=0))
    assert any(f.cell == "blocks.2" and "not in the compiled graph" in f.message for f in found(result, "placement", 0))
    assert any(f.cell == "blocks.2" and "run here" in f.message for f in found(result, "placement", 1))
    assert any(f.cell == "blocks.2" and "does not hold its weight blocks.2." in f.message for f in result.findings)


def test_another_order_is_caught(compiled: Compiled) -> None:
    settings = {**compiled.plan.settings, "micro_batches": 6}
    (finding,) = found(compiled.against(dataclasses.replace(compiled.plan, settings=settings), (0,)), "order", 0)
    # Four micro-batches were compiled. Stage 0 of two: F0 F1 B0 F2 B1 F3 B2, then B3 ends them, or F4 goes on.
    assert finding.message.startswith("step 7 of 1f1b is F4 in the plan and B3 in the compiled graph")


def test_predicted_memory_is_that_of_the_compiled_graph(compiled: Compiled) -> None:
    for stage in compiled.against(compiled.plan).stages:
        assert stage.memory is not None
        peak, predicted = stage.memory.peak, stage.memory.predicted
        # The optimizer holds a few scalars besides.
        assert stage.memory.weights == pytest.approx(predicted.static, abs=64)
        assert predicted.activations == pytest.approx(peak.activation_bytes, rel=0.03)
        assert predicted.update == pytest.approx(peak.update_bytes, rel=0.03)
        assert abs(stage.memory.error) < 0.02
        assert predicted.activations <= predicted.planned_activations


def test_predicted_and_planned_memory_are_made_of_the_same_numbers(compiled: Compiled) -> None:
    for stage in compiled.against(compiled.plan).stages:
        assert stage.memory is not None
        planned = compiled.plan.stages[stage.stage]
        # float32 and no weight of another stage, so the plan's static bytes are those of the compiled step.
        assert stage.memory.predicted.static == planned.static_bytes
        assert stage.memory.predicted.planned_peak == pytest.approx(planned.peak_bytes, abs=16)


def test_the_command_prints_one_object(compiled: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", str(compiled.path), SOURCE, "--set", "layers=4", "--stage", "1", "--json", "--quiet"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "verified"
    assert document["findings"] == []
    (stage,) = document["stages"]
    assert (stage["stage"], stage["rank"], stage["order"]) == (1, 1, "F0 B0 F1 B1 F2 B2 F3 B3")


def test_a_plan_for_another_network_is_refused(compiled: Compiled) -> None:
    with pytest.raises(InputError, match="made for another network"):
        verify(compiled.plan, str(compiled.path), SOURCE, {"layers": 3})


@pytest.mark.parametrize(
    ("stages", "ranks", "message"),
    [((2,), None, "--stage 2"), (None, 3, "--ranks 3: not a multiple"), (None, 6, "--ranks 6: MindSpore takes")],
)
def test_stages_and_ranks_that_do_not_exist_are_refused(
    compiled: Compiled, stages: tuple[int, ...] | None, ranks: int | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        verify(compiled.plan, str(compiled.path), SOURCE, SETTINGS, stages, ranks)


def test_clusters_are_of_a_size_that_mindspore_takes() -> None:
    assert [cluster_size(stages) for stages in (1, 2, 3, 4, 5, 6, 8, 12, 16)] == [1, 2, 24, 4, 40, 24, 8, 24, 16]
    assert cluster_size(4, 2) == 8


def test_nothing_is_left_after_the_time_limit(compiled: Compiled, tmp_path: Path) -> None:
    ranks = [Rank(stage, 2, (Compile(f"stage_{stage}", SOURCE, SETTINGS, stages=2),)) for stage in (0, 1)]
    with pytest.raises(TimeLimitError, match=r"not compiled within 0.5 s: rank 0, 1; raise --time-limit"):
        compile_ranks(ranks, stand_in(), tmp_path, time_limit_s=0.5)
    assert processes_about(tmp_path) == []


def test_nothing_is_left_after_an_interrupt(compiled: Compiled, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mindspore_bmpipe.cli", "verify", compiled.path, SOURCE, "--set", "layers=4"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not any("verify.child" in line for line in processes_about(tmp_path)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert processes_about(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_a_child_starts_waits_until_it_is_known() -> None:
    known = []

    def interrupted() -> None:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            known.append("child")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert known == ["child"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_child_whose_parent_is_gone_compiles_nothing(tmp_path: Path) -> None:
    requests = tmp_path / "requests.json"
    write_compiles(requests, (Compile("stage_0", SOURCE, SETTINGS, stages=2),))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    command = [sys.executable, "-m", "mindspore_bmpipe.verify.child", str(ended.pid), str(requests), str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0
    assert list(tmp_path.iterdir()) == [requests]


def test_what_the_factory_says_in_the_child_is_reported(compiled: Compiled, tmp_path: Path) -> None:
    wanted = Compile("stage_0", SOURCE, {"layers": 4, "heads": 3}, stages=2)
    answer = compile_ranks([Rank(0, 2, (wanted,))], stand_in(), tmp_path)["stage_0"]
    assert answer.graph is None
    assert "heads" in answer.error
    result = compare(expect(compiled.costs, compiled.plan), (0,), 2, {"stage_0": answer})
    (finding,) = result.findings
    assert finding.check == "compile" and "heads" in finding.message
