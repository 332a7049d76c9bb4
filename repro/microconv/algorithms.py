"""Convolution algorithms as tensor operations, for any device."""

import itertools
import math
from functools import cache
from typing import Protocol

import torch
from scipy import fft as scipy_fft

from repro.microconv.kernels import Buffers, Convolution, Kernel, buffers_bytes

Tensor = torch.Tensor
Slices = tuple[slice, slice]
Carved = dict[str, Tensor]  # the tensors of `Buffers`, made by `carve`


def _window(conv: Convolution, row: int, column: int) -> tuple[Slices, Slices]:
    """The outputs for which a filter's tap reads no padding, and the inputs that it reads."""
    out, source = [], []
    for axis, tap in enumerate((row, column)):
        size, count = (conv.height, conv.width)[axis], conv.out_size[axis]
        stride = conv.stride[axis]
        start = tap * conv.dilation[axis] - conv.padding[axis]  # input of output 0
        first = max(0, -(start // stride))
        end = max(first, min(count, (size - 1 - start) // stride + 1))
        out.append(slice(first, end))
        source.append(slice(start + first * stride, start + end * stride, stride))
    return (out[0], out[1]), (source[0], source[1])


class Algorithm(Protocol):
    """Computes all three kernels of one group, in float32 or float64, into buffers."""

    error: float = 2e-5  # stated for float32; see `backends.stated_error`

    def supports(self, kernel: Kernel) -> bool:
        """Whether it computes a kernel; by default with any stride, padding and dilation."""
        return True

    def buffers(self, kernel: Kernel, b: int) -> Buffers:
        """The buffers for a micro-batch of `b`."""

    def hidden(self, kernel: Kernel, b: int) -> int:
        """Bytes that torch allocates itself, besides the buffers."""
        return 0

    def run(self, kernel: Kernel, first: Tensor, second: Tensor, out: Tensor, t: Carved) -> None:
        """Compute one kernel; see `backends.run`."""


class Direct(Algorithm):
    """The loops of Algorithm 1, over filter taps; each tap is a product of matrices."""

    def buffers(self, kernel: Kernel, b: int) -> Buffers:
        """One tap's inputs for every output, and the filters by tap."""
        conv, dtype = kernel.conv, kernel.torch_dtype
        return {
            "taken": ((b, conv.in_channels, *conv.out_size), dtype),
            "filters": ((conv.taps, conv.out_channels, conv.in_channels), dtype),
        }

    def run(self, kernel: Kernel, first: Tensor, second: Tensor, out: Tensor, t: Carved) -> None:
        conv, taken = kernel.conv, t["taken"]
        b = len(taken)
        flat = taken.view(b, conv.in_channels, -1)
        by_tap = t["filters"]
        filters = by_tap.view(*conv.kernel_size, conv.out_channels, -1)
        if kernel.kind == "backward_filter":
            by_tap.zero_()
        else:
            filters.copy_(second.permute(2, 3, 0, 1))
            out.zero_()
        whole = {"forward": out, "backward_data": first, "backward_filter": second}[kernel.kind]
        of_output = whole.view(b, conv.out_channels, -1)  # the output, or its gradient
        for tap in range(conv.taps):
            (ys, xs), (rows, columns) = _window(conv, *divmod(tap, conv.kernel_size[1]))
            if kernel.kind == "backward_data":
                torch.bmm(by_tap[tap].T.expand(b, -1, -1), of_output, out=flat)
                out[:, :, rows, columns] += taken[:, :, ys, xs]
                continue
            taken.zero_()
            taken[:, :, ys, xs] = first[:, :, rows, columns]
            if kernel.kind == "forward":
                of_output.baddbmm_(by_tap[tap].expand(b, -1, -1), flat)
            else:
                for n in range(b):
                    by_tap[tap].addmm_(of_output[n], flat[n].T)
        if kernel.kind == "backward_filter":
            out += filters.permute(2, 3, 0, 1)


class Im2col(Algorithm):
    """Explicit GEMM: every patch becomes a column, the convolution one product of matrices."""

    def _block(self, kernel: Kernel, b: int) -> tuple[int, int]:
        """Number of samples, and of their input channels, that become columns at once."""
        return b, kernel.conv.in_channels

    @staticmethod
    def _identity(conv: Convolution) -> bool:  # which needs no columns
        return conv.kernel_size == conv.stride == (1, 1) and conv.padding == (0, 0)

    def buffers(self, kernel: Kernel, b: int) -> Buffers:
        """The columns of a block."""
        conv = kernel.conv
        if self._identity(conv):
            return {}
        samples, channels = self._block(kernel, b)
        shape = (samples, channels * conv.taps, math.prod(conv.out_size))
        return {"columns": (shape, kernel.torch_dtype)}

    def run(self, kernel: Kernel, first: Tensor, second: Tensor, out: Tensor, t: Carved) -> None:
        conv, b, identity = kernel.conv, len(first), self._identity(kernel.conv)
        geometry = (conv.kernel_size, conv.dilation, conv.padding, conv.stride)
        window, size = [list(pair) for pair in geometry], [conv.height, conv.width]
        k, c = conv.out_channels, conv.in_channels
        samples, channels = (b, c) if identity else self._block(kernel, b)
        matrix = (out if kernel.kind == "backward_filter" else second).view(k, -1)
        for n, start in itertools.product(range(0, b, samples), range(0, c, channels)):
            some, end = slice(n, n + samples), min(start + channels, c)
            filters = matrix[:, start * conv.taps : end * conv.taps]
            images = (out if kernel.kind == "backward_data" else first)[some, start:end]
            if identity:
                columns = images.view(b, c, -1)
            else:
                columns = t["columns"][:, : (end - start) * conv.taps]
            if kernel.kind == "backward_data":
                gradients = first[some].view(samples, k, -1)
                torch.bmm(filters.T.expand(samples, -1, -1), gradients, out=columns)
                if not identity:
                    torch.ops.aten.col2im.out(columns, size, *window, out=images)
                continue
            if not identity:
                torch.ops.aten.im2col.out(images, *window, out=columns)
            if kernel.kind == "backward_filter":
                for gradient, column in zip(second[some].flatten(2), columns, strict=True):
                    filters.addmm_(gradient, column.T)
                continue
            result, every = out[some].view(samples, k, -1), filters.expand(samples, -1, -1)
            if start:
                result.baddbmm_(every, columns)
            else:
                torch.bmm(every, columns, out=result)


class Implicit(Im2col):
    """GEMM in little workspace: the columns of one sample and some of its channels at a time."""

    # Bytes of columns, at least one channel's: small, and enough for efficient products.
    block_bytes = 2**18

    def _block(self, kernel: Kernel, b: int) -> tuple[int, int]:
        conv = kernel.conv
        each = conv.taps * math.prod(conv.out_size) * kernel.torch_dtype.itemsize
        return 1, min(conv.in_channels, max(1, self.block_bytes // each))


class FFT(Algorithm):
    """Products in the frequency domain (Mathieu et al.), over whole padded images.

    Forward correlates the input with the filters, the data gradient convolves, the filter gradient
    correlates the input with the output's gradient. A stride becomes zeros between the output's
    elements, a dilation zeros between the filters'.
    """

    @staticmethod
    def _size(conv: Convolution) -> tuple[int, int]:
        rows = scipy_fft.next_fast_len(conv.height + 2 * conv.padding[0], real=False)
        columns = scipy_fft.next_fast_len(conv.width + 2 * conv.padding[1], real=True)
        return rows, columns

    def buffers(self, kernel: Kernel, b: int) -> Buffers:
        """One image and one spectrum as staging, three spectra by frequency."""
        conv, dtype = kernel.conv, kernel.torch_dtype
        rows, columns = self._size(conv)
        frequencies = rows * (columns // 2 + 1)
        c, k = conv.in_channels, conv.out_channels
        largest = max(b * c, b * k, k * c)
        spectrum = torch.complex128 if dtype == torch.float64 else torch.complex64
        return {
            "image": ((largest, rows, columns), dtype),
            "staging": ((largest, frequencies), spectrum),
            "x": ((frequencies, b, c), spectrum),
            "w": ((frequencies, k, c), spectrum),
            "y": ((frequencies, b, k), spectrum),
        }

    def hidden(self, kernel: Kernel, b: int) -> int:
        """Copies that torch.fft and a complex product of matrices make."""
        buffers = self.buffers(kernel, b)
        made = buffers_bytes({name: buffers[name] for name in ("image", "staging")})
        return made + max(buffers_bytes({name: buffers[name]}) for name in "xwy")

    def run(self, kernel: Kernel, first: Tensor, second: Tensor, out: Tensor, t: Carved) -> None:
        conv, (rows, columns) = kernel.conv, self._size(kernel.conv)
        # Positions of images, outputs and filters in a padded image, by axis.
        axes = range(2)
        sizes, counts = (conv.height, conv.width), conv.out_size
        inside = [slice(conv.padding[a], conv.padding[a] + sizes[a]) for a in axes]
        spread = [slice(0, conv.stride[a] * (counts[a] - 1) + 1, conv.stride[a]) for a in axes]
        dilated = [slice(0, conv.extent[a], conv.dilation[a]) for a in axes]

        def transform(source: Tensor, region: list[slice], target: Tensor) -> None:
            count = source.shape[0] * source.shape[1]
            image = t["image"][:count].zero_()
            image.view(*source.shape[:2], rows, columns)[:, :, region[0], region[1]] = source
            staged = t["staging"][:count]
            torch.fft.rfft2(image, out=staged.view(count, rows, -1))
            target.copy_(staged.view(*source.shape[:2], -1).permute(2, 0, 1))

        def inverse(source: Tensor, shape: tuple[int, int]) -> Tensor:
            count = shape[0] * shape[1]
            staged = t["staging"][:count]
            staged.view(*shape, -1).copy_(source.permute(1, 2, 0))
            image = t["image"][:count]
            torch.fft.irfft2(staged.view(count, rows, -1), s=(rows, columns), out=image)
            return image.view(*shape, rows, columns)

        x, w, y = t["x"], t["w"], t["y"]
        b, c, k = x.shape[1], conv.in_channels, conv.out_channels
        if kernel.kind == "forward":
            transform(first, inside, x)
            transform(second, dilated, w)
            torch.bmm(x, torch.conj_physical(w, out=w).transpose(1, 2), out=y)
            out.copy_(inverse(y, (b, k))[:, :, spread[0], spread[1]])
        elif kernel.kind == "backward_data":
            transform(first, spread, y)
            transform(second, dilated, w)
            torch.bmm(y, w, out=x)
            out.copy_(inverse(x, (b, c))[:, :, inside[0], inside[1]])
        else:
            transform(first, inside, x)
            transform(second, spread, y)
            torch.bmm(torch.conj_physical(y, out=y).transpose(1, 2), x, out=w)
            out += inverse(w, (k, c))[:, :, dilated[0], dilated[1]]


# F(4×4, 3×3) of Lavin and Gray: y = Aᵀ[(G w Gᵀ) ⊙ (Bᵀ x B)]A on tiles of 6×6, at the points
# 0, 1, -1, 2, -2 and infinity.
_BT = [
    [4, 0, -5, 0, 1, 0],
    [0, -4, -4, 1, 1, 0],
    [0, 4, -4, -1, 1, 0],
    [0, -2, -1, 2, 1, 0],
    [0, 2, -1, -2, 1, 0],
    [0, 4, 0, -5, 0, 1],
]
_G = [
    [1 / 4, 0, 0],
    [-1 / 6, -1 / 6, -1 / 6],
    [-1 / 6, 1 / 6, -1 / 6],
    [1 / 24, 1 / 12, 1 / 6],
    [1 / 24, -1 / 12, 1 / 6],
    [0, 0, 1],
]
_AT = [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]


@cache
def _winograd_matrices(dtype: torch.dtype, device: str) -> list[Tensor]:
    """Transforms of inputs (36, 36), filters (36, 9), flipped filters and outputs (16, 36)."""
    with torch.inference_mode(False):
        matrices = [torch.tensor(m, dtype=torch.float64, device="cpu") for m in (_BT, _G, _AT)]
        of_inputs, of_filters, of_outputs = (torch.kron(m, m) for m in matrices)
        every = (of_inputs, of_filters, of_filters.flip(1), of_outputs)
        return [m.to(device=device, dtype=dtype).contiguous() for m in every]


class Winograd(Algorithm):
    """Minimal filtering F(4×4, 3×3) (Lavin and Gray), for 3×3 filters at stride and dilation 1.

    The data gradient is a forward pass with flipped filters, the filter gradient the adjoint of
    the forward pass.
    """

    error = 5e-5

    def supports(self, kernel: Kernel) -> bool:
        """3×3, stride 1, dilation 1, padding up to 2."""
        conv = kernel.conv
        return (
            conv.kernel_size == (3, 3)
            and conv.stride == conv.dilation == (1, 1)
            and max(conv.padding) <= 2
        )

    @staticmethod
    def _geometry(kernel: Kernel) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
        """Input channels, output channels, padding and tiles of the forward-like pass."""
        conv = kernel.conv
        c, k, pad, size = conv.in_channels, conv.out_channels, conv.padding, conv.out_size
        if kernel.kind == "backward_data":
            c, k, pad, size = k, c, (2 - pad[0], 2 - pad[1]), (conv.height, conv.width)
        return c, k, pad, (-(-size[0] // 4), -(-size[1] // 4))

    def buffers(self, kernel: Kernel, b: int) -> Buffers:
        """Tiles before and after a transform, alternating; padded images; transformed filters."""
        dtype = kernel.torch_dtype
        c, k, _, (ty, tx) = self._geometry(kernel)
        p = b * ty * tx
        padded = b * max(c * (4 * ty + 2) * (4 * tx + 2), k * 16 * ty * tx)
        return {
            "padded": ((padded,), dtype),
            "one": ((36 * max(c, k) * p,), dtype),
            "two": ((36 * max(c, k) * p,), dtype),
            "taps": ((9, k * c), dtype),
            "filters": ((36, k, c), dtype),
        }

    def run(self, kernel: Kernel, first: Tensor, second: Tensor, out: Tensor, t: Carved) -> None:
        c, k, pad, (ty, tx) = self._geometry(kernel)
        b = len(first)
        p = b * ty * tx
        device = str(first.device)
        of_inputs, of_filters, of_flipped, of_outputs = _winograd_matrices(first.dtype, device)
        taps, filters = t["taps"], t["filters"]

        def view(name: str, *shape: int) -> Tensor:
            return t[name][: math.prod(shape)].view(shape)

        # Inputs: overlapping tiles (36, c, p), transformed from `one` to `two`.
        padded = view("padded", b, c, 4 * ty + 2, 4 * tx + 2).zero_()
        given = first[:, :, : padded.shape[2] - pad[0], : padded.shape[3] - pad[1]]
        rows, columns = given.shape[2:]
        padded[:, :, pad[0] : pad[0] + rows, pad[1] : pad[1] + columns] = given
        bs, cs, hs, ws = padded.stride()
        tiles = padded.as_strided((6, 6, c, b, ty, tx), (hs, ws, cs, bs, 4 * hs, 4 * ws))
        view("one", 6, 6, c, b, ty, tx).copy_(tiles)
        torch.mm(of_inputs, view("one", 36, c * p), out=view("two", 36, c * p))
        inputs = view("two", 36, c, p)

        if kernel.kind == "backward_filter":
            # The output's gradient in tiles of 4×4, through the adjoint of the outputs' transform.
            blocks = view("padded", 4, 4, k, b, ty, tx).zero_()
            for i, j in itertools.product(range(4), range(4)):
                source = second[:, :, i::4, j::4].transpose(0, 1)
                blocks[i, j, :, :, : source.shape[2], : source.shape[3]] = source
            torch.mm(of_outputs.T, blocks.view(16, k * p), out=view("one", 36, k * p))
            torch.bmm(view("one", 36, k, p), inputs.transpose(1, 2), out=filters)
            torch.mm(of_filters.T, filters.view(36, k * c), out=taps)
            out += taps.view(3, 3, k, c).permute(2, 3, 0, 1)
            return

        flipped = kernel.kind == "backward_data"
        taps.view(3, 3, k, c).copy_(second.permute(2, 3, *((1, 0) if flipped else (0, 1))))
        torch.mm(of_flipped if flipped else of_filters, taps, out=filters.view(36, k * c))
        torch.bmm(filters, inputs, out=view("one", 36, k, p))
        torch.mm(of_outputs, view("one", 36, k * p), out=view("two", 16, k * p))
        outputs = view("two", 4, 4, k, b, ty, tx).permute(3, 2, 4, 0, 5, 1)
        view("padded", b, k, ty, 4, tx, 4).copy_(outputs)
        rows, columns = out.shape[2:]
        out.copy_(view("padded", b, k, 4 * ty, 4 * tx)[:, :, :rows, :columns])
