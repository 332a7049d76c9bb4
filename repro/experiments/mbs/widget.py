"""What streaming a mini-batch would need and take, from the measured models of memory and time."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
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


def plan_streaming(record: Record, limit_mib: float, mini_batches: Sequence[int]) -> pd.DataFrame:
    """Plan mini-batches by a ``size`` record: M(B) = p + B a and t(B) = c + B d.

    Returns:
        For each mini-batch, undivided and in `number` micro-batches of at most `size`, MiB and
        milliseconds a sample. The time of what does not fit is NaN. Where not even one sample fits,
        `size` and `number` are 0 and `streamed_mib` is a sample's.
    """
    memory = LinearMemoryModel(record.metrics["fixed_bytes"], record.metrics["bytes_per_sample"])
    sizes = [int(size) for size in record.timings]
    medians = [float(np.median(timing["samples_s"])) for timing in record.timings.values()]
    per_sample_s, per_step_s = np.maximum(0.0, np.polyfit(sizes, medians, 1))
    plan = pd.DataFrame(index=list(mini_batches))
    plan["size"] = np.minimum(plan.index, memory.largest_batch(limit_mib * MIB))
    plan["number"] = -(-plan.index // plan["size"].clip(1)) * (plan["size"] > 0)
    plan["undivided_mib"] = [memory.predict(size) / MIB for size in plan.index]
    plan["streamed_mib"] = [memory.predict(size) / MIB for size in plan["size"].clip(1)]
    each_ms = 1e3 * (per_step_s * plan["number"] / plan.index + per_sample_s)
    plan["streamed_ms"] = each_ms.clip(1e-6).where(plan["number"] > 0)
    plan["undivided_ms"] = plan["streamed_ms"].where(plan["number"] == 1)
    return plan


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
    plans = plan_streaming(record, limit_mib, sizes)
    memory = {WITHOUT: list(plans["undivided_mib"]), WITH: list(plans["streamed_mib"])}
    times = {WITHOUT: list(plans["undivided_ms"]), WITH: list(plans["streamed_ms"])}
    least = min(memory[WITHOUT][0], LEAST_SHARE * default_limit_mib(record))
    most = memory[WITHOUT][-1]
    unlimited = plan_streaming(record, 2 * most, sizes)["undivided_ms"]
    extent = (0.8 * least, 1.3 * most), (0.8 * unlimited.iloc[-1], 1.3 * unlimited.iloc[0])
    number, size = plans.loc[mini_batch, ["number", "size"]].astype(int)
    summary = f"in {number} micro-batches of at most {size}"
    if number < 2:
        summary = "which fit undivided" if number else "of which not one fits"
    title = f"{whose(record.config['role'], [record])}, modelled: {mini_batch} samples, {summary}"
    figure = plots.streaming_plan(
        sizes, memory, times, limit_mib, mini_batch, styles(), extent, title
    )
    plots.sign(figure, f"Modelled from measurements on {device_name(record)}; SIMULATED limit.")
    return figure
