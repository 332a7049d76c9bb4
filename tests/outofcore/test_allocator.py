import copy
import random
from itertools import pairwise

import numpy as np
import pytest

from repro.outofcore.allocator import (
    MIB,
    QUANTITIES,
    AllocatorError,
    BestFitAllocator,
    ChunkedAllocator,
    Event,
    OutOfMemory,
    replay,
)
from repro.outofcore.pooled import PooledChunkedAllocator

MAKE = {
    "best fit": BestFitAllocator,
    "small best fit": lambda capacity=None: BestFitAllocator(capacity, 4, 16, 32, 100, 20, 200),
    "chunked": lambda capacity=None: ChunkedAllocator(64, capacity),
    "paper's chunks": lambda capacity=None: ChunkedAllocator(capacity_bytes=capacity),
    "pooled": lambda capacity=None: PooledChunkedAllocator(capacity_bytes=capacity),
}
LARGE = (BestFitAllocator, MAKE["paper's chunks"], MAKE["pooled"])


def random_events(seed: int, n: int, largest: int, live: int = 40) -> list[Event]:
    """Requests of log-uniform sizes and their ends, at most `live` at once."""
    rng, names, events = random.Random(seed), [], []
    for number in range(n):
        if names and (len(names) == live or rng.random() < 0.48):
            events.append(Event(names.pop(rng.randrange(len(names))), None))
        else:
            events.append(Event(number, max(1, int(largest ** rng.random()))))
            names.append(number)
    return events


class TestChunked:
    def test_by_hand(self):
        allocator = ChunkedAllocator(10, 50)
        allocator.malloc("a", 25)  # chunks 0, 1, 2
        allocator.malloc("b", 10)  # 3
        assert (allocator.requested_bytes, allocator.allocated_bytes) == (35, 40)
        assert (allocator.reserved_bytes, allocator.maps, allocator.unmaps) == (40, 4, 0)
        allocator.free("a")
        assert (allocator.allocated_bytes, allocator.cached_bytes) == (10, 30)
        allocator.malloc("c", 30)  # the range of a, as it is
        assert (allocator.maps, allocator.ranges_reused) == (4, 1)
        allocator.free("c")
        allocator.malloc("d", 11)  # two chunks of it, and one is left
        assert (allocator.maps, allocator.unmaps, allocator.reserved_bytes) == (6, 3, 40)
        allocator.malloc("e", 20)  # that one and a new one
        assert (allocator.chunks_created, allocator.reserved_bytes) == (5, 50)
        assert sorted(c for chunks in allocator.blocks.values() for c in chunks) == [0, 1, 2, 3, 4]
        with pytest.raises(OutOfMemory, match="1 bytes do not fit: 0 of 50 bytes are free"):
            allocator.malloc("f", 1)
        allocator.free("d")
        allocator.release_cached()
        assert (allocator.reserved_bytes, allocator.allocated_bytes) == (30, 30)


class TestPooled:
    def test_by_hand(self):
        allocator = PooledChunkedAllocator(2048, 3 * 2048)  # small: up to 1,024
        allocator.malloc("a", 1000)  # 1,024 of chunk 0
        allocator.malloc("b", 1)  # 512 of it
        allocator.malloc("c", 513)  # 1,024 of chunk 1
        assert (allocator.allocated_bytes, allocator.shared_chunks) == (4096, 2)
        allocator.malloc("d", 500)  # the rest of chunk 0
        allocator.malloc("e", 1025)  # a chunk of its own
        assert allocator.blocks == {"a": (0,), "b": (0,), "c": (1,), "d": (0,), "e": (2,)}
        assert allocator.largest_allocatable() == 1024
        with pytest.raises(OutOfMemory):
            allocator.malloc("f", 1025)
        allocator.free("a")
        allocator.malloc("f", 600)  # of two pieces of 1,024 the one in the chunk shared first
        assert allocator.blocks["f"] == (0,)
        for name in "fbd":
            allocator.free(name)
        assert (allocator.allocated_bytes, allocator.cached_bytes) == (4096, 2048)
        allocator.malloc("g", 2048)
        assert allocator.ranges_reused == 1
        assert allocator.blocks == {"c": (1,), "e": (2,), "g": (0,)}


class TestBestFit:
    def test_segments_by_hand(self):
        for nbytes, reserved in (
            (1, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 1, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (10 * MIB + 1, 12 * MIB),
        ):
            allocator = BestFitAllocator()
            allocator.malloc("a", nbytes)
            assert allocator.reserved_bytes == reserved, nbytes

    def test_when_a_block_is_split(self):
        allocator = BestFitAllocator()
        allocator.malloc("a", 11 * MIB)  # 12 MiB: 1 MiB is left, which is not more than 1 MiB
        assert (allocator.allocated_bytes, allocator.internal_fragmentation_bytes) == (
            12 * MIB,
            MIB,
        )
        allocator.malloc("b", 19 * MIB - 512)  # 20 MiB: a bit more is left
        assert allocator.allocated_bytes == 31 * MIB - 512
        allocator.malloc("c", 2 * MIB)  # does not fit into it
        assert allocator.reserved_bytes == 52 * MIB
        allocator.malloc("d", 1)
        allocator.malloc("e", 2 * MIB - 512)  # of the large pool, though d's segment has room
        assert allocator.blocks["d"][1] == 512
        assert allocator.reserved_bytes == 54 * MIB

    def test_the_smallest_block_that_fits_at_the_lowest_address(self):
        allocator = MAKE["small best fit"]()
        for name, nbytes in zip("abcdef", (40, 20, 60, 20, 40, 20), strict=True):
            allocator.malloc(name, nbytes)
        places = {name: address for name, (address, _) in allocator.blocks.items()}
        for name in "ace":
            allocator.free(name)
        allocator.malloc("g", 39)
        assert allocator.blocks["g"] == (places["a"], 40)
        allocator.malloc("h", 38)
        assert allocator.blocks["h"] == (places["e"], 40)
        allocator.malloc("i", 37)
        assert allocator.blocks["i"][0] == places["c"]

    def test_fragmentation_that_chunks_do_not_have(self):
        # 20 blocks of 20 MiB fill 400 MiB; every second is freed, and no two are neighbours.
        capacity = 400 * MIB
        events = [Event(n, 20 * MIB) for n in range(20)]
        events += [Event(n, None) for n in range(20)]
        events += [Event("all", 400 * MIB), Event("all", None)]  # one segment from here on
        events += [Event(f"b{n}", 20 * MIB) for n in range(20)]
        events += [Event(f"b{n}", None) for n in range(0, 20, 2)]
        last = Event("last", 40 * MIB)
        chunked = ChunkedAllocator(2 * MIB, capacity)
        assert replay(chunked, [*events, last]).peak_reserved_bytes == capacity
        best_fit = BestFitAllocator(capacity)
        replay(best_fit, events)
        assert best_fit.cached_bytes == best_fit.external_fragmentation_bytes == 200 * MIB
        with pytest.raises(OutOfMemory) as caught:
            best_fit.malloc(*last)
        error = caught.value
        assert (error.requested_bytes, error.free_bytes) == (40 * MIB, 200 * MIB)
        assert (error.capacity_bytes, error.largest_bytes) == (capacity, 20 * MIB)
        best_fit.malloc("fits", 20 * MIB)

    def test_free_segments_go_back_where_the_device_is_full(self):
        allocator = BestFitAllocator(40 * MIB)
        allocator.malloc("a", 12 * MIB)
        allocator.malloc("b", 12 * MIB)
        allocator.free("a")
        allocator.malloc("c", 14 * MIB)
        assert (allocator.reserved_bytes, allocator.map_operations) == (38 * MIB, 3)
        allocator.free("c")
        allocator.malloc("d", 28 * MIB)
        assert (allocator.reserved_bytes, allocator.map_operations) == (40 * MIB, 6)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
class TestAll:
    @pytest.mark.slow
    @pytest.mark.parametrize("limited", [False, True])
    def test_random_requests(self, make, limited):
        """Counts and peaks are those of a slow count; what fits is served, and nothing overlaps."""
        scale, refused, checked = MIB if make in LARGE else 5, 0, 0
        for seed in range(6):
            allocator, live, done, rows = make(200 * scale if limited else None), {}, [], []
            for event in random_events(seed, 150 if limited else 400, 80 * scale):
                name, nbytes = event
                waste = allocator.internal_fragmentation_bytes
                if nbytes is None and name in live:
                    del live[name]
                    allocator.free(name)
                elif nbytes is None:
                    continue
                else:
                    try:
                        allocator.malloc(name, nbytes)
                    except OutOfMemory as error:
                        # Best fit may have no 20 MiB for a request of 9 MiB, but 12 MiB for 12.
                        assert error.largest_bytes != nbytes
                        refused += 1
                        continue
                    live[name] = nbytes
                done.append(event)
                rows.append(self.counted(allocator, live))
                if type(allocator) is ChunkedAllocator and nbytes is not None:  # equation 1
                    waste = allocator.internal_fragmentation_bytes - waste
                    assert 0 <= waste < allocator.chunk_bytes
                checked += self.largest(allocator, limited)
            for column, name in zip(np.array(rows).T, QUANTITIES, strict=True):
                assert column.max() <= allocator.peaks[name]
                if not limited:  # a refusal gives free segments back
                    report = replay(make(), done)
                    assert np.array_equal(report.timeline[name], column), name
                    assert getattr(report, f"peak_{name}") == column.max() == allocator.peaks[name]
                    assert report.map_operations == allocator.map_operations > 0
            self.check_end(allocator, live)
        assert refused > 5 and checked > 100 if limited else not refused
        empty = replay(make(), [])
        assert empty.peak_reserved_bytes == empty.map_operations == 0
        assert empty.timeline["live_blocks"].shape == (0,)

    def counted(self, allocator, live: dict) -> tuple[int, ...]:
        """Return `QUANTITIES` by counting blocks; check that they are apart."""
        blocks, requested = allocator.blocks, sum(live.values())
        reserved, external = allocator.reserved_bytes, 0
        assert blocks.keys() == live.keys()
        if isinstance(allocator, BestFitAllocator):
            spans = sorted(blocks.values())
            assert all(place + size <= after for (place, size), (after, _) in pairwise(spans))
            allocated = sum(size for _, size in spans)
            external = reserved - allocated
            # Live and free blocks tile the segments: nothing is lost.
            free = [piece for pool in allocator._free.values() for piece in pool.by_size]
            assert sum(size for size, *_ in free) == external == allocator.cached_bytes
            places = sorted([*spans, *((at + start, size) for size, at, start in free)])
            assert all(place + size <= after for (place, size), (after, _) in pairwise(places))
        else:
            chunks = [c for block in blocks.values() for c in block]
            pooled = isinstance(allocator, PooledChunkedAllocator)
            assert pooled or len(chunks) == len(set(chunks))
            assert max(chunks, default=-1) < allocator.chunks_created
            allocated = len(set(chunks)) * allocator.chunk_bytes
            assert allocated - requested < max(1, len(live)) * allocator.chunk_bytes  # equation 2
        return requested, allocated, reserved, allocated - requested, external, len(live)

    def largest(self, allocator, limited: bool) -> bool:
        """Check what is said to be the largest request that fits."""
        largest = allocator.largest_allocatable()
        assert (largest is None) != limited
        if largest:
            copy.deepcopy(allocator).malloc("x", largest)
        if limited:
            with pytest.raises(OutOfMemory):
                copy.deepcopy(allocator).malloc("x", largest + 1)
        if limited and type(allocator) is ChunkedAllocator:  # whatever is free, wherever it is
            chunk, used = allocator.chunk_bytes, allocator.allocated_bytes
            assert largest == allocator.capacity_bytes // chunk * chunk - used
        return bool(largest)

    def check_end(self, allocator, live: dict) -> None:
        if not isinstance(allocator, BestFitAllocator):
            # No more is ever reserved than what was live at once.
            assert allocator.peaks["reserved_bytes"] == allocator.peaks["allocated_bytes"]
            return
        for name in live:
            allocator.free(name)
        free = [piece for pool in allocator._free.values() for piece in pool.by_size]
        assert sorted((at, size) for size, at, _ in free) == sorted(allocator._segments.items())
        allocator.release_cached()
        assert allocator.reserved_bytes == 0

    def test_errors(self, make):
        allocator = make(100 * MIB)
        for nbytes in (0, -1, 1.5, True, "1", None):
            with pytest.raises(AllocatorError, match=r"request for 'a' is .*: give whole bytes"):
                allocator.malloc("a", nbytes)
        allocator.malloc("a", np.int64(7))
        with pytest.raises(AllocatorError, match="'a' is live already"):
            allocator.malloc("a", 7)
        with pytest.raises(AllocatorError, match="'b' is not live"):
            allocator.free("b")
        before = [getattr(allocator, name) for name in QUANTITIES]
        with pytest.raises(OutOfMemory):
            allocator.malloc("b", 101 * MIB)
        assert [getattr(allocator, name) for name in QUANTITIES] == before
        allocator.malloc("b", 8)
        allocator.free("a")
        with pytest.raises(AllocatorError, match="'a' is not live"):
            allocator.free("a")
        for capacity in (0, -5, 1.5):
            with pytest.raises(AllocatorError, match="capacity_bytes is"):
                make(capacity)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda c=chunk: ChunkedAllocator(c), "chunk_bytes is") for chunk in (0, -1, 2.0, True)),
        *((lambda s=small: PooledChunkedAllocator(1024, small_bytes=s),
           rf"small_bytes is {small}: .*bytes=1024") for small in (0, -1, 1025)),
        (lambda: PooledChunkedAllocator(1000, small_bytes=900), "is 1000: .* give larger chunks"),
        (lambda: BestFitAllocator(small_segment_bytes=512), "give larger segments"),
        (lambda: replay(ChunkedAllocator(), [Event("x", None)]), "'x' is not live"),
    ],
)  # fmt: skip
def test_what_makes_no_sense(make, message):
    with pytest.raises(AllocatorError, match=message):
        make()
