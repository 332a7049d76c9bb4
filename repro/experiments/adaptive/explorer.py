"""Any θ curve, live: the batch sizes, rates, updates and projected time that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure

from repro.adaptive import Step, ThetaController, updates
from repro.experiments.adaptive import drawings, projection
from repro.experiments.adaptive.grids import PAPER
from repro.experiments.adaptive.reading import NAMES, consecutive


@dataclass(frozen=True)
class Curve:
    """A curve of θ, and the training that it is of.

    Attributes:
        task: One of `grids.TASKS`.
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
        task: One of `grids.TASKS`, which gives the length.
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
        own["batch"], max(max_batch, own["batch"]), own["lr"], tolerance=tolerance,
        decay=PAPER["decay"], decay_at=[n for n in curve.decay_at if n < curve.epochs],
    )  # fmt: skip
    # Parameters at distance 1 from w_0, so that θ is the fall of the cost.
    start, moved = torch.zeros(1), torch.ones(1)
    steps = [controller.observe(0.0, [start])]
    for value in curve.theta[: curve.epochs - 1]:
        steps.append(controller.observe(-value, [moved]))
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
    others = {}
    for strategy in ("best", "scheduled"):
        sizes = [n for n, epochs in projection.paper_schedule(curve.task, strategy)
                 for _ in range(epochs)]  # fmt: skip
        others[NAMES[strategy]] = (sizes + sizes[-1:] * curve.epochs)[: curve.epochs]
    return drawings.planned(
        curve.theta, [s.batch_size for s in steps], [s.lr for s in steps], steps[-1].interval,
        others,
    )  # fmt: skip
