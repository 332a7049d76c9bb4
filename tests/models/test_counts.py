"""The number of parameters, as published."""

from functools import partial

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
