"""Simulated allocators, exact over sequences of requests: best fit with caching, and chunks.

Source: Hayakawa and Narihira, section 4; `native` is the real chunked allocator.

Terms, in bytes: *requested* by live requests; *allocated* to them, rounding included; *reserved*
from the device; *internal* fragmentation is allocated less requested, *cached* is reserved less
allocated. With best fit, cached bytes may be useless for later requests (external fragmentation);
with chunks they never are, since any chunk serves any request.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

from repro.measure.checks import is_whole

MIB = 2**20
PAPER_CHUNK_BYTES = 40 * MIB  # section 4: a balance between costs of mapping and fragmentation
ALIGNMENT = 512  # of torch's allocator
QUANTITIES = (
    "requested_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "internal_fragmentation_bytes",
)


class AllocatorError(ValueError):
    """A request to an allocator is invalid."""


class OutOfMemory(MemoryError):
    """A request does not fit, although it may be smaller than the free bytes."""


class Event(NamedTuple):
    """A request for bytes under a name, or with None its end."""

    name: Hashable
    nbytes: int | None


def checked(what: str, nbytes: Any, least: int = 1, most: int | None = None) -> int:
    """Return whole bytes from `least` to `most`."""
    if not is_whole(nbytes, least, most):
        limits = f"{least} or more" + (f" and at most {most}" if most is not None else "")
        raise AllocatorError(f"{what} is {nbytes!r}: give whole bytes, {limits}")
    return int(nbytes)


class _Allocator:
    """Base of both simulators: the current `QUANTITIES` and their `peaks`."""

    def __init__(self, capacity_bytes: int | None) -> None:
        if capacity_bytes is not None:
            checked("capacity_bytes", capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self.requested_bytes = self.allocated_bytes = self.reserved_bytes = 0
        self.map_operations = 0
        self.peaks = dict.fromkeys(QUANTITIES, 0)
        self._live: dict[Hashable, tuple[Any, int]] = {}

    @property
    def internal_fragmentation_bytes(self) -> int:
        """Allocated less requested bytes: lost to rounding up, within live blocks."""
        return self.allocated_bytes - self.requested_bytes

    def malloc(self, name: Hashable, nbytes: int) -> None:
        """Hand out bytes, or raise OutOfMemory and stay unchanged."""
        size = checked(f"the request for {name!r}", nbytes)
        if name in self._live:
            raise AllocatorError(f"{name!r} is live already: free it, or use another name")
        taken, allocated = self._take(size)
        self._live[name] = taken, size
        self.requested_bytes += size
        self.allocated_bytes += allocated
        self._note_peaks()

    def free(self, name: Hashable) -> None:
        """Free the bytes that were handed out under a name."""
        if name not in self._live:
            raise AllocatorError(f"{name!r} is not live: it was freed, or never asked for")
        taken, nbytes = self._live.pop(name)
        self.requested_bytes -= nbytes
        self.allocated_bytes -= self._give(taken)
        self._note_peaks()  # internal fragmentation may grow in a shared chunk

    def _note_peaks(self) -> None:
        for quantity, peak in self.peaks.items():
            self.peaks[quantity] = max(peak, getattr(self, quantity))

    def _does_not_fit(self, nbytes: int) -> OutOfMemory:
        free = (self.capacity_bytes or 0) - self.allocated_bytes
        return OutOfMemory(f"{nbytes} bytes do not fit: {free} of {self.capacity_bytes} are free")

    def _take(self, nbytes: int) -> tuple[Any, int]:  # a block, and its bytes
        raise NotImplementedError

    def _give(self, taken: Any) -> int:  # bytes no longer allocated
        raise NotImplementedError


def aligned(nbytes: int) -> int:
    """Return bytes rounded up as by torch's allocator."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class FreePieces:
    """Free pieces of segments, each (bytes, segment, offset), joined with their neighbours."""

    def __init__(self) -> None:
        self.by_size: list[tuple[int, int, int]] = []  # all pieces, ascending
        self._starts: dict[tuple[int, int], int] = {}  # bytes, by where a piece starts
        self._ends: dict[tuple[int, int], int] = {}  # and by where it ends

    @property
    def largest(self) -> int:
        """Bytes of the largest piece; 0 without pieces."""
        return self.by_size[-1][0] if self.by_size else 0

    def add(self, nbytes: int, segment: int, start: int) -> None:
        """Add a piece, and join it with its free neighbours."""
        end = start + nbytes
        if (before := self._ends.get((segment, start))) is not None:
            start -= before
            self.remove(before, segment, start)
        if (after := self._starts.get((segment, end))) is not None:
            self.remove(after, segment, end)
            end += after
        insort(self.by_size, (end - start, segment, start))
        self._starts[segment, start] = self._ends[segment, end] = end - start

    def remove(self, nbytes: int, segment: int, start: int) -> None:
        """Remove a piece."""
        del self.by_size[bisect_left(self.by_size, (nbytes, segment, start))]
        del self._starts[segment, start], self._ends[segment, start + nbytes]

    def __contains__(self, piece: tuple[int, int, int]) -> bool:
        nbytes, segment, start = piece
        return self._starts.get((segment, start)) == nbytes

    def take(self, nbytes: int) -> tuple[int, int, int] | None:
        """Remove and return the smallest piece of at least `nbytes`, at the lowest address."""
        at = bisect_left(self.by_size, (nbytes, -1, -1))
        if at == len(self.by_size):
            return None
        piece = self.by_size[at]
        self.remove(*piece)
        return piece


class Block(NamedTuple):
    """Bytes of a segment (numbered by its address) from an offset on."""

    segment: int
    offset: int
    nbytes: int
    small: bool


class BestFitAllocator(_Allocator):
    """Best fit with caching, as in deep-learning frameworks: the baseline of section 4.

    Sizes, pools and the rule for splitting are those of torch's CUDA allocator: it takes the
    smallest free block of the pool that is large enough, at the lowest address among equals, and
    splits it if enough is left (`ALIGNMENT` bytes in the small pool, more than `small_bytes` in the
    large one); it joins freed neighbours of a segment, and keeps segments. If the device has no
    more memory, all wholly free segments go back to it and the request is tried once more.
    `map_operations` counts segments taken from the device or given back.

    Differs from torch: there is one stream, and no expandable segments or options that are off.

    The device has `capacity_bytes` for segments (None: no limit). `scale` is a factor on all of
    torch's sizes, for a device with proportionally less memory.
    """

    def __init__(self, capacity_bytes: int | None = None, scale: float = 1.0) -> None:
        super().__init__(capacity_bytes)
        if not scale > 0:
            raise AllocatorError(f"scale is {scale!r}: give a number above 0")
        sizes = [max(1, round(n * MIB * scale / ALIGNMENT)) * ALIGNMENT for n in (1, 2, 10, 2, 20)]
        # First: largest rounded request of the small pool. Second: size of its segments. From the
        # third on a request gets its own segment, rounded up to a multiple of the fourth. Fifth:
        # size of the large pool's other segments.
        self.small_bytes, self.small_segment_bytes, self.large_bytes = sizes[:3]
        self.large_rounding, self.large_segment_bytes = sizes[3:]
        self._free = {True: FreePieces(), False: FreePieces()}  # of the small and the large pool
        self._segments: dict[int, int] = {}  # bytes by address
        self._next = 0

    def _take(self, nbytes: int) -> tuple[Block, int]:
        size = aligned(nbytes)
        small = size <= self.small_bytes
        free, segment, offset = self._free[small].take(size) or self._reserve(size, nbytes)
        rest = free - size
        if rest >= ALIGNMENT if small else rest > self.small_bytes:
            self._free[small].add(rest, segment, offset + size)
            free = size
        return Block(segment, offset, free, small), free

    def _reserve(self, size: int, nbytes: int) -> tuple[int, int, int]:
        if size <= self.small_bytes:
            whole = self.small_segment_bytes
        elif size < self.large_bytes:
            whole = self.large_segment_bytes
        else:
            whole = -(-size // self.large_rounding) * self.large_rounding
        capacity = self.capacity_bytes
        if capacity is not None and self.reserved_bytes + whole > capacity:
            self.release_cached()
            if self.reserved_bytes + whole > capacity:
                raise self._does_not_fit(nbytes)
        segment, self._next = self._next, self._next + whole
        self._segments[segment] = whole
        self.reserved_bytes += whole
        self.map_operations += 1
        return whole, segment, 0

    def _give(self, block: Block) -> int:
        self._free[block.small].add(block.nbytes, block.segment, block.offset)
        return block.nbytes

    def release_cached(self) -> None:
        """Give all wholly free segments back to the device."""
        for pool in self._free.values():
            for piece in [p for p in pool.by_size if p[0] == self._segments[p[1]]]:
                pool.remove(*piece)
                self.reserved_bytes -= self._segments.pop(piece[1])
                self.map_operations += 1


class ChunkedAllocator(_Allocator):
    """Physical chunks of one size, mapped into contiguous virtual ranges: section 4.

    A request of m_r bytes gets k = ceil(m_r / m_c) chunks of m_c bytes: its internal fragmentation
    is below m_c (equation 1), and the total below N_max m_c (equation 2). Chunks combine in any
    order, so that a request fails only if the chunks of all live blocks would exceed the capacity.
    A freed range stays mapped; a request for the same number of chunks takes the latest such range.
    Otherwise chunks are collected: first unmapped chunks, then those of freed ranges, in the order
    of freeing, each range unmapped whole; if these are not enough, new chunks are made.

    Differs from the paper: requests up to `small_bytes` share chunks by best fit; by default none
    does. A network has hundreds of small tensors, and a chunk of 40 MiB for each would exceed a
    GPU's memory. A chunk is shared while one piece of it is in use, and counts as wholly allocated.
    The authors' code (nnabla) may grow a freed range in place; here a new range is mapped.

    m_c is `chunk_bytes`; the device has `capacity_bytes` for chunks (None: no limit). Requests of
    up to `small_bytes` share chunks (0: none do).
    """

    def __init__(
        self,
        chunk_bytes: int = PAPER_CHUNK_BYTES,
        capacity_bytes: int | None = None,
        small_bytes: int = 0,
    ) -> None:
        super().__init__(capacity_bytes)
        self.chunk_bytes, self.small_bytes = checked("chunk_bytes", chunk_bytes), small_bytes
        self._whole = chunk_bytes // ALIGNMENT * ALIGNMENT
        checked("small_bytes", small_bytes, 0, self._whole)
        # Chunks mapped and unmapped (`map_operations` is the sum), and ranges taken unchanged.
        self.maps = self.unmaps = self.chunks_created = self.ranges_reused = 0
        self._freed: dict[int, tuple[int, ...]] = {}  # ranges by a running number, oldest first
        self._unmapped: list[int] = []
        # Shared chunks by a running number, and their free pieces.
        self._shared: dict[int, tuple[int, ...]] = {}
        self._pieces = FreePieces()
        self._next = 0

    def _take(self, nbytes: int) -> tuple[Any, int]:
        if nbytes > self.small_bytes:
            return self._chunks_of(nbytes)
        size, allocated = aligned(nbytes), 0
        piece = self._pieces.take(size)
        if piece is None:
            self._next += 1
            self._shared[self._next], allocated = self._chunks_of(self.chunk_bytes)
            piece = self._whole, self._next, 0
        free, segment, offset = piece
        if free > size:
            self._pieces.add(free - size, segment, offset + size)
        return Block(segment, offset, size, small=True), allocated

    def _chunks_of(self, nbytes: int) -> tuple[tuple[int, ...], int]:
        count, capacity = -(-nbytes // self.chunk_bytes), self.capacity_bytes
        allocated = count * self.chunk_bytes
        if capacity is not None and self.allocated_bytes + allocated > capacity:
            raise self._does_not_fit(nbytes)
        for number in reversed(self._freed):
            if len(self._freed[number]) == count:
                self.ranges_reused += 1
                return self._freed.pop(number), allocated
        while len(self._unmapped) < count and self._freed:
            chunks = self._freed.pop(next(iter(self._freed)))
            self._unmapped.extend(chunks)
            self.unmaps += len(chunks)
        for _ in range(count - len(self._unmapped)):
            self._unmapped.append(self.chunks_created)
            self.chunks_created += 1
            self.reserved_bytes += self.chunk_bytes
        chunks = tuple(self._unmapped[-count:])
        del self._unmapped[-count:]
        self.maps += count
        self.map_operations = self.maps + self.unmaps
        return chunks, allocated

    def _give(self, taken: Any) -> int:
        chunks = taken
        if isinstance(taken, Block):
            self._pieces.add(taken.nbytes, taken.segment, taken.offset)
            whole = self._whole, taken.segment, 0
            if whole not in self._pieces:
                return 0
            self._pieces.remove(*whole)
            chunks = self._shared.pop(taken.segment)
        self._next += 1
        self._freed[self._next] = chunks
        return len(chunks) * self.chunk_bytes


_A = TypeVar("_A", bound=_Allocator)


def replay(allocator: _A, events: Iterable[Event]) -> _A:
    """Run requests and their ends through an allocator, and return it."""
    for name, nbytes in events:
        if nbytes is None:
            allocator.free(name)
        else:
            allocator.malloc(name, nbytes)
    return allocator
