"""One iteration under any budget and window, simulated from a trace recorded on the spot."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from repro.experiments.outofcore.modelled import Rates, trace_at
from repro.experiments.outofcore.settings import (
    DEEPLAB,
    DENSENET,
    GIB,
    PAPER,
    PIX2PIXHD,
    RESNET,
    simulated,
)
from repro.outofcore import Kind, Simulation, Trace, bound, plan_swaps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LIMIT = "#c0392b"
_BOUND = "#7b5ea7"
_COPY_IN, _COPY_OUT, _COMPUTE, _STALL = "#3a9d6e", "#e07a3f", "#1f6fb4", "#c0392b"

BATCHES = {
    RESNET: (190, 256, 512, 928, 1440),
    DENSENET: (128, 256, 512, 1024),
    PIX2PIXHD: (4, 8, 16, 24),
    DEEPLAB: (8, 16, 32, 64),
}


@dataclass(frozen=True)
class Iteration:
    """A network's iteration at a batch size, with the times of the paper's device."""

    role: str
    batch: int
    trace: Trace
    times: NDArray[np.float64]

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest feasible budget, and what training in core needs, in bytes."""
        return self.trace.smallest_budget, self.trace.peak_bytes


def iteration(role: str, batch: int) -> Iteration:
    """Record a network of the paper at its image size; nothing of it is computed."""
    config = simulated(role, batch).config
    trace, base = trace_at(config, batch), config["baseline"]
    rates = Rates.fit(base, base["batches"], base["images_per_s"])
    return Iteration(role, batch, trace, rates.times(trace))


def budget_bytes(shown: Iteration, percent: float) -> int:
    """Return the budget at so many percent of the way from the smallest feasible to in core."""
    low, high = shown.limits
    return low + int((high - low) * percent / 100)


def simulate(shown: Iteration, budget: int, window_percent: float) -> Simulation:
    """Schedule within a budget by a window of so many percent of it, and simulate that."""
    plan = plan_swaps(shown.trace, budget, int(budget * window_percent / 100))
    return plan.simulate(shown.times, PAPER["bandwidth_bytes_per_s"])


def least_s(shown: Iteration, budget: int) -> float:
    """Return the seconds that no schedule beats within a budget."""
    return bound(shown.trace, budget, shown.times, PAPER["bandwidth_bytes_per_s"])


def describe(shown: Iteration, budget: int, window_percent: float) -> str:
    """Return in a few words what a budget and a window do."""
    result = simulate(shown, budget, window_percent)
    _, needed = shown.limits
    least = least_s(shown, budget)
    limited = f"; link-limited: at best {shown.batch / least:,.0f} images/s by any schedule"
    return (
        f"{shown.role}, batch {shown.batch}: budget {budget / GIB:.2f} of {needed / GIB:.2f} GiB, "
        f"window {window_percent:.0f} % of it: {shown.batch / result.time_s:,.0f} images/s "
        f"({result.compute_s / result.time_s:.0%} of in core), stall {result.stall_s:.2f} of "
        f"{result.time_s:.2f} s, {result.bytes_moved / 1e9:.1f} GB moved"
        f"{limited if least > 1.001 * result.compute_s else ''}"
    )


def draw(shown: Iteration, budget: int, window_percent: float) -> "Figure":
    """Draw the memory timeline, the copies beside the computation, and the stall."""
    result = simulate(shown, budget, window_percent)
    alone = np.array(shown.trace.live_bytes) / GIB
    return _timeline(result, budget / GIB, alone, least_s(shown, budget))


def _timeline(
    simulation: Simulation, budget_gib: float, alone_gib: NDArray[np.float64], bound_s: float
) -> "Figure":
    """Draw an iteration: memory over time, and what computes, copies and waits.

    Args:
        simulation: The iteration.
        budget_gib: The budget, in GiB.
        alone_gib: (n,) what training in core would hold while each function runs, in GiB.
        bound_s: Seconds that no schedule beats.
    """
    from repro.plots import legend_below, new_axes

    figure, axes = new_axes(2, 1, 9.0, 4.6)
    memory, lanes = axes[:, 0]
    starts, ends = simulation.starts_s, simulation.ends_s
    held = simulation.memory_bytes / 2**30
    edges = [*starts, ends[-1]]
    memory.stairs(held, edges, baseline=0, fill=True, color="#cfe0f1", label="held")
    memory.stairs(held, edges, baseline=None, color=_COMPUTE, lw=1)
    memory.stairs(
        alone_gib,
        edges,
        baseline=None,
        color="#8d99ae",
        lw=1,
        ls=":",
        label="in core, at the same function",
    )
    memory.axhline(budget_gib, color=_LIMIT, ls="--", lw=1, label="budget")
    memory.set_ylabel("device memory (GiB)")
    memory.set_ylim(bottom=0)

    begins = np.concatenate([[0.0], ends[:-1]])
    waits = [(b, s - b) for b, s in zip(begins, starts, strict=True) if s - b > 0]
    compute = list(zip(starts, ends - starts, strict=True))
    lane = {"to the host": 0, "to the device": 1, "compute": 2}
    lanes.broken_barh(compute, (lane["compute"] - 0.38, 0.76), color=_COMPUTE)
    lanes.broken_barh(waits, (lane["compute"] - 0.38, 0.76), color=_STALL, label="stall")
    for kind, name, colour in (
        (Kind.SWAP_IN, "to the device", _COPY_IN),
        (Kind.SWAP_OUT, "to the host", _COPY_OUT),
    ):
        bars = [(t.start_s, t.end_s - t.start_s) for t in simulation.transfers if t.kind is kind]
        lanes.broken_barh(bars, (lane[name] - 0.38, 0.76), color=colour)
    lanes.axvline(bound_s, color=_BOUND, ls="-.", lw=1.2, label="no schedule ends sooner")
    lanes.set_yticks(list(lane.values()), list(lane))
    lanes.set_ylim(-0.6, 2.6)
    lanes.grid(axis="y", visible=False)
    lanes.set_xlabel("time of one iteration (s)")
    for axis in (memory, lanes):
        axis.set_xlim(0, max(simulation.time_s, 1e-9))
    legend_below(figure, 5)
    return figure
