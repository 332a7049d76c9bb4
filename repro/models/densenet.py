"""DenseNet for small images: every layer reads the maps of all layers before it in its block.

Source: Huang, Liu, van der Maaten, Weinberger, "Densely Connected Convolutional Networks", CVPR
2017 (arXiv:1608.06993), section 4: the variant for CIFAR without bottlenecks and compression.
"""

import torch
from torch import nn

from repro.models._shared import check_at_least, check_form, he_normal


class _DenseLayer(nn.Module):
    """BN, ReLU, 3×3 convolution; its k maps are appended to its input."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.conv = nn.Conv2d(in_channels, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(self.norm(x).relu())], dim=1)


class DenseNet(nn.Module):
    """Three dense blocks of equal length with transitions that halve the resolution.

    `depth` counts the layers with weights: 3 blocks of (depth - 4) / 3 convolutions, 1 at the
    start, 2 transitions, 1 classifier. Each layer adds `growth` maps, k. Convolutions start from
    `he_normal`, as in the paper's section 4.2.
    """

    def __init__(self, depth: int, growth: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        check_at_least(7, depth=depth)
        check_at_least(1, growth=growth, num_classes=num_classes, in_channels=in_channels)
        check_form(3, 4, depth=depth)
        channels = 16
        parts: list[nn.Module] = [nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)]
        for block in range(3):
            for _ in range((depth - 4) // 3):
                parts.append(_DenseLayer(channels, growth))
                channels += growth
            parts += [nn.BatchNorm2d(channels), nn.ReLU()]
            if block < 2:
                parts += [nn.Conv2d(channels, channels, 1, bias=False), nn.AvgPool2d(2)]
        self.features = nn.Sequential(*parts)
        self.classifier = nn.Linear(channels, num_classes)
        he_normal(self, "fan_in")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, C, H, W) to logits (B, classes)."""
        x = self.features(x)  # (B, channels, H / 4, W / 4)
        return self.classifier(x.mean((2, 3)))


def densenet40(growth: int = 12, num_classes: int = 10, in_channels: int = 3) -> DenseNet:
    """Build DenseNet-40 (k = 12 in its paper; μ-cuDNN takes k = 40)."""
    return DenseNet(40, growth, num_classes, in_channels)
