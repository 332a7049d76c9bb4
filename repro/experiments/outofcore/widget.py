"""One iteration under any budget and window, simulated from a trace recorded on the spot."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from repro.experiments.outofcore.modelled import Rates, trace_at
from repro.experiments.outofcore.panels import BEYOND, CEILING
from repro.experiments.outofcore.runs import GIB, RATE, network_name, simulated
from repro.experiments.view import panel
from repro.outofcore import Kind, Simulation, Trace, bound, plan_swaps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue and yellow differ in brightness, too; copies have lanes with names of their own.
_INK, _COMPUTE, _STALL, _COPY = "#1c2230", "#0173b2", "#ece133", "#6b7486"
BUDGETS = (0, 25, 50, 75, 100)  # percent of the way, at which the curves are drawn

BATCHES = {
    "ResNet-50": (190, 256, 512, 928, 1440),
    "DenseNet": (128, 256, 512, 1024),
    "Pix2PixHD": (4, 8, 16, 24),
    "DeepLabv3+": (8, 16, 32, 64),
}


@dataclass(frozen=True, eq=False)  # of each there is one, by which results are remembered
class Iteration:
    """A network's iteration at a batch size, with the times of the paper's device.

    Attributes:
        role: The network.
        batch: Its batch size.
        trace: Of n functions.
        times: (n,) seconds of each function.
    """

    role: str
    batch: int
    trace: Trace
    times: NDArray[np.float64]

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest feasible budget, and what training in core needs, in bytes."""
        return self.trace.smallest_budget, self.trace.peak_bytes


@lru_cache(maxsize=4)
def iteration(role: str, batch: int) -> Iteration:
    """Record a network of the paper at its image size; nothing of it is computed."""
    config = simulated(role, batch).config
    trace, base = trace_at(config, batch), config["baseline"]
    rates = Rates.fit(base, base["batches"], base["images_per_s"])
    return Iteration(role, batch, trace, rates.times(trace))


def budget_bytes(shown: Iteration, percent: float) -> int:
    """The budget at so many percent of the way from the smallest feasible to in core."""
    low, high = shown.limits
    return low + int((high - low) * percent / 100)


@lru_cache(maxsize=64)
def simulate(shown: Iteration, budget: int, window_percent: float) -> Simulation:
    """Schedule within a budget by a window of so many percent of it, and simulate that."""
    plan = plan_swaps(shown.trace, budget, int(budget * window_percent / 100))
    return plan.simulate(shown.times, RATE)


@lru_cache(maxsize=64)
def least_s(shown: Iteration, budget: int) -> float:
    """The seconds that no schedule beats within a budget."""
    return bound(shown.trace, budget, shown.times, RATE)


def slowest_s(shown: Iteration) -> float:
    """The seconds at the smallest budget without a window; all axes of time end there."""
    return simulate(shown, budget_bytes(shown, 0), 0).time_s


def describe(shown: Iteration, budget: int, window_percent: float) -> str:
    """In two lines what a budget and a window do."""
    result = simulate(shown, budget, window_percent)
    _, needed = shown.limits
    least = least_s(shown, budget)
    limited = f"; link-limited: at best {shown.batch / least:,.0f} images/s by any schedule"
    return (
        f"SIMULATED V100, {shown.role}, batch {shown.batch}: budget {budget / GIB:.2f} of "
        f"{needed / GIB:.2f} GiB, window {window_percent:.0f} % of it\n"
        f"{shown.batch / result.time_s:,.0f} images/s "
        f"({result.compute_s / result.time_s:.0%} of in core), stall {result.stall_s:.2f} of "
        f"{result.time_s:.2f} s, {result.bytes_moved / 1e9:.1f} GB moved"
        f"{limited if least > 1.001 * result.compute_s else ''}"
    )


def draw(shown: Iteration, budget: int, window_percent: float) -> "Figure":
    """Draw an iteration over time, and beside it what other budgets do with the same window.

    The axes are those of all budgets and windows of this network and batch size.
    """
    from repro.plots import legend_below, new_axes, sign

    result = simulate(shown, budget, window_percent)
    figure, axes = new_axes(2, 2, 12.6, 5.2)
    axes[0, 0].get_gridspec().set_width_ratios((2.3, 1))
    (memory, speed), (lanes, moved) = axes
    end = max(slowest_s(shown), result.time_s)
    _draw_memory(memory, shown, result, budget)
    _draw_lanes(lanes, result, least_s(shown, budget))
    for axis in (memory, lanes):
        axis.set_xlim(0, 1.01 * end)
    _draw_budgets(speed, moved, shown, budget, window_percent)
    legend_below(figure, 5)
    sign(figure, f"SIMULATED V100: {shown.role}'s own trace, times by published rates.")
    return figure


def _draw_memory(axis: "Axes", shown: Iteration, result: Simulation, budget: int) -> None:
    """Draw what the device holds over time, beside what training in core would hold."""
    edges = [*result.starts_s, result.ends_s[-1]]
    held = result.memory_bytes / GIB
    alone = np.array(shown.trace.live_bytes) / GIB
    axis.stairs(held, edges, baseline=0, fill=True, color="#bcd7ea", label="held by the device")
    axis.stairs(held, edges, baseline=None, color=_COMPUTE, lw=1)
    axis.stairs(
        alone, edges, baseline=None, color=_COPY, lw=1.2, ls=":", label="in core, same function"
    )
    axis.axhline(budget / GIB, color=_INK, ls="--", lw=1.2, label="budget")
    ran = network_name(simulated(shown.role, shown.batch).config)
    axis.set_title(f"{panel(shown.role, ran, 'SIMULATED V100')}, batch {shown.batch}", fontsize=9)
    axis.set_ylabel("device memory (GiB)")
    axis.set_ylim(0, 1.08 * shown.limits[1] / GIB)


def _draw_lanes(axis: "Axes", result: Simulation, bound_s: float) -> None:
    """Draw what computes, copies and waits."""
    starts, ends = result.starts_s, result.ends_s
    begins = np.concatenate([[0.0], ends[:-1]])
    waits = [(b, s - b) for b, s in zip(begins, starts, strict=True) if s - b > 0]
    compute = list(zip(starts, ends - starts, strict=True))
    lane = {"copied to the host": 0, "copied to the device": 1, "compute": 2}
    axis.broken_barh(compute, (lane["compute"] - 0.38, 0.76), color=_COMPUTE)
    axis.broken_barh(waits, (lane["compute"] - 0.38, 0.76), color=_STALL, label="compute waits")
    for kind, name in (
        (Kind.SWAP_IN, "copied to the device"),
        (Kind.SWAP_OUT, "copied to the host"),
    ):
        bars = [(t.start_s, t.end_s - t.start_s) for t in result.transfers if t.kind is kind]
        axis.broken_barh(bars, (lane[name] - 0.38, 0.76), color=_COPY)
    axis.axvline(bound_s, color=_INK, ls="-.", lw=1.4, label="no schedule ends sooner")
    axis.set_yticks(list(lane.values()), list(lane))
    axis.set_ylim(-0.6, 2.6)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("time of one iteration (s)")


def _draw_budgets(
    speed: "Axes", moved: "Axes", shown: Iteration, budget: int, window_percent: float
) -> None:
    """Draw images/s and the bytes moved by budget, and where the chosen one stands."""
    budgets = sorted({budget, *(budget_bytes(shown, percent) for percent in BUDGETS)})
    results = [simulate(shown, each, window_percent) for each in budgets]
    chosen = simulate(shown, budget, window_percent)
    gib = [each / GIB for each in budgets]
    most = [shown.batch / least_s(shown, each) for each in budgets]
    top = 1.15 * shown.batch / results[0].compute_s
    speed.fill_between(gib, most, top, color=BEYOND, lw=0, label=CEILING)
    speed.plot(gib, [shown.batch / result.time_s for result in results], color=_COMPUTE, lw=1.6)
    speed.plot([budget / GIB], [shown.batch / chosen.time_s], "o", color=_COMPUTE, ms=8)
    speed.set(ylabel="images/s", ylim=(0, top))
    speed.set_title("this window, other budgets", fontsize=9)
    moved.plot(gib, [result.bytes_moved / 1e9 for result in results], color=_COPY, lw=1.6)
    moved.plot([budget / GIB], [chosen.bytes_moved / 1e9], "o", color=_COPY, ms=8)
    largest = simulate(shown, budgets[0], 0).bytes_moved / 1e9
    moved.set(ylabel="moved (GB)", xlabel="budget (GiB)")
    moved.set_ylim(0, 1.15 * max([largest, *(result.bytes_moved / 1e9 for result in results)]))
