"""The largest budget for a schedule whose requests an allocator can serve within a limit."""

from collections.abc import Callable
from dataclasses import dataclass

from repro.outofcore import SwapPlan, Trace, plan_swaps
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

GIB = 2**30
_PAPER_LIMIT = 16 * GIB
_STEPS = 4  # of bisection, within a quarter of the way
_ITERATIONS = 3  # whose requests are replayed; fragmentation settles in the first
Make = Callable[[], BestFitAllocator | ChunkedAllocator]


def best_fit(limit_bytes: int) -> BestFitAllocator:
    """Return torch's allocator; its sizes in proportion where the limit is not the paper's."""

    def scaled(nbytes: int) -> int:
        return _multiple(nbytes * limit_bytes / _PAPER_LIMIT)

    if limit_bytes == _PAPER_LIMIT:
        return BestFitAllocator(limit_bytes)
    return BestFitAllocator(
        limit_bytes, ALIGNMENT, scaled(MIB), scaled(2 * MIB), scaled(10 * MIB), scaled(2 * MIB),
        scaled(20 * MIB),
    )  # fmt: skip


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


def largest_batch(fits: Callable[[int], bool], known: int = 0) -> int:
    """Return the largest batch size that fits, to 3 %: by doubling, then by bisection.

    Args:
        fits: Whether one does.
        known: One that does, to start from; 0 for none.
    """
    low, high = known, max(1, 2 * known)
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def can_train(trace: Trace, limit_bytes: int, make: Make) -> bool:
    """Return whether any of the budgets that `largest_budget` starts from is served."""
    return any(_try(trace, budget, make) for budget in _budgets(trace, limit_bytes))


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
