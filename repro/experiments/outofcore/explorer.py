"""One iteration under any budget and window, simulated from a trace recorded on the spot."""

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from repro.experiments.outofcore import drawings, grids
from repro.experiments.outofcore.modelled import Rates, trace_at
from repro.experiments.outofcore.reading import GIB
from repro.outofcore import Simulation, Trace, plan_swaps

BATCHES = {
    grids.RESNET: (190, 256, 512, 928, 1440),
    grids.DENSENET: (128, 256, 512, 1024),
    grids.PIX2PIXHD: (4, 8, 16, 24),
    grids.DEEPLAB: (8, 16, 32, 64),
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
    config = grids.simulated(role, batch).config
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
    return plan.simulate(shown.times, grids.PAPER["bandwidth_bytes_per_s"])


def describe(shown: Iteration, budget: int, window_percent: float) -> str:
    """Return in a few words what a budget and a window do."""
    result = simulate(shown, budget, window_percent)
    _, needed = shown.limits
    return (
        f"{shown.role}, batch {shown.batch}: budget {budget / GIB:.2f} of {needed / GIB:.2f} GiB, "
        f"window {window_percent:.0f} % of it: {shown.batch / result.time_s:,.0f} images/s "
        f"({result.compute_s / result.time_s:.0%} of in core), stall {result.stall_s:.2f} of "
        f"{result.time_s:.2f} s, {result.bytes_moved / 1e9:.1f} GB moved"
    )


def draw(shown: Iteration, budget: int, window_percent: float) -> Figure:
    """Draw the memory timeline, the copies beside the computation, and the stall."""
    result = simulate(shown, budget, window_percent)
    alone = np.array(shown.trace.live_bytes) / GIB
    return drawings.timeline(result, budget / GIB, alone)
