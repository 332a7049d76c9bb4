"""The parts of a training: model, data, optimizer, controller, metric."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from repro import adaptive, datasets
from repro.experiments.captured import lower, model_of
from repro.experiments.design import Config
from repro.measure import accelerator
from repro.training import evaluate_classifier, evaluate_psnr

Loader = datasets.TensorLoader | datasets.PatchLoader
Evaluate = Callable[[nn.Module], dict[str, float]]


def loss_of(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean loss: cross-entropy, or EDSR's mean absolute error."""
    classes = config["task"] == "CIFAR"
    return nn.functional.cross_entropy if classes else nn.functional.l1_loss


def build_model(config: Config, classes: int, device: str) -> nn.Module:
    """Build the model with fresh weights."""
    options = {"num_classes": classes} if config["task"] == "CIFAR" else {}
    return model_of(config, device, **options)


# Optimizers whose step of a layer follows the layer's norm (section V). Differs from the papers:
# vectors (biases, scales and shifts of normalisation) take the plain step, without weight decay,
# since the norm of a vector that begins at 0 says nothing.


class _Layerwise(torch.optim.Optimizer):
    """Goes through the parameters that have a gradient; options are those of the update."""

    def __init__(self, params: Iterable[Tensor], lr: float, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group, self.state[p])

    def _update(self, p: Tensor, gradient: Tensor, group: Any, state: Any) -> None:
        raise NotImplementedError


def _ratio(weights: Tensor, update: Tensor, more: Tensor | float = 0.0) -> Tensor:
    """‖w‖ / (‖update‖ + more), 1 where either norm is 0."""
    weights_norm, update_norm = torch.linalg.vector_norm(weights), torch.linalg.vector_norm(update)
    both = (weights_norm > 0) & (update_norm > 0)
    return torch.where(both, weights_norm / (update_norm + more), torch.ones_like(weights_norm))


class LARS(_Layerwise):
    """Momentum SGD with a rate of each layer's own.

    Source: You, Gitman, Ginsburg, "Scaling SGD batch size to 32K for ImageNet training"
    (arXiv:1708.03888), equation 6 and Algorithm 1: `lr` is γ, `momentum` m, `weight_decay` β and
    `trust` η, the share of its norm by which a layer moves at a rate of 1.
    """

    def _update(self, p: Tensor, gradient: Tensor, group: Any, state: Any) -> None:
        if p.ndim > 1:
            decay = group["weight_decay"]
            more = decay * torch.linalg.vector_norm(p)
            local = group["trust"] * _ratio(p, gradient, more)  # equation 6
            gradient = local * (gradient + decay * p)
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(p)
        velocity = state["velocity"].mul_(group["momentum"]).add_(gradient, alpha=group["lr"])
        p.sub_(velocity)


class LAMB(_Layerwise):
    """Adam with a rate of each layer's own.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
    (arXiv:1904.00962), Algorithm 2, with φ the identity: `lr` is η, `betas` are of the running
    means of gradient and squared gradient, `eps` is ε and `weight_decay` λ.
    """

    def _update(self, p: Tensor, gradient: Tensor, group: Any, state: Any) -> None:
        if not state:
            state["step"] = 0
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        first, second = group["betas"]
        mean = state["mean"].lerp_(gradient, 1 - first)
        square = state["square"].lerp_(gradient.square(), 1 - second)
        mean = mean / (1 - first ** state["step"])
        update = mean / ((square / (1 - second ** state["step"])).sqrt() + group["eps"])
        if p.ndim > 1:
            update = update + group["weight_decay"] * p
            update = _ratio(p, update) * update
        p.sub_(update, alpha=group["lr"])


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer; the controller sets its rate."""
    options = dict(config["optimizer"])
    name = options.pop("name")
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    kind: Any = {"LARS": LARS, "LAMB": LAMB}.get(name) or getattr(torch.optim, name)
    if kind not in (LARS, LAMB) and accelerator.is_accelerator(next(model.parameters()).device):
        options["fused"] = True
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=1e-3, **options)
    return optimizer


def build_data(
    config: Config, data: datasets.ImageData, seed: int, device: str
) -> tuple[Loader, Evaluate]:
    """The loader of training images, on the device, and a function that measures a model."""
    many, size, held = config["train_samples"], config["controller"]["batch"], data.val or data.test
    train = data.train.evenly(min(many, len(data.train)))
    test = held.evenly(min(config["test_samples"], len(held)))
    loader: Loader
    measure: Evaluate
    if config["task"] == "CIFAR":
        assert train.labels is not None and test.labels is not None
        images, shown = (s.images.expand(-1, 3, -1, -1).contiguous() for s in (train, test))
        mean, std = datasets.channel_statistics(images)
        options: dict[str, Any] = {"mean": mean, "std": std, "device": device}
        moved = {"seed": seed, "padding": config["padding"], "flip": config["flip"]}
        loader = datasets.TensorLoader(images, train.labels, size, **moved, **options)
        options |= {"shuffle": False}
        batches = datasets.TensorLoader(shown, test.labels, min(500, len(shown)), **options)
        measure = partial(evaluate_classifier, batches=batches, device=device)
    else:
        inputs, targets = _pairs(config, train, 1)
        if many > len(train):  # each picture several times, for as many patches
            inputs, targets = (p[torch.arange(many) % len(p)] for p in (inputs, targets))
        options = {"patch": config["patch"], "device": device}
        loader = datasets.PatchLoader(inputs, targets, size, seed=seed, augment=True, **options)
        # One crop of each image, as in the paper ("1-crop validation PSNR").
        few, crop = min(100, len(test)), "center"
        crops = datasets.PatchLoader(
            *_pairs(config, test, 2), few, shuffle=False, crop=crop, **options
        )
        measure = partial(evaluate_psnr, batches=crops, device=device)
    return loader, lower(config, device)(measure)


def _pairs(config: Config, split: datasets.Split, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets: noisy and clean, or small and large."""
    if "sigma" in config:
        return datasets.noisy(split.images, config["sigma"], seed), split.images
    scale = config["model"].get("scale", 2)
    small = datasets.low_resolution(split.images, scale)
    height, width = (scale * side for side in small.shape[2:])
    return small, split.images[..., :height, :width].contiguous()


def build_controller(
    config: Config, model: nn.Module, loader: Loader, seed: int
) -> adaptive.BatchController:
    """Build the controller of a strategy."""
    options = dict(config["controller"])
    if rule := options.pop("saturation", None):
        options["decay_at"] = adaptive.Saturation(**rule)
    kind, size = options.pop("kind"), options.pop("batch")
    if kind == "linear":
        return adaptive.LinearScaling(size, **options)
    lr = options.pop("lr")
    if kind == "fixed":
        return adaptive.FixedBatch(size, lr, **options)
    largest = options.pop("max_batch")
    if kind == "scheduled":
        return adaptive.ScheduledBatch(size, largest, lr, **options)
    if kind == "noise":
        count = options.pop("batches")
        given = {"loss_fn": loss_of(config), "batches": count, "seed": seed}
        measure = partial(adaptive.noise_scale, model, loader, size, **given)
        # A single estimate, followed at once, as the records were made.
        options["factors"] = math.inf
        return adaptive.NoiseScaleBatch(size, largest, lr, lambda: float(measure()), **options)
    return adaptive.ThetaController(size, largest, lr, **options)


_DEFAULTS = {"growth": 2, "tolerance": 0.1, "decay": 0.1, "lr_exponent": 1.0}


def schedule(config: Config, metrics: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Derive batch sizes, rates and K of a training's epochs from its recorded costs and θ.

    The controller is driven anew, with one parameter that has moved as far as both say (equation
    4). Options equal to the paper's are left out, so that a changed default is noticed.
    """
    if config["controller"]["kind"] == "noise":
        return {}
    options = {k: v for k, v in config["controller"].items() if _DEFAULTS.get(k) != v}
    controller = build_controller({"controller": options}, nn.Module(), cast(Loader, None), 0)
    (first,) = metrics["initial_cost"]
    setting = controller.observe(first, [torch.zeros(1, dtype=torch.float64)])
    rows: dict[str, list[Any]] = {"batch_size": [], "lr": [], "interval": []}
    with warnings.catch_warnings(action="ignore", category=adaptive.DivergenceWarning):
        for cost, theta in zip(metrics["train_cost"], metrics["theta"], strict=True):
            rows["batch_size"].append(setting.batch_size)
            rows["lr"].append(setting.lr)
            distance = (first - cost) / theta if theta else 0.0
            moved = torch.tensor([distance], dtype=torch.float64)
            setting = controller.observe(cost, [moved])
            rows["interval"].append(setting.interval)
    return rows
