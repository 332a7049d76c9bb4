"""The backends by name, and running a micro-batch or a whole division with them."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from repro.measure.precision import rounds_to_tf32
from repro.microconv.cudnn import NONDETERMINISTIC, CuDNNBackend, deterministic
from repro.microconv.kernels import Backend, Kernel, Operands, aligned
from repro.microconv.nnpack import NNPACKBackend
from repro.microconv.optimize import Candidate, Division, desirable, pareto_front
from repro.microconv.torch_backend import TorchBackend


class BackendMissingError(ValueError):
    """A requested backend is not available on this machine or device."""


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (TorchBackend(), NNPACKBackend(), CuDNNBackend(), CuDNNBackend(half=True))
}
NATIVE = "torch:native"


def check_names(names: Sequence[str] | None, device: str) -> list[str]:
    """Check the allowed algorithms on a device; return a line for each unavailable backend.

    `ValueError` where no name was given, or an algorithm that its backend does not have;
    `BackendMissingError` where a backend is unknown or unavailable.
    """
    if names is not None and (isinstance(names, str) or not names):
        raise ValueError(f"algorithms is {names!r}; give a list of names, or None for all")
    for backend, _, algorithm in (name.partition(":") for name in names or ()):
        if backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise BackendMissingError(f"unknown backend {backend!r}; choose among {known}")
        if algorithm and algorithm not in BACKENDS[backend].names:
            known = ", ".join(BACKENDS[backend].names)
            raise ValueError(f"{backend} has no algorithm {algorithm!r}; choose among {known}")
    asked = BACKENDS if names is None else [name.partition(":")[0] for name in names]
    problems = [BACKENDS[name].missing(device) for name in asked]
    missing = list(dict.fromkeys(filter(None, problems)))
    if names is not None and missing:
        raise BackendMissingError(f"{missing[0]}; leave it out, or give another device")
    return missing


def divisions(
    batch: int, candidates: Mapping[int, Sequence[Candidate]], limit_bytes: int | None = None
) -> list[Division]:
    """`pareto_front`, with the bytes of divisions that have parts by torch's own convolution.

    Torch allocates them while the other parts' workspace is held: they add up. Of such mixtures
    those are considered that are desirable when torch's own parts share the workspace.
    """
    front = pareto_front(batch, candidates, limit_bytes)
    if len({way.algorithm == NATIVE for ways in candidates.values() for way in ways}) < 2:
        return front
    needs = {(n, way.algorithm): way.workspace_bytes for n in candidates for way in candidates[n]}

    def most(division: Division, torchs: bool) -> int:
        parts = {part for part in division.parts if (part[1] == NATIVE) is torchs}
        return max((needs[part] for part in parts), default=0)

    for torchs in (False, True):  # unmixed
        some = {
            n: [way for way in ways if (way.algorithm == NATIVE) is torchs]
            for n, ways in candidates.items()
        }
        with suppress(ValueError):
            front += pareto_front(batch, some, limit_bytes)
    found = [replace(d, workspace_bytes=most(d, True) + most(d, False)) for d in front]
    within = [d for d in found if limit_bytes is None or d.workspace_bytes <= limit_bytes]
    if not within:
        least = divisions(batch, candidates)[0].workspace_bytes
        raise ValueError(
            f"no division of the mini-batch of {batch} fits into {limit_bytes} bytes of workspace; "
            f"the smallest limit that would work is {least} bytes"
        )
    return desirable(within)


def listing(kernel: Kernel, b: int) -> list[tuple[str, int]]:
    """All available ``BACKEND:ALGORITHM`` for `b` samples, with the workspace in bytes.

    If torch requires deterministic algorithms, those with a varying order of summation are left
    out.
    """
    return [
        (f"{backend.name}:{name}", size)
        for backend in BACKENDS.values()
        if backend.missing(kernel.device) is None
        for name, size in backend.algorithms(kernel, b)
        if permitted(f"{backend.name}:{name}", kernel)
    ]


def versions(device: str) -> str:
    """The versions and settings of available backends that affect times, as text."""
    there = [backend for backend in BACKENDS.values() if backend.missing(device) is None]
    return "; ".join(backend.version(device) for backend in there)


def find(algorithm: str) -> tuple[Backend, str]:
    """The backend and the algorithm for a name such as ``nnpack:ft8x8``."""
    name, _, bare_name = algorithm.partition(":")
    return BACKENDS[name], bare_name


def stated_error(algorithm: str, kernel: Kernel) -> float:
    """An upper bound on an algorithm's relative error against exact arithmetic.

    It is the largest difference over the largest magnitude of the result, for operands of normal
    random numbers: a small element may have a larger relative error. It is stated for float32;
    other data types and TF32 round more coarsely or finely, by the ratio of their precisions.
    What is staged rounds to 16 bits once, at the end.
    """
    backend, bare_name = find(algorithm)
    ours = algorithm != NATIVE and backend.name in ("torch", "nnpack")
    if ours and kernel.torch_dtype.itemsize < 4:
        return backend.error(bare_name, kernel) + torch.finfo(kernel.torch_dtype).eps
    precision = 2**-11 if kernel.math == "tf32" else torch.finfo(kernel.torch_dtype).eps
    return backend.error(bare_name, kernel) * max(precision / 2**-23, 2**-29)


def given_bytes(algorithm: str, kernel: Kernel, b: int) -> int:
    """Bytes to give as workspace: those listed, less those that the library allocates itself."""
    backend, bare_name = find(algorithm)
    return backend.given_bytes(bare_name, kernel, b)


def summing_bytes(kernel: Kernel) -> int:
    """Bytes in which a division sums filter gradients of 16 bits; see `run_division`."""
    if kernel.kind != "backward_filter" or kernel.torch_dtype.itemsize >= 4:
        return 0
    # On a CPU torch casts the addends in a further buffer.
    buffers = 2 if torch.device(kernel.device).type == "cpu" else 1
    return buffers * aligned(4 * math.prod(kernel.conv.weight_shape))


def run(
    algorithm: str,
    kernel: Kernel,
    operands: Operands,
    workspace: Tensor,
    bias: Tensor | None = None,
) -> None:
    """Compute one micro-batch of a kernel by an algorithm.

    It allocates at most the listed bytes beyond `given_bytes`, and nothing waits for the device.
    Operands are in the order of `Kernel.shapes`, contiguous in the kernel's layout. The result of
    ``forward`` and ``backward_data`` is overwritten; a ``backward_filter`` is added to it, so that
    micro-batches accumulate. The workspace has at least `given_bytes`, aligned. `bias`, of shape
    (K,), is added to a forward pass.
    """
    backend, bare_name = find(algorithm)
    backend.run(bare_name, kernel, operands, workspace, bias)


def permitted(algorithm: str, kernel: Kernel) -> bool:
    """Whether an algorithm is permitted by torch's setting for deterministic algorithms."""
    backend, bare_name = find(algorithm)
    varies = isinstance(backend, CuDNNBackend) and (kernel.kind, bare_name) in NONDETERMINISTIC
    return not (varies and deterministic())


def run_division(
    parts: Sequence[tuple[int, str]],
    kernel: Kernel,
    first: Tensor,
    second: Tensor,
    out: Tensor,
    workspace: Tensor,
    bias: Tensor | None = None,
) -> None:
    """Compute a whole mini-batch, one part after the other in the same workspace.

    Arguments as in `run`, for the mini-batch; a filter gradient in `out` is overwritten here, and
    `bias`, of shape (K,), is added to a forward pass. ValueError if the parts are of another size.
    """
    if sum(size for size, _ in parts) != len(first):
        sizes = [size for size, _ in parts]
        raise ValueError(f"the division has parts of {sizes} samples, the mini-batch {len(first)}")
    total = out
    if kernel.kind == "backward_filter":
        # Sums of 16-bit gradients are kept in float32, as inside one convolution.
        if out.dtype.itemsize < 4 and len(parts) > 1:
            total = torch.zeros_like(out, dtype=torch.float32)
        out.zero_()
    start = 0
    for size, algorithm in parts:
        if total is not out and start:
            total += out
            out.zero_()
        part = kernel.piece((first, second, out), start, size)
        run(algorithm, kernel, part, workspace, bias)
        start += size
    if total is not out:
        out.copy_(total.add_(out))


def math_of(dtype: torch.dtype, device: str) -> str:
    """Torch's setting for float32 products in a convolution: ieee or tf32."""
    if dtype != torch.float32 or torch.device(device).type != "cuda":
        return "ieee"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "ieee"  # no TF32 before Ampere
    return "tf32" if rounds_to_tf32("conv") else "ieee"
