"""The memory that a call allocates, including libraries' allocations inside its operations."""

import ctypes
import os
from collections.abc import Callable, Collection
from typing import Any

import torch

from repro.measure import accelerator
from repro.measure.memory import reset_peak


def peak_allocation(function: Callable[[], Any], device: torch.device | str) -> int:
    """Bytes by which the allocator rises above its start while `function` runs.

    `MemoryMeter` sees only tensors that operations return. This function sees every request to
    torch's allocator, such as oneDNN's reordered copies inside a convolution, or cuDNN's
    workspaces, and the call's result; not memory that a library takes from the system directly.
    Call `function` before, so that memory it keeps is not counted. On a CPU a RuntimeError is
    raised where another profiler is running, which this call would end.
    """
    if accelerator.is_accelerator(device):
        accelerator.synchronize(device)
        before = accelerator.memory_allocated(device)
        reset_peak(device)
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
    """(operation, bytes) of every call of the given operations while `function` runs on a CPU.

    The bytes are the call's own workspace: the allocator's rise inside the call, less the bytes
    that stay allocated after it (its result). A call inside another counts as part of the outer.
    `operations` are names, such as ``aten::convolution``. Otherwise as `peak_allocation`.
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
            continue  # inside the call before
        last_end = end
        live = peak = 0
        for moment, count in memory:
            if start <= moment <= end:
                live += count
                peak = max(peak, live)
        peaks.append((name, peak - max(0, live)))
    return peaks


def _profiled(function: Callable[[], Any], caller: str) -> list[Any]:
    """Events of torch's profiler while `function` runs, including the allocator's."""
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError(
            f"{caller} needs torch's profiler, and one is running; stop it first, and profile "
            "afterwards"
        )
    # Without this the profiler writes a line to the terminal at every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    options: Any = {"profile_memory": True, "acc_events": True}  # without it torch 2.11 warns
    with torch.profiler.profile(activities=activities, **options) as profiler:
        result = function()
    del result
    return list(profiler.profiler.kineto_results.events())


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # glibc's numbers of its options
_kept = False


def freed_memory_is_kept() -> bool:
    """Whether `keep_freed_memory` took effect in this process."""
    return _kept


def keep_freed_memory() -> bool:
    """Make this process keep memory that it frees; return whether the C library allows it.

    By default glibc returns large blocks to the system and takes them anew, so that every large
    tensor pays for page faults. On a virtual machine these take several times as long as filling
    the tensor, and a comparison of times would reward few allocations. It cannot be undone.
    """
    global _kept
    _kept = _set_malloc(_MMAP_MAX, 0) and _set_malloc(_TRIM_THRESHOLD, 2**31 - 1)
    return _kept


def give_back_freed_memory() -> bool:
    """Make this process return freed memory; return whether the C library allows it.

    By default glibc keeps freed blocks of up to 32 MiB; after this call those below 64 KiB.
    """
    return _set_malloc(_MMAP_THRESHOLD, 64 * 1024)


def _set_malloc(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(option, value))
    except (AttributeError, OSError, TypeError):  # another C library
        return False
