"""The allocator's CUDA backend on a stub of the driver, in a process whose driver it is.

`test_native_gpu` has the real one.
"""

import ctypes
import multiprocessing
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from repro.outofcore import native
from repro.outofcore.native import ChunkedMemory, Installed, NativeOutOfMemory

HERE = Path(__file__).parent
CHUNK = 2**21
LIMIT = 64 * CHUNK  # of the stub's devices
UNKNOWN = 999


def compile_library(source: Path, target: Path, *options: str) -> None:
    compiler = [*native._compiler(), "-std=c++20", "-shared", "-fPIC"]
    subprocess.run([*compiler, str(source), "-o", str(target), *options], check=True)


@pytest.fixture(scope="module")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    compile_library(HERE / "cuda_stub.cpp", folder / "libcuda.so.1", f"-I{native.SOURCES}")
    return folder


@pytest.fixture(scope="module")
def process(driver_folder: Path) -> Iterator[ProcessPoolExecutor]:
    """A process in which the stub is the driver."""
    native.build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(driver_folder))
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            yield pool


def on_the_stub(body: Callable[[], None]) -> Callable[[ProcessPoolExecutor], None]:
    """Make a test run in that process."""

    def test(process: ProcessPoolExecutor) -> None:
        process.submit(run, body.__name__).result(300)

    test.body = body  # type: ignore[attr-defined]
    return test


def run(name: str) -> None:
    driver().stub_forgive()
    try:
        globals()[name].body()
        assert refusal() == "" and left() == [0] * 5
    finally:
        driver().stub_fail(-1, 0)
        driver().stub_limit(LIMIT)


@cache
def driver() -> ctypes.CDLL:
    library, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64
    library.stub_hold.argtypes = [number, ctypes.c_int]
    library.stub_fill.argtypes = [number, number, number, ctypes.c_int]
    library.stub_fail.argtypes = [ctypes.c_long, ctypes.c_int]
    library.stub_limit.argtypes = [number]
    library.stub_failed.restype = library.stub_refusal.restype = ctypes.c_char_p
    library.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    return library


def refusal() -> str:
    """The first rule of the driver that was broken."""
    return driver().stub_refusal().decode()


def left() -> list[int]:
    """Contexts, chunks, ranges, mappings and events that are held."""
    counts = (ctypes.c_int * 5)()
    driver().stub_left(counts)
    return list(counts)


def fill(stream: int, address: int, value: int, nbytes: int = CHUNK) -> None:
    driver().stub_fill(stream, address, nbytes, value)


def byte(address: int) -> int:
    return ctypes.c_ubyte.from_address(address).value


word = ctypes.c_uint32.from_address


@pytest.mark.slow
@on_the_stub
def test_work_that_the_device_has_yet_to_do_keeps_its_memory():
    with ChunkedMemory("cuda", CHUNK) as memory:
        driver().stub_hold(7, True)
        old = memory.malloc(2 * CHUNK, 7)
        fill(7, old, 3, 2 * CHUNK)
        memory.free(old, 7)
        new = memory.malloc(CHUNK, 7)  # a chunk of it, by another address
        assert memory.counters().retired_ranges == 1
        other = memory.malloc(CHUNK, 8)  # of which another stream has none
        fill(8, other, 5)
        driver().stub_hold(7, False)
        assert (byte(new), byte(other)) == (3, 5)
        memory.trim()
        assert memory.counters().retired_ranges == 0
        driver().stub_hold(8, True)
        memory.record_stream(new, 8)
        fill(8, new, 4)
        memory.free(new, 7)
        assert memory.malloc(CHUNK, 7) != new
        driver().stub_hold(8, False)
        assert memory.malloc(CHUNK, 7) == new and byte(new) == 4


@on_the_stub
def test_the_thread_keeps_its_own_context():
    def check(number: int) -> None:
        assert driver().stub_current() == number, number

    check(-1)
    with ChunkedMemory("cuda", CHUNK) as memory:
        address = memory.malloc(1)
        check(-1)
        memory.free(address)
    with ChunkedMemory("cuda", CHUNK, device=0), ChunkedMemory("cuda", CHUNK, device=1) as second:
        context = ctypes.c_void_p()
        driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        driver().cuCtxSetCurrent(context)
        second.malloc(5)
        with pytest.raises(NativeOutOfMemory):
            second.malloc(LIMIT + 1)
        second.trim()
        check(0)
    check(0)
    driver().cuCtxSetCurrent(None)
    driver().cuDevicePrimaryCtxRelease_v2(0)


def scenario(memory: ChunkedMemory) -> None:
    """Use each function of the driver, and each way to get memory."""
    driver().stub_hold(7, True)
    kept, first = memory.malloc(CHUNK, 7), memory.malloc(3 * CHUNK, 7)
    small = memory.malloc(9, 7)
    memory.record_stream(first, 8)
    memory.free(first, 7)
    memory.free(memory.malloc(2 * CHUNK, 7), 7)
    again = memory.malloc(3 * CHUNK, 8)
    driver().stub_hold(7, False)
    memory.free(memory.malloc(CHUNK, 7), 7)
    memory.free(kept, 7)
    memory.free(small, 8)
    memory.free(again, 8)
    memory.trim()


@on_the_stub
def test_a_call_that_fails_is_named_and_nothing_is_lost():
    def memory() -> ChunkedMemory:
        return ChunkedMemory("cuda", CHUNK, 6 * CHUNK, small_bytes=100)

    before = driver().stub_calls()
    with memory() as made:
        scenario(made)
        count = driver().stub_calls() - before
    seen = set()
    for number in range(count):
        made, caught = None, ""
        driver().stub_fail(number, UNKNOWN)
        try:
            made = memory()
            scenario(made)
        except RuntimeError as error:
            caught = str(error)
        failed = driver().stub_failed().decode()
        seen.add(failed)
        expected = f"{failed.removesuffix('_v2')}: WRONG (999)"
        # What puts the caller's context back cannot throw.
        assert caught == expected or (failed == "cuCtxSetCurrent" and not caught), (number, caught)
        if made is not None:
            live = made.counters().allocated_bytes
            made.trim()
            c = made.counters()
            assert c.failures <= 1 and c.cached_ranges == c.retired_ranges == 0, (number, c)
            assert c.requested_bytes <= c.allocated_bytes == c.reserved_bytes <= live, (number, c)
            assert c.live_blocks == c.mallocs - c.frees, (number, c)
            made.close()
        # Addresses that the driver does not take back have no owner any more.
        lost = [0, 0, int(failed == "cuMemAddressFree"), 0, 0]
        assert left() == lost and not refusal(), (number, failed, left(), refusal())
        driver().stub_start_again()
    assert len(seen) == 17, seen  # all but what shows errors, and what only closing calls


@on_the_stub
def test_out_of_memory_is_told_as_such_wherever_it_comes():
    with ChunkedMemory("cuda", CHUNK) as memory:
        driver().stub_limit(3 * CHUNK)
        held = memory.malloc(2 * CHUNK)
        for count in (2, 5):
            with pytest.raises(NativeOutOfMemory, match="the device has no more"):
                memory.malloc(count * CHUNK)
        memory.free(memory.malloc(CHUNK))
        memory.free(held)
        assert memory.counters().failures == 2


@pytest.mark.slow
def test_what_torch_calls(process: ProcessPoolExecutor, tmp_path: Path):
    caller = tmp_path / "caller.so"
    compile_library(HERE / "torch_caller.cpp", caller, *native.FLAGS[-1:], *native.LIBRARIES)
    process.submit(as_torch_calls, caller).result(300)


def as_torch_calls(caller: Path) -> None:
    import torch  # whose c10 the library is linked with

    assert torch.cuda.is_available() is False
    library = native._load(native.build())
    plug, release = library.ca_plug_malloc, library.ca_plug_free
    plug.restype, plug.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    release.restype, release.argtypes = None, [ctypes.c_void_p, *plug.argtypes]
    library.ca_plug_record_stream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def thrown(nbytes: int) -> tuple[int, str]:
        message = ctypes.create_string_buffer(500)
        call = ctypes.CDLL(str(caller)).call_malloc
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
        status = call(ctypes.cast(plug, ctypes.c_void_p), nbytes, message, 500)
        return status, message.value.decode()

    status, message = thrown(1)
    assert status == 1 and "ca_plug_configure comes before" in message
    assert library.ca_plug_configure(3, 0, 2 * CHUNK) == 0
    assert library.ca_plug_configure(3, 0, 0) == 1
    installed = Installed(native.build(), 3, None)
    first, second = plug(5, 0, None), plug(CHUNK + 1, 1, 77)
    assert plug(0, 0, None) is None
    library.ca_plug_record_stream(second, 78)
    assert [installed.counters(d).reserved_bytes for d in (0, 1)] == [CHUNK, 2 * CHUNK]
    status, message = thrown(CHUNK + 1)
    assert status == 2 and message.startswith("out of memory, the limit is reached: 2097153 bytes")
    driver().stub_fail(2, UNKNOWN)
    status, message = thrown(1)
    assert (status, message) == (1, "cuMemCreate: WRONG (999)")
    word(first).value = 9
    release(first, 5, 0, None)
    release(second, CHUNK + 1, 1, 77)
    release(None, 0, 0, None)
    release(first, 5, 0, None)  # an error, which is not thrown but counted
    assert installed.counters(0).failures == 3 and word(plug(7, 0, None)).value == 9
    installed.trim(1)
    assert installed.counters(1).reserved_bytes == 0
    library.ca_plug_empty_cache()
    assert installed.counters(0).reserved_bytes == CHUNK and refusal() == ""
