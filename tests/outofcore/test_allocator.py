import random
from itertools import pairwise

import numpy as np
import pytest

from repro.outofcore import allocator as allocators
from repro.outofcore.allocator import MIB, BestFitAllocator, ChunkedAllocator, Event, replay

MAKE = {
    "best fit": BestFitAllocator,
    "small best fit": lambda capacity=None: BestFitAllocator(capacity, 2**-11),
    "chunked": lambda capacity=None: ChunkedAllocator(64, capacity),
    "pooled": lambda capacity=None: ChunkedAllocator(40 * MIB, capacity, 20 * MIB),
}
UNITS = {MAKE["best fit"]: MIB, MAKE["pooled"]: MIB, MAKE["small best fit"]: 512}


def blocks(allocator) -> dict:
    """Each live block: the numbers of its chunks, in order; or its address and bytes."""
    taken = {name: given for name, (given, _) in allocator._live.items()}
    if isinstance(allocator, BestFitAllocator):
        return {name: (b.segment + b.offset, b.nbytes) for name, b in taken.items()}
    whole = lambda b: allocator._shared[b.segment] if isinstance(b, allocators.Block) else b  # noqa: E731
    return {name: whole(given) for name, given in taken.items()}


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


def test_small_requests_of_chunks_by_hand():
    allocator = ChunkedAllocator(2048, 3 * 2048, 1024)
    allocator.malloc("a", 1000)  # 1,024 of chunk 0
    allocator.malloc("b", 1)  # 512 of it
    allocator.malloc("c", 513)  # 1,024 of chunk 1
    assert (allocator.allocated_bytes, len(allocator._shared)) == (4096, 2)
    allocator.malloc("d", 500)  # the rest of chunk 0
    allocator.malloc("e", 1025)  # a chunk of its own
    assert blocks(allocator) == {"a": (0,), "b": (0,), "c": (1,), "d": (0,), "e": (2,)}
    with pytest.raises(allocators.OutOfMemory):
        allocator.malloc("f", 1025)
    allocator.free("a")
    allocator.malloc("f", 600)  # of two pieces of 1,024 the one in the chunk shared first
    assert blocks(allocator)["f"] == (0,)
    for name in "fbd":
        allocator.free(name)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (4096, 6144)
    allocator.malloc("g", 2048)
    assert allocator.ranges_reused == 1
    assert blocks(allocator) == {"c": (1,), "e": (2,), "g": (0,)}


class TestBestFit:
    def test_segments_by_hand(self):
        for nbytes, reserved in (
            (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB),
        ):  # fmt: skip
            assert replay(BestFitAllocator(), [Event("a", nbytes)]).reserved_bytes == reserved

    def test_rests_by_hand(self):
        """A rest is split off from 512 bytes (small pool), or from more than 1 MiB (large)."""
        half = 19 * MIB // 2
        for first, second, held in (
            (MIB, MIB - 512, MIB - 512),
            (MIB, MIB - 511, MIB),
            (half, half - 512, half - 512),
            (half, half, 20 * MIB - half),
        ):
            allocator = replay(BestFitAllocator(), [Event("a", first), Event("b", second)])
            assert blocks(allocator) == {"a": (0, first), "b": (first, held)}

    def test_fragmentation_that_chunks_do_not_have(self):
        # 20 blocks of 20 MiB fill 400 MiB; every second is freed, and no two are neighbours.
        capacity, events = 400 * MIB, [Event(n, 20 * MIB) for n in range(20)]
        events += [Event(n, None) for n in range(20)]
        events += [Event("all", 400 * MIB), Event("all", None)]  # one segment from here on
        events += [Event(f"b{n}", 20 * MIB) for n in range(20)]
        events += [Event(f"b{n}", None) for n in range(0, 20, 2)]
        last = Event("last", 40 * MIB)
        chunked = replay(ChunkedAllocator(2 * MIB, capacity), [*events, last])
        assert chunked.peaks["reserved_bytes"] == capacity
        best_fit = replay(BestFitAllocator(capacity), events)
        assert best_fit.reserved_bytes - best_fit.allocated_bytes == 200 * MIB
        with pytest.raises(allocators.OutOfMemory):
            best_fit.malloc(*last)
        best_fit.malloc("fits", 20 * MIB)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
class TestAll:
    @pytest.mark.slow
    @pytest.mark.parametrize("limited", [False, True])
    def test_random_requests(self, make, limited):
        """Counts and peaks are those of a slow count; what fits is served, and nothing overlaps."""
        unit, refused = UNITS.get(make, 5), 0
        for seed in range(6):
            capacity = 200 * unit if limited else None
            allocator, live, rows = make(capacity), {}, []
            for name, nbytes in random_events(seed, 150 if limited else 400, 80 * unit):
                if nbytes is not None:
                    try:
                        allocator.malloc(name, nbytes)
                    except allocators.OutOfMemory:
                        refused += 1
                        if type(allocator) is ChunkedAllocator:  # what is free serves, wherever
                            chunk, held = allocator.chunk_bytes, allocator.allocated_bytes
                            assert held + -(-nbytes // chunk) * chunk > capacity
                        continue
                    live[name] = nbytes
                elif name in live:
                    del live[name]
                    allocator.free(name)
                rows.append(self.counted(allocator, live))
            for column, name in zip(np.array(rows).T, allocators.QUANTITIES, strict=True):
                assert column.max() == allocator.peaks[name]
            self.check_end(allocator, live)
        assert refused > 5 if limited else not refused

    def counted(self, allocator, live: dict) -> tuple[int, ...]:
        """Return `QUANTITIES` by counting blocks; check that they are apart."""
        held, requested = blocks(allocator), sum(live.values())
        assert held.keys() == live.keys()
        if isinstance(allocator, BestFitAllocator):
            spans = sorted(held.values())
            allocated = sum(size for _, size in spans)
            # Live and free blocks tile the segments: nothing is lost.
            free = [piece for pool in allocator._free.values() for piece in pool.by_size]
            unused = allocator.reserved_bytes - allocator.allocated_bytes
            assert sum(size for size, *_ in free) == unused
            places = sorted([*spans, *((at + start, size) for size, at, start in free)])
            assert all(place + size <= after for (place, size), (after, _) in pairwise(places))
        else:
            chunks = [c for block in held.values() for c in block]
            assert allocator.small_bytes or len(chunks) == len(set(chunks))
            assert max(chunks, default=-1) < allocator.chunks_created
            allocated = len(set(chunks)) * allocator.chunk_bytes
            assert allocated - requested < max(1, len(live)) * allocator.chunk_bytes  # equation 2
        return requested, allocated, allocator.reserved_bytes, allocated - requested

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
        for nbytes in (0, 1.5, True):
            with pytest.raises(allocators.AllocatorError, match=r"for 'a' is .*: give whole bytes"):
                allocator.malloc("a", nbytes)
        allocator.malloc("a", np.int64(7))
        with pytest.raises(allocators.AllocatorError, match="'a' is live already"):
            allocator.malloc("a", 7)
        before = [getattr(allocator, name) for name in allocators.QUANTITIES]
        with pytest.raises(allocators.OutOfMemory):
            allocator.malloc("b", 101 * MIB)
        assert [getattr(allocator, name) for name in allocators.QUANTITIES] == before
        allocator.free("a")
        with pytest.raises(allocators.AllocatorError, match="'a' is not live"):
            allocator.free("a")
        with pytest.raises(allocators.AllocatorError, match="capacity_bytes is"):
            make(0)
