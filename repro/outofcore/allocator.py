"""What an allocator makes of a sequence of requests: best fit with caching, and virtual chunks.

Source: Hayakawa and Narihira, section 4. Both are exact simulators over sequences of requests, so
that fragmentation can be studied without a device; `native` is the real chunked allocator.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

MIB = 2**20
PAPER_CHUNK_BYTES = 40 * MIB  # section 4: it balances the cost of mapping and the fragmentation


class AllocatorError(ValueError):
    """An allocator was asked for something that makes no sense."""


class OutOfMemory(MemoryError):
    """A request does not fit.

    Attributes:
        requested_bytes: What was asked for.
        live_bytes: Bytes handed out, each request rounded up.
        reserved_bytes: Bytes taken from the device.
        capacity_bytes: What the device has.
    """

    def __init__(self, requested: int, live: int, reserved: int, capacity: int) -> None:
        self.requested_bytes, self.live_bytes = requested, live
        self.reserved_bytes, self.capacity_bytes = reserved, capacity
        super().__init__(
            f"{requested} bytes do not fit: of {capacity} bytes, {live} are handed out and "
            f"{reserved - live} more are held; free something or allow more"
        )


class Event(NamedTuple):
    """A request for bytes under a name, or, with None, its end."""

    name: Hashable
    nbytes: int | None


class Allocator(Protocol):
    """What both simulators have in common."""

    requested_bytes: int
    live_bytes: int
    reserved_bytes: int
    map_operations: int

    def malloc(self, name: Hashable, nbytes: int) -> None:
        """Hand out bytes."""

    def free(self, name: Hashable) -> None:
        """Take them back."""


def _check_request(name: Hashable, nbytes: int, live: Iterable[Hashable]) -> None:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int | np.integer) or nbytes < 0:
        raise AllocatorError(
            f"{nbytes!r} bytes are asked for {name!r}: give whole bytes, 0 or more"
        )
    if name in live:
        raise AllocatorError(f"{name!r} is handed out already: free it before, or use another name")


class _Block:
    """Bytes [offset, offset + size) of a segment; blocks of a segment form a list in order."""

    __slots__ = ("after", "before", "free", "offset", "segment", "size", "small")

    def __init__(self, segment: int, offset: int, size: int, small: bool) -> None:
        self.segment, self.offset, self.size, self.small = segment, offset, size, small
        self.free = True
        self.before: _Block | None = None
        self.after: _Block | None = None


class BestFitAllocator:
    """Best fit with caching, as deep-learning frameworks do it: the baseline of section 4.

    Sizes, pools and the rule of when to split are those of torch's CUDA allocator: requests are
    rounded to 512 bytes; up to 1 MiB comes from segments of 2 MiB, below 10 MiB from segments of
    20 MiB, others from segments of their own, rounded to 2 MiB; the smallest free block that is
    large enough is taken, and split where at least 512 bytes (small) or over 1 MiB (large) are
    left; freed neighbours are joined. Where the device has no more, all wholly free segments go
    back to it and the request is tried once more.

    Differs from torch: one stream; no expandable segments, no garbage collection threshold.

    Args:
        capacity_bytes: What the device has; None for no limit.

    Attributes:
        requested_bytes: Bytes that were asked for and not freed.
        live_bytes: The same, each request rounded up.
        reserved_bytes: Bytes of all segments.
        map_operations: Segments taken from the device or given back.
    """

    ROUND, SMALL, SMALL_SEGMENT = 512, MIB, 2 * MIB
    LARGE, LARGE_SEGMENT, ROUND_LARGE = 10 * MIB, 20 * MIB, 2 * MIB

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.requested_bytes = self.live_bytes = self.reserved_bytes = self.map_operations = 0
        self._live: dict[Hashable, tuple[_Block, int]] = {}
        # Free blocks of each pool, (size, segment, offset), ascending; and the blocks by place.
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._segments: dict[int, int] = {}
        self._next = 0

    def malloc(self, name: Hashable, nbytes: int) -> None:
        """Hand out bytes; none for a request of 0.

        Raises:
            OutOfMemory: Neither a free block nor a new segment serves it.
            AllocatorError: The name is in use, or the size makes no sense.
        """
        _check_request(name, nbytes, self._live)
        size = max(1, -(-nbytes // self.ROUND)) * self.ROUND if nbytes else 0
        block = self._take(size, nbytes) if size else _Block(-1, 0, 0, True)
        block.free = False
        self._live[name] = block, nbytes
        self.requested_bytes += nbytes
        self.live_bytes += block.size

    def _take(self, size: int, nbytes: int) -> _Block:
        small = size <= self.SMALL
        pool = self._free[small]
        at = bisect_left(pool, (size, -1, -1))
        if at < len(pool):
            _, segment, offset = pool.pop(at)
            block = self._blocks[segment, offset]
        else:
            block = self._reserve(size, small, nbytes)
        rest = block.size - size
        if rest >= self.ROUND if small else rest > self.SMALL:
            other = _Block(block.segment, block.offset + size, rest, small)
            other.before, other.after, block.after = block, block.after, other
            if other.after:
                other.after.before = other
            block.size = size
            self._put(other)
        return block

    def _reserve(self, size: int, small: bool, nbytes: int) -> _Block:
        if small:
            whole = self.SMALL_SEGMENT
        elif size < self.LARGE:
            whole = self.LARGE_SEGMENT
        else:
            whole = -(-size // self.ROUND_LARGE) * self.ROUND_LARGE
        if self._exceeds(whole):
            self.give_back()
        if self._exceeds(whole):
            assert self.capacity_bytes is not None
            raise OutOfMemory(nbytes, self.live_bytes, self.reserved_bytes, self.capacity_bytes)
        block = _Block(self._next, 0, whole, small)
        self._blocks[block.segment, 0] = block
        self._segments[block.segment] = whole
        self._next += 1
        self.reserved_bytes += whole
        self.map_operations += 1
        return block

    def _exceeds(self, nbytes: int) -> bool:
        return self.capacity_bytes is not None and (
            self.reserved_bytes + nbytes > self.capacity_bytes
        )

    def _put(self, block: _Block) -> None:
        block.free = True
        self._blocks[block.segment, block.offset] = block
        insort(self._free[block.small], (block.size, block.segment, block.offset))

    def _pull(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.segment, block.offset))]

    def free(self, name: Hashable) -> None:
        """Take back what was handed out under a name.

        Raises:
            AllocatorError: Nothing is.
        """
        if name not in self._live:
            raise AllocatorError(f"{name!r} is not handed out: it was freed, or never asked for")
        block, nbytes = self._live.pop(name)
        self.requested_bytes -= nbytes
        self.live_bytes -= block.size
        if not block.size:
            return
        if block.after and block.after.free:
            gone = block.after
            self._pull(gone)
            del self._blocks[gone.segment, gone.offset]
            block.size += gone.size
            block.after = gone.after
            if block.after:
                block.after.before = block
        if block.before and block.before.free:
            kept = block.before
            self._pull(kept)
            self._blocks.pop((block.segment, block.offset), None)
            kept.size += block.size
            kept.after = block.after
            if kept.after:
                kept.after.before = kept
            block = kept
        self._put(block)

    def give_back(self) -> None:
        """Give all wholly free segments back to the device."""
        for pool in self._free.values():
            for free in tuple(pool):
                size, segment, offset = free
                if size == self._segments[segment]:
                    pool.remove(free)
                    del self._blocks[segment, offset], self._segments[segment]
                    self.reserved_bytes -= size
                    self.map_operations += 1

    @property
    def places(self) -> dict[Hashable, tuple[int, int, int]]:
        """What is handed out where: (segment, offset, bytes) by name."""
        return {n: (b.segment, b.offset, b.size) for n, (b, _) in self._live.items()}


class ChunkedAllocator:
    """Physical chunks of one size, mapped into contiguous virtual ranges: section 4.

    A request of m_r bytes gets k = ceil(m_r / m_c) chunks of m_c bytes; so much more than asked for
    is its internal fragmentation, below m_c (equation 1), and below N_max m_c in all (equation 2).
    Chunks combine in any order, so that there is no external fragmentation: whatever is free serves
    any request.

    A freed range stays mapped, and a request for exactly as many chunks takes the latest of that
    size. Otherwise chunks are taken from freed ranges, the one that was freed longest ago first,
    which are unmapped, and new chunks are made where these are not enough.

    Args:
        chunk_bytes: m_c; the paper's is `PAPER_CHUNK_BYTES`.
        capacity_bytes: What the device has; None for no limit.

    Attributes:
        requested_bytes: Bytes that were asked for and not freed.
        live_bytes: The same, each request rounded up to chunks.
        reserved_bytes: Bytes of all chunks.
        map_operations: Chunks mapped into a range or unmapped from one.
        ranges_reused: Requests that took a range as it was.
    """

    def __init__(
        self, chunk_bytes: int = PAPER_CHUNK_BYTES, capacity_bytes: int | None = None
    ) -> None:
        if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
            raise AllocatorError(f"chunk_bytes is {chunk_bytes!r}: give whole bytes above 0")
        self.chunk_bytes, self.capacity_bytes = chunk_bytes, capacity_bytes
        self.requested_bytes = self.live_bytes = self.reserved_bytes = 0
        self.map_operations = self.ranges_reused = 0
        self._live: dict[Hashable, tuple[int, int]] = {}
        # Freed ranges, oldest first (a dict keeps its order), and their numbers by size.
        self._freed: dict[int, int] = {}
        self._by_size: dict[int, list[int]] = {}
        self._spare = 0  # chunks that are mapped nowhere
        self._next = 0

    def malloc(self, name: Hashable, nbytes: int) -> None:
        """Hand out bytes; none for a request of 0.

        Raises:
            OutOfMemory: Not enough chunks are left within the capacity.
            AllocatorError: The name is in use, or the size makes no sense.
        """
        _check_request(name, nbytes, self._live)
        count = -(-nbytes // self.chunk_bytes)
        same = self._by_size.get(count)
        if count and same:
            del self._freed[same.pop()]
            self.ranges_reused += 1
        elif count:
            self._map(count, nbytes)
        self._live[name] = count, nbytes
        self.requested_bytes += nbytes
        self.live_bytes += count * self.chunk_bytes

    def _map(self, count: int, nbytes: int) -> None:
        free = self.reserved_bytes - self.live_bytes
        new = max(0, count * self.chunk_bytes - free)
        if self.capacity_bytes is not None and self.reserved_bytes + new > self.capacity_bytes:
            raise OutOfMemory(nbytes, self.live_bytes, self.reserved_bytes, self.capacity_bytes)
        while self._spare < count and self._freed:
            number, size = next(iter(self._freed.items()))
            del self._freed[number]
            self._by_size[size].remove(number)
            self._spare += size
            self.map_operations += size
        made = max(0, count - self._spare)
        self.reserved_bytes += made * self.chunk_bytes
        self._spare += made - count
        self.map_operations += count

    def free(self, name: Hashable) -> None:
        """Take back what was handed out under a name; its range stays mapped.

        Raises:
            AllocatorError: Nothing is.
        """
        if name not in self._live:
            raise AllocatorError(f"{name!r} is not handed out: it was freed, or never asked for")
        count, nbytes = self._live.pop(name)
        self.requested_bytes -= nbytes
        self.live_bytes -= count * self.chunk_bytes
        if count:
            self._freed[self._next] = count
            self._by_size.setdefault(count, []).append(self._next)
            self._next += 1


@dataclass(frozen=True)
class FragmentationReport:
    """What a sequence of requests took from the device.

    Attributes:
        requested_bytes: (n,) after each event, the bytes asked for and not freed.
        live_bytes: (n,) the same with each request rounded up.
        reserved_bytes: (n,) the bytes taken from the device.
        map_operations: In all.
    """

    requested_bytes: NDArray[np.int64]
    live_bytes: NDArray[np.int64]
    reserved_bytes: NDArray[np.int64]
    map_operations: int

    @property
    def peak_requested_bytes(self) -> int:
        """The most that was asked for at once."""
        return int(self.requested_bytes.max(initial=0))

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was taken from the device."""
        return int(self.reserved_bytes.max(initial=0))

    @property
    def internal_bytes(self) -> int:
        """The most that rounding up took at once: internal fragmentation, IF_max of equation 2."""
        return int((self.live_bytes - self.requested_bytes).max(initial=0))

    @property
    def overhead(self) -> float:
        """What was taken from the device at the peak, over what was asked for at its peak."""
        return self.peak_reserved_bytes / max(1, self.peak_requested_bytes)


def replay(allocator: Allocator, events: Iterable[Event]) -> FragmentationReport:
    """Run requests through an allocator, and report what they took.

    Raises:
        OutOfMemory: One does not fit.
        AllocatorError: The sequence contradicts itself.
    """
    rows = []
    for name, nbytes in events:
        if nbytes is None:
            allocator.free(name)
        else:
            allocator.malloc(name, nbytes)
        rows.append((allocator.requested_bytes, allocator.live_bytes, allocator.reserved_bytes))
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 3)
    return FragmentationReport(table[:, 0], table[:, 1], table[:, 2], allocator.map_operations)
