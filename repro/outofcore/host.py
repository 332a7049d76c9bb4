"""Places for swapped-out variables on the host, and copies from and to them.

`HostStore` hands out places in slabs of one size: of memory, pinned for an accelerator, or of a
file. A mover copies between a storage and its place without blocking: `ThreadMover` by one thread a
direction, `StreamMover` by one stream a direction.
"""

import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from repro.measure import accelerator
from repro.outofcore.allocator import FreePieces

# torch pins powers of two, and a variable may lie in several slabs: nothing is lost to rounding.
SLAB_BYTES = 32 * 2**20
_ALIGNMENT = 64
_SMALL_BYTES = 64 * 2**10  # copied sooner than a thread is told of it
_TIMED_COPIES = 64  # in each direction, from which the rates of a link are known
_USUAL_RATE = 10e9  # bytes/s, until a copy has been timed


def give_back_freed_memory() -> bool:
    """Have freed memory returned to the system; return whether the C library allows it.

    glibc keeps freed blocks of up to 32 MiB, so that a process whose tensors are swapped to a file
    would hardly shrink. From here on blocks of 64 KiB and more are returned, and taken anew with
    page faults, to the end of the process.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mmap_threshold = -3
    return bool(set_option(mmap_threshold, 64 * 1024))


def aligned(nbytes: int) -> int:
    """Return the bytes that a place of some bytes takes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Piece(NamedTuple):
    """Bytes [offset, offset + nbytes) of slab number `slab`."""

    slab: int
    offset: int
    nbytes: int


_kept: list[torch.Tensor] = []  # slabs in which storages lie to the end of the process
Place = tuple[Piece, ...]  # one variable's, in order; a multiple of the alignment but for the last


class HostStore:
    """Slabs of host memory or of one file, from which places are handed out.

    Args:
        device: Page-lock the memory, where it is an accelerator, for copies that do not block.
        path: A folder for a file that holds the slabs instead of memory. The file has no name, so
            that nothing of it stays behind.
        slab_bytes: The size of a slab, a multiple of 64.
        whole: Every place is one piece, at an `address`; a slab is then as large as it has to be.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        path: Path | None = None,
        slab_bytes: int = SLAB_BYTES,
        whole: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.whole = whole
        self.file: int | None = None
        if path is not None:
            if not path.is_dir():
                raise ValueError(f"{path} is no folder: give one in which a file may grow")
            try:
                self._handle = tempfile.TemporaryFile(dir=path)  # noqa: SIM115 (open until close)
            except OSError as error:
                why = f"no file can be made in {path} ({error.strerror})"
                raise ValueError(f"{why}: give a folder that can be written") from error
            self.file = self._handle.fileno()
        self.slab_bytes = slab_bytes
        self.slabs: list[torch.Tensor] = []
        self._offsets: list[int] = []  # of each slab in the file
        self._bases: list[int] = []  # of each slab the address
        self.total_bytes = self.used_bytes = self.peak_bytes = 0
        self._free = FreePieces()  # of slabs

    def reserve(self, nbytes: int) -> None:
        """Add slabs so that the store holds at least `nbytes` in all.

        Raises:
            HostMemoryError: The host has not that much; the slabs that it gave stay.
        """
        if self.file is None and accelerator.is_accelerator(self.device):
            missing = max(0, nbytes - self.total_bytes)  # all of it, before the first slab
            accelerator.check_pinnable(-(-missing // self.slab_bytes) * self.slab_bytes)
        while self.total_bytes < nbytes:
            self._grow(nbytes - self.total_bytes)

    def take(self, nbytes: int) -> Place:
        """Hand out a place: the best-fitting free piece, else several; the store grows by slabs.

        Raises:
            HostMemoryError: The host has no more to give.
        """
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
        """Take a place back, and join its pieces with their free neighbours."""
        for slab, start, nbytes in place:
            self.used_bytes -= aligned(nbytes)
            self._free.add(aligned(nbytes), slab, start)

    def _grow(self, nbytes: int) -> None:
        size = self.slab_bytes
        if self.whole and nbytes > size:
            size = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if self.file is None:
            slab = accelerator.empty_pinned(size, self.device, torch.uint8)
            self.slabs.append(slab)
        else:
            os.ftruncate(self.file, self.total_bytes + size)
            if self.whole:
                view = mmap.mmap(self.file, size, offset=self.total_bytes)
                self.slabs.append(torch.frombuffer(view, dtype=torch.uint8))
        if len(self.slabs) > len(self._bases):
            self._bases.append(self.slabs[-1].data_ptr())
        self._offsets.append(self.total_bytes)
        self._free.add(size, len(self._offsets) - 1, 0)
        self.total_bytes += size

    def address(self, place: Place) -> int:
        """Return where a whole place can be read and written; a file's is a mapping of it."""
        ((slab, offset, _),) = place
        return self._bases[slab] + offset

    def views(self, place: Place) -> list[torch.Tensor]:
        """Return the pieces of a place of memory, each (nbytes,) uint8."""
        return [self.slabs[slab][offset : offset + nbytes] for slab, offset, nbytes in place]

    def read(self, place: Place, address: int) -> None:
        """Copy a place to host memory at an address."""
        for slab, offset, nbytes in place:
            if self.file is None:
                ctypes.memmove(address, self._bases[slab] + offset, nbytes)
            else:
                self._transfer(os.preadv, self._offsets[slab] + offset, nbytes, address)
            address += nbytes

    def write(self, place: Place, address: int) -> None:
        """Copy host memory at an address to a place."""
        for slab, offset, nbytes in place:
            if self.file is None:
                ctypes.memmove(self._bases[slab] + offset, address, nbytes)
            else:
                self._transfer(os.pwritev, self._offsets[slab] + offset, nbytes, address)
            address += nbytes

    def _transfer(
        self, call: Callable[[int, list[Any], int], int], start: int, nbytes: int, address: int
    ) -> None:
        # Calls on the file, not a mapping of it: a full disk is then an error, not a signal.
        assert self.file is not None
        buffer = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        done = 0
        while done < nbytes:
            moved = call(self.file, [buffer[done:]], start + done)
            if moved <= 0:
                raise OSError(f"the swap file ended after {start + done} bytes")
            done += moved

    def close(self, keep: bool = False) -> None:
        """Give everything back to the system; no copy may be under way.

        Args:
            keep: Storages could not be brought back. Those of a CPU stay here, with the memory;
                those of an accelerator have lost their values.
        """
        if keep and self.whole:
            _kept.extend(self.slabs)
        self.slabs.clear()
        self._free = FreePieces()  # variables go on ending
        accelerator.empty_pinned_cache(self.device)
        if self.file is not None:
            self._handle.close()


_submit = ThreadPoolExecutor.submit  # as it is before `guards` looks at what is submitted
MOVER = "outofcore-mover"  # the name of threads that are none of the user's
_DONE: Future[None] = Future()
_DONE.set_result(None)


class _Mover:
    """Copies storages of the device from and to their places; a ticket is waited for once."""

    def __init__(self, store: HostStore) -> None:
        self.store = store

    def start_in(self, storage: torch.UntypedStorage, place: Place) -> Any:
        """Start the copy of a place to a storage of the device; return its ticket."""
        return self._start(0, storage, place)

    def start_out(self, storage: torch.UntypedStorage, place: Place) -> Any:
        """Start the copy of a storage of the device to a place; return its ticket."""
        return self._start(1, storage, place)

    def _start(self, direction: int, storage: torch.UntypedStorage, place: Place) -> Any:
        raise NotImplementedError


class ThreadMover(_Mover):
    """Copies between host memory and the store, by one thread for each direction.

    Args:
        store: Where the places are.
        bytes_per_s: A rate to which copies of each direction are slowed down, one after another;
            None for as fast as they are. Threads sleep, so that computing goes on.
    """

    def __init__(self, store: HostStore, bytes_per_s: float | None = None) -> None:
        super().__init__(store)
        self.bytes_per_s = bytes_per_s
        # By direction those that copy; and those that wait, where copies are slowed down.
        count = 2 if bytes_per_s is None else 4
        self._pools = [ThreadPoolExecutor(1, MOVER) for _ in range(count)]
        self._open: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._moved = [[0, 0.0], [0, 0.0]]  # bytes and seconds, for each direction
        self._free_at = [0.0, 0.0]  # when each direction's last copy is over

    def _start(self, direction: int, storage: torch.UntypedStorage, place: Place) -> Future[None]:
        nbytes, copied = storage.nbytes(), self._copy(direction, storage, place)
        rate, asked_at = self.bytes_per_s, time.perf_counter()
        if rate is None:
            return copied

        def wait() -> None:
            copied.result()
            over = max(self._free_at[direction], asked_at) + nbytes / rate
            self._free_at[direction] = over
            time.sleep(max(0.0, over - time.perf_counter()))

        return self._submit(self._pools[2 + direction], wait)

    def _copy(self, direction: int, storage: torch.UntypedStorage, place: Place) -> Future[None]:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        copy = (self.store.read, self.store.write)[direction]
        if self.store.file is None and nbytes <= _SMALL_BYTES:
            copy(place, address)  # its place has no other copy: the last was waited for
            return _DONE

        def run() -> None:
            start = time.perf_counter()
            copy(place, address)
            with self._lock:
                self._moved[direction][0] += nbytes
                self._moved[direction][1] += time.perf_counter() - start

        return self._submit(self._pools[direction], run)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], None]) -> Future[None]:
        future = _submit(pool, work)
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
        """Return bytes/s (to the device, to the host), as stated or else measured."""
        if self.bytes_per_s is not None:
            return self.bytes_per_s, self.bytes_per_s
        with self._lock:
            rates = [nbytes / seconds if nbytes else 2e9 for nbytes, seconds in self._moved]
        return rates[0], rates[1]

    def finish(self) -> None:
        """Wait on the host until all copies are done."""
        wait(tuple(self._open))  # errors are raised by the tickets

    def close(self) -> None:
        """Wait for all copies, and end."""
        for pool in self._pools:
            pool.shutdown()


class StreamMover(_Mover):
    """Copies between an accelerator and pinned memory, by one stream a direction; events only.

    A copy waits for the work of the compute stream so far: the memory that it writes may just have
    been freed there, the values that it reads may just have been computed.
    """

    def __init__(self, store: HostStore, device: torch.device) -> None:
        super().__init__(store)
        self.device = device
        self._streams = torch.Stream(device), torch.Stream(device)
        # Of the first copies in each direction: bytes, and events before and after.
        self._timed: tuple[list[_Copy], list[_Copy]] = [], []

    def _start(self, direction: int, storage: torch.UntypedStorage, place: Place) -> torch.Event:
        stream, timed = self._streams[direction], self._timed[direction]
        whole = torch.empty(0, dtype=torch.uint8, device=self.device)
        whole.set_(storage, 0, (storage.nbytes(),), (1,))
        pieces: Sequence[torch.Tensor] = (whole,)
        if len(place) > 1:
            pieces = whole.split([piece.nbytes for piece in place])
        current: Any = accelerator.current_stream(self.device)
        stream.wait_stream(current)
        timing = len(timed) < _TIMED_COPIES
        event = torch.Event(self.device, enable_timing=timing)
        if timing:
            begin = torch.Event(self.device, enable_timing=True)
            begin.record(stream)
            timed.append(_Copy(storage.nbytes(), begin, event))
        with stream:  # by nobody else, and so never twice at once
            for ours, theirs in zip(pieces, self.store.views(place), strict=True):
                target, source = (ours, theirs) if direction == 0 else (theirs, ours)
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
        """Return bytes/s (to the device, to the host), of the larger of the copies timed so far."""
        return _rate(self._timed[0]), _rate(self._timed[1])

    def finish(self) -> None:
        """Wait on the host until all copies are done."""
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        """End; nothing is left to end."""


Mover = ThreadMover | StreamMover


class _Copy(NamedTuple):
    nbytes: int
    begin: torch.Event
    end: torch.Event


def _rate(copies: Sequence[_Copy]) -> float:
    largest = max((copy.nbytes for copy in copies), default=0)
    large = [copy for copy in copies if 2 * copy.nbytes >= largest]  # the others time the latency
    seconds = sum(accelerator.elapsed_s(copy.begin, copy.end) for copy in large)
    return sum(copy.nbytes for copy in large) / seconds if seconds > 0 else _USUAL_RATE
