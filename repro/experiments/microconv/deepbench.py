"""The 94 convolutional layers of DeepBench's training set (Table IV, Figure 8).

Source: Baidu Research, DeepBench, ``code/kernels/conv_problems.h``, the list ``training_set``;
grouped as in the paper's Table IV.
"""

from dataclasses import dataclass

from repro.microconv import Convolution

# Channels, height, width, filters, filter rows, filter columns, stride, padding, batch sizes.
_LAYERS: dict[str, tuple[tuple, ...]] = {
    "DeepSpeech": (
        (1, 161, 700, 32, 5, 20, 2, 0, (4, 8, 16, 32)),
        (32, 79, 341, 32, 5, 10, 2, 0, (4, 8, 16, 32)),
    ),
    "OCR": (
        (1, 48, 480, 16, 3, 3, 1, 1, (16,)),
        (16, 24, 240, 32, 3, 3, 1, 1, (16,)),
        (32, 12, 120, 64, 3, 3, 1, 1, (16,)),
        (64, 6, 60, 128, 3, 3, 1, 1, (16,)),
    ),
    "Face recognition": (
        (3, 108, 108, 64, 3, 3, 2, 1, (8,)),
        (64, 54, 54, 64, 3, 3, 1, 1, (8,)),
        (128, 27, 27, 128, 3, 3, 1, 1, (8,)),
        (128, 14, 14, 256, 3, 3, 1, 1, (8,)),
        (256, 7, 7, 512, 3, 3, 1, 1, (8,)),
        (64, 56, 56, 64, 3, 3, 1, 1, (8, 16)),
        (64, 56, 56, 256, 1, 1, 2, 0, (8, 16)),
        (128, 28, 28, 128, 3, 3, 1, 1, (8, 16)),
        (128, 28, 28, 512, 1, 1, 2, 0, (8, 16)),
        (256, 14, 14, 256, 1, 1, 1, 0, (8, 16)),
        (256, 14, 14, 256, 3, 3, 1, 1, (8, 16)),
        (256, 14, 14, 1024, 1, 1, 2, 0, (8, 16)),
        (512, 7, 7, 512, 1, 1, 1, 0, (8, 16)),
        (2048, 7, 7, 512, 1, 1, 2, 3, (8, 16)),
    ),
    "Vision": (
        (3, 224, 224, 64, 3, 3, 1, 1, (8, 16)),
        (64, 112, 112, 128, 3, 3, 1, 1, (8, 16)),
        (128, 56, 56, 256, 3, 3, 1, 1, (8, 16)),
        (256, 28, 28, 512, 3, 3, 1, 1, (8, 16)),
        (512, 14, 14, 512, 3, 3, 1, 1, (8, 16)),
        (512, 7, 7, 512, 3, 3, 1, 1, (8, 16)),
        (3, 224, 224, 64, 7, 7, 2, 3, (16,)),
        (192, 28, 28, 32, 5, 5, 1, 2, (16,)),
        (192, 28, 28, 64, 1, 1, 1, 0, (16,)),
        (512, 14, 14, 48, 5, 5, 1, 2, (16,)),
        (512, 14, 14, 192, 1, 1, 1, 0, (16,)),
        (832, 7, 7, 256, 1, 1, 1, 0, (16,)),
        (832, 7, 7, 128, 5, 5, 1, 2, (16,)),
    ),
    "Speaker ID": (
        (1, 161, 700, 64, 5, 5, 2, 1, (16,)),
        (64, 80, 350, 64, 3, 3, 1, 1, (16,)),
        (64, 80, 350, 128, 5, 5, 2, 1, (16,)),
        (128, 40, 175, 128, 3, 3, 1, 1, (16,)),
        (128, 40, 175, 256, 5, 5, 2, 1, (16,)),
        (256, 20, 84, 256, 3, 3, 1, 1, (16,)),
        (256, 20, 84, 512, 5, 5, 2, 1, (16,)),
        (512, 10, 42, 512, 3, 3, 1, 1, (16,)),
    ),
    "ResNet": (
        (64, 112, 112, 64, 1, 1, 1, 0, (8, 16)),
        (64, 56, 56, 256, 1, 1, 1, 0, (8, 16)),
        (256, 56, 56, 64, 1, 1, 1, 0, (8, 16)),
        (256, 56, 56, 128, 1, 1, 2, 0, (8, 16)),
        (128, 28, 28, 512, 1, 1, 1, 0, (8, 16)),
        (512, 28, 28, 128, 1, 1, 1, 0, (8, 16)),
        (512, 28, 28, 256, 1, 1, 2, 0, (8, 16)),
        (256, 14, 14, 1024, 1, 1, 1, 0, (8, 8, 16, 16)),
        (512, 28, 28, 1024, 1, 1, 2, 0, (8, 16)),
        (1024, 14, 14, 256, 1, 1, 1, 0, (8, 16)),
        (1024, 14, 14, 512, 1, 1, 2, 0, (8, 16)),
        (512, 7, 7, 512, 3, 3, 1, 1, (8, 16)),
        (512, 7, 7, 2048, 1, 1, 1, 0, (8, 16)),
        (1024, 14, 14, 2048, 1, 1, 2, 0, (8, 16)),
        (2048, 7, 7, 512, 1, 1, 1, 0, (8, 16)),
    ),
}


@dataclass(frozen=True)
class Layer:
    """One layer of DeepBench: its shape, and the batch size that it is defined with."""

    conv: Convolution
    batch: int

    def macs(self, factor: int) -> int:
        """Return multiplications of a forward pass at `factor` times the batch size."""
        conv = self.conv
        rows, columns = conv.out_size
        per_output = conv.in_channels * conv.taps
        return factor * self.batch * conv.out_channels * rows * columns * per_output


def layers(network_type: str) -> list[Layer]:
    """Return the layers of one network type, in DeepBench's order of shapes."""
    return [
        Layer(Convolution(c, h, w, k, (rows, columns), (stride,) * 2, (padding,) * 2), batch)
        for c, h, w, k, rows, columns, stride, padding, batches in _LAYERS[network_type]
        for batch in batches
    ]


def choose(
    network_type: str, factor: int, largest_mmacs: float | None, of_each_size: int | None
) -> list[Layer]:
    """Return the layers of one network type that are run, in DeepBench's order.

    Args:
        network_type: Such as ``OCR``.
        factor: Of the batch size.
        largest_mmacs: Leave out layers of more multiplications, in millions; None for none.
        of_each_size: How many of each kernel size, cheapest first; None for all.
    """
    every = layers(network_type)
    kept: dict[tuple[int, int], list[Layer]] = {}
    for layer in sorted(every, key=lambda layer: layer.macs(factor)):
        group = kept.setdefault(layer.conv.kernel_size, [])
        small = largest_mmacs is None or layer.macs(factor) <= largest_mmacs * 1e6
        if small and (of_each_size is None or len(group) < of_each_size):
            group.append(layer)
    chosen = [layer for group in kept.values() for layer in group]
    return sorted(chosen, key=every.index)
