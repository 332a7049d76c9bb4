"""The parts of a training: model, data, plan, schedule, step."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from repro import models
from repro.datasets import ImageData, Split, TensorLoader, channel_statistics, dense
from repro.dualbatch import CyclicProgressiveSchedule, DualBatchPlan, Share, Stage, SubStage
from repro.dualbatch.shares import resized
from repro.experiments.captured import CapturedPasses, CapturedStep, low_precision
from repro.measure import TimeModel
from repro.training import evaluate_classifier

Config = Mapping[str, Any]
GATHERED_AT_ONCE = 2**28  # bytes of images
STREAMED_STATISTICS = 5_000  # images of a set that stays encoded whose mean and deviation are taken


def build_model(config: Config, num_classes: int) -> nn.Module:
    """The model with fresh weights, with dropout before its last layer (Tables 7 and 9)."""
    options = dict(config["model"])
    model = models.build(options.pop("name"), num_classes=num_classes, **options)
    last = "fc" if hasattr(model, "fc") else "classifier"  # of torchvision, of ours
    setattr(model, last, nn.Sequential(nn.Dropout(0.0), getattr(model, last)))
    return model


def plan_of(entry: Config) -> DualBatchPlan:
    """Solve the plan of a configuration."""
    options = dict(entry)
    model = TimeModel(options.pop("a"), options.pop("b"))
    return DualBatchPlan.solve(model, **options)


def schedule_of(config: Config) -> CyclicProgressiveSchedule:
    """The schedule of a configuration."""
    return CyclicProgressiveSchedule(
        [Stage(int(epochs), lr) for epochs, lr in config["stages"]],
        [
            SubStage(entry["resolution"], entry["dropout"], plan_of(entry["plan"]))
            for entry in config["sub_stages"]
        ],
        warmup_epochs=config["warmup_epochs"],
    )


class TrainingData:
    """The images of a training on a device, as mini-batches of any share or for evaluation.

    With ``held_out`` the training images that the plans leave are measured, too.

    Raises:
        ValueError: Images are no squares, or smaller than a sub-stage's resolution.
    """

    def __init__(self, config: Config, data: ImageData, device: str) -> None:
        wanted = config["sub_stages"][0]["plan"]["samples"]
        self.held_out = None
        if config.get("held_out"):
            kept, left = data.train.parted(wanted)
            self.held_out = _on(device, _three_channels(left))
        else:
            kept = data.train if wanted == len(data.train) else data.train.evenly(wanted)
        train = _three_channels(kept)
        count = min(config["test_samples"], len(data.test))
        test = _three_channels(data.test.evenly(count))
        for entry in config["sub_stages"]:  # sets come in squares, of the highest resolution
            resized(train.images.shape, entry["resolution"])
        self.augment = dict(config["augment"])
        few = min(STREAMED_STATISTICS, len(train))
        # All images where they lie in memory; of the others some, evenly.
        whole = isinstance(train.images, torch.Tensor)
        self.statistics = channel_statistics(
            train.images if whole else dense(train.evenly(few).images)
        )
        self.images, self.labels = _on(device, train)
        self.test = _on(device, test)

    def __call__(self, share: Share) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the augmented mini-batches of a share, in its order."""
        mean, std = self.statistics
        # Gathered in pieces: a share of ImageNet is tens of gigabytes.
        image_bytes = math.prod(self.images.shape[1:])
        batches = max(1, GATHERED_AT_ONCE // (share.batch_size * image_bytes))
        for number, piece in enumerate(share.indices.split(share.batch_size * batches)):
            chosen = piece.to(self.labels.device)
            yield from TensorLoader(
                dense(self.images[chosen]),
                self.labels[chosen],
                share.batch_size,
                seed=share.seed + number,
                shuffle=False,
                resolution=share.resolution,
                mean=mean,
                std=std,
                **self.augment,
            )

    def evaluation(self, config: Config, device: str) -> Callable[[nn.Module], dict[str, float]]:
        """A function that measures a model on test images, to be called after each epoch.

        On all of them after the last epoch, on ``watched_samples`` before, at their own
        resolution. The key ``held_out`` is the accuracy on images that were held out.
        """
        low = low_precision(config)
        kind = torch.device(device).type
        epochs = round(sum(count for count, _ in config["stages"]))
        watched = config.get("watched_samples")
        calls = 0

        def evaluate(model: nn.Module) -> dict[str, float]:
            nonlocal calls
            calls += 1
            part = watched if watched and calls < epochs else len(self.test[0])
            with torch.autocast(kind, low) if low else nullcontext():
                metrics = evaluate_classifier(model, self._batches(*self.test, part), device)
                if self.held_out is not None:
                    images, labels = self.held_out
                    held = self._batches(images, labels, len(images))
                    metrics["held_out"] = evaluate_classifier(model, held, device)["accuracy"]
            return metrics

        return evaluate

    def _batches(
        self, images: torch.Tensor, labels: torch.Tensor, count: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield so many images, at even distances, as they are measured."""
        mean, std = self.statistics
        size = min(500, count)
        order = torch.linspace(0, len(images) - 1, count).round().long().to(labels.device)
        # Whole where they lie in memory, else decoded in pieces.
        piece = count if isinstance(images, torch.Tensor) else 10 * size
        for chosen in order.split(piece):
            shown = dense(images[chosen])
            yield from TensorLoader(shown, labels[chosen], size, shuffle=False, mean=mean, std=std)


def compute_of(config: Config) -> dict[str, Any]:
    """How workers compute, as `train_dual_batch` takes it: types, layout, captured steps, state."""
    low, last = low_precision(config), config["channels_last"]
    state = config.get("optimizer_state", "restarted")
    options = {"optimizer_state": state, "channels_last": last}
    if not config.get("captured"):
        return options | {"autocast": low}
    return options | {"passes_fn": partial(CapturedPasses, autocast=low, channels_last=last)}


def clock_of(config: Config) -> dict[str, Any]:
    """How times vary on the virtual clock, on which ``straggler`` slows the last worker down."""
    if config.get("engine", "local") != "local":
        return {}
    plan = config["sub_stages"][-1]["plan"]
    slow = config.get("straggler")
    others = [1.0] * (plan["n_small"] + plan["n_large"] - 1)
    return {
        "jitter": config.get("jitter", 0.0),
        "slowdowns": None if slow is None else [*others, slow],
    }


def step_of(
    config: Config, model: nn.Module, resolution: int, batch: int, device: str
) -> Callable[[], Any]:
    """A training step of a model on random images."""
    layout = torch.channels_last if config["channels_last"] else torch.contiguous_format
    model.to(memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, resolution, resolution, device=device)
    images = images.contiguous(memory_format=layout)
    labels = torch.randint(config["classes"], (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    low, captured = low_precision(config), config.get("captured", False)
    loss_fn, last = nn.functional.cross_entropy, config["channels_last"]
    step = CapturedStep(model, loss_fn, optimizer, low, captured, last)
    return partial(step, images, labels)


def _three_channels(split: Split) -> Split:
    images = split.images
    return Split(images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images, split.labels)


def _on(device: str, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    assert split.labels is not None
    if not isinstance(split.images, torch.Tensor):
        return split.images, split.labels  # decoded on the host, piece by piece
    return split.images.contiguous().to(device), split.labels.to(device)
