"""What every architecture has to do."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import repro.models
from repro.models import build

# Small relatives, each with the shapes of an image and of its output
MODELS = {
    "resnet_cifar": ({"depth": 8, "width": 4}, (3, 16, 16), (5,)),
    "resnet20": ({"width": 4}, (3, 16, 12), (5,)),
    "resnet18": ({"width": 4}, (3, 16, 16), (5,)),
    "resnet50": ({"width": 2}, (3, 9, 8), (5,)),
    "resnet101": ({"width": 1}, (3, 8, 8), (5,)),
    "unet": ({"width": 4, "depth": 2}, (3, 13, 18), (5, 13, 18)),
    "densenet40": ({"growth": 2}, (3, 12, 8), (5,)),
    "deeplabv3plus": ({"width": 4}, (3, 33, 40), (5, 33, 40)),
    "amoebanet_d": ({"num_layers": 3, "num_filters": 8}, (3, 64, 48), (5,)),
}
EVERY = pytest.mark.parametrize("name", MODELS)


def small(name, batch_size=3):
    options, image, output = MODELS[name]
    torch.manual_seed(0)
    model = build(name, num_classes=5, **options).double()
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
    # Pix2PixHD and EDSR make no logits of images: they have files of their own.
    assert set(MODELS) == set(repro.models.__all__) - {"build", "Pix2PixHD", "edsr"}


@EVERY
def test_output_shape_and_dtype(name):
    model, x, shape = small(name)
    y = model(x)
    assert y.shape == shape
    assert y.dtype == torch.float64
    assert y.isfinite().all()


@EVERY
def test_gradient_reaches_every_parameter(name):
    model, x, _ = small(name, batch_size=4)
    model(x).square().sum().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


@EVERY
def test_samples_do_not_see_each_other_in_evaluation(name):
    model, x, _ = small(name)
    settled(model, x)
    with torch.no_grad():
        together = model(x)
        alone = torch.cat([model(sample) for sample in x.split(1)])
    torch.testing.assert_close(together, alone)


@EVERY
def test_channels_last_changes_nothing_but_the_layout(name):
    model, x, _ = small(name)
    settled(model, x)
    with torch.no_grad():
        expected = model(x)
        last = model.to(memory_format=torch.channels_last)
        layouts = []
        for module in model.modules():
            if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
                module.register_forward_pre_hook(
                    lambda _, inputs: layouts.append(
                        inputs[0].is_contiguous(memory_format=torch.channels_last)
                    )
                )
        actual = last(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected)
    assert all(layouts)  # no operation falls back to the other layout on the way


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "resnet_cifar",
        "unet",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("resnet18", "amoebanet_d", "deeplabv3plus")
        ),
    ],
)
def test_one_graph_under_torch_compile(name):
    model, x, _ = small(name)
    settled(model, x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


@EVERY
@pytest.mark.parametrize("option", ["num_classes", "in_channels"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_options_that_no_model_has(name, option, value):
    with pytest.raises(ValueError, match=rf"{option} is {value}, .* at least 1: pass {option}="):
        build(name, **{option: value})


@pytest.mark.parametrize(
    "name", ["resnet_cifar", "resnet20", "resnet18", "resnet50", "unet", "deeplabv3plus"]
)
def test_widths_that_no_model_has(name):
    with pytest.raises(ValueError, match=r"width is 0, .* at least 1"):
        build(name, width=0)


def test_depth_that_no_unet_has():
    with pytest.raises(ValueError, match=r"depth is 0, .* at least 1"):
        build("unet", depth=0)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'resnet21' is not known.*resnet20.*torchvision/"):
        build("resnet21")


def test_an_unknown_option_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"resnet20 has no option depth.*num_classes.*width"):
        build("resnet20", depth=14)


def test_torchvisions_own():
    with torch.device("meta"):
        model = build("torchvision/resnet50", num_classes=1000)
    # torchvision's documentation of ResNet50_Weights: num_params
    assert sum(p.numel() for p in model.parameters()) == 25_557_032


def test_an_unknown_torchvision_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no classifier 'resnet49'.*resnet50"):
        build("torchvision/resnet49")


def test_torchvision_options_are_checked_too():
    with pytest.raises(ValueError, match="num_classes is 0"):
        build("torchvision/resnet18", num_classes=0)


@pytest.mark.slow
def test_import_leaves_torchvision_alone():
    code = "import sys, repro.models; sys.exit('torchvision' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
