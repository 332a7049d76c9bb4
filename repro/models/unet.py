"""U-Net: a pixel-wise classifier with skip connections between equal resolutions.

Source: Ronneberger, Fischer, Brox, "U-Net: Convolutional Networks for Biomedical Image
Segmentation", MICCAI 2015 (arXiv:1505.04597).

In shapes, B is the batch size, H and W the height and width, C_i = width · 2^i the channels after
i halvings and (H_i, W_i) the size there.
"""

import math

import torch
from torch import nn

from repro.models._shared import check_at_least


class UNet(nn.Module):
    """A contracting path, a bottom, and an expanding path that reads the contracting one's maps.

    Weights start from N(0, 2 / N), N the number of incoming nodes of one neuron (section 3), and
    biases from zero. The output has the size of the input, for any size.

    Differs from the paper: convolutions are padded, BatchNorm follows each convolution, which
    therefore has no bias, and there is no dropout. For an odd size pooling rounds up, and the extra
    row or column after upsampling is dropped.

    Args:
        in_channels: Channels of the images.
        num_classes: Number of logits for each pixel; 1 for a binary mask.
        width: Channels at full resolution; each halving doubles them.
        depth: Number of times that the resolution is halved.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 1, width: int = 64, depth: int = 4
    ) -> None:
        super().__init__()
        check_at_least(
            1, in_channels=in_channels, num_classes=num_classes, width=width, depth=depth
        )
        channels = [width * 2**level for level in range(depth + 1)]  # C_0 ... C_depth

        sources = [in_channels, *channels[:-2]]
        self.contract = nn.ModuleList(
            _double_conv(source, target)
            for source, target in zip(sources, channels[:-1], strict=True)
        )
        # Rounding up keeps the last row and column of an odd size, and maps 1 pixel to 1.
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.bottom = _double_conv(channels[-2], channels[-1])

        upwards = range(depth - 1, -1, -1)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(channels[level + 1], channels[level], kernel_size=2, stride=2)
            for level in upwards
        )
        self.expand = nn.ModuleList(
            _double_conv(2 * channels[level], channels[level]) for level in upwards
        )
        self.classifier = nn.Conv2d(width, num_classes, kernel_size=1)
        self.apply(_initialise)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (B, in_channels, H, W) to logits (B, num_classes, H, W)."""
        skips = []
        for block in self.contract:
            x = block(x)  # (B, C_i, H_i, W_i)
            skips.append(x)
            x = self.pool(x)  # (B, C_i, ⌈H_i/2⌉, ⌈W_i/2⌉)
        x = self.bottom(x)  # (B, C_depth, H_depth, W_depth)
        for up, block in zip(self.up, self.expand, strict=True):
            skip = skips.pop()  # (B, C_i, H_i, W_i)
            x = up(x)  # (B, C_i, H_i or H_i + 1, W_i or W_i + 1)
            x = x[:, :, : skip.shape[2], : skip.shape[3]]  # (B, C_i, H_i, W_i)
            x = torch.cat((skip, x), dim=1)  # (B, 2 C_i, H_i, W_i)
            x = block(x)  # (B, C_i, H_i, W_i)
        return self.classifier(x)  # (B, num_classes, H, W)


unet = UNet  # named as the functions that build the other architectures


def _double_conv(in_channels: int, out_channels: int) -> nn.Module:
    layers: list[nn.Module] = []
    for source in (in_channels, out_channels):
        layers += [
            nn.Conv2d(source, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


def _initialise(module: nn.Module) -> None:
    if not isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        return
    incoming = module.in_channels
    if isinstance(module, nn.Conv2d):
        # A 2x2 transposed convolution of stride 2 reads one pixel for each of its outputs; a
        # convolution reads one pixel per kernel element.
        incoming *= math.prod(module.kernel_size)
    nn.init.normal_(module.weight, std=math.sqrt(2 / incoming))
    if module.bias is not None:
        nn.init.zeros_(module.bias)
