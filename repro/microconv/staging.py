"""Grouped and 16-bit kernels by algorithms that support neither: one group at a time.

A group's operands are copied to buffers of the workspace, 16-bit types as float32, and computed
there. In the terms of section III-D this is PSEUDO_HALF: data of 16 bits, products and sums in
float32.

Differs from the paper: the copies take workspace and time, unlike cuDNN's own conversion.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from repro.microconv.kernels import Buffers, Kernel, Operands

# With more groups, such as one per channel, torch's own convolution is far faster.
MOST_GROUPS = 8
_NAMES = ("staged first", "staged second", "staged out")
# Groups lie one after the other along K in filters, and along the channels in images.
_AXES = {"forward": (1, 0, 1), "backward_data": (1, 0, 1), "backward_filter": (1, 1, 0)}


def is_staged(kernel: Kernel) -> bool:
    """Whether a kernel must be staged: it has groups, or a 16-bit type."""
    return kernel.conv.groups > 1 or kernel.torch_dtype.itemsize < 4


def of_one_group(kernel: Kernel) -> Kernel | None:
    """The kernel that computes one group, in float32 at least; None for too many groups."""
    conv = kernel.conv
    if conv.groups > MOST_GROUPS:
        return None
    channels = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    one = replace(conv, in_channels=channels[0], out_channels=channels[1], groups=1)
    wide = "float32" if kernel.torch_dtype.itemsize < 4 else kernel.dtype
    return replace(kernel, conv=one, dtype=wide)


def buffers(kernel: Kernel, b: int) -> Buffers:
    """Both operands and the result of one group of a micro-batch; empty without staging."""
    one = of_one_group(kernel)
    if one is None or not is_staged(kernel):
        return {}
    return {
        name: (shape, one.torch_dtype) for name, shape in zip(_NAMES, one.shapes(b), strict=True)
    }


def run(
    kernel: Kernel,
    operands: Operands,
    staged: dict[str, Tensor],
    compute: Callable[[Kernel, Operands], None],
) -> None:
    """Compute a kernel group by group, or at once if it need not be staged.

    Args:
        kernel: The kernel.
        operands: See `backends.run`; a filter gradient accumulates in its own precision.
        staged: Tensors of `buffers`.
        compute: Called with the kernel of a group and its operands.
    """
    one = of_one_group(kernel)
    if one is None or not is_staged(kernel):
        compute(kernel, operands)
        return
    first, second, out = (staged[name] for name in _NAMES)
    for group in range(kernel.conv.groups):
        pieces = [
            whole.narrow(axis, group * part.shape[axis], part.shape[axis])
            for whole, part, axis in zip(
                operands, (first, second, out), _AXES[kernel.kind], strict=True
            )
        ]
        first.copy_(pieces[0])
        second.copy_(pieces[1])
        if kernel.kind == "backward_filter":
            out.copy_(pieces[2])  # the sum over earlier micro-batches
        compute(one, (first, second, out))
        pieces[2].copy_(out)
