"""Out-of-core training (Hayakawa, Narihira): swap tensors by a window, build memory of chunks."""

from repro.measure.accelerator import HostMemoryError
from repro.outofcore.baselines import (
    DoesNotFit,
    fixed_distance,
    on_demand,
    plan_literally,
    tune_fixed_distance,
    vdnn,
)
from repro.outofcore.guards import SwappedOutError
from repro.outofcore.iterations import Statistics
from repro.outofcore.operations import OutOfCoreWarning
from repro.outofcore.plan import PlanError, SwapPlan
from repro.outofcore.planning import host_bytes, plan_packed
from repro.outofcore.schedule import plan_swaps, tune_window
from repro.outofcore.sequence import KINDS, Action, Function, Kind, Trace, TraceError
from repro.outofcore.simulation import BudgetTooSmall, Simulation, Transfer, bound
from repro.outofcore.swapper import OutOfCore, record

__all__ = [
    "KINDS", "Action", "BudgetTooSmall", "DoesNotFit", "Function", "HostMemoryError", "Kind",
    "OutOfCore", "OutOfCoreWarning", "PlanError", "Simulation", "Statistics", "SwapPlan",
    "SwappedOutError", "Trace", "TraceError", "Transfer", "bound", "fixed_distance", "host_bytes",
    "on_demand", "plan_literally", "plan_packed", "plan_swaps", "record", "tune_fixed_distance",
    "tune_window", "vdnn",
]  # fmt: skip
