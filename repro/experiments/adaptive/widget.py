"""Any θ curve, live: the batch sizes, updates and projected time that follow from it."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from matplotlib.figure import Figure

from repro.adaptive import Step, ThetaController, updates
from repro.experiments.adaptive import projection
from repro.experiments.adaptive.read import LOOKS
from repro.experiments.adaptive.runs import NAMES, PAPER, consecutive, paper_schedule
from repro.experiments.explorer import Control, Explorer
from repro.experiments.query import Results
from repro.plots import INK, legend_below, new_axes, sign

LARGEST = 2**13  # batch size that a slider reaches


def explorers(_: Callable[[str], Results]) -> list[Explorer]:
    """Return the widget, which needs no records."""

    def computed(task: str, peak: int, tolerance: float, largest: int) -> tuple[str, Figure]:
        theta = rising(task, peak)
        steps = follow(task, theta, tolerance, largest)
        return describe(task, steps), draw(task, theta, steps)

    tasks = {"ResNet-20, CIFAR-10": "CIFAR", "EDSR, DIV2K": "DIV2K", "EDSR, Phantom": "Phantom"}
    controls = {
        "task": Control("training", tasks, "ResNet-20, CIFAR-10", 3, listed=True),
        "peak": Control("θ peaks in epoch", {str(n): n for n in range(1, 81)}, "6", 5),
        "tolerance": Control(
            "change of θ that counts as none", {f"{n} %": n / 100 for n in range(51)}, "10 %", 2
        ),
        "largest": Control("largest batch", {f"{2**n:,}": 2**n for n in range(5, 14)}, "2,048"),
    }
    return [Explorer("adaptive", controls, computed)]


def rising(task: str, peak: int) -> list[float]:
    """θ by epoch: smooth, with a peak in one from 1 on, then a slow fall, as in Figures 2 and 6."""
    relative = np.arange(1, PAPER[task]["epochs"] + 1) / peak
    return np.maximum(relative * np.exp(1 - relative), np.where(relative > 1, 0.35, 0)).tolist()


def follow(task: str, theta: Sequence[float], tolerance: float, max_batch: int) -> list[Step]:
    """Let the controller decide on θ; the setting of every epoch."""
    paper = PAPER[task]["theta"]
    controller = ThetaController(
        paper["batch"],
        max(max_batch, paper["batch"]),
        paper["lr"],
        tolerance=tolerance,
        decay=PAPER["decay"],
        decay_at=PAPER[task].get("decay_at", ()),
    )
    steps = [controller.observe(0.0, [torch.zeros(1, dtype=torch.float64)])]
    for epoch, value in enumerate(theta[:-1], start=1):
        # A cost that falls by 1 an epoch, as far from w_0 as gives this θ.
        moved = torch.tensor([epoch / value], dtype=torch.float64)
        steps.append(controller.observe(-epoch, [moved]))
    return steps


def describe(task: str, steps: Sequence[Step]) -> str:
    """A schedule in words: batch sizes, updates, time on a modelled cluster."""
    schedule = consecutive(step.batch_size for step in steps)
    best, samples = paper_schedule(task, "best"), PAPER[task]["samples"]
    model = projection.fitted_to_paper(task)
    nodes = [n for n in projection.NODES if n <= schedule[-1][0]]
    speedup, fastest = max((model.speedup(schedule, samples, n), n) for n in nodes)
    count, before = updates(schedule, samples), updates([(best[0][0], len(steps))], samples)
    listed = ", ".join(f"{size} for {epochs} epochs" for size, epochs in schedule)
    return (
        f"K = {steps[-1].interval or 'not found'}; batch {listed};\n{count:,} updates, "
        f"{before / count:.1f} times fewer than at {best[0][0]};\nsimulated on {fastest} nodes of "
        f"the paper's cluster: speed-up {speedup:.1f}"
    )


def draw(task: str, curve: Sequence[float], steps: Sequence[Step]) -> Figure:
    """Draw θ and batch sizes by epoch, on axes that are the same for a task."""
    drawn, axes = new_axes(1, 2, 10, 3.0)
    theta, batches = axes[0]
    epochs, interval = np.arange(1, len(steps) + 1), steps[-1].interval
    theta.plot(epochs, curve, color=INK, lw=1.8, label="θ")
    theta.axvline(interval or np.nan, color="#c0392b", ls="--", lw=1.3, label="epoch K, if found")
    schedules = {"theta": consecutive(step.batch_size for step in steps)}
    schedules |= {name: paper_schedule(task, name) for name in ("best", "scheduled")}
    for strategy, schedule in schedules.items():
        sizes = [size for size, count in schedule for _ in range(count)][: len(steps)]
        color = LOOKS[NAMES[strategy]]["color"]
        batches.step(
            range(1, len(sizes) + 1), sizes, where="mid", label=NAMES[strategy], color=color
        )
    theta.set(ylim=(0, 1.08), ylabel="θ (its peak is 1)", xlim=(0, min(len(steps), 200)))
    batches.set_yscale("log", base=2)
    batches.yaxis.set_major_formatter("{x:g}")
    batches.set(ylim=(8, 2 * LARGEST), ylabel="mini-batch size")
    for axis in (theta, batches):
        axis.set_xlabel("epoch")
    legend_below(drawn, 5)
    sign(
        drawn,
        "SIMULATED: batches as our controller decides on a θ that is made up, on a model of the "
        "paper's cluster fitted to its speed-ups; nothing was trained.",
    )
    return drawn
