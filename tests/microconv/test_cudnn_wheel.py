"""What `cudnn` declares by hand, against the real cuDNN's headers and library; no GPU is needed."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import wheels

from repro.microconv import cudnn

pytestmark = pytest.mark.wheel

C_TYPES = {
    ctypes.c_void_p: "void*",
    ctypes.c_int: "int",
    ctypes.c_size_t: "std::size_t",
    ctypes.c_char_p: "const char*",
    ctypes.POINTER(ctypes.c_void_p): "void**",
    ctypes.POINTER(ctypes.c_size_t): "std::size_t*",
}
PREFIXES = {
    "forward": "CUDNN_CONVOLUTION_FWD_ALGO_",
    "backward_data": "CUDNN_CONVOLUTION_BWD_DATA_ALGO_",
    "backward_filter": "CUDNN_CONVOLUTION_BWD_FILTER_ALGO_",
}


class Declared(dict):
    """Stands for a library, and keeps what is declared of it."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return self.setdefault(name, SimpleNamespace(argtypes=[]))


def values() -> dict[str, int]:
    """What cuDNN's header calls the numbers that `cudnn` has."""
    types = {"float32": "FLOAT", "float64": "DOUBLE", "float16": "HALF", "bfloat16": "BFLOAT16"}
    out_of_memory = cudnn._OUT_OF_MEMORY
    return {
        **{
            PREFIXES[kind] + name.removeprefix("ALGO_"): number
            for kind, known in cudnn.ALGORITHMS.items()
            for name, number in known.items()
        },
        **{f"CUDNN_DATA_{types[name]}": number for name, number in cudnn._DATA_TYPES.items()},
        **{f"CUDNN_TENSOR_{name.upper()}": number for name, number in cudnn._LAYOUTS.items()},
        "CUDNN_DEFAULT_MATH": cudnn._DEFAULT_MATH,
        "CUDNN_TENSOR_OP_MATH": cudnn._TENSOR_OP_MATH,
        "CUDNN_FMA_MATH": cudnn._FMA_MATH,
        "CUDNN_CROSS_CORRELATION": cudnn._CROSS_CORRELATION,
        "CUDNN_STATUS_NOT_SUPPORTED": 3000,
        "CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE": cudnn._SUBLIBRARY_MISSING,
        "CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED": cudnn._COMPILATION_FAILED,
        "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED": out_of_memory[0],
        "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": out_of_memory[1],
    }


def check(declared: Declared) -> str:
    """A program that does not compile where something is declared otherwise than in cudnn.h."""
    lines = ["#include <cudnn.h>", '#include "declared.hpp"']
    for name, function in declared.items():
        returned = C_TYPES[function.restype]
        arguments = ", ".join(C_TYPES[kind] for kind in function.argtypes)
        ours = f"{returned} (*)({arguments})"
        lines.append(
            f'static_assert(declared::same<decltype(&::{name}), {ours}>::value, "{name}");'
        )
    lines += [f'static_assert({name} == {number}, "{name}");' for name, number in values().items()]
    return "\n".join(lines) + "\n"


@pytest.fixture
def declared() -> Declared:
    library = Declared()
    cudnn.declare(library)  # type: ignore[arg-type]
    return library


def test_functions_and_numbers_are_those_of_the_header(declared: Declared, tmp_path: Path):
    includes = wheels.find("cudnn.h", "cuda_runtime_api.h", "crt/host_defines.h")
    source = tmp_path / "check.cpp"
    source.write_text(check(declared), encoding="utf-8")
    assert len(declared) == 18 and wheels.compiles(source, *includes) == ""
    declared["cudnnSetStream"].argtypes.append(ctypes.c_int)  # a planted fault
    source.write_text(check(declared), encoding="utf-8")
    assert "static assertion failed: cudnnSetStream" in wheels.compiles(source, *includes)


ASKED = """
import ctypes, sys
from itertools import product
from repro.microconv import Convolution, Kernel, cudnn
from repro.microconv.kernels import KINDS

library = cudnn.declare(ctypes.CDLL(sys.argv[1]))  # every function is there
cudnn._load = lambda: (library, None)

def asked(call, *given, count):
    '''The numbers that a function of cuDNN gives by its last arguments.'''
    numbers = (ctypes.c_int * count)()
    pointers = [ctypes.byref(numbers, 4 * i) for i in range(count)]
    status = getattr(library, call)(*given, *pointers)
    assert status == 0, (call, status)
    return tuple(numbers)

conv = Convolution(4, 9, 8, 6, (3, 2), (2, 1), (1, 2), (1, 3), groups=2)
for kind, dtype, layout in product(KINDS, cudnn._DATA_TYPES, cudnn._LAYOUTS):
    kernel = Kernel(kind, conv, dtype, layout=layout)
    d = cudnn._Descriptors(kernel, 5)
    filters = {"forward": 1, "backward_data": 1, "backward_filter": 2}[kind]
    made = [d.first, d.second, d.out]
    for position, (descriptor, shape) in enumerate(zip(made, kernel.shapes(5))):
        if position == filters:
            answer = asked("cudnnGetFilter4dDescriptor", descriptor, count=6)
            assert answer == (cudnn._DATA_TYPES[dtype], cudnn._LAYOUTS[layout], *shape), answer
        else:
            answer = asked("cudnnGetTensor4dDescriptor", descriptor, count=9)
            n, c, h, w = shape
            strides = (c * h * w, h * w, w, 1) if layout == "nchw" else (h * w * c, 1, w * c, c)
            assert answer == (cudnn._DATA_TYPES[dtype], *shape, *strides), answer
    tensors = [m for i, m in enumerate(made) if i != filters]
    input = tensors[1] if kind == "backward_data" else tensors[0]
    size = asked(
        "cudnnGetConvolution2dForwardOutputDim", d.conv, input, made[filters], count=4
    )
    assert size == conv.output_shape(5), size
    answer = asked("cudnnGetConvolution2dDescriptor", d.conv, count=8)
    compute = 1 if dtype == "float64" else 0
    assert answer == (*conv.padding, *conv.stride, *conv.dilation, 1, compute), answer
    assert asked("cudnnGetConvolutionGroupCount", d.conv, count=1) == (2,)
print("asked", library.cudnnGetVersion())
"""


def test_the_library_exports_all_and_reads_our_descriptors():
    (folder,) = wheels.find("libcudnn.so.9")
    command = [sys.executable, "-c", ASKED, str(folder / "libcudnn.so.9")]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0 and done.stdout.startswith("asked 9"), done.stderr
