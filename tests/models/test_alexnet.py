"""Caffe's AlexNet, with two groups."""

import pytest
import torch
from torch import nn

from repro.models.alexnet import alexnet


def test_parameters_and_groups_are_caffes():
    with torch.device("meta"):
        model = alexnet()
    assert sum(p.numel() for p in model.parameters()) == 60_965_224  # bvlc_alexnet
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [m.groups for m in convolutions] == [1, 2, 1, 2, 2]
    assert [m.out_channels for m in convolutions] == [96, 256, 384, 384, 256]
    sizes = []
    for module in convolutions:
        module.register_forward_hook(lambda m, x, y: sizes.append(y.shape[-1]))
    model(torch.empty(1, 3, 227, 227, device="meta"))
    assert sizes == [55, 27, 13, 13, 13]


def test_a_small_one_computes_logits():
    torch.manual_seed(0)
    model = alexnet(num_classes=5, width=6).eval()
    assert model(torch.randn(2, 3, 67, 75)).shape == (2, 5)


def test_a_width_that_does_not_divide():
    with pytest.raises(ValueError, match="width is 64; give a multiple of 6"):
        alexnet(width=64)
