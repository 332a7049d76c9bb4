"""The ``nnpack`` backend: NNPACK's explicit algorithms on a CPU, from the library inside torch.

torch exports ``nnp_convolution_output`` with an explicit algorithm and a workspace that the caller
gives; its size is asked for by a call without one. It is a forward pass in float32 at stride 1;
the data gradient is one with flipped filters. The filter gradient is not exported.
"""

import ctypes
import os
import platform
import threading
from functools import cache
from pathlib import Path

import torch

from repro.microconv import staging
from repro.microconv.kernels import (
    Convolution,
    Kernel,
    aligned,
    buffers_bytes,
    carve,
)

# enum nnp_convolution_algorithm
ALGORITHMS = {"ft8x8": 1, "ft16x16": 2, "wt8x8": 3, "implicit_gemm": 4}
# The tile of each transform, which a filter must fit into.
_LARGEST = {"ft8x8": (8, 8), "ft16x16": (16, 16), "wt8x8": (3, 3), "implicit_gemm": (16, 16)}
_ERROR = {"ft8x8": 2e-5, "ft16x16": 2e-5, "wt8x8": 1e-4, "implicit_gemm": 2e-5}
_STATUS = {
    2: "invalid batch size",
    3: "invalid channels",
    10: "invalid input size",
    12: "invalid padding",
    26: "unsupported algorithm",
    51: "unsupported hardware",
    52: "out of memory",
    53: "the workspace is too small",
    54: "the workspace is misaligned",
}


class _Size(ctypes.Structure):
    _fields_ = (("width", ctypes.c_size_t), ("height", ctypes.c_size_t))


class _Padding(ctypes.Structure):
    _fields_ = tuple((side, ctypes.c_size_t) for side in ("top", "right", "bottom", "left"))


class NNPACKBackend:
    """Runs NNPACK's tiled FFT, Winograd and implicit GEMM with as many threads as torch uses.

    Groups and 16 bits are staged for it; see `staging`.
    """

    name = "nnpack"
    names = tuple(ALGORITHMS)

    def missing(self, device: str) -> str | None:
        """Return in one line why the backend is not there, None where it is."""
        if torch.device(device).type != "cpu":
            return f"nnpack: runs on a CPU only, not on {device}"
        return _load()[1]

    def version(self, device: str) -> str:
        """Return torch's version, which NNPACK comes with, and the threads."""
        return f"nnpack of torch {torch.__version__}, threads {torch.get_num_threads()}"

    def error(self, algorithm: str, kernel: Kernel) -> float:
        """Return the stated relative error of an algorithm; see `backends.stated_error`."""
        return _ERROR[algorithm]

    def algorithms(self, kernel: Kernel, b: int) -> list[tuple[str, int]]:
        """List the algorithms for a micro-batch of `b` with their workspace in bytes."""
        one = staging.of_one_group(kernel)
        shape = None if one is None else _forward_shape(one)
        if shape is None or one is None or one.dtype != "float32" or kernel.layout != "nchw":
            return []
        beside = buffers_bytes(staging.buffers(kernel, b)) if staging.is_staged(kernel) else 0
        listed = []
        for name in ALGORITHMS:
            rows, columns = _LARGEST[name]
            exact = name == "wt8x8"
            fits = (
                shape.kernel_size == (3, 3)
                if exact
                else shape.kernel_size[0] <= rows and shape.kernel_size[1] <= columns
            )
            if fits:
                size = ctypes.c_size_t(0)
                if _call(name, shape, b, None, None, None, None, None, size) == 0:
                    workspace = aligned(size.value) + _flipped_bytes(one)
                    listed.append((name, beside + workspace))
        return listed

    def given_bytes(self, algorithm: str, kernel: Kernel, b: int) -> int:
        """Return the listed workspace: all of it is given."""
        return dict(self.algorithms(kernel, b))[algorithm]

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
        if staging.is_staged(kernel):
            buffers = staging.buffers(kernel, len(first))
            rest = workspace[buffers_bytes(buffers) :]
            staging.run(
                kernel,
                first,
                second,
                out,
                carve(workspace, buffers),
                lambda one, x, y, z: self.run(algorithm, one, x, y, z, rest),
            )
            if bias is not None:
                out += bias.view(-1, 1, 1)
            return
        shape = _forward_shape(kernel)
        assert shape is not None
        flipped = _flipped_bytes(kernel)
        if flipped:
            used = second.numel() * second.element_size()
            filters = workspace[:used].view(second.dtype).view(shape.weight_shape)
            for tap in range(shape.taps):
                row, column = divmod(tap, shape.kernel_size[1])
                # Of a plain transposed matrix torch's copy would take a buffer of its own.
                source = second[:, :, -1 - row, -1 - column].T
                filters[None, :, :, row, column] = source[None]
        else:
            filters = second
        # NNPACK always adds a bias.
        bias = _zeros(shape.out_channels) if bias is None else bias
        size = ctypes.c_size_t(workspace.numel() - flipped)
        status = _call(
            algorithm,
            shape,
            len(first),
            first.data_ptr(),
            filters.data_ptr(),
            bias.data_ptr(),
            out.data_ptr(),
            workspace.data_ptr() + flipped,
            size,
        )
        if status:
            raise RuntimeError(
                f"nnpack: {algorithm} failed for {kernel.kind} of {kernel.conv} at a micro-batch "
                f"of {len(first)}: {_STATUS.get(status, 'status')} ({status})"
            )


def _forward_shape(kernel: Kernel) -> Convolution | None:
    """Return the forward pass at stride 1 that computes a kernel, None where there is none."""
    conv = kernel.conv
    plain = conv.stride == conv.dilation == (1, 1) and conv.groups == 1
    # Padding from the size of the filter on is an error in NNPACK.
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
    """Return the bytes of the flipped filters that lie ahead of NNPACK's own workspace."""
    if kernel.kind != "backward_data":
        return 0
    k, c, rows, columns = kernel.conv.weight_shape
    return aligned(k * c * rows * columns * 4)


@cache
def _zeros(count: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.float32, device="cpu")


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """Return the library, or why there is none."""
    ending = {"Darwin": "dylib", "Windows": "dll"}.get(platform.system(), "so")
    prefix = "" if ending == "dll" else "lib"
    path = Path(torch.__file__).parent / "lib" / f"{prefix}torch_cpu.{ending}"
    try:
        library = ctypes.CDLL(str(path))
        initialize, convolution = library.nnp_initialize, library.nnp_convolution_output
        create = library.pthreadpool_create
    except (OSError, AttributeError) as problem:
        return None, f"nnpack: this build of torch exports no NNPACK ({problem})"
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    initialize.argtypes, initialize.restype = [], ctypes.c_int
    create.argtypes, create.restype = [size], pointer
    convolution.restype = ctypes.c_int
    convolution.argtypes = [
        ctypes.c_int,
        size,
        size,
        size,
        _Size,
        _Padding,
        _Size,
        pointer,
        pointer,
        pointer,
        pointer,
        pointer,
        ctypes.POINTER(size),
        ctypes.c_int,
        pointer,
        pointer,
        pointer,
    ]
    if status := initialize():
        return None, f"nnpack: {_STATUS.get(status, 'not initialised')} on this CPU ({status})"
    return library, None


# A pool of threads works for one caller at a time.
_pool_lock = threading.Lock()


@cache
def _pool(threads: int, process: int) -> int | None:
    # One for each process: threads do not survive a fork.
    library, _ = _load()
    assert library is not None
    return library.pthreadpool_create(threads) if threads > 1 else None


def _call(
    algorithm: str,
    shape: Convolution,
    b: int,
    first: int | None,
    filters: int | None,
    bias: int | None,
    out: int | None,
    workspace: int | None,
    size: ctypes.c_size_t,
) -> int:
    library, problem = _load()
    if library is None:
        raise RuntimeError(problem)
    (rows, columns), (v, u) = shape.padding, shape.kernel_size
    with _pool_lock:
        status: int = library.nnp_convolution_output(
            ALGORITHMS[algorithm],
            b,
            shape.in_channels,
            shape.out_channels,
            _Size(shape.width, shape.height),
            _Padding(rows, columns, rows, columns),
            _Size(u, v),
            first,
            filters,
            bias,
            out,
            workspace,
            ctypes.byref(size),
            0,
            None,
            _pool(torch.get_num_threads(), os.getpid()),
            None,
        )
    return status
