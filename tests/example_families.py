"""The example networks by family, each at its smallest size, traced at most once a session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspore.nn.utils import no_init_parameters

from mindspore_bmpipe.costs.network import NetworkCosts, network_costs
from mindspore_bmpipe.graph.trace import trace
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

FAMILIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (llama.factory, {}),
    "qwen2.5": (llama.factory, {"qkv_bias": True, "rotary_base": 1e6}),
    "gpt": (gpt.factory, {}),
    "bloom": (gpt.factory, {"alibi": True, "dropout": 0.0}),
    "palm": (palm.factory, {}),
    "pangu-alpha": (pangu_alpha.factory, {}),
    "bert": (bert.factory, {}),
    "vit": (vit.factory, {}),
    "swin": (swin.factory, {}),
    "llava": (vision_language.factory, {"freeze_vision": True}),
    "blip-2": (blip2.factory, {}),
    "deepseek": (deepseek.factory, {}),
    "deepseek-dropless": (deepseek.factory, {"dropless": True, "dtype": "float16"}),
    "mixtral": (mixtral_sharded.factory, {}),
}
"""Factory and settings; each is a family that users train."""


@functools.cache
def family_costs(name: str, symbolic: bool = False) -> NetworkCosts:
    """Costs of one family's joint graph; with the sizes of its inputs as symbols, which takes three compiles."""
    build, settings = FAMILIES[name]
    with no_init_parameters():
        network, inputs = build(**settings)
    return network_costs(trace(network, *inputs, symbols=None if symbolic else {}))
