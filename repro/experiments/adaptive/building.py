"""What a training of the paper is made of: model, data, optimizer, controller, metric."""

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from repro import models
from repro.adaptive import (
    BatchController,
    DivergenceWarning,
    FixedBatch,
    LinearScaling,
    NoiseScaleBatch,
    Saturation,
    ScheduledBatch,
    ThetaController,
    noise_scale,
)
from repro.datasets import (
    ImageData,
    PatchLoader,
    Split,
    TensorLoader,
    channel_statistics,
    low_resolution,
    noisy,
)
from repro.measure import accelerator
from repro.restoration import evaluate_psnr
from repro.training import evaluate_classifier

Config = Mapping[str, Any]
Loader = TensorLoader | PatchLoader
Evaluate = Callable[[nn.Module], dict[str, float]]


def loss_of(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the mean loss: cross-entropy, or EDSR's mean absolute error."""
    classes = config["task"] == "CIFAR"
    return nn.functional.cross_entropy if classes else nn.functional.l1_loss


def metric_of(config: Config) -> str:
    """Name the metric that is to be high: ``accuracy`` or ``psnr``."""
    return "accuracy" if config["task"] == "CIFAR" else "psnr"


def build_model(config: Config, classes: int, device: str) -> nn.Module:
    """Return the model with fresh weights."""
    options = dict(config["model"])
    name = options.pop("name")
    if config["task"] == "CIFAR":
        options["num_classes"] = classes
    model = models.build(name, **options).to(device)
    if config.get("channels_last"):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; the controller sets its rate."""
    options = dict(config["optimizer"])
    fused = {"fused": True} if accelerator.is_accelerator(next(model.parameters()).device) else {}
    if (name := options.pop("name")) == "Adam":
        options["betas"] = tuple(options["betas"])
    kind: Any = getattr(torch.optim, name)
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=1e-3, **options, **fused)
    return optimizer


def build_data(config: Config, data: ImageData, seed: int, device: str) -> tuple[Loader, Evaluate]:
    """Return the loader of the training images, on the device, and what measures a model."""
    train = _some(data.train, config["train_samples"])
    test = _some(data.val or data.test, config["test_samples"])
    low = low_precision(config)

    def autocast() -> Any:
        return torch.autocast(torch.device(device).type, low) if low else nullcontext()

    if config["task"] == "CIFAR":
        assert train.labels is not None and test.labels is not None
        images, shown = _three_channels(train.images), _three_channels(test.images)
        mean, std = channel_statistics(images)
        loader = TensorLoader(
            images,
            train.labels,
            config["controller"]["batch"],
            seed=seed,
            mean=mean,
            std=std,
            padding=config["padding"],
            flip=config["flip"],
            device=device,
        )
        held = TensorLoader(
            shown,
            test.labels,
            min(500, len(shown)),
            shuffle=False,
            mean=mean,
            std=std,
            device=device,
        )

        def evaluate(model: nn.Module) -> dict[str, float]:
            with autocast():
                return evaluate_classifier(model, held, device)

        return loader, evaluate
    inputs, targets = (_as_many(im, config["train_samples"]) for im in _pairs(config, train, 1))
    pairs = PatchLoader(
        inputs,
        targets,
        config["controller"]["batch"],
        patch=config["patch"],
        seed=seed,
        augment=True,
        device=device,
    )
    # One crop of each image, as in the paper ("1-crop validation PSNR").
    crops = PatchLoader(
        *_pairs(config, test, 2),
        min(100, len(test)),
        patch=config["patch"],
        shuffle=False,
        crop="center",
        device=device,
    )

    def restored(model: nn.Module) -> dict[str, float]:
        with autocast():
            return evaluate_psnr(model, crops, device)

    return pairs, restored


def _some(split: Split, count: int) -> Split:
    return split if count >= len(split) else split.evenly(count)


def _as_many(images: Tensor, count: int) -> Tensor:
    """Return so many pictures: each several times where they are fewer, for as many patches."""
    return images[torch.arange(count) % len(images)] if count > len(images) else images


def _three_channels(images: Tensor) -> Tensor:
    return images.expand(-1, 3, -1, -1).contiguous() if images.shape[1] == 1 else images


def _pairs(config: Config, split: Split, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: noisy and clean, or small and large."""
    if "sigma" in config:
        return noisy(split.images, config["sigma"], seed), split.images
    scale = config["model"].get("scale", 2)
    small = low_resolution(split.images, scale)
    height, width = (scale * side for side in small.shape[2:])
    return small, split.images[..., :height, :width].contiguous()


def build_controller(
    config: Config, model: nn.Module, loader: Loader, seed: int
) -> BatchController:
    """Return the controller of a strategy."""
    options = dict(config["controller"])
    if rule := options.pop("saturation", None):
        options["decay_at"] = Saturation(**rule)
    kind, size = options.pop("kind"), options.pop("batch")
    if kind == "fixed":
        return FixedBatch(size, options.pop("lr"), **options)
    if kind == "linear":
        return LinearScaling(size, **options)
    largest, lr = options.pop("max_batch"), options.pop("lr")
    if kind == "scheduled":
        return ScheduledBatch(size, largest, lr, **options)
    if kind == "noise":
        measure = partial(
            noise_scale,
            model,
            loader,
            size,
            loss_fn=loss_of(config),
            batches=options.pop("batches"),
            seed=seed,
        )
        # A single estimate, followed at once, as the records were made.
        return NoiseScaleBatch(
            size, largest, lr, lambda: float(measure()), factors=math.inf, **options
        )
    return ThetaController(size, largest, lr, **options)


_DEFAULTS = {"growth": 2, "tolerance": 0.1, "decay": 0.1, "lr_exponent": 1.0}


def schedule(config: Config, metrics: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return batch sizes, rates and K of a training's epochs, by its recorded costs and θ.

    The controller is driven anew, with one parameter that has moved as far as cost and θ say
    (equation 4). Options equal to the paper's are left out, so that a changed default is noticed.
    The noise scale's controller needs the model, and is not driven.
    """
    if config["controller"]["kind"] == "noise":
        return {}
    options = {k: v for k, v in config["controller"].items() if _DEFAULTS.get(k) != v}
    controller = build_controller({"controller": options}, nn.Module(), cast(Loader, None), 0)
    (first,) = metrics["initial_cost"]
    setting = controller.observe(first, [torch.zeros(1, dtype=torch.float64)])
    rows: dict[str, list[Any]] = {"batch_size": [], "lr": [], "interval": []}
    with warnings.catch_warnings(action="ignore", category=DivergenceWarning):
        for cost, theta in zip(metrics["train_cost"], metrics["theta"], strict=True):
            rows["batch_size"].append(setting.batch_size)
            rows["lr"].append(setting.lr)
            distance = (first - cost) / theta if theta else 0.0
            moved = torch.tensor([distance], dtype=torch.float64)
            setting = controller.observe(cost, [moved])
            rows["interval"].append(setting.interval)
    return rows


def low_precision(config: Config) -> torch.dtype | None:
    """Return the type of the forward pass under autocast, None for none."""
    name = config.get("autocast")
    return None if name is None else getattr(torch, name)
