"""Pairs of images for restoration: making the inputs, and mini-batches of aligned patches."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from repro.datasets.image_data import DatasetError, Size
from repro.datasets.loader import Batch, TensorLoader, generator_of


def low_resolution(images: Tensor, scale: int) -> Tensor:
    """Shrink uint8 images (N, C, H, W) by a whole factor, bicubic with antialiasing, as in DIV2K.

    Rows and columns beyond a multiple of `scale` are left out. Returns uint8,
    (N, C, H // scale, W // scale).
    """
    height, width = images.shape[2:]
    size, parts = (height // scale, width // scale), []
    for part in images[..., : size[0] * scale, : size[1] * scale].split(16):
        small = functional.interpolate(
            part.float(), size, mode="bicubic", antialias=True, align_corners=False
        )
        parts.append(small.round_().clamp_(0, 255).to(torch.uint8))
    return torch.cat(parts)


def noisy(images: Tensor, sigma: float, seed: int) -> Tensor:
    """Add Gaussian noise to uint8 images (N, C, H, W), rounded and clipped to 0 to 255.

    Its standard deviation is the share `sigma` of the full range of 255. It depends only on the
    seed and the shape.
    """
    if not sigma >= 0:
        raise DatasetError(f"sigma={sigma}: expected at least 0")
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for part in images.split(16):
        noise = torch.randn(part.shape, generator=generator, device="cpu").mul_(255 * sigma)
        parts.append((part + noise.to(part.device)).round_().clamp_(0, 255).to(torch.uint8))
    return torch.cat(parts)


class PatchLoader(TensorLoader):
    """Iterate over mini-batches of patches cut at the same place from inputs and targets.

    One patch is cut from each image per epoch. Order, places and augmentation depend only on `seed`
    and the number of the epoch. `TensorLoader` cuts both at once: each s x s block of target pixels
    becomes further channels of its input pixel.

    Args:
        inputs: uint8, (N, C, H, W).
        targets: uint8, (N, C', sH, sW) with an integer factor s of at least 1.
        batch_size: Patches in a mini-batch.
        patch: Side of an input's patch in pixels; the target's is s times as long.
        augment: Mirror and rotate patches at random (all eight combinations).
        **options: `seed`, `shuffle`, `crop` and `device` of `TensorLoader`.
    """

    def __init__(
        self, inputs: Tensor, targets: Tensor, batch_size: int, *, patch: int,
        augment: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self.scale = targets.shape[-1] // inputs.shape[-1]
        wanted = (len(inputs), *(self.scale * side for side in inputs.shape[2:]))
        if self.scale < 1 or (len(targets), *targets.shape[2:]) != wanted:
            raise DatasetError(
                f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}: expected as "
                "many targets, whose sides are the same whole multiple of the inputs'"
            )
        if wrong := options.keys() - {"seed", "shuffle", "crop", "device"}:
            raise DatasetError(f"{', '.join(sorted(wrong))} would part inputs from targets")
        self.augment, self._inputs = augment, inputs.shape[1]
        stacked = torch.cat((inputs, functional.pixel_unshuffle(targets, self.scale)), 1)
        options |= {"mean": [0.0] * stacked.shape[1], "std": [1.0] * stacked.shape[1]}
        none = stacked.new_zeros(len(stacked), dtype=torch.int64)
        super().__init__(stacked, none, batch_size, crop_size=patch, **options)

    def set_resolution(self, resolution: int | Size | None) -> None:
        """Refused, but for None: resized as further channels, targets would be no images."""
        if resolution is not None:
            raise DatasetError("resolution would part inputs from targets: give another patch=")
        super().set_resolution(None)

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch.

        Yields float32 inputs (B, C, p, p) and targets (B, C', s p, s p), both in [0, 1].
        """
        generator = generator_of(self.seed, self.epoch, 1)
        # Copied once for the whole epoch: a copy per mini-batch would wait for the device.
        shape = (3, len(self._targets), 1, 1, 1)
        draws = torch.randint(2, shape, generator=generator, device="cpu").bool()
        parts = draws.to(self.device).split(self.batch_size, 1)
        return self._patches(super().__iter__(), parts)

    def _patches(self, batches: Iterator[Batch], draws: tuple[Tensor, ...]) -> Iterator[Batch]:
        for (stacked, _), drawn in zip(batches, draws, strict=True):
            inputs = stacked[:, : self._inputs]
            targets = functional.pixel_shuffle(stacked[:, self._inputs :], self.scale)
            if self.augment:
                inputs, targets = _turned(inputs, drawn), _turned(targets, drawn)
            yield inputs.contiguous(), targets


def _turned(images: Tensor, draws: Tensor) -> Tensor:
    across, down, swap = draws
    images = torch.where(across, images.flip(-1), images)
    images = torch.where(down, images.flip(-2), images)
    return torch.where(swap, images.transpose(-1, -2), images)
