"""Convolution shapes, kernels, their operands and buffers, and the interface of a backend."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from repro.measure.checks import choice

KINDS = ("forward", "backward_data", "backward_filter")
# Every workspace is a multiple of this, so that segments of a shared workspace stay aligned.
ALIGNMENT = 256
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
_NUMBERS = ("in_channels", "height", "width", "out_channels", "groups")

# Both operands and the result, in the order of `Kernel.shapes`.
Operands = tuple[Tensor, Tensor, Tensor]
# Shape and type of each tensor in a workspace, by name.
Buffers = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def aligned(count: int) -> int:
    """`count` bytes rounded up to the alignment of workspaces."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Convolution:
    """The shape of a two-dimensional cross-correlation, without its batch.

    C `in_channels` of `height` × `width`, K `out_channels`; pairs are rows and columns, of
    `padding` the zeros on each side; `groups` must divide C and K.

    Raises:
        ValueError: The output would be empty, or a number is out of range.
        TypeError: A number is not a whole one.
    """

    in_channels: int
    height: int
    width: int
    out_channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # numpy's numbers as Python's, which JSON supports
            whole = index(value) if name in _NUMBERS else _pair(map(index, value))
            object.__setattr__(self, name, whole)
        counts = (self.in_channels, self.out_channels, self.groups, *self.kernel_size)
        if min(*counts, *self.stride, *self.dilation) < 1 or min(self.padding) < 0:
            raise ValueError(f"{self}: sizes, strides and dilations start at 1, paddings at 0")
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(f"{self}: groups must divide both numbers of channels")
        if min(self.out_size) < 1:
            raise ValueError(f"{self}: the filter is larger than the padded input")

    @classmethod
    def of(cls, module: nn.Conv2d, height: int, width: int) -> "Convolution":
        """The shape of a module, given its input's; ValueError for a one-sided padding."""
        size, dilation = _pair(module.kernel_size), _pair(module.dilation)
        padding = (0, 0) if module.padding == "valid" else module.padding
        if padding == "same":
            sides = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
            if any(side % 2 for side in sides):
                filters = f"{size[0]}×{size[1]} filters"
                raise ValueError(f"its padding 'same' is not symmetric for {filters}")
            padding = (sides[0] // 2, sides[1] // 2)
        channels = module.out_channels, size, _pair(module.stride), _pair(padding), dilation
        return cls(module.in_channels, height, width, *channels, module.groups)

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns that a dilated filter covers."""
        return _pair(d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel_size, strict=True))

    @property
    def out_size(self) -> tuple[int, int]:
        """Rows and columns of the output."""
        sizes = (self.height, self.width)
        axes = zip(sizes, self.padding, self.extent, self.stride, strict=True)
        return _pair((size + 2 * p - e) // s + 1 for size, p, e, s in axes)

    @property
    def taps(self) -> int:
        """Filter elements of one channel."""
        return math.prod(self.kernel_size)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """Shape (K, C / groups, rows, columns) of the filters."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    def input_shape(self, batch: int) -> tuple[int, int, int, int]:
        """Shape (b, C, H, W) of a micro-batch's input."""
        return (batch, self.in_channels, self.height, self.width)

    def output_shape(self, batch: int) -> tuple[int, int, int, int]:
        """Shape (b, K, H', W') of a micro-batch's output."""
        return (batch, self.out_channels, *self.out_size)


def _pair(values: Any) -> tuple[int, int]:
    given = (values,) if isinstance(values, int) else tuple(values)
    first, second = given * 2 if len(given) == 1 else given  # one for both, as in torch
    return first, second


@dataclass(frozen=True)
class Kernel:
    """One of the three operations of a convolutional layer, with the facts that affect its time.

    `math` rounds a product of two float32: ``ieee`` or ``tf32``; other types have only ``ieee``.

    Raises:
        ValueError: A value is not one of its choices.
    """

    kind: str  # forward, backward_data or backward_filter
    conv: Convolution
    dtype: str = "float32"  # of the tensors
    device: str = "cpu"  # or an accelerator, with an index if there are several
    layout: str = "nchw"  # or nhwc, torch's channels-last format
    math: str = "ieee"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", KINDS),
            ("dtype", ("float32", "float64", "bfloat16", "float16")),
            ("layout", tuple(FORMATS)),
            ("math", ("ieee", "tf32") if self.dtype == "float32" else ("ieee",)),
        ):
            choice(f"{name} of a kernel", getattr(self, name), allowed)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch data type."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def shapes(self, batch: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of both operands and of the result, for `batch` samples.

        They are (input, filters, output), (output's gradient, filters, input's gradient) or
        (input, output's gradient, filters' gradient).
        """
        conv = self.conv
        x, w, y = conv.input_shape(batch), conv.weight_shape, conv.output_shape(batch)
        shapes = {"forward": (x, w, y), "backward_data": (y, w, x), "backward_filter": (x, y, w)}
        return shapes[self.kind]

    def tensors(self, batch: int, seed: int = 0) -> Operands:
        """Random operands and a result of zeros, in the kernel's layout."""
        generator = torch.Generator(self.device).manual_seed(seed)
        dtype, device, layout = self.torch_dtype, self.device, FORMATS[self.layout]
        first, second, result = (
            torch.empty(shape, dtype=dtype, device=device).contiguous(memory_format=layout)
            for shape in self.shapes(batch)
        )
        first.normal_(generator=generator)
        second.normal_(generator=generator)
        return first, second, result.zero_()

    def piece(self, operands: Operands, start: int, size: int) -> Operands:
        """The operands of a micro-batch; filters and their gradient are the mini-batch's."""
        first, second, out = operands
        part = slice(start, start + size)
        if self.kind == "backward_filter":
            return first[part], second[part], out
        return first[part], second, out[part]


class Backend(Protocol):
    """The interface of a library of convolution algorithms with explicit workspace."""

    name: str
    names: tuple[str, ...]  # of its algorithms

    def missing(self, device: str) -> str | None:
        """The reason why the backend is unavailable, in one line; None if it is available."""
        return None

    def version(self, device: str) -> str:
        """The library's version and settings that affect its times."""

    def error(self, algorithm: str, kernel: Kernel) -> float:
        """The stated relative error of an algorithm in float32; see `backends.stated_error`."""

    def algorithms(self, kernel: Kernel, b: int) -> list[tuple[str, int]]:
        """The algorithms for a micro-batch of `b` with their workspace in bytes."""

    def given_bytes(self, algorithm: str, kernel: Kernel, b: int) -> int:
        """Bytes of the listed workspace that the caller gives; the library allocates the rest."""
        return dict(self.algorithms(kernel, b))[algorithm]

    def run(
        self,
        algorithm: str,
        kernel: Kernel,
        operands: Operands,
        workspace: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Compute a micro-batch; see `backends.run`."""


def buffers_bytes(buffers: Buffers) -> int:
    """Bytes of workspace for these buffers one after the other."""
    return sum(aligned(_bytes(*buffer)) for buffer in buffers.values())


def carve(workspace: Tensor, buffers: Buffers) -> dict[str, Tensor]:
    """Place tensors one after the other in a workspace of bytes; ValueError if it is smaller."""
    if workspace.numel() < buffers_bytes(buffers):
        needed = f"the buffers {list(buffers)} need {buffers_bytes(buffers)}"
        raise ValueError(f"the workspace has {workspace.numel()} bytes, {needed}")
    tensors, offset = {}, 0
    for name, (shape, dtype) in buffers.items():
        size = _bytes(shape, dtype)
        tensors[name] = workspace[offset : offset + size].view(dtype).view(shape)
        offset += aligned(size)
    return tensors


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return dtype.itemsize * math.prod(shape)


@contextmanager
def precision(kernel: Kernel) -> Iterator[None]:
    """Set torch's products of matrices, on CUDA also convolutions, to a kernel's precision."""
    own: Any = torch.backends
    settings = {"cuda": (own.cudnn.conv, own.cuda.matmul), "cpu": (own.mkldnn.matmul,)}
    found = settings.get(torch.device(kernel.device).type, ()) if kernel.dtype == "float32" else ()
    before = [(one, one.fp32_precision) for one in found]
    changed = [(one, old) for one, old in before if old.replace("none", "ieee") != kernel.math]
    for one, _ in changed:
        one.fp32_precision = kernel.math
    try:
        yield
    finally:
        for one, old in changed:
            one.fp32_precision = old
