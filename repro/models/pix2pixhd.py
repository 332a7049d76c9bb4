"""Pix2PixHD: images from label maps, by a generator and discriminators at several scales.

Source: Wang, Liu, Zhu, Tao, Kautz, Catanzaro, "High-Resolution Image Synthesis and Semantic
Manipulation with Conditional GANs", CVPR 2018 (arXiv:1711.11585).

In shapes, B is the batch size, H and W the height and width, and C_i = width · 2^i channels.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from repro.models._shared import check_at_least

FEATURE_MATCHING = 10.0  # λ of equation 5


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, added to their input: R1024 of the paper."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_reflected(channels, channels, 3),
            nn.ReLU(inplace=True),
            *_reflected(channels, channels, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, channels, H, W) to the same shape; H and W are at least 2."""
        return x + self.residual(x)


class PatchDiscriminator(nn.Module):
    """The 70x70 PatchGAN: it judges every patch of 70x70 pixels, C64-C128-C256-C512.

    Differs from the paper: the text has stride 2 in every layer, but patches of 70 pixels require,
    and the authors' code has, stride 1 in C512 and in the last layer.
    """

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        channels = [in_channels, width, 2 * width, 4 * width, 8 * width]
        self.layers = nn.ModuleList()
        for index, (source, target) in enumerate(pairwise(channels)):
            conv = nn.Conv2d(source, target, 4, stride=2 if index < 3 else 1, padding=2)
            norm = nn.InstanceNorm2d(target) if index > 0 else nn.Identity()
            self.layers.append(nn.Sequential(conv, norm, nn.LeakyReLU(0.2, inplace=True)))
        self.layers.append(nn.Conv2d(channels[-1], 1, 4, padding=2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Map (B, in_channels, H, W) to every layer's output; the last is (B, 1, ~H/8, ~W/8)."""
        outputs = []
        for layer in self.layers:
            x = layer(x)  # (B, C_i, ...)
            outputs.append(x)
        return outputs


class MultiScaleDiscriminator(nn.Module):
    """Discriminators of one architecture, each at half the resolution of the one before."""

    def __init__(self, in_channels: int, width: int, scales: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(PatchDiscriminator(in_channels, width) for _ in range(scales))

    def forward(self, labels: torch.Tensor, images: torch.Tensor) -> list[list[torch.Tensor]]:
        """Every layer's output at every scale, of labels and images (B, ..., H, W)."""
        x = torch.cat((labels, images), dim=1)  # (B, in_channels, H, W)
        outputs = [self.scales[0](x)]
        for discriminator in self.scales[1:]:
            x = F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False)  # halved
            outputs.append(discriminator(x))
        return outputs


class Pix2PixHD(nn.Module):
    """The global generator G_1, the discriminators D_1 to D_K, and the losses of both.

    The weights of convolutions start from N(0, 0.02²), biases as in PyTorch, as in the authors'
    code. Training and evaluation are the same: InstanceNorm keeps no statistics.

    Differs from the paper: there is no local enhancer, since 1024x512 is G_1's own resolution, no
    perceptual loss, which needs the weights of a trained VGG, and no encoder of instance features.

    Args:
        in_channels: Channels of the label maps: 35 classes of Cityscapes, one-hot, and the borders
            of instances.
        out_channels: Channels of the images.
        width: Channels of the first layer of the generator and of each discriminator, C_0.
        blocks: Residual blocks at the lowest resolution.
        scales: Number of discriminators, K.
        downsamplings: Number of times that the generator halves the resolution.
    """

    def __init__(
        self, in_channels: int = 36, out_channels: int = 3, width: int = 64, blocks: int = 9,
        scales: int = 3, downsamplings: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        check_at_least(1, in_channels=in_channels, out_channels=out_channels, width=width)
        check_at_least(1, blocks=blocks, scales=scales, downsamplings=downsamplings)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.multiple = 2**downsamplings
        # 3 pixels are reflected at full and 1 at the lowest resolution, which needs at least 4 and
        # 2; the coarsest discriminator needs 2, since InstanceNorm cannot normalise one pixel.
        self.smallest = max(4, 2 * self.multiple, 2**scales)
        self.generator = _generator(in_channels, out_channels, width, blocks, downsamplings)
        self.discriminator = MultiScaleDiscriminator(in_channels + out_channels, width, scales)
        self.apply(_initialise)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        """Map label maps (B, in_channels, H, W) to images (B, out_channels, H, W) in [-1, 1].

        Raises ValueError if H or W is no multiple of `multiple`, or below `smallest`.
        """
        height, width = labels.shape[2:]
        if height % self.multiple or width % self.multiple or min(height, width) < self.smallest:
            raise ValueError(
                f"the label maps are {height}x{width}, but height and width must be multiples of "
                f"{self.multiple} and at least {self.smallest}: resize or pad them"
            )
        return self.generator(labels)

    def generator_loss(
        self, labels: torch.Tensor, real: torch.Tensor, fake: torch.Tensor
    ) -> torch.Tensor:
        """The generator's loss: equation 5, with least squares for the GAN.

        Of label maps (B, in_channels, H, W), their real images and those of `forward`, both
        (B, out_channels, H, W). Feature matching is the mean over scales, as in the authors' code
        (equation 5 has the sum), of the sum over the layers before the last. The discriminators'
        parameters get gradients, too: clear them before training the discriminators.
        """
        of_fake = self.discriminator(labels, fake)
        with torch.no_grad():
            of_real = self.discriminator(labels, real)
        adversarial = [_squares(outputs[-1], 1.0) for outputs in of_fake]
        # The authors weight a layer by 4 / (strided layers + 1), which is 1 for their 3.
        matching = [
            F.l1_loss(ours, theirs)
            for fake_outputs, real_outputs in zip(of_fake, of_real, strict=True)
            for ours, theirs in zip(fake_outputs[:-1], real_outputs[:-1], strict=True)
        ]
        distance = torch.stack(matching).sum() / len(of_fake)
        return torch.stack(adversarial).sum() + FEATURE_MATCHING * distance

    def discriminator_loss(
        self, labels: torch.Tensor, real: torch.Tensor, fake: torch.Tensor
    ) -> torch.Tensor:
        """The discriminators' loss: least squares, over 2, summed over scales.

        No gradient reaches `fake`.
        """
        of_fake = self.discriminator(labels, fake.detach())
        of_real = self.discriminator(labels, real)
        losses = [_squares(outputs[-1], 0.0) for outputs in of_fake]
        losses += [_squares(outputs[-1], 1.0) for outputs in of_real]
        return torch.stack(losses).sum() / 2


def _generator(
    in_channels: int, out_channels: int, width: int, blocks: int, downsamplings: int
) -> nn.Module:
    layers = [*_reflected(in_channels, width, 7), nn.ReLU(inplace=True)]  # (B, C_0, H, W)
    channels = [width * 2**level for level in range(downsamplings + 1)]
    for source, target in pairwise(channels):
        layers += [
            nn.Conv2d(source, target, 3, stride=2, padding=1),  # (B, C_i, H/2^i, W/2^i)
            nn.InstanceNorm2d(target),
            nn.ReLU(inplace=True),
        ]
    layers += [ResidualBlock(channels[-1]) for _ in range(blocks)]
    for source, target in pairwise(reversed(channels)):
        layers += [
            nn.ConvTranspose2d(source, target, 3, stride=2, padding=1, output_padding=1),
            nn.InstanceNorm2d(target),
            nn.ReLU(inplace=True),
        ]
    layers += [nn.ReflectionPad2d(3), nn.Conv2d(width, out_channels, 7), nn.Tanh()]
    return nn.Sequential(*layers)  # (B, out_channels, H, W)


def _reflected(in_channels: int, out_channels: int, kernel_size: int) -> list[nn.Module]:
    return [
        nn.ReflectionPad2d(kernel_size // 2),
        nn.Conv2d(in_channels, out_channels, kernel_size),
        nn.InstanceNorm2d(out_channels),
    ]


def _squares(judgement: torch.Tensor, target: float) -> torch.Tensor:
    return (judgement - target).square().mean()


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, std=0.02)
