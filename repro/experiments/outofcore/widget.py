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

BATCHES = {
    "ResNet-50": (190, 256, 512, 928, 1440),
    "DenseNet": (128, 256, 512, 1024),
    "Pix2PixHD": (4, 8, 16, 24),
    "DeepLabv3+": (8, 16, 32, 64),
}


@dataclass(frozen=True, eq=False)
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
        result = simulate(shown, budget, window)
        return describe(shown, budget, result), draw(shown, budget, result)

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


def simulate(shown: Iteration, budget: int, window_percent: float) -> Simulation:
    """Schedule within a budget by a window of so many percent of it, and simulate that."""
    plan = plan_swaps(shown.trace, budget, int(budget * window_percent / 100))
    return plan.simulate(shown.times, RATE)


def describe(shown: Iteration, budget: int, result: Simulation) -> str:
    """In two lines the effect of a budget and a window."""
    least = bound(shown.trace, budget, shown.times, RATE)
    return (
        f"SIMULATED V100, {shown.role}, batch {shown.batch}: budget {budget / GIB:.2f} of "
        f"{shown.limits[1] / GIB:.2f} GiB\n{shown.batch / result.time_s:,.0f} images/s "
        f"({result.compute_s / result.time_s:.0%} of in core; at best {shown.batch / least:,.0f} "
        f"by any schedule), stall {result.stall_s:.2f} of {result.time_s:.2f} s, "
        f"{(result.bytes_in + result.bytes_out) / 1e9:.1f} GB moved"
    )


def draw(shown: Iteration, budget: int, result: Simulation) -> Figure:
    """Draw an iteration's memory, computation and copies over time."""
    figure, axes = plots.new_axes(2, 1, 10.5, 5.2)
    memory, lanes = axes.flat
    starts, ends = result.starts_s, result.ends_s
    edges, alone = [*starts, ends[-1]], np.array(shown.trace.live_bytes) / GIB
    memory.stairs(result.memory_bytes / GIB, edges, fill=True, color="#bcd7ea", label="held")
    memory.stairs(alone, edges, baseline=None, ls=":", color="#6b7486", label="in core")
    memory.axhline(budget / GIB, color=plots.INK, ls="--", lw=1.2, label="budget")
    ran = network_name(simulated(shown.role, shown.batch).config)
    title = panel(shown.role, ran, f"simulated, V100, batch {shown.batch}")
    memory.set_title(title, fontsize=9)
    memory.set(ylabel="device memory (GiB)", ylim=(0, 1.08 * shown.limits[1] / GIB))
    lanes.broken_barh(list(zip(starts, ends - starts, strict=True)), (1.62, 0.76))
    for lane, kind in enumerate((Kind.SWAP_OUT, Kind.SWAP_IN)):
        bars = [(t.start_s, t.end_s - t.start_s) for t in result.transfers if t.kind is kind]
        lanes.broken_barh(bars, (lane - 0.38, 0.76), color="#6b7486")
    lanes.set_yticks(range(3), ["copied to the host", "copied to the device", "compute"])
    lanes.set(xlabel="time of one iteration (s)", xlim=memory.get_xlim())
    lanes.grid(axis="y", visible=False)
    plots.legend_below(figure, 3)
    plots.sign(figure, f"SIMULATED V100: {shown.role}'s own trace, times by published rates.")
    return figure
