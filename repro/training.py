"""A plain loop for fitting and evaluating, for the steps of all methods."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from repro.measure import synchronize
from repro.measure.checks import is_whole

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Epoch:
    """One epoch: mean training loss, seconds spent training, and metrics after it."""

    number: int
    train_loss: float
    time_s: float
    metrics: dict[str, float]


def plain_step(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer,
    device: torch.device | str,
) -> Step:
    """The ordinary training step: the whole mini-batch on the device at once."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def fit(
    model: nn.Module,
    step: Step,
    loader: Iterable[Batch],
    *,
    epochs: int,
    device: torch.device | str = "cpu",
    evaluate: Callable[[], dict[str, float]] | None = None,
    scheduler: Any = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> list[Epoch]:
    """Train for a number of epochs.

    Args:
        model: Put into training mode before each epoch.
        step: Takes (inputs, targets), updates the model, returns the mini-batch's mean loss.
        loader: Iterated once per epoch.
        epochs: At least 1.
        device: Waited for before the clock is read.
        evaluate: Called after each epoch, outside its time.
        scheduler: A learning-rate scheduler, stepped once per epoch.
        on_epoch: Called with each epoch at its end.

    Raises:
        ValueError: `epochs` is no integer of at least 1, or the loader yields nothing.
    """
    if not is_whole(epochs, 1):
        raise ValueError(f"epochs is {epochs!r}; give at least 1, a whole number")
    history = []
    for number in range(1, epochs + 1):
        model.train()
        synchronize(device)
        start = time.perf_counter()
        total, samples = torch.zeros((), device=device), 0
        for inputs, targets in loader:
            total += step(inputs, targets) * len(inputs)
            samples += len(inputs)
        if not samples:
            raise ValueError("the loader yields no mini-batch; give data, or drop_last=False")
        synchronize(device)
        time_s = time.perf_counter() - start
        if scheduler is not None:
            scheduler.step()
        metrics = evaluate() if evaluate is not None else {}
        history.append(Epoch(number, float(total) / samples, time_s, metrics))
        if on_epoch is not None:
            on_epoch(history[-1])
    return history


@torch.no_grad()
def evaluate_classifier(
    model: nn.Module, batches: Iterable[Batch], device: torch.device | str = "cpu"
) -> dict[str, float]:
    """``test_loss`` (mean cross-entropy) and ``accuracy`` (percent)."""
    model.eval()
    loss = torch.zeros((), device=device)
    correct = torch.zeros((), device=device, dtype=torch.int64)
    samples = 0
    for inputs, targets in _moved(batches, device):
        outputs = model(inputs)  # (B, classes)
        loss += nn.functional.cross_entropy(outputs, targets, reduction="sum")
        correct += (outputs.argmax(1) == targets).sum()
        samples += len(targets)
    return {"test_loss": float(loss) / samples, "accuracy": 100 * int(correct) / samples}


@torch.no_grad()
def evaluate_binary_segmentation(
    model: nn.Module, batches: Iterable[Batch], device: torch.device | str = "cpu"
) -> dict[str, float]:
    """``iou`` in percent: intersection over union of the foreground, all pixels pooled.

    The model gives logits (B, 1, H, W); targets are (B, H, W) with foreground above 0.
    """
    model.eval()
    # Integers: float32 stops counting at 2**24 pixels.
    intersection = torch.zeros((), device=device, dtype=torch.int64)
    union = torch.zeros((), device=device, dtype=torch.int64)
    for inputs, targets in _moved(batches, device):
        predicted = model(inputs).squeeze(1) > 0
        foreground = targets > 0
        intersection += (predicted & foreground).sum()
        union += (predicted | foreground).sum()
    return {"iou": 100 * int(intersection) / max(1, int(union))}


def psnr(restored: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the peak signal-to-noise ratio of each image of values in [0, 1] in dB, (B,).

    10 log10(1 / MSE), with the mean over all channels and pixels of an image; infinite for equal
    images. `restored` and `target` are (B, C, H, W).

    Raises:
        ValueError: The shapes differ.
    """
    if restored.shape != target.shape:
        raise ValueError(f"images of {tuple(restored.shape)} and {tuple(target.shape)} differ")
    error = (restored.double() - target.double()).square().flatten(1).mean(1)
    return 10 * torch.log10(1 / error)


@torch.no_grad()
def evaluate_psnr(
    model: nn.Module, batches: Iterable[Batch], device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Return ``psnr``, the mean over images in dB, and ``test_l1``, the mean absolute error.

    The model's outputs are clipped to [0, 1], the range of the targets, before `psnr`.
    """
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    error = torch.zeros_like(total)
    images = 0
    for inputs, targets in _moved(batches, device):
        restored = model(inputs).float()
        error += (restored - targets).abs().flatten(1).mean(1).sum()
        total += psnr(restored.clamp(0, 1), targets).sum()
        images += len(targets)
    return {"psnr": float(total) / images, "test_l1": float(error) / images}


def _moved(batches: Iterable[Batch], device: torch.device | str) -> Iterator[Batch]:
    """Yield batches on a device; there must be some."""
    inputs = None
    for inputs, targets in batches:
        yield inputs.to(device), targets.to(device)
    if inputs is None:
        raise ValueError("there is no batch to evaluate on; give a test split that is not empty")
