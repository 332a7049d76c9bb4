"""Where swapped-out variables lie, and what copies them.

`HostStore` hands out places in a few large slabs: of memory, pinned where a GPU copies, or of a
file. A mover copies between a storage and its place without blocking: `ThreadMover` by one thread a
direction, `CudaMover` by one stream a direction. Both return tickets that are waited for.
"""

import ctypes
import os
import tempfile
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

_ALIGNMENT = 64
_SMALLEST_SLAB = 16 * 2**20


def give_back_freed_memory() -> bool:
    """Make this process return what it frees to the system; return whether the C library allows it.

    glibc keeps freed blocks of up to 32 MiB by its own rule, so that a process whose tensors are
    swapped to a file would hardly shrink. From here on blocks of 64 KiB and more are returned, and
    taken anew with page faults, to the end of the process.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mmap_threshold = -3
    return bool(set_option(mmap_threshold, 64 * 1024))


class Place(NamedTuple):
    """Bytes [offset, offset + nbytes) of slab number `slab`."""

    slab: int
    offset: int
    nbytes: int


class HostStore:
    """Slabs of host memory or of one file, from which best-fitting places are handed out.

    Args:
        pinned: Page-lock the memory, for copies of a GPU that do not block.
        path: A folder for a file that holds the slabs instead of memory. The file has no name, so
            that nothing of it stays behind.
    """

    def __init__(self, pinned: bool = False, path: Path | None = None) -> None:
        self.pinned = pinned
        self.file: int | None = None
        if path is not None:
            if not path.is_dir():
                raise ValueError(f"{path} is no folder: give one in which a file may grow")
            self._handle = tempfile.TemporaryFile(dir=path)  # noqa: SIM115 (open until close)
            self.file = self._handle.fileno()
        self.slabs: list[torch.Tensor] = []
        self.total_bytes = self.used_bytes = self.peak_bytes = 0
        self._starts: list[int] = []  # of the slabs in the file
        self._free: list[tuple[int, int, int]] = []  # (nbytes, slab, offset), ascending

    def reserve(self, nbytes: int) -> None:
        """Add one slab so that the store holds at least `nbytes` in all."""
        if nbytes > self.total_bytes:
            self._grow(nbytes - self.total_bytes)

    def take(self, nbytes: int) -> Place:
        """Hand out a place; the store grows by doubling."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        at = bisect_left(self._free, (size, -1, -1))
        if at == len(self._free):
            self._grow(max(size, self.total_bytes, _SMALLEST_SLAB))
            at = bisect_left(self._free, (size, -1, -1))
        free, slab, offset = self._free.pop(at)
        if free > size:
            insort(self._free, (free - size, slab, offset + size))
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return Place(slab, offset, nbytes)

    def give_back(self, place: Place) -> None:
        """Take a place back, and join it with its free neighbours."""
        size = -(-place.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.used_bytes -= size
        start, end = place.offset, place.offset + size
        kept = []
        for free in self._free:
            nbytes, slab, offset = free
            if slab == place.slab and offset + nbytes == start:
                start = offset
            elif slab == place.slab and offset == end:
                end = offset + nbytes
            else:
                kept.append(free)
        self._free = kept
        insort(self._free, (end - start, place.slab, start))

    def _grow(self, nbytes: int) -> None:
        if self.file is None:
            slab = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pinned)
            self.slabs.append(slab)
        else:
            self._starts.append(self.total_bytes)
            os.ftruncate(self.file, self.total_bytes + nbytes)
        insort(self._free, (nbytes, max(len(self.slabs), len(self._starts)) - 1, 0))
        self.total_bytes += nbytes

    def view(self, place: Place) -> torch.Tensor:
        """Return a place of memory as (nbytes,) uint8."""
        return self.slabs[place.slab][place.offset : place.offset + place.nbytes]

    def read(self, place: Place, address: int) -> None:
        """Copy a place to host memory at an address."""
        if self.file is None:
            ctypes.memmove(address, self.view(place).data_ptr(), place.nbytes)
        else:
            self._transfer(os.preadv, place, address)

    def write(self, place: Place, address: int) -> None:
        """Copy host memory at an address to a place."""
        if self.file is None:
            ctypes.memmove(self.view(place).data_ptr(), address, place.nbytes)
        else:
            self._transfer(os.pwritev, place, address)

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], place: Place, address: int
    ) -> None:
        # Calls on the file, not a mapping of it: a full disk is then an error, not a signal.
        assert self.file is not None
        buffer = memoryview((ctypes.c_char * place.nbytes).from_address(address)).cast("B")
        start, done = self._starts[place.slab] + place.offset, 0
        while done < place.nbytes:
            moved = call(self.file, [buffer[done : done + (1 << 30)]], start + done)
            if moved <= 0:
                raise OSError(f"the swap file ended after {start + done} bytes")
            done += moved

    def close(self) -> None:
        """Give everything back to the system."""
        self.slabs.clear()
        self._free.clear()
        if self.file is not None:
            self._handle.close()


class Mover(Protocol):
    """What copies storages from and to their places; a ticket is waited for once."""

    def start_in(self, storage: torch.UntypedStorage, place: Place) -> object:
        """Start the copy of a place to a storage of the device."""

    def start_out(self, storage: torch.UntypedStorage, place: Place) -> object:
        """Start the copy of a storage of the device to a place."""

    def wait(self, ticket: object) -> None:
        """Let what follows on the device wait for a copy."""

    def done(self, ticket: object) -> bool:
        """Return whether a copy is done, without waiting."""

    def bandwidth(self) -> tuple[float, float]:
        """Return measured bytes/s (to the device, to the host)."""

    def finish(self) -> None:
        """Wait on the host until all copies are done."""

    def close(self) -> None:
        """End threads or streams."""


class ThreadMover:
    """Copies between host memory and the store, by one thread for each direction."""

    def __init__(self, store: HostStore) -> None:
        self.store = store
        self._pools = (ThreadPoolExecutor(1), ThreadPoolExecutor(1))
        self._open: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._moved = [[0, 0.0], [0, 0.0]]  # bytes and seconds, for each direction

    def start_in(self, storage: torch.UntypedStorage, place: Place) -> Future[None]:
        """Start the copy of a place to a storage of the device."""
        return self._start(0, self.store.read, storage, place)

    def start_out(self, storage: torch.UntypedStorage, place: Place) -> Future[None]:
        """Start the copy of a storage of the device to a place."""
        return self._start(1, self.store.write, storage, place)

    def _start(
        self,
        direction: int,
        copy: Callable[[Place, int], None],
        storage: torch.UntypedStorage,
        place: Place,
    ) -> Future[None]:
        address = storage.data_ptr()

        def run() -> None:
            start = time.perf_counter()
            copy(place, address)
            with self._lock:
                self._moved[direction][0] += place.nbytes
                self._moved[direction][1] += time.perf_counter() - start

        future = self._pools[direction].submit(run)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def wait(self, ticket: object) -> None:
        """Let what follows on the device wait for a copy."""
        assert isinstance(ticket, Future)
        ticket.result()

    def done(self, ticket: object) -> bool:
        """Return whether a copy is done, without waiting."""
        assert isinstance(ticket, Future)
        return ticket.done()

    def bandwidth(self) -> tuple[float, float]:
        """Return measured bytes/s (to the device, to the host)."""
        with self._lock:
            rates = [nbytes / seconds if nbytes else 2e9 for nbytes, seconds in self._moved]
        return rates[0], rates[1]

    def finish(self) -> None:
        """Wait on the host until all copies are done."""
        wait(tuple(self._open))  # who waits for a ticket is told of its error

    def close(self) -> None:
        """Wait for all copies, and end."""
        for pool in self._pools:
            pool.shutdown()


class CudaMover:
    """Copies between a GPU and pinned memory, by one stream for each direction; events only.

    A copy waits for what the compute stream has been given so far: the memory that it writes may
    just have been freed there, the values that it reads may just have been computed.
    """

    _PROBE_BYTES = 32 * 2**20

    def __init__(self, store: HostStore, device: torch.device) -> None:
        self.store, self.device = store, device
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._rates: tuple[float, float] | None = None

    def _bytes(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(
            storage, 0, (storage.nbytes(),), (1,)
        )

    def _start(
        self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor
    ) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def start_in(self, storage: torch.UntypedStorage, place: Place) -> torch.cuda.Event:
        """Start the copy of a place to a storage of the device."""
        return self._start(self._in, self._bytes(storage), self.store.view(place))

    def start_out(self, storage: torch.UntypedStorage, place: Place) -> torch.cuda.Event:
        """Start the copy of a storage of the device to a place."""
        return self._start(self._out, self.store.view(place), self._bytes(storage))

    def wait(self, ticket: object) -> None:
        """Let what follows on the device wait for a copy."""
        assert isinstance(ticket, torch.cuda.Event)
        torch.cuda.current_stream(self.device).wait_event(ticket)

    def done(self, ticket: object) -> bool:
        """Return whether a copy is done, without waiting."""
        assert isinstance(ticket, torch.cuda.Event)
        return ticket.query()

    def bandwidth(self) -> tuple[float, float]:
        """Return measured bytes/s (to the device, to the host)."""
        if self._rates is None:
            host = torch.empty(self._PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
            there = torch.empty(self._PROBE_BYTES, dtype=torch.uint8, device=self.device)
            rates = []
            for target, source in ((there, host), (host, there)):
                target.copy_(source)
                torch.cuda.synchronize(self.device)
                start = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize(self.device)
                rates.append(self._PROBE_BYTES / (time.perf_counter() - start))
            self._rates = rates[0], rates[1]
        return self._rates

    def finish(self) -> None:
        """Wait on the host until all copies are done."""
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Wait for all copies, and end."""
        self.finish()
