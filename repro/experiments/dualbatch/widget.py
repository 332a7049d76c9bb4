"""Any plan, live: its batch sizes and shares, and every worker's steps."""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from repro import plots
from repro.dualbatch import DualBatchPlan, largest_k
from repro.experiments.dualbatch.drawing import LARGE, SMALL, STYLES, titled
from repro.experiments.dualbatch.runs import PAPER, WORKERS, mix
from repro.experiments.explorer import Control, Explorer
from repro.experiments.query import Results
from repro.measure import TimeModel

# Ends of the widget's sliders, and of its axes, so that the plan alone moves.
MOST_TIME, BATCHES = 1.5, (100, 1000)
# The setting of Table 2: ResNet-18 on CIFAR-100, GTX 1080.
TIMES = TimeModel(PAPER["inferred"]["a"], PAPER["inferred"]["b"])
SAMPLES: int = PAPER["cifar_samples"]  # of an epoch


def explorers(_: Callable[[str], Results]) -> list[Explorer]:
    """Return the widget, which needs no records."""

    def computed(k: float, n_small: int, large_batch: int) -> tuple[str, Figure]:
        plan = solve(k, n_small, large_batch)
        return describe(plan), draw(large_batch, plan)

    most = round(100 * MOST_TIME) - 100
    longer = {f"{percent} %": 1 + percent / 100 for percent in range(1, most + 1)}
    controls = {
        "k": Control("longer than large batches alone by", longer, "10 %", 8),
        "n_small": Control("workers with small batches", {str(n): n for n in range(5)}, "2", 5),
        "large_batch": Control(
            "large batch", {str(n): n for n in range(BATCHES[0], BATCHES[1] + 1, 50)}, "500"
        ),
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
    """Draw a plan's steps by worker, and the plan among all others, on axes that never change."""
    figure, axes = plots.new_axes(1, 2, 9.8, 3.6)
    _draw_workers(axes[0, 0], large_batch, plan)
    _draw_choices(axes[0, 1], large_batch, plan)
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


def _draw_workers(axis: Axes, large_batch: int, plan: DualBatchPlan | str) -> None:
    titled(axis, "predicted for the paper's device: ResNet-18, GTX 1080", 60)
    longest = MOST_TIME * TIMES.pass_time(BATCHES[0], round(SAMPLES / WORKERS))
    axis.set_xlim(0, 1.02 * longest)
    axis.set_ylim(WORKERS - 0.5, -0.5)
    axis.set_yticks(range(WORKERS), [f"worker {worker}" for worker in range(WORKERS)])
    axis.set_xlabel("time of one epoch (s)")
    axis.grid(axis="y", visible=False)
    colours = {"small": STYLES[SMALL]["color"], "large": STYLES[LARGE]["color"]}
    for kind, colour in colours.items():  # named even where no worker has such batches
        axis.broken_barh([], (0, 0), color=colour, label=f"a step with a {kind} batch")
    if isinstance(plan, str):
        axis.text(0.5, 0.5, "no such plan", transform=axis.transAxes, ha="center", fontsize=12)
    else:
        for row, kind in enumerate(plan.kinds):
            lane = (row - 0.36, 0.72)
            steps = steps_of(plan, row)
            axis.broken_barh(steps, lane, color=colours[kind], edgecolor="white", lw=0.3)
    baseline = TIMES.pass_time(large_batch, round(SAMPLES / WORKERS))
    axis.axvline(baseline, color="#b3261e", ls="--", lw=1.4, label="an epoch, large batches alone")


def _draw_choices(axis: Axes, large_batch: int, plan: DualBatchPlan | str) -> None:
    for n_small in range(1, WORKERS + 1):
        ks, sizes = choices(n_small, large_batch)
        axis.plot(ks, sizes, lw=1.8, label=mix(n_small), color=STYLES[mix(n_small)]["color"])
    chosen = [] if isinstance(plan, str) or not plan.small_batch else [plan]
    ks, sizes = [plan.k for plan in chosen], [plan.small_batch or 0 for plan in chosen]
    axis.plot(ks, sizes, "o", color="#b3261e", ms=9, label="this plan")
    titled(axis, f"every plan with large batches of {large_batch}", 60)
    axis.set(xlabel="time over that of large batches alone (k)", ylabel="small batch size")
    axis.set_xlim(1, MOST_TIME)
    axis.set_yscale("log")
    axis.set_ylim(1, BATCHES[1])
    ticks = [1, 3, 10, 30, 100, 300, 1000]
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()


def choices(n_small: int, large_batch: int) -> tuple[list[float], list[int]]:
    """The time k and the small batch size of every plan with so many small-batch workers."""
    top = min(MOST_TIME, largest_k(TIMES, n_small, WORKERS - n_small, large_batch))
    ks = [1 + (top - 1) * step / 60 for step in range(1, 61)]
    plans = [plan for k in ks if not isinstance(plan := solve(k, n_small, large_batch), str)]
    return [plan.k for plan in plans], [plan.small_batch or 0 for plan in plans]
