import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from repro.models import deeplabv3plus
from repro.models.deeplab import AtrousPyramid, XceptionBlock


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def settled(model, x):
    """In evaluation, with statistics that fit, so that deep activations stay near 1."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model(x)
    return model.eval()


# Channels in and out of every separable convolution, as figure 4 and section 3 have them
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


@pytest.mark.parametrize(("width", "in_channels", "num_classes"), [(64, 3, 21), (8, 1, 2)])
def test_parameter_count_by_formula(width, in_channels, num_classes):
    parts = 64 // width  # all numbers above can be divided by 8

    expected = 9 * in_channels * (32 // parts) + 9 * (32 // parts) * (64 // parts)
    expected += 2 * (32 + 64) // parts
    for a, b in SEPARABLE:
        a, b = a // parts, b // parts
        expected += 9 * a + 2 * a + a * b + 2 * b  # each kernel, and its scale and shift
    for a, b in POINTWISE:
        a, b = a // parts, b // parts
        expected += a * b + 2 * b
    expected += (256 // parts + 1) * num_classes
    with torch.device("meta"):
        assert count(deeplabv3plus(in_channels, num_classes, width)) == expected


def test_size_and_cost_are_the_published_ones():
    with torch.device("meta"):
        model = deeplabv3plus().eval()
        assert count(model) == 41_055_413
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, 3, 513, 513))
    # The authors' model zoo has 54.17 billion multiply-adds, counted by TensorFlow's profiler.
    assert counter.get_total_flops() / 2 == pytest.approx(54.17e9, rel=0.005)


def test_xception_65_has_65_layers():
    # A separable convolution is one layer, and shortcuts are none.
    model = deeplabv3plus(width=1)
    parts = (model.stem, model.entry1, model.entry2, model.entry3, model.middle, model.exit)
    layers = [
        name
        for part in parts
        for name, module in part.named_modules()
        if isinstance(module, nn.Conv2d)
        and not (module.kernel_size == (1, 1) and "shortcut" in name)
        and not (module.kernel_size == (3, 3) and part is not model.stem)
    ]
    assert len(layers) == 65


@pytest.mark.parametrize("width", [1, 3, 7])
def test_widths_that_divide_nothing(width):
    model = deeplabv3plus(num_classes=2, width=width).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 33, 33)).shape == (1, 2, 33, 33)
    assert model.classifier.in_channels == 4 * width
    middle = model.middle[0].first[0].in_channels
    assert middle == pytest.approx(728 * width / 64, abs=0.5)


def test_strides():
    seen = {}
    model = deeplabv3plus(width=2).eval()
    for name in ("stem", "entry1", "reduce", "entry3", "middle", "exit", "pyramid", "decoder"):
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: tuple(output.shape[2:])})
        )
    with torch.no_grad():
        model(torch.randn(1, 3, 513, 130))
    assert seen["stem"] == (257, 65)
    assert seen["entry1"] == seen["reduce"] == seen["decoder"] == (129, 33)
    assert seen["entry3"] == seen["middle"] == seen["exit"] == seen["pyramid"] == (33, 9)


def test_atrous_rates():
    def rates(module):
        convs = [m for m in module.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
        return [conv.dilation for conv in convs]

    model = deeplabv3plus(width=4)
    assert rates(model.exit) == [(1, 1)] * 3 + [(2, 2)] * 3
    assert rates(model.pyramid) == [(6, 6), (12, 12), (18, 18)]
    assert set(rates(model.middle)) == set(rates(model.decoder)) == {(1, 1)}


@pytest.mark.parametrize("size", [(17, 17), (33, 48), (47, 16), (64, 65), (513, 21), (1, 1)])
def test_output_has_the_size_of_the_input(size):
    model = deeplabv3plus(in_channels=2, num_classes=3, width=2).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 2, *size)).shape == (2, 3, *size)


def test_a_block_adds_its_shortcut():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 7, 6)
    same = XceptionBlock(4, [5, 6, 4]).eval()
    half = XceptionBlock(4, [5, 6, 4], stride=2, give_second=True).eval()
    with torch.no_grad():
        body = same.third(same.second(same.first(x)))
        torch.testing.assert_close(same(x), body + x)
        second, y = half(x)
        torch.testing.assert_close(second, half.second(half.first(x)))
        torch.testing.assert_close(y, half.third(second) + half.shortcut(x))
    assert second.shape == (2, 6, 7, 6)
    assert y.shape == (2, 4, 4, 3)


def test_the_pyramid_sees_the_whole_image():
    torch.manual_seed(0)
    pyramid = AtrousPyramid(4, 32).double()
    settled(pyramid, torch.randn(4, 4, 41, 41, dtype=torch.float64))
    x = torch.randn(1, 4, 41, 41, dtype=torch.float64, requires_grad=True)
    pyramid(x)[0, :, 0, 0].sum().backward()
    by_the_mean = x.grad[0, :, 40, 40]
    assert by_the_mean.all()
    others = (x.grad[0] - by_the_mean[:, None, None]).abs().sum(dim=0) > 1e-9
    # From the corner, each atrous rate reaches one pixel to the right, below, and diagonally.
    views = {(0, 0)} | {p for r in (6, 12, 18) for p in ((0, r), (r, 0), (r, r))}
    assert set(map(tuple, others.nonzero().tolist())) == views


def test_no_view_of_the_pyramid_loses_channels_last():
    pyramid = AtrousPyramid(4, 6).to(memory_format=torch.channels_last).eval()
    layouts = []
    pyramid.project.register_forward_pre_hook(
        lambda module, inputs: layouts.append(
            inputs[0].is_contiguous(memory_format=torch.channels_last)
        )
    )
    x = torch.randn(2, 4, 9, 7)
    with torch.no_grad():
        pyramid(x.to(memory_format=torch.channels_last))
        pyramid.to(memory_format=torch.contiguous_format)(x)
    assert layouts == [True, False]


def test_one_image_trains_nowhere_but_is_evaluated():
    model = deeplabv3plus(width=1)
    x = torch.randn(1, 3, 33, 33)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(x)
    assert model.eval()(x).isfinite().all()
