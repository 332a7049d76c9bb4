"""Any plan, live: its batch sizes and shares, and every worker's steps."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from repro import plots
from repro.dualbatch import DualBatchPlan
from repro.experiments.dualbatch.drawing import LARGE, SMALL, STYLES, titled
from repro.experiments.dualbatch.runs import PAPER, WORKERS
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


def solve(setting: Setting, k: float, n_small: int, large_batch: int) -> DualBatchPlan | str:
    """The plan, or in words why there is none."""
    try:
        return DualBatchPlan.solve(
            setting.times, k, n_small, WORKERS - n_small, large_batch, setting.samples, "floor"
        )
    except ValueError as error:
        return str(error)


def describe(plan: DualBatchPlan | str) -> str:
    """A plan in a few words, with the paper's symbols, or why there is none."""
    if isinstance(plan, str):
        return f"no such plan: {plan}"
    parts = []
    for kind in dict.fromkeys(plan.kinds):
        letter = kind[0].upper()
        parts.append(
            f"{plan.kinds.count(kind)} {kind}: B_{letter} = {plan.batch_of(kind)}, "
            f"d_{letter} = {plan.share_of(kind):,}"
        )
    times = " and ".join(f"{plan.time_of(kind):.3f}" for kind in dict.fromkeys(plan.kinds))
    factor = f"factor {plan.update_factor:.3f}"
    return f"k = {plan.k:g}; {'; '.join(parts)}; {factor}; {times} s an epoch"


def draw(setting: Setting, large_batch: int, plan: DualBatchPlan | str) -> Figure:
    """Draw every worker's steps in an epoch, and when one with large batches alone would end.

    Axes are the same for whatever the widget's sliders are set to.
    """
    figure, axes = plots.new_axes(1, 1, 9.8, 3.2)
    axis = axes[0, 0]
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
            steps, lane = steps_of(plan, row), (row - 0.36, 0.72)
            axis.broken_barh(steps, lane, color=colours[kind], edgecolor="white", lw=0.3)
    baseline = setting.times.pass_time(large_batch, round(setting.samples / WORKERS))
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
