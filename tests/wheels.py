"""NVIDIA's headers and libraries, where a wheel or a toolkit has brought them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def find(*names: str) -> list[Path]:
    """Return the folders that hold these files, one each; skip the test where one is missing.

    Wheels install to ``nvidia/*/include`` and ``nvidia/*/lib``, a toolkit to `$CUDA_HOME`.
    """
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    roots = [part for entry in sys.path for part in sorted(Path(entry or ".").glob("nvidia/*"))]
    folders = [root / kind for root in (*roots, toolkit) for kind in ("include", "lib", "lib64")]
    folders_of = [next((f for f in folders if (f / name).is_file()), None) for name in names]
    if None in folders_of:
        pytest.skip(f"no {names[folders_of.index(None)]}: install NVIDIA's wheel that has it")
    return [folder for folder in folders_of if folder]


def compiles(source: Path, *includes: Path) -> str:
    """Return what the C++ compiler finds wrong with a file; nothing where it compiles."""
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    options = [f"-I{HERE}", *(f"-isystem{folder}" for folder in includes)]
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wno-deprecated-declarations"]
    command += [*options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    return done.stderr if done.returncode else ""
