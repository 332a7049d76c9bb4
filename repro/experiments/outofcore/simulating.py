"""Simulations of a published GPU, from the traces of iterations; nothing is computed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from repro.experiments.design import Config, Outcome
from repro.experiments.outofcore import fitting
from repro.experiments.outofcore.building import limit_bytes, published_times, trace_at
from repro.experiments.outofcore.fitting import ALLOCATORS, Costs, Fitting, Make, fit
from repro.measure import largest_batch
from repro.outofcore import Trace, bound, plan_packed, plan_swaps
from repro.outofcore.allocator import MIB, BestFitAllocator, replay
from repro.outofcore.native import ChunkedMemory
from repro.outofcore.plan import requests

_PARTS = (*(1 - k / 100 for k in range(11)), 0.85, 0.8, 0.7, 0.6, 0.5)  # of the limit, as budgets


def _setting(config: Config) -> tuple[int, Trace, Costs]:
    """The memory limit in bytes, the trace, and the costs of its functions and copies."""
    trace = trace_at(config, config["batch"])
    times = published_times(trace, config["baseline"])
    rate = float(config.get("bandwidth", 0.0))  # of the analysis of the link there are several
    return limit_bytes(config), trace, Costs(times, rate, config.get("map_s", 0.0))


def simulated(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Schedule a recorded iteration at a published GPU's memory and rates."""
    limit, trace, costs = _setting(config)
    free = replace(costs, map_s=0.0)
    rows: dict[str, Any] = {}
    metrics: dict[str, Any] = {
        "limit_bytes": limit,
        "peak_bytes": trace.peak_bytes,
        "smallest_budget": trace.smallest_budget,
        "functions": len(trace.functions),
        "rows": rows,
    }
    if trace.smallest_budget <= limit:
        metrics["bound_s"] = bound(trace, limit, costs.times, costs.rate)
    torchs: Make = partial(fitting.best_fit, limit)
    if whole := fitting.in_core(trace, torchs):
        taken_s, reserved = float(costs.times.sum()), whole.peaks["reserved_bytes"]
        rows["in_core"] = {"time_s": taken_s, "reserved_bytes": reserved}
    for name, allocator in ALLOCATORS.items():
        make: Make = partial(allocator, limit)
        if not (best := fitting.largest_budget(trace, limit, make)):
            continue
        taken = costs if name == "schedule_va" else free
        rows[name] = modelled_row(fitting.tuned(best, limit, taken, config["tune"]), taken)
        if config["tune"] and (
            paper := fitting.literal(trace, best.plan.budget_bytes, taken, make)
        ):
            rows[name.replace("schedule", "paper")] = modelled_row(paper, taken)
    if config["lms"] and (theirs := free.fastest_unmapped(fitting.lms(trace, limit), torchs)):
        rows["lms"] = modelled_row(theirs, free)
    return Outcome(metrics)


def modelled_row(served: Fitting, costs: Costs) -> dict[str, Any]:
    """A plan's iteration; each chunk is mapped or unmapped on the compute stream."""
    plan = served.plan
    alone = taken = costs.simulate(plan)
    mapped = 0
    if costs.map_s:
        by_function = served.mapping()
        mapped, taken = int(by_function.sum()), costs.simulate(plan, by_function)
    planned = ("budget_bytes", "window_bytes", "bytes_moved", "host_bytes", "scheduler")
    return {name: getattr(plan, name) for name in planned} | {
        "time_s": taken.time_s,
        "unmapped_s": alone.time_s,
        "stall_s": alone.stall_s,
        "held_bytes": alone.peak_bytes,
        "reserved_bytes": served.peaks["reserved_bytes"],
        "internal_bytes": served.peaks["internal_fragmentation_bytes"],
        "map_operations": mapped,
    }


def reach(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Look for the largest batch sizes whose traces the allocators serve within a limit."""
    limit = limit_bytes(config)
    torchs: Make = partial(fitting.best_fit, limit)

    def largest(trains: Callable[[Trace], object], known: int = 0) -> int:
        return largest_batch(lambda batch: bool(trains(trace_at(config, batch))), known)

    known = largest(lambda trace: fitting.in_core(trace, torchs))
    metrics: dict[str, Any] = {"limit_bytes": limit, "in_core": known}
    if config["lms"]:
        plans = partial(fitting.lms, limit_bytes=limit, thrifty=True)
        metrics["lms"] = largest(lambda t: any(fit(plan, torchs) for plan in plans(t)), known)
    for name, allocator in ALLOCATORS.items():
        make = partial(allocator, limit)
        known = largest(partial(fitting.can_train, limit_bytes=limit, make=make), known)
        metrics[name] = known
    return Outcome(metrics)


def link(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Simulate an iteration at several rates of the link, with all its bytes and with fewer."""
    limit, trace, costs = _setting(config)
    rows: list[dict[str, Any]] = []
    for share in config["shares"]:
        sizes = {name: int(share * nbytes) for name, nbytes in trace.sizes.items()}
        smaller = replace(trace, sizes=sizes)
        for rate in config["rates"]:
            plan = plan_packed(smaller, limit, costs.times, rate, margins=(0.0,))
            row = {"share": share, "rate": rate, "bytes_moved": plan.bytes_moved}
            row["time_s"] = plan.simulate(costs.times, rate).time_s
            rows.append(row | {"bound_s": bound(smaller, limit, costs.times, rate)})
    return Outcome({"limit_bytes": limit, "compute_s": float(costs.times.sum()), "rows": rows})


def chunk_sizes(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Simulate an iteration with chunks of several sizes, each mapped and unmapped at a cost."""
    limit, trace, costs = _setting(config)
    rows: dict[str, Any] = {}
    for mib in config["chunks_mib"]:
        make: Make = partial(fitting.chunked, limit, int(mib * MIB))
        if best := fitting.largest_budget(trace, limit, make):
            rows[str(mib)] = modelled_row(fitting.tuned(best, limit, costs, windows=False), costs)
    return Outcome({"limit_bytes": limit, "rows": rows})


def packed(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Simulate packed plans with chunks of the paper's size, and with the fastest of larger ones.

    ``time_by_bytes_s``: if mapping takes as long by the byte as with the paper's chunks.
    """
    limit, trace, costs = _setting(config)
    paper, least = (int(config[key] * MIB) for key in ("chunk_mib", "least_chunk_mib"))
    # More than the peak is no other budget.
    budgets = dict.fromkeys(min(int(part * limit), trace.peak_bytes) for part in _PARTS)
    plans = [
        plan_packed(trace, budget, costs.times, costs.rate)
        for budget in budgets
        if budget >= trace.smallest_budget
    ]
    # Rounded up to the device's least chunk, of which all are multiples; the largest first.
    sizes = {-(-size // least) * least for size in trace.sizes.values()}
    most = config["largest_chunk"] * paper
    larger = sorted((size for size in sizes if paper < size <= most), reverse=True)
    rows: dict[str, Any] = {}
    for name, chunks in {"packed_va": [paper], "packed_fitted": [*larger, paper]}.items():
        makes: dict[Make, int] = {partial(fitting.chunked, limit, chunk): chunk for chunk in chunks}
        if best := costs.fastest(plans, makes):
            chunk = makes[best.make]
            slow = modelled_row(best, replace(costs, map_s=costs.map_s * chunk / paper))
            more = {"chunk_bytes": chunk, "time_by_bytes_s": slow["time_s"]}
            rows[name] = modelled_row(best, costs) | more
    return Outcome({"limit_bytes": limit, "peak_bytes": trace.peak_bytes, "rows": rows})


def physical(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Serve an iteration's requests without a limit, and count the memory that this takes.

    Torch's allocator is simulated; chunks are mapped in this machine's memory, and not written.
    """
    trace, chunk = trace_at(config, config["batch"]), int(config["chunk_mib"] * MIB)
    rows: dict[str, Any] = {}
    for mode, budget in (("in_core", trace.peak_bytes), ("schedule", limit_bytes(config))):
        if budget < trace.smallest_budget:
            continue
        events = requests(plan_swaps(trace, budget), fitting.ITERATIONS)
        torchs = replay(BestFitAllocator(), events).peaks
        addresses: dict[Any, int] = {}
        with ChunkedMemory("posix", chunk, small_bytes=chunk // 2) as memory:
            for name, nbytes in events:
                if nbytes is None:
                    memory.free(addresses.pop(name))
                else:
                    addresses[name] = memory.malloc(nbytes)
            rows[mode] = {
                "used_bytes": torchs["requested_bytes"],
                "torch_bytes": torchs["reserved_bytes"],
                "chunks_bytes": memory.counters().peak_reserved_bytes,
            }
    return Outcome({"peak_bytes": trace.peak_bytes, "rows": rows})
