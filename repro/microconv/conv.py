"""A convolution that runs its division: what `tune` puts in the place of ``nn.Conv2d``."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch.autograd import forward_ad

from repro.measure import accelerator, time_interleaved
from repro.microconv import backends
from repro.microconv.kernels import KINDS, Convolution, Kernel
from repro.microconv.operators import TunedLayer, convolve
from repro.microconv.optimize import Candidate, Division, best_division
from repro.microconv.torch_backend import native

Parts = list[tuple[int, str]]


class Workspace:
    """Bytes on a device that kernels run in, allocated at first use and kept.

    One kernel uses a segment at a time: on a CPU a second thread waits for its turn; on an
    accelerator a second stream is made to wait for the first one's work, and the host for neither.

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
        self._stream: accelerator.Stream | None = None

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
            with torch.inference_mode(False):
                self._buffer = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
            self._stream = accelerator.current_stream(self._buffer.device)
        return self._buffer

    @contextmanager
    def segment(self, offset: int, size: int) -> Iterator[torch.Tensor]:
        """Hold a segment for the kernels that are queued inside the block."""
        with self._lock:
            buffer = self.allocate()
            if accelerator.is_accelerator(buffer.device) and not _capturing(buffer.device):
                stream = accelerator.current_stream(buffer.device)
                if self._stream != stream:
                    if self._stream is not None:
                        stream.wait_stream(self._stream)
                    accelerator.record_stream(buffer, stream)
                self._stream = stream
            yield buffer[offset : offset + size]


def _capturing(device: torch.device) -> bool:
    """Return whether what is queued goes into a graph, such as CUDA's."""
    asked = getattr(accelerator.module(device), "is_current_stream_capturing", None)
    return asked is not None and asked()


@dataclass
class TunedKernel:
    """One kernel of a layer, with the division that runs it.

    Attributes:
        kernel: What is computed.
        batch: The mini-batch size that was tuned for.
        parts: Its division; None leaves the kernel to torch.
        candidates: What the division was made of; another batch size is divided from them.
        native_s: Seconds of torch's own convolution by batch size, which such a division must
            beat; none where divisions were asked for whatever they take.
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
    native_s: dict[int, float] = field(default_factory=dict)
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
                    size: [way for way in ways if self._fits(size, way)]
                    for size, ways in self.candidates.items()
                }
                best = best_division(batch, fitting, self.limit_bytes)
                if best.time_s < self._native_s(batch):
                    self._others[batch] = best.parts
        return self._others[batch]

    def _native_s(self, batch: int) -> float:
        """Return the seconds of torch's own convolution, between and beyond measured sizes."""
        if not self.native_s:
            return math.inf
        sizes = sorted(self.native_s)
        if batch > sizes[-1]:
            return self.native_s[sizes[-1]] * batch / sizes[-1]
        return float(np.interp(batch, [0, *sizes], [0.0, *(self.native_s[b] for b in sizes)]))

    def _fits(self, size: int, way: Candidate) -> bool:
        if way.algorithm == backends.NATIVE:
            # Of the whole tuned batch, its result was counted as the output, not as a buffer.
            return size != self.batch
        return backends.given_bytes(way.algorithm, self.kernel, size) <= self.segment_bytes

    def run(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        shape: tuple[int, ...],
        bias: torch.Tensor | None = None,
        like: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the kernel for a mini-batch into a new tensor of a given shape.

        Arguments as `native`; `shape` is that of the result.
        """
        parts = self.division(len(first))
        if parts is not None and _only_deterministic():
            allowed = all(backends.permitted(name, self.kernel) for _, name in parts)
            parts = parts if allowed else None
        if parts is None or parts == [(len(first), backends.NATIVE)]:
            return native(self.kernel, first, second, bias, like)
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


def _only_deterministic() -> bool:
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


def segment_bytes(kernel: Kernel, division: Division | None) -> int:
    """Return the workspace to give to a division; torch's own convolution takes none of it."""
    parts = [] if division is None else set(division.parts)
    return max((backends.given_bytes(name, kernel, size) for size, name in parts), default=0)


_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}

# Height, width, data type, device, layout and math of a call.
Signature = tuple[int, int, str, str, str, str]


def layout_of(input: torch.Tensor, weight: torch.Tensor) -> str:
    """Return ``nhwc`` where torch would compute channels-last, else ``nchw``."""
    for tensor in (input, weight):
        if suggest_memory_format(tensor) == torch.channels_last:
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
    not tuned for are computed by torch, as before: another image size, data type or device, a
    stride that was changed since, ``torch.compile``, functional transforms, forward-mode and
    second derivatives, tensors that are no plain ones.

    Attributes:
        tuned: By signature of a call, then kind, the kernels.
        geometry: Stride, padding, dilation, groups and padding mode that were tuned for.
        untuned_calls: How many calls torch computed for want of a tuning.
    """

    tuned: dict[Signature, TunedLayer]
    geometry: tuple[Any, ...]
    untuned_calls: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias  # read once: a parametrization computes them
        if (
            torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
        ):
            return self._conv_forward(input, weight, bias)  # type: ignore[no-any-return]
        with _untraced():
            kernels = self._kernels(input, weight, bias)
        if kernels is None:
            self.untuned_calls += 1
            return self._conv_forward(input, weight, bias)  # type: ignore[no-any-return]
        dtype = compute_dtype(input)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(input.device.type, enabled=False):
            return convolve(input.to(dtype), weight.to(dtype), bias, kernels)

    def _kernels(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> TunedLayer | None:
        """Return the kernels for a call, None where torch is to compute it, or to complain."""
        given = [tensor for tensor in (input, weight, bias) if tensor is not None]
        plain = all(
            type(tensor) in (torch.Tensor, nn.Parameter)
            and tensor.layout == torch.strided
            and tensor.device == given[0].device
            for tensor in given
        )
        if not plain or input.device.type == "meta" or input.dim() != 4:
            return None
        if self.geometry != geometry_of(self) or not len(input):
            return None
        kernels = self.tuned.get(signature(input, weight))
        if kernels is None:
            return None
        conv = kernels["forward"].kernel.conv
        alike = input.shape[1] == conv.in_channels and weight.shape == conv.weight_shape
        if bias is not None:
            alike = alike and bias.shape == (conv.out_channels,)
        autocast = torch.is_autocast_enabled(input.device.type)
        same_type = autocast or all(tensor.dtype == input.dtype for tensor in given)
        return kernels if alike and same_type else None

    def extra_repr(self) -> str:
        kinds = {
            f"{kind} {sum(1 for _ in k.parts)} parts"
            for kernels in self.tuned.values()
            for kind, k in kernels.items()
            if k.parts is not None
        }
        untuned = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{untuned}, tuned: {', '.join(sorted(kinds))}"


@contextmanager
def _untraced() -> Iterator[None]:
    """Pause ``torch.jit.trace``, under which the sizes of tensors are tensors."""
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    if state is None:
        yield
        return
    tracer._set_tracing_state(None)
    try:
        yield
    finally:
        tracer._set_tracing_state(state)


def geometry_of(module: nn.Conv2d) -> tuple[Any, ...]:
    """Return what decides a layer's result besides its tensors."""
    return module.stride, module.padding, module.dilation, module.groups, module.padding_mode


def call_overhead(device: str, training: bool) -> list[float]:
    """Return by how many seconds a call of a tuned layer costs more than one of torch's.

    Measured on one pixel, with every kernel left to torch, so that only the way there differs.
    """
    plain, tuned = (nn.Conv2d(1, 1, 1, device="meta").to_empty(device=device) for _ in range(2))
    for parameter in (*plain.parameters(), *tuned.parameters()):
        nn.init.zeros_(parameter)
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
    pairs = zip(timed["tuned"].samples_s, timed["plain"].samples_s, strict=True)
    return [tuned_s - plain_s for tuned_s, plain_s in pairs]


def install(module: nn.Conv2d, call: Signature, kernels: dict[str, TunedKernel]) -> None:
    """Turn a module into a `TunedConv2d` in place, with the kernels for calls of a signature."""
    made = cast(TunedConv2d, module)
    if not isinstance(module, TunedConv2d):
        cast(nn.Module, module).__class__ = TunedConv2d
        made.tuned, made.untuned_calls = {}, 0
        made.geometry = geometry_of(module)
    made.tuned[call] = TunedLayer(kernels)
