"""Repeated timing with a warm-up, and what a device is."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Repeated samples of one operation, in seconds, taken after `warmup` unrecorded calls."""

    samples_s: tuple[float, ...]
    warmup: int

    @property
    def median_s(self) -> float:
        """The median sample, in seconds."""
        return statistics.median(self.samples_s)


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has finished what was queued on it; nothing to do on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def time_interleaved(
    functions: Mapping[str, Callable[[], Any]],
    *,
    warmup: int = 2,
    repeats: int = 10,
    device: torch.device | str = "cpu",
) -> dict[str, Timing]:
    """Time several operations in turns, so that a slow spell of the machine meets all of them.

    Each round calls every function once, in the given order on even rounds and reversed on odd
    ones. On CUDA a sample is the time between two device events around the call.

    Args:
        functions: What to time, by name.
        warmup: Rounds that are run and not recorded.
        repeats: Recorded samples per function.
        device: The device whose events are used.

    Raises:
        ValueError: No function, `warmup` below 0 or `repeats` below 1.
    """
    if not functions or warmup < 0 or repeats < 1:
        raise ValueError(
            f"timing needs at least one function, warmup >= 0 and repeats >= 1, got "
            f"{len(functions)} functions, warmup={warmup}, repeats={repeats}"
        )
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for round_number in range(warmup + repeats):
        names = list(functions)
        for name in names if round_number % 2 == 0 else reversed(names):
            elapsed_s = _time_once(functions[name], torch.device(device))
            if round_number >= warmup:
                samples[name].append(elapsed_s)
    return {name: Timing(tuple(values), warmup) for name, values in samples.items()}


def _time_once(function: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        first.record()
        function()
        last.record()
        last.synchronize()
    return first.elapsed_time(last) / 1e3


def describe_device(device: torch.device | str) -> dict[str, Any]:
    """Return the facts of a device that a record keeps.

    The keys are `type`, `name`, `slug` (a folder name such as ``nvidia-h200`` or ``cpu-2-cores``),
    `memory_bytes`, and `threads` on a CPU or `driver` and `memory_used_bytes` (of the whole card,
    by every process, as NVML reports it) on a GPU.

    Raises:
        ValueError: The device is neither ``cpu`` nor a CUDA device that is present.
    """
    device = torch.device(device)
    if device.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return {
            "type": "cpu",
            "name": _processor_name(),
            "slug": f"cpu-{cores}-cores",
            "threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        }
    count = torch.cuda.device_count()
    if device.type != "cuda" or not count or (device.index or 0) >= count:
        raise ValueError(
            f"device {str(device)!r} is not available here; allowed are 'cpu'"
            + (f" and 'cuda:0' to 'cuda:{count - 1}'" if count else " (no CUDA device is present)")
        )
    properties = torch.cuda.get_device_properties(device)
    facts = {
        "type": "cuda",
        "name": properties.name,
        "slug": properties.name.lower().replace(" ", "-"),
        "memory_bytes": properties.total_memory,
    }
    return facts | _nvml_facts(str(properties.uuid))


def _nvml_facts(uuid: str) -> dict[str, Any]:
    try:
        import pynvml  # the module of the nvidia-ml-py distribution
    except ImportError:
        return {"driver": "unknown (nvidia-ml-py is not installed)"}
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "memory_used_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
        }
    except pynvml.NVMLError as error:  # a container may hide NVML from a working CUDA device
        return {"driver": f"unknown ({error})"}


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
