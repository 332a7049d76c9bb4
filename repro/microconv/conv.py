"""A convolution that runs its division: what `tune` puts in the place of ``nn.Conv2d``."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from repro.measure import time_interleaved
from repro.microconv import backends
from repro.microconv.kernels import KINDS, Convolution, Kernel
from repro.microconv.optimize import Candidate, Division, best_division
from repro.microconv.torch_backend import native

Parts = list[tuple[int, str]]


class Workspace:
    """Bytes on a device that kernels run in, allocated at first use and kept.

    One kernel uses a segment at a time: on a CPU a second thread waits for its turn; on CUDA a
    second stream is made to wait for the first one's work, and the host for neither.

    Args:
        device: Where.
        size: Bytes; see `reserve`.
    """

    def __init__(self, device: str, size: int = 0) -> None:
        self.device = device
        self.size = size
        self._reset()

    def reserve(self, size: int) -> None:
        """Make it at least `size` bytes; before its first use."""
        self.size = max(self.size, size)

    def _reset(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or one read from a file, allocates its own.
        return {"size": self.size, "device": self.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.size, self.device = state["size"], state["device"]
        self._reset()

    def allocate(self) -> torch.Tensor:
        """Return the buffer, made if it is not there yet."""
        if self._buffer is None:
            # Zeroed once, so that no page is missing in the first timed step.
            self._buffer = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
        return self._buffer

    @contextmanager
    def segment(self, offset: int, size: int) -> Iterator[torch.Tensor]:
        """Hold a segment for the kernels that are queued inside the block."""
        with self._lock:
            buffer = self.allocate()
            if buffer.is_cuda:
                stream = torch.cuda.current_stream(buffer.device)
                if self._stream is not None and self._stream != stream:
                    stream.wait_stream(self._stream)
                self._stream = stream
            yield buffer[offset : offset + size]


@dataclass
class TunedKernel:
    """One kernel of a layer, with the division that runs it.

    Attributes:
        kernel: What is computed.
        batch: The mini-batch size that was tuned for.
        parts: Its division; None leaves the kernel to torch.
        candidates: What the division was made of; another batch size is divided from them.
        limit_bytes: What the division needs, inside torch's own convolution included.
        segment_bytes: What its parts need of `workspace`.
        offset: Where its segment of the workspace starts.
        workspace: Shared with other kernels.
    """

    kernel: Kernel
    batch: int
    parts: Parts | None
    candidates: dict[int, list[Candidate]]
    limit_bytes: int
    segment_bytes: int
    offset: int
    workspace: Workspace
    _others: dict[int, Parts | None] = field(default_factory=dict, repr=False)

    def division(self, batch: int) -> Parts | None:
        """Return the parts for a batch size, None where it is left to torch.

        A size other than the tuned one, such as the last of an epoch, is divided from the same
        measurements; where their micro-batch sizes do not sum to it, torch runs it.
        """
        if batch == self.batch or self.parts is None:
            return self.parts
        if batch not in self._others:
            self._others[batch] = None
            with suppress(ValueError):
                fitting = {
                    size: [
                        way
                        for way in ways
                        if way.algorithm == backends.NATIVE
                        or way.workspace_bytes <= self.segment_bytes
                    ]
                    for size, ways in self.candidates.items()
                }
                self._others[batch] = best_division(batch, fitting, self.limit_bytes).parts
        return self._others[batch]

    def run(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        shape: tuple[int, ...],
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the kernel for a mini-batch into a new tensor of a given shape."""
        parts = self.division(len(first))
        if parts is None or parts == [(len(first), backends.NATIVE)]:
            return native(self.kernel, first, second, bias)
        memory_format = _FORMATS[self.kernel.layout]
        out = torch.empty(
            shape, dtype=first.dtype, device=first.device, memory_format=memory_format
        )
        with self.workspace.segment(self.offset, self.segment_bytes) as segment:
            backends.run_division(
                parts,
                self.kernel,
                first.contiguous(memory_format=memory_format),
                second.contiguous(memory_format=memory_format),
                out,
                segment,
                bias,
            )
        return out


def segment_bytes(division: Division | None, candidates: Mapping[int, Sequence[Candidate]]) -> int:
    """Return the workspace to give to a division; torch's own convolution takes none of it."""
    if division is None:
        return 0
    needs = {
        (size, way.algorithm): way.workspace_bytes
        for size, ways in candidates.items()
        for way in ways
        if way.algorithm != backends.NATIVE
    }
    return max((needs.get(part, 0) for part in division.parts), default=0)


_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}

# Height, width, data type, device, layout and math of a call.
Signature = tuple[int, int, str, str, str, str]


def layout_of(input: torch.Tensor, weight: torch.Tensor) -> str:
    """Return ``nhwc`` where torch would compute channels-last, else ``nchw``."""
    for tensor in (input, weight):
        channels_last = tensor.is_contiguous(memory_format=torch.channels_last)
        if channels_last and not tensor.is_contiguous():
            return "nhwc"
    return "nchw"


def compute_dtype(input: torch.Tensor) -> torch.dtype:
    """Return the data type that a convolution of `input` computes in, autocast considered."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return input.dtype


def signature(input: torch.Tensor, weight: torch.Tensor) -> Signature:
    """Return what, besides the batch size, decides which tuning a call belongs to."""
    dtype, device = compute_dtype(input), str(input.device)
    return (
        input.shape[2],
        input.shape[3],
        str(dtype).removeprefix("torch."),
        device,
        layout_of(input, weight),
        backends.math_of(dtype, device),
    )


def kernels_of(module: nn.Conv2d, call: Signature) -> dict[str, Kernel]:
    """Return the three kernels of a layer for calls of a signature."""
    height, width, dtype, device, layout, math = call
    conv = Convolution.of(module, height, width)
    return {kind: Kernel(kind, conv, dtype, device, layout, math) for kind in KINDS}


class TunedConv2d(nn.Conv2d):
    """An ``nn.Conv2d`` whose kernels run divided; made by `tune`, undone by `untune`.

    Parameters, buffers, hooks and the place in the model are the module's own. Calls that it was
    not tuned for (another image size, data type or device; under ``torch.compile`` or functional
    transforms; second derivatives) are computed by torch, as before.

    Attributes:
        tuned: By signature of a call, then kind, the kernels.
        untuned_calls: How many calls torch computed for want of a tuning.
    """

    tuned: dict[Signature, dict[str, TunedKernel]]
    untuned_calls: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return super().forward(input)
        kernels = self.tuned.get(signature(input, self.weight)) if input.dim() == 4 else None
        if kernels is None or len(input) == 0 or input.shape[1] != self.in_channels:
            self.untuned_calls += 1
            return super().forward(input)
        dtype = compute_dtype(input)
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(input.device.type, enabled=False):
            result: torch.Tensor = _Divided.apply(
                input.to(dtype), self.weight.to(dtype), bias, kernels
            )
        return result

    def extra_repr(self) -> str:
        kinds = {
            f"{kind} {sum(1 for _ in k.parts)} parts"
            for kernels in self.tuned.values()
            for kind, k in kernels.items()
            if k.parts is not None
        }
        return f"{super().extra_repr()}, tuned: {', '.join(sorted(kinds))}"


class _Divided(torch.autograd.Function):
    """Forward, data gradient and filter gradient, each by its own division."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: dict[str, TunedKernel],
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.kernels, ctx.with_bias = kernels, bias is not None
        forward = kernels["forward"]
        shape = forward.kernel.conv.output_shape(len(input))
        return forward.run(input, weight, shape, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        input, weight = ctx.saved_tensors
        kernels: dict[str, TunedKernel] = ctx.kernels
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph=True: what follows must be differentiable
            conv = kernels["forward"].kernel.conv
            sizes = [weight.shape[0]] if ctx.with_bias else None
            found = torch.ops.aten.convolution_backward(
                gradient, input, weight, sizes, conv.stride, conv.padding, conv.dilation, False,
                [0, 0], conv.groups, [needs_input, needs_weight, ctx.with_bias and needs_bias],
            )  # fmt: skip
            return (*found, None)
        of_input = of_weight = of_bias = None
        if needs_input:
            of_input = kernels["backward_data"].run(gradient, weight, input.shape)
        if needs_weight:
            of_weight = kernels["backward_filter"].run(input, gradient, weight.shape)
        if ctx.with_bias and needs_bias:
            of_bias = gradient.sum((0, 2, 3))
        return of_input, of_weight, of_bias, None


@cache
def call_overhead_s(device: str, training: bool) -> float:
    """Return what a call of a tuned layer costs more than one of torch's, in seconds.

    Measured on one pixel, with every kernel left to torch, so that only the way there differs.
    """
    plain = nn.Conv2d(1, 1, 1, device=device)
    tuned = nn.Conv2d(1, 1, 1, device=device)
    input = torch.zeros(1, 1, 1, 1, device=device, requires_grad=training)
    call = signature(input, tuned.weight)
    kernels = {
        kind: TunedKernel(kernel, 1, None, {}, 0, 0, 0, Workspace(device))
        for kind, kernel in kernels_of(tuned, call).items()
    }
    install(tuned, call, kernels)

    def run(module: nn.Module) -> None:
        with torch.set_grad_enabled(training):
            result = module(input)
        if training:
            result.backward()

    timed = time_interleaved(
        {"plain": lambda: run(plain), "tuned": lambda: run(tuned)}, warmup=10, repeats=50
    )
    return max(0.0, timed["tuned"].median_s - timed["plain"].median_s)


def install(module: nn.Conv2d, call: Signature, kernels: dict[str, TunedKernel]) -> None:
    """Turn a module into a `TunedConv2d` in place, with the kernels for calls of a signature."""
    made = cast(TunedConv2d, module)
    if not isinstance(module, TunedConv2d):
        cast(nn.Module, module).__class__ = TunedConv2d
        made.tuned, made.untuned_calls = {}, 0
    made.tuned[call] = kernels
