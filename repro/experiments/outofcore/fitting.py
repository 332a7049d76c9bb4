"""The largest budget for a schedule whose requests an allocator can serve within a limit."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repro import outofcore
from repro.outofcore import Simulation, SwapPlan, Trace, plan_swaps
from repro.outofcore.allocator import ALIGNMENT, PAPER_CHUNK_BYTES, OutOfMemory, replay
from repro.outofcore.allocator import BestFitAllocator as BestFit
from repro.outofcore.allocator import ChunkedAllocator as Chunked
from repro.outofcore.plan import by_function, requests
from repro.outofcore.planning import packed_plans

_PAPER_LIMIT = 16 * 2**30
_STEPS = 4  # of bisection, within a quarter
# Of a budget that is served, from the smallest one on.
_PACKED_PARTS = {True: (1.1, 1.0, 0.9), False: (1.0,)}
_WINDOWS = (0.25, 0.5, 0.7, 1.0, 2.0, 3.0)  # shares of the budget, besides the default
_SERVED = 4  # plans, the fastest first, whose mapping is looked at
_LMS_SHARES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6)  # of the limit
# Pairs of distances, in functions: to the next use of what leaves, and ahead of what comes back.
_LMS_PAIRS = tuple(product((1, 4, 16, 64, 256), (1, 4, 16, 64)))
_LMS_THRIFTY = ((1, 1), (4, 1))  # that hold least
ITERATIONS = 3  # whose requests are replayed; fragmentation settles in the first
Make = Callable[[], BestFit | Chunked]


@dataclass(frozen=True)
class Fitting:
    """A plan, an allocator that serves its requests, and the memory that this takes."""

    plan: SwapPlan
    make: Make
    peaks: Mapping[str, int]  # of the allocator's quantities

    def mapping(self) -> NDArray[np.int64]:
        """The chunks that are mapped and unmapped before each function, once it repeats."""
        allocator, n = self.make(), len(self.plan.trace.functions)
        counts = np.zeros(ITERATIONS * n, dtype=np.int64)
        for number, event in by_function(self.plan, ITERATIONS):
            before = allocator.map_operations
            replay(allocator, [event])
            counts[number] += allocator.map_operations - before
        return counts[-n:]


@dataclass(frozen=True)
class Costs:
    """The costs of an iteration on a device."""

    times: NDArray[np.float64]  # (n,) seconds of each function
    rate: float  # bytes/s of the copies, each way
    map_s: float = 0.0  # that mapping or unmapping a chunk takes on the compute stream

    def simulate(self, plan: SwapPlan, mapped: NDArray[np.int64] | int = 0) -> Simulation:
        """A plan's iteration, with the chunks that are mapped before each function."""
        return plan.simulate(self.times + self.map_s * mapped, self.rate)

    def fastest(
        self, plans: Iterable[SwapPlan], makes: Iterable[Make], most: int | None = None
    ) -> Fitting | None:
        """The fastest plan and allocator of the first `most` that are served, mapping included."""
        best, least, served = None, math.inf, 0
        timed = sorted(((self.simulate(p).time_s, p) for p in plans), key=lambda pair: pair[0])
        for make in makes:
            for unmapped_s, plan in timed:
                if unmapped_s >= least or served == most:
                    break
                fitting = fit(plan, make)
                if fitting is None:
                    continue
                served += 1
                taken = unmapped_s
                if self.map_s:
                    taken = self.simulate(plan, fitting.mapping()).time_s
                if taken < least:
                    best, least = fitting, taken
        return best

    def fastest_unmapped(self, plans: Iterable[SwapPlan], make: Make) -> Fitting | None:
        """The fastest plan without mapping; none is planned after one that moves nothing."""
        tried = []
        for plan in plans:
            tried.append(plan)
            if not plan.bytes_moved:
                break
        return Costs(self.times, self.rate).fastest(tried, [make])


def fit(plan: SwapPlan, make: Make) -> Fitting | None:
    """Serve a plan's requests; None where they do not fit."""
    try:
        return Fitting(plan, make, replay(make(), requests(plan, ITERATIONS)).peaks)
    except OutOfMemory:
        return None


def in_core(trace: Trace, make: Make) -> Fitting | None:
    """Training without swaps, None where it does not fit."""
    return fit(plan_swaps(trace, trace.peak_bytes), make)


def best_fit(limit_bytes: int) -> BestFit:
    """Torch's allocator; its sizes in proportion where the limit is not the paper's."""
    return BestFit(limit_bytes, limit_bytes / _PAPER_LIMIT)


def chunked(limit_bytes: int, chunk: int | None = None) -> Chunked:
    """The chunked allocator; its chunks in proportion where the limit is not the paper's."""
    chunk = chunk or chunk_bytes(limit_bytes)
    return Chunked(chunk, limit_bytes, chunk // 2)


ALLOCATORS: dict[str, Callable[[int], Any]] = {"schedule": best_fit, "schedule_va": chunked}


def chunk_bytes(limit_bytes: int) -> int:
    """The paper's 40 MiB of 16 GiB in proportion."""
    chunk = PAPER_CHUNK_BYTES * limit_bytes / _PAPER_LIMIT
    return max(1, round(chunk / ALIGNMENT)) * ALIGNMENT


def largest_budget(trace: Trace, limit_bytes: int, make: Make) -> Fitting | None:
    """The plan of the largest budget whose requests `make`'s allocator serves, None without one.

    From above over ends and quarters of what is feasible, then by bisection to 2 % of it.
    """
    above = None
    for low in reversed(_budgets(trace, limit_bytes)):
        best = fit(plan_swaps(trace, low), make)
        if best is None:
            above = low
            continue
        for _ in range(_STEPS if above is not None else 0):
            middle = (low + (above or 0)) // 2
            fitting = fit(plan_swaps(trace, middle), make)
            if fitting is None:
                above = middle
            else:
                low, best = middle, fitting
        return best
    return None


def _budgets(trace: Trace, limit_bytes: int) -> list[int]:
    low = trace.smallest_budget
    return [] if low > limit_bytes else [low + (limit_bytes - low) * k // 4 for k in range(5)]


def can_train(trace: Trace, limit_bytes: int, make: Make) -> bool:
    """Whether any of the budgets that `largest_budget` starts from is served."""
    return any(fit(plan_swaps(trace, b), make) for b in _budgets(trace, limit_bytes))


def tuned(given: Fitting, limit_bytes: int, costs: Costs, windows: bool = True) -> Fitting:
    """The fastest plan that is served of `given`, packed plans and, with `windows`, others."""
    trace, budget = given.plan.trace, given.plan.budget_bytes
    low = trace.smallest_budget
    plans = [given.plan]
    if budget < trace.peak_bytes:
        for part in _PACKED_PARTS[windows]:
            smaller = min(limit_bytes, low + int(part * (budget - low)))
            plans += packed_plans(trace, smaller, costs.times, costs.rate, 0.0, 0.0)
        plans += [plan_swaps(trace, budget, int(k * budget)) for k in _WINDOWS if windows]
    return costs.fastest(plans, [given.make], _SERVED) or given


def literal(trace: Trace, budget_bytes: int, costs: Costs, make: Make) -> Fitting | None:
    """The paper's schedule to the letter, at the fastest of several windows and budgets."""
    low = trace.smallest_budget
    for part in (1.0, 0.9, 0.8, 0.6, 0.4):
        budget = low + int(part * (budget_bytes - low))
        windows = (int(share * budget) for share in (1.5, 3.0))
        plans = (outofcore.plan_literally(trace, budget, window) for window in windows)
        if fitting := costs.fastest_unmapped(plans, make):
            return fitting
    return None


def lms(trace: Trace, limit_bytes: int, thrifty: bool = False) -> Iterator[SwapPlan]:
    """LMS's plans at several budgets, of all pairs of distances or of those that hold least."""
    pairs = _LMS_THRIFTY if thrifty else _LMS_PAIRS
    for share, (threshold, ahead) in product(_LMS_SHARES, pairs):
        with suppress(outofcore.DoesNotFit, outofcore.BudgetTooSmall):
            yield outofcore.fixed_distance(trace, int(share * limit_bytes), threshold, ahead)
