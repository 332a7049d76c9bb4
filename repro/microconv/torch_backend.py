"""The ``torch`` backend: algorithms as tensor operations, and the framework's own convolution."""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from repro.measure.allocations import peak_allocation
from repro.microconv import staging
from repro.microconv.algorithms import FFT, Algorithm, Direct, Im2col, Implicit, Winograd
from repro.microconv.kernels import (
    Backend,
    Kernel,
    Operands,
    aligned,
    buffers_bytes,
    carve,
    precision,
)

_WRITTEN: dict[str, Algorithm] = {
    "direct": Direct(),
    "im2col": Im2col(),
    "implicit": Implicit(),
    "fft": FFT(),
    "winograd": Winograd(),
}


class TorchBackend(Backend):
    """Runs the algorithms of this package on any device, and ``native``, torch's own convolution.

    Allocations inside ``native`` (reordered copies on a CPU, cuDNN's workspace on a GPU) are
    measured at every size, and count as its workspace: a library may choose another algorithm for
    a smaller size.
    """

    name = "torch"
    names = ("native", *_WRITTEN)

    def version(self, device: str) -> str:
        """The versions of torch and of cuDNN or oneDNN, which ``native`` calls."""
        kind = torch.device(device).type
        if kind == "cuda":
            own = torch.backends.cudnn
            search = f"{own.enabled}, benchmark {own.benchmark}, deterministic {own.deterministic}"
            return f"torch {torch.__version__}, cudnn {own.version()}, {search}"
        if kind != "cpu":
            return f"torch {torch.__version__}"
        onednn: Any = torch.backends.mkldnn
        search = f"oneDNN {onednn.enabled} {onednn.conv.fp32_precision}"
        return f"torch {torch.__version__}, threads {torch.get_num_threads()}, {search}"

    def error(self, algorithm: str, kernel: Kernel) -> float:
        return 2e-5 if algorithm == "native" else _WRITTEN[algorithm].error

    def algorithms(self, kernel: Kernel, b: int) -> list[tuple[str, int]]:
        listed = [("native", native_workspace(kernel, b, self.version(kernel.device)))]
        one = staging.of_one_group(kernel)
        if kernel.layout == "nchw" and kernel.conv.groups <= staging.MOST_GROUPS:
            listed += [
                (name, _bytes(name, kernel, b) + algorithm.hidden(one, b))
                for name, algorithm in _WRITTEN.items()
                if algorithm.supports(one)
            ]
        return listed

    def given_bytes(self, algorithm: str, kernel: Kernel, b: int) -> int:
        """Bytes of an algorithm's buffers; 0 for ``native``."""
        return 0 if algorithm == "native" else _bytes(algorithm, kernel, b)

    def run(
        self,
        algorithm: str,
        kernel: Kernel,
        operands: Operands,
        workspace: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        first, second, out = operands
        if algorithm == "native":
            result = native(kernel, first, second, bias, like=out)
            if kernel.kind == "backward_filter":
                out += result
            else:
                out.copy_(result)
            return

        def compute(one: Kernel, operands: Operands, rest: Tensor) -> None:
            written = _WRITTEN[algorithm]
            buffers = carve(rest, written.buffers(one, len(first)))
            with precision(one):  # it multiplies matrices, which have a separate setting
                written.run(one, *operands, buffers)

        staging.run(kernel, operands, workspace, compute, bias)


@cache
def native_workspace(kernel: Kernel, b: int, _settings: str) -> int:
    """Measured bytes that torch's own convolution allocates, its result included."""
    first, second, out = kernel.tensors(b)
    # Which forward passes may have, and oneDNN copies.
    bias = first.new_zeros(kernel.conv.out_channels) if kernel.kind == "forward" else None
    call = partial(native, kernel, first, second, bias, out)
    call()
    return aligned(peak_allocation(call, kernel.device))


def _bytes(algorithm: str, kernel: Kernel, b: int) -> int:
    """Bytes of the buffers of an algorithm of this package, including buffers for staging."""
    one = staging.of_one_group(kernel)
    return staging.nbytes(kernel, b) + buffers_bytes(_WRITTEN[algorithm].buffers(one, b))


def native(
    kernel: Kernel,
    first: Tensor,
    second: Tensor,
    bias: Tensor | None = None,
    like: Tensor | None = None,
) -> Tensor:
    """Compute a kernel by the framework's own convolution and return the result.

    A `bias` of shape (K,) is added to a forward pass. For a gradient, `like` is a tensor of the
    result's shape, such as the input itself: torch requires it, and copies it if its layout
    differs, but does not use its values.
    """
    conv = kernel.conv
    shape = (conv.stride, conv.padding, conv.dilation)
    if kernel.kind == "forward":
        return torch.conv2d(first, second, bias, *shape, conv.groups)
    data = kernel.kind == "backward_data"
    gradient, other = (first, second) if data else (second, first)
    x, w = (like, other) if data else (other, like)
    result = torch.ops.aten.convolution_backward(
        gradient, x, w, None, *shape, False, [0, 0], conv.groups, [data, not data, False]
    )
    derivative: Tensor = result[0 if data else 1]
    return derivative
