"""The schedules by name, for who runs them: `OutOfCore(schedule=...)`."""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

from repro.outofcore.baselines import on_demand, tune_fixed_distance, vdnn
from repro.outofcore.checking import PlanError
from repro.outofcore.literal import plan_literally
from repro.outofcore.packing import plan_packed
from repro.outofcore.plan import SwapPlan
from repro.outofcore.schedule import fastest, plan_swaps, tune_window
from repro.outofcore.trace import Trace

Name = Literal["auto", "window", "packed", "paper", "lms", "vdnn", "on_demand"]
# Given a trace, a budget in bytes, seconds of each function, and bytes/s (to the device, to the
# host), returns a plan of that trace within that budget.
Scheduler = Callable[[Trace, int, Sequence[float], tuple[float, float]], SwapPlan]


def check_schedule(schedule: object) -> None:
    """Raise a ValueError where a schedule is none of the names and cannot be called."""
    if not callable(schedule) and schedule not in get_args(Name):
        raise ValueError(
            f"schedule is {schedule!r}: give one of {', '.join(get_args(Name))}, or a function of "
            "a trace, a budget, times and rates that returns a SwapPlan"
        )


def make_plan(
    schedule: Name | Scheduler,
    trace: Trace,
    budget_bytes: int,
    times: Sequence[float],
    rates: tuple[float, float],
    latency_s: float = 0.0,
    window_bytes: int | None = None,
) -> SwapPlan:
    """Return a schedule's plan.

    "auto" is the faster of packed plans and of all windows when simulated; "lms" is at the
    distances that take least time.

    Args:
        schedule: A name, or a function, whose plan is checked.
        trace: The iteration.
        budget_bytes: Device memory that may be taken at any time.
        times: (n,) seconds of each function.
        rates: Bytes/s of the copies (to the device, to the host).
        latency_s: Seconds that each copy takes beside its bytes.
        window_bytes: Of "window" and "paper"; None for 1.5 times the budget.

    Raises:
        BudgetTooSmall: One function alone needs more than the budget.
        DoesNotFit: "lms" or "vdnn" holds more than the budget, which they do not know.
        PlanError: A function's plan breaks a rule, or is of another trace or a larger budget.
    """
    if schedule == "auto":
        given = trace, budget_bytes, times, rates, latency_s
        best = fastest(
            (plan(*given) for plan in (plan_packed, tune_window)),
            np.asarray(times, dtype=np.float64), rates, latency_s,
        )  # fmt: skip
        assert best is not None  # there are two
        return best
    if schedule == "window":
        return plan_swaps(trace, budget_bytes, window_bytes)
    if schedule == "packed":
        return plan_packed(trace, budget_bytes, times, rates, latency_s)
    if schedule == "paper":
        return plan_literally(trace, budget_bytes, window_bytes)
    if schedule == "lms":
        return tune_fixed_distance(trace, budget_bytes, times, rates, latency_s)
    if schedule == "vdnn":
        return vdnn(trace, budget_bytes)
    if schedule == "on_demand":
        return on_demand(trace, budget_bytes)
    check_schedule(schedule)
    assert callable(schedule)
    plan = schedule(trace, budget_bytes, times, rates)
    if plan.trace != trace or plan.budget_bytes > budget_bytes:
        raise PlanError(
            f"the schedule's plan is of {len(plan.trace.functions)} functions within "
            f"{plan.budget_bytes} bytes: plan the given trace, of {len(trace.functions)} "
            f"functions, within {budget_bytes}"
        )
    plan.verify()
    return plan
