"""Measuring restored images: the peak signal-to-noise ratio."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def psnr(restored: Tensor, target: Tensor, data_range: float = 1.0) -> Tensor:
    """Return the peak signal-to-noise ratio of each image in dB, (B,).

    10 log10(R² / MSE), with the mean over all channels and pixels of an image; infinite for equal
    images. `restored` and `target` are (B, C, H, W), `data_range` is R, the difference between the
    largest and the smallest possible value.

    Raises:
        ValueError: The shapes differ.
    """
    if restored.shape != target.shape:
        raise ValueError(f"images of {tuple(restored.shape)} and {tuple(target.shape)} differ")
    error = (restored.double() - target.double()).square().flatten(1).mean(1)
    return 10 * torch.log10(data_range**2 / error)


@torch.no_grad()
def evaluate_psnr(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Return ``psnr``, the mean over images in dB, and ``test_l1``, the mean absolute error.

    The model's outputs are clipped to [0, 1], the range of the targets, before `psnr`.
    """
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    error = torch.zeros_like(total)
    images = 0
    for inputs, targets in batches:
        targets = targets.to(device)
        restored = model(inputs.to(device)).float()
        error += (restored - targets).abs().flatten(1).mean(1).sum()
        total += psnr(restored.clamp(0, 1), targets).sum()
        images += len(targets)
    return {"psnr": float(total) / images, "test_l1": float(error) / images}
