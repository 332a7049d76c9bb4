"""EDSR, a deep residual network for super-resolution and restoration.

Source: Lim, Son, Kim, Nah, Lee, "Enhanced Deep Residual Networks for Single Image
Super-Resolution", CVPRW 2017 (arXiv:1707.02921), sections 3.1 to 3.2.

In shapes, B is the batch size, C the images' channels, F the features, s the scale.
"""

from functools import partial

import torch
from torch import nn

from repro.models._shared import check_at_least

RESIDUAL_SCALE = 0.1  # section 3.1

_conv = partial(nn.Conv2d, kernel_size=3, padding=1)


class _Block(nn.Module):
    """x + 0.1 F(x) without normalisation: figure 2 (c), scaled as in section 3.1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _conv(width, width), nn.ReLU(inplace=True), _conv(width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.residual(x), alpha=RESIDUAL_SCALE)  # (B, F, H, W)


class EDSR(nn.Module):
    """A convolution, residual blocks with a skip over all of them, sub-pixel upsampling.

    The defaults are the paper's final model (table 1), 40.7 M parameters at x2: B = `blocks` and
    F = `width`. `scale` is the factor of the sides: 1 (restores at the same size), 2, 3, 4 or 8.

    Differs from the paper: images lie in [0, 1], not 0 to 255; 0.5 is subtracted at the start and
    added at the end, instead of DIV2K's mean.
    """

    def __init__(
        self, blocks: int = 32, width: int = 256, scale: int = 2, channels: int = 3
    ) -> None:
        super().__init__()
        check_at_least(1, blocks=blocks, width=width, scale=scale, channels=channels)
        if scale not in (1, 2, 3, 4, 8):
            raise ValueError(f"scale is {scale}: choose 1, 2, 3, 4 or 8")
        self.head = _conv(channels, width)
        self.body = nn.Sequential(*(_Block(width) for _ in range(blocks)), _conv(width, width))
        steps = [3] if scale == 3 else [2] * (int(scale).bit_length() - 1)
        upsample = [
            layer for s in steps for layer in (_conv(width, width * s * s), nn.PixelShuffle(s))
        ]
        self.tail = nn.Sequential(*upsample, _conv(width, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (B, C, H, W) to (B, C, sH, sW)."""
        x = self.head(x - 0.5)  # (B, F, H, W)
        x = x + self.body(x)  # (B, F, H, W)
        return self.tail(x) + 0.5  # (B, C, sH, sW)


edsr = EDSR  # named as the functions that build the other architectures
