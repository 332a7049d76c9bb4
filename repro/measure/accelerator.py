"""Streams, events, pinned memory, memory and random numbers of any accelerator that torch has.

The only module that calls a device's own functions: of a CUDA or ROCm GPU, or of any other device
with a module in torch. Code for CUDA alone does not belong here. A CPU has streams and events, too,
which act at once, so that the same code runs on both; the time between two of its events is the
host clock's.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch

from repro.measure.host import pinnable_bytes

_LARGE_BYTES = 16 * 2**20  # pinned at once: the host is asked first whether it has them


class HostMemoryError(RuntimeError):
    """The host has too little memory to pin; the message states the bytes asked for."""


Event = Any  # a device's (torch.Event), or `HostEvent`
Stream = Any  # a device's (torch.Stream), or `HostStream`


class _Host:
    """A CPU queues nothing: each call has ended when it returns, and waiting returns at once."""

    def wait(self, other: Any = None) -> None:
        """Do nothing."""

    synchronize = wait_event = wait_stream = wait

    def query(self) -> bool:
        """Whether all work is done: always true."""
        return True


class HostEvent(_Host):
    """A CPU's event, with the methods of `torch.Event`."""

    _time_s = math.nan

    def record(self, stream: Stream = None) -> None:
        """Note the time."""
        self._time_s = time.perf_counter()

    def elapsed_time(self, other: "HostEvent") -> float:
        """Milliseconds from this event to another, both recorded, like a device's event."""
        return (other._time_s - self._time_s) * 1e3


class HostStream(_Host):
    """A CPU's stream, with the methods of `torch.Stream`."""

    device = torch.device("cpu")

    def record_event(self) -> HostEvent:
        """Record a new event."""
        event = HostEvent()
        event.record()
        return event


# ---- devices


def is_accelerator(device: torch.device | str) -> bool:
    """Whether work on a device is queued: it is neither the CPU nor ``meta``."""
    return torch.device(device).type not in ("cpu", "meta")


def module(device: torch.device | str) -> ModuleType:
    """The module of torch for an accelerator, such as `torch.cuda`; a ValueError if it has none."""
    kind = torch.device(device).type
    try:
        return torch.get_device_module(kind)
    except RuntimeError as error:
        raise ValueError(f"this torch has no module for the device {str(device)!r}") from error


def present() -> str | None:
    """The type of the accelerator that is present, such as ``"cuda"``, or None."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return current.type if current is not None else None


def count(device: torch.device | str) -> int:
    """Number of accelerators of a device's type that are present; 0 for a CPU."""
    if not is_accelerator(device):
        return 0
    of = module(device)
    return int(of.device_count()) if of.is_available() else 0


def resolve(device: torch.device | str | None = None) -> torch.device:
    """A device with its index: the given index, else the current device's.

    None is the accelerator that is present, else the CPU. One that is not present is a ValueError.
    """
    if device is None:
        device = present() or "cpu"
    device = torch.device(device)
    if not is_accelerator(device):
        return torch.device(device.type)
    number = count(device)
    if (device.index or 0) >= number:
        there = f"there are {device.type}:0 to {device.type}:{number - 1}"
        none = f"no {device.type.upper()} device is present; use 'cpu'"
        raise ValueError(f"device is {str(device)!r}, but {there if number else none}")
    if device.index is None:
        device = torch.device(device.type, module(device).current_device())
    return device


def _indexed(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    return device if device.index is not None else resolve(device)


def name(device: torch.device | str) -> str:
    """An accelerator's name, as torch reports it."""
    return str(module(device).get_device_properties(_indexed(device)).name)


def on(device: torch.device | str) -> AbstractContextManager[Any]:
    """Make a device the current one inside; nothing to do for a CPU."""
    if not is_accelerator(device):
        return nullcontext()
    return torch.accelerator.device_index(_indexed(device).index)


# ---- streams and events


def synchronize(device: torch.device | str) -> None:
    """Wait until a device has finished all queued work; nothing to do for a CPU."""
    if is_accelerator(device):
        module(device).synchronize(device)


def new_stream(device: torch.device | str) -> Stream:
    """A stream other than the current one, from torch's pool."""
    return torch.Stream(_indexed(device)) if is_accelerator(device) else HostStream()


def current_stream(device: torch.device | str) -> Stream:
    """This thread's current stream of a device."""
    if not is_accelerator(device):
        return HostStream()
    return module(device).current_stream(device)


def use_stream(stream: Stream) -> AbstractContextManager[Any]:
    """Make a stream this thread's current one inside; unlike `torch.Stream`, it may be nested."""
    if isinstance(stream, HostStream):
        return nullcontext()
    context: AbstractContextManager[Any] = module(stream.device).stream(stream)
    return context


def new_event(device: torch.device | str, timing: bool = False) -> Event:
    """A new event; with `timing` it measures times, which a CPU's event always does."""
    if not is_accelerator(device):
        return HostEvent()
    return torch.Event(_indexed(device), enable_timing=timing)


def elapsed_s(begin: Event, end: Event) -> float:
    """Seconds between two events, once the second has been reached."""
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """Reuse a tensor's memory, once it is freed, only after `stream` has used it."""
    if isinstance(stream, torch.Stream) and is_accelerator(tensor.device):
        tensor.record_stream(stream)


# ---- memory of the device


def _counter(name: str) -> Callable[[torch.device | str], int]:
    """A function that returns an accelerator's number of this name in its module of torch."""
    return lambda device: int(getattr(module(device), name)(device))


# Bytes of live tensors, and bytes that torch holds, in use or not; each now, and the most since
# `reset_peak_memory`. A memory limit applies to the reserved bytes.
memory_allocated = _counter("memory_allocated")
max_memory_allocated = _counter("max_memory_allocated")
memory_reserved = _counter("memory_reserved")
max_memory_reserved = _counter("max_memory_reserved")


def reset_peak_memory(device: torch.device | str) -> None:
    """Begin new peaks; nothing to do for a CPU."""
    if is_accelerator(device):
        module(device).reset_peak_memory_stats(device)


def empty_cache(device: torch.device | str) -> None:
    """Give torch's unused memory on an accelerator back; nothing to do for a CPU."""
    if is_accelerator(device):
        module(device).empty_cache()


def free_and_total_bytes(device: torch.device | str) -> tuple[int, int]:
    """Free bytes of an accelerator, after the use of all processes, and its total bytes."""
    free, total = module(device).mem_get_info(device)
    return int(free), int(total)


def total_bytes(device: torch.device | str) -> int:
    """Bytes of an accelerator."""
    return int(module(device).get_device_properties(_indexed(device)).total_memory)


def limit_bytes(device: torch.device | str) -> int:
    """Bytes that torch may reserve on an accelerator in this process."""
    device = _indexed(device)
    return round(module(device).get_per_process_memory_fraction(device) * total_bytes(device))


@contextmanager
def limited(device: torch.device | str, nbytes: int) -> Iterator[None]:
    """Let torch reserve at most `nbytes` on an accelerator inside; a lower limit stays."""
    if nbytes < 1:
        raise ValueError(f"the limit is {nbytes} bytes: give 1 or more")
    device = _indexed(device)
    before = limit_bytes(device)
    empty_cache(device)
    set_limit(device, min(before, nbytes))
    try:
        yield
    finally:
        set_limit(device, before)


def set_limit(device: torch.device | str, nbytes: int) -> None:
    """Let torch reserve at most `nbytes` on an accelerator until the process ends."""
    device = _indexed(device)
    # Half a byte more, as torch rounds fraction × total down to whole bytes.
    fraction = min(1.0, (nbytes + 0.5) / total_bytes(device))
    module(device).set_per_process_memory_fraction(fraction, device)


# ---- pinned memory of the host


def pinned_bytes(nbytes: int) -> int:
    """Bytes that torch takes from the host to pin `nbytes`: the next power of two."""
    return 1 << max(0, nbytes - 1).bit_length() if nbytes else 0


def empty_pinned(
    size: Sequence[int] | int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    layout: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Host memory, pinned if `device` is an accelerator, for copies from and to it.

    Raises `HostMemoryError` if the host has too little.
    """
    shape = (size,) if isinstance(size, int) else tuple(size)
    pin = is_accelerator(device)
    with _host_memory(torch.Size(shape).numel() * dtype.itemsize, pin):
        return torch.empty(shape, dtype=dtype, memory_format=layout, pin_memory=pin)


def check_pinnable(nbytes: int) -> None:
    """Refuse to pin more than the host has, less a margin: the system would end a process.

    `nbytes` are those that torch takes (see `pinned_bytes`); fewer than 16 MiB are not checked.
    Raises `HostMemoryError`.
    """
    if nbytes >= _LARGE_BYTES and nbytes > (available := pinnable_bytes()):
        raise HostMemoryError(
            f"the host cannot provide {nbytes:,} bytes to pin: {available:,} of its memory may be "
            "pinned now; take a smaller batch or a larger budget of the device, or close what else "
            "uses it"
        )


@contextmanager
def _host_memory(nbytes: int, pin: bool) -> Iterator[None]:
    """Name the host's memory, and the bytes asked for, in the error of a failed allocation."""
    if pin:
        check_pinnable(pinned_bytes(nbytes))
    try:
        yield
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        made = f" to pin, of which torch makes {pinned_bytes(nbytes):,}" if pin else " of memory"
        raise HostMemoryError(
            f"the host cannot provide {nbytes:,} bytes{made}: take less of it at once, or close "
            "what else uses it"
        ) from error


def pinned(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A host tensor in pinned memory, from which an accelerator copies without a wait.

    A pinned tensor, or any tensor for a CPU, is returned unchanged; layouts stay. Raises
    `HostMemoryError` if the host has too little memory.
    """
    if not is_accelerator(device) or tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor
    with _host_memory(tensor.nbytes, True):
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def empty_pinned_cache(device: torch.device | str) -> None:
    """Give freed pinned memory back to the host; torch keeps it otherwise."""
    if not is_accelerator(device):
        return
    # torch 2.11 may lack the first
    give_back = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
    give_back()


# ---- random numbers


def get_rng(device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """States of the CPU's generator and of an accelerator's."""
    state = module(device).get_rng_state(_indexed(device)) if is_accelerator(device) else None
    return torch.get_rng_state(), state


def set_rng(device: torch.device | str, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Restore states returned by `get_rng`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        module(device).set_rng_state(state[1], _indexed(device))


def forked_rng(device: torch.device | str) -> AbstractContextManager[Any]:
    """Restore the random generators of the CPU and of a device at the end."""
    devices = [_indexed(device).index] if is_accelerator(device) else []
    return torch.random.fork_rng(devices, device_type=torch.device(device).type)
