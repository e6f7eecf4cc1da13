"""Every private MindSpore name that compiling for Ascend relies on, so that a new version fails here and says where."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindspore_bmpipe.graph.compile_private import mindspore_version
from mindspore_bmpipe.verify.jobs import SCHEDULERS
from tests.private_names import require_name

WHERE = f"MindSpore {mindspore_version()}: adapt mindspore_bmpipe/verify/compile_private.py"


@pytest.mark.parametrize(
    ("module", "name", "parameters"),
    [
        ("mindspore.communication", "init", {"backend_name"}),
        ("mindspore.graph.api", "_cell_graph_executor._graph_executor.get_func_graph_proto", None),
        ("mindspore.nn.utils", "no_init_parameters", set()),
        ("mindspore.nn.wrap.cell_wrapper", "_TrainGradAccuStepCell", {"network", "optimizer"}),
        ("mindspore.nn.wrap.cell_wrapper", "_VirtualDatasetCell", {"backbone"}),
        ("mindspore.nn", "PipelineCell", {"network", "micro_size"}),
        ("mindspore.nn", "Cell.compile", set()),
        ("mindspore.nn", "Cell.init_parameters_data", {"auto_parallel_mode"}),
    ],
)
def test_name_exists(module: str, name: str, parameters: set[str] | None) -> None:
    require_name(module, name, parameters, WHERE)


def test_the_compiled_phase_is_kept_on_the_cell() -> None:
    class Double(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return x + x

    cell = Double()
    cell.compile(Tensor(np.zeros((2,)), mindspore.float32))
    assert isinstance(getattr(cell, "compile_phase", None), str), f"Cell.compile_phase is gone; {WHERE}"


def test_schedulers_are_those_mindspore_takes() -> None:
    for name, scheduler in SCHEDULERS.items():
        try:
            mindspore.set_auto_parallel_context(
                pipeline_config={
                    "pipeline_interleave": scheduler.interleave,
                    "pipeline_scheduler": scheduler.name,
                }
            )
        except (TypeError, ValueError) as error:
            pytest.fail(f"{name}: {error}; {WHERE}")
        finally:
            mindspore.reset_auto_parallel_context()
