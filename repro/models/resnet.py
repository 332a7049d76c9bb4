"""Residual networks for small images: the CIFAR family of the paper, and 18, 50, 101 layers.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016
(arXiv:1512.03385).

In shapes, B is the batch size, C a number of channels, H and W the height and width.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from repro.models._shared import check_at_least, check_form, conv_bn, conv_bn_relu, he_normal

# Called with (in_channels, channels, stride); a block is returned with its output channels.
MakeShortcut = Callable[[int, int, int], nn.Module]
MakeBlock = Callable[[int, int, int], tuple[nn.Module, int]]

BOTTLENECK_EXPANSION = 4  # a bottleneck's output has four times its inner channels (Table 1)


class IdentityShortcut(nn.Module):
    """A shortcut without parameters, option A of section 3.3: zeros for the added channels."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.extra_channels = out_channels - in_channels
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, C_in, H, W) to (B, C_out, ⌈H/stride⌉, ⌈W/stride⌉)."""
        x = x[:, :, :: self.stride, :: self.stride]  # (B, C_in, ⌈H/stride⌉, ⌈W/stride⌉)
        return F.pad(x, (0, 0, 0, 0, 0, self.extra_channels))  # (B, C_out, ...)


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    return conv_bn(in_channels, out_channels, 1, stride)  # option B of section 3.3


class ResidualBlock(nn.Module):
    """y = relu(F(x) + x): equations 1 and 2, with a shortcut instead of x if shapes differ."""

    def __init__(self, residual: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, C_in, H, W) to (B, C_out, ⌈H/stride⌉, ⌈W/stride⌉)."""
        # No other operation reads the sum, so that the ReLU can work in place.
        return F.relu(self.residual(x) + self.shortcut(x), inplace=True)


def basic_block(
    in_channels: int, channels: int, stride: int, shortcut: MakeShortcut = _projection
) -> tuple[nn.Module, int]:
    """A block of two 3x3 convolutions (figure 5, left) and its output channels."""
    residual = nn.Sequential(
        conv_bn(in_channels, channels, 3, stride), nn.ReLU(inplace=True),
        conv_bn(channels, channels, 3),
    )  # fmt: skip
    return _block(residual, in_channels, channels, stride, shortcut)


def bottleneck_block(in_channels: int, channels: int, stride: int) -> tuple[nn.Module, int]:
    """A block of 1x1, 3x3, 1x1 convolutions (figure 5, right) and its output channels.

    Differs from the paper: the stride is in the 3x3 convolution, not in the first 1x1, as in
    torchvision and weiaicunzai/pytorch-cifar100; so every pixel is read.
    """
    out_channels = BOTTLENECK_EXPANSION * channels
    residual = nn.Sequential(
        conv_bn(in_channels, channels, 1), nn.ReLU(inplace=True),
        conv_bn(channels, channels, 3, stride), nn.ReLU(inplace=True),
        conv_bn(channels, out_channels, 1),
    )  # fmt: skip
    return _block(residual, in_channels, out_channels, stride, _projection)


def _block(
    residual: nn.Module, in_channels: int, out_channels: int, stride: int, shortcut: MakeShortcut
) -> tuple[nn.Module, int]:
    same_shape = stride == 1 and in_channels == out_channels
    short = nn.Identity() if same_shape else shortcut(in_channels, out_channels, stride)
    return ResidualBlock(residual, short), out_channels


class ResNet(nn.Module):
    """A 3x3 convolution, stages of residual blocks, global average pooling, a linear layer.

    The stem has `width` channels, as the inner ones of the first stage's blocks. Each further stage
    halves the feature map and doubles the channels; `block` makes a block, such as `basic_block`.
    Convolutions start from `he_normal`, as in section 3.4, the linear layer as in PyTorch.
    """

    def __init__(
        self,
        block: MakeBlock,
        blocks_per_stage: Sequence[int],
        num_classes: int,
        in_channels: int,
        width: int,
    ) -> None:
        super().__init__()
        check_at_least(1, num_classes=num_classes, in_channels=in_channels, width=width)
        self.stem = conv_bn_relu(in_channels, width, kernel_size=3)
        channels = width
        stages = []
        for stage, num_blocks in enumerate(blocks_per_stage):
            blocks = []
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                module, channels = block(channels, width * 2**stage, stride)
                blocks.append(module)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, num_classes)
        he_normal(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (B, in_channels, H, W) to logits (B, num_classes)."""
        x = self.stem(x)  # (B, width, H, W)
        x = self.stages(x)  # (B, C, H/2^s, W/2^s) after s halvings, rounded up
        x = x.mean(dim=(2, 3))  # (B, C)
        return self.classifier(x)  # (B, num_classes)


def resnet_cifar(
    depth: int = 20, num_classes: int = 10, in_channels: int = 3, width: int = 16
) -> ResNet:
    """Build a CIFAR ResNet of any depth: section 4.2, three stages of n basic blocks each.

    Shortcuts are parameter-free (option A). `depth` is the number of weighted layers, 6n + 2. The
    stages have `width`, 2 and 4 times as many channels. Images may have any size.
    """
    check_at_least(8, depth=depth)
    check_form(6, 2, depth=depth)  # three stages of n blocks of two convolutions
    block = partial(basic_block, shortcut=IdentityShortcut)
    return ResNet(block, (depth // 6,) * 3, num_classes, in_channels, width)


def resnet20(num_classes: int = 10, in_channels: int = 3, width: int = 16) -> ResNet:
    """Build the CIFAR ResNet of 20 layers, 0.27 M parameters (table 6). See `resnet_cifar`."""
    return resnet_cifar(20, num_classes, in_channels, width)


def resnet18(num_classes: int = 10, in_channels: int = 3, width: int = 64) -> ResNet:
    """Build ResNet-18 (table 1) for small images: 11,220,132 parameters with 100 classes.

    Differs from the paper: for 32x32 images the stem is one 3x3 convolution of stride 1 and there
    is no max-pooling, as in weiaicunzai/pytorch-cifar100. Any image size works, by global average
    pooling; at 224x224 it costs sixteen times torchvision's ResNet-18 in the stages. Options are
    those of `ResNet`, each at least 1.
    """
    return ResNet(basic_block, (2, 2, 2, 2), num_classes, in_channels, width)


def resnet50(num_classes: int = 10, in_channels: int = 3, width: int = 64) -> ResNet:
    """Build ResNet-50 (table 1) for small images: 23,705,252 parameters with 100 classes.

    Differs from the paper: the stem, as in `resnet18`, and the place of the stride, as in
    `bottleneck_block`.
    """
    return ResNet(bottleneck_block, (3, 4, 6, 3), num_classes, in_channels, width)


def resnet101(num_classes: int = 10, in_channels: int = 3, width: int = 64) -> ResNet:
    """Build ResNet-101 (table 1): 42,697,380 parameters with 100 classes. See `resnet50`."""
    return ResNet(bottleneck_block, (3, 4, 23, 3), num_classes, in_channels, width)
