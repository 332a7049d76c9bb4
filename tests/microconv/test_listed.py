"""Bytes that the kernels of whole models take, seen from outside, and those they list."""

import pytest
import torch

from repro._torchvision import torchvision
from repro.measure.allocations import peak_allocation
from repro.microconv import Convolution, Kernel, backends, find_kernels
from repro.microconv.backends import BACKENDS, NATIVE, run_division, summing_bytes
from repro.microconv.kernels import KINDS

BATCH = 2
SMALL = {"squeezenet1_1": 32}
LARGE = dict.fromkeys(["squeezenet1_1", "resnet18", "resnet50", "googlenet", "densenet121"], 64)
LARGE |= {"alexnet": 96, "vgg11": 32}


def kernels_of(models):
    kernels: dict[Kernel, None] = {}
    for name, side in models.items():
        options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
        model = torchvision.models.get_model(name, weights=None, **options)
        images = torch.randn(BATCH, 3, side, side)
        kernels |= dict.fromkeys(kernel for _, kernel, _ in find_kernels(model, images))
    return list(kernels)


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
    kernels = kernels_of(SMALL)[::3]  # the exhaustive test has all
    grouped = Convolution(8, 12, 11, 8, (3, 3), padding=(1, 1), groups=2)
    types = ("float32", "float64", "bfloat16", "float16")
    kernels += [Kernel(kind, grouped, dtype) for kind in KINDS for dtype in types]
    assert len(kernels) > 22 and [row for k in kernels for row in too_little(k)] == []


def test_an_algorithm_that_lists_too_little_is_found(monkeypatch):
    torch_backend = BACKENDS["torch"]
    plain = type(torch_backend).algorithms
    monkeypatch.setattr(
        type(torch_backend),
        "algorithms",
        lambda self, kernel, b: [
            (n, 0 if f"torch:{n}" == NATIVE else s) for n, s in plain(self, kernel, b)
        ],
    )
    kernel = kernels_of(SMALL)[-1]
    assert [row[1] for row in too_little(kernel)] == [NATIVE]


@pytest.mark.exhaustive
def test_what_hundreds_of_divided_kernels_take_is_listed():
    kernels = kernels_of(LARGE)
    assert len(kernels) > 373 and [row for k in kernels for row in too_little(k)] == []
