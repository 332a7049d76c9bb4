import ctypes
import random
import threading

import pytest
import torch

from repro.outofcore.allocator import ChunkedAllocator
from repro.outofcore.native import ChunkedMemory, NativeError, build, install, installed_counters

PAGE = 4096


def write(address: int, nbytes: int, value: int) -> None:
    ctypes.memset(address, value, nbytes)


def holds(address: int, nbytes: int, value: int) -> bool:
    return ctypes.string_at(address, nbytes) == bytes([value]) * nbytes


@pytest.mark.slow
def test_a_million_operations_without_leak_or_overlap():
    rng = random.Random(0)
    choose, size = rng.randrange, [rng.randint(1, 12 * PAGE) for _ in range(997)]
    live: list[tuple[int, int, int]] = []
    chunk = 4 * PAGE
    with ChunkedMemory(chunk_bytes=chunk, limit_bytes=64 * chunk) as memory:
        word = ctypes.c_uint64
        refused = 0
        for number in range(1_000_000):
            if live and (len(live) >= 30 or choose(2)):
                at = choose(len(live))
                address, last, key = live[at]
                live[at] = live[-1]
                live.pop()
                # The first and last word still say who it is: nobody else was given the bytes.
                assert word.from_address(address).value == key
                assert word.from_address(last).value == key
                memory.free(address)
            else:
                nbytes = size[number % 997] + 8
                try:
                    address = memory.malloc(nbytes)
                except MemoryError:
                    refused += 1
                    continue
                last = (address + nbytes - 8) & ~7
                word.from_address(address).value = word.from_address(last).value = number
                live.append((address, last, number))
        counters = memory.counters()
        assert counters.failures == refused
        assert counters.peak_reserved_bytes <= 64 * chunk
        assert counters.ranges_reused > 100_000
        for address, _, _ in live:
            memory.free(address)
        memory.trim()
        counters = memory.counters()
        assert counters.requested_bytes == counters.live_bytes == counters.reserved_bytes == 0
        assert counters.chunks_mapped == counters.chunks_unmapped
        assert memory.resident_bytes() == 0


def test_counters_are_those_of_the_simulator():
    rng = random.Random(1)
    simulated = ChunkedAllocator(PAGE, 300 * PAGE)
    live: dict[int, int] = {}
    with ChunkedMemory(chunk_bytes=PAGE, limit_bytes=300 * PAGE) as memory:
        for number in range(5000):
            if live and rng.random() < 0.5:
                name = rng.choice(list(live))
                memory.free(live.pop(name))
                simulated.free(name)
            else:
                nbytes = rng.randint(1, 20 * PAGE)
                try:
                    simulated.malloc(number, nbytes)
                except MemoryError:
                    with pytest.raises(MemoryError, match="do not fit"):
                        memory.malloc(nbytes)
                    continue
                live[number] = memory.malloc(nbytes)
            counters = memory.counters()
            assert counters.requested_bytes == simulated.requested_bytes
            assert counters.live_bytes == simulated.live_bytes
            assert counters.reserved_bytes == simulated.reserved_bytes
            assert counters.ranges_reused == simulated.ranges_reused
            assert counters.chunks_mapped + counters.chunks_unmapped == simulated.map_operations


def test_values_survive_the_remapping_of_others():
    with ChunkedMemory(chunk_bytes=PAGE) as memory:
        kept = [memory.malloc(3 * PAGE) for _ in range(20)]
        for value, address in enumerate(kept):
            write(address, 3 * PAGE, value)
        for address in kept[::2]:
            memory.free(address)
        # Ranges of other sizes are made of the chunks that were freed.
        large = [memory.malloc(10 * PAGE) for _ in range(3)]
        for address in large:
            write(address, 10 * PAGE, 255)
        assert memory.counters().reserved_bytes == 60 * PAGE
        for value, address in list(enumerate(kept))[1::2]:
            assert holds(address, 3 * PAGE, value)
        for address in large:
            assert holds(address, 10 * PAGE, 255)


def test_a_range_of_the_same_size_is_reused_as_it_is():
    with ChunkedMemory(chunk_bytes=PAGE) as memory:
        first = memory.malloc(2 * PAGE)
        write(first, 2 * PAGE, 7)
        memory.free(first)
        assert memory.malloc(2 * PAGE - 5) == first
        assert holds(first, 2 * PAGE, 7)
        counters = memory.counters()
        assert (counters.ranges_reused, counters.chunks_mapped, counters.chunks_unmapped) == (
            1,
            2,
            0,
        )


class TestEvents:
    def test_an_old_mapping_stays_until_its_event_has_passed(self):
        with ChunkedMemory(chunk_bytes=PAGE, limit_bytes=4 * PAGE) as memory:
            old = memory.malloc(4 * PAGE)
            memory.hold_events(True)
            memory.free(old)
            new = memory.malloc(3 * PAGE)  # the same chunks, on the same stream
            assert new != old
            write(new, 3 * PAGE, 9)
            # A kernel that was given the old address may still run: it is not unmapped.
            assert ctypes.string_at(old, 4 * PAGE).count(9) == 3 * PAGE
            counters = memory.counters()
            assert (counters.ranges_waiting, counters.chunks_unmapped) == (1, 0)
            assert counters.event_waits == 0
            memory.hold_events(False)
            memory.free(memory.malloc(PAGE))
            counters = memory.counters()
            assert (counters.ranges_waiting, counters.chunks_unmapped) == (0, 4)
            assert holds(new, 3 * PAGE, 9)

    def test_another_stream_waits_for_the_event_or_takes_new_chunks(self):
        with ChunkedMemory(chunk_bytes=PAGE, limit_bytes=6 * PAGE) as memory:
            old = memory.malloc(4 * PAGE, stream=1)
            memory.hold_events(True)
            memory.free(old, stream=1)
            memory.malloc(2 * PAGE, stream=2)
            assert memory.counters().chunks_created == 6  # those of stream 1 may be in use
            assert memory.counters().event_waits == 0
            memory.malloc(2 * PAGE, stream=2)
            assert memory.counters().event_waits == 1  # the limit: the host waits, then takes them
            assert memory.counters().reserved_bytes == 6 * PAGE

    def test_another_stream_takes_them_once_it_has_passed(self):
        with ChunkedMemory(chunk_bytes=PAGE) as memory:
            memory.free(memory.malloc(4 * PAGE, stream=1), stream=1)
            memory.malloc(4 * PAGE, stream=2)
            assert memory.counters().chunks_created == 4


def test_the_limit_is_hard_and_says_so():
    with ChunkedMemory(chunk_bytes=PAGE, limit_bytes=3 * PAGE) as memory:
        held = memory.malloc(2 * PAGE)
        with pytest.raises(MemoryError, match="8192 bytes do not fit: 8192 bytes are in use"):
            memory.malloc(2 * PAGE)
        assert memory.counters().failures == 1
        memory.free(held)
        memory.malloc(3 * PAGE)
        assert memory.counters().peak_reserved_bytes <= 3 * PAGE


def test_trim_gives_memory_back():
    with ChunkedMemory(chunk_bytes=16 * PAGE) as memory:
        address = memory.malloc(64 * PAGE)
        write(address, 64 * PAGE, 1)
        assert memory.resident_bytes() >= 64 * PAGE
        memory.trim()
        assert memory.resident_bytes() >= 64 * PAGE  # it is in use
        memory.free(address)
        memory.trim()
        assert memory.resident_bytes() == memory.counters().reserved_bytes == 0


def test_threads():
    failures = []
    with ChunkedMemory(chunk_bytes=PAGE) as memory:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            live = []
            for _ in range(1500):
                nbytes = rng.randint(1, 8 * PAGE)
                address = memory.malloc(nbytes, stream=seed)
                write(address, nbytes, seed)
                live.append((address, nbytes))
                if len(live) > 5:
                    address, nbytes = live.pop(rng.randrange(len(live)))
                    if not holds(address, nbytes, seed):
                        failures.append(seed)
                    memory.free(address, stream=seed)
            for address, _ in live:
                memory.free(address, stream=seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert memory.counters().requested_bytes == 0


class TestErrors:
    def test_free(self):
        with ChunkedMemory(chunk_bytes=PAGE) as memory:
            address = memory.malloc(10)
            memory.free(address)
            with pytest.raises(ValueError, match="not handed out here, or was freed already"):
                memory.free(address)
            memory.free(0)  # as of a request of 0
            assert memory.malloc(0) == 0

    def test_arguments(self):
        with pytest.raises(ValueError, match="choose posix or cuda"):
            ChunkedMemory("metal")
        with pytest.raises(ValueError, match="chunk_bytes is 0"):
            ChunkedMemory(chunk_bytes=0)
        with pytest.raises(ValueError, match="limit_bytes is -1"):
            ChunkedMemory(limit_bytes=-1)
        with ChunkedMemory() as memory, pytest.raises(ValueError, match="nbytes is -1"):
            memory.malloc(-1)

    def test_closed(self):
        memory = ChunkedMemory(chunk_bytes=PAGE)
        memory.close()
        memory.close()
        with pytest.raises(NativeError, match="closed"):
            memory.malloc(1)

    def test_a_compiler_that_fails(self, monkeypatch, tmp_path):
        monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(NativeError, match="failed"):
            build()
        monkeypatch.setenv("CXX", str(tmp_path / "none"))
        with pytest.raises(NativeError, match="cannot be run"):
            build()
        assert list(tmp_path.iterdir()) == []

    def test_built_once(self, monkeypatch, tmp_path):
        monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
        path = build()
        made = path.stat().st_mtime_ns
        assert build() == path
        assert path.stat().st_mtime_ns == made

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu(self):
        with pytest.raises(NativeError, match="no CUDA driver"):
            ChunkedMemory("cuda")
        with pytest.raises(NativeError, match="no GPU"):
            install()
        with pytest.raises(NativeError, match="no GPU"):
            installed_counters()
