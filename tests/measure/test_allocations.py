import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from repro.measure import MemoryMeter
from repro.measure.allocations import peak_allocation

KIB = 1024


def block(kib, device="cpu"):
    return torch.empty(kib * KIB, dtype=torch.uint8, device=device)


def one_after_the_other(device="cpu"):
    a = block(1000, device)
    del a
    b, c = block(2000, device), block(300, device)
    del b
    return c


def together():
    a, b = block(100), block(40)
    del a
    return b, block(30)


KEPT = block(500)  # what was there before does not count, what is returned does


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (one_after_the_other, 2300 * KIB),
        (together, 140 * KIB),
        (lambda: KEPT.view(-1).zero_(), 0),
        (lambda: [torch.empty(16) for _ in range(5000)], 5000 * 64),
    ],
)
def test_the_peak_is_what_lives_at_once(function, expected):
    gc.collect()
    calls = []
    assert peak_allocation(lambda: (calls.append(1), function()), "cpu") == expected
    assert calls == [1]


def test_temporaries_inside_an_operation_and_a_backward_pass():
    # irfft2 copies its input; no operation returns the copy, so that MemoryMeter does not see it.
    a = torch.randn(64, 64)
    spectrum, image = torch.fft.rfft2(a), torch.empty_like(a)

    def inverse():
        torch.fft.irfft2(spectrum, out=image)

    inverse()
    assert peak_allocation(inverse, "cpu") >= spectrum.nbytes
    with MemoryMeter(resident=[spectrum, image]) as meter:
        inverse()
    assert meter.peak_bytes - meter.start_bytes < spectrum.nbytes
    model, inputs = nn.Linear(64, 32, bias=False), torch.ones(8, 64)

    def backward():
        return torch.autograd.grad(model(inputs).sum(), model.weight)

    backward()
    assert model.weight.nbytes <= peak_allocation(backward, "cpu") < 3 * model.weight.nbytes


def test_an_error_inside_leaves_no_profiler_and_one_that_runs_is_not_ended():
    with pytest.raises(ZeroDivisionError):
        peak_allocation(lambda: (block(3), 1 // 0), "cpu")
    assert peak_allocation(lambda: block(3), "cpu") == 3 * KIB
    with torch.profiler.profile(acc_events=True) as profiler:
        with pytest.raises(RuntimeError, match="one is running; stop it first"):
            peak_allocation(lambda: block(3), "cpu")
        block(1).add_(1)
    assert any(event.key == "aten::add_" for event in profiler.key_averages())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted as Linux does")
def test_freed_memory_is_kept_and_nothing_is_written_to_the_terminal():
    # In a process of its own: there is no way back.
    code = """
import resource, torch
from repro.measure.allocations import keep_freed_memory, peak_allocation
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(2**24, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
peak_allocation(lambda: torch.empty(100), "cpu")
before, kept = faults(), keep_freed_memory()
faults()
print(kept, before, faults())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    kept, before, after = done.stdout.split()
    if kept == "False":
        pytest.skip("this C library has no mallopt")
    assert int(before) > 20  # every tensor anew, even with huge pages
    assert int(after) < int(before) / 5


@pytest.mark.gpu
def test_the_peak_on_an_accelerator(device):
    kept = block(512, device)
    a, b, c = (-(-kib * KIB // 512) * 512 for kib in (1000, 2000, 300))
    assert a < b and peak_allocation(lambda: one_after_the_other(device), device.type) == b + c
    assert peak_allocation(lambda: kept.zero_(), device) == 0
    with MemoryMeter(device) as meter:
        block(8 * KIB, device)
        peak_allocation(lambda: kept.zero_(), device)
    assert meter.peak_bytes - meter.start_bytes == 8 * KIB * KIB
