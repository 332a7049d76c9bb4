"""An asynchronous offload of saved tensors, as practitioners write it without a plan (a peer)."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from repro.measure import accelerator

_AHEAD = 4  # tensors that are being copied out, and in, at most


@dataclass(eq=False)
class _Saved:
    """A tensor in host memory, of which `users` nodes of the graph are to ask for it."""

    number: int
    host: torch.Tensor
    source: StorageWeakRef
    users: int = 1
    back: torch.Tensor | None = None
    arrived: Any = None


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Hold tensors that autograd saves in the host's pinned memory, copied during the computation.

    They come back on another stream, a few tensors ahead. Parameters and buffers have to `stay`.
    """

    def __init__(self, device: torch.device | str, stay: Iterable[torch.Tensor]) -> None:
        super().__init__(self._pack, self._unpack)
        self._device = accelerator.resolve(device)
        self._stay = {p.untyped_storage().data_ptr() for p in stay}
        self._out, self._in = (accelerator.new_stream(self._device) for _ in range(2))
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        self._known: dict[Any, _Saved] = {}  # of this forward pass
        self._there: dict[int, _Saved] = {}  # in the order of the forward pass
        self._count = 0

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        accelerator.current_stream(self._device).wait_stream(self._out)
        accelerator.current_stream(self._device).wait_stream(self._in)
        for held in (self._leaving, self._known, self._there):
            held.clear()

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _Saved":
        address = tensor.untyped_storage().data_ptr()
        if tensor.device != self._device or address in self._stay or not tensor.numel():
            return tensor
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        known = self._known.get(key)
        if known is not None and not known.source.expired():
            known.users += 1
            return known
        current = accelerator.current_stream(self._device)
        last = torch.channels_last
        layout = last if tensor.dim() == 4 and tensor.is_contiguous(memory_format=last) else None
        host = accelerator.empty_pinned(
            tensor.shape, self._device, tensor.dtype, layout or torch.contiguous_format
        )
        self._out.wait_stream(current)
        with accelerator.use_stream(self._out):
            host.copy_(tensor, non_blocking=True)
        saved = _Saved(self._count, host, StorageWeakRef(tensor.untyped_storage()))
        self._count += 1
        self._known[key] = self._there[saved.number] = saved
        self._leaving.append((tensor, self._out.record_event()))
        if len(self._leaving) > _AHEAD:  # so much memory more at most; free once it has left
            _, left = self._leaving.popleft()
            current.wait_event(left)
        return saved

    def _unpack(self, saved: "torch.Tensor | _Saved") -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        current = accelerator.current_stream(self._device)
        while self._leaving:  # whatever comes back has left
            current.wait_event(self._leaving.popleft()[1])
        self._known.clear()
        for number in range(saved.number, saved.number - _AHEAD, -1):
            if number in self._there:
                self._fetch(self._there[number])
        self._fetch(saved)
        back = saved.back
        assert back is not None
        current.wait_event(saved.arrived)
        saved.users -= 1
        if saved.users <= 0:
            saved.back = None
            self._there.pop(saved.number, None)
        return back

    def _fetch(self, saved: _Saved) -> None:
        if saved.back is not None:
            return
        # Of the computation's memory, which what is queued there may still use.
        saved.back = torch.empty_like(saved.host, device=self._device)
        self._in.wait_stream(accelerator.current_stream(self._device))
        with accelerator.use_stream(self._in):
            saved.back.copy_(saved.host, non_blocking=True)
        saved.arrived = self._in.record_event()
