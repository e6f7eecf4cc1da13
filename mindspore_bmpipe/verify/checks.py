"""Compares what MindSpore compiled for a stage with the plan; every difference names cell, stage and nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindspore_bmpipe.costs.recompute import RecomputeModel, relative_places
from mindspore_bmpipe.costs.repeated import repeated_by_weights
from mindspore_bmpipe.graph.cell_graph import EXCHANGES
from mindspore_bmpipe.schedule import make_schedule, registered
from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.verify.expected import Expected, Place
from mindspore_bmpipe.verify.finding import Finding
from mindspore_bmpipe.verify.matching import Arriving, ChunkOperation, MatchedChunk, match_chunk
from mindspore_bmpipe.verify.rank_graph import RankGraph, compiled_order
from mindspore_bmpipe.verify.transfers import check_transfers

_SHOWN_NODES = 3
_PRODUCTS = ("MatMul", "BatchMatMul")


@dataclass(frozen=True)
class CheckedStage:
    """What was found on one stage."""

    stage: int
    """The stage."""
    operations: int
    """Forward operations compared, of one micro-batch."""
    repeated: int
    """Operations that run again for recomputation, of one micro-batch."""
    findings: tuple[Finding, ...]
    """Everything that differs."""
    order: tuple[Action, ...]
    """Compiled order."""
    notes: tuple[str, ...]
    """What could not be compared."""


def check_stage(expected: Expected, stage: int, rank: RankGraph, ranks: int) -> CheckedStage:
    """Compare one stage with the plan.

    Args:
        expected: the plan laid over the network.
        stage: the stage.
        rank: graph compiled by a rank of this stage.
        ranks: ranks of the whole cluster.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    operations = repeated = 0
    typed = expected.has_types_of(ranks)
    planned = {chunk for own, chunk in expected.places if own == stage}
    for chunk in sorted(planned - set(rank.forward)):
        units = [expected.plan.units[unit].name for unit in expected.units_at((stage, chunk))]
        findings.append(Finding(stage, "placement", units[0], f"chunk {chunk} ({', '.join(units)}) was not compiled"))
    known: dict[int, MatchedChunk] = {}
    for chunk in sorted(rank.forward):
        place = (stage, chunk)
        arriving = _arriving(expected, place, typed)
        is_sharded = ranks != len(expected.plan.stages)
        matched = match_chunk(rank, chunk, expected.identities, arriving, _crossing(expected, typed), is_sharded, known)
        known[chunk] = matched
        findings.extend(_placement(expected, place, matched))
        findings.extend(_recompute(expected, place, matched))
        findings.extend(_exchanges(expected, place, matched))
        findings.extend(_weights(expected, place, matched))
        operations += len(matched.forward)
        repeated += len(matched.backward.recomputed)
        findings.extend(_split(expected, place, matched, notes))
    findings.extend(_held_weights(expected, stage, rank))
    findings.extend(check_transfers(expected, stage, rank, ranks))
    findings.extend(_order(expected, stage, rank, notes))
    return CheckedStage(stage, operations, repeated, tuple(findings), compiled_order(rank), tuple(notes))


def _arriving(expected: Expected, place: Place, typed: bool) -> list[Arriving]:
    found = [
        Arriving(border.identity, expected.type_of(border.tensor) if typed else None)
        for border in {border.identity: border for border in expected.borders(place)}.values()
    ]
    weights = {identity: index for index, identity in expected.identities.of_tensor.items()}
    for weight in expected.shared:
        if place[0] in weight.readers:
            identity = expected.identities.interned["weight", weight.name]
            assert identity in weights
            found.append(Arriving(identity, weight.type if typed else None))
    return found


def _crossing(expected: Expected, typed: bool) -> list[Arriving]:
    """Every value that one unit makes and another reads: what a wrong cut could send."""
    return [
        Arriving(identity, expected.type_of(tensor) if typed else None)
        for identity, tensor in expected.crossing().items()
    ]


def _placement(expected: Expected, place: Place, matched: MatchedChunk) -> Iterable[Finding]:
    stage, chunk = place
    identity = expected.identities.of_operation
    computed = {identity[op] for item in matched.forward for op in item.operations}
    for unit, own in expected.operations_at(place).items():
        missing = [op for op in own if identity[op] not in computed]
        if missing:
            yield Finding(
                stage, "placement", expected.plan.units[unit].name,
                f"the plan puts it here{_in_chunk(expected, chunk)} and {len(missing)} of its {len(own)} operations "
                f"are not in the compiled graph: {_shorten(expected.describe_all(missing))}",
            )  # fmt: skip
    strange: dict[str, list[ChunkOperation]] = {}
    for item in matched.forward:
        homes = {expected.place_of[op] for op in item.operations}
        if homes and place not in homes:
            planned = expected.plan.units[expected.unit_of[item.operations[0]]]
            strange.setdefault(planned.name, []).append(item)
        elif not homes:
            strange.setdefault("", []).append(item)
    for name, items in strange.items():
        nodes = tuple(item.node.scope for item in items[:_SHOWN_NODES])
        kinds = Counter(item.node.operation for item in items)
        text = ", ".join(kind if number == 1 else f"{number} {kind}" for kind, number in kinds.items())
        if name:
            home = next(unit for unit in expected.plan.units if unit.name == name)
            yield Finding(
                stage, "placement", name,
                f"the plan puts it on stage {home.stage}, and {len(items)} of its operations run here: "
                f"{_shorten(text)}", nodes,
            )  # fmt: skip
        else:
            yield Finding(
                stage, "placement", "",
                f"{len(items)} operations compute nothing that the traced network computes: {_shorten(text)}", nodes,
            )  # fmt: skip


def _recompute(expected: Expected, place: Place, matched: MatchedChunk) -> Iterable[Finding]:
    stage = place[0]
    identity = expected.identities.of_operation
    found = {identity[op] for item in matched.backward.recomputed for op in item.operations}
    planned_here: set[int] = set()
    for unit in expected.units_at(place):
        planned = [op for op in expected.repeated[unit] if op in identity]
        planned_here |= {identity[op] for op in planned}
        missing = sorted(op for op in planned if identity[op] not in found)
        if missing:
            option = expected.plan.units[unit].option
            yield Finding(
                stage, "recompute", _cells(expected, missing),
                f"the plan recomputes it (option {option} of {expected.plan.units[unit].name}), and {len(missing)} of "
                f"{len(planned)} operations do not run again: {_shorten(expected.describe_all(missing))}",
            )  # fmt: skip
    by_cell: dict[str, list[ChunkOperation]] = {}
    for item in matched.backward.recomputed:
        if any(identity[op] in planned_here for op in item.operations):
            continue
        here = [op for op in item.operations if expected.place_of[op] == place] or list(item.operations)
        cell = expected.costs.graph.operations[here[0]].cell if here else ""
        by_cell.setdefault(cell, []).append(item)
    for cell, items in by_cell.items():
        kinds = ", ".join(dict.fromkeys(item.node.operation for item in items))
        yield Finding(
            stage, "recompute", cell, f"{len(items)} operations run again that the plan keeps: {_shorten(kinds)}",
            tuple(item.node.scope for item in items[:_SHOWN_NODES]),
        )  # fmt: skip


def _exchanges(expected: Expected, place: Place, matched: MatchedChunk) -> Iterable[Finding]:
    """As many exchanges between ranks run again as the plan says; what each is of, their places cannot tell."""
    operations = expected.costs.graph.operations
    units = expected.units_at(place)
    planned = [op for unit in units for op in expected.repeated[unit] if operations[op].primitive in EXCHANGES]
    found = matched.backward.exchanges
    if expected.costs.graph.sharding is not None and len(found) != len(planned):
        yield Finding(
            place[0], "recompute", _cells(expected, planned) if planned else "",
            f"{len(found)} exchanges of shares between ranks run again, {len(planned)} in the plan",
            tuple(node.scope for node in found[:_SHOWN_NODES]),
        )  # fmt: skip


def _weights(expected: Expected, place: Place, matched: MatchedChunk) -> Iterable[Finding]:
    """Gradients of exactly the chunk's trainable weights are added up in its backward."""
    known = expected.costs.graph.parameters
    wanted = {
        name: expected.plan.units[unit].name
        for unit in expected.units_at(place)
        for name in expected.costs.split.units[unit].parameters
        if known[name].trainable
    }
    for name in sorted(set(wanted) - matched.backward.accumulated):
        yield Finding(place[0], "weights", wanted[name], f"its backward adds up no gradient of {name}")
    for name in sorted(matched.backward.accumulated - set(wanted)):
        yield Finding(place[0], "weights", "", f"adds up the gradient of {name}, which no unit of the stage has")


def _split(expected: Expected, place: Place, matched: MatchedChunk, notes: list[str]) -> Iterable[Finding]:
    """The two parts of a split backward do together what the whole does, each gradient once."""
    if not matched.parts:
        return
    inputs, weights = matched.parts
    stage, whole = place[0], matched.backward
    for name in sorted(inputs.accumulated & weights.accumulated):
        yield Finding(stage, "weights", "", f"both parts of a split backward add up the gradient of {name}")
    for name in sorted(inputs.accumulated ^ weights.accumulated ^ whole.accumulated):
        yield Finding(stage, "weights", "", f"a split and a whole backward differ in the gradient of {name}")
    again = {item.operations for part in matched.parts for item in part.recomputed}
    missing = [item.node for item in whole.recomputed if item.operations not in again]
    if missing:
        kinds = ", ".join(dict.fromkeys(node.operation for node in missing))
        yield Finding(
            stage, "recompute", "",
            f"{len(missing)} operations run again in a whole backward and in no part of a split one: {_shorten(kinds)}",
            tuple(node.scope for node in missing[:_SHOWN_NODES]),
        )  # fmt: skip
    notes.extend(_runs_apart(expected, place, matched))


def _runs_apart(expected: Expected, place: Place, matched: MatchedChunk) -> Iterable[str]:
    """Whether what makes gradients of weights apart is what its costs say, and what it runs again."""
    where = f"stage {place[0]}, chunk {place[1]}"
    compiled = Counter(node.operation for node in matched.parts[1].operations)
    priced, again = _priced_apart(expected, place)
    for name in sorted(priced.keys() | compiled.keys()):
        # Sums of gradients are joined, and equal masks and angles made once, so that less runs than was traced.
        if (
            compiled[name] > priced[name]
            or (compiled[name] < priced[name] and not again)
            or (compiled[name] < priced[name] and name in _PRODUCTS)
        ):
            yield (
                f"{where}: the part of a split backward that makes gradients of weights (W) "
                f"runs {compiled[name]} {name} as compiled, and {priced[name]} as priced: the plan's step time is off"
            )
    if again:
        products = sum(again[name] for name in _PRODUCTS)
        yield (
            f"{where}: a split backward (B, then W) takes longer than a whole one (BW): W runs {again.total()} "
            f"operations again, {products} of them matrix products. The plan's step time counts them"
        )
    left_out = {item.operations for item in matched.backward.recomputed}
    left_out -= {item.operations for item in matched.parts[0].recomputed}
    if left_out:
        yield (
            f"{where}: the part of a split backward that makes gradients of inputs (B) leaves {len(left_out)} "
            "recomputed operations to W alone. The plan's step time counts them in both"
        )


def _priced_apart(expected: Expected, place: Place) -> tuple[Counter[str], Counter[str]]:
    """Operations by primitive that the costs count for `W`, and those of them that run again."""
    priced, again = Counter[str](), Counter[str]()
    for unit in expected.units_at(place):
        model, planned = expected.costs.models[unit], expected.plan.units[unit]
        places = relative_places(
            planned.recompute_cells, planned.recompute_primitives, planned.recompute_communication,
            expected.costs.split.units[unit].cells,
        )  # fmt: skip
        repeated = repeated_by_weights(model, RecomputeModel(model), places, hands_on=bool(again))
        again.update(model.operations[number].primitive for number in repeated)
        priced.update(model.operations[number].primitive for number in model.weight_gradients)
    return priced + again, again


def _held_weights(expected: Expected, stage: int, rank: RankGraph) -> Iterable[Finding]:
    known = expected.costs.graph.parameters
    wanted = {
        name: expected.plan.units[unit].name
        for unit, (own, _) in enumerate(expected.places)
        if own == stage
        for name in expected.costs.split.units[unit].parameters
    }
    held = {name for name in rank.module.parameters if name in known}
    for name in sorted(set(wanted) - held):
        yield Finding(stage, "weights", wanted[name], f"the stage does not hold its weight {name}")
    for name in sorted(held - set(wanted)):
        yield Finding(stage, "weights", "", f"holds the weight {name}, which no unit of the stage has")


def _order(expected: Expected, stage: int, rank: RankGraph, notes: list[str]) -> Iterable[Finding]:
    kind = str(expected.plan.settings["schedule"])
    if not rank.is_ordered:
        notes.append(f"stage {stage}: MindSpore leaves the order of some actions open")
    if kind not in registered():
        notes.append(f"stage {stage}: the order of {kind} is not compared, this version does not plan it")
        return
    chunks = 1 + max(chunk for _, chunk in expected.places)
    schedule = make_schedule(kind, len(expected.plan.stages), chunks, int(expected.plan.settings["micro_batches"]))
    planned, compiled = schedule.orders[stage], tuple(compiled_order(rank))
    if planned == compiled:
        return
    step = next(
        (number for number, (a, b) in enumerate(zip(planned, compiled, strict=False)) if a != b),
        min(len(planned), len(compiled)),
    )
    hint = ""
    if kind == "gpipe" and chunks == 1:
        hint = "; MindSpore compiles gpipe with one chunk a stage as 1f1b, plan it as that"
    yield Finding(
        stage, "order", "",
        f"step {step} of {kind} is {_step(planned, step)} in the plan and {_step(compiled, step)} in the compiled graph"
        f"{hint}",
    )  # fmt: skip


def _step(order: Sequence[Action], step: int) -> str:
    return str(order[step]) if step < len(order) else "the end"


def _cells(expected: Expected, operations: Sequence[int]) -> str:
    cells = [expected.costs.graph.operations[operation].cell for operation in operations]
    common = cells[0].split(".")
    for cell in cells[1:]:
        parts = cell.split(".")
        length = next((n for n, (a, b) in enumerate(zip(common, parts, strict=False)) if a != b), None)
        common = common[: min(len(common), len(parts)) if length is None else length]
    return ".".join(common)


def _in_chunk(expected: Expected, chunk: int) -> str:
    return f" (chunk {chunk})" if any(other for _, other in expected.places) else ""


def _shorten(text: str, most: int = 160) -> str:
    return text if len(text) <= most else text[:most].rsplit(",", 1)[0] + ", ..."
