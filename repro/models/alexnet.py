"""AlexNet as in Caffe: two groups of filters in the second, fourth and fifth convolution.

Source: Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural
Networks", NIPS 2012, section 3.5; Caffe's ``models/bvlc_alexnet``. torchvision's is the later
version without groups.
"""

import torch
from torch import nn

from repro.models._shared import check_at_least, check_form


class AlexNet(nn.Module):
    """Five convolutions, three of them in two groups, and three fully connected layers.

    The other convolutions have filters in proportion to the first's, `width`, a multiple of 6.
    """

    def __init__(self, num_classes: int = 1000, width: int = 96) -> None:
        check_at_least(1, num_classes=num_classes, width=width)
        check_form(6, width=width)
        super().__init__()
        second, third, hidden = width * 8 // 3, width * 4, width * 128 // 3
        self.features = nn.Sequential(
            *self._layer(3, width, 11, stride=4),
            *self._shrunk(),
            *self._layer(width, second, 5, padding=2, groups=2),
            *self._shrunk(),
            *self._layer(second, third, 3, padding=1),
            *self._layer(third, third, 3, padding=1, groups=2),
            *self._layer(third, second, 3, padding=1, groups=2),
            nn.MaxPool2d(3, 2),
            nn.AdaptiveAvgPool2d(6),  # no change for 227×227 pixels
        )
        self.classifier = nn.Sequential(
            nn.Linear(36 * second, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, num_classes),
        )

    @staticmethod
    def _layer(in_channels: int, out_channels: int, size: int, **options: int) -> list[nn.Module]:
        return [nn.Conv2d(in_channels, out_channels, size, **options), nn.ReLU()]  # type: ignore[arg-type]

    @staticmethod
    def _shrunk() -> list[nn.Module]:
        return [nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (B, 3, H, W), at least 67 pixels a side, to logits (B, num_classes)."""
        return self.classifier(self.features(images).flatten(1))


alexnet = AlexNet  # named as the functions that build the other architectures
