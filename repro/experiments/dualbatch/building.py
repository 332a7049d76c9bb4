"""The parts of a training: model, data, plan, schedule, step."""

import math
from collections.abc import Callable
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from repro.datasets import ImageData, Split, TensorLoader, channel_statistics, dense
from repro.dualbatch import DualBatchPlan, Share
from repro.dualbatch.shares import Batches, resized
from repro.experiments.captured import CapturedPasses, captured_step, low_precision, lower, model_of
from repro.experiments.design import Config
from repro.experiments.dualbatch.runs import WORKERS
from repro.measure import TimeModel
from repro.training import evaluate_classifier

GATHERED_AT_ONCE = 2**28  # bytes of images
STREAMED_STATISTICS = 5_000  # images of a set that stays encoded whose mean and deviation are taken


def build_model(config: Config, num_classes: int, device: str = "cpu") -> nn.Module:
    """The model with fresh weights, with dropout before its last layer (Tables 7 and 9)."""
    model = model_of(config, device, num_classes=num_classes)
    last = "fc" if hasattr(model, "fc") else "classifier"  # of torchvision, of ours
    setattr(model, last, nn.Sequential(nn.Dropout(0.0), getattr(model, last)))
    return model


def plan_of(entry: Config) -> DualBatchPlan:
    """Solve the plan of a configuration."""
    options = dict(entry)
    model = TimeModel(options.pop("a"), options.pop("b"))
    return DualBatchPlan.solve(model, **options)


class TrainingData:
    """The images of a training on a device, as mini-batches of any share or for evaluation.

    With ``held_out`` the training images that the plans leave are measured, too.
    """

    def __init__(self, config: Config, data: ImageData, device: str) -> None:
        wanted, self.held_out = config["sub_stages"][0]["plan"]["samples"], None
        if config.get("held_out"):
            kept, left = data.train.parted(wanted)
            self.held_out = _on(device, left)
        else:
            kept = data.train.evenly(wanted)
        train = _three_channels(kept)
        for entry in config["sub_stages"]:  # sets come in squares, of the highest resolution
            resized(train.images.shape, entry["resolution"])
        self.augment = dict(config["augment"])
        # All images where they lie in memory; of the others some, evenly.
        whole = isinstance(train.images, Tensor)
        some = train if whole else train.evenly(min(STREAMED_STATISTICS, len(train)))
        self.statistics = channel_statistics(dense(some.images))
        self.images, self.labels = _on(device, train)
        self.test = _on(device, data.test.evenly(min(config["test_samples"], len(data.test))))

    def __call__(self, share: Share) -> Batches:
        """Yield the augmented mini-batches of a share, in its order."""
        # Gathered in pieces: a share of ImageNet is tens of gigabytes.
        image_bytes = math.prod(self.images.shape[1:])
        batches = max(1, GATHERED_AT_ONCE // (share.batch_size * image_bytes))
        size, options = share.batch_size, {"resolution": share.resolution, **self.augment}
        for number, piece in enumerate(share.indices.split(size * batches)):
            seed = share.seed + number
            yield from self.loader(self.images, self.labels, piece, size, seed=seed, **options)

    def loader(
        self, images: Tensor, labels: Tensor, indices: Tensor, size: int, **options: Any
    ) -> TensorLoader:
        """Load the images of these indices, normalised, in mini-batches of a size."""
        mean, std = self.statistics
        chosen = indices.to(labels.device)
        options |= {"shuffle": False, "mean": mean, "std": std}
        return TensorLoader(dense(images[chosen]), labels[chosen], size, **options)

    def evaluation(self, config: Config, device: str) -> Callable[[nn.Module], dict[str, float]]:
        """A function that measures a model on test images, to be called after each epoch.

        On all of them after the last epoch, on ``watched_samples`` before, at their own resolution.
        """
        every = len(self.test[0])
        before = round(sum(count for count, _ in config["stages"])) - 1
        counts = chain([config.get("watched_samples") or every] * before, repeat(every))

        def evaluate(model: nn.Module) -> dict[str, float]:
            with lower(config, device):
                shown = self._batches(*self.test, next(counts))
                metrics = evaluate_classifier(model, shown, device)
                if self.held_out is not None:
                    held = self._batches(*self.held_out, len(self.held_out[0]))
                    metrics["held_out"] = evaluate_classifier(model, held, device)["accuracy"]
            return metrics

        return evaluate

    def _batches(self, images: Tensor, labels: Tensor, count: int) -> Batches:
        """Yield so many images, at even distances, as they are measured."""
        size = min(500, count)
        order = torch.linspace(0, len(images) - 1, count).round().long()
        # Whole where they lie in memory, else decoded in pieces.
        piece = count if isinstance(images, Tensor) else 10 * size
        for chosen in order.split(piece):
            yield from self.loader(images, labels, chosen, size)


def compute_of(config: Config) -> dict[str, Any]:
    """How workers compute, as `train_dual_batch` takes it: types, layout, captured steps, state."""
    low, last = low_precision(config), config["channels_last"]
    state = config.get("optimizer_state", "restarted")
    options = {"optimizer_state": state, "channels_last": last}
    if config.get("captured"):
        return options | {"passes_fn": partial(CapturedPasses, autocast=low, channels_last=last)}
    return options | {"autocast": low}


def clock_of(config: Config) -> dict[str, Any]:
    """How times vary on the virtual clock, on which ``straggler`` slows the last worker down."""
    if config.get("engine", "local") != "local":
        return {}
    slow = config.get("straggler")
    slowdowns = None if slow is None else [*[1.0] * (WORKERS - 1), slow]
    return {"jitter": config.get("jitter", 0.0), "slowdowns": slowdowns}


def step_of(
    config: Config, model: nn.Module, resolution: int, batch: int, device: str
) -> Callable[[], Any]:
    """A training step of a model on random images."""
    layout = torch.channels_last if config["channels_last"] else torch.contiguous_format
    images = torch.randn(batch, 3, resolution, resolution, device=device)
    images = images.contiguous(memory_format=layout)
    labels = torch.randint(config["classes"], (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    low, captured = low_precision(config), config.get("captured", False)
    loss_fn, last = nn.functional.cross_entropy, config["channels_last"]
    passes = CapturedPasses(model, loss_fn, low, captured, last)
    return partial(captured_step(passes, optimizer), images, labels)


def _three_channels(split: Split) -> Split:
    images = split.images
    return Split(images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images, split.labels)


def _on(device: str, split: Split) -> tuple[Tensor, Tensor]:
    """Images of three channels with their labels, on the device where they lie in memory."""
    images, labels = _three_channels(split).images, split.labels
    assert labels is not None
    if not isinstance(images, Tensor):
        return images, labels  # decoded on the host, piece by piece
    return images.contiguous().to(device), labels.to(device)
