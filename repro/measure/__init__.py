"""Time, memory and memory budgets, measured the same way for every method."""

from repro.measure.memory import (
    BudgetExceededError,
    LinearMemoryModel,
    MemoryBudget,
    MemoryMeter,
    MemoryState,
    is_out_of_memory,
    memory_state,
)
from repro.measure.timing import Timing, describe_device, synchronize, time_interleaved

__all__ = [
    "BudgetExceededError",
    "LinearMemoryModel",
    "MemoryBudget",
    "MemoryMeter",
    "MemoryState",
    "Timing",
    "describe_device",
    "is_out_of_memory",
    "memory_state",
    "synchronize",
    "time_interleaved",
]
