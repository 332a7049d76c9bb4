"""The kernels of a layer, each with its division, and their shared workspace."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from repro.measure import accelerator
from repro.microconv import backends
from repro.microconv.kernels import FORMATS, KINDS, Convolution, Kernel
from repro.microconv.optimize import Candidate, Division
from repro.microconv.torch_backend import native

# Height, width, data type, device, layout and math of a call.
Signature = tuple[int, int, str, str, str, str]
Parts = list[tuple[int, str]]


class Workspace:
    """Bytes on a device for kernels, allocated at first use and kept.

    One kernel uses a segment at a time: on a CPU a second thread waits for its turn; on an
    accelerator a second stream waits for the first stream's work, and the host does not wait.
    Replays of a CUDA graph are not seen: replay it on the stream that runs the layers otherwise.
    """

    def __init__(self, device: str, size: int = 0) -> None:
        self.device, self.size = device, size
        self._buffer: Tensor | None = None
        self._lock = threading.Lock()
        self._stream: accelerator.Stream | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Workspace, (self.device, self.size)  # a copy allocates its own

    def allocate(self) -> Tensor:
        """The buffer, made on the first call."""
        if self._buffer is None:
            # Zeroed, so that the first timed step has no page faults.
            with torch.inference_mode(False):
                self._buffer = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
            self._stream = accelerator.current_stream(self._buffer.device)
        return self._buffer

    @contextmanager
    def segment(self, offset: int, size: int) -> Iterator[Tensor]:
        """Reserve a segment for the kernels queued inside the block."""
        with self._lock:
            buffer = self.allocate()
            at = accelerator.is_accelerator(buffer.device) and accelerator.module(buffer.device)
            # Nobody waits while work is captured into a graph, such as a CUDA graph.
            if at and not getattr(at, "is_current_stream_capturing", bool)():
                stream = accelerator.current_stream(buffer.device)
                if self._stream != stream:
                    if self._stream is not None:
                        stream.wait_stream(self._stream)
                    accelerator.record_stream(buffer, stream)
                self._stream = stream
            yield buffer[offset : offset + size]


@dataclass
class TunedKernel:
    """One kernel of a layer, with its division."""

    kernel: Kernel
    batch: int  # the tuned mini-batch size
    workspace: Workspace  # shared with other kernels
    offset: int = 0  # start of its segment in the workspace
    division: Division | None = None  # None leaves the kernel to torch
    limit_bytes: int = 0  # workspace that divisions of other batch sizes may take
    # Of the division; other batch sizes are divided from them.
    candidates: dict[int, list[Candidate]] = field(default_factory=dict)
    _others: dict[int, Parts | None] = field(default_factory=dict, repr=False)

    @cached_property
    def segment_bytes(self) -> int:
        """Bytes of the workspace for its parts; torch's own convolution uses none of it."""
        parts = set(self.division.parts) if self.division else set()
        return max((backends.given_bytes(n, self.kernel, size) for size, n in parts), default=0)

    def parts(self, batch: int) -> Parts | None:
        """The parts for a batch size, None if it is left to torch."""
        if self.division is None:
            return None
        if batch == self.batch:
            return self.division.parts
        if batch not in self._others:
            self._others[batch] = self._parts_of_other(batch, self.division.parts[0][1])
        return self._others[batch]

    def _parts_of_other(self, batch: int, largest: str) -> Parts | None:
        """Divide a size other than the tuned one, such as the last of an epoch.

        By the same measurements; if their micro-batch sizes cannot sum to it, the algorithm of the
        `largest` part runs it where the workspace is large enough, else torch.
        """
        fitting = {
            size: [way for way in ways if self._fits(size, way.algorithm)]
            for size, ways in self.candidates.items()
        }
        try:
            front = backends.divisions(batch, fitting)
        except ValueError:
            fits = batch < self.batch and self._fits(batch, largest)
            return [(batch, largest)] if fits else None
        within = [one for one in front if one.workspace_bytes <= self.limit_bytes]
        return (within or front[:1])[-1].parts  # else the least of all

    def _fits(self, size: int, algorithm: str) -> bool:
        if algorithm == backends.NATIVE:
            # For the whole tuned batch, its result was counted as the output, not as a buffer.
            return size in self.candidates and size != self.batch
        with suppress(KeyError):  # not for this size
            return backends.given_bytes(algorithm, self.kernel, size) <= self.segment_bytes
        return False

    def run(
        self, first: Tensor, second: Tensor, bias: Tensor | None = None, like: Tensor | None = None
    ) -> Tensor:
        """Compute the kernel for a mini-batch of any size into a new tensor; see `native`."""
        kernel = self.kernel
        # To ask for the length would fix a batch size that a graph leaves free.
        batch = 0 if isinstance(first, FakeTensor) else len(first)
        matches = (  # torch's own runs for others: a graph may be run with any
            batch > 0
            and (tuple(first.shape), tuple(second.shape)) == kernel.shapes(batch)[:2]
            and first.dtype == second.dtype == kernel.torch_dtype
            and str(first.device) == str(second.device) == kernel.device
        )
        parts = self.parts(batch) if matches else None
        allowed = all(backends.permitted(name, kernel) for _, name in parts or ())
        if not (parts and allowed) or parts == [(batch, backends.NATIVE)]:
            return native(kernel, first, second, bias, like)
        shape, layout = kernel.shapes(batch)[2], FORMATS[kernel.layout]
        out = torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=layout)
        first, second = (t.contiguous(memory_format=layout) for t in (first, second))
        with self.workspace.segment(self.offset, self.segment_bytes) as segment:
            backends.run_division(parts, kernel, first, second, out, segment, bias)
        return out


def kernels_of(module: nn.Conv2d, call: Signature) -> dict[str, Kernel]:
    """The three kernels of a layer for calls of a signature."""
    height, width, *facts = call
    conv = Convolution.of(module, height, width)
    return {kind: Kernel(kind, conv, *facts) for kind in KINDS}
