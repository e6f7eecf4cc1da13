"""Plans as command-line arguments of Megatron-LM.

The layout lists virtual stages in order, ``E`` for the embedding, ``t`` for a layer, ``L`` for head and loss; virtual
stage c * p + s is chunk c of stage s. Recomputation is one choice for all chunks: the attention core of every layer, or
the first N layers of each chunk wholly. Source: Megatron-LM's user guide (NVIDIA/Megatron-LM, "Custom Pipeline Model
Parallel Layout") and the help texts of ``--recompute-*``.
"""

from __future__ import annotations

from mindspore_bmpipe.apply.launcher_layers import LauncherLayers, layers_of, options_text, place_name, strongest_first
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.plan import Plan, UnitPlan

_NAME = "Megatron-LM"
_NONE, _SELECT, _FULL = "none", "select", "full"
_STRENGTH = {_NONE: 0, _SELECT: 1}


def megatron_arguments(plan: Plan, round_up: bool = False) -> str:
    """The arguments that a plan decides, one a line, to paste into a shell script.

    Args:
        plan: the plan.
        round_up: where Megatron-LM cannot say what the plan recomputes, recompute more.

    Raises:
        InputError: what Megatron-LM cannot say.
    """
    layers = layers_of(plan, _NAME, ("1f1b", "interleaved"))
    arguments = [
        f"--pipeline-model-parallel-size {layers.stages}",
        f'--pipeline-model-parallel-layout "{layout(layers)}"',
        *_recompute(layers, round_up),
    ]
    return " \\\n".join(arguments) + "\n"


def layout(layers: LauncherLayers) -> str:
    """The layout string."""
    parts = ["" if not held else "t" if len(held) == 1 else f"t*{len(held)}" for held in layers.held]
    return "E" + "|".join(parts) + "L"


def _recompute(layers: LauncherLayers, round_up: bool) -> list[str]:
    everything = [unit for held in layers.held for unit in held]
    names = {unit.option for unit in everything}
    other = sorted(names - {_NONE, _SELECT, _FULL})
    if other and not round_up:
        raise InputError(
            f"{_NAME} has no recomputation like option {other[0]!r}; plan with recompute_options of {_NONE}, "
            f"{_SELECT}, {_FULL}, or recompute more with --round-up"
        )
    if names == {_NONE}:
        return []
    if _SELECT in names and names <= {_NONE, _SELECT}:
        if _NONE in names and not round_up:
            raise InputError(
                f"{_NAME} recomputes attention cores of all layers or of none, the plan has "
                f"{options_text(everything)}; plan with one of {_NONE} and {_SELECT}, or recompute more with --round-up"
            )
        return ["--recompute-granularity selective", "--recompute-modules core_attn"]

    def strength(unit: UnitPlan) -> float:
        # Beside wholly recomputed layers there is no selective one.
        return float(unit.option != _NONE)

    ordered = [strongest_first(held, strength) for held in layers.held]
    counts = [max((n + 1 for n, unit in enumerate(held) if strength(unit)), default=0) for held in ordered]
    number = max(counts)
    for virtual, (held, count) in enumerate(zip(ordered, counts, strict=True)):
        exact = all(unit.option == _FULL for unit in held[:count]) and count == min(number, len(held))
        if not exact and not round_up:
            raise InputError(
                f"{place_name(layers, virtual)}: {options_text(held)}; {_NAME} recomputes the first N layers of every "
                f"chunk wholly, with one N ({number} here); plan with --planner megatron_manual, or recompute more "
                "with --round-up"
            )
    return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {number}"]
