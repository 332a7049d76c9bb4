import math

import numpy as np
import pytest
import torch
from torch import nn

from repro.models import build
from repro.models.densenet import DenseNet, densenet40


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def counted_by_hand(depth: int, growth: int, num_classes: int, in_channels: int) -> int:
    """Count the weights layer by layer from the paper's description: no bias but the classifier's.

    Huang et al. 2017, section 4: 16 maps at the start, 3 blocks of BN-ReLU-Conv(3×3), between them
    BN and a 1×1 convolution of as many maps, BN before the average.
    """
    maps, total = 16, 9 * in_channels * 16
    for block in range(3):
        for _ in range((depth - 4) // 3):
            total += 2 * maps + 9 * maps * growth
            maps += growth
        total += 2 * maps
        total += maps * maps if block < 2 else 0
    return total + maps * num_classes + num_classes


# Huang et al. 2017, table 2, "Params" of DenseNet without bottlenecks and compression
@pytest.mark.parametrize(
    ("depth", "growth", "millions"), [(40, 12, "1.0"), (100, 12, "7.0"), (100, 24, "27.2")]
)
def test_parameter_counts_are_the_papers(depth, growth, millions):
    with torch.device("meta"):
        parameters = count(DenseNet(depth, growth, 10, 3))
    assert f"{parameters / 1e6:.1f}" == millions


@pytest.mark.parametrize(
    ("depth", "growth", "num_classes", "in_channels"),
    [(40, 40, 10, 3), (40, 12, 100, 3), (7, 1, 1, 1), (13, 5, 7, 2)],
)
def test_parameter_counts_by_hand(depth, growth, num_classes, in_channels):
    with torch.device("meta"):
        model = DenseNet(depth, growth, num_classes, in_channels)
    assert count(model) == counted_by_hand(depth, growth, num_classes, in_channels)


def test_micro_cudnns_growth_has_ten_times_the_parameters():
    with torch.device("meta"):
        model = build("densenet40", growth=40)
    assert isinstance(model, DenseNet)
    assert count(model) == counted_by_hand(40, 40, 10, 3) > 10 * counted_by_hand(40, 12, 10, 3)


def test_40_layers_with_weights():
    with torch.device("meta"):
        model = densenet40()
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 39
    assert [m.kernel_size for m in convolutions].count((1, 1)) == 2
    assert all(m.bias is None for m in convolutions)
    assert [m for m in model.modules() if isinstance(m, nn.Linear)] == [model.classifier]


@pytest.mark.parametrize("growth", [12, 40])
def test_maps_per_block(growth):
    with torch.device("meta"):
        model = densenet40(growth)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    read = [16 + growth * layer for layer in range(36)]
    assert [m.in_channels for m in layers[1:]] == read
    assert {m.out_channels for m in layers[1:]} == {growth}
    transitions = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m not in layers]
    ends = [16 + 12 * growth, 16 + 24 * growth]
    assert [(m.in_channels, m.out_channels) for m in transitions] == [(n, n) for n in ends]
    assert model.classifier.in_features == 16 + 36 * growth


def test_the_resolution_is_halved_twice():
    torch.manual_seed(0)
    model = DenseNet(10, 3, 5, 1).eval()
    sizes = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            module.register_forward_hook(lambda m, inputs, out: sizes.append(tuple(out.shape[2:])))
    assert model(torch.randn(2, 1, 12, 8)).shape == (2, 5)
    assert sizes == [(12, 8)] * 3 + [(6, 4)] * 2 + [(3, 2)] * 2


def test_every_layer_reads_all_maps_before_it_and_keeps_them():
    torch.manual_seed(0)
    layer = next(m for m in densenet40(4).modules() if type(m).__name__ == "_DenseLayer").eval()
    x = torch.randn(2, 16, 5, 5)
    y = layer(x)
    assert y.shape == (2, 20, 5, 5)
    assert torch.equal(y[:, :16], x)
    expected = nn.functional.conv2d(torch.relu(layer.norm(x)), layer.conv.weight, padding=1)
    torch.testing.assert_close(y[:, 16:], expected)


def test_the_gradient_reaches_all_parameters():
    torch.manual_seed(0)
    model = densenet40(growth=2)
    loss = nn.functional.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.tensor([0, 1, 2, 3]))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


def test_convolutions_start_as_he_et_al():
    torch.manual_seed(0)
    for module in densenet40(12).modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 20_000:
            fan_in = module.in_channels * math.prod(module.kernel_size)
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=0.02)


@pytest.mark.parametrize("depth", [8, 9, 41, 42])
def test_depths_that_are_no_network(depth):
    with pytest.raises(ValueError, match=rf"depth is {depth}, but must be 3 n \+ 4: choose 40"):
        DenseNet(depth, 12, 10, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("depth", 4), ("depth", 40.0), ("depth", True), ("growth", 0), ("growth", 1.5),
     ("num_classes", 0), ("in_channels", -1)],
)  # fmt: skip
def test_options_that_are_no_network(name, value):
    options = {"depth": 40, "growth": 12, "num_classes": 10, "in_channels": 3} | {name: value}
    with pytest.raises(ValueError, match=rf"{name} is {value!r}, but must be a whole number"):
        DenseNet(**options)


def test_numpys_numbers_are_numbers():
    shapes = [
        [tuple(p.shape) for p in DenseNet(kind(10), kind(2), kind(3), kind(1)).parameters()]
        for kind in (int, np.int8)
    ]
    assert shapes[0] == shapes[1]
