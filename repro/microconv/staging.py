"""Kernels in groups and of 16 bits, by algorithms that know neither: one group at a time.

A group's operands are copied to buffers of the workspace, as float32 where they have 16 bits, and
computed there. Of the configurations in section III-D that is PSEUDO_HALF: data of 16 bits,
products and sums in float32.

Differs from the paper: the copies take workspace and time, which cuDNN's own conversion does not.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from repro.microconv.kernels import Buffers, Kernel

# Of more groups, such as one for each channel, torch's own convolution is far ahead.
MOST_GROUPS = 8
PREFIX = "staged "


def is_staged(kernel: Kernel) -> bool:
    """Return whether a kernel has to be staged: it has groups, or 16 bits."""
    return kernel.conv.groups > 1 or kernel.torch_dtype.itemsize < 4


def of_one_group(kernel: Kernel) -> Kernel | None:
    """Return the kernel that computes one group, in float32 at least; None of too many groups."""
    conv = kernel.conv
    if conv.groups > MOST_GROUPS:
        return None
    one = replace(
        conv,
        in_channels=conv.in_channels // conv.groups,
        out_channels=conv.out_channels // conv.groups,
        groups=1,
    )
    wide = "float32" if kernel.torch_dtype.itemsize < 4 else kernel.dtype
    return replace(kernel, conv=one, dtype=wide)


def buffers(kernel: Kernel, b: int) -> Buffers:
    """Return what is staged of a micro-batch: both operands and the result of one group."""
    one = of_one_group(kernel)
    assert one is not None
    names = ("first", "second", "out")
    return {
        PREFIX + name: (shape, one.torch_dtype)
        for name, shape in zip(names, one.shapes(b), strict=True)
    }


def run(
    kernel: Kernel,
    first: torch.Tensor,
    second: torch.Tensor,
    out: torch.Tensor,
    staged: dict[str, torch.Tensor],
    compute: Callable[[Kernel, torch.Tensor, torch.Tensor, torch.Tensor], None],
) -> None:
    """Compute a kernel group by group.

    Args:
        kernel: What is computed.
        first: First operand; see `backends.run`.
        second: Second operand.
        out: Result; a filter gradient is added to it, in its own precision.
        staged: Tensors of `buffers`.
        compute: Given the kernel of a group, its operands and its result.
    """
    one = of_one_group(kernel)
    assert one is not None
    one_first, one_second, one_out = (staged[PREFIX + name] for name in ("first", "second", "out"))
    # Filters have the groups one after the other along K, images along their channels.
    axes = {"forward": (1, 0, 1), "backward_data": (1, 0, 1), "backward_filter": (1, 1, 0)}
    for group in range(kernel.conv.groups):
        pieces = [
            tensor.narrow(axis, group * one_piece.shape[axis], one_piece.shape[axis])
            for tensor, axis, one_piece in zip(
                (first, second, out),
                axes[kernel.kind],
                (one_first, one_second, one_out),
                strict=True,
            )
        ]
        one_first.copy_(pieces[0])
        one_second.copy_(pieces[1])
        if kernel.kind == "backward_filter":
            one_out.copy_(pieces[2])  # what micro-batches before have summed
        compute(one, one_first, one_second, one_out)
        pieces[2].copy_(one_out)
