"""The ``cudnn`` backend: explicit cuDNN algorithms with queried workspace, on a CUDA device.

It calls the C functions of torch's loaded cuDNN: ``cudnnConvolutionForward``,
``...BackwardData`` and ``...BackwardFilter``, each with an algorithm, a workspace and the scales
alpha and beta. Weight gradients are accumulated by beta = 1 (section II).

The backend ``cudnn`` computes 16-bit tensors in float32 (PSEUDO_HALF of section III-D), as torch
does; ``cudnn_half`` computes float16 in float16 (TRUE_HALF), with a larger stated error.
"""

import ctypes
import threading
from functools import cache
from pathlib import Path

import torch

from repro.microconv.kernels import Backend, Kernel, Operands, aligned
from repro.microconv.staging import add_bias

# Number 4 of the filter gradient, WINOGRAD, is declared in cuDNN's header but does not exist.
_NAMES = {
    "forward": "IMPLICIT_GEMM IMPLICIT_PRECOMP_GEMM GEMM DIRECT FFT FFT_TILING WINOGRAD "
    "WINOGRAD_NONFUSED",
    "backward_data": "ALGO_0 ALGO_1 FFT FFT_TILING WINOGRAD WINOGRAD_NONFUSED",
    "backward_filter": "ALGO_0 ALGO_1 FFT ALGO_3 - WINOGRAD_NONFUSED FFT_TILING",
}
ALGORITHMS = {
    kind: {name: number for number, name in enumerate(names.split()) if name != "-"}
    for kind, names in _NAMES.items()
}
# Sums by atomic additions, in an order that changes between runs.
NONDETERMINISTIC = {
    ("backward_data", "ALGO_0"),
    ("backward_filter", "ALGO_0"),
    ("backward_filter", "ALGO_3"),
}

# For sums in float16, which are rounded at every addition, and infinite beyond 65,504.
TRUE_HALF_ERROR = 1e-2

_DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_LAYOUTS = {"nchw": 0, "nhwc": 1}
_DEFAULT_MATH, _TENSOR_OP_MATH, _FMA_MATH = 0, 1, 3
_CROSS_CORRELATION = 1
_COMPILATION_FAILED, _OUT_OF_MEMORY = 4001, (4003, 4004)
_NOT_SUPPORTED = {*range(3000, 4000)} - {3009}  # a sublibrary is missing


class UnsupportedError(RuntimeError):
    """cuDNN listed an algorithm with its workspace, but refused to run it."""


class CuDNNBackend(Backend):
    """Runs cuDNN's own algorithms by name; with `half` only float16, computed in float16."""

    names = tuple(dict.fromkeys(name for known in ALGORITHMS.values() for name in known))

    def __init__(self, half: bool = False) -> None:
        self.half, self.name = half, "cudnn_half" if half else "cudnn"

    def missing(self, device: str) -> str | None:
        if torch.device(device).type != "cuda":
            return f"cudnn: runs on a CUDA device only, not on {device}"
        if not torch.cuda.is_available():
            return "cudnn: no CUDA device is present"
        return _load()[1]

    def version(self, device: str) -> str:
        """CuDNN's version, and whether torch requires deterministic algorithms."""
        order = "deterministic" if deterministic() else "any order of sums"
        sums = ", sums in float16" if self.half else ""
        return f"cudnn {_library().cudnnGetVersion()}, {order}{sums}"

    def error(self, algorithm: str, kernel: Kernel) -> float:
        if self.half:
            return TRUE_HALF_ERROR
        if not algorithm.startswith("WINOGRAD"):
            return 2e-5
        # Larger filters use larger tiles: the error of 5x5 exceeded 1e-4 on an H100 (cuDNN 9.19).
        return 1e-4 if max(kernel.conv.kernel_size) <= 3 else 1e-3

    def algorithms(self, kernel: Kernel, b: int) -> list[tuple[str, int]]:
        listed: list[tuple[str, int]] = []
        if self.half and kernel.dtype != "float16":
            return listed
        with torch.cuda.device(kernel.device):
            for name, number in ALGORITHMS[kernel.kind].items():
                size = ctypes.c_size_t(0)
                *inputs, out, conv = _descriptors(kernel, b, self.half)
                query = getattr(_library(), _QUERIES[kernel.kind])
                if query(_handle(), *inputs, conv, out, number, ctypes.byref(size)) == 0:
                    listed.append((name, aligned(size.value)))
        return listed

    def run(
        self,
        algorithm: str,
        kernel: Kernel,
        operands: Operands,
        workspace: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        first, second, out = operands
        *inputs, result, conv = _descriptors(kernel, len(first), self.half)
        scale = ctypes.c_double if kernel.dtype == "float64" else ctypes.c_float
        one = scale(1.0)
        # beta: the filter gradient accumulates, the other results are overwritten.
        beta = scale(1.0 if kernel.kind == "backward_filter" else 0.0)
        pointers = [first.data_ptr(), second.data_ptr()]
        if kernel.kind == "backward_data":  # cuDNN wants the filters first
            pointers.reverse()
        number = ALGORITHMS[kernel.kind][algorithm]
        with torch.cuda.device(kernel.device):
            stream = torch.cuda.current_stream().cuda_stream
            _call("cudnnSetStream", _handle(), stream)
            call = getattr(_library(), _CALLS[kernel.kind])
            given = (inputs[0], pointers[0], inputs[1], pointers[1], conv, number)
            room = workspace.data_ptr(), workspace.numel()
            written = ctypes.byref(beta), result, out.data_ptr()
            status = call(_handle(), ctypes.byref(one), *given, *room, *written)
        if status:
            message = (
                f"{self.name}: {algorithm} failed for {kernel.kind} of {kernel.conv} at a "
                f"micro-batch of {len(first)}: {_message(status)}"
            )
            if status in _OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(message)
            if status == _COMPILATION_FAILED or status in _NOT_SUPPORTED:
                raise UnsupportedError(message)
            raise RuntimeError(message)
        add_bias(out, bias)


def deterministic() -> bool:
    """Whether torch requires deterministic algorithms."""
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


_CALLS = {
    "forward": "cudnnConvolutionForward",
    "backward_data": "cudnnConvolutionBackwardData",
    "backward_filter": "cudnnConvolutionBackwardFilter",
}
_QUERIES = {
    kind: f"cudnnGet{call.removeprefix('cudnn')}WorkspaceSize" for kind, call in _CALLS.items()
}


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or the reason why it is unavailable."""
    # This name finds torch's loaded copy; else that of the Python package.
    packaged = Path(torch.__file__).parents[1] / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    problem = ""
    for file in ("libcudnn.so.9", str(packaged)):
        try:
            return declare(ctypes.CDLL(file)), None
        except (OSError, AttributeError) as error:
            problem = str(error)
    return None, f"cudnn: no cuDNN 9 with the convolution functions was found ({problem})"


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the arguments of the called functions; AttributeError where one is missing."""
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    handle = ctypes.POINTER(pointer)
    declared: dict[str, list[type]] = {
        "cudnnCreate": [handle],
        "cudnnSetStream": [pointer, pointer],
        "cudnnCreateTensorDescriptor": [handle],
        "cudnnCreateFilterDescriptor": [handle],
        "cudnnCreateConvolutionDescriptor": [handle],
        "cudnnSetTensor4dDescriptor": [pointer, *[number] * 6],
        "cudnnSetFilter4dDescriptor": [pointer, *[number] * 6],
        "cudnnSetConvolution2dDescriptor": [pointer, *[number] * 8],
        "cudnnSetConvolutionGroupCount": [pointer, number],
        "cudnnSetConvolutionMathType": [pointer, number],
    }
    for name in _QUERIES.values():
        declared[name] = [*[pointer] * 5, number, ctypes.POINTER(size)]
    for name in _CALLS.values():
        declared[name] = [*[pointer] * 7, number, pointer, size, pointer, pointer, pointer]
    for name, arguments in declared.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    library.cudnnGetVersion.restype = size
    library.cudnnGetErrorString.argtypes = [number]
    library.cudnnGetErrorString.restype = ctypes.c_char_p
    return library


def _library() -> ctypes.CDLL:
    library, problem = _load()
    if library is None:
        raise RuntimeError(problem)
    return library


def _message(status: int) -> str:
    return f"{_library().cudnnGetErrorString(status).decode()} ({status})"


def _call(name: str, *arguments: object) -> None:
    if status := getattr(_library(), name)(*arguments):
        raise RuntimeError(f"cudnn: {name} failed: {_message(status)}")


_handles = threading.local()


def _handle() -> ctypes.c_void_p:
    """This thread's handle of the current device."""
    known: dict[int, ctypes.c_void_p] = _handles.__dict__.setdefault("known", {})
    index = torch.cuda.current_device()
    if index not in known:
        known[index] = ctypes.c_void_p()
        _call("cudnnCreate", ctypes.byref(known[index]))
    return known[index]


_Descriptors = tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]


@cache
def _descriptors(kernel: Kernel, b: int, half: bool = False) -> _Descriptors:
    """Descriptions of the operands in its order, the result and the convolution."""
    conv = kernel.conv
    data, layout = _DATA_TYPES[kernel.dtype], _LAYOUTS[kernel.layout]
    filters = 2 if kernel.kind == "backward_filter" else 1
    first, second, out = (
        _described("Filter", "4d", data, layout, *shape)
        if position == filters
        else _described("Tensor", "4d", layout, data, *shape)
        for position, shape in enumerate(kernel.shapes(b))
    )
    compute = _DATA_TYPES[kernel.dtype if half or kernel.dtype == "float64" else "float32"]
    geometry = (*conv.padding, *conv.stride, *conv.dilation)
    convolution = _described("Convolution", "2d", *geometry, _CROSS_CORRELATION, compute)
    math = _DEFAULT_MATH
    if kernel.dtype in ("float16", "bfloat16"):
        math = _TENSOR_OP_MATH
    elif kernel.dtype == "float32" and kernel.math == "ieee":
        math = _FMA_MATH
    _call("cudnnSetConvolutionGroupCount", convolution, conv.groups)
    _call("cudnnSetConvolutionMathType", convolution, math)
    if kernel.kind == "backward_data":
        first, second = second, first
    return first, second, out, convolution


def _described(what: str, dimensions: str, *values: int) -> ctypes.c_void_p:
    """A new descriptor, set to these values."""
    descriptor = ctypes.c_void_p()
    _call(f"cudnnCreate{what}Descriptor", ctypes.byref(descriptor))
    _call(f"cudnnSet{what}{dimensions}Descriptor", descriptor, *values)
    return descriptor
