"""The largest budget for a schedule whose requests an allocator can serve within a limit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from repro.outofcore import (
    BudgetTooSmall,
    DoesNotFit,
    SwapPlan,
    Trace,
    fixed_distance,
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
from repro.outofcore.pooled import ALIGNMENT, PooledChunkedAllocator
from repro.outofcore.requests import requests
from repro.outofcore.schedule import WINDOW_SHARES

GIB = 2**30
_PAPER_LIMIT = 16 * GIB
_STEPS = 4  # of bisection, within a quarter of the way
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


def chunked(limit_bytes: int) -> PooledChunkedAllocator:
    """Return the chunked allocator; its chunks in proportion where the limit is not the paper's."""
    return PooledChunkedAllocator(chunk_bytes(limit_bytes), limit_bytes)


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

    Looked for at the ends and quarters of the way from the smallest feasible budget to the limit,
    from above, and then by bisection to 2 % of the way; as one would by trying. Holes lie otherwise
    for every budget, so that some in between may be refused. None where none of the five is served.
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
            found = _try(trace, middle, make)
            if found is None:
                high = middle
            else:
                low, best = middle, found
        return best
    return None


def _budgets(trace: Trace, limit_bytes: int) -> list[int]:
    low = trace.smallest_budget
    return [] if low > limit_bytes else [low + (limit_bytes - low) * k // 4 for k in range(5)]


def can_train(trace: Trace, limit_bytes: int, make: Make) -> bool:
    """Return whether any of the budgets that `largest_budget` starts from is served."""
    return any(_try(trace, budget, make) for budget in _budgets(trace, limit_bytes))


def tuned(
    trace: Trace, budget_bytes: int, times: NDArray[np.float64], rate: float, make: Make
) -> Fitting | None:
    """Return the fastest plan that is served, of windows of several shares of the budget in bytes.

    Like the paper's, which has one window in bytes as its only parameter.
    """
    shares = (*WINDOW_SHARES, 2.0, 3.0)
    plans = (plan_swaps(trace, budget_bytes, int(share * budget_bytes)) for share in shares)
    return _fastest_served(plans, times, rate, make)


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
    timed = sorted(
        ((plan.simulate(times, rate).time_s, number, plan) for number, plan in enumerate(plans)),
    )
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
