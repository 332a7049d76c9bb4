"""DeepLabv3+: a pixel-wise classifier from atrous separable convolutions, on Xception-65.

Source: Chen, Zhu, Papandreou, Schroff, Adam, "Encoder-Decoder with Atrous Separable Convolution for
Semantic Image Segmentation", ECCV 2018 (arXiv:1802.02611).

In shapes, B is the batch size, H and W the height and width, c(n) = n · width / 64 the channels for
the paper's n, and H/s, W/s the size after a total stride of s, rounded up.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from repro.models._shared import check_at_least, conv_bn, conv_bn_relu

MIDDLE_BLOCKS = 16
ATROUS_RATES = (6, 12, 18)  # of the pyramid at output stride 16
DROPOUT = 0.1  # the authors' code keeps 0.9

_resize = partial(F.interpolate, mode="bilinear", align_corners=False)


class XceptionBlock(nn.Module):
    """Three separable convolutions and a shortcut: a box of figure 4.

    The shortcut is the input itself if input and output have the same shape, and otherwise a 1x1
    convolution with BatchNorm. The last convolution has the stride, instead of Xception's max
    pooling. With `give_second` the second convolution's output is returned, too.
    """

    def __init__(
        self, in_channels: int, channels: Sequence[int], stride: int = 1, give_second: bool = False
    ) -> None:
        super().__init__()
        first, second, third = channels
        self.give_second = give_second
        self.first = _separable(in_channels, first)
        self.second = _separable(first, second)
        self.third = _separable(second, third, stride=stride)
        same_shape = stride == 1 and in_channels == third
        self.shortcut = nn.Identity() if same_shape else conv_bn(in_channels, third, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Map (B, C_in, H, W) to (B, C_3, ⌈H/stride⌉, ⌈W/stride⌉), after (B, C_2, H, W)."""
        second = self.second(self.first(x))  # (B, C_2, H, W)
        x = self.third(second) + self.shortcut(x)  # (B, C_3, ⌈H/stride⌉, ⌈W/stride⌉)
        return (second, x) if self.give_second else x


class AtrousPyramid(nn.Module):
    """Atrous spatial pyramid pooling: five parallel views of the same features (figure 2).

    A 1x1 convolution combines them: a 1x1 convolution, three separable convolutions of growing
    atrous rates, and the mean over the image.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        atrous = (_separable(in_channels, out_channels, dilation=rate) for rate in ATROUS_RATES)
        self.views = nn.ModuleList([conv_bn_relu(in_channels, out_channels, 1), *atrous])
        self.image_view = conv_bn_relu(in_channels, out_channels, 1)
        views = len(self.views) + 1
        self.project = nn.Sequential(
            conv_bn_relu(views * out_channels, out_channels, 1), nn.Dropout(DROPOUT)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, H, W)."""
        views = [view(x) for view in self.views]  # four times (B, out_channels, H, W)
        mean = self.image_view(x.mean(dim=(2, 3), keepdim=True))  # (B, out_channels, 1, 1)
        # The same as bilinear interpolation, which like `expand` would lose channels_last.
        views.append(torch.empty_like(views[0]).copy_(mean))  # (B, out_channels, H, W)
        return self.project(torch.cat(views, dim=1))  # (B, out_channels, H, W)


class DeepLabV3Plus(nn.Module):
    """An Xception of output stride 16, an atrous pyramid, and a decoder of stride 4.

    Images may have any size. In training a mini-batch of one image raises PyTorch's ValueError:
    the mean over the image leaves BatchNorm one value for each channel.

    Differs from the paper: a dropout of 0.1 follows the pyramid, as in the authors' code. BatchNorm
    and ReLU follow both parts of every separable convolution (in the authors' code a block with a
    shortcut has its ReLU before each). BatchNorm's options and initial weights are PyTorch's.

    Args:
        in_channels: Channels of the images.
        num_classes: Number of logits for each pixel; 21 for PASCAL VOC 2012.
        width: Channels of the stem's output; all others are in proportion, rounded, at least 1.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 21, width: int = 64) -> None:
        super().__init__()
        check_at_least(1, in_channels=in_channels, num_classes=num_classes, width=width)

        c32, c48, c64, c128, c256, c728, c1024, c1536, c2048 = (
            max(1, round(count * width / 64))
            for count in (32, 48, 64, 128, 256, 728, 1024, 1536, 2048)
        )
        self.stem = nn.Sequential(
            conv_bn_relu(in_channels, c32, 3, stride=2), conv_bn_relu(c32, c64, 3)
        )
        self.entry1 = XceptionBlock(c64, [c128] * 3, stride=2)
        self.entry2 = XceptionBlock(c128, [c256] * 3, stride=2, give_second=True)
        self.entry3 = XceptionBlock(c256, [c728] * 3, stride=2)
        self.middle = nn.Sequential(
            *(XceptionBlock(c728, [c728] * 3) for _ in range(MIDDLE_BLOCKS))
        )
        # At output stride 32 this block has stride 2. At 16 it has none, and the layers after it
        # use twice the atrous rate for the same field of view.
        self.exit = nn.Sequential(
            XceptionBlock(c728, [c728, c1024, c1024]),
            _separable(c1024, c1536, dilation=2),
            _separable(c1536, c1536, dilation=2),
            _separable(c1536, c2048, dilation=2),
        )
        self.pyramid = AtrousPyramid(c2048, c256)
        self.reduce = conv_bn_relu(c256, c48, 1)
        self.decoder = nn.Sequential(_separable(c256 + c48, c256), _separable(c256, c256))
        self.classifier = nn.Conv2d(c256, num_classes, kernel_size=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (B, in_channels, H, W) to logits (B, num_classes, H, W)."""
        image_size = x.shape[2:]
        x = self.stem(x)  # (B, c(64), H/2, W/2)
        x = self.entry1(x)  # (B, c(128), H/4, W/4)
        low, x = self.entry2(x)  # (B, c(256), H/4, W/4) and (B, c(256), H/8, W/8)
        x = self.entry3(x)  # (B, c(728), H/16, W/16)
        x = self.middle(x)  # (B, c(728), H/16, W/16)
        x = self.exit(x)  # (B, c(2048), H/16, W/16)
        x = self.pyramid(x)  # (B, c(256), H/16, W/16)
        low = self.reduce(low)  # (B, c(48), H/4, W/4)
        x = _resize(x, low.shape[2:])  # (B, c(256), H/4, W/4)
        x = torch.cat((x, low), dim=1)  # (B, c(256) + c(48), H/4, W/4)
        x = self.decoder(x)  # (B, c(256), H/4, W/4)
        x = self.classifier(x)  # (B, num_classes, H/4, W/4)
        return _resize(x, image_size)  # (B, num_classes, H, W)


deeplabv3plus = DeepLabV3Plus  # named as the functions that build the other architectures


def _separable(
    in_channels: int, out_channels: int, stride: int = 1, dilation: int = 1
) -> nn.Module:
    # A 3x3 convolution of each channel, then a 1x1 convolution (figure 3).
    return nn.Sequential(
        nn.Conv2d(in_channels, in_channels, 3, stride, padding=dilation, dilation=dilation,
                  groups=in_channels, bias=False),
        nn.BatchNorm2d(in_channels),
        nn.ReLU(inplace=True),
        conv_bn_relu(in_channels, out_channels, 1),
    )  # fmt: skip
