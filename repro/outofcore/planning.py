"""Schedules by name, and plans of a recorded iteration: one at once, a better one later.

Finding the fastest schedule means simulating many plans, which for a long iteration takes far
longer than a step. So the first plan is followed as soon as it is made; after it was once followed
to its end, others are tried for a bounded time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from repro.outofcore.baselines import DoesNotFit, on_demand, tune_fixed_distance, vdnn
from repro.outofcore.host import SLAB_BYTES
from repro.outofcore.literal import plan_literally
from repro.outofcore.packing import packed_plans, plan_packed
from repro.outofcore.plan import PlanError, SwapPlan
from repro.outofcore.recording import Recording
from repro.outofcore.schedule import fastest, plan_swaps, tune_window, windows
from repro.outofcore.sequence import Trace

TRYING_S = 1.0  # time for better plans of a repeated iteration; at least one plan is tried
_COPY_LATENCY_S = 3e-5  # the cost of starting a copy, for the simulation
_MARGIN = 0.01  # least gain of a better plan, as a share of an iteration
_TUNED = {"auto", "window", "packed"}

Name = Literal["auto", "window", "packed", "paper", "lms", "vdnn", "on_demand"]
# Given a trace, a budget in bytes, seconds of each function, and bytes/s (to the device, to the
# host), returns a plan of the trace within the budget.
Scheduler = Callable[[Trace, int, Sequence[float], tuple[float, float]], SwapPlan]


def check_schedule(schedule: object) -> None:
    """Raise a ValueError if a schedule is neither one of the names nor callable."""
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
    """Return the plan of a named schedule, or the checked plan of a function.

    "auto" takes the plan with the least simulated time among packed plans and all windows; "lms"
    the distances with the least time. The arguments are those of `plan_packed`; `window_bytes` is
    for "window" and "paper", None for 1.5 times the budget.

    Raises:
        BudgetTooSmall: One function alone needs more than the budget.
        DoesNotFit: "lms" or "vdnn", which ignore the budget, exceed it.
        PlanError: A function's plan breaks a rule, or is of another trace or a larger budget.
    """
    given = trace, budget_bytes, times, rates, latency_s
    if schedule == "auto":
        both = (plan(*given) for plan in (plan_packed, tune_window))
        best = fastest(both, np.asarray(times, dtype=np.float64), rates, latency_s)
        assert best is not None  # there are two
        return best
    check_schedule(schedule)
    if not callable(schedule):
        return {
            "window": lambda: plan_swaps(trace, budget_bytes, window_bytes),
            "packed": lambda: plan_packed(*given),
            "paper": lambda: plan_literally(trace, budget_bytes, window_bytes),
            "lms": lambda: tune_fixed_distance(*given),
            "vdnn": lambda: vdnn(trace, budget_bytes),
            "on_demand": lambda: on_demand(trace, budget_bytes),
        }[schedule]()
    plan = schedule(trace, budget_bytes, times, rates)
    if plan.trace != trace or plan.budget_bytes > budget_bytes:
        raise PlanError(
            f"the schedule's plan is of {len(plan.trace.functions)} functions within "
            f"{plan.budget_bytes} bytes: plan the given trace, of {len(trace.functions)} "
            f"functions, within {budget_bytes}"
        )
    plan.verify()
    return plan


def host_bytes(trace: Trace, budget_bytes: int) -> int:
    """Return the bytes of host memory for swapping within a budget, in whole slabs.

    They are the larger of the default schedule's and of demand paging's, which runs the first
    iteration, and include variables that no function uses; 0 if all variables fit the budget.

    Raises:
        BudgetTooSmall: One function alone needs more than the budget.
    """
    needed = plan_swaps(trace, budget_bytes).host_bytes
    with suppress(DoesNotFit):  # if its iterations never repeat
        needed = max(needed, on_demand(trace, budget_bytes).host_bytes)
    if trace.peak_bytes > budget_bytes:
        needed += trace.held_bytes
    return -(-needed // SLAB_BYTES) * SLAB_BYTES


class Planner:
    """Plans iterations by a schedule; the first arguments are those of `OutOfCore`.

    Args:
        rates: Returns the copies' measured bytes/s (to the device, to the host).
    """

    def __init__(
        self,
        schedule: Name | Scheduler,
        window_bytes: int | Literal["auto"] | None,
        budget_bytes: int,
        rates: Callable[[], tuple[float, float]],
    ) -> None:
        self.schedule, self.window_bytes, self.budget_bytes = schedule, window_bytes, budget_bytes
        self._rates = rates

    def plan(self, recorded: Recording) -> SwapPlan:
        """Return a plan of an iteration quickly; errors are those of `make_plan`."""
        trace, window = recorded.trace, self.window_bytes
        window = None if window == "auto" else window
        given = trace, self.budget_bytes, recorded.times, self._rates(), _COPY_LATENCY_S
        if self.schedule == "packed":
            return next(packed_plans(*given))
        if self.schedule in _TUNED:
            return plan_swaps(trace, self.budget_bytes, window)
        return make_plan(self.schedule, *given, window)

    def better(self, plan: SwapPlan, recorded: Recording) -> SwapPlan | None:
        """Try other plans of an iteration that repeats according to `plan`, for a bounded time.

        Return the plan with the least simulated time, None if `plan` is not slower.
        """
        fixed = self.window_bytes != "auto" and self.schedule != "packed"
        other = len(recorded.times) != len(plan.trace.functions)
        if self.schedule not in _TUNED or fixed or other or not plan.bytes_moved:
            return None
        times, link = np.asarray(recorded.times), self._rates()

        def score(plan: SwapPlan) -> tuple[float, int]:
            result = plan.simulate(times, link, _COPY_LATENCY_S)
            return round(result.time_s, 9), result.bytes_moved

        until, best, found = time.perf_counter() + TRYING_S, score(plan), None
        for candidate in self._plans(plan.trace, times, link):
            tried = score(candidate)
            if tried[0] < (1 - _MARGIN) * best[0] or (tried[0] <= best[0] and tried[1] < best[1]):
                best, found = tried, candidate
            if time.perf_counter() > until:
                break
        return found

    def _plans(
        self, trace: Trace, times: NDArray[np.float64], link: tuple[float, float]
    ) -> Iterator[SwapPlan]:
        if self.schedule != "window":
            yield from packed_plans(trace, self.budget_bytes, times, link, _COPY_LATENCY_S)
        if self.schedule != "packed":
            yield from windows(trace, self.budget_bytes, times)
