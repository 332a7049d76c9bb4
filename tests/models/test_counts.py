"""The number of parameters: as published, and by formulas from the papers' descriptions."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from repro import models
from repro.models.alexnet import alexnet
from repro.models.densenet import DenseNet


def count(make, *arguments, **options):
    with torch.device("meta"):
        model = make(*arguments, **options)
    return sum(parameter.numel() for parameter in model.parameters())


# With the rounding of what is published
PUBLISHED = [
    (alexnet, {}, 60_965_224, 0),  # Caffe's bvlc_alexnet
    (models.unet, {}, 31_037_633, 0),  # milesial/Pytorch-UNet with transposed convolutions
    (models.deeplabv3plus, {}, 41_055_413, 0),
    (models.resnet18, {"num_classes": 100}, 11_220_132, 0),  # weiaicunzai/pytorch-cifar100
    (models.resnet50, {"num_classes": 100}, 23_705_252, 0),
    (models.resnet101, {"num_classes": 100}, 42_697_380, 0),
    # torchvision's documentation of ResNet50_Weights
    (partial(models.build, "torchvision/resnet50"), {"num_classes": 1000}, 25_557_032, 0),
    # He et al. 2016, table 6
    (models.resnet20, {}, 0.27e6, 5e3),
    (models.resnet_cifar, {"depth": 56}, 0.85e6, 5e3),
    (models.resnet_cifar, {"depth": 110}, 1.7e6, 5e4),
    # Huang et al. 2017, table 2, without bottlenecks and compression
    (models.densenet40, {}, 1.0e6, 5e4),
    (partial(DenseNet, 100, 24), {"num_classes": 10, "in_channels": 3}, 27.2e6, 5e4),
    # GPipe, table 1, as torchgpipe's memory benchmark counts them
    (partial(models.amoebanet_d, 1000, 18, 208), {}, 81.5e6, 5e4),
    (partial(models.amoebanet_d, 1000, 18, 544), {}, 542.7e6, 5e4),
    # EDSR, table 1, at scale 2; the layers of Pix2PixHD's appendix add up to this
    (models.edsr, {}, 40_729_603, 0),
    (models.Pix2PixHD, {}, 182_546_755 + 8_404_803, 0),
]


@pytest.mark.parametrize(("make", "options", "published", "rounding"), PUBLISHED)
def test_parameters_are_the_published_ones(make, options, published, rounding):
    assert abs(count(make, **options) - published) <= rounding


def densenet(depth, growth, num_classes, in_channels):
    """Section 4: 16 maps, 3 blocks of BN-ReLU-Conv(3×3), 1×1 transitions of as many maps."""
    maps, total = 16, 9 * in_channels * 16
    for block in range(3):
        for _ in range((depth - 4) // 3):
            total += 2 * maps + 9 * maps * growth
            maps += growth
        total += 2 * maps + (maps * maps if block < 2 else 0)
    return total + maps * num_classes + num_classes


def unet(in_channels, num_classes, width, depth):
    def double_conv(a, b):
        return 9 * a * b + 9 * b * b + 2 * (2 * b)  # two kernels, two scales and shifts

    total = double_conv(in_channels, width) + num_classes * (width + 1)
    for level in range(1, depth + 1):
        upper, lower = width * 2 ** (level - 1), width * 2**level
        total += double_conv(upper, lower)  # down
        total += 4 * lower * upper + upper + double_conv(2 * upper, upper)  # up
    return total


# Channels in and out of every separable convolution of DeepLabv3+, by figure 4 and section 3
SEPARABLE = (
    [(64, 128), (128, 128), (128, 128), (128, 256), (256, 256), (256, 256)]
    + [(256, 728), (728, 728), (728, 728)]
    + [(728, 728)] * 3 * 16
    + [(728, 728), (728, 1024), (1024, 1024), (1024, 1536), (1536, 1536), (1536, 2048)]
    + [(2048, 256)] * 3
    + [(304, 256), (256, 256)]
)
# Shortcuts, the first and the last view of the pyramid, its projection, low-level features
POINTWISE = [(64, 128), (128, 256), (256, 728), (728, 1024)]
POINTWISE += [(2048, 256), (2048, 256), (5 * 256, 256), (256, 48)]


def deeplabv3plus(in_channels, num_classes, width):
    parts = 64 // width  # all numbers above can be divided by 8
    total = 9 * (32 // parts) * (in_channels + 64 // parts) + 2 * (32 + 64) // parts
    for a, b in SEPARABLE:  # each kernel, and its scale and shift
        total += (9 * a + 2 * a + a * b // parts + 2 * b) // parts
    total += sum((a * b // parts + 2 * b) // parts for a, b in POINTWISE)
    return total + (256 // parts + 1) * num_classes


def edsr(blocks, width, scale, channels):
    """Weights and biases of 3x3 convolutions, as table 1 and figure 3 list them."""
    same = 9 * width * width + width
    total = 9 * channels * width + width + (2 * blocks + 1) * same + 9 * width * channels + channels
    for s in {1: [], 2: [2], 3: [3], 4: [2, 2], 8: [2, 2, 2]}[scale]:
        total += 9 * width * (s * s * width) + s * s * width
    return total


def pix2pixhd(in_channels, out_channels, width, blocks, scales, downsamplings):
    def conv(a, b, kernel):
        return kernel * kernel * a * b + b

    total = conv(in_channels, width, 7) + conv(width, out_channels, 7)
    for level in range(downsamplings):
        upper, lower = width * 2**level, width * 2 ** (level + 1)
        total += conv(upper, lower, 3) + conv(lower, upper, 3)  # down, and up again
    total += blocks * 2 * conv(lower, lower, 3)
    channels = [in_channels + out_channels, width, 2 * width, 4 * width, 8 * width, 1]
    return total + scales * sum(conv(a, b, 4) for a, b in pairwise(channels))


FORMULAS = [
    *((DenseNet, densenet, case) for case in ((40, 40, 10, 3), (7, 1, 1, 1), (13, 5, 7, 2))),
    *((models.unet, unet, (2, 3, *case)) for case in ((4, 1), (6, 2), (8, 3))),
    *((models.deeplabv3plus, deeplabv3plus, case) for case in ((3, 21, 64), (1, 2, 8))),
    *((models.edsr, edsr, (2, 4, scale, 1 + scale % 3)) for scale in (1, 2, 3, 4, 8)),
    *((models.Pix2PixHD, pix2pixhd, case) for case in ((36, 3, 64, 9, 3, 4), (5, 2, 6, 3, 1, 2))),
]


@pytest.mark.parametrize(("make", "formula", "options"), FORMULAS)
def test_parameters_by_formula(make, formula, options):
    assert count(make, *options) == formula(*options)
