"""The simulated device for the tests of this folder: built and loaded before any of them runs."""

from collections.abc import Iterator

import pytest
import torch

import simulated_device

if torch.cuda.is_available():
    missing = "there is a CUDA device, which the simulated one would hide"
else:
    try:
        simulated_device.load()
        missing = ""
    except simulated_device.NoCompilerError as error:
        missing = str(error)

collect_ignore_glob = ["test_*.py"] if missing else []


def pytest_report_header() -> str:
    return f"simulated device: {missing or 'loaded'}"


@pytest.fixture
def sim() -> Iterator[torch.device]:
    """The simulated device, with empty memory; nothing checked."""
    from simulated_device.checking import present

    with present():
        yield torch.device("sim", 0)
