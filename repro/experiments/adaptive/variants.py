"""Trainings with what `experiments.train` does not know: an experiment of its own.

A rate that decays where the cost saturates (section III-E), LARS and LAMB (section V), and the
choices that the paper leaves open: how PSNR is measured, and at which rate a last, shorter
mini-batch is trained.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from repro.adaptive import NoImprovement, set_lr
from repro.datasets import ImageData, PatchLoader
from repro.experiments.adaptive import building
from repro.experiments.adaptive.building import Config
from repro.experiments.adaptive.experiments import Training
from repro.experiments.adaptive.layerwise import LAMB, LARS
from repro.experiments.captured import CapturedStep
from repro.experiments.outcome import Outcome
from repro.measure import Timing
from repro.restoration import evaluate_psnr

Step = Callable[[Tensor, Tensor], Tensor]
_LAYERWISE: dict[str, Any] = {"LARS": LARS, "LAMB": LAMB}
_LUMA = (65.481 / 255, 128.553 / 255, 24.966 / 255)  # ITU-R BT.601, of colours in [0, 1]


def start(config: Config, seed: int, data: ImageData, device: str) -> Training:
    """Build a training by all that its configuration says, and show the controller w_0.

    Of a configuration that `experiments.train` knows it is the same training.

    Raises:
        ValueError: The configuration has a choice that there is not.
    """
    optimizer = dict(config["optimizer"])
    kind = _LAYERWISE.get(optimizer.pop("name"))
    plain = {**config, **({"optimizer": {"name": "SGD"}} if kind else {})}
    run = Training.start(plain, seed, data, device)
    run.config = config
    if kind:
        run.optimizer = kind(run.model.parameters(), lr=1e-3, **optimizer)
    if config.get("psnr", "rgb") != "rgb":
        run.evaluate = _evaluate(config, data, device)
    return run


def stepping(run: Training, step: Step) -> Step:
    """Return the step by what is chosen for a last, shorter mini-batch.

    Raises:
        ValueError: There is no such choice.
    """
    chosen = run.config.get("last_batch", "full_rate")
    if chosen == "full_rate":
        return step
    if chosen != "in_proportion":
        raise ValueError(f"last_batch is {chosen!r}; choose full_rate, in_proportion")

    def in_proportion(inputs: Tensor, targets: Tensor) -> Tensor:
        share = len(inputs) / run.setting.batch_size
        if share < 1:  # the last of an epoch
            set_lr(run.optimizer, share * run.setting.lr)
        return step(inputs, targets)

    return in_proportion


def train(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Train by one strategy in one process, as `experiments.train` does."""
    assert data is not None
    run = start(config, seed, data, device)
    step = stepping(
        run,
        CapturedStep(
            run.model,
            building.loss_of(config),
            run.optimizer,
            building.low_precision(config),
            config["captured"],
            config["channels_last"],
        ),
    )
    while run.epoch(step, device):
        pass
    completed = len(run.history["train_cost"])
    stop: NoImprovement | None = run.stop
    return Outcome(
        metrics=run.history
        | {
            "completed": completed,
            "diverged": run.diverged,
            "stopped": stop is not None and stop.patience <= completed - stop.best_epoch,
            "best_epoch": stop.best_epoch if stop else None,
        },
        timings={"epoch": Timing(tuple(run.history["time_s"]), warmup=0)},
    )


class _Shown(nn.Module):
    """A model whose images are clipped and then cut, as targets are."""

    def __init__(self, model: nn.Module, shown: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.shown = model, shown

    def forward(self, inputs: Tensor) -> Tensor:
        return self.shown(self.model(inputs).float().clamp(0, 1))


def shown_of(choice: str, scale: int) -> Callable[[Tensor], Tensor]:
    """Return what of images (B, C, H, W) in [0, 1] PSNR is measured on.

    Args:
        choice: ``rgb``: all of it; ``rgb_shaved``: without a border of the scale and 6 pixels
            (EDSR's validation on DIV2K); ``y_shaved``: of the luma (ITU-R BT.601) without a border
            of as many pixels as the scale.
        scale: Of the super-resolution.

    Raises:
        ValueError: There is no such choice.
    """
    borders = {"rgb": 0, "rgb_shaved": scale + 6, "y_shaved": scale}
    if choice not in borders:
        raise ValueError(f"psnr is {choice!r}; choose {', '.join(borders)}")
    border = borders[choice]

    def shown(images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        images = images[..., border : height - border, border : width - border]
        if choice == "y_shaved" and images.shape[1] == 3:
            weights = images.new_tensor(_LUMA).view(1, 3, 1, 1)
            images = (images * weights).sum(1, keepdim=True) + 16 / 255
        return images

    return shown


def _evaluate(config: Config, data: ImageData, device: str) -> building.Evaluate:
    """Return what measures a model, on the same crops as `building.build_data` takes."""
    shown = shown_of(config["psnr"], config["model"].get("scale", 2))
    test = building._some(data.val or data.test, config["test_samples"])
    crops = PatchLoader(
        *building._pairs(config, test, 2),
        min(100, len(test)),
        patch=config["patch"],
        shuffle=False,
        crop="center",
        device=device,
    )
    low = building.low_precision(config)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in crops:
            yield inputs, shown(targets)

    def evaluate(model: nn.Module) -> dict[str, float]:
        with torch.autocast(torch.device(device).type, low) if low else nullcontext():
            return evaluate_psnr(_Shown(model, shown), batches(), device)

    return evaluate
