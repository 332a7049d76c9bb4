"""What streaming a mini-batch would need and take, from the measured models of memory and time."""

import math
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class StreamingPlan:
    """A mini-batch on a device with limited memory; bytes and seconds.

    Attributes:
        micro_batch_size: The largest that fits, at most the mini-batch; 0 where not even one
            sample does.
        num_micro_batches: How many of them, the last may be smaller.
        undivided_bytes: p + B a of the whole mini-batch.
        streamed_bytes: The same of one micro-batch, of a single sample where none fits.
        undivided_s: Time of the mini-batch at once, NaN where it does not fit.
        streamed_s: Time of the micro-batches one after the other, NaN where none fits.
    """

    micro_batch_size: int
    num_micro_batches: int
    undivided_bytes: float
    streamed_bytes: float
    undivided_s: float
    streamed_s: float


def plan_streaming(record: Record, limit_bytes: float, mini_batch: int) -> StreamingPlan:
    """Plan a mini-batch by a ``size`` record: M(B) = p + B a and t(B) = c + B d.

    Raises:
        ValueError: The limit or the mini-batch is below 1, or the record holds no models.
    """
    if mini_batch < 1 or limit_bytes < 1:
        raise ValueError(
            f"mini_batch is {mini_batch}, limit_bytes {limit_bytes}; both must be at least 1"
        )
    if record.experiment != "size" or record.status != "ok":
        raise ValueError(
            f"the record is of {record.experiment!r} with status {record.status!r}; give one of "
            f"'size' that ran: python -m repro run mbs/table2"
        )
    memory = LinearMemoryModel(record.metrics["fixed_bytes"], record.metrics["bytes_per_sample"])
    sizes = [int(size) for size in record.timings]
    medians = [float(np.median(timing["samples_s"])) for timing in record.timings.values()]
    per_sample_s, per_step_s = (max(0.0, float(value)) for value in np.polyfit(sizes, medians, 1))

    def duration(samples: int) -> float:
        return per_step_s + per_sample_s * samples if samples else 0.0

    micro = min(mini_batch, memory.largest_batch(limit_bytes))
    full, rest = divmod(mini_batch, micro) if micro else (0, 0)
    return StreamingPlan(
        micro_batch_size=micro,
        num_micro_batches=full + bool(rest),
        undivided_bytes=memory.fixed_bytes + memory.bytes_per_sample * mini_batch,
        streamed_bytes=memory.fixed_bytes + memory.bytes_per_sample * max(1, micro),
        undivided_s=duration(mini_batch) if micro == mini_batch else math.nan,
        streamed_s=full * duration(micro) + duration(rest) if micro else math.nan,
    )


def size_records(results: Results) -> dict[str, Record]:
    """Return the usable ``size`` records by model."""
    return {record.config["role"]: record for record in results.ok("size")}


def explorers(results: Callable[[str], Results]) -> list[Explorer]:
    """Return the widget, by a function from an artefact's name to its records."""
    records = size_records(results("table2"))
    if not records:
        return []

    def computed(role: str, percent: int, mini_batch: int) -> tuple[str, Figure]:
        limit_mib = percent / 100 * default_limit_mib(records[role])
        plan = plan_streaming(records[role], limit_mib * MIB, mini_batch)
        said = f"limit {limit_mib:,.0f} MiB; {mini_batch} samples, {_told(plan)}"
        return said, draw_plan(records[role], limit_mib, mini_batch)

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
    plans = {size: plan_streaming(record, limit_mib * MIB, size) for size in sizes}
    memory = {
        WITHOUT: [plan.undivided_bytes / MIB for plan in plans.values()],
        WITH: [plan.streamed_bytes / MIB for plan in plans.values()],
    }
    times = {
        WITHOUT: [_each_ms(plan.undivided_s, size) for size, plan in plans.items()],
        WITH: [_each_ms(plan.streamed_s, size) for size, plan in plans.items()],
    }
    unlimited = 2 * MIB * memory[WITHOUT][-1]
    slowest, fastest = (
        _each_ms(plan_streaming(record, unlimited, n).undivided_s, n) for n in (sizes[0], sizes[-1])
    )
    least = min(memory[WITHOUT][0], LEAST_SHARE * default_limit_mib(record))
    extent = ((0.8 * least, 1.3 * memory[WITHOUT][-1]), (0.8 * fastest, 1.3 * slowest))
    summary = _told(plans[mini_batch])
    title = f"{whose(record.config['role'], [record])}, modelled: {mini_batch} samples, {summary}"
    figure = plots.streaming_plan(
        sizes, memory, times, limit_mib, mini_batch, styles(), extent, title
    )
    plots.sign(figure, f"Modelled from measurements on {device_name(record)}; SIMULATED limit.")
    return figure


def _each_ms(seconds: float, samples: int) -> float:
    return max(1e3 * seconds / samples, 1e-6)  # NaN stays NaN


def _told(plan: StreamingPlan) -> str:
    if not plan.micro_batch_size:
        return "of which not one fits"
    if not math.isnan(plan.undivided_s):
        return "which fit undivided"
    return f"in {plan.num_micro_batches} micro-batches of at most {plan.micro_batch_size}"
