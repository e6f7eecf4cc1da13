"""Plans as a fragment of a MindFormers training YAML.

MindFormers cuts its layers by ``offset``, what each stage and chunk has above an even share, and counts recomputed
layers from the first one of each chunk: ``recompute`` wholly, the rest by patterns of names (``select_recompute``, and
``select_comm_recompute`` for exchanges of shares). Source: ``LayerSetting`` of the public repository
(mindspore-lab/mindformers, ``mindformers/models/utils.py`` and ``parallel_core/training_graph/transformer/utils.py``)
and its files under ``configs`` and ``research``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mindspore_bmpipe.apply.launcher_layers import (
    LauncherLayers,
    layers_of,
    options_text,
    place_name,
    strongest_first,
)
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.plan import Plan, UnitPlan

_NAME = "MindFormers"
_SCHEDULERS: Mapping[str, str | None] = {
    "1f1b": None, "gpipe": "gpipe", "interleaved": "1f1b", "seqpipe": "seqpipe", "seqvpp": "seqvpp",
    "seqsmartvpp": "seqsmartvpp",
}  # fmt: skip
"""Schedule -> `pipeline_scheduler`; `None` for MindSpore's default without interleaving."""
_SELECT, _COMM = "select", "comm"
_MARKS: Mapping[str, frozenset[str]] = {
    "none": frozenset(), "select": frozenset({_SELECT}), "comm": frozenset({_COMM}), "both": frozenset({_SELECT, _COMM})
}  # fmt: skip
"""Recipe of a layer table -> what counts it. MindFormers has a pattern of its own for each."""
_FULL = "full"


def mindformers_fragment(plan: Plan, round_up: bool = False) -> str:
    """The keys that a plan decides, as YAML.

    Args:
        plan: the plan.
        round_up: where MindFormers cannot say what the plan recomputes, recompute more.

    Raises:
        InputError: what MindFormers cannot say.
    """
    layers = layers_of(plan, _NAME, tuple(_SCHEDULERS))
    full, counts = _counts(layers, round_up)
    share = layers.count // len(layers.held)
    offset = [len(held) - share for held in layers.held]
    document: dict[str, Any] = {
        "parallel_config": {"pipeline_stage": layers.stages, "micro_batch_num": plan.settings["micro_batches"]}
    }
    scheduler = _SCHEDULERS[str(plan.settings["schedule"])]
    if scheduler is not None:
        document["parallel"] = {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": scheduler}}
    model: dict[str, Any] = {"offset": layers.by_chunk(offset) if any(offset) else 0}
    if layers.chunks > 1:
        model["pp_interleave_num"] = layers.chunks
    document["model"] = {"model_config": model}

    def listed(values: Sequence[int]) -> Any:
        return layers.by_chunk(values) if any(values) else False

    patterns = {mark: listed(values) for mark, values in counts.items() if mark not in (_SELECT, _COMM) and any(values)}
    nothing = [0] * len(layers.held)
    document["recompute_config"] = {
        "recompute": listed(full),
        "select_recompute": patterns or listed(counts.get(_SELECT, nothing)),
        "select_comm_recompute": listed(counts.get(_COMM, nothing)),
    }
    head = (
        f"# {layers.count} layers of {plan.source} on {layers.stages} stages, {plan.solver.step_time_ms:.3f} ms a step "
        "as planned\n"
    )
    return head + yaml.safe_dump(document, sort_keys=False, default_flow_style=None)


def _counts(layers: LauncherLayers, round_up: bool) -> tuple[list[int], dict[str, list[int]]]:
    """Wholly recomputed layers of each virtual stage, and for each mark the layers from the first that have it."""
    full: list[int] = []
    marks: dict[str, list[int]] = {}
    for virtual, held in enumerate(layers.held):
        ordered = strongest_first(held, _strength)
        unknown = [unit.option for unit in ordered if unit.option != _FULL and _marks_of(unit) is None]
        if unknown and not round_up:
            raise InputError(
                f"{place_name(layers, virtual)}: {_NAME} has no option {unknown[0]!r}; plan with recompute_options of "
                f"{', '.join((*_MARKS, _FULL))}, or recompute more with --round-up"
            )
        wanted = [None if unit.option == _FULL else _marks_of(unit) for unit in ordered]
        whole = max((number + 1 for number, mark in enumerate(wanted) if mark is None), default=0)
        exact = whole == wanted.count(None)
        full.append(whole)
        rest = [mark for mark in wanted[whole:] if mark is not None]
        for mark in sorted(frozenset().union(*rest)):
            until = max(number + 1 for number, found in enumerate(rest) if mark in found)
            exact = exact and all(mark in found for found in rest[:until])
            marks.setdefault(mark, [0] * len(layers.held))[virtual] = whole + until
        if not exact and not round_up:
            raise InputError(
                f"{place_name(layers, virtual)}: {options_text(ordered)}; {_NAME} recomputes the first layers of a "
                "chunk, each pattern up to a layer of its own, wholly recomputed ones first: plan with fewer "
                "recompute_options, or recompute more with --round-up"
            )
    return full, marks


def _strength(unit: UnitPlan) -> float:
    marks = None if unit.option == _FULL else _marks_of(unit)
    return float("inf") if marks is None else len(marks)


def _marks_of(unit: UnitPlan) -> frozenset[str] | None:
    """What counts a layer's recomputation; `None` if nothing does."""
    if not unit.cells:
        return _MARKS.get(unit.option)
    paths = (*unit.recompute_cells, *unit.recompute_primitives)
    root = unit.cells[0] + "."
    if not all(path.startswith(root) for path in paths):
        return None
    marks = {path.removeprefix(root).replace(".", r"\.") for path in paths}
    return frozenset(marks | ({_COMM} if unit.recompute_communication else set()))
