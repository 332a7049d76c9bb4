"""The memory that a call allocates, that of libraries inside its operations included."""

import ctypes
import os
from collections.abc import Callable, Collection
from typing import Any

import torch

from repro.measure import accelerator


def peak_allocation(function: Callable[[], Any], device: torch.device | str) -> int:
    """Bytes by which the allocator rises above its start while `function` runs.

    `MemoryMeter` sees the tensors that operations return. This sees every request to torch's
    allocator, such as the reordered copies that oneDNN makes inside a convolution, and the
    workspaces of cuDNN. What the call returns counts as well. Memory that a library takes from the
    system directly does not.

    Args:
        function: Called once; call it before, so that what it keeps is not counted.
        device: ``cpu`` or an accelerator.

    Raises:
        RuntimeError: On a CPU, a profiler is running, which this one would end.
    """
    if accelerator.is_accelerator(device):
        accelerator.synchronize(device)
        before = accelerator.memory_allocated(device)
        accelerator.reset_peak_memory(device)
        result = function()
        accelerator.synchronize(device)
        del result
        return accelerator.max_memory_allocated(device) - before
    live = peak = 0
    for event in _profiled(function, "peak_allocation"):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def peak_inside(function: Callable[[], Any], operations: Collection[str]) -> list[tuple[str, int]]:
    """(operation, bytes) of every call of some operations while `function` runs on a CPU.

    The bytes are how far the allocator rises inside the call, less what the call leaves allocated,
    which is its result: what it takes for itself, seen from outside. Calls inside such a call are
    a part of it.

    Args:
        function: Called once; call it before, so that what it keeps is not counted.
        operations: Names, such as ``aten::convolution``.

    Raises:
        RuntimeError: A profiler is running, which this one would end.
    """
    events = _profiled(function, "peak_inside")
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    calls = sorted(
        (e.start_ns(), -e.duration_ns(), e.name()) for e in events if e.name() in operations
    )
    peaks: list[tuple[str, int]] = []
    last_end = -1
    for start, minus_duration, name in calls:
        end = start - minus_duration
        if start < last_end:
            continue  # inside the one before
        last_end = end
        live = peak = 0
        for moment, count in memory:
            if start <= moment <= end:
                live += count
                peak = max(peak, live)
        peaks.append((name, peak - max(0, live)))
    return peaks


def _profiled(function: Callable[[], Any], caller: str) -> list[Any]:
    """Events of torch's profiler while `function` runs, the allocator's among them."""
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError(
            f"{caller} needs torch's profiler, and one is running; stop it first, and profile "
            "afterwards"
        )
    # Without this the profiler writes a line to the terminal at every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        result = function()
    del result
    return list(profiler.profiler.kineto_results.events())


_kept = False


def freed_memory_is_kept() -> bool:
    """Whether `keep_freed_memory` took effect in this process."""
    return _kept


def keep_freed_memory() -> bool:
    """Make this process keep memory that it frees; return whether the C library allows it.

    By default glibc returns large blocks to the system and takes them anew, so that every large
    tensor pays for page faults: on a virtual machine several times the work that fills it. What is
    compared then is who allocates least, not who computes fastest. Meant for a process that
    measures; there is no way back.
    """
    global _kept
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    trim_threshold, mmap_max = -1, -4
    _kept = bool(set_option(mmap_max, 0)) and bool(set_option(trim_threshold, 2**31 - 1))
    return _kept
