import math

import pytest
import torch
from torch import nn

from repro.models import unet


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_count_is_the_published_one():
    # printed in many reports of the common PyTorch U-Net, such as that of milesial/Pytorch-UNet
    # with transposed convolutions (31,037,698 with a second class: 64 weights and a bias more)
    with torch.device("meta"):
        assert count(unet()) == 31_037_633
        assert count(unet(num_classes=2)) == 31_037_698


@pytest.mark.parametrize(("width", "depth"), [(4, 1), (6, 2), (8, 3)])
def test_parameter_count_by_formula(width, depth):
    in_channels, num_classes = 2, 3

    def double_conv(a, b):
        return 9 * a * b + 9 * b * b + 2 * (2 * b)  # two kernels, two scales and shifts

    expected = double_conv(in_channels, width) + num_classes * (width + 1)
    for level in range(1, depth + 1):
        upper, lower = width * 2 ** (level - 1), width * 2**level
        expected += double_conv(upper, lower)  # down
        expected += 4 * lower * upper + upper + double_conv(2 * upper, upper)  # up
    assert count(unet(in_channels, num_classes, width, depth)) == expected


@pytest.mark.parametrize(
    "size", [(16, 16), (32, 24), (17, 16), (23, 41), (47, 5), (1, 1), (7, 100)]
)
@pytest.mark.parametrize("depth", [1, 3])
def test_output_has_the_size_of_the_input(size, depth):
    model = unet(in_channels=2, num_classes=3, width=4, depth=depth).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 2, *size)).shape == (2, 3, *size)


def test_an_odd_size_changes_nothing_away_from_the_border():
    # Everything is local: with depth 1, an output pixel reads at most 2 + 2·3 + 2 around it.
    torch.manual_seed(0)
    model = unet(in_channels=1, width=4, depth=1).double().eval()
    x = torch.randn(1, 1, 40, 40, dtype=torch.float64)
    with torch.no_grad():
        whole, odd = model(x), model(x[:, :, :39, :37])
    torch.testing.assert_close(odd[:, :, :28, :26], whole[:, :, :28, :26])


def test_weights_start_as_the_paper_has_them():
    torch.manual_seed(0)
    for module in unet(width=16, depth=3).modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 10_000:
            incoming = module.in_channels * math.prod(module.kernel_size)
            expected = math.sqrt(2 / incoming)
            assert module.weight.std().item() == pytest.approx(expected, rel=0.03)
        if isinstance(module, nn.ConvTranspose2d):
            assert torch.equal(module.bias, torch.zeros_like(module.bias))
