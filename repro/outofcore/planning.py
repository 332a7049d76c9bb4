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

from repro.outofcore.baselines import DoesNotFit, on_demand, tune_fixed_distance, vdnn
from repro.outofcore.host import SLAB_BYTES
from repro.outofcore.literal import plan_literally
from repro.outofcore.packing import packed_plans
from repro.outofcore.plan import PlanError, SwapPlan
from repro.outofcore.recording import Recording
from repro.outofcore.schedule import plan_swaps, windows
from repro.outofcore.sequence import Trace

TRYING_S = 1.0  # time for better plans of a repeated iteration; at least one plan is tried
_COPY_LATENCY_S = 3e-5  # the cost of starting a copy, for the simulation
_MARGIN = 0.01  # least gain of a better plan, as a share of an iteration

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
        self.schedule, self.budget_bytes, self._rates = schedule, budget_bytes, rates
        self._window = None if window_bytes == "auto" else window_bytes
        self._tunes = schedule == "packed" or (
            schedule in ("auto", "window") and window_bytes == "auto"
        )

    def plan(self, recorded: Recording) -> SwapPlan:
        """Return a plan of an iteration quickly; errors are those of `OutOfCore`."""
        trace, budget, rates = recorded.trace, self.budget_bytes, self._rates()
        if callable(self.schedule):
            return self._checked(self.schedule(trace, budget, recorded.times, rates), trace)
        given = trace, budget, recorded.times, rates, _COPY_LATENCY_S
        return {
            "auto": lambda: plan_swaps(trace, budget, self._window),
            "window": lambda: plan_swaps(trace, budget, self._window),
            "packed": lambda: next(packed_plans(*given)),
            "paper": lambda: plan_literally(trace, budget, self._window),
            "lms": lambda: tune_fixed_distance(*given),
            "vdnn": lambda: vdnn(trace, budget),
            "on_demand": lambda: on_demand(trace, budget),
        }[self.schedule]()

    def _checked(self, plan: SwapPlan, trace: Trace) -> SwapPlan:
        if plan.trace != trace or plan.budget_bytes > self.budget_bytes:
            raise PlanError(
                f"the schedule planned another trace, or for {plan.budget_bytes} bytes: plan the "
                f"given trace, of {len(trace.functions)} functions, within {self.budget_bytes}"
            )
        plan.verify()
        return plan

    def better(self, plan: SwapPlan, recorded: Recording) -> SwapPlan | None:
        """Try other plans of an iteration that repeats according to `plan`, for a bounded time.

        Return the plan with the least simulated time, None if `plan` is not slower.
        """
        other = len(recorded.times) != len(plan.trace.functions)
        if not self._tunes or other or not plan.bytes_moved:
            return None
        given = np.asarray(recorded.times), self._rates(), _COPY_LATENCY_S

        def candidates() -> Iterator[SwapPlan]:
            if self.schedule != "window":
                yield from packed_plans(plan.trace, self.budget_bytes, *given)
            if self.schedule != "packed":
                yield from windows(plan.trace, self.budget_bytes, given[0])

        def score(plan: SwapPlan) -> tuple[float, int]:
            result = plan.simulate(*given)
            return round(result.time_s, 9), result.bytes_moved

        until, best, found = time.perf_counter() + TRYING_S, score(plan), None
        for candidate in candidates():
            tried = score(candidate)
            if tried[0] < (1 - _MARGIN) * best[0] or (tried[0] <= best[0] and tried[1] < best[1]):
                best, found = tried, candidate
            if time.perf_counter() > until:
                break
        return found
