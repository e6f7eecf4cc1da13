"""Measures this machine and prints a hardware description for the planner (configs/hardware/cpu_example.yaml).

Run it on an idle machine, and store what it prints:

    python tools/calibrate_cpu.py > configs/hardware/cpu_example.yaml
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

import mindspore as ms
import numpy as np
import yaml
from mindspore import Tensor, nn, ops

MULTIPLY_ADD_FLOPS = 2
MATMUL_SIZES = (512, 1024, 2048)
VECTOR_ELEMENTS = 1 << 14
"""Few enough to stay in the first levels of cache, so that arithmetic is measured and not memory."""
STREAM_BYTES = 1 << 28
"""Far more than any cache, so that memory is measured."""
CHAIN_LENGTHS = (50, 350)
REPEATS = 5


def seconds(work: Callable[[], object], calls: int = 1) -> list[float]:
    """Return the seconds of one call for each of `REPEATS` runs of `calls` calls, after one run that is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - start) / calls)
    return times[1:]


def matmul_rates(dtype: ms.Type) -> list[float]:
    """Return the flops per second of square MindSpore products, one median per size in `MATMUL_SIZES`."""
    rates = []
    for size in MATMUL_SIZES:
        values = Tensor(np.ones((size, size), np.float32)).astype(dtype)
        work = MULTIPLY_ADD_FLOPS * size**3
        times = seconds(lambda values=values: ops.matmul(values, values).asnumpy())  # type: ignore[misc]
        rates.append(work / statistics.median(times))
    return rates


def vector_rate(dtype: type[np.floating]) -> float:
    """Return the flops per second of additions that stay in cache, one core, by NumPy."""
    values = np.ones(VECTOR_ELEMENTS, dtype)
    target = np.empty_like(values)
    return VECTOR_ELEMENTS / min(seconds(lambda: np.add(values, values, out=target), calls=2000))


def memory_rates() -> list[float]:
    """Return the bytes per second of copies, counting what is read and what is written."""
    source = np.ones(STREAM_BYTES // 4, np.float32)
    target = np.empty_like(source)
    return [2 * STREAM_BYTES / duration for duration in seconds(lambda: np.copyto(target, source))]


class Chain(nn.Cell):
    """So many additions, each needing the one before."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.add = ops.Add()

    def construct(self, value: Tensor, step: Tensor) -> Tensor:
        """Return `value + length * step`."""
        for _ in range(self.length):
            value = self.add(value, step)
        return value


def launch_us() -> float:
    """Return the microseconds a compiled graph needs for one more operation on almost no data."""
    ms.set_context(mode=ms.GRAPH_MODE)
    one = Tensor(np.ones(1, np.float32))
    durations = []
    for length in CHAIN_LENGTHS:
        chain = Chain(length)
        durations.append(min(seconds(lambda chain=chain: chain(one, one).asnumpy(), calls=20)))  # type: ignore[misc]
    return (durations[1] - durations[0]) / (CHAIN_LENGTHS[1] - CHAIN_LENGTHS[0]) * 1e6


def memory_capacity() -> int:
    """Return the bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measured(value: float, what: str, digits: int = 3) -> dict[str, object]:
    """Return a value rounded to `digits` significant digits, with what was measured as its source."""
    return {"value": float(f"{value:.{digits}g}"), "source": f"measured by tools/calibrate_cpu.py: {what}"}


def assumed(value: float, why: str) -> dict[str, object]:
    """Return a value that was not measured, with the reasoning behind it as its source."""
    return {"value": value, "source": f"assumption: {why}"}


def describe() -> dict[str, object]:
    """Measure everything and return the description, in the order it is to be read."""
    sizes = ", ".join(str(size) for size in MATMUL_SIZES)
    rates = {name: matmul_rates(dtype) for name, dtype in (("float16", ms.float16), ("float32", ms.float32))}
    single = max(rates["float32"])
    copies = memory_rates()
    matmul = f"ops.matmul of square matrices of {sizes}, best median"
    intra = "processes on one machine hand data over through memory: one copy in, one copy out"
    return {
        "name": "cpu_example",
        "description": f"CPU machine, {os.cpu_count()} cores ({platform.machine()}), MindSpore {ms.__version__}",
        "memory_capacity_bytes": {"value": memory_capacity(), "source": "measured by tools/calibrate_cpu.py: sysconf"},
        "flops": {
            "matmul_float16": measured(max(rates["float16"]), f"float16 {matmul}"),
            "matmul_bfloat16": assumed(
                float(f"{max(rates['float16']):.3g}"), "as float16; both are converted to float32 on a CPU"
            ),
            "matmul_float32": measured(single, f"float32 {matmul}"),
            "vector_float16": measured(vector_rate(np.float16), "numpy.add in cache, one core"),
            "vector_float32": measured(vector_rate(np.float32), "numpy.add in cache, one core"),
        },
        "efficiency": {
            "matmul": measured(
                statistics.mean(rates["float32"]) / single, "mean over the matrix sizes divided by the best", 2
            ),
            "vector": assumed(1.0, "the rates above are what was reached, not what the vendor promises"),
            "memory": measured(statistics.median(copies) / max(copies), "median copy divided by the best", 2),
        },
        "memory_bandwidth_bytes_per_s": measured(
            max(copies), f"numpy.copyto of {STREAM_BYTES >> 20} MiB, bytes read plus written, best of {REPEATS}"
        ),
        "launch_overhead_us": measured(
            launch_us(), f"one of {CHAIN_LENGTHS[1]} dependent additions of one element in a compiled graph"
        ),
        "links": {
            "intra_node": {
                "latency_us": assumed(10.0, "a message between two local processes costs a few system calls"),
                "bandwidth_bytes_per_s": assumed(float(f"{max(copies) / 4:.3g}"), intra),
            },
            "inter_node": {
                "latency_us": assumed(50.0, "a round through the kernel's TCP stack and one switch"),
                "bandwidth_bytes_per_s": assumed(1.25e9, "10 gigabit Ethernet"),
            },
        },
        "devices_per_node": {"value": 1, "source": "definition: one process uses all cores of the machine"},
    }


def main() -> None:
    """Print the description as YAML on standard output."""
    yaml.safe_dump(describe(), sys.stdout, sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    main()
