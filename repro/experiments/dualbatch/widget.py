"""Any plan, live: its batch sizes and shares, and every worker's steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Setting:
    """The problem of a plan: times of a device, and samples of an epoch."""

    name: str
    times: TimeModel
    samples: int

    @property
    def longest_s(self) -> float:
        """Seconds of the longest epoch that the sliders allow."""
        return MOST_TIME * self.times.pass_time(BATCHES[0], round(self.samples / WORKERS))


def paper_setting() -> Setting:
    """The setting of Table 2: ResNet-18 on CIFAR-100, GTX 1080."""
    inferred = PAPER["inferred"]
    times = TimeModel(inferred["a"], inferred["b"])
    return Setting("ResNet-18, GTX 1080", times, PAPER["cifar_samples"])


def explorers(_: Callable[[str], Results]) -> list[Explorer]:
    """Return the widget, which needs no records."""
    setting = paper_setting()

    def computed(k: float, n_small: int, large_batch: int) -> tuple[str, Figure]:
        plan = solve(setting, k, n_small, large_batch)
        return describe(plan), draw(setting, large_batch, plan)

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


def solve(setting: Setting, k: float, n_small: int, large_batch: int) -> DualBatchPlan | str:
    """The plan, or in words why there is none."""
    try:
        return DualBatchPlan.solve(
            setting.times, k, n_small, WORKERS - n_small, large_batch, setting.samples, "floor"
        )
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


def draw(setting: Setting, large_batch: int, plan: DualBatchPlan | str) -> Figure:
    """Draw a plan among all others: on the left its workers' steps, on the right small batches.

    Axes are the same for whatever the widget's sliders are set to.
    """
    figure, axes = plots.new_axes(1, 2, 9.8, 3.6)
    _draw_workers(axes[0, 0], setting, large_batch, plan)
    _draw_choices(axes[0, 1], setting, large_batch, plan)
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


def _draw_workers(
    axis: Axes, setting: Setting, large_batch: int, plan: DualBatchPlan | str
) -> None:
    titled(axis, f"predicted for the paper's device: {setting.name}", 60)
    axis.set_xlim(0, 1.02 * setting.longest_s)
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
    baseline = setting.times.pass_time(large_batch, round(setting.samples / WORKERS))
    axis.axvline(baseline, color="#b3261e", ls="--", lw=1.4, label="an epoch, large batches alone")


def _draw_choices(
    axis: Axes, setting: Setting, large_batch: int, plan: DualBatchPlan | str
) -> None:
    for n_small, points in choices(setting, large_batch).items():
        ks, sizes = zip(*points, strict=True) if points else ((), ())
        axis.plot(ks, sizes, lw=1.8, label=mix(n_small), color=STYLES[mix(n_small)]["color"])
    chosen = [] if isinstance(plan, str) or not plan.small_batch else [(plan.k, plan.small_batch)]
    ks, sizes = zip(*chosen, strict=True) if chosen else ((), ())
    axis.plot(ks, sizes, "o", color="#b3261e", ms=9, label="this plan")
    titled(axis, f"every plan with large batches of {large_batch}", 60)
    axis.set(xlabel="time over that of large batches alone (k)", ylabel="small batch size")
    axis.set_xlim(1, MOST_TIME)
    axis.set_yscale("log")
    axis.set_ylim(1, BATCHES[1])
    ticks = [1, 3, 10, 30, 100, 300, 1000]
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()


def choices(setting: Setting, large_batch: int) -> Mapping[int, list[tuple[float, float]]]:
    """The time k and the small batch size of every plan, by the number of small-batch workers."""
    by_workers: dict[int, list[tuple[float, float]]] = {}
    for n_small in range(1, WORKERS + 1):
        top = largest_k(setting.times, n_small, WORKERS - n_small, large_batch)
        by_workers[n_small] = []
        for step in range(1, 61):
            k = 1 + (min(MOST_TIME, top) - 1) * step / 60
            plan = solve(setting, k, n_small, large_batch)
            if isinstance(plan, DualBatchPlan) and plan.small_batch:
                by_workers[n_small].append((k, float(plan.small_batch)))
    return by_workers
