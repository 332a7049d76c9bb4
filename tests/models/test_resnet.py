import math

import pytest
import torch
from torch import nn

from repro.models import resnet18, resnet20, resnet50, resnet101, resnet_cifar
from repro.models.resnet import IdentityShortcut


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# He et al. 2016, table 6, "# params" of the CIFAR-10 networks
@pytest.mark.parametrize(
    ("depth", "millions"),
    [(20, "0.27"), (32, "0.46"), (44, "0.66"), (56, "0.85"), (110, "1.7"), (1202, "19.4")],
)
def test_cifar_parameter_counts_are_the_papers(depth, millions):
    with torch.device("meta"):
        parameters = count(resnet_cifar(depth))
    digits = len(millions.split(".")[1])
    assert f"{parameters / 1e6:.{digits}f}" == millions


# weiaicunzai/pytorch-cifar100, CIFAR-100; printed in reports of those who train it
@pytest.mark.parametrize(
    ("build", "parameters"),
    [(resnet18, 11_220_132), (resnet50, 23_705_252), (resnet101, 42_697_380)],
)
def test_parameter_counts_with_100_classes(build, parameters):
    with torch.device("meta"):
        assert count(build(num_classes=100)) == parameters


@pytest.mark.parametrize("depth", [8, 14, 20, 32])
def test_depth_counts_the_weighted_layers(depth):
    with torch.device("meta"):
        model = resnet_cifar(depth)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth


@pytest.mark.parametrize(("build", "depth"), [(resnet18, 18), (resnet50, 50), (resnet101, 101)])
def test_depth_counts_the_weighted_layers_besides_projections(build, depth):
    with torch.device("meta"):
        model = build()
    layers = [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in name
    ]
    assert len(layers) == depth


def test_resnet20_is_the_cifar_network_of_20_layers():
    torch.manual_seed(0)
    a = resnet20(num_classes=7, in_channels=1, width=4)
    torch.manual_seed(0)
    b = resnet_cifar(20, num_classes=7, in_channels=1, width=4)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y)


def test_identity_shortcut_keeps_the_channels_and_adds_zeros():
    shortcut = IdentityShortcut(in_channels=3, out_channels=8, stride=2)
    x = torch.randn(2, 3, 7, 6)
    y = shortcut(x)
    assert y.shape == (2, 8, 4, 3)
    assert torch.equal(y[:, :3], x[:, :, ::2, ::2])
    assert torch.equal(y[:, 3:], torch.zeros(2, 5, 4, 3))
    assert count(shortcut) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_equals_torchvisions_with_the_small_stem(name):
    from repro._torchvision import torchvision

    reference = torchvision.models.get_model(name, weights=None, num_classes=5)
    reference.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    reference.maxpool = nn.Identity()
    ours = {"resnet18": resnet18, "resnet50": resnet50}[name](num_classes=5)
    values = reference.state_dict().values()
    ours.load_state_dict(dict(zip(ours.state_dict(), values, strict=True)))

    x = torch.randn(3, 3, 18, 13, dtype=torch.float64)
    torch.testing.assert_close(ours.double()(x), reference.double()(x))


def test_convolutions_start_as_he_et_al():
    torch.manual_seed(0)
    model = resnet18()
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 50_000:
            fan_out = module.out_channels * math.prod(module.kernel_size)
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.02)


@pytest.mark.parametrize("depth", [0, 7, 9, 21, -4, 20.0, True])
def test_depths_that_are_no_network(depth):
    with pytest.raises(ValueError, match=rf"depth is {depth}, .* pass depth="):
        resnet_cifar(depth)


def test_the_error_names_the_depths_beside():
    with pytest.raises(ValueError, match="pass depth=14 or depth=20"):
        resnet_cifar(18)
