import random

import numpy as np
import pytest
from traces import chain

from repro.outofcore import plan_swaps
from repro.outofcore.allocator import (
    MIB,
    AllocatorError,
    BestFitAllocator,
    ChunkedAllocator,
    Event,
    OutOfMemory,
    replay,
)
from repro.outofcore.requests import requests


def random_events(rng: random.Random, n: int, largest: int) -> list[Event]:
    live: list[int] = []
    events = []
    for number in range(n):
        if live and rng.random() < 0.48:
            events.append(Event(live.pop(rng.randrange(len(live))), None))
        else:
            events.append(Event(number, int(largest ** rng.random())))
            live.append(number)
    return events


class TestChunked:
    def test_by_hand(self):
        allocator = ChunkedAllocator(10, 50)
        allocator.malloc("a", 25)  # 3 chunks
        allocator.malloc("b", 10)  # 1
        assert (allocator.requested_bytes, allocator.live_bytes) == (35, 40)
        assert (allocator.reserved_bytes, allocator.map_operations) == (40, 4)
        allocator.free("a")
        allocator.malloc("c", 30)  # the range of a, as it is
        assert (allocator.ranges_reused, allocator.map_operations) == (1, 4)
        allocator.free("c")
        allocator.malloc("d", 11)  # 2 of its 3 chunks, unmapped and mapped anew
        assert (allocator.reserved_bytes, allocator.map_operations) == (40, 4 + 3 + 2)
        allocator.malloc("e", 20)  # the third and a new one
        assert allocator.reserved_bytes == 50
        with pytest.raises(OutOfMemory, match="1 bytes do not fit: of 50 bytes, 50 are handed"):
            allocator.malloc("f", 1)
        allocator.free("b")
        allocator.malloc("f", 1)

    def test_the_bounds_of_equations_1_and_2(self):
        rng = random.Random(0)
        for chunk in (1, 7, 64, 4096):
            allocator = ChunkedAllocator(chunk)
            live: dict[int, int] = {}
            largest_count = 0
            for number in range(2000):
                if live and rng.random() < 0.5:
                    name = rng.choice(list(live))
                    allocator.free(name)
                    del live[name]
                else:
                    nbytes = rng.randint(1, 10_000)
                    before = allocator.live_bytes - allocator.requested_bytes
                    allocator.malloc(number, nbytes)
                    live[number] = nbytes
                    internal = allocator.live_bytes - allocator.requested_bytes - before
                    assert 0 <= internal < chunk
                largest_count = max(largest_count, len(live))
                assert allocator.requested_bytes == sum(live.values())
                assert allocator.live_bytes == sum(-(-b // chunk) * chunk for b in live.values())
                lost = allocator.live_bytes - allocator.requested_bytes
                assert lost < max(1, largest_count * chunk)
                assert allocator.live_bytes <= allocator.reserved_bytes

    def test_it_serves_whatever_fits_when_rounded(self):
        rng = random.Random(1)
        allocator = ChunkedAllocator(16, 16 * 40)
        live: dict[int, int] = {}
        for number in range(5000):
            nbytes = rng.randint(1, 200)
            room = 40 - sum(-(-b // 16) for b in live.values())
            if -(-nbytes // 16) <= room:
                allocator.malloc(number, nbytes)
                live[number] = nbytes
            else:
                with pytest.raises(OutOfMemory):
                    allocator.malloc(number, nbytes)
                name = rng.choice(list(live))
                allocator.free(name)
                del live[name]
            assert allocator.reserved_bytes <= 16 * 40

    @pytest.mark.parametrize("chunk", [0, -1, 1.5])
    def test_chunk_sizes(self, chunk):
        with pytest.raises(AllocatorError, match="above 0"):
            ChunkedAllocator(chunk)


class TestBestFit:
    def test_segments_by_hand(self):
        allocator = BestFitAllocator()
        allocator.malloc("small", 100)  # 512 of a segment of 2 MiB
        assert (allocator.live_bytes, allocator.reserved_bytes) == (512, 2 * MIB)
        allocator.malloc("middle", 3 * MIB)  # of a segment of 20 MiB
        assert allocator.reserved_bytes == 22 * MIB
        allocator.malloc("large", 11 * MIB + 1)  # of the 17 MiB that are left there
        assert allocator.reserved_bytes == 22 * MIB
        allocator.malloc("own", 11 * MIB + 1)  # a segment of 12 MiB, not split
        assert allocator.reserved_bytes == 34 * MIB
        assert allocator.live_bytes == 512 + 3 * MIB + (11 * MIB + 512) + 12 * MIB

    def test_the_smallest_block_that_fits(self):
        allocator = BestFitAllocator()
        for name, size in (("a", 20), ("b", 14), ("c", 16)):
            allocator.malloc(name, size * MIB)
        for name in "abc":
            allocator.free(name)
        allocator.malloc("d", 15 * MIB)
        assert allocator.places["d"][2] == 16 * MIB  # that of c, 1 MiB of which is not split off
        assert allocator.reserved_bytes == 50 * MIB

    def test_neighbours_are_joined(self):
        allocator = BestFitAllocator(20 * MIB)
        for name in "abcd":
            allocator.malloc(name, 5 * MIB)
        for name in "acbd":
            allocator.free(name)
        allocator.malloc("whole", 20 * MIB)
        assert allocator.reserved_bytes == 20 * MIB

    def test_blocks_never_overlap(self):
        rng = random.Random(2)
        allocator = BestFitAllocator()
        for event in random_events(rng, 4000, 30 * MIB):
            if event.nbytes is None:
                allocator.free(event.name)
            else:
                allocator.malloc(event.name, event.nbytes)
            if rng.random() < 0.02:
                ends: dict[int, int] = {}
                for segment, offset, size in sorted(allocator.places.values()):
                    assert ends.get(segment, 0) <= offset
                    ends[segment] = offset + size
        assert sum(size for _, _, size in allocator.places.values()) == allocator.live_bytes
        for name in tuple(allocator.places):
            allocator.free(name)
        allocator.give_back()
        assert allocator.reserved_bytes == allocator.live_bytes == 0

    def test_fragmentation_that_chunks_do_not_have(self):
        # Every second of 20 blocks is freed: half of the memory is free, and no two neighbours.
        events = [Event(i, 5 * MIB) for i in range(20)]
        events += [Event(i, None) for i in range(0, 20, 2)]
        events += [Event("large", 50 * MIB)]
        with pytest.raises(OutOfMemory):
            replay(BestFitAllocator(100 * MIB), events)
        report = replay(ChunkedAllocator(MIB, 100 * MIB), events)
        assert report.peak_reserved_bytes == report.peak_requested_bytes == 100 * MIB
        assert report.internal_bytes == 0
        assert report.overhead == 1

    def test_free_segments_go_back_when_the_device_is_full(self):
        allocator = BestFitAllocator(50 * MIB)
        allocator.malloc("a", 30 * MIB)
        allocator.free("a")
        allocator.malloc("b", 40 * MIB)
        assert allocator.reserved_bytes == 40 * MIB
        with pytest.raises(OutOfMemory):
            allocator.malloc("c", 12 * MIB)


@pytest.mark.parametrize("make", [BestFitAllocator, lambda: ChunkedAllocator(1024)])
class TestBoth:
    def test_peaks_by_a_slow_count(self, make):
        events = random_events(random.Random(4), 3000, 4 * MIB)
        report = replay(make(), events)
        live: dict[object, int] = {}
        requested = []
        for name, nbytes in events:
            if nbytes is None:
                del live[name]
            else:
                live[name] = nbytes
            requested.append(sum(live.values()))
        assert report.requested_bytes.tolist() == requested
        assert report.peak_requested_bytes == max(requested)
        assert np.all(report.live_bytes >= report.requested_bytes)
        assert np.all(report.reserved_bytes >= report.live_bytes)
        assert report.peak_reserved_bytes == report.reserved_bytes.max()

    def test_nothing_takes_nothing(self, make):
        allocator = make()
        allocator.malloc("none", 0)
        assert allocator.reserved_bytes == allocator.live_bytes == 0
        allocator.free("none")
        assert replay(make(), []).peak_reserved_bytes == 0

    def test_errors(self, make):
        allocator = make()
        allocator.malloc("a", 10)
        with pytest.raises(AllocatorError, match="'a' is handed out already"):
            allocator.malloc("a", 10)
        for nbytes in (-1, 1.5, True):
            with pytest.raises(AllocatorError, match="whole bytes"):
                allocator.malloc("b", nbytes)
        allocator.free("a")
        with pytest.raises(AllocatorError, match="'a' is not handed out"):
            allocator.free("a")


def test_requests_of_plans():
    trace = chain(8, width=10, weight=3)
    core = replay(ChunkedAllocator(1), requests(plan_swaps(trace, trace.peak_bytes)))
    assert core.peak_requested_bytes == trace.peak_bytes
    plan = plan_swaps(trace, 50)
    swapped = replay(ChunkedAllocator(1), requests(plan, iterations=3))
    assert swapped.peak_requested_bytes == plan.verify() <= 50
