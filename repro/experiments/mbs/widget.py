"""What streaming a mini-batch would need and take, from the measured models of memory and time."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from repro import plots
from repro.experiments.explorer import Control, Explorer
from repro.experiments.mbs.cells import whose
from repro.experiments.query import Results, device_name
from repro.measure import LinearMemoryModel
from repro.records import Record

MIB = 2**20
SIZES = tuple(2**k for k in range(11))  # mini-batches that the explorer offers


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
    shares = {f"{percent} %": percent for percent in range(10, 401, 10)}
    sizes = {f"{size:,}": size for size in SIZES}
    controls = {
        "record": Control("in place of", records, next(iter(records)), 4, listed=True),
        "percent": Control("memory limit, of Table 2's", shares, "100 %", 4),
        "mini_batch": Control("mini-batch size", sizes, "64", 3),
    }
    return [Explorer("mbs", controls, draw_plan)]


def draw_plan(record: Record, percent: int, mini_batch: int) -> tuple[str, Figure]:
    """Draw memory and time against the mini-batch, on the same axes whatever is chosen."""
    whole_mib = (record.metrics["limit_bytes"] or record.device["memory_bytes"]) / MIB
    limit_mib = percent / 100 * whole_mib
    plan = plan_streaming(record, limit_mib, SIZES)
    smallest, *_, largest = plan["undivided_mib"]
    unlimited = plan_streaming(record, 2 * largest, SIZES)["undivided_ms"]
    least = 0.8 * min(smallest, whole_mib / 10)  # the smallest limit
    extent = (least, 1.3 * largest), (0.8 * unlimited.iloc[-1], 1.3 * unlimited.iloc[0])
    number, size = plan.loc[mini_batch, ["number", "size"]].astype(int)
    said = f"in {number} micro-batches of at most {size}" if number else "not one sample fits"
    title = f"{whose(record.config['role'], [record])}, modelled: {mini_batch} samples, {said}"
    ways = {"without MBS": ("undivided", "-"), "with MBS": ("streamed", "--")}
    looks, chosen = plots.styles(ways), {"lw": 2, "ms": 9, "markevery": [SIZES.index(mini_batch)]}
    figure, axes = plots.new_axes(1, 2, 10, 3.7)
    quantities = {"mib": "peak memory (MiB)", "ms": "time per sample (ms)"}
    for axis, (unit, quantity), ends in zip(axes[0], quantities.items(), extent, strict=True):
        axis.set_xscale("log", base=2)
        axis.set(yscale="log", ylim=ends, xlabel="mini-batch size", ylabel=quantity)
        plots.log_ticks(axis.yaxis, (1, 2, 5), "{:,g}")
        axis.axvline(mini_batch, color="#8d99ae", lw=1.2, ls=":", label="the mini-batch chosen")
        for name, (way, line) in ways.items():
            drawn = list(plan[f"{way}_{unit}"])
            axis.plot(SIZES, drawn, line, label=name, **chosen, **looks[name])
        axis.set_xticks(SIZES, [f"{size:g}" for size in SIZES], fontsize=8)
        axis.minorticks_off()
    memory = axes[0, 0]
    memory.axhline(limit_mib, color="#b3261e", lw=1.5, label="memory limit (SIMULATED)")
    memory.axhspan(limit_mib, extent[0][1], color="#f3dccf", lw=0, zorder=0, label="does not fit")
    figure.suptitle(title, fontsize=10)
    plots.legend_below(figure, 5, list(ways))
    plots.sign(figure, f"Modelled from measurements on {device_name(record)}; SIMULATED limit.")
    return f"limit {limit_mib:,.0f} MiB: {title}", figure
