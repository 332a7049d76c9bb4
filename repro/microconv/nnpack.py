"""The ``nnpack`` backend: NNPACK's explicit algorithms on a CPU, from the library inside torch.

torch exports ``nnp_convolution_output`` with an explicit algorithm and a workspace from the caller;
a call without a workspace returns its size. It is a forward pass in float32 at stride 1; the data
gradient is such a pass with flipped filters. The filter gradient is not exported.
"""

import ctypes
import os
import sys
import threading
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from repro.microconv import staging
from repro.microconv.kernels import Backend, Convolution, Kernel, Operands, aligned

# enum nnp_convolution_algorithm, without its fourth, implicit_gemm, which this function refuses.
ALGORITHMS = {"ft8x8": 1, "ft16x16": 2, "wt8x8": 3}


class _Size(ctypes.Structure):
    _fields_ = (("width", ctypes.c_size_t), ("height", ctypes.c_size_t))


class _Padding(ctypes.Structure):
    _fields_ = tuple((side, ctypes.c_size_t) for side in ("top", "right", "bottom", "left"))


class NNPACKBackend(Backend):
    """Runs NNPACK's tiled FFT and Winograd with torch's number of threads."""

    name = "nnpack"
    names = tuple(ALGORITHMS)

    def missing(self, device: str) -> str | None:
        if torch.device(device).type != "cpu":
            return f"nnpack: runs on a CPU only, not on {device}"
        return _load()[1]

    def version(self, device: str) -> str:
        """The version of torch, which includes NNPACK, and the number of threads."""
        return f"nnpack of torch {torch.__version__}, threads {torch.get_num_threads()}"

    def error(self, algorithm: str, kernel: Kernel) -> float:
        return 1e-4 if algorithm == "wt8x8" else 2e-5

    def algorithms(self, kernel: Kernel, b: int) -> list[tuple[str, int]]:
        one = staging.of_one_group(kernel)
        shape = _forward_shape(one) if kernel.conv.groups <= staging.MOST_GROUPS else None
        if shape is None or one.dtype != "float32" or kernel.layout != "nchw":
            return []
        ours = staging.nbytes(kernel, b) + _flipped_bytes(one)
        listed = []
        for name in ALGORITHMS:
            size = ctypes.c_size_t(0)
            if _call(name, shape, b, (None,) * 5, size) == 0:  # else for other sizes of filters
                listed.append((name, ours + aligned(size.value)))
        return listed

    def run(
        self,
        algorithm: str,
        kernel: Kernel,
        operands: Operands,
        workspace: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        staging.run(kernel, operands, workspace, partial(_run, algorithm), bias)


def _run(algorithm: str, kernel: Kernel, operands: Operands, workspace: Tensor) -> None:
    """Compute a micro-batch of one group in float32."""
    first, filters, out = operands
    shape = _forward_shape(kernel)
    assert shape is not None
    flipped = _flipped_bytes(kernel)
    if flipped:
        source = filters
        filters = workspace[: source.nbytes].view(source.dtype).view(shape.weight_shape)
        for tap in range(shape.taps):
            row, column = divmod(tap, shape.kernel_size[1])
            # In this shape torch's copy needs no buffer, unlike for a plain transposed matrix.
            filters[None, :, :, row, column] = source[:, :, -1 - row, -1 - column].T[None]
    bias = _zeros(shape.out_channels)  # NNPACK always adds one
    pointers = tuple(tensor.data_ptr() for tensor in (first, filters, bias, out))
    size = ctypes.c_size_t(workspace.numel() - flipped)
    status = _call(algorithm, shape, len(first), (*pointers, workspace.data_ptr() + flipped), size)
    if status:
        raise RuntimeError(f"nnpack: {algorithm} of {kernel} failed, status {status} of nnpack.h")


def _forward_shape(kernel: Kernel) -> Convolution | None:
    """The forward pass at stride 1 that computes a kernel, or None."""
    conv = kernel.conv
    plain = conv.stride == conv.dilation == (1, 1) and conv.groups == 1
    # Padding of at least the filter's size is an error in NNPACK.
    if not plain or any(p >= k for p, k in zip(conv.padding, conv.kernel_size, strict=True)):
        return None
    if kernel.kind == "forward":
        return conv
    if kernel.kind == "backward_filter":
        return None
    pad = (conv.kernel_size[0] - 1 - conv.padding[0], conv.kernel_size[1] - 1 - conv.padding[1])
    return Convolution(
        conv.out_channels, *conv.out_size, conv.in_channels, conv.kernel_size, padding=pad
    )


def _flipped_bytes(kernel: Kernel) -> int:
    """Bytes of the flipped filters, which precede NNPACK's own workspace."""
    if kernel.kind != "backward_data":
        return 0
    return aligned(4 * kernel.conv.in_channels * kernel.conv.out_channels * kernel.conv.taps)


@cache
def _zeros(count: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.float32, device="cpu")


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or the reason why it is unavailable."""
    ending = "dylib" if sys.platform == "darwin" else "so"
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{ending}"))
        initialize, convolution = library.nnp_initialize, library.nnp_convolution_output
        create = library.pthreadpool_create
    except (OSError, AttributeError) as problem:
        return None, f"nnpack: this build of torch exports no NNPACK ({problem})"
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    initialize.argtypes, initialize.restype = [], number
    create.argtypes, create.restype = [size], pointer
    shapes = [size, size, size, _Size, _Padding, _Size]
    convolution.argtypes = [number, *shapes, *[pointer] * 5, ctypes.POINTER(size), number]
    convolution.argtypes += [pointer] * 3
    convolution.restype = number
    if status := initialize():
        return None, f"nnpack: it does not support this CPU (status {status} of nnpack.h)"
    return library, None


# A pool of threads works for one caller at a time.
_pool_lock = threading.Lock()


@cache
def _pool(library: ctypes.CDLL, threads: int, process: int) -> int | None:
    # One pool per process: threads do not survive a fork.
    return library.pthreadpool_create(threads) if threads > 1 else None


def _call(
    algorithm: str,
    shape: Convolution,
    b: int,
    pointers: tuple[int | None, ...],
    size: ctypes.c_size_t,
) -> int:
    """Call NNPACK; return its status. Without pointers it sets `size` to the needed workspace."""
    library, problem = _load()
    if library is None:
        raise RuntimeError(problem)
    (rows, columns), (v, u) = shape.padding, shape.kernel_size
    given = ALGORITHMS[algorithm], b, shape.in_channels, shape.out_channels
    sizes = _Size(shape.width, shape.height), _Padding(rows, columns, rows, columns), _Size(u, v)
    with _pool_lock:
        pool = _pool(library, torch.get_num_threads(), os.getpid())
        end = ctypes.byref(size), 0, None, pool, None
        status: int = library.nnp_convolution_output(*given, *sizes, *pointers, *end)
    return status
