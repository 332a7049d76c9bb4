"""Bytes that the kernels of whole models take, seen from outside, and those they list."""

import pytest
import torch

from repro._torchvision import torchvision
from repro.measure.allocations import peak_allocation
from repro.microconv import Convolution, Kernel, backends, find_kernels
from repro.microconv.backends import BACKENDS, NATIVE, run_division, summing_bytes
from repro.microconv.kernels import KINDS

BATCH = 2


def kernels_of_squeezenet():
    model = torchvision.models.squeezenet1_1(weights=None)
    found = find_kernels(model, torch.randn(BATCH, 3, 32, 32))
    return list(dict.fromkeys(kernel for _, kernel, _ in found))


def too_little(kernel):
    """Run every algorithm sample by sample; return those that take more than they list."""
    first, second, out = kernel.tensors(BATCH)
    beyond = []
    for algorithm, listed in backends.listing(kernel, 1):
        given = backends.given_bytes(algorithm, kernel, 1)
        workspace = torch.zeros(given, dtype=torch.uint8)
        parts = [(1, algorithm)] * BATCH

        def run(parts=parts, workspace=workspace):
            run_division(parts, kernel, first, second, out, workspace)

        run()
        taken = given + peak_allocation(run, "cpu")
        if taken > listed + summing_bytes(kernel):
            beyond.append((kernel, algorithm, taken, listed))
    return beyond


@pytest.mark.slow
def test_what_divided_kernels_take_is_listed():
    kernels = kernels_of_squeezenet()[::3]
    grouped = Convolution(8, 12, 11, 8, (3, 3), padding=(1, 1), groups=2)
    types = ("float32", "float64", "bfloat16", "float16")
    kernels += [Kernel(kind, grouped, dtype) for kind in KINDS for dtype in types]
    assert len(kernels) > 22 and [row for k in kernels for row in too_little(k)] == []


def test_an_algorithm_that_lists_too_little_is_found(monkeypatch):
    plain = BACKENDS["torch"].algorithms

    def without_natives(kernel, b):
        return [(n, 0 if f"torch:{n}" == NATIVE else size) for n, size in plain(kernel, b)]

    monkeypatch.setattr(BACKENDS["torch"], "algorithms", without_natives)
    kernel = kernels_of_squeezenet()[-1]
    assert [row[1] for row in too_little(kernel)] == [NATIVE]
