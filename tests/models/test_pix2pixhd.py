from itertools import pairwise

import pytest
import torch
from torch import nn

from repro.models import Pix2PixHD


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def small(**options) -> Pix2PixHD:
    torch.manual_seed(0)
    given = {"in_channels": 5, "width": 4, "blocks": 1, "scales": 2, "downsamplings": 2}
    return Pix2PixHD(**(given | options))


def batch(height: int = 16, width: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.rand(2, 5, height, width), torch.rand(2, 3, height, width) * 2 - 1


class Judge(nn.Module):
    """Stands for the discriminators: the same outputs for every image, by hand."""

    def __init__(self, real: torch.Tensor, of_real, of_fake) -> None:
        super().__init__()
        self.real, self.of_real, self.of_fake = real, of_real, of_fake

    def forward(self, labels, images):
        outputs = self.of_real if torch.equal(images, self.real) else self.of_fake
        return [[torch.tensor(values) for values in scale] for scale in outputs]


def conv(a: int, b: int, kernel: int) -> int:
    return kernel * kernel * a * b + b


@pytest.mark.parametrize(
    ("inputs", "outputs", "width", "blocks", "scales", "levels"),
    [(36, 3, 64, 9, 3, 4), (5, 2, 6, 3, 1, 2)],
)
def test_parameter_counts_by_formula(inputs, outputs, width, blocks, scales, levels):
    with torch.device("meta"):
        model = Pix2PixHD(inputs, outputs, width, blocks, scales, levels)
    expected = conv(inputs, width, 7) + conv(width, outputs, 7)
    for level in range(levels):
        upper, lower = width * 2**level, width * 2 ** (level + 1)
        expected += conv(upper, lower, 3) + conv(lower, upper, 3)  # down, and up again
    lowest = width * 2**levels
    expected += blocks * 2 * conv(lowest, lowest, 3)
    assert count(model.generator) == expected

    channels = [inputs + outputs, width, 2 * width, 4 * width, 8 * width, 1]
    each = sum(conv(a, b, 4) for a, b in pairwise(channels))
    assert count(model.discriminator) == scales * each


def test_parameter_counts_of_the_published_model():
    # The paper has no count; the layers of its appendix add up to these.
    with torch.device("meta"):
        model = Pix2PixHD()
    assert count(model.generator) == 182_546_755
    assert count(model.discriminator) == 8_404_803


@pytest.mark.parametrize("size", [(8, 8), (16, 64), (32, 24), (12, 20)])
def test_images_have_the_size_of_the_labels(size):
    images = small(out_channels=2)(torch.rand(2, 5, *size))
    assert images.shape == (2, 2, *size)
    assert images.abs().max() <= 1


@pytest.mark.parametrize("size", [(30, 32), (32, 31), (4, 32), (32, 4)])
def test_sizes_that_do_not_fit(size):
    message = rf"maps are {size[0]}x{size[1]}, .* multiples of 4 and at least 8: resize or pad"
    with pytest.raises(ValueError, match=message):
        small()(torch.rand(1, 5, *size))


@pytest.mark.parametrize(("scales", "downsamplings"), [(1, 1), (4, 1), (2, 3), (5, 2)])
def test_the_smallest_size_can_be_trained_on(scales, downsamplings):
    model = small(scales=scales, downsamplings=downsamplings)
    labels, real = batch(model.smallest, model.smallest)
    loss = model.generator_loss(labels, real, model(labels))
    loss = loss + model.discriminator_loss(labels, real, real)
    assert loss.isfinite()
    with pytest.raises(ValueError, match=f"at least {model.smallest}"):
        model(labels[:, :, model.multiple :])


def test_the_lowest_resolution():
    model = small(blocks=3)
    inside = []
    for module in model.generator:
        if type(module).__name__ == "ResidualBlock":
            module.register_forward_hook(lambda module, inputs, y: inside.append(y.shape))
    model(torch.rand(1, 5, 16, 24))
    assert inside == [(1, 16, 4, 6)] * 3


def test_layers_and_scales_of_the_discriminators():
    model = small(scales=3)
    labels, real = batch(64, 32)
    outputs = model.discriminator(labels, real)
    assert len(outputs) == 3
    for scale in outputs:
        assert [layer.shape[1] for layer in scale] == [4, 8, 16, 32, 1]
    # A 4x4 convolution with 2 pixels of padding has one pixel more than half, or than its input.
    assert [layer.shape[2] for layer in outputs[0]] == [33, 17, 9, 10, 11]
    assert [scale[-1].shape[2:] for scale in outputs] == [(11, 7), (7, 5), (5, 4)]


def test_a_patch_has_70_pixels():
    # InstanceNorm sees the whole image and is left out here.
    model = small(scales=1)
    for layer in model.discriminator.scales[0].layers[1:-1]:
        layer[1] = nn.Identity()
    x = torch.rand(1, 5, 128, 128, requires_grad=True)
    judgement = model.discriminator(x, torch.zeros(1, 3, 128, 128))[0][-1]
    judgement[0, 0, 9, 9].backward()
    reached = x.grad[0].abs().sum(dim=0)
    assert reached.any(dim=0).sum() == reached.any(dim=1).sum() == 70


def test_coarser_scales_see_the_mean_of_neighbours():
    model = small()
    seen = []
    model.discriminator.scales[1].register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    labels, real = batch(8, 8)
    model.discriminator(labels, real)
    both = torch.cat((labels, real), dim=1)
    assert seen[0].shape == (2, 8, 4, 4)
    torch.testing.assert_close(seen[0][:, :, 1, 2], both[:, :, 1:4, 3:6].mean(dim=(2, 3)))
    # At the border the mean is over the pixels that exist.
    torch.testing.assert_close(seen[0][:, :, 0, 0], both[:, :, :2, :2].mean(dim=(2, 3)))


def test_losses_by_hand():
    model = small()
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


def test_perfect_players_lose_nothing():
    model = small()
    labels, real = batch()
    fake = model(labels)
    features, zero, one = [1.0, -2.0], [0.0, 0.0], [1.0, 1.0]
    model.discriminator = Judge(real, [[features, one]] * 2, [[features, zero]] * 2)
    assert model.discriminator_loss(labels, real, fake).item() == 0
    model.discriminator = Judge(real, [[features, one]] * 2, [[features, one]] * 2)
    assert model.generator_loss(labels, real, fake).item() == 0


def test_equal_images_have_equal_features():
    model = small()
    labels, real = batch()
    with torch.no_grad():
        outputs = model.discriminator(labels, real)
        adversarial = sum((scale[-1] - 1).square().mean() for scale in outputs)
        # exactly: nothing is added to it
        assert torch.equal(model.generator_loss(labels, real, real), adversarial)


def test_the_discriminators_loss_reaches_only_them():
    model = small()
    labels, real = batch()
    fake = model(labels)
    fake.retain_grad()
    model.discriminator_loss(labels, real, fake).backward()
    assert fake.grad is None
    assert all(parameter.grad is None for parameter in model.generator.parameters())
    missing = [n for n, p in model.discriminator.named_parameters() if p.grad is None]
    assert missing == []


def test_the_generators_loss_reaches_all_of_the_generator():
    model = small()
    labels, real = batch()
    model.generator_loss(labels, real, model(labels)).backward()
    parameters = dict(model.generator.named_parameters())
    assert [name for name, p in parameters.items() if p.grad is None] == []
    # InstanceNorm takes away whatever a bias before it adds; only the last layer has none behind.
    last = f"{len(model.generator) - 2}.bias"
    matter = [name for name, p in parameters.items() if p.ndim == 4 or name == last]
    assert last in matter
    assert [name for name in matter if not parameters[name].grad.any()] == []


def test_samples_do_not_see_each_other():
    model = small().double()
    labels = torch.rand(3, 5, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        alone = torch.cat([model(sample) for sample in labels.split(1)])
        torch.testing.assert_close(model(labels), alone)


def test_both_players_learn():
    model = small()
    labels, real = batch()
    first = torch.optim.Adam(model.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    with torch.no_grad():
        before = model.generator_loss(labels, real, model(labels))
    for _ in range(10):
        first.zero_grad()
        model.generator_loss(labels, real, model(labels)).backward()
        first.step()
    with torch.no_grad():
        assert model.generator_loss(labels, real, model(labels)) < before


def test_weights_start_as_the_authors_have_them():
    for module in small(width=16).modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d) and module.weight.numel() > 4000:
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    "name", ["in_channels", "out_channels", "width", "blocks", "scales", "downsamplings"]
)
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_options_that_no_model_has(name, value):
    with pytest.raises(ValueError, match=rf"{name} is {value}, .* at least 1: pass {name}=1"):
        Pix2PixHD(**{name: value})
