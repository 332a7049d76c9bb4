"""A tuned kernel at other mini-batches than its own."""

import copy

import pytest

from repro.microconv import Candidate, Convolution, Kernel, best_division
from repro.microconv.backends import given_bytes
from repro.microconv.tuned_kernel import TunedKernel, Workspace

NATIVE = "torch:native"
CONV = Convolution(2, 5, 6, 3, (3, 3), padding=(1, 1))


def candidates_of(sizes):
    """Times that grow faster than the batch, the algorithms' workspace; native needs a bit."""
    kernel = Kernel("forward", CONV)
    return {
        b: [
            Candidate(NATIVE, 3.0 * b, 64 * b),
            Candidate("torch:im2col", 4.0 + 0.5 * b**1.5, given_bytes("torch:im2col", kernel, b)),
            Candidate("torch:direct", 5.0 + 0.4 * b**1.5, given_bytes("torch:direct", kernel, b)),
        ]
        for b in sizes
    }


def make_kernel(batch=8, sizes=(1, 2, 4, 8), limit=2**20, algorithms=None, kind="forward"):
    candidates = {
        b: [way for way in ways if algorithms is None or way.algorithm in algorithms]
        for b, ways in candidates_of(sizes).items()
    }
    division = best_division(batch, candidates, limit)
    workspace = Workspace("cpu")
    kernel = TunedKernel(Kernel(kind, CONV), batch, workspace, 0, division, candidates)
    workspace.reserve(kernel.segment_bytes)
    return kernel


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_another_batch_size_is_divided_best_within_the_same_workspace(sizes):
    for limit in (600, 6000, 12_000, 30_000, 2**20):
        kernel = make_kernel(sizes=sizes, limit=limit)
        before = copy.deepcopy(kernel.candidates)
        ways = {(b, way.algorithm): way for b, ways in kernel.candidates.items() for way in ways}
        for batch in (1, 3, 5, 7, 8, 9, 16, 31):
            parts = kernel.parts(batch)
            assert sum(size for size, _ in parts) == batch
            workspaces = [ways[part].workspace_bytes for part in parts if part[1] != NATIVE]
            assert max(workspaces, default=0) <= kernel.segment_bytes == kernel.workspace.size
            assert (
                max(ways[part].workspace_bytes for part in parts)
                <= kernel.division.workspace_bytes
                <= limit
            )
            assert kernel.parts(batch) is parts  # remembered
        assert kernel.parts(8) is kernel.division.parts and kernel.candidates == before
    kernel = make_kernel()
    kernel.candidates[8].append(Candidate(NATIVE, 0.1, 0))  # whose result was counted as the output
    assert (8, NATIVE) not in kernel.parts(16)
    kernel = make_kernel(sizes=(8,), algorithms=["torch:im2col"])
    assert kernel.parts(16) == [(8, "torch:im2col")] * 2
    assert kernel.parts(7) is None and kernel.parts(12) is None  # left to torch
    kernel.division = None
    assert kernel.parts(8) is None and kernel.parts(16) is None
