"""Measuring restored images: the peak signal-to-noise ratio."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def psnr(restored: Tensor, target: Tensor, data_range: float = 1.0) -> Tensor:
    """Return the peak signal-to-noise ratio of each image in dB, (B,).

    10 log10(R² / MSE), with the mean over all channels and pixels of an image; infinite for equal
    images.

    Args:
        restored: (B, C, H, W).
        target: Likewise.
        data_range: R, the difference between the largest and the smallest possible value.

    Raises:
        ValueError: The shapes differ, or `data_range` is not above 0.
    """
    if restored.shape != target.shape or not data_range > 0:
        raise ValueError(
            f"images of {tuple(restored.shape)} and {tuple(target.shape)}, data_range "
            f"{data_range}; give equal shapes and a range above 0"
        )
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

    Raises:
        ValueError: There is no image.
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
    if not images:
        raise ValueError("there is no image to evaluate on; give a test split that is not empty")
    return {"psnr": float(total) / images, "test_l1": float(error) / images}
