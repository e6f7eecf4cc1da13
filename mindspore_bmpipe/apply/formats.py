"""The formats a plan can be written in for launchers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mindspore_bmpipe.apply.megatron import megatron_arguments
from mindspore_bmpipe.apply.mindformers import mindformers_fragment
from mindspore_bmpipe.apply.plan_json import plan_json
from mindspore_bmpipe.plan import Plan

Writer = Callable[[Plan, bool], str]
"""Text of a plan; the flag allows to recompute more where the format cannot say what the plan does."""

FORMATS: Mapping[str, Writer] = {
    "mindformers": mindformers_fragment,
    "megatron": megatron_arguments,
    "json": plan_json,
}
"""Name -> writer."""
