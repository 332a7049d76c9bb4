"""What a training of the paper is made of: model, loss, optimizer, data, step."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from repro import models
from repro.datasets import ImageData, Split, TensorLoader, channel_statistics
from repro.experiments.captured import CapturedStep
from repro.experiments.mbs.settings import AS_IN_PAPER
from repro.mbs import MicroBatchStreamer
from repro.training import Step, evaluate_binary_segmentation, evaluate_classifier, plain_step

Config = Mapping[str, Any]
Batch = tuple[torch.Tensor, torch.Tensor]


def bce_dice_loss(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy plus 1 - Dice over the whole batch (equations 18 to 20).

    The Dice coefficient takes the predicted probabilities, which have a gradient, where equation
    18 speaks of a binary image.

    Args:
        logits: (B, 1, H, W).
        masks: (B, H, W), foreground above 0.
    """
    logits = logits.squeeze(1)
    truth = (masks > 0).to(logits.dtype)
    predicted = logits.sigmoid()
    overlap = 2 * (predicted * truth).sum()
    dice = overlap / (predicted.sum() + truth.sum()).clamp_min(1e-6)
    return nn.functional.binary_cross_entropy_with_logits(logits, truth) + 1 - dice


def is_segmentation(config: Config) -> bool:
    """Whether the configuration trains U-Net on masks."""
    return config["role"] == "U-Net"


def loss_of(config: Config) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss of section 4.2.4."""
    return bce_dice_loss if is_segmentation(config) else nn.functional.cross_entropy


def build_model(config: Config, data: ImageData, device: str) -> nn.Module:
    """Return the model with fresh weights, on the device."""
    options = dict(config["model"])
    num_classes = 1 if is_segmentation(config) else data.num_classes
    model = models.build(options.pop("name"), num_classes=num_classes, **options).to(device)
    if config.get("channels_last"):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of section 4.2.4."""
    options = {k: v for k, v in config["optimizer"].items() if k not in ("name", "schedule")}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[config["optimizer"]["name"]]
    return kind(model.parameters(), **options)


def images_and_targets(config: Config, split: Split, samples: int | None) -> Batch:
    """Return the split's images in three channels, and its labels or masks.

    With more `samples` than images, images come several times, each augmented by itself.
    """
    targets = split.masks if is_segmentation(config) else split.labels
    if targets is None:
        wanted = "masks" if is_segmentation(config) else "labels"
        raise ValueError(f"the dataset has no {wanted}, which {config['role']} is trained on")
    count = len(split) if samples is None else samples
    # Sets on disk are ordered by class: a smaller share is taken evenly.
    if count < len(split):
        chosen = torch.linspace(0, len(split) - 1, count).round().long()
    else:
        chosen = torch.arange(count) % len(split)
    images = split.images[chosen]
    return images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images, targets[chosen]


def train_loader(
    config: Config, data: ImageData, batch_size: int, seed: int, samples: int | None
) -> TensorLoader:
    """Return the loader of augmented mini-batches, in host memory as in the paper."""
    images, targets = images_and_targets(config, data.train, samples)
    mean, std = _statistics(config, data)
    return TensorLoader(
        images,
        targets,
        batch_size,
        seed=seed,
        mean=mean,
        std=std,
        device="cpu",
        **config["augment"],
    )


def _statistics(config: Config, data: ImageData) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of the training images' channels, measured once."""
    if data.fingerprint not in _statistics_of:
        # Where only memory and time count, some are enough, and all take half a minute.
        some = 256 if config.get("resolution") == AS_IN_PAPER else None
        images, _ = images_and_targets(config, data.train, some)
        _statistics_of[data.fingerprint] = channel_statistics(images)
    return _statistics_of[data.fingerprint]


_statistics_of: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {}


def evaluation(
    config: Config, data: ImageData, model: nn.Module, device: str
) -> Callable[[], dict[str, float]]:
    """Return a function that measures the model on the test split."""
    samples = config["test_samples"]
    samples = None if samples is None else min(samples, len(data.test))  # none counts twice
    images, targets = images_and_targets(config, data.test, samples)
    mean, std = _statistics(config, data)
    # Whole test images are larger than the crops trained on; the memory limit holds here too.
    size = min(4 if is_segmentation(config) and device != "cpu" else 16, len(images))
    low = low_precision(config)
    if low is not None:  # small images on a large device
        size = min(128, len(images))
    loader = TensorLoader(images, targets, size, shuffle=False, mean=mean, std=std, device="cpu")
    evaluate = evaluate_binary_segmentation if is_segmentation(config) else evaluate_classifier

    def measure() -> dict[str, float]:
        with torch.autocast(torch.device(device).type, low) if low else nullcontext():
            return evaluate(model, loader, device)

    return measure


def training_step(
    config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> Step:
    """Return a training step, streamed by Algorithm 1 where the configuration has micro-batches."""
    loss_fn, low = loss_of(config), low_precision(config)
    if config["micro_batch"] is None:
        if low is not None:
            return CapturedStep(model, loss_fn, optimizer, low, captured=False)
        return plain_step(model, loss_fn, optimizer, device)
    streamer = MicroBatchStreamer(
        model, loss_fn, config["micro_batch"], device=device, normalization="paper", autocast=low
    )

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = streamer.backward(inputs, targets).loss
        optimizer.step()
        return loss

    return step


def low_precision(config: Config) -> torch.dtype | None:
    """Return the type of forward passes under autocast, None for float32."""
    return getattr(torch, config["autocast"]) if config.get("autocast") else None
