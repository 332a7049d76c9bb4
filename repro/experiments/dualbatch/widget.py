"""Any plan, live: its batch sizes and shares, and every worker's steps."""

import itertools
from collections.abc import Callable

from matplotlib.figure import Figure

from repro import plots
from repro.dualbatch import DualBatchPlan
from repro.experiments.dualbatch.cells import STYLES
from repro.experiments.dualbatch.runs import PAPER, WORKERS
from repro.experiments.explorer import Control, Explorer
from repro.experiments.query import Results
from repro.measure import TimeModel

# The setting of Table 2: ResNet-18 on CIFAR-100, GTX 1080.
TIMES = TimeModel(PAPER["inferred"]["a"], PAPER["inferred"]["b"])
SAMPLES: int = PAPER["cifar_samples"]  # of an epoch
_LONGEST = 1.5 * TIMES.pass_time(100, SAMPLES // WORKERS)  # that the controls allow, in seconds


def explorers(_: Callable[[str], Results]) -> list[Explorer]:
    """Return the widget, which needs no records."""

    def computed(k: float, n_small: int, large_batch: int) -> tuple[str, Figure]:
        plan = solve(k, n_small, large_batch)
        return describe(plan), draw(large_batch, plan)

    longer = {f"{percent} %": 1 + percent / 100 for percent in range(1, 51)}
    sizes = {str(n): n for n in range(100, 1001, 50)}
    controls = {
        "k": Control("longer than large batches alone by", longer, "10 %", 8),
        "n_small": Control("workers with small batches", {str(n): n for n in range(5)}, "2", 5),
        "large_batch": Control("large batch", sizes, "500"),
    }
    return [Explorer("dualbatch", controls, computed)]


def solve(k: float, n_small: int, large_batch: int) -> DualBatchPlan | str:
    """The plan, or in words why there is none."""
    sizes = (n_small, WORKERS - n_small, large_batch)
    try:
        return DualBatchPlan.solve(TIMES, k, *sizes, SAMPLES, "floor")
    except ValueError as error:
        return f"no such plan: {error}"


def describe(plan: DualBatchPlan | str) -> str:
    """A plan in words and units, or why there is none."""
    if isinstance(plan, str):
        return plan
    parts = [
        f"{plan.kinds.count(kind)} with batches of {plan.batch_of(kind)} "
        f"({plan.share_of(kind):,} samples each, {plan.time_of(kind):.3f} s)"
        for kind in dict.fromkeys(plan.kinds)
    ]
    factor = f"; an update of small batches counts {plan.update_factor:.3f}"
    longer = f"an epoch in {plan.k:g} times the time of large batches alone; workers: "
    return f"{longer}{', '.join(parts)}{factor * ('small' in plan.kinds)}"


def draw(large_batch: int, plan: DualBatchPlan | str) -> Figure:
    """Draw a plan's steps by worker, on axes that never change."""
    figure, axes = plots.new_axes(1, 1, 9.8, 3.6)
    axis = axes[0, 0]
    axis.set_title("predicted for the paper's device: ResNet-18, GTX 1080", fontsize=8)
    axis.set(xlabel="time of one epoch (s)", xlim=(0, 1.02 * _LONGEST), ylabel="worker")
    axis.set(yticks=range(WORKERS), ylim=(WORKERS - 0.5, -0.5))
    if isinstance(plan, str):
        axis.text(0.5, 0.5, "no such plan", transform=axis.transAxes, ha="center", fontsize=12)
    else:
        for row, kind in enumerate(plan.kinds):
            full, rest = divmod(plan.share_of(kind), plan.batch_of(kind))
            sizes = [plan.batch_of(kind)] * full + [rest] * (rest > 0)
            seconds = [plan.time_model.predict(size) for size in sizes]
            steps = zip(itertools.accumulate(seconds, initial=0.0), seconds, strict=False)
            look = {"color": STYLES[f"{kind} batches"]["color"], "label": f"a step, {kind} batch"}
            axis.broken_barh(list(steps), (row - 0.36, 0.72), edgecolor="white", lw=0.3, **look)
    baseline = TIMES.pass_time(large_batch, SAMPLES // WORKERS)
    axis.axvline(baseline, color="#b3261e", ls="--", label="an epoch, large batches alone")
    plots.legend_below(figure, 4)
    plots.sign(figure, "SIMULATED: arithmetic of equations 4 to 8; nothing was trained or timed.")
    return figure
