"""What `cudnn` declares by hand, against the real cuDNN's headers and library; no GPU is needed."""

import ctypes
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
    (missing,) = {*range(3000, 4000)} - cudnn._NOT_SUPPORTED
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
        "CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE": missing,
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
        same = f"declared::same<decltype(&::{name}), {ours}>::value"
        lines.append(f'static_assert({same}, "{name}");')
    lines += [f'static_assert({name} == {number}, "{name}");' for name, number in values().items()]
    return "\n".join(lines) + "\n"


@pytest.fixture
def declared() -> Declared:
    library = Declared()
    cudnn.declare(library)  # type: ignore[arg-type]
    return library


def test_functions_and_numbers_are_those_of_the_header(declared: Declared, tmp_path: Path):
    source = tmp_path / "check.cpp"
    source.write_text(check(declared), encoding="utf-8")  # also where the header is missing
    includes = wheels.find("cudnn.h", "cuda_runtime_api.h", "crt/host_defines.h")
    assert len(declared) == 18 and wheels.compiles(source, *includes) == ""
    declared["cudnnSetStream"].argtypes.append(ctypes.c_int)  # a planted fault
    source.write_text(check(declared), encoding="utf-8")
    assert "static assertion failed: cudnnSetStream" in wheels.compiles(source, *includes)
