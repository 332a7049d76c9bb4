"""The experiment that simulates packed plans with chunks, of the paper's size and fitted ones."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repro.datasets import ImageData
from repro.experiments.design import Outcome
from repro.experiments.outofcore.experiments import (
    Config,
    modelled_row,
    modelled_times,
)
from repro.experiments.outofcore.fitting import MIB, Fitting, Make, chunked, mapping, serve
from repro.experiments.outofcore.modelled import limit_bytes, trace_at
from repro.outofcore import SwapPlan, Trace, plan_packed

_PARTS = (*(1 - k / 100 for k in range(11)), 0.85, 0.8, 0.7, 0.6, 0.5)  # of the limit, as budgets


def packed(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Simulate packed plans with chunks on a published GPU; nothing is computed.

    "packed_va" has chunks of the paper's size. "packed_fitted" has the fastest of sizes that
    variables have, from the paper's up to `largest_chunk` times it: such chunks lose nothing inside
    most variables, and fewer of them are mapped. What it takes if mapping takes as long by the byte
    as with the paper's chunks stands beside each.
    """
    limit, trace = limit_bytes(config), trace_at(config, config["batch"])
    times, rate = modelled_times(config, trace), float(config["bandwidth"])
    published, least = (int(config[key] * MIB) for key in ("chunk_mib", "least_chunk_mib"))
    map_s = config["map_s"]
    # More than the peak is no other budget.
    budgets = dict.fromkeys(min(int(part * limit), trace.peak_bytes) for part in _PARTS)
    plans = [
        plan_packed(trace, budget, times, rate)
        for budget in budgets
        if budget >= trace.smallest_budget
    ]
    timed = sorted(((p.simulate(times, rate).time_s, k) for k, p in enumerate(plans)))
    ordered = [(plans[k], time_s) for time_s, k in timed]
    sizes = fitted_chunks(trace, published, config["largest_chunk"] * published, least)
    rows: dict[str, Any] = {}
    for name, chunks in {"packed_va": [published], "packed_fitted": [*sizes, published]}.items():
        fastest = _fastest(ordered, chunks, limit, times, rate, map_s)
        if fastest is None:
            continue
        best, chunk = fastest
        make: Make = partial(chunked, limit, chunk)
        by_bytes = modelled_row(best, times, rate, make, map_s * chunk / published)
        rows[name] = modelled_row(best, times, rate, make, map_s)
        rows[name] |= {"chunk_bytes": chunk, "time_by_bytes_s": by_bytes["time_s"]}
    return Outcome({"limit_bytes": limit, "peak_bytes": trace.peak_bytes, "rows": rows})


def fitted_chunks(trace: Trace, above: int, most: int, multiple: int) -> list[int]:
    """Return the sizes that variables have, rounded up to multiples, the largest first.

    Args:
        trace: The iteration.
        above: All are larger than it, in bytes.
        most: None is larger.
        multiple: The device's least chunk, of which all are multiples.
    """
    sizes = {-(-size // multiple) * multiple for size in trace.sizes.values()}
    return sorted((size for size in sizes if above < size <= most), reverse=True)


def _fastest(
    ordered: Sequence[tuple[SwapPlan, float]],
    chunks: Sequence[int],
    limit: int,
    times: NDArray[np.float64],
    rate: float,
    map_s: float,
) -> tuple[Fitting, int] | None:
    """Return the plan that takes least with its mapping, and its chunk; None where none is served.

    Args:
        ordered: Plans with what they take without mapping, ascending.
        chunks: Sizes to try, in bytes.
        limit: What the allocator may take.
        times: (n,) seconds of each function.
        rate: Bytes/s of the copies, each way.
        map_s: Seconds that mapping or unmapping a chunk takes on the compute stream.
    """
    best, least = None, float("inf")
    for chunk in chunks:
        make: Make = partial(chunked, limit, chunk)
        for plan, unmapped_s in ordered:
            if unmapped_s >= least:
                break
            report = serve(plan, make)
            if report is None:
                continue
            taken = plan.simulate(times + map_s * mapping(plan, make), rate).time_s
            if taken < least:
                best, least = (Fitting(plan, report), chunk), taken
    return best
