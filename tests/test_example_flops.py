"""Work of the example networks against formulas written down from their shapes, and what frozen parts cost.

What counts are multiply-adds of matrix products, convolutions, and grouped products, two flops each. Backward does
every product twice, once for each operand's gradient, except where an operand needs none: images, one-hot matrices,
and frozen weights or what only they made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from mindspore_bmpipe.costs.differentiate import differentiate
from mindspore_bmpipe.costs.network import NetworkCosts
from mindspore_bmpipe.costs.rules import require_known
from mindspore_bmpipe.costs.rules.base import Engine
from mindspore_bmpipe.costs.static_memory import StaticSettings, static_bytes
from tests.example_families import FAMILIES, family_costs
from tests.joint_comparison import forward_only, kept_labels, matrix_operations, unit_of
from tools.examples import (
    bert,
    blip2,
    deepseek,
    gpt,
    llama,
    mixtral_sharded,
    palm,
    pangu_alpha,
    swin,
    vision_language,
    vit,
)


class Count:
    """Flops of products, forward and backward, of `b` samples of `s` tokens."""

    def __init__(self, b: int, s: int) -> None:
        self.b = b
        self.s = s
        self.forward = 0
        self.backward = 0

    def product(self, rows: int, inner: int, columns: int, gradients: int = 2) -> None:
        """Add (rows, inner) times (inner, columns), of which `gradients` operands need one."""
        flops = 2 * rows * inner * columns
        self.forward += flops
        self.backward += gradients * flops

    def block(self, tokens: int, hidden: int, ffn: int, gradients: int = 2, trained: int = 1) -> None:
        """Add layers' usual parts: q, k, v, o of h^2 each, an MLP of 2 h f, scores and mixing of t^2 h each.

        Products with weights have a gradient for the weight (`trained`) and one for the states; `gradients` is 0 for
        layers that no gradient passes.
        """
        passes = trained + 1 if gradients else 0
        self.product(self.b * tokens, hidden, 4 * hidden + 2 * ffn, passes)
        self.product(self.b * tokens, hidden, 2 * tokens, gradients)


def llama_flops(settings: dict[str, Any], count: Count) -> None:
    # q and o have h^2 weights, k and v a share kv_heads / heads of that; SwiGLU has three matrices of h f.
    h, f = settings["hidden"], settings["ffn"]
    kv = 2 * h * settings["kv_heads"] // settings["heads"]
    for _ in range(settings["layers"]):
        count.product(count.b * count.s, h, 2 * h + kv + 3 * f)
        count.product(count.b * count.s, h, 2 * count.s)
    count.product(count.b * count.s, h, settings["vocab"])


def gpt_flops(settings: dict[str, Any], count: Count) -> None:
    # arXiv 2104.04473: 24 b s h^2 + 4 b s^2 h a layer where f = 4 h, and 2 b s h v for the head.
    for _ in range(settings["layers"]):
        count.block(count.s, settings["hidden"], settings["ffn"])
    count.product(count.b * count.s, settings["hidden"], settings["vocab"])


def palm_flops(settings: dict[str, Any], count: Count) -> None:
    # q and o are h by heads * d, k and v h by d; attention is over heads * d.
    h, f, d = settings["hidden"], settings["ffn"], settings["head_size"]
    width = settings["heads"] * d
    for _ in range(settings["layers"]):
        count.product(count.b * count.s, h, 2 * width + 2 * d + 3 * f)
        count.product(count.b * count.s, width, 2 * count.s)
    count.product(count.b * count.s, h, settings["vocab"])


def bert_flops(settings: dict[str, Any], count: Count) -> None:
    # Heads: transform and decoder for every token, pooler and two classes for every sample.
    h = settings["hidden"]
    for _ in range(settings["layers"]):
        count.block(count.s, h, settings["ffn"])
    count.product(count.b * count.s, h, h + settings["vocab"])
    count.product(count.b, h, h + 2)


def tower_flops(settings: dict[str, Any], count: Count, prefix: str = "", frozen: bool = False) -> int:
    # Patches of 3 p^2 values, which need no gradient; the class token is one token more. Returns all tokens.
    h = settings[f"{prefix}hidden"]
    patches = (settings["image"] // settings["patch"]) ** 2
    count.product(count.b * patches, 3 * settings["patch"] ** 2, h, gradients=0 if frozen else 1)
    for _ in range(settings[f"{prefix}layers"]):
        count.block(patches + 1, h, settings[f"{prefix}ffn"], gradients=0 if frozen else 2)
    return patches + 1


def vit_flops(settings: dict[str, Any], count: Count) -> None:
    tower_flops(settings, count)
    count.product(count.b, settings["hidden"], settings["classes"])


def swin_flops(settings: dict[str, Any], count: Count) -> None:
    # arXiv 2103.14030, equation 2: 4 L C^2 + 2 w^2 L C multiply-adds of attention on L tokens of width C in windows of
    # w^2; the MLP adds 8 L C^2. Merging maps L / 4 tokens from 4 C to 2 C.
    layers = [int(part) for part in settings["layers"].split(",")]
    side, width, window = settings["image"] // settings["patch"], settings["hidden"], settings["window"]
    count.product(count.b * side**2, 3 * settings["patch"] ** 2, width, gradients=1)
    for stage, depth in enumerate(layers):
        tokens = count.b * side**2
        for _ in range(depth):
            count.product(tokens, width, 12 * width)
            count.product(tokens, width, 2 * min(window, side) ** 2)
        if stage + 1 < len(layers):
            count.product(tokens // 4, 4 * width, 2 * width)
            side, width = side // 2, 2 * width
    count.product(count.b, width, settings["classes"])


def llava_flops(settings: dict[str, Any], count: Count) -> None:
    # The tower is frozen, so the first projection has a gradient for its weight only. Image tokens come before s text
    # tokens; the head sees text.
    image_tokens = tower_flops(settings, count, "vision_", frozen=True) - 1
    h, f = settings["hidden"], settings["ffn"]
    count.product(count.b * image_tokens, settings["vision_hidden"], h, gradients=1)
    count.product(count.b * image_tokens, h, h)
    tokens = image_tokens + count.s
    kv = 2 * h * settings["kv_heads"] // settings["heads"]
    for _ in range(settings["layers"]):
        count.product(count.b * tokens, h, 2 * h + kv + 3 * f)
        count.product(count.b * tokens, h, 2 * tokens)
    count.product(count.b * count.s, h, settings["vocab"])


def blip2_flops(settings: dict[str, Any], count: Count) -> None:
    # A trained norm stands on the frozen tower, so keys and values of the image have both gradients. Gradients pass
    # the frozen language model to the queries: products with weights have one gradient, those of attention two.
    image_tokens = tower_flops(settings, count, "vision_", frozen=True)
    n, q, width = settings["queries"], settings["query_hidden"], settings["vision_hidden"]
    for layer in range(settings["query_layers"]):
        count.block(n, q, settings["query_ffn"])
        if layer % 2 == 0:
            count.product(count.b * n, q, 2 * q)
            count.product(count.b * image_tokens, width, 2 * q)
            count.product(count.b * n, q, 2 * image_tokens)
    count.product(count.b * n, q, settings["hidden"])
    for _ in range(settings["layers"]):
        count.block(n + count.s, settings["hidden"], settings["ffn"], trained=0)
    count.product(count.b * count.s, settings["hidden"], settings["vocab"], gradients=1)


def places_flops(settings: dict[str, Any], ffn: int, count: Count) -> None:
    # Experts that take a number of tokens of each sample, which reach them and come back by one-hot products.
    h, tokens, experts, active = settings["hidden"], count.b * count.s, settings["experts"], settings["active"]
    seats = experts * int(settings["capacity_factor"] * active * count.s / experts)
    count.product(tokens, h, experts)
    count.product(count.b * seats, h, 3 * ffn)
    # One-hot (tokens, active, experts) with (tokens, active, places): without weights no gradient, with them one.
    count.product(tokens, active, seats, gradients=0)
    count.product(tokens, active, seats, gradients=1)
    # To the experts only the states have a gradient, back from them the weights too.
    count.product(tokens, seats, h, gradients=1)
    count.product(tokens, seats, h)


def mixtral_flops(settings: dict[str, Any], count: Count) -> None:
    # LLaMA without its feed-forward layers, and experts instead.
    llama_flops({**settings, "ffn": 0}, count)
    for _ in range(settings["layers"]):
        places_flops(settings, settings["ffn"], count)


def deepseek_flops(settings: dict[str, Any], count: Count) -> None:
    h, heads, tokens = settings["hidden"], settings["heads"], count.b * count.s
    plain, rotary, value = settings["plain_size"], settings["rotary_size"], settings["value_size"]
    experts, active, fe = settings["experts"], settings["active"], settings["expert_ffn"]

    def attention() -> None:
        # Down and up for queries, down for keys with the rotary part, up for keys and values, and the way out.
        count.product(tokens, h, settings["query_rank"])
        count.product(tokens, settings["query_rank"], heads * (plain + rotary))
        count.product(tokens, h, settings["kv_rank"] + rotary)
        count.product(tokens, settings["kv_rank"], heads * (plain + value))
        count.product(tokens, heads * value, h)
        count.product(tokens, heads * (plain + rotary + value), count.s)

    def mixture() -> None:
        count.product(tokens, h, 3 * fe * settings["shared"])
        if settings["dropless"]:
            count.product(tokens, h, experts)
            count.product(tokens * active, h, 3 * fe)
        else:
            places_flops(settings, fe, count)

    for layer in range(settings["layers"]):
        attention()
        if layer < settings["dense_layers"]:
            count.product(tokens, h, 3 * settings["ffn"])
        else:
            mixture()
    count.product(tokens, 2 * h, h)
    attention()
    mixture()
    count.product(2 * tokens, h, settings["vocab"])


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any], Count], None]]] = {
    "llama": (llama.PRESETS["tiny"], llama_flops),
    "qwen2.5": (llama.PRESETS["tiny"], llama_flops),
    "gpt": (gpt.PRESETS["tiny"], gpt_flops),
    "bloom": (gpt.PRESETS["tiny"], gpt_flops),
    "palm": (palm.PRESETS["tiny"], palm_flops),
    "pangu-alpha": (pangu_alpha.PRESETS["tiny"], gpt_flops),
    "bert": (bert.PRESETS["tiny"], bert_flops),
    "vit": (vit.PRESETS["tiny"], vit_flops),
    "swin": (swin.PRESETS["tiny"], swin_flops),
    "llava": (vision_language.PRESETS["tiny"], llava_flops),
    "blip-2": (blip2.PRESETS["tiny"], blip2_flops),
    "deepseek": (deepseek.PRESETS["tiny"], deepseek_flops),
    "deepseek-dropless": (deepseek.PRESETS["tiny"], deepseek_flops),
    "mixtral": (mixtral_sharded.PRESETS["tiny"], mixtral_flops),
}
"""Settings of the smallest size and the formula, by family."""


SLOW = ("blip-2", "deepseek-dropless")
"""Families that take longest to compile; `llava` and `deepseek` have most of their parts."""


def marked(names: Iterable[str]) -> list[Any]:
    """Names as test parameters, slow ones marked."""
    return [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in names]


def matrix_flops(costs: NetworkCosts, b: int = 0, s: int = 0) -> Counter[tuple[str, str]]:
    """Flops of matrix products by unit and phase, at given sizes where the costs have symbols."""
    sizes = {name: value for name, value in {"b": b, "s": s}.items() if name in costs.graph.symbols}
    totals: Counter[tuple[str, str]] = Counter()
    for unit, model in zip(costs.split.units, costs.models, strict=True):
        flops = model.flops @ model.basis.values(sizes)
        for operation, value in zip(model.operations, flops, strict=True):
            if operation.engine is Engine.MATMUL:
                totals[unit.name, operation.phase.value] += round(value)
    return totals


def compare_flops(name: str, costs: NetworkCosts, b: int, s: int) -> None:
    tiny, formula = FORMULAS[name]
    expected = Count(b, s)
    formula({**tiny, **FAMILIES[name][1]}, expected)
    totals: Counter[str] = Counter()
    for (_, phase), flops in matrix_flops(costs, b, s).items():
        totals[phase] += flops
    assert totals == {"forward": expected.forward, "backward": expected.backward}


@pytest.mark.parametrize("name", marked(FAMILIES))
def test_flops_are_those_of_the_formula(name: str) -> None:
    compare_flops(name, family_costs(name), b=2, s=16)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_flops_are_those_of_the_formula_at_sizes_never_traced(name: str) -> None:
    costs = family_costs(name, symbolic=True)
    assert set(costs.graph.symbols) == ({"b"} if name in ("vit", "swin") else {"b", "s"})
    assert not costs.graph.notes
    compare_flops(name, costs, b=7, s=80)


@pytest.mark.parametrize("name", marked(FAMILIES))
def test_every_primitive_has_a_rule(name: str) -> None:
    require_known(operation.primitive for operation in family_costs(name).graph.operations)


@pytest.mark.parametrize("name", marked(FAMILIES))
def test_derivative_rules_keep_and_multiply_what_mindspore_does(name: str) -> None:
    joint = family_costs(name).graph
    derived = differentiate(forward_only(joint))
    assert kept_labels(derived, unit_of) == kept_labels(joint, unit_of)
    assert matrix_operations(derived, unit_of) == matrix_operations(joint, unit_of)


UNITS = {
    "palm": ["embedding", "blocks.0", "blocks.1", "norm", "head", "loss"],
    "pangu-alpha": ["embedding", "position", "embedding_dropout", "blocks.0", "blocks.1", "query_layer", "norm",
                    "head", "loss"],
    "vit": ["tower.embedding", "tower.blocks.0", "tower.blocks.1", "tower.norm", "first", "head", "loss"],
    "swin": ["embedding", "stages.0.blocks.0", "stages.0.blocks.1", "stages.0.merge", "stages.1.blocks.0",
             "stages.1.blocks.1", "norm", "head", "loss"],
    "blip-2": ["vision.embedding", "vision.blocks.0", "vision.blocks.1", "projector.image_norm", "projector.norm",
               "projector.blocks.0", "projector.blocks.1", "projector.projection", "embedding", "position", "blocks.0",
               "blocks.1", "norm", "head", "loss"],
    "deepseek": ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head", "loss", "next_but_one"],
}  # fmt: skip


@pytest.mark.parametrize("name", marked(UNITS))
def test_units(name: str) -> None:
    assert [unit.name for unit in family_costs(name).split.units] == UNITS[name]


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("llava", ("vision.",)),
        pytest.param("blip-2", ("vision.", "embedding", "position", "blocks.", "norm", "head"), marks=pytest.mark.long),
    ],
)
def test_frozen_parts_have_weights_and_nothing_else(name: str, frozen: tuple[str, ...]) -> None:
    costs = family_costs(name)
    for unit, trainable in zip(costs.split.units, costs.parameters_trainable, strict=True):
        weights = [costs.graph.parameters[parameter] for parameter in unit.parameters]
        if not weights:
            continue
        assert trainable != unit.name.startswith(frozen), unit.name
        elements = sum(_product(weight.type.shape) for weight in weights)
        # float32: the weight alone, or with its gradient and Adam's two moments.
        expected = elements * (16 if trainable else 4)
        assert sum(static_bytes(weight, StaticSettings()) for weight in weights) == expected, unit.name


@pytest.mark.parametrize("name", marked(["llava", "blip-2"]))
def test_no_gradient_enters_a_frozen_tower(name: str) -> None:
    costs = family_costs(name)
    flops = matrix_flops(costs)
    for unit in costs.split.units:
        if unit.name.startswith("vision."):
            assert unit.backward == ()
            assert flops[unit.name, "backward"] == 0
            # The norm in front of the first block makes none.
            assert flops[unit.name, "forward"] > 0 or unit.name == "vision.pre_norm"


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
