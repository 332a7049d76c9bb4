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
from repro.outofcore.plan import by_function, requests
from repro.outofcore.pooled import ALIGNMENT, PooledChunkedAllocator

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


@dataclass(frozen=True)
class Costs:
    """What an iteration takes on a device.

    Attributes:
        times: (n,) seconds of each function.
        rate: Bytes/s of the copies, each way.
        map_s: Seconds that mapping or unmapping a chunk takes on the compute stream.
    """

    times: NDArray[np.float64]
    rate: float
    map_s: float = 0.0

    def ascending(self, plans: Iterable[SwapPlan]) -> list[tuple[float, SwapPlan]]:
        """Plans with the seconds that they take without mapping, the fastest first."""
        timed = [(plan.simulate(self.times, self.rate).time_s, plan) for plan in plans]
        return sorted(timed, key=lambda pair: pair[0])


def best_fit(limit_bytes: int) -> BestFitAllocator:
    """Torch's allocator; its sizes in proportion where the limit is not the paper's."""
    if limit_bytes == _PAPER_LIMIT:
        return BestFitAllocator(limit_bytes)
    sizes = (_multiple(mib * MIB * limit_bytes / _PAPER_LIMIT) for mib in (1, 2, 10, 2, 20))
    return BestFitAllocator(limit_bytes, ALIGNMENT, *sizes)


def chunked(limit_bytes: int, chunk: int | None = None) -> PooledChunkedAllocator:
    """The chunked allocator; its chunks in proportion where the limit is not the paper's."""
    return PooledChunkedAllocator(chunk or chunk_bytes(limit_bytes), limit_bytes)


ALLOCATORS: dict[str, Callable[[int], Any]] = {"schedule": best_fit, "schedule_va": chunked}


def chunk_bytes(limit_bytes: int) -> int:
    """The paper's 40 MiB of 16 GiB in proportion."""
    return _multiple(PAPER_CHUNK_BYTES * limit_bytes / _PAPER_LIMIT)


def _multiple(nbytes: float) -> int:
    return max(1, round(nbytes / ALIGNMENT)) * ALIGNMENT


@dataclass(frozen=True)
class Fitting:
    """A plan whose requests fit, and what the allocator made of them."""

    plan: SwapPlan
    report: FragmentationReport


def largest_budget(trace: Trace, limit_bytes: int, make: Make) -> Fitting | None:
    """The plan of the largest budget whose requests `make`'s allocator serves.

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
    """Whether any of the budgets that `largest_budget` starts from is served."""
    return any(_try(trace, budget, make) for budget in _budgets(trace, limit_bytes))


def tuned(
    given: Fitting, limit_bytes: int, costs: Costs, make: Make, windows: bool = True
) -> Fitting:
    """The fastest plan that is served, given one that is.

    It tries that plan, packed plans of about its budget and, with `windows`, windows of several
    shares of the budget. Of the first few plans that the allocator serves it takes the fastest,
    mapping included.
    """
    trace, budget = given.plan.trace, given.plan.budget_bytes
    low = trace.smallest_budget
    plans = [given.plan]
    for part in _PACKED_PARTS[windows] if budget < trace.peak_bytes else ():
        smaller = min(limit_bytes, low + int(part * (budget - low)))
        plans += packed_plans(trace, smaller, costs.times, costs.rate, margins=(0.0,))
    if windows and budget < trace.peak_bytes:
        plans += [plan_swaps(trace, budget, int(k * budget)) for k in _WINDOWS]
    best, least, served = given, float("inf"), 0
    for unmapped_s, plan in costs.ascending(plans):
        if unmapped_s >= least or served == _SERVED:
            break
        report = serve(plan, make)
        if report is None:
            continue
        served += 1
        taken = unmapped_s
        if costs.map_s:
            slower = costs.times + costs.map_s * mapping(plan, make)
            taken = plan.simulate(slower, costs.rate).time_s
        if taken < least:
            best, least = Fitting(plan, report), taken
    return best


def literal(trace: Trace, budget_bytes: int, costs: Costs, make: Make) -> Fitting | None:
    """The paper's schedule to the letter, at the fastest of several windows.

    Where the allocator serves none within the budget, smaller budgets are tried.
    """
    low = trace.smallest_budget
    for part in (1.0, 0.9, 0.8, 0.6, 0.4):
        budget = low + int(part * (budget_bytes - low))
        plans = (plan_literally(trace, budget, int(share * budget)) for share in (1.5, 3.0))
        fitting = _fastest_served(plans, costs, make)
        if fitting is not None:
            return fitting
    return None


def mapping(plan: SwapPlan, make: Make) -> NDArray[np.int64]:
    """The chunks that are mapped and unmapped before each function, once it repeats."""
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


def lms(trace: Trace, limit_bytes: int, costs: Costs, make: Make) -> Fitting | None:
    """LMS's fastest plan that is served, of pairs of distances at several budgets."""
    return _fastest_served(_lms_plans(trace, limit_bytes), costs, make)


def lms_can_train(trace: Trace, limit_bytes: int, make: Make) -> bool:
    """Whether LMS's plans are served, of the pairs that hold least."""
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


def _fastest_served(plans: Iterable[SwapPlan], costs: Costs, make: Make) -> Fitting | None:
    tried = []
    for plan in plans:
        tried.append(plan)
        if not plan.bytes_moved:
            break  # it cannot be beaten
    for _, plan in costs.ascending(tried):
        report = serve(plan, make)
        if report is not None:
            return Fitting(plan, report)
    return None


def _try(trace: Trace, budget_bytes: int, make: Make) -> Fitting | None:
    plan = plan_swaps(trace, budget_bytes)
    report = serve(plan, make)
    return None if report is None else Fitting(plan, report)


def serve(plan: SwapPlan, make: Make) -> FragmentationReport | None:
    """What an allocator makes of a plan's requests, None where they do not fit."""
    try:
        return replay(make(), requests(plan, _ITERATIONS))
    except OutOfMemory:
        return None


def in_core(trace: Trace, make: Make) -> FragmentationReport | None:
    """What an allocator makes of training without swaps, None where it does not fit."""
    return serve(plan_swaps(trace, trace.peak_bytes), make)
