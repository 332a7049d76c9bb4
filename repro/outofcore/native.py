"""The chunked allocator of section 4 in C++: on CUDA by the driver, and on host memory for tests.

The library is compiled at first use; no toolkit is needed. It is executable code: it is kept in a
private folder of this user, and ends with a digest of its content. `csrc/chunked_allocator.cpp`
explains the method.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch

from repro.measure.files import cache_folder, replacing
from repro.outofcore.allocator import PAPER_CHUNK_BYTES, AllocatorError, checked

SOURCES = Path(__file__).with_name("csrc")
_TORCH = Path(torch.__file__).parent
FLAGS = (
    *("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    f"-isystem{_TORCH / 'include'}",
)
# torch has loaded its libraries already: here the linker finds them by name.
LIBRARIES = ("-ldl", "-lpthread", f"-L{_TORCH / 'lib'}", "-lc10")
_LARGEST = 2**63 - 1
_DIGEST_BYTES = 32

logger = logging.getLogger(__name__)


class AllocatorBuildError(RuntimeError):
    """The library of the chunked allocator cannot be built, or cannot be trusted."""


class NoCompilerError(AllocatorBuildError):
    """There is no C++ compiler."""


class NativeOutOfMemory(MemoryError):
    """A request exceeds the limit or the device's memory; the message states the bytes."""


class Counters(ctypes.Structure):
    """The state and history of an allocator; the terms are those of `allocator`."""

    chunk_bytes: int
    small_bytes: int  # 0 for none
    limit_bytes: int  # 0 for none
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    physical_bytes: int  # backing the chunks; on a CPU only touched pages
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_internal_fragmentation_bytes: int
    live_blocks: int
    shared_chunks: int  # chunks that small requests share
    cached_ranges: int  # freed, mapped, and reusable as a whole
    retired_ranges: int  # freed, with chunks in use elsewhere, until they can be unmapped
    mallocs: int
    frees: int
    ranges_reused: int
    chunks_created: int
    chunks_released: int
    maps: int  # chunks mapped into a range
    unmaps: int  # chunks unmapped from one
    event_waits: int  # waits of the host for the device, for lack of free memory
    failures: int  # calls that failed
    _fields_ = tuple((name, ctypes.c_uint64) for name in __annotations__)


def _compiler() -> list[str]:
    """Return the compiler with its own arguments, such as in `$CXX`."""
    given = os.environ.get("CXX")
    for name, *arguments in [shlex.split(given) or [given]] if given else [["c++"], ["g++"]]:
        if path := shutil.which(name):
            return [path, *arguments]
    why = f"$CXX is {given!r}" if given else "no c++ and no g++"
    raise NoCompilerError(f"there is no C++ compiler: {why}; install one, or name it as $CXX")


def build() -> Path:
    """Compile the library if necessary, and return its path; several processes may do so at once.

    It lies in a folder ``native-USER`` of `$REPRO_CACHE`, else of the user's cache folder, under a
    name with a hash of source, compiler and flags. A changed one is built again, with a warning.

    Raises:
        AllocatorBuildError: There is no compiler, it failed, or the folder cannot be written or
            trusted.
    """
    if platform.system() != "Linux":
        raise AllocatorBuildError("the chunked allocator runs on Linux alone")
    compiler = _compiler()
    sources = sorted(SOURCES.glob("*.cpp"))
    key = hashlib.sha256()
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
        for part in (*sources, *sorted(SOURCES.glob("*.hpp"))):
            key.update(part.name.encode() + b"\0" + part.read_bytes() + b"\0")
        built_by = compiler, version, FLAGS, LIBRARIES, platform.machine(), torch.__version__
        key.update(repr(built_by).encode())
        # One folder for each user: a cache may be shared.
        folder = cache_folder() / f"native-{os.geteuid()}"
        target = folder / f"chunked_allocator-{key.hexdigest()[:16]}.so"
        os.close(_own_folder(folder))
        if target.exists():
            if _is_whole(target):
                return target
            logger.warning("building again: %s is damaged, or not what was built here", target)
            target.unlink()  # else the old file's permissions would stay
        with replacing(target) as made:  # the last process wins, with the same library
            command = [*compiler, *FLAGS, *map(str, sources), "-o", str(made), *LIBRARIES]
            subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
            content = made.read_bytes()
            made.write_bytes(content + _digest(target.name, content))
            made.chmod(stat.S_IRWXU)
    except subprocess.CalledProcessError as error:
        output = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr
        raise AllocatorBuildError(
            f"the compiler failed with status {error.returncode}: {' '.join(error.cmd)}\n{output}"
        ) from error
    except OSError as error:
        raise AllocatorBuildError(
            f"the chunked allocator cannot be built: {error}; name a folder that can be written "
            "as $REPRO_CACHE"
        ) from error
    return target


def _own_folder(path: Path) -> int:
    """Open a folder that is closed to others; make it if it is missing.

    Files opened relative to the descriptor were put there by this user or by root, even if others
    can change the folders above it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):  # a link, which may lead anywhere
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        state = os.fstat(folder)
        if state.st_uid == os.geteuid() and not state.st_mode & 0o077:
            return folder
        os.close(folder)
    raise AllocatorBuildError(
        f"{path} is no folder of this user's that is closed to others, who could have put any code "
        "there: remove it, or name another folder as $REPRO_CACHE"
    )


def _digest(name: str, content: bytes) -> bytes:
    """Return the digest at the end of a library, which loaders ignore."""
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _is_whole(library: Path) -> bool:
    """Whether a library is unchanged since it was built under its name."""
    content = library.read_bytes()
    return content[-_DIGEST_BYTES:] == _digest(library.name, content[:-_DIGEST_BYTES])


@cache
def _load(path: Path) -> ctypes.CDLL:
    """Load a library by its folder's open descriptor, as the name may lead elsewhere by now."""
    opened = Path(f"/proc/self/fd/{_own_folder(path.parent)}") / path.name
    try:
        if not _is_whole(opened):
            raise AllocatorBuildError(f"{path} is damaged, or not what was built here: remove it")
        library = ctypes.CDLL(str(opened))
    except OSError as error:
        raise AllocatorBuildError(
            f"{path} cannot be loaded: {error}; name another folder as $REPRO_CACHE"
        ) from error
    pointer, number, whole = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    out, counters = ctypes.POINTER(pointer), ctypes.POINTER(Counters)
    for name, arguments in {
        "ca_create": [ctypes.c_char_p, number, number, number, whole, out],
        "ca_destroy": [pointer],
        "ca_malloc": [pointer, number, number, out],
        "ca_free": [pointer, pointer, number],
        "ca_record_stream": [pointer, pointer, number],
        "ca_trim": [pointer],
        "ca_counters": [pointer, counters],
        "ca_posix_set_complete": [pointer, number, whole],
        "ca_plug_configure": [number, number, number],
        "ca_plug_counters": [whole, counters],
        "ca_plug_trim": [whole],
        "ca_last_error": [],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, whole
    library.ca_destroy.restype, library.ca_last_error.restype = None, ctypes.c_char_p
    return library


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    if status := getattr(library, f"ca_{name}")(*arguments):
        errors = {1: AllocatorError, 2: NativeOutOfMemory}
        message = library.ca_last_error().decode(errors="replace")
        raise errors.get(status, RuntimeError)(message)


def _sizes(chunk_bytes: int, small_bytes: int, limit_bytes: int | None) -> tuple[int, int, int]:
    return (
        checked("chunk_bytes", chunk_bytes, 1, _LARGEST),
        checked("small_bytes", small_bytes, 0, _LARGEST),
        0 if limit_bytes is None else checked("limit_bytes", limit_bytes, 1, _LARGEST),
    )


class ChunkedMemory:
    """Memory from chunks that are mapped into contiguous ranges of addresses.

    Several threads may use it at once. As a context manager it closes itself at the end.

    Args:
        backend: ``posix`` for host memory, with simulated streams, or ``cuda``.
        chunk_bytes: Size of a chunk, rounded up to the backend's granularity: 4 KiB, or 2 MiB.
        limit_bytes: Most bytes of all chunks; None for no limit.
        device: Number of the CUDA device.
        small_bytes: Requests up to this size share chunks, as in `ChunkedAllocator`; 0 for none.

    Raises:
        AllocatorError: An argument is invalid.
        AllocatorBuildError: The library cannot be built.
        RuntimeError: There is no such device, or no CUDA driver.
    """

    def __init__(
        self,
        backend: str = "posix",
        chunk_bytes: int = PAPER_CHUNK_BYTES,
        limit_bytes: int | None = None,
        device: int = 0,
        small_bytes: int = 0,
    ) -> None:
        self._handle: ctypes.c_void_p | None = None
        sizes = _sizes(chunk_bytes, small_bytes, limit_bytes)
        self._library, handle = _load(build()), ctypes.c_void_p()
        _call(self._library, "create", backend.encode(), *sizes, device, ctypes.byref(handle))
        self._handle = handle

    def _do(self, name: str, *arguments: Any) -> None:
        if self._handle is None:
            raise AllocatorError("this ChunkedMemory is closed: make another")
        _call(self._library, name, self._handle, *arguments)

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """Return the address of `nbytes` for first use on a stream; 0 for a request of 0."""
        address = ctypes.c_void_p()
        self._do("malloc", checked("nbytes", nbytes, 0, _LARGEST), stream, ctypes.byref(address))
        return address.value or 0

    def free(self, address: int, stream: int = 0) -> None:
        """Free the bytes at an address; their last use is on `stream`."""
        self._do("free", address, stream)

    def record_stream(self, address: int, stream: int) -> None:
        """Note that another stream uses a block, too; its reuse waits for that stream."""
        self._do("record_stream", address, stream)

    def trim(self) -> None:
        """Wait for freed ranges, unmap them, and give their chunks back to the system."""
        self._do("trim")

    def counters(self) -> Counters:
        """Return the allocator's state and history."""
        counters = Counters()
        self._do("counters", ctypes.byref(counters))
        return counters

    def set_complete(self, stream: int, complete: bool) -> None:
        """Hold back the work of a simulated stream, or let it finish; for tests."""
        self._do("posix_set_complete", stream, int(complete))

    def close(self) -> None:
        """Free everything, including live blocks; no other thread may be using it."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._library.ca_destroy(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class Installed:
    """The chunked allocator inside torch, until the process ends."""

    library: Path
    chunk_bytes: int
    limit_bytes: int | None

    def counters(self, device: int = 0) -> Counters:
        """Return the state and history of the allocator of a CUDA device."""
        counters = Counters()
        _call(_load(self.library), "plug_counters", device, ctypes.byref(counters))
        return counters

    def trim(self, device: int = 0) -> None:
        """Give all cached chunks back, as ``torch.cuda.empty_cache`` does on all devices."""
        _call(_load(self.library), "plug_trim", device)


_lock = threading.Lock()


def install(
    chunk_bytes: int = PAPER_CHUNK_BYTES,
    limit_bytes: int | None = None,
    small_bytes: int | None = None,
) -> Installed:
    """Make torch allocate all CUDA memory of this process from chunks (section 4).

    Call it before anything else uses CUDA. Without free memory, torch raises a
    `torch.OutOfMemoryError` that begins with "out of memory". torch's own statistics
    (``torch.cuda.memory_allocated``) then do not work: see `Installed.counters`. Not supported are
    CUDA graphs, and memory shared with other processes or read directly by another device.

    Args:
        chunk_bytes: Size of a chunk, rounded up to 2 MiB.
        limit_bytes: Most bytes of the chunks of one device; None for all its memory.
        small_bytes: Requests up to this size share chunks; None for half a chunk. With 0 every
            tensor takes at least a chunk, even each of a network's hundreds of single numbers.

    Raises:
        AllocatorError: There is no CUDA, it is in use already, or an argument is invalid.
        AllocatorBuildError: The library cannot be built.
    """
    chunk_bytes = checked("chunk_bytes", chunk_bytes, 1, _LARGEST)
    sizes = _sizes(
        chunk_bytes, chunk_bytes // 2 if small_bytes is None else small_bytes, limit_bytes
    )
    if not torch.cuda.is_available():
        raise AllocatorError("torch finds no CUDA device: on a CPU, use ChunkedMemory('posix')")
    with _lock:
        if torch.cuda.is_initialized():
            raise AllocatorError(
                "CUDA is in use already, and torch keeps its allocator from then on: call install "
                "in a new process, before anything is put on a CUDA device"
            )
        path = build()
        library = _load(path)
        functions = "ca_plug_malloc", "ca_plug_free"
        plugged = torch.cuda.memory.CUDAPluggableAllocator(library._name, *functions)
        # The constructor sets neither of these: Tensor.record_stream, and empty_cache.
        allocator, pointer = plugged.allocator(), ctypes.c_void_p
        allocator.set_record_stream_fn(ctypes.cast(library.ca_plug_record_stream, pointer).value)
        allocator.set_reset_fn(ctypes.cast(library.ca_plug_empty_cache, pointer).value)
        _call(library, "plug_configure", *sizes)
        torch.cuda.memory.change_current_allocator(plugged)
    return Installed(path, chunk_bytes, limit_bytes)
