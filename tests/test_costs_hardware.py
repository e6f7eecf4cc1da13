"""Reading machines: what is refused, and times by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspore_bmpipe.costs.hardware import available_hardware, load_hardware
from mindspore_bmpipe.errors import InputError

MACHINE: dict[str, Any] = {
    "name": "toy",
    "memory_capacity_bytes": 1000,
    "flops": {f"{e}_{t}": 1e6 for e in ("matmul", "vector") for t in ("float16", "float32")} | {"matmul_bfloat16": 4e6},
    "efficiency": {"matmul": 0.5, "vector": 0.5, "memory": 0.25},
    "memory_bandwidth_bytes_per_s": {"value": 8e6, "source": "made up"},
    "launch_overhead_us": 5,
    "links": {
        "intra_node": {"latency_us": 2000, "bandwidth_bytes_per_s": 1e6, "point_to_point_bandwidth_bytes_per_s": 1e5},
        "inter_node": {"latency_us": 3000, "bandwidth_bytes_per_s": 1e6},
    },
    "devices_per_node": 4,
}


def write(folder: Path, document: Any) -> str:
    path = folder / "toy.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return str(path)


def test_numbers_by_hand(tmp_path: Path) -> None:
    hardware = load_hardware(write(tmp_path, MACHINE))
    # Half of 4e6 a second is 2e3 a millisecond.
    assert hardware.rate("matmul", "bfloat16") == 2e3
    assert hardware.rate("vector", "bfloat16") == hardware.rate("matmul", "int32") == 500
    assert hardware.bytes_per_ms == 2e3
    assert hardware.launch_ms == 0.005
    # A pair of devices of one node has a tenth of what a device has with all of them.
    assert hardware.intra_node.transfer_ms(200) == pytest.approx(2 + 200 / 100)
    assert hardware.inter_node.transfer_ms(200) == pytest.approx(3 + 200 / 1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_capacity_bytes": None}, "memory_capacity_bytes"),
        ({"launch_overhead_us": "soon"}, "launch_overhead_us: 'soon' is not a number"),
        ({"memory_bandwidth_bytes_per_s": {"value": -1}}, "must be a positive number"),
        ({"efficiency": {"matmul": 1.5, "vector": 1, "memory": 1}}, "at most 1"),
        ({"links": {"intra_node": {}, "inter_node": {}}}, "links.intra_node.latency_us is missing"),
    ],
)
def test_bad_numbers_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    document = {key: value for key, value in {**MACHINE, **change}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        load_hardware(write(tmp_path, document))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the hardware file"):
        load_hardware(str(tmp_path / "none.yaml"))
    with pytest.raises(InputError, match="not valid YAML"):
        load_hardware(write(tmp_path, "a: [1"))
    with pytest.raises(InputError, match="must be a mapping"):
        load_hardware(write(tmp_path, "- 1"))
    with pytest.raises(InputError, match="known are a100, ascend910a"):
        load_hardware("abacus")


@pytest.mark.parametrize("name", available_hardware())
def test_machines_that_come_along_load(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.rate("matmul", "float32") > hardware.rate("vector", "float32")
