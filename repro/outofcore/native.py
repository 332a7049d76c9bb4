"""The chunked allocator of section 4 in C++: on CUDA by the driver, and on host memory for tests.

The library is compiled at first use with the plain compiler and torch's headers; the CUDA driver
is looked up at run time, so that no toolkit is needed. See `csrc/chunked_allocator.cpp` for how it
works.

A library is code that runs: it is kept in a folder of this user's alone, and ends with a digest of
its content.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import torch

from repro.measure.checks import is_whole
from repro.measure.files import cache_folder, replacing
from repro.outofcore.allocator import PAPER_CHUNK_BYTES, AllocatorError

SOURCES = Path(__file__).with_name("csrc")
_TORCH = Path(torch.__file__).parent
FLAGS = (
    *("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    f"-isystem{_TORCH / 'include'}",
)
# torch has loaded its own: this is where it is found by a name.
LIBRARIES = ("-ldl", "-lpthread", f"-L{_TORCH / 'lib'}", "-lc10")
_INVALID, _OUT_OF_MEMORY = 1, 2
_LARGEST = 2**63 - 1
_DIGEST_BYTES = 32

logger = logging.getLogger(__name__)


class AllocatorBuildError(RuntimeError):
    """The library of the chunked allocator cannot be built here, or not be trusted."""


class NativeOutOfMemory(MemoryError):
    """A request does not fit into the limit, or the device has no more; it says how much."""


class Counters(ctypes.Structure):
    """The state and history of an allocator; the terms are those of `allocator`."""

    chunk_bytes: int
    small_bytes: int  # 0 for none
    limit_bytes: int  # 0 for none
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    physical_bytes: int  # behind the chunks, by the system; on a CPU of touched pages only
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_internal_fragmentation_bytes: int
    live_blocks: int
    shared_chunks: int  # that small requests share
    cached_ranges: int  # freed, mapped, and to be had whole
    retired_ranges: int  # freed, their chunks had elsewhere, until they can be unmapped
    mallocs: int
    frees: int
    ranges_reused: int
    chunks_created: int
    chunks_released: int
    maps: int  # chunks mapped into a range
    unmaps: int  # chunks unmapped from one
    event_waits: int  # of the host for the device, as nothing else was left
    failures: int  # calls that failed
    _fields_ = tuple((name, ctypes.c_uint64) for name in __annotations__)

    @property
    def internal_fragmentation_bytes(self) -> int:
        """Allocated less requested bytes."""
        return self.allocated_bytes - self.requested_bytes


def _compiler() -> list[str]:
    """Return the compiler and arguments of its own, as `$CXX` may hold them."""
    given = os.environ.get("CXX")
    for name, *arguments in [shlex.split(given) or [given]] if given else [["c++"], ["g++"]]:
        if path := shutil.which(name):
            return [path, *arguments]
    raise AllocatorBuildError(
        f"there is no C++ compiler: {f'$CXX is {given!r}' if given else 'no c++ and no g++'}; "
        f"install one (apt-get install g++), or name one as $CXX"
    )


def build() -> Path:
    """Compile the library where that has not been done, and return its path.

    It lies in a folder ``native-USER`` of `$REPRO_CACHE`, else of the user's cache folder, under a
    name that hashes source, compiler and flags. That folder must be this user's and closed to
    others. A library that was changed is built again, with a warning. Any number of processes may
    build it at once.

    Raises:
        AllocatorBuildError: There is no compiler, it failed, or the folder cannot be written or
            not be trusted.
    """
    if platform.system() != "Linux":
        raise AllocatorBuildError(
            f"the chunked allocator runs on Linux, not on {platform.system()}: "
            f"use the simulator repro.outofcore.allocator.ChunkedAllocator"
        )
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
            target.unlink()  # the permissions of an old file would stay
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
            f"\nname another as $CXX"
        ) from error
    except OSError as error:
        raise AllocatorBuildError(
            f"the chunked allocator cannot be built: {error}; name a folder that can be written "
            f"as $REPRO_CACHE"
        ) from error
    return target


def _own_folder(path: Path) -> int:
    """Open a folder that is closed to others, made where there is none.

    What is opened by way of the descriptor was put there by this user or by root, whatever others
    may do to the folders above it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = -1
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        state = os.fstat(folder)
        if state.st_uid == os.geteuid() and not state.st_mode & 0o077:
            return folder
    except OSError:  # a link, which may lead anywhere
        pass
    if folder >= 0:
        os.close(folder)
    raise AllocatorBuildError(
        f"the chunked allocator is not loaded from {path}: it is no folder of this user's that is "
        "closed to others, who could have put any code there; remove it, or name another folder "
        "as $REPRO_CACHE"
    )


def _digest(name: str, content: bytes) -> bytes:
    """Return the end of a library, which loaders take no notice of."""
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _is_whole(library: Path) -> bool:
    """Whether a library is what was built under its name."""
    content = library.read_bytes()
    return content[-_DIGEST_BYTES:] == _digest(library.name, content[:-_DIGEST_BYTES])


@cache
def _load(path: Path) -> ctypes.CDLL:
    """Load a library from a folder that is this user's alone.

    By the folder's descriptor, which stays open: its name may lead to another folder by now.
    """
    opened = Path(f"/proc/self/fd/{_own_folder(path.parent)}") / path.name
    try:
        if not _is_whole(opened):
            raise AllocatorBuildError(f"{path} is damaged, or not what was built here: remove it")
        library = ctypes.CDLL(str(opened))
    except OSError as error:
        raise AllocatorBuildError(
            f"the chunked allocator at {path} cannot be loaded: {error}; name another folder as "
            f"$REPRO_CACHE, one whose programs may run"
        ) from error
    pointer, number, whole = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    out = ctypes.POINTER(pointer)
    counters = ctypes.POINTER(Counters)
    for name, arguments in {
        "ca_create": [ctypes.c_char_p, number, number, number, whole, out],
        "ca_malloc": [pointer, number, number, out],
        "ca_free": [pointer, pointer, number],
        "ca_record_stream": [pointer, pointer, number],
        "ca_trim": [pointer],
        "ca_counters": [pointer, counters],
        "ca_posix_set_complete": [pointer, number, whole],
        "ca_plug_configure": [number, number, number],
        "ca_plug_counters": [whole, counters],
        "ca_plug_trim": [whole],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, whole
    library.ca_destroy.argtypes, library.ca_destroy.restype = [pointer], None
    library.ca_last_error.argtypes, library.ca_last_error.restype = [], ctypes.c_char_p
    return library


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        message = library.ca_last_error().decode(errors="replace")
        if status == _OUT_OF_MEMORY:
            raise NativeOutOfMemory(message)
        raise AllocatorError(message) if status == _INVALID else RuntimeError(message)


def _check_sizes(chunk_bytes: int, small_bytes: int, limit_bytes: int | None) -> None:
    limit = 1 if limit_bytes is None else limit_bytes
    for name, value, least in (
        ("chunk_bytes", chunk_bytes, 1), ("small_bytes", small_bytes, 0), ("limit_bytes", limit, 1)
    ):  # fmt: skip
        if not is_whole(value, least, _LARGEST):
            above = "0 or more" if least == 0 else "above 0"
            raise AllocatorError(f"{name} is {value!r}: give whole bytes {above}")


class ChunkedMemory:
    """Memory from chunks that are mapped into contiguous ranges of addresses.

    Any number of threads may use one at once. It is a context manager, which closes it.

    Args:
        backend: ``posix`` for host memory, with pretended streams, or ``cuda``.
        chunk_bytes: Size of a chunk, rounded up to what the backend can map: 4 KiB, or 2 MiB.
        limit_bytes: Most that all chunks may take; None for no limit.
        device: Number of the CUDA device.
        small_bytes: Requests up to it share chunks, as in `ChunkedAllocator`; 0 for none.

    Raises:
        AllocatorError: An argument makes no sense.
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
        _check_sizes(chunk_bytes, small_bytes, limit_bytes)
        self._library, handle = _load(build()), ctypes.c_void_p()
        arguments = (backend.encode(), chunk_bytes, small_bytes, limit_bytes or 0, device)
        _check(self._library, self._library.ca_create(*arguments, ctypes.byref(handle)))
        self._handle = handle

    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise AllocatorError("this ChunkedMemory is closed: make another")
        return self._handle

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """Return the address of bytes to be used first on a stream; 0 for a request of 0.

        Raises:
            NativeOutOfMemory: They do not fit.
            AllocatorError: The size makes no sense.
        """
        if not is_whole(nbytes, 0, _LARGEST):
            raise AllocatorError(f"nbytes is {nbytes!r}: give whole bytes, 0 or more")
        address = ctypes.c_void_p()
        status = self._library.ca_malloc(self._open(), nbytes, stream, ctypes.byref(address))
        _check(self._library, status)
        return address.value or 0

    def free(self, address: int, stream: int = 0) -> None:
        """Take back bytes that were handed out; their last use is on `stream`.

        Raises:
            AllocatorError: Nothing is live at the address.
        """
        _check(self._library, self._library.ca_free(self._open(), address, stream))

    def record_stream(self, address: int, stream: int) -> None:
        """Say that another stream uses it, too, and is waited for after it is freed."""
        _check(self._library, self._library.ca_record_stream(self._open(), address, stream))

    def trim(self) -> None:
        """Wait for freed ranges, unmap them, and give their chunks back to the system."""
        _check(self._library, self._library.ca_trim(self._open()))

    def counters(self) -> Counters:
        """Return its state and history."""
        counters = Counters()
        _check(self._library, self._library.ca_counters(self._open(), ctypes.byref(counters)))
        return counters

    def set_complete(self, stream: int, complete: bool) -> None:
        """Hold back the work of a pretended stream, or let it finish; for tests."""
        status = self._library.ca_posix_set_complete(self._open(), stream, int(complete))
        _check(self._library, status)

    def close(self) -> None:
        """Give everything back, live blocks included; no other thread may be using it."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._library.ca_destroy(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class Installed:
    """The chunked allocator inside torch; it stays for as long as the process lives."""

    library: Path
    chunk_bytes: int
    limit_bytes: int | None

    def counters(self, device: int = 0) -> Counters:
        """Return the state and history of the allocator of a CUDA device."""
        library, counters = _load(self.library), Counters()
        _check(library, library.ca_plug_counters(device, ctypes.byref(counters)))
        return counters

    def trim(self, device: int = 0) -> None:
        """Give all cached chunks back, as ``torch.cuda.empty_cache`` does on all devices."""
        library = _load(self.library)
        _check(library, library.ca_plug_trim(device))


_lock = threading.Lock()


def install(
    chunk_bytes: int = PAPER_CHUNK_BYTES,
    limit_bytes: int | None = None,
    small_bytes: int | None = None,
) -> Installed:
    """Make torch allocate all CUDA memory of this process from chunks (section 4).

    To be called before anything else uses CUDA. Where memory is out, torch raises a
    `torch.OutOfMemoryError` that begins with "out of memory". torch's own statistics
    (``torch.cuda.memory_allocated``) do not work then: see `Installed.counters`. Not for CUDA
    graphs, for memory shared with other processes, or read by another device without a copy.

    Args:
        chunk_bytes: Size of a chunk, rounded up to 2 MiB.
        limit_bytes: Most that the chunks of one device may take; None for all it has.
        small_bytes: Requests up to it share chunks; None for half a chunk. With 0 every tensor
            takes a chunk at least, down to single numbers, of which a network has hundreds.

    Raises:
        AllocatorError: There is no CUDA, it is in use already, or an argument makes no sense.
        AllocatorBuildError: The library cannot be built.
    """
    if small_bytes is None:
        small_bytes = chunk_bytes // 2
    _check_sizes(chunk_bytes, small_bytes, limit_bytes)
    if not torch.cuda.is_available():
        raise AllocatorError(
            "torch finds no CUDA device to allocate on: on a CPU, use "
            "ChunkedMemory('posix') or repro.outofcore.allocator.ChunkedAllocator"
        )
    with _lock:
        if torch.cuda.is_initialized():
            raise AllocatorError(
                "CUDA is initialised already, and torch keeps its allocator from then on: "
                "call install in a new process, before anything is put on a CUDA device"
            )
        path = build()
        library = _load(path)
        plugged = torch.cuda.memory.CUDAPluggableAllocator(
            library._name, "ca_plug_malloc", "ca_plug_free"
        )
        # Neither is reached by the constructor: Tensor.record_stream, and empty_cache.
        allocator, pointer = plugged.allocator(), ctypes.c_void_p
        allocator.set_record_stream_fn(ctypes.cast(library.ca_plug_record_stream, pointer).value)
        allocator.set_reset_fn(ctypes.cast(library.ca_plug_empty_cache, pointer).value)
        _check(library, library.ca_plug_configure(chunk_bytes, small_bytes, limit_bytes or 0))
        torch.cuda.memory.change_current_allocator(plugged)
    return Installed(path, chunk_bytes, limit_bytes)
