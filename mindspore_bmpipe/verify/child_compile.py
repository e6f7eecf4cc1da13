"""What a compiling process does for one request; see :mod:`mindspore_bmpipe.verify.child`."""

from __future__ import annotations

import os
from typing import Any

import mindspore

from mindspore_bmpipe.apply.cells import apply
from mindspore_bmpipe.plan import load_plan
from mindspore_bmpipe.sources import build_factory
from mindspore_bmpipe.verify import compile_private
from mindspore_bmpipe.verify.jobs import SCHEDULERS, Compile
from mindspore_bmpipe.verify.sharded_child import recorded_file


def prepare() -> None:
    """Settings that must be made before anything compiles."""
    mindspore.set_context(device_target="CPU")


def compiled(wanted: Compile) -> bytes:
    """Bytes of the graph that one request asks for.

    Raises:
        BmpipeError: the factory or the plan is wrong.
        Exception: whatever MindSpore raises when it does not compile.
    """
    settings: dict[str, Any] = {"dataset_strategy": "full_batch", "pipeline_stages": wanted.stages}
    if wanted.sharding.all_to_all:
        settings["enable_alltoall"] = True
    scheduler = SCHEDULERS[wanted.schedule]
    os.environ.update(scheduler.environment)
    if wanted.stages > 1:
        settings["pipeline_config"] = {
            "pipeline_interleave": scheduler.interleave, "pipeline_scheduler": scheduler.name,
        }  # fmt: skip
    if wanted.optimizer_shard_level:
        settings["enable_parallel_optimizer"] = True
        settings["parallel_optimizer_config"] = {"optimizer_level": f"level{wanted.optimizer_shard_level}"}
    try:
        with compile_private.parallel(**settings):
            network, inputs = build_factory(wanted.source, wanted.settings)
            compile_private.start()
            if wanted.records:
                return recorded_file(network, inputs, wanted.sharding, wanted.varies)
            if wanted.plan is not None:
                apply(network, load_plan(wanted.plan))
            cells = dict(network.cells_and_names())
            for name, (stage, segment) in wanted.cells.items():
                cells[name].pipeline_stage = stage
                cells[name].pipeline_segment = segment
            if wanted.stages == 1:
                return compile_private.rank_graph_bytes(compile_private.plain_step(network), inputs)
            step = compile_private.pipeline_step(network, wanted.micro_batches)
            return compile_private.rank_graph_bytes(
                step, compile_private.whole_batch(inputs, wanted.micro_batches * wanted.batch_factor)
            )
    finally:
        for name in scheduler.environment:
            os.environ.pop(name, None)
