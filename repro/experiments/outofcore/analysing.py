"""The experiments that vary what the paper held fixed: the link, the bytes, the size of a chunk."""

from dataclasses import replace
from functools import partial
from typing import Any

from repro.datasets import ImageData
from repro.experiments.design import Outcome
from repro.experiments.outofcore.experiments import (
    Config,
    modelled_row,
    modelled_times,
)
from repro.experiments.outofcore.fitting import MIB, Make, chunked, largest_budget, tuned
from repro.experiments.outofcore.modelled import limit_bytes, trace_at
from repro.outofcore import bound, plan_packed


def link(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Simulate an iteration at several rates of the link, with all its bytes and with fewer.

    All of the memory is the budget, as if no allocator lost any of it. Times stay the same.
    """
    limit, trace = limit_bytes(config), trace_at(config, config["batch"])
    times = modelled_times(config, trace)
    rows: list[dict[str, Any]] = []
    for share in config["shares"]:
        sizes = {name: int(share * nbytes) for name, nbytes in trace.sizes.items()}
        smaller = replace(trace, sizes=sizes)
        for rate in config["rates"]:
            plan = plan_packed(smaller, limit, times, rate, margins=(0.0,))
            row = {"share": share, "rate": rate, "bytes_moved": plan.bytes_moved}
            row["time_s"] = plan.simulate(times, rate).time_s
            rows.append(row | {"bound_s": bound(smaller, limit, times, rate)})
    return Outcome({"limit_bytes": limit, "compute_s": float(times.sum()), "rows": rows})


def chunk_sizes(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Simulate an iteration with chunks of several sizes, each mapped and unmapped at a cost."""
    limit, trace = limit_bytes(config), trace_at(config, config["batch"])
    times, rate = modelled_times(config, trace), float(config["bandwidth"])
    rows: dict[str, Any] = {}
    for mib in config["chunks_mib"]:
        make: Make = partial(chunked, limit, int(mib * MIB))
        fitting = largest_budget(trace, limit, make)
        if fitting is not None:
            best = tuned(fitting, limit, times, rate, make, config["map_s"], windows=False)
            rows[str(mib)] = modelled_row(best, times, rate, make, config["map_s"])
    return Outcome({"limit_bytes": limit, "rows": rows})
