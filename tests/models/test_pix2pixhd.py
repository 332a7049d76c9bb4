import pytest
import torch
from torch import nn

from repro.models import Pix2PixHD


def small(**options) -> Pix2PixHD:
    torch.manual_seed(0)
    given = {"in_channels": 5, "width": 4, "blocks": 1, "scales": 2, "downsamplings": 2}
    return Pix2PixHD(**(given | options))


def batch(height: int = 16, width: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.rand(2, 5, height, width), torch.rand(2, 3, height, width) * 2 - 1


def test_images_have_the_size_of_the_labels_and_samples_are_apart():
    model = small(out_channels=2, blocks=3).double()
    inside = []
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
    model = small(scales=1)
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


def test_whom_the_losses_reach():
    model = small()
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
