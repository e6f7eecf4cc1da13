"""The process that compiles: `python -m mindspore_bmpipe.verify.child REQUESTS FOLDER`.

It is started by :mod:`mindspore_bmpipe.verify.children` with the toolkit on its path, as one rank of a cluster. It
never returns to the interpreter's own clean-up, which would unload libraries that cannot run.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import mindspore

from mindspore_bmpipe.apply.cells import apply
from mindspore_bmpipe.errors import BmpipeError
from mindspore_bmpipe.plan import load_plan
from mindspore_bmpipe.sources import build_factory
from mindspore_bmpipe.verify import compile_private
from mindspore_bmpipe.verify.jobs import SCHEDULERS, Answer, Compile, read_compiles, write_answer
from mindspore_bmpipe.verify.sharded_child import recorded_file

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_LONGEST_ERROR = 2000


def main(requests: str, folder: str) -> None:
    """Compile every request; a failed one does not end the rest."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    for wanted in read_compiles(Path(requests)):
        write_answer(Path(folder), _answer(wanted, Path(folder)))


def _answer(wanted: Compile, folder: Path) -> Answer:
    started = time.perf_counter()
    path = folder / f"{wanted.name}.mindir"
    error = ""
    try:
        path.write_bytes(_compiled(wanted))
    except BmpipeError as wrong:
        error = str(wrong)
    except Exception as wrong:  # MindSpore raises many types
        error = f"{type(wrong).__name__}: {str(wrong).strip()[:_LONGEST_ERROR]}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Answer(wanted.name, None if error else path, time.perf_counter() - started, peak, error)


def _compiled(wanted: Compile) -> bytes:
    settings: dict[str, Any] = {"dataset_strategy": "full_batch", "pipeline_stages": wanted.stages}
    if wanted.all_to_all or (wanted.sharding is not None and wanted.sharding.all_to_all):
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
            if wanted.sharding is not None:
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


if __name__ == "__main__":
    try:
        mindspore.set_context(device_target="CPU")
        main(*sys.argv[1:])
        code = 0
    except BaseException as wrong:
        sys.stderr.write(f"{type(wrong).__name__}: {wrong}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
