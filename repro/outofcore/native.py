"""The real chunked allocator, built from `csrc` at first use: for a GPU and, for tests, a CPU."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, fields
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Literal, Self

import torch

from repro.outofcore.allocator import PAPER_CHUNK_BYTES

_SOURCE = Path(__file__).with_name("csrc") / "chunked_allocator.cpp"
_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra")
_LIBRARIES = ("-ldl", "-lpthread")


class NativeError(RuntimeError):
    """The native allocator cannot be built, made or used as asked."""


@dataclass(frozen=True)
class Counters:
    """What a native allocator has done.

    Attributes:
        requested_bytes: Bytes asked for and not freed.
        live_bytes: The same, each request rounded up to chunks.
        reserved_bytes: Bytes of all physical chunks.
        peak_requested_bytes: The most of `requested_bytes`; the others likewise.
        peak_live_bytes: The most of `live_bytes`.
        peak_reserved_bytes: The most of `reserved_bytes`.
        chunks_created: Physical chunks taken from the device.
        chunks_mapped: Chunks mapped into a range, each time.
        chunks_unmapped: Chunks unmapped from one.
        ranges_reused: Requests that took a freed range as it was.
        ranges_waiting: Mappings that wait for the event of their last use.
        event_waits: Times that the host waited for an event.
        failures: Requests that failed.
    """

    requested_bytes: int
    live_bytes: int
    reserved_bytes: int
    peak_requested_bytes: int
    peak_live_bytes: int
    peak_reserved_bytes: int
    chunks_created: int
    chunks_mapped: int
    chunks_unmapped: int
    ranges_reused: int
    ranges_waiting: int
    event_waits: int
    failures: int


class _RawCounters(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_uint64) for field in fields(Counters)]


def _counters(raw: _RawCounters) -> Counters:
    return Counters(**{field.name: int(getattr(raw, field.name)) for field in fields(Counters)})


def _cache_folder() -> Path:
    folder = os.environ.get("REPRO_CACHE")
    if not folder:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = str(Path(home) / "repro")
    return Path(folder).expanduser()


def build() -> Path:
    """Build the library, unless the same source was built before, and return its path.

    The compiler is `$CXX`, else ``c++`` or ``g++``; nothing of CUDA is needed. The library lies in
    `$REPRO_CACHE`, else in the user's cache folder.

    Raises:
        NativeError: There is no compiler, or it fails.
    """
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++"))), None)
    if compiler is None:
        raise NativeError("there is no C++ compiler: install g++, or name one in $CXX")
    source = _SOURCE.read_bytes()
    key = sha256(b"\0".join([source, compiler.encode(), *map(str.encode, _FLAGS)])).hexdigest()
    target = _cache_folder() / f"chunked_allocator-{key[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(made), *_LIBRARIES]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise NativeError(f"the compiler {compiler} cannot be run: {error}") from error
        if done.returncode != 0:
            raise NativeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
        made.replace(target)  # at once: another process may build the same
    return target


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.chunked_create.restype = pointer
    library.chunked_create.argtypes = [
        ctypes.c_int, ctypes.c_int, size, size, ctypes.c_char_p, size,
    ]  # fmt: skip
    library.chunked_destroy.argtypes = library.chunked_trim.argtypes = [pointer]
    library.chunked_malloc.restype = pointer
    library.chunked_malloc.argtypes = [pointer, size, pointer]
    library.chunked_free.argtypes = [pointer, pointer, pointer]
    library.chunked_hold.argtypes = [pointer, ctypes.c_int]
    library.chunked_error.restype = ctypes.c_char_p
    library.chunked_error.argtypes = [pointer]
    library.chunked_resident.restype = size
    library.chunked_resident.argtypes = [pointer]
    library.chunked_counters.argtypes = [pointer, ctypes.POINTER(_RawCounters)]
    library.torch_configure.argtypes = [size, size]
    library.torch_counters.argtypes = [ctypes.c_int, ctypes.POINTER(_RawCounters)]
    return library


def _check_sizes(chunk_bytes: int, limit_bytes: int | None) -> None:
    for name, value in (("chunk_bytes", chunk_bytes), ("limit_bytes", limit_bytes)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ValueError(f"{name} is {value!r}: give whole bytes above 0")


class ChunkedMemory:
    """A native chunked allocator: section 4, with real memory.

    Args:
        backend: ``"posix"``, chunks of an anonymous file mapped into ranges of this process, or
            ``"cuda"``, the driver's virtual memory management.
        chunk_bytes: m_c, rounded up to a page, or to what the device asks for (2 MiB).
        limit_bytes: The most bytes of physical chunks; None for no limit.
        device: The number of the GPU.

    Raises:
        NativeError: It cannot be built, or there is no such device.
        ValueError: A size is not positive.
    """

    def __init__(
        self,
        backend: Literal["posix", "cuda"] = "posix",
        chunk_bytes: int = PAPER_CHUNK_BYTES,
        limit_bytes: int | None = None,
        device: int = 0,
    ) -> None:
        if backend not in ("posix", "cuda"):
            raise ValueError(f"the backend {backend!r} is not known: choose posix or cuda")
        _check_sizes(chunk_bytes, limit_bytes)
        self._library = _library()
        error = ctypes.create_string_buffer(512)
        self._self = self._library.chunked_create(
            backend == "cuda", device, chunk_bytes, limit_bytes or 0, error, len(error)
        )
        if not self._self:
            raise NativeError(f"the {backend} allocator cannot be made: {error.value.decode()}")

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """Return the address of `nbytes` bytes for work on a stream; 0 for a request of 0.

        Raises:
            MemoryError: They do not fit; the message has the numbers.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}: give 0 or more")
        address = self._library.chunked_malloc(self._open(), nbytes, stream)
        if not address and nbytes:
            raise MemoryError(self._library.chunked_error(self._self).decode())
        return address or 0

    def free(self, address: int, stream: int = 0) -> None:
        """Take an address back, whose last use has been given to a stream.

        Raises:
            ValueError: It was not handed out here, or was freed already.
        """
        if self._library.chunked_free(self._open(), address, stream):
            raise ValueError(f"{address:#x}: {self._library.chunked_error(self._self).decode()}")

    def trim(self) -> None:
        """Unmap all that is not in use, and give its chunks back to the system."""
        self._library.chunked_trim(self._open())

    def hold_events(self, held: bool) -> None:
        """On ``posix``, let no further event pass, as if a GPU were still at work; or all."""
        self._library.chunked_hold(self._open(), held)

    def resident_bytes(self) -> int:
        """On ``posix``, the bytes that the system has given to the chunks."""
        return int(self._library.chunked_resident(self._open()))

    def counters(self) -> Counters:
        """Return what it has done so far."""
        raw = _RawCounters()
        self._library.chunked_counters(self._open(), ctypes.byref(raw))
        return _counters(raw)

    def close(self) -> None:
        """Give everything back, what is in use included."""
        if self._self:
            self._library.chunked_destroy(self._self)
            self._self = None

    def _open(self) -> int:
        if not self._self:
            raise NativeError("this allocator is closed: make another")
        return int(self._self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def install(chunk_bytes: int = PAPER_CHUNK_BYTES, limit_bytes: int | None = None) -> None:
    """Let torch take all memory of its GPUs from chunked allocators, from now to its end.

    `installed_counters` tells what they do; torch's own memory statistics stay empty.

    Args:
        chunk_bytes: m_c, rounded up to 2 MiB.
        limit_bytes: The most bytes on each GPU; None for no limit.

    Raises:
        NativeError: There is no GPU, torch has used one already, or the build fails.
        ValueError: A size is not positive.
    """
    _check_sizes(chunk_bytes, limit_bytes)
    if not torch.cuda.is_available():
        raise NativeError("there is no GPU whose memory could be allocated in chunks")
    if torch.cuda.is_initialized():
        raise NativeError("torch has used CUDA already: call install() before anything else does")
    _library().torch_configure(chunk_bytes, limit_bytes or 0)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(build()), "torch_malloc", "torch_free")
    torch.cuda.memory.change_current_allocator(allocator)


def installed_counters(device: int = 0) -> Counters:
    """Return what the chunked allocator of a GPU has done since `install`."""
    if not torch.cuda.is_available():
        raise NativeError("there is no GPU, so that nothing can be installed")
    raw = _RawCounters()
    _library().torch_counters(device, ctypes.byref(raw))
    return _counters(raw)
