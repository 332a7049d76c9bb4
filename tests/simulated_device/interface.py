"""What `torch.cuda` offers, for the simulated device: the module `torch.sim`.

Names, arguments and errors are those of `torch.cuda`, so that code which reaches its device by
`torch.get_device_module` finds here what it finds there; a device without an index is refused where
CUDA refuses it.
"""

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import simulated_device_native as native
import torch
from torch import Tensor

Device = torch.device | str | int | None
OutOfMemoryError = torch.OutOfMemoryError


def _index(device: Device, strict: bool = False) -> int:
    """Return a device's number, the current one's where none is said and that is allowed."""
    if device is None:
        return native.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    if not isinstance(device, int) and torch.device(device).type != "sim":
        raise ValueError(f"Expected a sim device, but got: {device}")
    if index is None:
        if strict:
            raise ValueError(f"Expected a device with a specified index, but got: {device}")
        return native.current_device()
    if not 0 <= index < native.DEVICES:
        raise RuntimeError(f"invalid device ordinal {index}: there are {native.DEVICES}")
    return index


# ---- devices


is_available = native.is_present
current_device = native.current_device


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def _lazy_init() -> None:  # without it, torch 2.11 takes the device for not initialised
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return native.DEVICES if native.is_present() else 0


def set_device(device: Device) -> None:
    torch.accelerator.set_device_index(_index(device))


@contextlib.contextmanager
def device(device: Device) -> Iterator[None]:
    before = native.current_device()
    torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


@dataclass(frozen=True)
class Properties:
    name: str
    total_memory: int
    uuid: str
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 1


def get_device_properties(device: Device = None) -> Properties:
    index = _index(device)
    return Properties("Simulated Device", native.total_bytes(index), f"simulated-{index}")


def get_device_capability(device: Device = None) -> tuple[int, int]:
    found = get_device_properties(device)
    return found.major, found.minor


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# ---- streams and events


def Stream(device: Device = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(torch.device("sim", _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:
    here = torch.device("sim", native.current_device())
    return torch.Event(here, enable_timing=enable_timing)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def is_current_stream_capturing() -> bool:
    return False


def _sleep(cycles: int) -> None:
    """Queue work that takes time: of no matter here, where nothing is ever known to be done."""
    torch.empty(1, device=f"sim:{native.current_device()}").zero_()


def set_sync_debug_mode(mode: str | int) -> None:
    """Raise where the host would wait, but for an event: ``"error"``; else ``"default"``.

    torch warns after the mode is set, once in a process; here each time, whichever test is first.
    """
    native.forbid_blocks(mode in ("error", 2))
    warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)


# ---- memory


def memory_stats(device: Device = None) -> "OrderedDict[str, Any]":
    """Return the allocator's statistics; they are not divided by pool."""
    found: OrderedDict[str, Any] = OrderedDict()
    for name, value in sorted(native.memory_stats(_index(device)).items()):
        if isinstance(value, dict):
            found.update({f"{name}.all.{metric}": amount for metric, amount in value.items()})
        else:
            found[name] = value
    return found


def _statistic(kind: str, metric: str) -> Callable[..., int]:
    return lambda device=None: native.memory_stats(_index(device))[kind][metric]


memory_allocated = _statistic("allocated_bytes", "current")
max_memory_allocated = _statistic("allocated_bytes", "peak")
memory_reserved = _statistic("reserved_bytes", "current")
max_memory_reserved = _statistic("reserved_bytes", "peak")
empty_cache = native.empty_cache


def reset_peak_memory_stats(device: Device = None) -> None:
    native.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    index = _index(device)
    total = native.total_bytes(index)
    return total - memory_reserved(index), total


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    index = native.current_device() if device is None else _index(device, strict=True)
    native.set_limit_bytes(index, int(fraction * native.total_bytes(index)))


def get_per_process_memory_fraction(device: Device = None) -> float:
    index = native.current_device() if device is None else _index(device, strict=True)
    return native.limit_bytes(index) / native.total_bytes(index)


def host_memory_stats() -> dict[str, Any]:
    """Return the statistics of pinned memory, by torch's names of those for the host."""
    found = native.pinned_memory_stats()
    # What is kept for later counts as allocated; what is in use, as active.
    names = {"allocated_bytes": "reserved_bytes", "active_bytes": "allocated_bytes"}
    return {f"{theirs}.{metric}": amount for theirs, ours in names.items()
            for metric, amount in found[ours].items()}  # fmt: skip


# ---- random numbers


def get_rng_state(device: Device = "sim") -> Tensor:
    words = native.generator_state(_index(device))
    state = b"".join(word.to_bytes(8, "little") for word in words)
    return torch.tensor(list(state), dtype=torch.uint8)


def set_rng_state(new_state: Tensor, device: Device = "sim") -> None:
    if new_state.dtype != torch.uint8 or new_state.numel() != 16:
        raise RuntimeError("RNG state is wrong size")
    state = bytes(new_state.tolist())
    words = (int.from_bytes(state[i : i + 8], "little") for i in (0, 8))
    native.set_generator_state(_index(device), *words)


def manual_seed(seed: int) -> None:
    native.set_generator_state(native.current_device(), int(seed) % 2**64, 0)


def manual_seed_all(seed: int) -> None:
    for i in range(native.DEVICES):
        native.set_generator_state(i, int(seed) % 2**64, 0)
