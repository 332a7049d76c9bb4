"""The largest budget for a schedule whose requests an allocator can serve within a limit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repro.outofcore import (
    BudgetTooSmall,
    DoesNotFit,
    SwapPlan,
    Trace,
    fixed_distance,
    plan_literally,
    plan_swaps,
)
from repro.outofcore.allocator import (
    MIB,
    PAPER_CHUNK_BYTES,
    BestFitAllocator,
    ChunkedAllocator,
    FragmentationReport,
    OutOfMemory,
    replay,
)
from repro.outofcore.packing import packed_plans
from repro.outofcore.pooled import ALIGNMENT, PooledChunkedAllocator
from repro.outofcore.requests import by_function, requests

GIB = 2**30
_PAPER_LIMIT = 16 * GIB
_STEPS = 4  # of bisection, within a quarter of the way
# Of a budget that is served, from the smallest one on.
_PACKED_PARTS = {True: (1.1, 1.0, 0.9), False: (1.0,)}
_WINDOWS = (0.25, 0.5, 0.7, 1.0, 2.0, 3.0)  # shares of the budget, beside the default
_SERVED = 4  # plans, the fastest first, whose mapping is looked at
_LMS_SHARES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6)  # of the limit
_LMS_THRESHOLDS, _LMS_AHEADS = (1, 4, 16, 64, 256), (1, 4, 16, 64)
_ITERATIONS = 3  # whose requests are replayed; fragmentation settles in the first
Make = Callable[[], BestFitAllocator | ChunkedAllocator]


def best_fit(limit_bytes: int) -> BestFitAllocator:
    """Return torch's allocator; its sizes in proportion where the limit is not the paper's."""

    def scaled(nbytes: int) -> int:
        return _multiple(nbytes * limit_bytes / _PAPER_LIMIT)

    if limit_bytes == _PAPER_LIMIT:
        return BestFitAllocator(limit_bytes)
    return BestFitAllocator(
        limit_bytes,
        ALIGNMENT,
        scaled(MIB),
        scaled(2 * MIB),
        scaled(10 * MIB),
        scaled(2 * MIB),
        scaled(20 * MIB),
    )


def chunked(limit_bytes: int, chunk: int | None = None) -> PooledChunkedAllocator:
    """Return the chunked allocator; its chunks in proportion where the limit is not the paper's."""
    return PooledChunkedAllocator(chunk or chunk_bytes(limit_bytes), limit_bytes)


ALLOCATORS: dict[str, Callable[[int], Any]] = {"schedule": best_fit, "schedule_va": chunked}


def chunk_bytes(limit_bytes: int) -> int:
    """Return the paper's 40 MiB of 16 GiB in proportion."""
    return _multiple(PAPER_CHUNK_BYTES * limit_bytes / _PAPER_LIMIT)


def _multiple(nbytes: float) -> int:
    return max(1, round(nbytes / ALIGNMENT)) * ALIGNMENT


@dataclass(frozen=True)
class Fitting:
    """A plan whose requests fit, and what the allocator made of them."""

    plan: SwapPlan
    report: FragmentationReport


def largest_budget(trace: Trace, limit_bytes: int, make: Make) -> Fitting | None:
    """Return the plan of the largest budget whose requests `make`'s allocator serves.

    The search goes as one would try: from above over the ends and quarters of the way from the
    smallest feasible budget to the limit, then by bisection to 2 % of that way. Each budget leaves
    its holes elsewhere, so that the allocator may refuse some budgets in between. None where it
    serves none of the five.
    """
    above = None
    for budget in reversed(_budgets(trace, limit_bytes)):
        best = _try(trace, budget, make)
        if best is None:
            above = budget
            continue
        low, high = budget, above if above is not None else budget
        for _ in range(_STEPS if above is not None else 0):
            middle = (low + high) // 2
            fitting = _try(trace, middle, make)
            if fitting is None:
                high = middle
            else:
                low, best = middle, fitting
        return best
    return None


def _budgets(trace: Trace, limit_bytes: int) -> list[int]:
    low = trace.smallest_budget
    return [] if low > limit_bytes else [low + (limit_bytes - low) * k // 4 for k in range(5)]


def can_train(trace: Trace, limit_bytes: int, make: Make) -> bool:
    """Return whether any of the budgets that `largest_budget` starts from is served."""
    return any(_try(trace, budget, make) for budget in _budgets(trace, limit_bytes))


def tuned(
    given: Fitting,
    limit_bytes: int,
    times: NDArray[np.float64],
    rate: float,
    make: Make,
    map_s: float = 0.0,
    windows: bool = True,
) -> Fitting:
    """Return the fastest plan that is served, given one that is.

    It tries that plan, packed plans of about its budget and, with `windows`, windows of several
    shares of the budget. Of the first few plans that the allocator serves it takes the fastest,
    mapping included.

    Args:
        given: A plan and what its allocator makes of it.
        limit_bytes: No budget is above it.
        times: (n,) seconds of each function.
        rate: Bytes/s of the copies, each way.
        make: The allocator.
        map_s: Seconds that mapping or unmapping a chunk takes on the compute stream.
        windows: Whether to try windows.
    """
    trace, budget = given.plan.trace, given.plan.budget_bytes
    low = trace.smallest_budget
    plans = [given.plan]
    for part in _PACKED_PARTS[windows] if budget < trace.peak_bytes else ():
        smaller = min(limit_bytes, low + int(part * (budget - low)))
        plans += packed_plans(trace, smaller, times, rate, margins=(0.0,))
    if windows and budget < trace.peak_bytes:
        plans += [plan_swaps(trace, budget, int(k * budget)) for k in _WINDOWS]
    ordered = sorted((p.simulate(times, rate).time_s, k) for k, p in enumerate(plans))
    best, least, served = given, float("inf"), 0
    for unmapped_s, k in ordered:
        if unmapped_s >= least or served == _SERVED:
            break
        report = serve(plans[k], make)
        if report is None:
            continue
        served += 1
        taken = unmapped_s
        if map_s:
            taken = plans[k].simulate(times + map_s * mapping(plans[k], make), rate).time_s
        if taken < least:
            best, least = Fitting(plans[k], report), taken
    return best


def literal(
    trace: Trace, budget_bytes: int, times: NDArray[np.float64], rate: float, make: Make
) -> Fitting | None:
    """Return the paper's schedule to the letter, at the fastest of several windows.

    Where the allocator serves none within the budget, smaller budgets are tried.
    """
    low = trace.smallest_budget
    for part in (1.0, 0.9, 0.8, 0.6, 0.4):
        budget = low + int(part * (budget_bytes - low))
        plans = (plan_literally(trace, budget, int(share * budget)) for share in (1.5, 3.0))
        fitting = _fastest_served(plans, times, rate, make)
        if fitting is not None:
            return fitting
    return None


def mapping(plan: SwapPlan, make: Make) -> NDArray[np.int64]:
    """Return the chunks that are mapped and unmapped before each function, once it repeats."""
    allocator, n = make(), len(plan.trace.functions)
    counts = np.zeros(_ITERATIONS * n, dtype=np.int64)
    for number, (name, nbytes) in by_function(plan, _ITERATIONS):
        before = allocator.map_operations
        if nbytes is None:
            allocator.free(name)
        else:
            allocator.malloc(name, nbytes)
        counts[number] += allocator.map_operations - before
    return counts[-n:]


def lms(
    trace: Trace, limit_bytes: int, times: NDArray[np.float64], rate: float, make: Make
) -> Fitting | None:
    """Return LMS's fastest plan that is served, of pairs of distances at several budgets."""
    return _fastest_served(_lms_plans(trace, limit_bytes), times, rate, make)


def lms_can_train(trace: Trace, limit_bytes: int, make: Make) -> bool:
    """Return whether LMS's plans are served, of the pairs that hold least."""
    plans = _lms_plans(trace, limit_bytes, _LMS_THRESHOLDS[:2], _LMS_AHEADS[:1])
    return any(serve(plan, make) is not None for plan in plans)


def _lms_plans(
    trace: Trace,
    limit_bytes: int,
    thresholds: Sequence[int] = _LMS_THRESHOLDS,
    aheads: Sequence[int] = _LMS_AHEADS,
) -> Iterator[SwapPlan]:
    for share in _LMS_SHARES:
        for threshold in thresholds:
            for ahead in aheads:
                with suppress(DoesNotFit, BudgetTooSmall):
                    yield fixed_distance(trace, int(share * limit_bytes), threshold, ahead)


def _fastest_served(
    plans: Iterable[SwapPlan], times: NDArray[np.float64], rate: float, make: Make
) -> Fitting | None:
    timed = []
    for number, plan in enumerate(plans):
        timed.append((plan.simulate(times, rate).time_s, number, plan))
        if not plan.bytes_moved:
            break  # it cannot be beaten
    timed.sort()
    for _, _, plan in timed:
        report = serve(plan, make)
        if report is not None:
            return Fitting(plan, report)
    return None


def _try(trace: Trace, budget_bytes: int, make: Make) -> Fitting | None:
    plan = plan_swaps(trace, budget_bytes)
    report = serve(plan, make)
    return None if report is None else Fitting(plan, report)


def serve(plan: SwapPlan, make: Make) -> FragmentationReport | None:
    """Return what an allocator makes of a plan's requests, None where they do not fit."""
    try:
        return replay(make(), requests(plan, _ITERATIONS))
    except OutOfMemory:
        return None


def in_core(trace: Trace, make: Make) -> FragmentationReport | None:
    """Return what an allocator makes of training without swaps, None where it does not fit."""
    return serve(plan_swaps(trace, trace.peak_bytes), make)
