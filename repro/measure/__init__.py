"""Time, memory and memory budgets, measured the same way for every method.

Names are imported on first use: `repro.measure.files` needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from repro.measure.accelerator import synchronize
    from repro.measure.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
    from repro.measure.cost import Probe, TimeModel, probe
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
    from repro.measure.timing import Timing, describe_device, time_interleaved

# The lightest first.
_MODULES = ("files", "search", "accelerator", "timing", "checkpoint", "memory", "cost")

__all__ = [
    "BudgetExceededError", "CheckpointError", "LinearMemoryModel", "MemoryBudget",
    "MemoryMeter", "MemoryState", "NotAFileError", "Probe", "TimeModel", "Timing",
    "comparable_peaks", "describe_device", "is_out_of_memory", "largest_batch", "least_limit",
    "load_checkpoint", "memory_state", "probe", "replacing", "save_checkpoint", "synchronize",
    "time_interleaved",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        home = importlib.import_module(f"repro.measure.{module}")
        if hasattr(home, name):
            globals()[name] = getattr(home, name)  # found at once the next time
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
