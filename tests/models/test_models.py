"""What every architecture has to do; then each layer by layer, and its number of parameters."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from repro import models
from repro.models import Pix2PixHD, build, deeplabv3plus, unet
from repro.models.alexnet import alexnet
from repro.models.amoebanet import NORMAL, REDUCTION, Cell, FactorizedReduction
from repro.models.deeplab import AtrousPyramid
from repro.models.densenet import DenseNet, densenet40
from repro.models.resnet import IdentityShortcut

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
    return model, torch.randn(batch_size, *image, dtype=torch.float64), (batch_size, *output)


def settled(model, x):
    """In evaluation, with statistics that fit, so that deep activations stay near 1."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model(x)
    return model.eval()


def test_every_architecture_is_tested_here():
    # Pix2PixHD makes no logits of images: it has tests of its own.
    assert set(MODELS) == set(models.__all__) - {"build", "Pix2PixHD"}


@EVERY
def test_shape_type_and_gradients_of_every_parameter(name):
    model, x, shape = small(name, batch_size=4)
    y = model(x)
    assert y.shape == shape and y.dtype == torch.float64 and y.isfinite().all()
    y.square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@EVERY
def test_samples_are_apart_and_channels_last_changes_nothing_but_the_layout(name):
    model, x, _ = small(name)
    settled(model, x)
    layouts, last = [], {"memory_format": torch.channels_last}
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.cat([model(sample) for sample in x.split(1)]), expected)
        note = lambda _, inputs: layouts.append(inputs[0].is_contiguous(**last))  # noqa: E731
        for module in model.to(**last).modules():
            if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
                module.register_forward_pre_hook(note)
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
        ("torchvision/resnet18", {"depth": 18}, "takes other options: .*depth"),
        ("resnet_cifar", {"depth": 18}, "pass depth=14 or depth=20"),
        ("amoebanet_d", {"num_layers": 5}, "num_layers is 5, .*pass num_layers=3 or num_layers=6"),
        ("amoebanet_d", {"num_filters": 7}, r"num_filters is 7; .* at least 8"),
        ("edsr", {"scale": 5}, "scale is 5: choose 1, 2, 3, 4 or 8"),
        ("edsr", {"scale": 2.0}, "scale is 2.0; give a whole number"),
        (alexnet, {"width": 63}, "width is 63, .* pass width=60 or width=66"),
        (DenseNet, DENSE | {"depth": 41}, r"depth is 41, but must be 3 n \+ 4: pass depth=40 or"),
        ("resnet20", {"width": True}, "width is True; give a whole number"),
        ("unet", {"depth": 2.0}, "depth is 2.0; give a whole number"),
    ],
)
def test_what_cannot_be_built_is_told_with_what_can(make, options, message):
    with pytest.raises(ValueError, match=message):
        build(make, **options) if isinstance(make, str) else make(**options)


def convolutions(model):
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def sizes_seen(model, x):
    """Height and width after each convolution of more than one pixel."""
    sizes = []
    for module in convolutions(model):
        if module.kernel_size != (1, 1):
            module.register_forward_hook(lambda m, x, y: sizes.append(tuple(y.shape[2:])))
    with torch.no_grad():
        return model.eval()(x).shape, sizes


def test_alexnet_has_caffes_groups_and_sizes():
    with torch.device("meta"):
        model = alexnet()
        _, sizes = sizes_seen(model, torch.empty(1, 3, 227, 227))
    found = [(m.groups, m.out_channels) for m in convolutions(model)]
    assert found == [(1, 96), (2, 256), (1, 384), (2, 384), (2, 256)]
    assert sizes == [(side, side) for side in (55, 27, 13, 13, 13)]
    assert alexnet(num_classes=5, width=6)(torch.randn(2, 3, 67, 75)).shape == (2, 5)


def test_identity_shortcut_keeps_the_channels_and_adds_zeros():
    shortcut = IdentityShortcut(in_channels=3, out_channels=8, stride=2)
    x = torch.randn(2, 3, 7, 6)
    y = shortcut(x)
    assert y.shape == (2, 8, 4, 3) and list(shortcut.parameters()) == []
    assert torch.equal(y[:, :3], x[:, :, ::2, ::2]) and not y[:, 3:].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_equals_torchvisions_with_the_small_stem(name):
    from repro._torchvision import torchvision

    reference = torchvision.models.get_model(name, weights=None, num_classes=5)
    reference.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    reference.maxpool = nn.Identity()
    ours, values = build(name, num_classes=5), reference.state_dict().values()
    ours.load_state_dict(dict(zip(ours.state_dict(), values, strict=True)))
    x = torch.randn(3, 3, 18, 13, dtype=torch.float64)
    torch.testing.assert_close(ours.double()(x), reference.double()(x))


def test_densenet_halves_twice_and_every_layer_keeps_what_it_read():
    torch.manual_seed(0)
    shape, sizes = sizes_seen(DenseNet(10, 3, 5, 1), torch.randn(2, 1, 12, 8))
    assert shape == (2, 5) and sizes == [(12, 8)] * 3 + [(6, 4)] * 2 + [(3, 2)] * 2
    layer = next(m for m in densenet40(4).modules() if type(m).__name__ == "_DenseLayer").eval()
    x = torch.randn(2, 16, 5, 5)
    added = functional.conv2d(torch.relu(layer.norm(x)), layer.conv.weight, padding=1)
    torch.testing.assert_close(layer(x), torch.cat((x, added), 1))
    assert sum(m.kernel_size == (1, 1) for m in convolutions(densenet40(1))) == 2


def test_an_odd_size_changes_nothing_away_from_the_border_of_a_unet():
    # With depth 1, an output pixel reads at most 2 + 2·3 + 2 around it.
    torch.manual_seed(0)
    model = unet(in_channels=1, width=4, depth=1).double().eval()
    assert not model.up[0].bias.any()
    seen = []
    model.contract[0].register_forward_hook(lambda module, x, y: seen.append(y))
    model.expand[0].register_forward_pre_hook(lambda module, x: seen.append(x[0][:, :4]))
    x = torch.randn(1, 1, 40, 40, dtype=torch.float64)
    with torch.no_grad():
        whole, odd = model(x), model(x[:, :, :39, :37])
    torch.testing.assert_close(odd[:, :, :28, :26], whole[:, :, :28, :26])
    assert torch.equal(seen[0], seen[1])  # a skip


@pytest.mark.parametrize("scale", [1, 2, 3, 4, 8])
def test_edsr_written_out(scale):
    """Two skips, the residuals scaled, 0.5 taken off and put back."""
    torch.manual_seed(0)
    model = build("edsr", blocks=2, width=4, scale=scale, channels=1).double()
    x, p = torch.rand(2, 1, 6, 5).double(), dict(model.named_parameters())

    def conv(name, value):
        return functional.conv2d(value, p[f"{name}.weight"], p[f"{name}.bias"], padding=1)

    start = h = conv("head", x - 0.5)
    for i in range(2):
        h = h + 0.1 * conv(f"body.{i}.residual.2", conv(f"body.{i}.residual.0", h).clamp(min=0))
    h = start + conv("body.2", h)
    steps = {1: [], 2: [2], 3: [3], 4: [2, 2], 8: [2, 2, 2]}[scale]
    for i, step in enumerate(steps):
        h = functional.pixel_shuffle(conv(f"tail.{2 * i}", h), step)
    torch.testing.assert_close(model(x), conv(f"tail.{2 * len(steps)}", h) + 0.5)


average = partial(
    functional.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False
)


def normal(s0, s1, op):
    s2 = op[0](s1) + torch.max_pool2d(s1, 3, 1, 1)
    s5 = torch.max_pool2d(s2, 3, 1, 1) + s2
    return s0, s1 + op[3](s0), op[4](s0) + op[5](s0), average(s1) + op[9](s5)


def reduction(s0, s1, op):
    s2 = torch.max_pool2d(s0, 2, 2) + torch.max_pool2d(s0, 3, 2, 1)
    s3 = s2 + op[3](s1)
    s4 = op[4](s2) + torch.max_pool2d(s2, 3, 1, 1)
    return s4, s3 + torch.max_pool2d(s1, 2, 2), average(s2) + op[9](s3)


@pytest.mark.parametrize(
    ("genotype", "written_out", "stride"), [(NORMAL, normal, 1), (REDUCTION, reduction, 2)]
)
def test_a_cell_adds_what_its_genotype_says(genotype, written_out, stride):
    torch.manual_seed(0)
    cell = Cell(genotype, 6, 5, 4, stride, before_is_larger=stride == 2).double().eval()
    x = torch.randn(2, 6, 6, 8, dtype=torch.float64)
    before = torch.randn(2, 5, 6 * stride, 8 * stride, dtype=torch.float64)
    states = written_out(cell.fit(x), cell.fit_before(before), cell.operations)
    torch.testing.assert_close(cell(x, before), torch.cat(states, dim=1))


@pytest.mark.parametrize("size", [(6, 4), (5, 3)])
def test_factorized_reduction_sees_both_diagonals(size):
    reduction = FactorizedReduction(1, 2).double().eval()
    nn.init.ones_(reduction.even.weight)
    nn.init.ones_(reduction.odd.weight)
    reduction.norm = nn.Identity()
    x = torch.rand(1, 1, *size, dtype=torch.float64)
    y = reduction(x)
    assert torch.equal(y[0, 0], x[0, 0, ::2, ::2])
    odd = x[0, 0, 1::2, 1::2]
    assert torch.equal(y[0, 1, : odd.shape[0], : odd.shape[1]], odd)
    assert y[0, 1].sum() == odd.sum()  # zeros where there is no pixel


def test_the_cost_of_deeplab_is_the_published_one():
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        deeplabv3plus().eval()(torch.empty(1, 3, 513, 513))
    # The authors' model zoo has 54.17 billion multiply-adds, counted by TensorFlow's profiler.
    assert counter.get_total_flops() / 2 == pytest.approx(54.17e9, rel=0.005)


def test_the_pyramid_sees_the_whole_image():
    torch.manual_seed(0)
    seen, pyramid = [], AtrousPyramid(4, 32).double().eval()
    x = torch.randn(1, 4, 41, 41, dtype=torch.float64, requires_grad=True)
    pyramid(x)[0, :, 0, 0].sum().backward()
    by_the_mean = x.grad[0, :, 40, 40]
    assert by_the_mean.all()
    others = (x.grad[0] - by_the_mean[:, None, None]).abs().sum(dim=0) > 1e-9
    # From the corner, each atrous rate reaches one pixel to the right, below, and diagonally.
    views = {(0, 0)} | {p for r in (6, 12, 18) for p in ((0, r), (r, 0), (r, r))}
    assert set(map(tuple, others.nonzero().tolist())) == views
    # and no view loses channels_last
    last = {"memory_format": torch.channels_last}
    pyramid.project.register_forward_pre_hook(lambda module, x: seen.append(x[0].stride()))
    pyramid.to(**last)(x.detach().contiguous(**last))
    assert seen[0][1] == 1


# Numbers of parameters, with the rounding of what is published
PUBLISHED = [
    (alexnet, {}, 60_965_224, 0),  # Caffe's bvlc_alexnet
    (unet, {}, 31_037_633, 0),  # milesial/Pytorch-UNet with transposed convolutions
    (deeplabv3plus, {}, 41_055_413, 0),
    (models.resnet18, {"num_classes": 100}, 11_220_132, 0),  # weiaicunzai/pytorch-cifar100
    (models.resnet50, {"num_classes": 100}, 23_705_252, 0),
    (models.resnet101, {"num_classes": 100}, 42_697_380, 0),
    # torchvision's documentation of ResNet50_Weights
    (partial(build, "torchvision/resnet50"), {"num_classes": 1000}, 25_557_032, 0),
    # He et al. 2016, table 6
    (models.resnet20, {}, 0.27e6, 5e3),
    (models.resnet_cifar, {"depth": 56}, 0.85e6, 5e3),
    (models.resnet_cifar, {"depth": 110}, 1.7e6, 5e4),
    # Huang et al. 2017, table 2, without bottlenecks and compression
    (densenet40, {}, 1.0e6, 5e4),
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
    with torch.device("meta"):
        model = make(**options)
    assert abs(sum(p.numel() for p in model.parameters()) - published) <= rounding


def pix2pixhd(**options) -> Pix2PixHD:
    torch.manual_seed(0)
    given = {"in_channels": 5, "width": 4, "blocks": 1, "scales": 2, "downsamplings": 2}
    return Pix2PixHD(**(given | options))


def batch(height: int = 16, width: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.rand(2, 5, height, width), torch.rand(2, 3, height, width) * 2 - 1


def test_images_have_the_size_of_the_labels_and_samples_are_apart():
    model, inside = pix2pixhd(out_channels=2, blocks=3).double(), []
    for module in model.generator:
        if type(module).__name__ == "ResidualBlock":
            module.register_forward_hook(lambda module, x, y: inside.append(tuple(y.shape[1:])))
    for size in ((8, 8), (16, 64), (12, 20)):
        inside.clear()
        labels = torch.rand(2, 5, *size, dtype=torch.float64)
        images = model(labels)
        assert images.shape == (2, 2, *size) and images.abs().max() <= 1
        assert inside == [(16, size[0] // 4, size[1] // 4)] * 3  # at the lowest resolution
        torch.testing.assert_close(torch.cat([model(one) for one in labels.split(1)]), images)


def test_a_patch_has_70_pixels():
    # InstanceNorm sees the whole image and is left out here.
    model = pix2pixhd(scales=1)
    for layer in model.discriminator.scales[0].layers[1:-1]:
        layer[1] = nn.Identity()
    x = torch.rand(1, 5, 128, 128, requires_grad=True)
    model.discriminator(x, torch.zeros(1, 3, 128, 128))[0][-1][0, 0, 9, 9].backward()
    reached = x.grad[0].abs().sum(dim=0)
    assert reached.any(dim=0).sum() == reached.any(dim=1).sum() == 70


class Judge(nn.Module):
    """Stands for the discriminators: the same outputs for every image, by hand."""

    def __init__(self, real: torch.Tensor, of_real, of_fake) -> None:
        super().__init__()
        self.real, self.of_real, self.of_fake = real, of_real, of_fake

    def forward(self, labels, images):
        outputs = self.of_real if torch.equal(images, self.real) else self.of_fake
        return [[torch.tensor(values) for values in scale] for scale in outputs]


def test_losses_by_hand():
    model = pix2pixhd()
    labels, real = batch()
    fake = model(labels)
    model.discriminator = Judge(
        real,
        of_real=[[[1.0, 2.0], [3.0], [0.5, 1.0]], [[0.0], [0.0], [1.0]]],
        of_fake=[[[1.0, 3.0], [1.0], [0.0, 0.5]], [[4.0], [0.0], [2.0]]],
    )
    # (0 - 1)² and (0.5 - 1)² at the first scale, (2 - 1)² at the second
    adversarial = (1 + 0.25) / 2 + 1
    # layers of the first scale 1/2 and 2, of the second 4 and 0; two scales
    matching = (0.5 + 2 + 4 + 0) / 2
    expected = adversarial + 10 * matching
    assert model.generator_loss(labels, real, fake).item() == pytest.approx(expected)
    # fakes: (0² + 0.5²) / 2 and 2²; real ones: (0.5² + 0²) / 2 and 0
    expected = (0.125 + 4 + 0.125 + 0) / 2
    assert model.discriminator_loss(labels, real, fake).item() == pytest.approx(expected)


def test_whom_the_losses_reach():
    model = pix2pixhd()
    labels, real = batch()
    fake = model(labels)
    fake.retain_grad()
    model.discriminator_loss(labels, real, fake).backward()
    assert fake.grad is None and all(p.grad is None for p in model.generator.parameters())
    assert all(p.grad is not None for p in model.discriminator.parameters())
    model.generator_loss(labels, real, model(labels)).backward()
    # InstanceNorm takes away whatever a bias before it adds; only the last layer has none behind.
    last = f"{len(model.generator) - 2}.bias"
    for name, parameter in model.generator.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.any() or (parameter.ndim == 1 and name != last), name
