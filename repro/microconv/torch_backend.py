"""The ``torch`` backend: algorithms as tensor operations, and the framework's own convolution."""

import torch

from repro.measure.allocations import peak_allocation
from repro.microconv.algorithms import FFT, Direct, Im2col, Winograd
from repro.microconv.kernels import Kernel, aligned, buffers_bytes, carve

_WRITTEN: dict[str, Direct | Im2col | FFT | Winograd] = {
    "direct": Direct(),
    "im2col": Im2col(),
    "fft": FFT(),
    "winograd": Winograd(),
}


class TorchBackend:
    """Runs the algorithms of this package on any device, and ``native``, torch's own convolution.

    What ``native`` allocates inside (reordered copies on a CPU, cuDNN's workspace on a GPU) is not
    for us to give: it is measured, and counts as its workspace. The largest size that was measured
    stands for those between powers of two.
    """

    name = "torch"
    names = ("native", *_WRITTEN)

    def __init__(self) -> None:
        self._native_bytes: dict[tuple[Kernel, int, int], int] = {}

    def missing(self, device: str) -> str | None:
        """Return nothing: it runs wherever torch does."""
        return None

    def version(self, device: str) -> str:
        """Return torch's version and, on a GPU, that of the cuDNN that ``native`` calls."""
        if torch.device(device).type == "cuda":
            return f"torch {torch.__version__}, cudnn {torch.backends.cudnn.version()}"
        return f"torch {torch.__version__}, threads {torch.get_num_threads()}"

    def error(self, algorithm: str, kernel: Kernel) -> float:
        """Return the stated relative error of an algorithm; see `backends.stated_error`."""
        return 2e-6 if algorithm == "native" else _WRITTEN[algorithm].error

    def algorithms(self, kernel: Kernel, b: int) -> list[tuple[str, int]]:
        """List the algorithms for a micro-batch of `b` with their workspace in bytes."""
        found = [("native", self._native_workspace(kernel, b))]
        if kernel.layout == "nchw" and kernel.conv.groups == 1:
            found += [
                (name, buffers_bytes(algorithm.buffers(kernel, b)))
                for name, algorithm in _WRITTEN.items()
                if kernel.dtype in algorithm.dtypes and algorithm.supports(kernel)
            ]
        return found

    def run(
        self,
        algorithm: str,
        kernel: Kernel,
        first: torch.Tensor,
        second: torch.Tensor,
        out: torch.Tensor,
        workspace: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Compute a micro-batch into `out`; see `backends.run`."""
        if algorithm == "native":
            result = native(kernel, first, second, bias)
            if kernel.kind == "backward_filter":
                out += result
            else:
                out.copy_(result)
            return
        method = _WRITTEN[algorithm]
        method.run(kernel, first, second, out, carve(workspace, method.buffers(kernel, len(first))))
        if bias is not None:
            out += bias.view(-1, 1, 1)

    def _native_workspace(self, kernel: Kernel, b: int) -> int:
        sampled = 1 << (b - 1).bit_length()  # the next power of two
        # A GPU's answer may be asked for each size, and cuDNN's need is no line of it.
        sampled = b if torch.device(kernel.device).type == "cuda" else sampled
        key = (kernel, sampled, torch.get_num_threads())
        if key not in self._native_bytes:
            first, second, _ = kernel.tensors(sampled)
            native(kernel, first, second)
            peak = peak_allocation(lambda: native(kernel, first, second), kernel.device)
            # Divided, its result is a buffer beside the output; see `run`.
            self._native_bytes[key] = aligned(peak)
        return self._native_bytes[key]


def native(
    kernel: Kernel, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a kernel by the framework's own convolution and return the result."""
    conv = kernel.conv
    shape = (conv.stride, conv.padding, conv.dilation)
    if kernel.kind == "forward":
        return torch.conv2d(first, second, bias, *shape, conv.groups)
    data = kernel.kind == "backward_data"
    gradient, other = (first, second) if data else (second, first)
    # The operand whose gradient is wanted is asked for its shape only.
    wanted = gradient.new_empty(1).expand(
        conv.input_shape(len(gradient)) if data else conv.weight_shape
    )
    x, w = (wanted, other) if data else (other, wanted)
    result = torch.ops.aten.convolution_backward(
        gradient, x, w, None, *shape, False, [0, 0], conv.groups, [data, not data, False]
    )
    found: torch.Tensor = result[0 if data else 1]
    return found
