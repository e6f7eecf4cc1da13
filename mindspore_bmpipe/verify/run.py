"""Verifies a plan: compiles stages in child processes and compares each with the plan."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspore_bmpipe.config import Config
from mindspore_bmpipe.costs.logical import DEGREES, sharding_of
from mindspore_bmpipe.costs.network import network_costs
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import Sharding
from mindspore_bmpipe.graph.mindir import load_module
from mindspore_bmpipe.graph.recorded import graph_of
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.schedule import registered
from mindspore_bmpipe.sources import load_costs, with_degrees
from mindspore_bmpipe.subjects import network_fingerprint
from mindspore_bmpipe.verify.checks import CheckedStage, check_stage
from mindspore_bmpipe.verify.children import Progress, Rank, compile_ranks
from mindspore_bmpipe.verify.expected import Expected, expect
from mindspore_bmpipe.verify.finding import Finding
from mindspore_bmpipe.verify.jobs import SCHEDULERS, Answer, Compile, cluster_size
from mindspore_bmpipe.verify.memory import Peak, memory_peaks, parameter_bytes
from mindspore_bmpipe.verify.prediction import Prediction, predicted_memory
from mindspore_bmpipe.verify.rank_graph import RankGraph, read_rank_graph
from mindspore_bmpipe.verify.sharded import record_sharded
from mindspore_bmpipe.verify.stand_in import stand_in
from mindspore_bmpipe.verify.transfers import check_pairs


@dataclass(frozen=True)
class StageMemory:
    """Memory of a stage as compiled and as predicted, at the sizes that were compiled."""

    weights: int
    """Bytes of weights, gradients and optimizer state that the compiled graph holds."""
    peak: Peak
    """Peaks of everything else, by liveness over the compiled graph."""
    predicted: Prediction
    """The same as the cost model predicts it."""

    @property
    def compiled_peak(self) -> int:
        """Compiled bytes of the whole at the larger of both moments."""
        return self.weights + max(self.peak.activation_bytes, self.peak.update_bytes)

    @property
    def error(self) -> float:
        """Predicted over compiled peak of the whole, minus 1."""
        return self.predicted.peak / self.compiled_peak - 1


@dataclass(frozen=True)
class VerifiedStage:
    """Everything known about one stage."""

    stage: int
    """The stage."""
    rank: int
    """The rank it was compiled as."""
    seconds: float
    """Time to build and compile."""
    compiler_bytes: int
    """Largest memory of the compiling process."""
    checked: CheckedStage | None
    """What the comparison gave; `None` if it did not compile."""
    memory: StageMemory | None
    """Memory; `None` if it did not compile or ranks share tensors."""
    findings: tuple[Finding, ...]
    """Everything that differs from the plan."""


@dataclass(frozen=True)
class Verification:
    """Result of verifying a plan."""

    ranks: int
    """Ranks of the cluster that was compiled for."""
    stages: tuple[VerifiedStage, ...]
    """The stages looked at."""
    findings: tuple[Finding, ...]
    """All that is wrong."""
    warnings: tuple[str, ...]
    """What works as planned and may still go wrong on a cluster, and what could not be compared."""


def verify(
    plan: Plan,
    plan_path: str,
    source: str,
    settings: Mapping[str, Any] | None = None,
    stages: Sequence[int] | None = None,
    ranks: int | None = None,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compile stages of a planned network for Ascend and compare them with the plan.

    Args:
        plan: the plan.
        plan_path: file it was read from.
        source: `pkg.module:factory` of the network.
        settings: settings for the factory.
        stages: stages to look at; all by default.
        ranks: ranks of the cluster; by default the fewest that MindSpore accepts.
        time_limit_s: seconds for compiling; no limit by default.
        progress: called as stages have compiled.

    Raises:
        InputError: the plan is not for this network, or ranks, stages or settings do not fit.
        TimeLimitError: the time limit ended first.
    """
    count = len(plan.stages)
    chosen = tuple(range(count)) if stages is None else tuple(stages)
    cluster = _cluster(plan, chosen, ranks)
    toolkit = stand_in()
    sharding = _sharding(plan)
    if sharding.is_shared:
        # Traced as one rank, so that what its ranks share and exchange can be recognised.
        settings = with_degrees(source, settings or {}, sharding)
        costs = network_costs(graph_of(record_sharded(source, settings, sharding)[0]))
    else:
        costs = load_costs(source, settings)
    if plan.fingerprint != network_fingerprint(costs):
        raise InputError(
            f"the plan was made for another network than {source} builds: units, cells or weights differ; give the "
            "settings it was planned with (--set), or plan this network"
        )
    expected = expect(costs, plan)
    # Ranks that only fill up the cluster get samples of their own; those the user counted share what the network says.
    # Where strategies say what is shared, added ranks repeat what others do.
    fills = ranks is None and not sharding.is_shared
    filling = cluster // (count * sharding.ranks) if fills else 1
    jobs = [_rank(plan, plan_path, source, settings or {}, stage, cluster, filling) for stage in chosen]
    with tempfile.TemporaryDirectory(prefix="bmpipe-") as folder:
        answers = compile_ranks(jobs, toolkit, Path(folder), time_limit_s, progress=progress)
        return compare(expected, chosen, cluster, answers)


def compare(expected: Expected, stages: Sequence[int], ranks: int, answers: Mapping[str, Answer]) -> Verification:
    """Compare compiled stages, each the answer named `stage_<number>`, with a plan laid over its network."""
    plan = expected.plan
    graphs: dict[int, RankGraph] = {}
    verified: list[VerifiedStage] = []
    warnings: list[str] = []
    for stage in stages:
        answer = answers[f"stage_{stage}"]
        rank = stage * (ranks // len(plan.stages))
        if answer.graph is None:
            finding = Finding(stage, "compile", "", f"MindSpore does not compile it: {answer.error}")
            verified.append(VerifiedStage(stage, rank, answer.seconds, answer.peak_bytes, None, None, (finding,)))
            continue
        graphs[stage] = read_rank_graph(load_module(answer.graph))
        checked = check_stage(expected, stage, graphs[stage], ranks)
        warnings.extend(checked.notes)
        memory = None
        if expected.has_types_of(ranks) and str(plan.settings["schedule"]) in registered():
            memory = _memory(expected, stage, graphs[stage])
        verified.append(
            VerifiedStage(stage, rank, answer.seconds, answer.peak_bytes, checked, memory, checked.findings)
        )
    pairs, hazards = check_pairs(expected, graphs, ranks)
    findings = [*(finding for stage in verified for finding in stage.findings), *pairs]
    return Verification(ranks, tuple(verified), tuple(findings), (*warnings, *hazards))


def _sharding(plan: Plan) -> Sharding:
    return sharding_of(Config(**{key: plan.settings.get(key) for key in DEGREES}))


def _cluster(plan: Plan, stages: Sequence[int], ranks: int | None) -> int:
    count = len(plan.stages)
    outside = [stage for stage in stages if not 0 <= stage < count]
    if outside:
        raise InputError(f"--stage {outside[0]}: the plan has stages 0 to {count - 1}")
    if count < 2:
        raise InputError("the plan has one stage, so there is no pipeline to verify")
    cluster = cluster_size(count, _sharding(plan).ranks) if ranks is None else ranks
    if cluster % count:
        raise InputError(f"--ranks {cluster}: not a multiple of the plan's {count} stages")
    if cluster_size(1, cluster) != cluster:
        raise InputError(f"--ranks {cluster}: MindSpore takes 1, 2, 4 or a multiple of 8 ranks")
    return cluster


def _rank(
    plan: Plan, plan_path: str, source: str, settings: Mapping[str, Any], stage: int, ranks: int, filling: int
) -> Rank:
    count = len(plan.stages)
    kind = str(plan.settings["schedule"])
    if kind not in SCHEDULERS:
        raise InputError(f"the plan's schedule {kind} is not one MindSpore compiles; plan with {', '.join(SCHEDULERS)}")
    wanted = Compile(
        name=f"stage_{stage}",
        source=source,
        settings=settings,
        schedule=kind,
        stages=count,
        micro_batches=int(plan.settings["micro_batches"]),
        plan=str(Path(plan_path).resolve()),
        batch_factor=filling,
        sharding=_sharding(plan),
    )
    return Rank(stage * (ranks // count), ranks, (wanted,))


def _memory(expected: Expected, stage: int, graph: RankGraph) -> StageMemory:
    costs, plan = expected.costs, expected.plan
    return StageMemory(
        weights=sum(parameter_bytes(graph.module).values()),
        peak=memory_peaks(graph),
        predicted=predicted_memory(costs, plan, stage),
    )
