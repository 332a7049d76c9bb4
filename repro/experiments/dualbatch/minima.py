"""How gradients scatter and how the loss rises around the end of a training: what is executed."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from repro.datasets import ImageData, TensorLoader, dense
from repro.dualbatch import train_dual_batch
from repro.experiments.dualbatch.building import (
    Config,
    TrainingData,
    build_model,
    clock_of,
    compute_of,
    plan_of,
    schedule_of,
    state_of,
)
from repro.experiments.outcome import Outcome

Batch = tuple[Tensor, Tensor]
_AT_ONCE = 500  # images in a forward pass that keeps nothing


def flatness(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Train on the local engine; then measure gradients and losses around the last weights.

    Gradients are of mini-batches drawn with replacement, without augmentation, normalised by their
    own statistics as in training. Losses are of the model as it is tested, in single precision.
    """
    assert data is not None
    images = TrainingData(config, data, device)
    result = train_dual_batch(
        partial(build_model, config, data.num_classes),
        images,
        plan_of(config["sub_stages"][-1]["plan"]),
        schedule_of(config),
        sync=config["sync"],
        factor=config["factor"],
        seed=seed,
        device=device,
        optimizer_state=state_of(config),
        **compute_of(config),
        **clock_of(config),
        evaluate=images.evaluation(config, device),
    )
    model = build_model(config, data.num_classes).to(device)
    model.load_state_dict(result.state)
    model.eval()
    train = _plain(images, (images.images, images.labels), config["loss_samples"])
    test = _plain(images, images.test, config["loss_samples"])
    drawn = torch.Generator().manual_seed(seed)
    directions = [filter_normalised(model, drawn) for _ in range(config["directions"])]
    at_rest = loss_of(model, train)
    rises = [
        [loss_at(model, direction, size, train) - at_rest for direction in directions]
        for size in config["sizes"]
    ]
    last = result.history[-1]
    return Outcome(
        {
            "accuracy": last.metrics["accuracy"],
            "test_loss": last.metrics["test_loss"],
            "train_loss": at_rest,
            "wall_time_s": last.wall_time_s,
            "variances": [
                gradient_variance(model, train, n, config["draws"], drawn)
                for n in config["variance_batches"]
            ],
            "rises": rises,  # by size, then by direction
            "worst_rise": worst_rise(model, train, config["worst_size"]),
            "line": {
                name: [loss_at(model, directions[0], point, batch) for point in config["places"]]
                for name, batch in (("train", train), ("test", test))
            },
        }
    )


def _plain(images: TrainingData, of: Batch, count: int) -> Batch:
    """Return some images of all, the same for every seed, as the model is tested on them."""
    inputs, labels = of
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[:count].to(labels.device)
    mean, std = images.statistics
    (batch,) = TensorLoader(
        dense(inputs[chosen]), labels[chosen], len(chosen), shuffle=False, mean=mean, std=std
    )
    return batch


def gradient_variance(
    model: nn.Module, pool: Batch, batch: int, draws: int, generator: torch.Generator
) -> float:
    """Return the variance of a mini-batch's gradient, summed over all weights (section 2.2).

    Args:
        model: Left as it is.
        pool: Images (N, C, H, W) and labels (N,) that mini-batches are drawn from.
        batch: Samples of a mini-batch, drawn with replacement.
        draws: Mini-batches, 2 at least.
        generator: Draws them.
    """
    copied = copy.deepcopy(model).train()
    inputs, labels = pool
    total: Tensor | None = None
    squares = 0.0
    for _ in range(draws):
        chosen = torch.randint(len(labels), (batch,), generator=generator).to(labels.device)
        gradient = _gradient(copied, inputs[chosen], labels[chosen]).double()
        total = gradient if total is None else total + gradient
        squares += float(gradient.square().sum())
    assert total is not None
    return (squares - float(total.square().sum()) / draws) / (draws - 1)


def _gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(inputs), labels)
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights)])


def filter_normalised(model: nn.Module, generator: torch.Generator) -> list[Tensor]:
    """Return a random direction whose filters are as long as the model's.

    Biases and what normalises stay. Source: Li et al., "Visualizing the Loss Landscape of Neural
    Nets", 2018.
    """
    direction = []
    for weight in model.parameters():
        if weight.dim() < 2:
            direction.append(torch.zeros_like(weight))
            continue
        drawn = torch.randn(weight.shape, generator=generator).to(weight.device)
        shape = (len(weight), *(1 for _ in weight.shape[1:]))
        length, drawn_length = (
            t.detach().flatten(1).norm(dim=1).view(shape) for t in (weight, drawn)
        )
        direction.append(drawn * length / drawn_length)
    return direction


def loss_at(model: nn.Module, direction: list[Tensor], size: float, batch: Batch) -> float:
    """Return the mean loss so far along a direction from the model's weights, which stay."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for weight, part in zip(moved.parameters(), direction, strict=True):
            weight.add_(part, alpha=size)
    return loss_of(moved, batch)


def loss_of(model: nn.Module, batch: Batch) -> float:
    """Return the mean loss over a set of images."""
    with torch.no_grad():
        total = sum(
            float(functional.cross_entropy(model(inputs), labels, reduction="sum"))
            for inputs, labels in _pieces(batch)
        )
    return total / len(batch[1])


def worst_rise(model: nn.Module, batch: Batch, size: float) -> float:
    """Return the rise of the loss one step of length `size` up its gradient.

    Source: Foret et al., "Sharpness-Aware Minimization", 2021, with their first-order step.
    """
    total: Any = 0.0
    for inputs, labels in _pieces(batch):
        total = total + _gradient(model, inputs, labels) * len(labels)
    up = total / total.norm()
    parts = [p.numel() for p in model.parameters()]
    direction = [
        part.view_as(weight)
        for part, weight in zip(up.split(parts), model.parameters(), strict=True)
    ]
    return loss_at(model, direction, size, batch) - loss_of(model, batch)


def _pieces(batch: Batch) -> Iterator[Batch]:
    yield from zip(*(part.split(_AT_ONCE) for part in batch), strict=True)
