"""Tests marked `gpu` run on the simulated device, and fail where it finds a race."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest, torch

def program(device, wait):
    x, side = torch.ones(9, device=device), torch.Stream(device)
    if wait:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    y.record_stream(torch.accelerator.current_stream())
    torch.accelerator.synchronize()
    assert y.tolist() == [2.0] * 9

@pytest.mark.gpu
def test_right(device):
    program(device, True)

@pytest.mark.gpu
def test_wrong(device):
    program(device, False)

@pytest.mark.gpu
@pytest.mark.cuda_only("it measures speed")
def test_speed(device):
    raise AssertionError

def test_without():
    assert not torch.accelerator.is_available()
    with pytest.raises(RuntimeError, match="No simulated device"):
        torch.ones(1, device="sim")
"""


@pytest.mark.slow
def test_a_session_with_the_plugin(tmp_path: Path):
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n", encoding="utf-8")
    here = Path(__file__).parents[1]
    cache = Path(sys.modules["simulated_device_native"].__file__ or "").parents[2]
    environment = os.environ | {"PYTHONPATH": str(here), "REPRO_CACHE": str(cache)}
    command = [sys.executable, "-m", "pytest", "-p", "simulated_device.plugin", "-rAs", "-q"]
    options = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([*command, str(tmp_path)], **options)
    told = done.stdout
    assert "3 passed, 1 skipped, 1 error" in told, told + done.stderr
    assert "needs CUDA itself: it measures speed" in told
    assert "ERROR test_some.py::test_wrong" in told
    assert "does not wait for the default stream of sim:0" in told
    assert "test_some.py:5 in program" in told and "test_some.py:9 in program" in told
