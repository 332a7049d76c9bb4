"""AmoebaNet-D: an image classifier with two cells found by evolution.

Sources: the cells are from Real, Aggarwal, Huang, Le, "Regularized Evolution for Image Classifier
Architecture Search", AAAI 2019 (arXiv:1802.01548), as in the authors' TensorFlow code
(tensorflow/tpu, models/official/amoeba_net). They are stacked as in kakaobrain/torchgpipe, which
gives the sizes of Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", NeurIPS 2019 (arXiv:1811.06965), table 1.

In shapes, B is the batch size, C the channels of a cell's operations, H and W the height and
width. Where a stride halves an odd size, it rounds up.
"""

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from repro.models._shared import check_at_least, check_form, he_normal

Pair = tuple[int, int]


# ---- the operations of the search space: (B, C, H, W) to (B, C, ⌈H/stride⌉, ⌈W/stride⌉)


def _relu_conv_bn(
    in_channels: int, out_channels: int, kernel: Pair = (1, 1), stride: Pair = (1, 1)
) -> nn.Module:
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(),  # not in place: several operations read the same state
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def _bottleneck(channels: int, *middle: tuple[Pair, Pair]) -> nn.Module:
    """Convolutions of these kernels and strides on a quarter of the channels."""
    inner = channels // 4
    return nn.Sequential(
        _relu_conv_bn(channels, inner),
        *(_relu_conv_bn(inner, inner, kernel, stride) for kernel, stride in middle),
        _relu_conv_bn(inner, channels),
    )


OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {  # given channels and stride
    "none": lambda c, s: nn.Identity(),  # used only at stride 1
    # The average leaves the padding out.
    "avg_pool_3x3": lambda c, s: nn.AvgPool2d(3, s, padding=1, count_include_pad=False),
    "max_pool_3x3": lambda c, s: nn.MaxPool2d(3, s, padding=1),
    # Rounding up gives odd sizes the same result as the other operations.
    "max_pool_2x2": lambda c, s: nn.MaxPool2d(2, s, ceil_mode=True),
    "conv_1x1": lambda c, s: _relu_conv_bn(c, c, stride=(s, s)),
    "conv_3x3": lambda c, s: _bottleneck(c, ((3, 3), (s, s))),
    "conv_1x7_7x1": lambda c, s: _bottleneck(c, ((1, 7), (1, s)), ((7, 1), (s, 1))),
}


# ---- the two cells


class Genotype(NamedTuple):
    """The architecture of a cell.

    States 0 and 1 are the outputs of the previous cell and of the cell before. Each pair of
    (state, operation) makes the next state, 2, 3, 4, ..., as the sum of its two results. The
    `returned` states are concatenated into the cell's output.
    """

    pairs: tuple[tuple[tuple[int, str], tuple[int, str]], ...]
    returned: tuple[int, ...]


# State 0 is returned although state 3 reads it. By the paper's rule only unread states are
# returned; the authors' code returns it, too, and only so the sizes match GPipe's table 1.
NORMAL = Genotype(
    (
        ((1, "conv_1x1"), (1, "max_pool_3x3")),  # state 2
        ((1, "none"), (0, "conv_1x7_7x1")),  # state 3
        ((0, "conv_1x1"), (0, "conv_1x7_7x1")),  # state 4
        ((2, "max_pool_3x3"), (2, "none")),  # state 5
        ((1, "avg_pool_3x3"), (5, "conv_1x1")),  # state 6
    ),
    returned=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    (
        ((0, "max_pool_2x2"), (0, "max_pool_3x3")),  # state 2
        ((2, "none"), (1, "conv_3x3")),  # state 3
        ((2, "conv_1x7_7x1"), (2, "max_pool_3x3")),  # state 4
        ((3, "none"), (1, "max_pool_2x2")),  # state 5
        ((2, "avg_pool_3x3"), (3, "conv_1x1")),  # state 6
    ),
    returned=(4, 5, 6),
)


class FactorizedReduction(nn.Module):
    """Halve a map by two 1x1 convolutions of stride 2, one of them a pixel down and right."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        half = out_channels // 2
        self.even = nn.Conv2d(in_channels, half, kernel_size=1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, half, kernel_size=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, C_in, H, W) to (B, C_out, ⌈H/2⌉, ⌈W/2⌉)."""
        x = F.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]  # (B, C_in, H, W), one pixel on
        x = torch.cat((self.even(x), self.odd(shifted)), dim=1)  # (B, C_out, ⌈H/2⌉, ⌈W/2⌉)
        return self.norm(x)


class Cell(nn.Module):
    """A normal cell, or a reduction cell: its stride-2 operations on states 0 and 1 halve the map.

    It reads the previous cell's output (`in_channels`) and the one before it (`before_channels`),
    which is twice as high and wide (`before_is_larger`) if the previous cell is a reduction.
    """

    def __init__(
        self, genotype: Genotype, in_channels: int, before_channels: int, channels: int,
        stride: int, before_is_larger: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.fit = _relu_conv_bn(in_channels, channels)
        if before_is_larger:
            self.fit_before: nn.Module = FactorizedReduction(before_channels, channels)
        else:
            self.fit_before = _relu_conv_bn(before_channels, channels)

        self.states = tuple((left[0], right[0]) for left, right in genotype.pairs)
        self.returned = genotype.returned
        self.operations = nn.ModuleList(
            OPERATIONS[operation](channels, stride if state < 2 else 1)
            for state, operation in chain.from_iterable(genotype.pairs)
        )
        self.out_channels = len(genotype.returned) * channels

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Map the last two outputs, the newer first, to (B, out_channels, ⌈H/stride⌉, ...)."""
        states = [self.fit(x), self.fit_before(before)]  # 2 of (B, C, H, W)
        operations = iter(self.operations)
        for left, right in self.states:
            left_result = next(operations)(states[left])
            right_result = next(operations)(states[right])
            states.append(left_result + right_result)  # (B, C, ⌈H/stride⌉, ⌈W/stride⌉)
        return torch.cat([states[index] for index in self.returned], dim=1)


class AmoebaNet(nn.Module):
    """A convolution, two reduction cells, three groups of normal cells with reductions between.

    Convolutions start from `he_normal`, as in the authors' code, the linear layer as in PyTorch.
    Each reduction doubles the channels.
    """

    def __init__(
        self, num_classes: int, cells_per_group: int, stem_channels: int, in_channels: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, stem_channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(stem_channels),
        )
        group = (NORMAL,) * cells_per_group
        genotypes = (REDUCTION, REDUCTION, *group, REDUCTION, *group, REDUCTION, *group)

        self.cells = nn.ModuleList()
        channels = last = before = stem_channels
        before_is_larger = False
        for genotype in genotypes:
            stride = 2 if genotype is REDUCTION else 1
            channels *= stride
            cell = Cell(genotype, last, before, channels, stride, before_is_larger)
            self.cells.append(cell)
            last, before, before_is_larger = cell.out_channels, last, stride == 2
        self.classifier = nn.Linear(last, num_classes)
        he_normal(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (B, in_channels, H, W) to logits (B, num_classes)."""
        x = before = self.stem(x)  # (B, stem_channels, H/2, W/2)
        for cell in self.cells:
            x, before = cell(x, before), x  # H/8 in the first group, then H/16, H/32
        x = F.relu(x).mean(dim=(2, 3))  # (B, C)
        return self.classifier(x)  # (B, num_classes)


def amoebanet_d(
    num_classes: int = 10, num_layers: int = 6, num_filters: int = 190, in_channels: int = 3
) -> AmoebaNet:
    """Build AmoebaNet-D (num_layers, num_filters), the (L, D) of GPipe's table 1.

    With 1000 classes (18, 208) has 81.5 M parameters, as in torchgpipe's memory benchmark. The
    default is the configuration of Micro Batch Streaming (Piao et al., section 4.2.2).

    Differs from the paper: there is no auxiliary classifier, dropout or drop path, BatchNorm has
    PyTorch's momentum and epsilon, and the stem follows torchgpipe: a first convolution of D/4
    filters and reduction cells of D/2 and D (the authors': 32, D/4 and D/2). Three parts follow the
    authors' code and not torchgpipe: 3x3 maximum pooling is a maximum (in torchgpipe an average), a
    ReLU precedes the classifier and none is applied to the image, and average pooling is global for
    every image size (in torchgpipe 7x7).

    Args:
        num_classes: Number of outputs.
        num_layers: Number of normal cells, a multiple of 3; reduction cells are not counted.
        num_filters: Channels of the operations in the first group of normal cells, rounded down
            to a multiple of 4; at least 8.
        in_channels: Channels of the images, which are halved five times.
    """
    check_at_least(1, num_classes=num_classes, in_channels=in_channels)
    check_at_least(3, num_layers=num_layers)
    check_at_least(8, num_filters=num_filters)  # else a stem cell's bottleneck has no channels
    check_form(3, num_layers=num_layers)  # three groups of equal length
    return AmoebaNet(num_classes, num_layers // 3, num_filters // 4, in_channels)
