"""Any θ curve, live: the batch sizes, rates, updates and projected time that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from repro.adaptive import Step, ThetaController, updates
from repro.experiments.adaptive import projection
from repro.experiments.adaptive.settings import NAMES, PAPER, consecutive
from repro.plots import PALETTE, legend_below, new_axes


@dataclass(frozen=True)
class Curve:
    """A curve of θ, and the training that it is of.

    Attributes:
        task: One of `settings.TASKS`.
        theta: θ after each epoch.
        epochs: Epochs of the training.
        decay_at: Epochs after which the rate decays.
    """

    task: str
    theta: Sequence[float]
    epochs: int
    decay_at: Sequence[int] = ()


def rising(task: str, peak: int, sharpness: float = 1.0) -> Curve:
    """Return a smooth curve that rises to a peak and then falls slowly, as in Figures 2 and 6.

    Args:
        task: One of `settings.TASKS`, which gives the length.
        peak: Epoch of the peak, at least 1.
        sharpness: How fast θ rises and falls.
    """
    epochs = PAPER[task]["epochs"]
    places = np.arange(1, epochs + 1) / peak
    theta = np.maximum((places * np.exp(1 - places)) ** sharpness, np.where(places > 1, 0.35, 0))
    return Curve(task, theta.tolist(), epochs, PAPER[task].get("decay_at", ()))


def follow(curve: Curve, tolerance: float, max_batch: int) -> list[Step]:
    """Return the setting of every epoch, as the controller decides it from the curve."""
    own = PAPER[curve.task]["theta"]
    controller = ThetaController(
        own["batch"],
        max(max_batch, own["batch"]),
        own["lr"],
        tolerance=tolerance,
        decay=PAPER["decay"],
        decay_at=[n for n in curve.decay_at if n < curve.epochs],
    )
    steps = [controller.observe(0.0, [torch.zeros(1, dtype=torch.float64)])]
    for epoch, value in enumerate(curve.theta[: curve.epochs - 1], start=1):
        # A cost that falls by 1 an epoch, as far from w_0 as gives this θ.
        fall, distance = (epoch, epoch / value) if value > 0 else (value, 1.0)
        steps.append(controller.observe(-fall, [torch.tensor([distance], dtype=torch.float64)]))
    return steps


def describe(curve: Curve, steps: Sequence[Step]) -> str:
    """Return a schedule in words: K, batch sizes, updates, and time on the modelled cluster."""
    own = PAPER[curve.task]
    found, best = (
        consecutive([step.batch_size for step in steps]),
        projection.paper_schedule(curve.task, "best"),
    )
    interval = steps[-1].interval
    model = projection.fitted_to_paper(curve.task)
    samples = own["samples"]
    nodes = [n for n in projection.NODES if n <= found[-1][0]]
    alone = model.training_time(best, samples, 1)
    fastest = min(nodes, key=lambda n: model.training_time(found, samples, n))
    count, before = updates(found, samples), updates([(best[0][0], curve.epochs)], samples)
    listed = ", ".join(f"{size} for {epochs} epochs" for size, epochs in found)
    return (
        f"K = {interval or 'not found'}; batch {listed}; {count:,} updates, "
        f"{before / count:.1f} times fewer than at {best[0][0]}; simulated on {fastest} nodes of "
        f"the paper's cluster: speed-up {model.speedup(found, samples, fastest):.1f}, "
        f"{100 * model.training_time(found, samples, fastest) / alone:.2f} % of the best fixed "
        "batch's time on one node"
    )


def draw(curve: Curve, steps: Sequence[Step]) -> Figure:
    """Draw θ, batch sizes and rates of a schedule beside the paper's other strategies."""
    drawn, axes = new_axes(1, 3, 10.5, 2.9)
    theta, batches, rates = axes[0]
    epochs = np.arange(1, len(steps) + 1)
    theta.plot(np.arange(1, len(curve.theta) + 1), curve.theta, color=PALETTE[1], lw=1.8)
    if interval := steps[-1].interval:
        theta.axvline(interval, color="#c0392b", ls="--", lw=1.3, label=f"K = {interval}")
    look = {"where": "mid", "color": PALETTE[1], "lw": 1.8}
    batches.step(epochs, [s.batch_size for s in steps], label=NAMES["theta"], **look)
    rates.step(epochs, [s.lr for s in steps], **look)
    for strategy, colour in zip(("best", "scheduled"), PALETTE[2:], strict=False):
        schedule = projection.paper_schedule(curve.task, strategy)
        sizes = [size for size, count in schedule for _ in range(count)]
        sizes = (sizes + sizes[-1:] * curve.epochs)[: curve.epochs]
        other = {"where": "mid", "color": colour, "lw": 1.2, "ls": "--"}
        batches.step(epochs, sizes, label=NAMES[strategy], **other)
    batches.set_yscale("log", base=2)
    rates.set_yscale("log")
    labels = ("θ", "batch size", "learning rate μ")
    for axis, label in zip(axes[0], labels, strict=True):
        axis.set(xlabel="epoch", ylabel=label)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(drawn, 4)
    return drawn
