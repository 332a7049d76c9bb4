"""The experiments: iterations measured under a limit, or simulated on a published GPU."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repro.datasets import ImageData
from repro.experiments.design import Outcome
from repro.experiments.outofcore.child import measure_in_child
from repro.experiments.outofcore.fitting import (
    ALLOCATORS,
    Fitting,
    Make,
    best_fit,
    can_train,
    in_core,
    largest_budget,
    literal,
    lms,
    lms_can_train,
    mapping,
    tuned,
)
from repro.experiments.outofcore.measuring import _described, is_cuda, measure
from repro.experiments.outofcore.modelled import Rates, limit_bytes, trace_at
from repro.measure import largest_batch
from repro.outofcore import Trace, bound

Config = Mapping[str, Any]


def simulated(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Schedule a recorded iteration at a published GPU's memory and rates; nothing is computed."""
    limit, batch = limit_bytes(config), config["batch"]
    trace = trace_at(config, batch)
    times, rate = modelled_times(config, trace), float(config["bandwidth"])
    metrics: dict[str, Any] = {
        "limit_bytes": limit,
        "peak_bytes": trace.peak_bytes,
        "smallest_budget": trace.smallest_budget,
        "functions": len(trace.functions),
        "rows": {},
    }
    if trace.smallest_budget <= limit:
        metrics["bound_s"] = bound(trace, limit, times, rate)
    whole = in_core(trace, partial(best_fit, limit))
    if whole is not None:
        metrics["rows"]["in_core"] = {
            "time_s": float(times.sum()),
            "reserved_bytes": whole.peak_reserved_bytes,
        }
    for name, allocator in ALLOCATORS.items():
        make: Make = partial(allocator, limit)
        fitting = largest_budget(trace, limit, make)
        if fitting is None:
            continue
        mapped_s = config["map_s"] if name == "schedule_va" else 0.0
        best = tuned(fitting, limit, times, rate, make, mapped_s, config["tune"])
        metrics["rows"][name] = modelled_row(best, times, rate, make, mapped_s)
        if config["tune"]:
            paper = literal(trace, fitting.plan.budget_bytes, times, rate, make)
            if paper is not None:
                row = modelled_row(paper, times, rate, make, mapped_s)
                metrics["rows"][name.replace("schedule", "paper")] = row
    if config["lms"]:
        make = partial(best_fit, limit)
        theirs = lms(trace, limit, times, rate, make)
        if theirs is not None:
            metrics["rows"]["lms"] = modelled_row(theirs, times, rate, make, 0.0)
    return Outcome(metrics)


def modelled_times(config: Config, trace: Trace) -> NDArray[np.float64]:
    """Return the seconds of a trace's functions on the published GPU."""
    base = config["baseline"]
    return Rates.fit(base, base["batches"], base["images_per_s"]).times(trace)


def modelled_row(
    fitting: Fitting, times: NDArray[np.float64], rate: float, make: Make, map_s: float
) -> dict[str, Any]:
    """Return what a plan takes; each chunk that is mapped or unmapped, on the compute stream."""
    alone = fitting.plan.simulate(times, rate)
    mapped = mapping(fitting.plan, make) if map_s else np.zeros(len(times), dtype=np.int64)
    taken = fitting.plan.simulate(times + map_s * mapped, rate) if map_s else alone
    return _described(fitting.plan) | {
        "host_bytes": fitting.plan.host_bytes,
        "scheduler": fitting.plan.scheduler,
        "time_s": taken.time_s,
        "unmapped_s": alone.time_s,
        "stall_s": alone.stall_s,
        "held_bytes": alone.peak_bytes,
        "reserved_bytes": fitting.report.peak_reserved_bytes,
        "internal_bytes": fitting.report.peak_internal_fragmentation_bytes,
        "map_operations": int(mapped.sum()),
    }


def reach(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Look for the largest batch sizes whose traces the allocators serve within a limit."""
    limit = limit_bytes(config)

    def alone(batch: int) -> bool:
        return in_core(trace_at(config, batch), partial(best_fit, limit)) is not None

    metrics: dict[str, Any] = {"limit_bytes": limit, "in_core": largest_batch(alone)}
    known = metrics["in_core"]
    for name, allocator in ALLOCATORS.items():
        make: Make = partial(allocator, limit)

        def swapped(batch: int, make: Make = make) -> bool:
            return can_train(trace_at(config, batch), limit, make)

        known = metrics[name] = largest_batch(swapped, known)
    if config["lms"]:
        make = partial(best_fit, limit)
        metrics["lms"] = largest_batch(
            lambda batch: lms_can_train(trace_at(config, batch), limit, make), metrics["in_core"]
        )
    return Outcome(metrics)


def measured(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Train a few iterations within a limit, in turns with the reference that fits in core.

    On CUDA in a process of its own, since torch's allocator is chosen before CUDA is used.
    """
    if not is_cuda(device):
        return measure(config, device)
    return measure_in_child(config, device)
