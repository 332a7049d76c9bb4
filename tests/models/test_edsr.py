"""EDSR: shapes, size, and what its blocks compute."""

import pytest
import torch
from torch.nn import functional

from repro.models import build

SCALES = (1, 2, 3, 4, 8)


def small(scale=2, **options):
    torch.manual_seed(0)
    options = {"blocks": 2, "width": 4} | options
    return build("edsr", scale=scale, **options).double()


def parameters_of(blocks, width, scale, channels):
    """Count weights and biases of 3x3 convolutions, as table 1 and figure 3 of EDSR list them."""
    same = 9 * width * width + width
    count = 9 * channels * width + width + (2 * blocks + 1) * same + 9 * width * channels + channels
    for s in {1: [], 2: [2], 3: [3], 4: [2, 2], 8: [2, 2, 2]}[scale]:
        count += 9 * width * (s * s * width) + s * s * width
    return count


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("channels", [1, 3])
def test_parameters(scale, channels):
    model = small(scale, channels=channels)
    assert sum(p.numel() for p in model.parameters()) == parameters_of(2, 4, scale, channels)


def test_the_defaults_are_the_papers_final_model():
    with torch.device("meta"):
        model = build("edsr")
    count = sum(p.numel() for p in model.parameters())
    assert count == parameters_of(32, 256, 2, 3) == 40_729_603


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 5, 7), (1, 4, 4)])
def test_shapes(scale, channels, height, width):
    y = small(scale, channels=channels)(torch.rand(2, channels, height, width).double())
    assert y.shape == (2, channels, scale * height, scale * width) and y.isfinite().all()


def test_what_it_computes():
    """The forward pass written out: two skips, the residuals scaled, 0.5 taken off and put back."""
    model = small(residual_scale=0.3)
    x = torch.rand(2, 3, 6, 5).double()
    p = dict(model.named_parameters())

    def conv(name, value):
        return functional.conv2d(value, p[f"{name}.weight"], p[f"{name}.bias"], padding=1)

    start = h = conv("head", x - 0.5)
    for i in range(2):
        inner = conv(f"body.{i}.residual.0", h).clamp(min=0)
        h = h + 0.3 * conv(f"body.{i}.residual.2", inner)
    h = start + conv("body.2", h)
    expected = conv("tail.2", functional.pixel_shuffle(conv("tail.0", h), 2)) + 0.5
    torch.testing.assert_close(model(x), expected)


def test_the_residual_scale_fades_blocks_out():
    x = torch.rand(1, 3, 6, 6).double()
    none = small(residual_scale=1e-12)
    with torch.no_grad():
        for block in list(none.body)[:-1]:
            before = torch.rand(1, 4, 6, 6).double()
            torch.testing.assert_close(block(before), before)
        assert (small(residual_scale=1.0)(x) - small(residual_scale=0.1)(x)).abs().max() > 1e-3


def test_gradients_reach_every_parameter_and_samples_are_apart():
    model, x = small(4), torch.rand(3, 3, 6, 6).double()
    y = model(x)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    torch.testing.assert_close(torch.cat([model(one) for one in x.split(1)]), y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 5}, "scale is 5: choose 1, 2, 3, 4 or 8"),
        ({"scale": 0}, "scale is 0"),
        ({"scale": 16}, "scale is 16"),
        ({"residual_scale": 0}, "residual_scale is 0: give a number above 0"),
        ({"residual_scale": float("nan")}, "residual_scale is nan"),
        ({"blocks": 0}, "blocks is 0, .* at least 1"),
        ({"width": 2.0}, r"width is 2\.0, .* at least 1"),
        ({"channels": True}, "channels is True, .* at least 1"),
        ({"num_classes": 10}, "edsr has no option num_classes.*blocks.*scale"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        build("edsr", **options)
