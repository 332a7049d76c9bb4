"""What streaming a mini-batch would need and take, from the measured models of memory and time."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from repro import plots
from repro.experiments.explorer import Control, Explorer
from repro.experiments.mbs.cells import MIB, WITH, WITHOUT, styles, whose
from repro.experiments.query import Results
from repro.experiments.view import device_name
from repro.measure import LinearMemoryModel
from repro.records import Record

SIZES = tuple(2**k for k in range(11))  # mini-batches that the explorer offers
LEAST_SHARE = 0.1  # of the limit, the smallest that the explorer offers


class StreamingPlan(NamedTuple):
    """A mini-batch undivided, and in `number` micro-batches of at most `size`; MiB, ms per sample.

    The time of what does not fit is NaN. Where not even one sample fits, `size` and `number` are 0
    and `streamed_mib` is a sample's.
    """

    size: int
    number: int
    undivided_mib: float
    streamed_mib: float
    undivided_ms: float
    streamed_ms: float


def plan_streaming(record: Record, limit_mib: float, mini_batch: int) -> StreamingPlan:
    """Plan a mini-batch by a ``size`` record: M(B) = p + B a and t(B) = c + B d."""
    memory = LinearMemoryModel(record.metrics["fixed_bytes"], record.metrics["bytes_per_sample"])
    sizes = [int(size) for size in record.timings]
    medians = [float(np.median(timing["samples_s"])) for timing in record.timings.values()]
    per_sample_s, per_step_s = (max(0.0, float(value)) for value in np.polyfit(sizes, medians, 1))
    micro = min(mini_batch, memory.largest_batch(limit_mib * MIB))
    count = math.ceil(mini_batch / micro) if micro else 0
    each_ms = max(1e3 * (per_step_s * count / mini_batch + per_sample_s), 1e-6)
    return StreamingPlan(
        micro,
        count,
        undivided_mib=memory.predict(mini_batch) / MIB,
        streamed_mib=memory.predict(max(1, micro)) / MIB,
        undivided_ms=each_ms if count == 1 else math.nan,
        streamed_ms=each_ms if count else math.nan,
    )


def explorers(results: Callable[[str], Results]) -> list[Explorer]:
    """Return the widget, by a function from an artefact's name to its records."""
    records = {record.config["role"]: record for record in results("table2").ok("size")}
    if not records:
        return []

    def computed(role: str, percent: int, mini_batch: int) -> tuple[str, Figure]:
        limit_mib = percent / 100 * default_limit_mib(records[role])
        figure = draw_plan(records[role], limit_mib, mini_batch)
        return f"limit {limit_mib:,.0f} MiB: {figure.get_suptitle()}", figure

    first = next(iter(records))
    sizes = {f"{size:,}": size for size in SIZES}
    shares = {f"{percent} %": percent for percent in range(10, 401, 10)}
    controls = {
        "role": Control("in place of", {name: name for name in records}, first, 4, listed=True),
        "percent": Control("memory limit, of Table 2's", shares, "100 %", 4),
        "mini_batch": Control("mini-batch size", sizes, "64", 3),
    }
    return [Explorer("mbs", controls, computed)]


def default_limit_mib(record: Record) -> float:
    """Return the limit that a ``size`` record was measured under, else its device's memory."""
    return float(record.metrics["limit_bytes"] or record.device["memory_bytes"]) / MIB


def draw_plan(record: Record, limit_mib: float, mini_batch: int) -> Figure:
    """Draw memory and time against the mini-batch, and the plan of one of them.

    The axes are the record's alone, so that moving the limit or the mini-batch moves the lines.
    """
    sizes = sorted({*SIZES, mini_batch})
    plans = [plan_streaming(record, limit_mib, size) for size in sizes]
    memory = {WITHOUT: [p.undivided_mib for p in plans], WITH: [p.streamed_mib for p in plans]}
    times = {WITHOUT: [p.undivided_ms for p in plans], WITH: [p.streamed_ms for p in plans]}
    least = min(memory[WITHOUT][0], LEAST_SHARE * default_limit_mib(record))
    unlimited = 2 * memory[WITHOUT][-1]
    slowest, fastest = (
        plan_streaming(record, unlimited, size).undivided_ms for size in (sizes[0], sizes[-1])
    )
    extent = ((0.8 * least, 1.3 * memory[WITHOUT][-1]), (0.8 * fastest, 1.3 * slowest))
    chosen = plans[sizes.index(mini_batch)]
    summary = f"in {chosen.number} micro-batches of at most {chosen.size}"
    if chosen.number < 2:
        summary = "which fit undivided" if chosen.number else "of which not one fits"
    title = f"{whose(record.config['role'], [record])}, modelled: {mini_batch} samples, {summary}"
    figure = plots.streaming_plan(
        sizes, memory, times, limit_mib, mini_batch, styles(), extent, title
    )
    plots.sign(figure, f"Modelled from measurements on {device_name(record)}; SIMULATED limit.")
    return figure
