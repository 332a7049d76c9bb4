"""Places for swapped-out variables on the host, and copies from and to them.

`HostStore` hands out places in slabs of one size: of memory, pinned for an accelerator, or of a
file. A mover copies between a storage and its place without blocking: `ThreadMover` with one thread
per direction, `StreamMover` with one stream per direction.
"""

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from repro.measure import accelerator
from repro.outofcore.allocator import FreePieces

# A power of two, as torch pins; a variable may span slabs, so that rounding wastes nothing.
SLAB_BYTES = 32 * 2**20
_ALIGNMENT = 64
_SMALL_BYTES = 64 * 2**10  # copied faster than handed to a thread
_TIMED_COPIES = 64  # per direction, to measure a link's rates
_USUAL_RATE = 10e9  # bytes/s, assumed until a copy has been timed


def aligned(nbytes: int) -> int:
    """Return the bytes of a place for `nbytes`, rounded up to the alignment."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Piece(NamedTuple):
    """Bytes [offset, offset + nbytes) of slab number `slab`."""

    slab: int
    offset: int
    nbytes: int


IN, OUT = 0, 1  # directions of copies: to the device, and to the host
_kept: list[torch.Tensor] = []  # slabs that hold storages until the process ends
Place = tuple[Piece, ...]  # of one variable, in order; all but the last are aligned


class HostStore:
    """Slabs of host memory or of one file, which provide places for variables.

    Args:
        device: If it is an accelerator, the memory is page-locked for copies that do not block.
        path: A folder for a file that holds the slabs instead; nameless, so that it disappears.
        slab_bytes: The size of a slab, a multiple of 64.
        whole: Every place is one piece, at an `address`; a slab is then as large as needed.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        path: Path | None = None,
        slab_bytes: int = SLAB_BYTES,
        whole: bool = False,
    ) -> None:
        self.device, self.slab_bytes, self.whole = torch.device(device), slab_bytes, whole
        self.file: int | None = None
        if path is not None:
            try:
                self._handle = tempfile.TemporaryFile(dir=path)  # noqa: SIM115 (open until close)
            except OSError as error:
                raise ValueError(f"{path}: {error.strerror}: give a writable folder") from error
            self.file = self._handle.fileno()
        self.slabs: list[torch.Tensor] = []
        self._offsets: list[int] = []  # of each slab in the file
        self._bases: list[int] = []  # address of each slab
        self.total_bytes = self.used_bytes = self.peak_bytes = 0
        self._free = FreePieces()  # of slabs

    def reserve(self, nbytes: int) -> None:
        """Add slabs so that the store holds at least `nbytes` in total."""
        if self.file is None and accelerator.is_accelerator(self.device):
            missing = max(0, nbytes - self.total_bytes)  # checked before the first slab
            accelerator.check_pinnable(-(-missing // self.slab_bytes) * self.slab_bytes)
        while self.total_bytes < nbytes:
            self._grow(nbytes - self.total_bytes)

    def take(self, nbytes: int) -> Place:
        """Provide a place: the best-fitting free piece, else several; the store grows by slabs."""
        size = aligned(nbytes)
        self.reserve(self.used_bytes + size)
        if self.whole and self._free.largest < size:
            self._grow(size)
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        pieces = []
        while size:
            piece = self._free.take(min(size, self._free.largest))
            assert piece is not None
            free, slab, offset = piece
            if free > size:
                self._free.add(free - size, slab, offset + size)
                free = size
            pieces.append(Piece(slab, offset, min(free, nbytes)))
            size, nbytes = size - free, nbytes - free
        return tuple(pieces)

    def give_back(self, place: Place) -> None:
        """Free a place, and join its pieces with their free neighbours."""
        for slab, start, nbytes in place:
            self.used_bytes -= aligned(nbytes)
            self._free.add(aligned(nbytes), slab, start)

    def _grow(self, nbytes: int) -> None:
        size = self.slab_bytes
        if self.whole and nbytes > size:
            size = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if self.file is None:
            # Not seen by a function that is being traced.
            with _disable_current_modes(), torch._C._DisableFuncTorch():
                self.slabs.append(accelerator.empty_pinned(size, self.device, torch.uint8))
        else:
            os.ftruncate(self.file, self.total_bytes + size)
            if self.whole:
                view = mmap.mmap(self.file, size, offset=self.total_bytes)
                self.slabs.append(torch.frombuffer(view, dtype=torch.uint8))
        self._bases = [slab.data_ptr() for slab in self.slabs]
        self._offsets.append(self.total_bytes)
        self._free.add(size, len(self._offsets) - 1, 0)
        self.total_bytes += size

    def address(self, place: Place) -> int:
        """Return the address of a whole place; a place in a file is memory-mapped."""
        ((slab, offset, _),) = place
        return self._bases[slab] + offset

    def views(self, place: Place) -> list[torch.Tensor]:
        """Return the pieces of a place in memory, each (nbytes,) uint8."""
        return [self.slabs[slab][offset : offset + nbytes] for slab, offset, nbytes in place]

    def copy(self, direction: int, place: Place, address: int) -> None:
        """Copy a place to host memory at an address (`IN`), or from there (`OUT`)."""
        out = direction == OUT
        for slab, offset, nbytes in place:
            if self.file is None:
                there = self._bases[slab] + offset
                ctypes.memmove(*((there, address) if out else (address, there)), nbytes)
                address += nbytes
                continue
            # File calls, not a memory map: a full disk then raises an error, not a signal.
            call: Callable[[int, list[Any], int], int] = os.pwritev if out else os.preadv
            start, end = self._offsets[slab] + offset, address + nbytes
            while address < end:
                buffer = (ctypes.c_char * (end - address)).from_address(address)
                moved = call(self.file, [memoryview(buffer).cast("B")], start)
                if moved <= 0:
                    raise OSError(f"the swap file ended after {start} bytes")
                start, address = start + moved, address + moved

    def close(self, keep: bool = False) -> None:
        """Return everything to the system; no copy may be running.

        With `keep` storages that could not be brought back stay here, on a CPU, with the memory.
        """
        if keep and self.whole:
            _kept.extend(self.slabs)
        self.slabs.clear()
        self._free = FreePieces()  # variables may still end later
        accelerator.empty_pinned_cache(self.device)
        if self.file is not None:
            self._handle.close()


MOVER = "outofcore-mover"  # name of this module's threads
_submit = ThreadPoolExecutor.submit  # the original, before `guards` wraps it
_DONE: Future[None] = Future()
_DONE.set_result(None)


class ThreadMover:
    """Copies between host memory and the store, with one thread per direction.

    With `bytes_per_s` each direction is limited to a rate: the threads sleep meanwhile, so that the
    computation continues.
    """

    def __init__(self, store: HostStore, bytes_per_s: float | None = None) -> None:
        self.store, self.bytes_per_s = store, bytes_per_s
        self._pools = [ThreadPoolExecutor(1, MOVER) for _ in (IN, OUT)]
        self._open: set[Future[None]] = set()
        self._moved = [[0, 0.0], [0, 0.0]]  # bytes and seconds, for each direction
        self._free_at = [0.0, 0.0]  # end of each direction's last copy at a limited rate

    def start(self, direction: int, storage: torch.UntypedStorage, place: Place) -> Future[None]:
        """Start a copy between a storage of the device and a place; return a ticket.

        Each ticket is waited for once.
        """
        address, nbytes, asked_at = storage.data_ptr(), storage.nbytes(), time.perf_counter()
        rate = self.bytes_per_s
        if rate is None and self.store.file is None and nbytes <= _SMALL_BYTES:
            # No other copy uses the place: the last was waited for.
            self.store.copy(direction, place, address)
            return _DONE

        def run() -> None:
            start = time.perf_counter()
            self.store.copy(direction, place, address)
            end = time.perf_counter()
            self._moved[direction][0] += nbytes
            self._moved[direction][1] += end - start
            if rate is not None:
                over = max(self._free_at[direction], asked_at) + nbytes / rate
                self._free_at[direction] = over
                time.sleep(max(0.0, over - end))

        future = _submit(self._pools[direction], run)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def wait(self, ticket: Future[None]) -> None:
        """Let later work of the device wait for a copy."""
        ticket.result()

    def done(self, ticket: Future[None]) -> bool:
        """Return whether a copy is done, without waiting."""
        return ticket.done()

    def bandwidth(self) -> tuple[float, float]:
        """Return bytes/s (to the device, to the host): the limit, or else measured rates."""
        if self.bytes_per_s is not None:
            return self.bytes_per_s, self.bytes_per_s
        rates = [nbytes / seconds if seconds else 2e9 for nbytes, seconds in self._moved]
        return rates[IN], rates[OUT]

    def finish(self) -> None:
        """Wait on the host until all copies are done."""
        wait(tuple(self._open))  # errors are raised by the tickets

    def close(self) -> None:
        """Wait for all copies, and end."""
        for pool in self._pools:
            pool.shutdown()


class StreamMover:
    """Copies between an accelerator and pinned memory on one stream per direction, with events.

    A copy waits for all earlier work on the compute stream: that work may free the memory to be
    written, or compute the values to be read.
    """

    def __init__(self, store: HostStore, device: torch.device) -> None:
        self.store, self.device = store, device
        self._streams = torch.Stream(device), torch.Stream(device)
        # For the first copies in each direction: bytes, and events before and after.
        self._timed: tuple[list[_Copy], list[_Copy]] = [], []

    def start(self, direction: int, storage: torch.UntypedStorage, place: Place) -> torch.Event:
        """Start a copy; return a ticket, as `ThreadMover.start` does."""
        stream, timed = self._streams[direction], self._timed[direction]
        whole = torch.empty(0, dtype=torch.uint8, device=self.device)
        whole.set_(storage, 0, (storage.nbytes(),), (1,))
        current: Any = accelerator.current_stream(self.device)
        stream.wait_stream(current)
        timing = len(timed) < _TIMED_COPIES
        event = torch.Event(self.device, enable_timing=timing)
        if timing:
            begin = torch.Event(self.device, enable_timing=True)
            begin.record(stream)
            timed.append(_Copy(storage.nbytes(), begin, event))
        pieces = whole.split([piece.nbytes for piece in place])
        with stream:  # used only here, so never entered twice at once
            for ours, theirs in zip(pieces, self.store.views(place), strict=True):
                target, source = (ours, theirs) if direction == IN else (theirs, ours)
                target.copy_(source, non_blocking=True)
        event.record(stream)
        return event

    def wait(self, ticket: torch.Event) -> None:
        """Let later work of the device wait for a copy."""
        accelerator.current_stream(self.device).wait_event(ticket)

    def done(self, ticket: torch.Event) -> bool:
        """Return whether a copy is done, without waiting."""
        return ticket.query()

    def bandwidth(self) -> tuple[float, float]:
        """Return bytes/s (to the device, to the host), measured on the larger timed copies."""
        return _rate(self._timed[IN]), _rate(self._timed[OUT])

    def finish(self) -> None:
        """Wait on the host until all copies are done."""
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        """Do nothing: it has no thread."""


Mover = ThreadMover | StreamMover


class _Copy(NamedTuple):
    nbytes: int
    begin: torch.Event
    end: torch.Event


def _rate(copies: Sequence[_Copy]) -> float:
    largest = max((copy.nbytes for copy in copies), default=0)
    large = [copy for copy in copies if 2 * copy.nbytes >= largest]  # others measure latency
    seconds = sum(accelerator.elapsed_s(copy.begin, copy.end) for copy in large)
    return sum(copy.nbytes for copy in large) / seconds if seconds > 0 else _USUAL_RATE
