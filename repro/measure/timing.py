"""Repeated timing with a warm-up, and the description of a device."""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from repro.measure import accelerator
from repro.measure.host import cores

# Seconds of work queued before a call to leave its launches out: at first, and at most.
_AHEAD_S = 1e-3
_MOST_AHEAD_S = 64e-3


@dataclass(frozen=True)
class Timing:
    """Repeated samples of one operation, in seconds; see `time_interleaved`."""

    samples_s: tuple[float, ...]
    warmup: int  # unrecorded calls before

    @property
    def median_s(self) -> float:
        """The median sample, in seconds."""
        return statistics.median(self.samples_s)


def time_interleaved(
    functions: Mapping[str, Callable[[], Any]],
    *,
    warmup: int = 2,
    repeats: int = 10,
    device: torch.device | str = "cpu",
    queued: bool = False,
) -> dict[str, Timing]:
    """Time several operations in turns, so that a slow spell of the machine affects all of them.

    Each round calls every function once, in the given order on even rounds and reversed on odd
    ones; `warmup` rounds are not recorded, `repeats` are. On an accelerator a sample is the time
    between two events around the call. As the device is idle before, the sample includes its
    waiting for the host's launches: little of a training step, and most of a single kernel.

    With `queued`, launches are left out on an accelerator: enough work is queued before that the
    whole call is queued by the time the device comes to it, for which a function may be called more
    than once in a round. One that itself waits for the device, or launches for longer than 64 ms,
    is timed with its launches.
    """
    if not functions or warmup < 0 or repeats < 1:
        raise ValueError(
            f"timing needs at least one function, warmup >= 0 and repeats >= 1, got "
            f"{len(functions)} functions, warmup={warmup}, repeats={repeats}"
        )
    device = torch.device(device)
    queues = accelerator.is_accelerator(device)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    ahead_s = dict.fromkeys(functions, _AHEAD_S if queued else 0.0)
    for round_number in range(warmup + repeats):
        names = list(functions)
        for name in names if round_number % 2 == 0 else reversed(names):
            if queues:
                sample, ahead_s[name] = _time_on(device, functions[name], ahead_s[name])
            else:
                start = time.perf_counter()
                functions[name]()
                sample = time.perf_counter() - start
            if round_number >= warmup:
                samples[name].append(sample)
    return {name: Timing(tuple(own), warmup) for name, own in samples.items()}


def _time_on(
    device: torch.device, function: Callable[[], Any], ahead_s: float
) -> tuple[float, float]:
    """Time a call on an accelerator behind `ahead_s` seconds of work, or more if that is too few.

    Returns the seconds of the call, and the seconds of work to queue before the next call: 0 if no
    amount suffices.
    """
    with accelerator.on(device):
        while True:
            first, last = (accelerator.new_event(device, timing=True) for _ in range(2))
            stream = accelerator.current_stream(device)
            accelerator.synchronize(device)
            if ahead_s:
                _occupy(device, ahead_s)
            first.record(stream)
            function()
            last.record(stream)
            in_time = not first.query()
            last.synchronize()
            if in_time or not ahead_s:
                return first.elapsed_time(last) / 1e3, ahead_s
            ahead_s = 2 * ahead_s if ahead_s < _MOST_AHEAD_S else 0.0


def _occupy(device: torch.device, seconds: float) -> None:
    """Queue work that keeps a device busy for about that many seconds."""
    sleep = getattr(accelerator.module(device), "_sleep", None)
    if sleep is not None:
        sleep(int(seconds * 2e9))  # cycles; no device has more than 2e9 a second
        return
    filled = torch.empty(2**26, dtype=torch.uint8, device=device)
    for _ in range(math.ceil(seconds / 50e-6)):  # each takes that long at 1.3 TB/s
        filled.zero_()


def describe_device(device: torch.device | str) -> dict[str, Any]:
    """The description of a device that a record keeps; an absent one is a ValueError.

    A CPU's name includes the instruction set that torch uses: hosts give processors with and
    without AVX-512 the same name, although their speed and last digits differ. The memory in use is
    of the whole card, by every process, as NVML reports it.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return {
            "type": "cpu",
            "name": f"{_processor_name()} with {torch.backends.cpu.get_cpu_capability()}",
            "slug": f"cpu-{cores()}-cores",
            "threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        }
    device = accelerator.resolve(device)
    name = accelerator.name(device)
    facts = {
        "type": device.type,
        "name": name,
        "slug": name.lower().replace(" ", "-"),
        "memory_bytes": accelerator.total_bytes(device),
    }
    if device.type == "cuda" and torch.version.hip is None:
        facts |= _nvml_facts(str(torch.cuda.get_device_properties(device).uuid))
    return facts


def _nvml_facts(uuid: str) -> dict[str, Any]:
    import pynvml  # the module of the nvidia-ml-py distribution

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
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
