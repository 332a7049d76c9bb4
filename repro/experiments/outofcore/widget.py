"""One iteration under any budget and window, simulated from a trace recorded on the spot."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from repro import plots
from repro.experiments.explorer import Control, Explorer
from repro.experiments.outofcore.building import published_times, trace_at
from repro.experiments.outofcore.runs import GIB, RATE, network_name, simulated
from repro.experiments.query import Results
from repro.experiments.view import panel
from repro.outofcore import Kind, Simulation, Trace, bound, plan_swaps

# Blue and yellow differ in brightness, too; copies have lanes with names of their own.
_INK, _COMPUTE, _STALL, _COPY = "#1c2230", "#0173b2", "#ece133", "#6b7486"
BATCHES = {
    "ResNet-50": (190, 256, 512, 928, 1440),
    "DenseNet": (128, 256, 512, 1024),
    "Pix2PixHD": (4, 8, 16, 24),
    "DeepLabv3+": (8, 16, 32, 64),
}


@dataclass(frozen=True, eq=False)  # of each there is one, by which results are remembered
class Iteration:
    """A network's iteration at a batch size, with the times of the paper's device."""

    role: str
    batch: int
    trace: Trace
    times: NDArray[np.float64]  # (n,) seconds of each function
    limits: tuple[int, int]  # the smallest feasible budget, and the peak in core, in bytes

    def budget_bytes(self, percent: float) -> int:
        """The budget so many percent from the smallest feasible one to that of training in core."""
        low, high = self.limits
        return low + int((high - low) * percent / 100)

    def least_s(self, budget: int) -> float:
        """The seconds that no schedule beats within a budget."""
        return bound(self.trace, budget, self.times, RATE)


@lru_cache(maxsize=4)
def iteration(role: str, batch: int) -> Iteration:
    """Record a network of the paper at its image size; nothing of it is computed."""
    config = simulated(role, batch).config
    trace = trace_at(config, batch)
    limits = trace.smallest_budget, trace.peak_bytes
    return Iteration(role, batch, trace, published_times(trace, config["baseline"]), limits)


def explorers(_: Callable[[str], Results]) -> list[Explorer]:
    """Return the widget, which needs no records; a network is recorded when it is first chosen."""

    def computed(network: tuple[str, int], percent: int, window: int) -> tuple[str, Figure]:
        shown = iteration(*network)
        budget = shown.budget_bytes(percent)
        return describe(shown, budget, window), draw(shown, budget, window)

    networks = {
        f"{role}, batch {batch:,}": (role, batch)
        for role, batches in BATCHES.items()
        for batch in batches
    }
    percents = {f"{percent} %": percent for percent in range(101)}
    windows = {f"{percent} %": percent for percent in range(0, 301, 5)}
    controls = {
        "network": Control("network", networks, "ResNet-50, batch 512", listed=True),
        "percent": Control("budget, from the smallest to all", percents, "25 %", 5),
        "window": Control("window, of the budget", windows, "150 %", 5),
    }
    return [Explorer("outofcore", controls, computed, height=485)]


@lru_cache(maxsize=64)
def simulate(shown: Iteration, budget: int, window_percent: float) -> Simulation:
    """Schedule within a budget by a window of so many percent of it, and simulate that."""
    plan = plan_swaps(shown.trace, budget, int(budget * window_percent / 100))
    return plan.simulate(shown.times, RATE)


def describe(shown: Iteration, budget: int, window_percent: float) -> str:
    """In two lines the effect of a budget and a window."""
    result, least = simulate(shown, budget, window_percent), shown.least_s(budget)
    limited = f"; link-limited: at best {shown.batch / least:,.0f} images/s by any schedule"
    return (
        f"SIMULATED V100, {shown.role}, batch {shown.batch}: budget {budget / GIB:.2f} of "
        f"{shown.limits[1] / GIB:.2f} GiB, window {window_percent:.0f} % of it\n"
        f"{shown.batch / result.time_s:,.0f} images/s "
        f"({result.compute_s / result.time_s:.0%} of in core), stall {result.stall_s:.2f} of "
        f"{result.time_s:.2f} s, {result.bytes_moved / 1e9:.1f} GB moved"
        f"{limited if least > 1.001 * result.compute_s else ''}"
    )


def draw(shown: Iteration, budget: int, window_percent: float) -> Figure:
    """Draw an iteration's memory, computation and copies over time.

    The axes are those of all budgets and windows of this network and batch size.
    """
    result = simulate(shown, budget, window_percent)
    figure, axes = plots.new_axes(2, 1, 10.5, 5.2)
    memory, lanes = axes.flat
    starts, ends = result.starts_s, result.ends_s
    held, alone = result.memory_bytes / GIB, np.array(shown.trace.live_bytes) / GIB
    edges, dotted = [*starts, ends[-1]], {"color": _COPY, "lw": 1.2, "ls": ":"}
    memory.stairs(held, edges, baseline=0, fill=True, color="#bcd7ea", label="held by the device")
    memory.stairs(alone, edges, baseline=None, label="in core, same function", **dotted)
    memory.axhline(budget / GIB, color=_INK, ls="--", lw=1.2, label="budget")
    ran = network_name(simulated(shown.role, shown.batch).config)
    title = panel(shown.role, ran, f"simulated, V100, batch {shown.batch}")
    memory.set_title(title, fontsize=9)
    memory.set(ylabel="device memory (GiB)", ylim=(0, 1.08 * shown.limits[1] / GIB))

    begins = np.concatenate([[0.0], ends[:-1]])
    waits = [(b, s - b) for b, s in zip(begins, starts, strict=True) if s - b > 0]
    lanes.broken_barh(list(zip(starts, ends - starts, strict=True)), (1.62, 0.76), color=_COMPUTE)
    lanes.broken_barh(waits, (1.62, 0.76), color=_STALL, label="compute waits")
    for lane, kind in enumerate((Kind.SWAP_OUT, Kind.SWAP_IN)):
        bars = [(t.start_s, t.end_s - t.start_s) for t in result.transfers if t.kind is kind]
        lanes.broken_barh(bars, (lane - 0.38, 0.76), color=_COPY)
    least = shown.least_s(budget)
    lanes.axvline(least, color=_INK, ls="-.", lw=1.4, label="no schedule ends sooner")
    lanes.set_yticks(range(3), ["copied to the host", "copied to the device", "compute"])
    lanes.set(ylim=(-0.6, 2.6), xlabel="time of one iteration (s)")
    lanes.grid(axis="y", visible=False)

    slowest = simulate(shown, shown.budget_bytes(0), 0).time_s
    for axis in axes.flat:
        axis.set_xlim(0, 1.01 * max(slowest, result.time_s))
    plots.legend_below(figure, 5)
    plots.sign(figure, f"SIMULATED V100: {shown.role}'s own trace, times by published rates.")
    return figure
