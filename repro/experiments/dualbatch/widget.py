"""Any plan, live: its batch sizes and shares, and every worker's steps."""

from collections.abc import Callable

from matplotlib.figure import Figure

from repro import plots
from repro.dualbatch import DualBatchPlan
from repro.experiments.dualbatch.drawing import STYLES, titled
from repro.experiments.dualbatch.runs import PAPER, WORKERS
from repro.experiments.explorer import Control, Explorer
from repro.experiments.query import Results
from repro.measure import TimeModel

# Ends of the widget's sliders, and of its axis, so that the plan alone moves.
MOST_PERCENT, SMALLEST = 50, 100
# The setting of Table 2: ResNet-18 on CIFAR-100, GTX 1080.
TIMES = TimeModel(PAPER["inferred"]["a"], PAPER["inferred"]["b"])
SAMPLES: int = PAPER["cifar_samples"]  # of an epoch


def explorers(_: Callable[[str], Results]) -> list[Explorer]:
    """Return the widget, which needs no records."""

    def computed(k: float, n_small: int, large_batch: int) -> tuple[str, Figure]:
        plan = solve(k, n_small, large_batch)
        return describe(plan), draw(large_batch, plan)

    longer = {f"{percent} %": 1 + percent / 100 for percent in range(1, MOST_PERCENT + 1)}
    sizes = {str(n): n for n in range(SMALLEST, 1001, 50)}
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
        return str(error)


def describe(plan: DualBatchPlan | str) -> str:
    """A plan in words and units, or why there is none."""
    if isinstance(plan, str):
        return f"no such plan: {plan}"
    parts = [
        f"{plan.kinds.count(kind)} with batches of {plan.batch_of(kind)} "
        f"({plan.share_of(kind):,} samples each, {plan.time_of(kind):.3f} s)"
        for kind in dict.fromkeys(plan.kinds)
    ]
    factor = f"; an update of small batches counts {plan.update_factor:.3f}"
    return (
        f"an epoch in {plan.k:g} times the time of large batches alone; workers: "
        f"{', '.join(parts)}{factor * ('small' in plan.kinds)}"
    )


def draw(large_batch: int, plan: DualBatchPlan | str) -> Figure:
    """Draw a plan's steps by worker, on axes that never change."""
    figure, axes = plots.new_axes(1, 1, 9.8, 3.6)
    axis = axes[0, 0]
    titled(axis, "predicted for the paper's device: ResNet-18, GTX 1080", 60)
    share = round(SAMPLES / WORKERS)
    axis.set(xlabel="time of one epoch (s)", ylim=(WORKERS - 0.5, -0.5))
    axis.set_xlim(0, 1.02 * (1 + MOST_PERCENT / 100) * TIMES.pass_time(SMALLEST, share))
    axis.set_yticks(range(WORKERS), [f"worker {worker}" for worker in range(WORKERS)])
    axis.grid(axis="y", visible=False)
    colours = {kind: STYLES[f"{kind} batches"]["color"] for kind in ("small", "large")}
    for kind, colour in colours.items():  # named even where no worker has such batches
        axis.broken_barh([], (0, 0), color=colour, label=f"a step with a {kind} batch")
    if isinstance(plan, str):
        axis.text(0.5, 0.5, "no such plan", transform=axis.transAxes, ha="center", fontsize=12)
    else:
        for row, kind in enumerate(plan.kinds):
            lane, steps = (row - 0.36, 0.72), steps_of(plan, row)
            axis.broken_barh(steps, lane, color=colours[kind], edgecolor="white", lw=0.3)
    baseline = TIMES.pass_time(large_batch, share)
    axis.axvline(baseline, color="#b3261e", ls="--", lw=1.4, label="an epoch, large batches alone")
    plots.legend_below(figure, 4)
    plots.sign(figure, "SIMULATED: arithmetic of equations 4 to 8; nothing was trained or timed.")
    return figure


def steps_of(plan: DualBatchPlan, worker: int) -> list[tuple[float, float]]:
    """Start and seconds of every step of a worker in one epoch, as predicted."""
    kind = plan.kinds[worker]
    batch, left = plan.batch_of(kind), plan.share_of(kind)
    spans, now = [], 0.0
    while left > 0:
        seconds = plan.time_model.predict(min(batch, left))
        spans.append((now, seconds))
        now, left = now + seconds, left - batch
    return spans
