"""Streaming of micro-batches to a device, copies overlapped with computation."""

import itertools
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from repro.measure import accelerator
from repro.measure.batches import leaves_of, replaced, to_device


@dataclass(frozen=True)
class Span:
    """Time of copying (or fetching) or computing a micro-batch, since its mini-batch began."""

    kind: str  # "copy" or "compute"
    micro_batch: int
    start_s: float
    end_s: float


@dataclass
class _Slot:
    """Staging buffers of one micro-batch, and events that protect them from early reuse."""

    consumed: accelerator.Event
    copied: accelerator.Event
    direct: bool = False  # copied directly from the caller's memory
    buffers: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict)


class Stager:
    """Streams micro-batches to a device, `prefetch` of them copied ahead of the one computed.

    On an accelerator the copies run on a separate stream, from pinned staging buffers (or straight
    from a mini-batch that is pinned already) into a ring of `prefetch` + 1 device buffers. Streams
    wait for each other by events; the host waits only until a staging buffer's earlier copy has
    ended. On a CPU a micro-batch is a view, and nothing is copied.

    With `trace` every copy and computation is timed: `marks` holds (kind, start, end) of each since
    `reset`.
    """

    def __init__(self, device: torch.device, prefetch: int, trace: bool) -> None:
        self._device = device
        self._queued = accelerator.is_accelerator(device)
        self._prefetch = prefetch
        self._trace = trace
        self.marks: list[tuple[str, Any, Any]] = []
        self._origin: Any = None
        self._slots: list[_Slot] = []
        self._next_slot = 0  # kept across pieces, so that their copies overlap as well
        self._copy_stream: accelerator.Stream = None  # made when it is needed

    @property
    def ring_length(self) -> int:
        """Number of micro-batches on the device at once, besides the mini-batch itself."""
        return self._prefetch + 1 if self._queued else 1

    def stream(self, micro_batches: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield each pytree of `micro_batches` on the device, valid until the next is requested."""
        if self._queued:
            yield from self._stream_queued(iter(micro_batches))
            return
        start = time.perf_counter()
        for micro_batch in micro_batches:
            there = to_device(micro_batch, self._device)
            del micro_batch
            ready = time.perf_counter()
            yield there
            del there
            if self._trace:
                self.marks.append(("copy", start, ready))
                self.marks.append(("compute", ready, time.perf_counter()))
            start = time.perf_counter()

    def reset(self) -> None:
        """Forget the spans so far; time starts from now."""
        self.marks.clear()
        if self._trace:
            self._origin = self._mark() if self._queued else time.perf_counter()

    def release(self) -> None:
        """Free the ring, such as that of a larger micro-batch which ran out of memory."""
        self._slots.clear()
        self._next_slot = 0

    def spans(self) -> list[Span]:
        """Return the spans since `reset`; waits for the device."""
        accelerator.synchronize(self._device)

        def seconds(mark: Any) -> float:
            if self._queued:
                return float(self._origin.elapsed_time(mark)) / 1e3
            return float(mark - self._origin)

        numbers = {"copy": itertools.count(), "compute": itertools.count()}
        marks = ((next(numbers[mark[0]]), *mark) for mark in self.marks)
        return [Span(kind, n, seconds(start), seconds(end)) for n, kind, start, end in marks]

    def _stream_queued(self, iterator: Iterator[Any]) -> Generator[Any, None, None]:
        compute = accelerator.current_stream(self._device)
        if self._copy_stream is None:
            self._copy_stream = accelerator.new_stream(self._device)
        while len(self._slots) < self.ring_length:
            consumed, copied = (accelerator.new_event(self._device) for _ in range(2))
            self._slots.append(_Slot(consumed, copied))
        in_flight: deque[tuple[_Slot, Any]] = deque()
        try:
            for index, micro_batch in enumerate(iterator):
                slot = self._slots[self._next_slot]
                self._next_slot = (self._next_slot + 1) % len(self._slots)
                in_flight.append((slot, self._send(micro_batch, slot, compute)))
                # The first micro-batch is handed out at once and the lead grows from there, so that
                # the device computes while the host stages the others.
                if len(in_flight) > min(self._prefetch, index + 1 - len(in_flight)):
                    yield from self._hand_out(*in_flight.popleft(), compute)
            while in_flight:
                yield from self._hand_out(*in_flight.popleft(), compute)
        finally:
            # A copy straight from the caller's pinned memory has to end before the caller may
            # write there. The last copies ended, or nearly so, before the last computation could
            # start. Copies from staging buffers need no wait.
            for slot in self._slots:
                if slot.direct:
                    slot.copied.synchronize()
                    slot.direct = False

    @torch.no_grad()
    def _send(self, micro_batch: Any, slot: _Slot, compute: accelerator.Stream) -> Any:
        leaves = leaves_of(micro_batch)
        pairs: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # (position, source, target)
        for position, leaf in enumerate(leaves):
            movable = isinstance(leaf, torch.Tensor | PackedSequence)
            if not movable or leaf.data.device == self._device:
                continue
            strided = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
            if not strided or leaf.dim() == 0:  # a number is filled in by a kernel
                leaves[position] = leaf.to(self._device, non_blocking=True)
                continue
            staging, target = self._buffers(slot, position, leaf, compute)
            if staging is None:
                slot.direct = True
            else:
                slot.copied.synchronize()  # until the buffer's earlier content is copied
                leaf = staging[: len(leaf)].copy_(leaf)
            pairs.append((position, leaf, target[: len(leaf)]))
        with accelerator.use_stream(self._copy_stream):
            self._copy_stream.wait_event(slot.consumed)
            start = self._mark()
            for position, source, target in pairs:
                leaves[position] = target.copy_(source, non_blocking=True)
            slot.copied.record(self._copy_stream)
            if self._trace:
                self.marks.append(("copy", start, self._mark()))
        return replaced(micro_batch, leaves)

    def _hand_out(
        self, slot: _Slot, micro_batch: Any, compute: accelerator.Stream
    ) -> Generator[Any, None, None]:
        compute.wait_event(slot.copied)
        start = self._mark()
        try:
            yield micro_batch
        finally:
            slot.consumed.record(compute)
            if self._trace:
                self.marks.append(("compute", start, self._mark()))

    def _buffers(
        self, slot: _Slot, position: int, leaf: torch.Tensor, compute: accelerator.Stream
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the slot's buffers (staging, target); staging is None for a direct copy."""
        staging, target = slot.buffers.get(position, (None, None))
        layout = _memory_format(leaf)
        if (
            target is None
            or target.shape[1:] != leaf.shape[1:]
            or target.shape[0] < leaf.shape[0]
            or target.dtype != leaf.dtype
            or not target.is_contiguous(memory_format=layout)
        ):
            slot.buffers.pop(position, None)  # free the old buffers first
            del staging, target
            target = torch.empty_like(leaf, device=self._device, memory_format=layout)
            # If it is freed during a copy, its memory must not be reused too early; and kernels
            # queued on the compute stream may still use that memory.
            accelerator.record_stream(target, self._copy_stream)
            slot.consumed.record(compute)
            staging = None
        as_it_lies = leaf.device.type != "cpu" or (
            leaf.is_contiguous(memory_format=layout) and leaf.is_pinned()
        )
        if not as_it_lies and staging is None:
            accelerator.check_pinnable(accelerator.pinned_bytes(target.nbytes))
            staging = torch.empty_like(target, device="cpu", pin_memory=True)
        slot.buffers[position] = (staging, target)
        return (None if as_it_lies else staging), target

    def _mark(self) -> accelerator.Event | None:
        if not self._trace:
            return None
        event = accelerator.new_event(self._device, timing=True)
        event.record(accelerator.current_stream(self._device))
        return event


def _memory_format(tensor: torch.Tensor) -> torch.memory_format:
    # Channels-last, which a caller chooses for speed, stays; other layouts become contiguous.
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(tensor.dim(), torch.contiguous_format)
    kept = not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout)
    return layout if kept else torch.contiguous_format
