"""Time, memory and memory budgets, measured the same way for every method.

What is named here is imported when it is first used: `repro.measure.files` needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from repro.measure.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
    from repro.measure.cost import MemoryModel, Probe, TimeModel, probe
    from repro.measure.files import NotAFileError, replacing
    from repro.measure.memory import (
        BudgetExceededError,
        LinearMemoryModel,
        MemoryBudget,
        MemoryMeter,
        MemoryState,
        comparable_peaks,
        is_out_of_memory,
        least_limit,
        memory_state,
    )
    from repro.measure.search import largest_batch
    from repro.measure.timing import Timing, describe_device, synchronize, time_interleaved

_HOMES = {
    "checkpoint": ("CheckpointError", "load_checkpoint", "save_checkpoint"),
    "cost": ("MemoryModel", "Probe", "TimeModel", "probe"),
    "files": ("NotAFileError", "replacing"),
    "memory": (
        "BudgetExceededError",
        "LinearMemoryModel",
        "MemoryBudget",
        "MemoryMeter",
        "MemoryState",
        "comparable_peaks",
        "is_out_of_memory",
        "least_limit",
        "memory_state",
    ),
    "search": ("largest_batch",),
    "timing": ("Timing", "describe_device", "synchronize", "time_interleaved"),
}

__all__ = [
    "BudgetExceededError",
    "CheckpointError",
    "LinearMemoryModel",
    "MemoryBudget",
    "MemoryMeter",
    "MemoryModel",
    "MemoryState",
    "NotAFileError",
    "Probe",
    "TimeModel",
    "Timing",
    "comparable_peaks",
    "describe_device",
    "is_out_of_memory",
    "largest_batch",
    "least_limit",
    "load_checkpoint",
    "memory_state",
    "probe",
    "replacing",
    "save_checkpoint",
    "synchronize",
    "time_interleaved",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            # Kept here: `probe` is a function, and its module is called `cost`.
            value = getattr(importlib.import_module(f"repro.measure.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
