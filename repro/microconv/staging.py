"""Grouped and 16-bit kernels by algorithms that support neither: one group at a time.

A group's operands are copied to buffers of the workspace, 16-bit types as float32, and computed
there: PSEUDO_HALF of section III-D. Differs from the paper: the copies take workspace and time.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from repro.microconv.kernels import Buffers, Kernel, Operands, buffers_bytes, carve

# With more groups, such as one per channel, torch's own convolution is far faster.
MOST_GROUPS = 8
_NAMES = ("staged first", "staged second", "staged out")
# Groups lie one after the other along K in filters, and along the channels in images.
_AXES = {"forward": (1, 0, 1), "backward_data": (1, 0, 1), "backward_filter": (1, 1, 0)}


def is_staged(kernel: Kernel) -> bool:
    """Whether a kernel must be staged: it has groups, or a 16-bit type."""
    return kernel.conv.groups > 1 or kernel.torch_dtype.itemsize < 4


def of_one_group(kernel: Kernel) -> Kernel:
    """The kernel that computes one group, in float32 at least."""
    conv = kernel.conv
    channels = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    one = replace(conv, in_channels=channels[0], out_channels=channels[1], groups=1)
    wide = "float32" if kernel.torch_dtype.itemsize < 4 else kernel.dtype
    return replace(kernel, conv=one, dtype=wide)


def nbytes(kernel: Kernel, b: int) -> int:
    """Bytes of workspace in which a micro-batch is staged; 0 without staging."""
    return buffers_bytes(_buffers(kernel, b)) if is_staged(kernel) else 0


def _buffers(kernel: Kernel, b: int) -> Buffers:
    """Both operands and the result of one group of a micro-batch."""
    one = of_one_group(kernel)
    return {
        name: (shape, one.torch_dtype) for name, shape in zip(_NAMES, one.shapes(b), strict=True)
    }


def run(
    kernel: Kernel,
    operands: Operands,
    workspace: Tensor,
    compute: Callable[[Kernel, Operands, Tensor], None],
    bias: Tensor | None,
) -> None:
    """Compute a kernel group by group, or at once if it need not be staged.

    The workspace's first `nbytes` are for staging; `compute` gets the kernel of a group, its
    operands and the rest. A filter gradient accumulates in its own precision; a bias is added
    before the result is rounded.
    """
    if not is_staged(kernel):
        compute(kernel, operands, workspace)
        add_bias(operands[2], bias)
        return
    one, made = of_one_group(kernel), _buffers(kernel, len(operands[0]))
    first, second, out = carve(workspace, made).values()
    rest = workspace[buffers_bytes(made) :]
    axes = _AXES[kernel.kind]
    for group in range(kernel.conv.groups):
        pieces = [
            whole.narrow(axis, group * part.shape[axis], part.shape[axis])
            for whole, part, axis in zip(operands, (first, second, out), axes, strict=True)
        ]
        first.copy_(pieces[0])
        second.copy_(pieces[1])
        if kernel.kind == "backward_filter":
            out.copy_(pieces[2])  # the sum over earlier micro-batches
        compute(one, (first, second, out), rest)
        if bias is not None:
            add_bias(out, bias.view(kernel.conv.groups, -1)[group])
        pieces[2].copy_(out)


def add_bias(out: Tensor, bias: Tensor | None) -> None:
    """Add a bias of shape (K,) to images (N, K, H, W) in place."""
    if bias is not None:
        out.add_(bias.view(-1, 1, 1))
