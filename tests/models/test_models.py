"""What every architecture has to do."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import repro.models
from repro.models import Pix2PixHD, build
from repro.models.alexnet import alexnet
from repro.models.densenet import DenseNet

# Small relatives, each with the shapes of an image and of its output
CLASSES = {"num_classes": 5}
MODELS = {
    "resnet_cifar": (CLASSES | {"depth": 8, "width": 4}, (3, 16, 16), (5,)),
    "resnet20": (CLASSES | {"width": 4}, (3, 16, 12), (5,)),
    "resnet18": (CLASSES | {"width": 4}, (3, 16, 16), (5,)),
    "resnet50": (CLASSES | {"width": 2}, (3, 9, 8), (5,)),
    "resnet101": (CLASSES | {"width": 1}, (3, 8, 8), (5,)),
    "unet": (CLASSES | {"width": 4, "depth": 2}, (3, 13, 18), (5, 13, 18)),
    "densenet40": (CLASSES | {"growth": 2}, (3, 12, 8), (5,)),
    "deeplabv3plus": (CLASSES | {"width": 4}, (3, 33, 40), (5, 33, 40)),
    "amoebanet_d": (CLASSES | {"num_layers": 3, "num_filters": 8}, (3, 64, 48), (5,)),
    "edsr": ({"blocks": 2, "width": 4, "scale": np.int64(4)}, (3, 6, 5), (3, 24, 20)),
}
EVERY = pytest.mark.parametrize("name", MODELS)


def small(name, batch_size=3):
    options, image, output = MODELS[name]
    torch.manual_seed(0)
    model = build(name, **options).double()
    x = torch.randn(batch_size, *image, dtype=torch.float64)
    return model, x, (batch_size, *output)


def settled(model, x):
    """In evaluation, with statistics that fit, so that deep activations stay near 1."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model(x)
    return model.eval()


def test_every_architecture_is_tested_here():
    # Pix2PixHD makes no logits of images: it has a file of its own.
    assert set(MODELS) == set(repro.models.__all__) - {"build", "Pix2PixHD"}


@EVERY
def test_shape_type_and_gradients_of_every_parameter(name):
    model, x, shape = small(name, batch_size=4)
    y = model(x)
    assert y.shape == shape and y.dtype == torch.float64 and y.isfinite().all()
    y.square().sum().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


@EVERY
def test_samples_are_apart_and_channels_last_changes_nothing_but_the_layout(name):
    model, x, _ = small(name)
    settled(model, x)
    layouts, last = [], {"memory_format": torch.channels_last}
    with torch.no_grad():
        expected = model(x)
        alone = torch.cat([model(sample) for sample in x.split(1)])
        torch.testing.assert_close(alone, expected)
        for module in model.to(**last).modules():
            if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
                module.register_forward_pre_hook(
                    lambda _, inputs: layouts.append(inputs[0].is_contiguous(**last))
                )
        torch.testing.assert_close(model(x.to(**last)), expected)
    assert all(layouts)


@pytest.mark.parametrize("size", [(1, 1), (17, 16), (37, 50), (47, 5), (513, 21)])
def test_any_image_size(size):
    options = {"num_classes": 3, "in_channels": 2}
    for model, shape in (
        (build("unet", width=4, depth=1, **options), size),
        (build("unet", width=4, depth=3, **options), size),
        (build("deeplabv3plus", width=2, **options), size),
        (build("amoebanet_d", num_layers=3, num_filters=8, **options), ()),
    ):
        with torch.no_grad():
            assert model.eval()(torch.randn(2, 2, *size)).shape == (2, 3, *shape)


def he(channels, module):
    """He et al. 2015, equation 14; U-Net's transposed convolutions read one pixel for each."""
    pixels = 1 if isinstance(module, nn.ConvTranspose2d) else math.prod(module.kernel_size)
    return math.sqrt(2 / getattr(module, channels) / pixels)


@pytest.mark.parametrize(
    ("make", "expected", "least"),
    [
        (partial(build, "resnet18"), partial(he, "out_channels"), 50_000),
        (partial(build, "amoebanet_d", num_filters=64), partial(he, "out_channels"), 8_000),
        (partial(build, "densenet40"), partial(he, "in_channels"), 20_000),
        (partial(build, "unet", width=16, depth=3), partial(he, "in_channels"), 10_000),
        (partial(Pix2PixHD, width=16), lambda module: 0.02, 4_000),
    ],
)
def test_initial_weights(make, expected, least):
    torch.manual_seed(0)
    modules = (m for m in make().modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d))
    tried = [module for module in modules if module.weight.numel() > least]
    assert len(tried) > 2
    for module in tried:
        assert module.weight.std().item() == pytest.approx(expected(module), rel=0.03)


DENSE = {"growth": 12, "num_classes": 10, "in_channels": 3}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        ("resnet21", {}, r"'resnet21' is not known.*resnet20.*torchvision/"),
        ("resnet20", {"depth": 14}, r"resnet20 has no option depth.*num_classes.*width"),
        ("torchvision/resnet49", {}, r"no classifier 'resnet49'.*resnet50"),
        ("torchvision/resnet18", {"num_classes": 0}, "num_classes is 0"),
        ("resnet_cifar", {"depth": 18}, "pass depth=14 or depth=20"),
        ("amoebanet_d", {"num_layers": 5}, "num_layers is 5, .*pass num_layers=3 or num_layers=6"),
        ("amoebanet_d", {"num_filters": 7}, r"num_filters is 7, .* at least 8"),
        ("edsr", {"scale": 5}, "scale is 5: choose 1, 2, 3, 4 or 8"),
        ("edsr", {"scale": 2.0}, "scale is 2.0, but must be a whole number"),
        (alexnet, {"width": 63}, "width is 63, .* pass width=60 or width=66"),
        (DenseNet, DENSE | {"depth": 41}, r"depth is 41, but must be 3 n \+ 4: pass depth=40 or"),
        ("resnet20", {"width": True}, "width is True, .*: pass width="),
        ("unet", {"depth": 2.0}, "depth is 2.0, .*: pass depth="),
    ],
)
def test_what_cannot_be_built_is_told_with_what_can(make, options, message):
    with pytest.raises(ValueError, match=message):
        build(make, **options) if isinstance(make, str) else make(**options)
