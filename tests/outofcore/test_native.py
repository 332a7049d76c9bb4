"""The native allocator on host memory; `test_cuda_stub` and `test_native_gpu` have the driver."""

import ctypes
import os
import random
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from repro.outofcore import native
from repro.outofcore.allocator import AllocatorError, ChunkedAllocator, OutOfMemory
from repro.outofcore.native import AllocatorBuildError, ChunkedMemory, NativeOutOfMemory, build

PAGE = os.sysconf("SC_PAGESIZE")


def write(address: int, value: int, nbytes: int = PAGE) -> None:
    ctypes.memset(address, value, nbytes)


def read(address: int) -> int:
    return ctypes.c_ubyte.from_address(address).value


@pytest.fixture
def memory():
    with ChunkedMemory("posix", PAGE) as made:
        yield made


def check_empty(memory: ChunkedMemory) -> None:
    memory.trim()
    c = memory.counters()
    assert c.requested_bytes == c.allocated_bytes == c.reserved_bytes == c.physical_bytes == 0
    assert c.live_blocks == c.cached_ranges == c.retired_ranges == 0
    assert c.chunks_created == c.chunks_released and c.maps == c.unmaps
    assert c.mallocs == c.frees


@pytest.mark.slow
@pytest.mark.parametrize("small_bytes", [0, PAGE // 2])
def test_many_operations_without_leak_or_overlap(small_bytes):
    rng, operations = random.Random(0), 50_000
    mappings = len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    with ChunkedMemory("posix", PAGE, 128 * PAGE, small_bytes=small_bytes) as memory:
        word, live, refused = ctypes.c_uint32.from_address, [], 0
        for stream in (1, 2):
            memory.set_complete(stream, False)
        for number in range(operations):
            if live and (len(live) == 40 or rng.random() < 0.5):
                at = rng.randrange(len(live))
                live[at], last = live[-1], live[at]
                live.pop()
                address, ends, mark, stream = last
                # The first and last word in each chunk are as they were written.
                for at in ends:
                    assert word(address + at).value == mark
                memory.free(address, stream if rng.random() < 0.9 else 3 - stream)
            else:
                count, stream = min(rng.randrange(1, 9), rng.randrange(1, 9)), rng.randrange(3)
                nbytes = count * PAGE - rng.randrange(PAGE)
                try:
                    address = memory.malloc(nbytes, stream)
                except NativeOutOfMemory:
                    refused += 1
                    continue
                within = [start + at for start in range(0, nbytes, PAGE) for at in (0, PAGE - 4)]
                ends = [at for at in within if at + 4 <= nbytes]
                for at in ends:
                    word(address + at).value = number
                live.append((address, ends, number, stream))
            if number % 500 == 0:
                memory.set_complete(1 + number % 2, rng.random() < 0.5)
        c = memory.counters()
        assert c.mallocs + c.frees + refused == operations and c.failures == refused
        assert c.peak_reserved_bytes <= 128 * PAGE and c.live_blocks == len(live)
        assert small_bytes == 0 or c.shared_chunks > 0
        assert c.ranges_reused > operations / 10 < c.maps and c.event_waits > 0
        for address, _, _, stream in live:
            memory.free(address, stream)
        check_empty(memory)
    assert len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()) < mappings + 20


@pytest.mark.slow
@pytest.mark.parametrize("small_bytes", [0, 700, PAGE])
@pytest.mark.parametrize("seed", range(2))
def test_counters_are_those_of_the_simulator(seed, small_bytes):
    rng, limit, live = random.Random(seed), 60 * PAGE, []
    simulated = ChunkedAllocator(PAGE, limit, small_bytes)
    with ChunkedMemory("posix", PAGE, limit, small_bytes=small_bytes) as memory:
        addresses, refused = {}, 0
        for number in range(1_500):
            if live and rng.random() < 0.49:
                name = live.pop(rng.randrange(len(live)))
                simulated.free(name)
                memory.free(addresses.pop(name))
            else:
                nbytes = int((20 * PAGE) ** rng.random())
                try:
                    simulated.malloc(number, nbytes)
                except OutOfMemory:
                    refused += 1
                    with pytest.raises(NativeOutOfMemory):
                        memory.malloc(nbytes)
                else:
                    addresses[number] = memory.malloc(nbytes)
                    live.append(number)
            c = memory.counters()
            sizes = ("requested_bytes", "allocated_bytes", "reserved_bytes")
            for name in (*sizes, "chunks_created", "ranges_reused", "maps", "unmaps"):
                assert getattr(c, name) == getattr(simulated, name), name
            assert c.shared_chunks == len(simulated._shared)
        assert c.failures == refused
        for name in ("requested_bytes", "allocated_bytes", "reserved_bytes"):
            assert getattr(c, f"peak_{name}") == simulated.peaks[name]
        peak = simulated.peaks["internal_fragmentation_bytes"]
        assert c.peak_internal_fragmentation_bytes == peak


def test_the_limit_is_hard():
    with ChunkedMemory("posix", PAGE, limit_bytes=4 * PAGE + 1) as memory:
        assert memory.malloc(0) == 0  # nothing takes nothing
        memory.free(0)
        for _ in range(3):
            memory.malloc(1)
        with pytest.raises(NativeOutOfMemory) as caught:
            memory.malloc(PAGE + 1)
        for part in ("limit is reached", f"{PAGE + 1} bytes", f"{3 * PAGE} are live, 0 cached"):
            assert part in str(caught.value)
        memory.malloc(PAGE)
        with pytest.raises(NativeOutOfMemory):
            memory.malloc(2**62)


class TestStreams:
    def test_a_mapping_stays_until_its_last_use_has_run(self, memory):
        memory.set_complete(7, False)
        old = memory.malloc(2 * PAGE, 7)
        write(old, 3, 2 * PAGE)
        memory.free(old, 7)
        new = memory.malloc(PAGE, 7)  # one of its chunks, at once
        c = memory.counters()
        assert (c.chunks_created, c.retired_ranges, c.unmaps, c.event_waits) == (2, 1, 0, 0)
        write(new, 4)
        # What the device has yet to run goes through the old address, to the same memory.
        assert sorted(read(old + n * PAGE) for n in range(2)) == [3, 4]
        memory.set_complete(7, True)
        memory.malloc(PAGE, 7)
        c = memory.counters()
        assert (c.chunks_created, c.retired_ranges, c.unmaps) == (2, 0, 2)

    @pytest.mark.parametrize("count", [1, 2])
    def test_another_stream_has_it_only_when_its_last_use_has_run(self, memory, count):
        memory.set_complete(7, False)
        old = memory.malloc(2 * PAGE, 7)
        memory.free(old, 7)
        assert memory.malloc(2 * PAGE, 7) == old  # the same stream at once
        write(old, 3, 2 * PAGE)
        memory.free(old, 7)
        assert read(memory.malloc(count * PAGE, 8)) == 0
        assert memory.counters().chunks_created == 2 + count
        memory.set_complete(7, True)
        assert read(memory.malloc(count * PAGE, 8)) == 3
        assert memory.counters().chunks_created == 2 + count
        assert memory.counters().event_waits == 0

    def test_a_block_may_be_freed_on_another_stream(self, memory):
        # Stream 7 has yet to run what used the chunk under its first owner.
        memory.set_complete(7, False)
        old = memory.malloc(PAGE, 7)
        memory.free(old, 7)
        assert memory.malloc(PAGE, 7) == old
        memory.free(old, 8)
        assert memory.malloc(PAGE, 8) != old
        memory.set_complete(7, True)
        assert memory.malloc(PAGE, 8) == old


class TestSmall:
    """Requests that share chunks, of 512 bytes at least."""

    @pytest.fixture
    def memory(self):
        with ChunkedMemory("posix", PAGE, 3 * PAGE, small_bytes=PAGE // 2) as made:
            yield made

    def test_two_frees_are_told(self, memory):
        first, _ = memory.malloc(100), memory.malloc(100)  # the first lies where its chunk begins
        memory.free(first)
        with pytest.raises(AllocatorError, match="it was freed before"):
            memory.free(first)
        assert memory.counters().live_blocks == 1

    def test_streams(self, memory):
        """They share no chunk; a piece comes back when all streams that used it have run."""
        one, other = memory.malloc(512, 7), memory.malloc(512, 8)
        assert abs(other - one) >= PAGE and memory.counters().shared_chunks == 2
        piece = memory.malloc(1024, 7)
        memory.record_stream(piece, 9)
        memory.set_complete(9, False)
        memory.free(piece, 7)
        assert memory.malloc(1024, 7) != piece
        memory.set_complete(9, True)
        assert memory.malloc(1024, 7) == piece


def test_threads():
    with ChunkedMemory("posix", PAGE, limit_bytes=400 * PAGE) as memory:

        def work(seed: int) -> int:
            rng, live = random.Random(seed), []
            for _ in range(4_000):
                if live and (len(live) == 8 or rng.random() < 0.5):
                    address, count = live.pop(rng.randrange(len(live)))
                    for n in range(count):
                        assert ctypes.string_at(address + n * PAGE, 16) == bytes([1 + seed]) * 16
                    memory.free(address, seed)
                else:
                    count = rng.randint(1, 6)
                    address = memory.malloc(count * PAGE, seed)
                    write(address, 1 + seed, count * PAGE)
                    live.append((address, count))
            for address, _ in live:
                memory.free(address, seed)
            return threading.get_ident()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert memory.counters().failures == 0
        check_empty(memory)


class TestErrors:
    def test_free(self, memory):
        address = memory.malloc(2 * PAGE)
        with ChunkedMemory("posix", PAGE) as other:
            for owner, wrong in ((memory, address + 1), (memory, address + PAGE), (memory, 12345),
                                 (other, address)):  # fmt: skip
                with pytest.raises(AllocatorError, match="not the address of a live block"):
                    owner.free(wrong)
            assert (memory.counters().live_blocks, other.counters().live_blocks) == (1, 0)
        memory.free(address)
        with pytest.raises(AllocatorError, match="it was freed before"):
            memory.free(address)
        with pytest.raises(AllocatorError, match="record_stream"):
            memory.record_stream(address, 1)
        assert memory.counters().failures == 4

    def test_what_is_refused(self):
        for given, message in (
            (("posix", PAGE, None, PAGE + 1), rf"small_bytes is {PAGE + 1}.* one chunk"),
            (("posix", PAGE, None, -1), "small_bytes is -1: give whole bytes, 0 or more"),
            *((("posix", wrong), "chunk_bytes is") for wrong in (0, -1, 1.5, 2**63)),
            *((("posix", PAGE, wrong), "limit_bytes is") for wrong in (0, -1, 1.5, 2**63)),
            (("posix", PAGE, PAGE - 1), "less than one chunk"),
            (("mps",), '"mps": choose cuda or posix'),
        ):
            options = {"small_bytes": given[3]} if len(given) > 3 else {}
            with pytest.raises(AllocatorError, match=message):
                ChunkedMemory(*given[:3], **options)
        memory = ChunkedMemory("posix", PAGE)
        for wrong in (-1, 1.5, True, "1", 2**63):
            with pytest.raises(AllocatorError, match=r"nbytes is .*: give whole bytes"):
                memory.malloc(wrong)
        memory.malloc(PAGE)
        memory.close()
        memory.close()
        with pytest.raises(AllocatorError, match="closed"):
            memory.malloc(1)


@pytest.fixture(scope="module")
def built() -> bytes:
    """The library that the other tests have built."""
    return build().read_bytes()[: -native._DIGEST_BYTES]


class TestBuild:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def compiler(self, tmp_path, monkeypatch, body: str) -> None:
        """A compiler of a shell's, with an argument, as it may have; `$out` is what it makes."""
        compiler = tmp_path / "compiler"
        find = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done; '
        compiler.write_text(f'#!/bin/sh\n[ "$2" = --version ] || {{ {find}{body}; }}\n')
        compiler.chmod(stat.S_IRWXU)
        monkeypatch.setenv("CXX", f"'{compiler}' -O0")

    @pytest.fixture
    def no_library(self, tmp_path, monkeypatch):
        """A compiler that takes no time; the libraries it makes cannot be loaded."""
        self.compiler(tmp_path, monkeypatch, 'echo made > "$out"')

    def test_what_cannot_be_built(self, folder, tmp_path, monkeypatch):
        self.compiler(tmp_path, monkeypatch, "echo oh dear >&2; exit 3")
        with pytest.raises(AllocatorBuildError, match=r"(?s)status 3: \S+ -O0 .*oh dear"):
            build()
        assert list(next(folder.iterdir()).iterdir()) == []
        monkeypatch.setenv("CXX", "no-such-compiler")
        with pytest.raises(AllocatorBuildError, match=r"\$CXX is 'no-such-compiler'; install one"):
            build()
        monkeypatch.delenv("CXX")
        with monkeypatch.context() as context:
            context.setenv("PATH", "")
            with pytest.raises(AllocatorBuildError, match=r"no c\+\+ and no g\+\+"):
                build()
        monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "compiler" / "cache"))
        with pytest.raises(AllocatorBuildError, match="name a folder that can be written"):
            build()

    @pytest.mark.parametrize("fault", ["open", "another's", "link"])
    def test_a_folder_that_others_could_fill_is_refused(self, tmp_path, fault, no_library):
        umask = os.umask(0)
        try:
            parent = build().parent
        finally:
            os.umask(umask)
        if fault == "open":
            parent.chmod(0o770)
        elif fault == "another's":
            if os.geteuid() != 0:
                pytest.skip("only root gives folders away")
            os.chown(parent, 12345, -1)
        else:
            parent.rename(tmp_path / "elsewhere")
            parent.symlink_to(tmp_path / "elsewhere")
        for act in (build, lambda: ChunkedMemory("posix", 4096)):
            with pytest.raises(AllocatorBuildError, match=r"closed to others.*\$REPRO_CACHE"):
                act()

    @pytest.mark.slow
    def test_the_code_of_a_planted_library_does_not_run(self, tmp_path, monkeypatch, built, caplog):
        """Loading alone would run it: the folder above is everybody's, and its name is known."""
        cache, mark = tmp_path / "cache", tmp_path / "it ran"
        (tmp_path / "built").write_bytes(built)
        cache.mkdir()
        cache.chmod(0o777)
        source = tmp_path / "planted.c"
        source.write_text(
            "#include <stdio.h>\n__attribute__((constructor)) static void run(void) {"
            f'fclose(fopen("{mark}", "w"));}}\n'
        )
        planted = tmp_path / "planted.so"
        command = [*native._compiler(), "-x", "c", "-shared", "-fPIC", str(source)]
        subprocess.run([*command, "-o", str(planted)], check=True)
        ctypes.CDLL(str(planted))
        assert mark.exists()  # as it should where it is loaded
        mark.unlink()
        self.compiler(tmp_path, monkeypatch, f'cp {tmp_path}/built "$out"')
        library = build()
        good = library.read_bytes()
        for content in (planted.read_bytes(), good[:-1], bytes([good[0] ^ 1]) + good[1:], b""):
            library.write_bytes(content)
            with pytest.raises(AllocatorBuildError, match="damaged, or not what was built"):
                native._load(library)
            caplog.clear()
            assert build().read_bytes() == good and "building again" in caplog.text
        library.write_bytes(planted.read_bytes())
        with ChunkedMemory("posix", 4096) as memory:
            memory.free(memory.malloc(1))
        assert not mark.exists() and stat.S_IMODE(library.stat().st_mode) == 0o700
        loaded = native._load(library)  # which torch opens by the same name
        assert ctypes.CDLL(loaded._name)._handle == loaded._handle
