"""Time, memory and memory budgets, measured the same way for every method."""

from repro.measure.cost import MemoryModel, Probe, TimeModel, probe
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
    "MemoryModel",
    "MemoryState",
    "Probe",
    "TimeModel",
    "Timing",
    "describe_device",
    "is_out_of_memory",
    "memory_state",
    "probe",
    "synchronize",
    "time_interleaved",
]
