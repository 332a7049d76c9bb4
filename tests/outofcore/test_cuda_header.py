"""What csrc/cuda_driver.hpp declares by hand, against the real cuda.h."""

from pathlib import Path

import pytest
import wheels

from repro.outofcore.native import SOURCES

pytestmark = pytest.mark.wheel
CHECK = Path(__file__).with_name("cuda_header.cpp")


def test_the_driver_is_declared_as_cuda_h_declares_it():
    assert wheels.compiles(CHECK, SOURCES, *wheels.find("cuda.h")) == ""


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ('"cuEventDestroy_v2"', '"cuEventDestroy"', "the symbol of cuEventDestroy"),
        ("(CUresult, const char**)", "(CUresult, const char*)", "parameters of cuGetErrorString"),
        ("SUPPORTED = 102", "SUPPORTED = 103", "MANAGEMENT_SUPPORTED"),
        ("  int type;\n  int id;", "  int id;\n  int type;", "CUmemLocation.type"),
    ],
)
def test_what_is_declared_otherwise_is_found(right: str, wrong: str, message: str, tmp_path: Path):
    declared = (SOURCES / "cuda_driver.hpp").read_text(encoding="utf-8")
    assert right in declared
    (tmp_path / "cuda_driver.hpp").write_text(declared.replace(right, wrong), encoding="utf-8")
    assert message in wheels.compiles(CHECK, tmp_path, *wheels.find("cuda.h"))
