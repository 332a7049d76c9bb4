import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from repro.measure import allocations
from repro.measure.allocations import freed_memory_is_kept, keep_freed_memory, peak_allocation

KIB = 1024


def block(kib):
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_the_peak_is_what_lives_at_once():
    def function():
        a = block(100)
        del a
        b = block(40)
        c = block(30)
        del b
        return c

    assert peak_allocation(function, "cpu") == 100 * KIB

    def together():
        a, b = block(100), block(40)
        del a
        c = block(30)
        return b, c

    assert peak_allocation(together, "cpu") == 140 * KIB


def test_what_is_returned_counts_and_what_was_there_before_does_not():
    kept = block(500)
    assert peak_allocation(lambda: block(7), "cpu") == 7 * KIB
    assert peak_allocation(lambda: kept.view(-1), "cpu") == 0
    assert peak_allocation(lambda: kept.zero_(), "cpu") == 0
    assert peak_allocation(lambda: None, "cpu") == 0


def test_temporaries_inside_an_operation_are_seen():
    from repro.measure import MemoryMeter

    a = torch.randn(64, 64)
    out = torch.empty(64, 64)

    def function():
        torch.matmul(a.t().contiguous(), a, out=out)

    assert peak_allocation(function, "cpu") >= a.nbytes
    # irfft2 copies its input; no operation returns the copy, so that MemoryMeter does not see it.
    spectrum, image = torch.fft.rfft2(a), torch.empty_like(a)

    def inverse():
        torch.fft.irfft2(spectrum, out=image)

    inverse()
    assert peak_allocation(inverse, "cpu") >= spectrum.nbytes
    with MemoryMeter(resident=[spectrum, image]) as meter:
        inverse()
    assert meter.peak_bytes - meter.start_bytes < spectrum.nbytes


def test_a_backward_pass():
    model = nn.Linear(64, 32, bias=False)
    inputs = torch.ones(8, 64)

    def function():
        return torch.autograd.grad(model(inputs).sum(), model.weight)

    function()
    weight = model.weight.nbytes
    assert weight <= peak_allocation(function, "cpu") < 3 * weight


def test_allocations_of_many_small_tensors():
    count = 5000

    def function():
        return [torch.empty(16) for _ in range(count)]

    gc.collect()
    assert peak_allocation(function, "cpu") == count * 64


def test_an_error_inside_passes_and_leaves_no_profiler_behind():
    def function():
        block(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        peak_allocation(function, "cpu")
    assert peak_allocation(lambda: block(3), "cpu") == 3 * KIB


def test_a_profiler_that_runs_already_is_not_ended():
    with torch.profiler.profile() as profiler:
        with pytest.raises(RuntimeError, match="one is running; stop it first"):
            peak_allocation(lambda: block(3), "cpu")
        block(1).add_(1)
    assert any(event.key == "aten::add_" for event in profiler.key_averages())


def test_the_function_runs_once():
    calls = []
    peak_allocation(lambda: calls.append(1), "cpu")
    assert calls == [1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted as Linux does")
@pytest.mark.thorough
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
torch.set_num_threads(1)
peak = peak_allocation(lambda: torch.empty(100), torch.device("cpu"))
before = faults()
kept = keep_freed_memory()
faults()
print(peak, kept, before, faults())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    peak, kept, before, after = done.stdout.split()
    assert peak == "400"
    if kept == "False":
        pytest.skip("this C library has no mallopt")
    assert int(before) > 20  # every tensor anew, even with huge pages
    assert int(after) < int(before) / 5


def test_a_c_library_without_the_option(monkeypatch):
    monkeypatch.setattr("repro.measure.allocations.ctypes.CDLL", lambda name: object())
    assert keep_freed_memory() is False


def test_options_that_are_refused(monkeypatch):
    class Library:
        calls: list = []  # noqa: RUF012

        @classmethod
        def mallopt(cls, option, value):
            cls.calls.append((option, value))
            return cls.answer

    monkeypatch.setattr("repro.measure.allocations.ctypes.CDLL", lambda name: Library)
    monkeypatch.setattr(allocations, "_kept", False)
    Library.answer = 0
    assert keep_freed_memory() is freed_memory_is_kept() is False
    Library.answer = 1
    assert keep_freed_memory() is freed_memory_is_kept() is True
    # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
    assert Library.calls[-2:] == [(-4, 0), (-1, 2**31 - 1)]


@pytest.mark.gpu
def test_the_peak_on_an_accelerator(device):
    def block(kib):
        return torch.empty(kib * KIB, dtype=torch.uint8, device=device)

    kept = block(512)

    def function():
        a = block(1024)
        del a
        b, c = block(2048), block(256)
        del b
        return c

    assert peak_allocation(function, device.type) == 2304 * KIB
    assert peak_allocation(lambda: kept.zero_(), device) == 0
