"""How gradients scatter and how the loss rises around a model's weights (section 2)."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
_AT_ONCE = 500  # images in a forward pass that keeps nothing


def gradient_variance(
    model: nn.Module, pool: Batch, batch: int, draws: int, generator: torch.Generator
) -> float:
    """The variance of a mini-batch's gradient, summed over all weights (section 2.2).

    Mini-batches are drawn from images (N, C, H, W) and labels (N,) with replacement.
    """
    copied = copy.deepcopy(model).train()
    inputs, labels = pool
    total, squares = torch.zeros((), dtype=torch.double, device=labels.device), 0.0
    for _ in range(draws):
        chosen = torch.randint(len(labels), (batch,), generator=generator).to(labels.device)
        gradient = _gradient(copied, inputs[chosen], labels[chosen]).double()
        total = total + gradient
        squares += float(gradient.square().sum())
    return (squares - float(total.square().sum()) / draws) / (draws - 1)


def _gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(inputs), labels)
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights)])


def filter_normalised(model: nn.Module, generator: torch.Generator) -> list[Tensor]:
    """A random direction whose filters are as long as the model's.

    Biases and normalisation layers stay. Source: Li et al., "Visualizing the Loss Landscape of
    Neural Nets", 2018.
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
    """The mean loss at a distance along a direction from the model's weights, which stay."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for weight, part in zip(moved.parameters(), direction, strict=True):
            weight.add_(part, alpha=size)
    return loss_of(moved, batch)


def loss_of(model: nn.Module, batch: Batch) -> float:
    """The mean loss over a set of images."""
    with torch.no_grad():
        total = sum(
            float(functional.cross_entropy(model(inputs), labels, reduction="sum"))
            for inputs, labels in _pieces(batch)
        )
    return total / len(batch[1])


def worst_rise(model: nn.Module, batch: Batch, size: float) -> float:
    """The rise of the loss one step of length `size` up its gradient.

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
