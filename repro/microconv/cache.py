"""A file of benchmark results, so that nothing is measured twice."""

import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path

from repro.measure import allocations, describe_device, timing
from repro.measure.allocations import freed_memory_is_kept
from repro.measure.files import cache_folder, regular
from repro.microconv.backends import versions
from repro.microconv.kernels import Kernel

_SCHEMA = """
CREATE TABLE IF NOT EXISTS listings_1 (
    key TEXT NOT NULL, micro_batch INTEGER NOT NULL, algorithms TEXT NOT NULL,
    PRIMARY KEY (key, micro_batch));
CREATE TABLE IF NOT EXISTS times_1 (
    key TEXT NOT NULL, micro_batch INTEGER NOT NULL, algorithm TEXT NOT NULL,
    samples_s TEXT NOT NULL, measured TEXT NOT NULL,
    PRIMARY KEY (key, micro_batch, algorithm));
"""
_WHERE = "WHERE key = ? AND micro_batch = ?"
_INSERT_TIMES = "INSERT OR IGNORE INTO times_1 VALUES (?, ?, ?, ?, ?)"


class CacheError(ValueError):
    """A benchmark cache cannot be opened or written, or the file is no such cache."""


class CacheWarning(UserWarning):
    """Results are kept in memory, since the default benchmark cache cannot be used."""


def key_of(kernel: Kernel) -> str:
    """A kernel's key on this machine, as JSON: all that affects its measured times."""
    facts = {
        "kernel": asdict(kernel),
        "backend": versions(kernel.device),
        "device": _device(kernel.device),
        "freed memory kept": freed_memory_is_kept(),
        "code": _code(),
    }
    return json.dumps(facts, sort_keys=True)


@cache
def _device(device: str) -> str:
    facts = describe_device(device)
    return " ".join(str(facts[name]) for name in ("name", "driver") if name in facts)


@cache
def _code() -> str:
    """A hash of the modules that may affect times."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    files += [Path(module.__file__ or "") for module in (allocations, timing)]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def default_path() -> Path:
    """``microconv.sqlite`` in `$REPRO_CACHE`, else in the user's cache folder."""
    return cache_folder() / "microconv.sqlite"


class BenchmarkCache:
    """Algorithms and measured times by kernel and micro-batch, in an SQLite file.

    Threads and processes may use a file concurrently. One row holds one measurement, so that
    writers never overwrite each other's rows; if two measure the same, the first row stays.

    Args:
        path: The file, made with its folder if missing; None keeps everything in memory.

    Raises:
        CacheError: The file cannot be made, read or written, or is no such cache.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self._lock = threading.RLock()
        self._memory: sqlite3.Connection | None = None
        if self.path is None:
            self._memory = sqlite3.connect(":memory:", check_same_thread=False)
            weakref.finalize(self, self._memory.close)
            self._memory.executescript(_SCHEMA)
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")  # it can be written

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self.path is None:
                assert self._memory is not None
                with self._memory:
                    yield self._memory
                return
            connection = None
            try:
                regular(self.path)  # opening a pipe would wait
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # Another process may hold the file for a while; each call opens it anew, which is
                # also safe across a fork.
                connection = sqlite3.connect(str(self.path), timeout=60)
                connection.executescript(_SCHEMA)  # the file may be new, or have been deleted
                with connection:
                    yield connection
            except (OSError, sqlite3.Error, ValueError, TypeError) as error:  # or a row's contents
                raise CacheError(
                    f"the benchmark cache {self.path} cannot be used: {error}; give another file "
                    "as cache=, delete this one, or give cache=None to keep the results in memory"
                ) from error
            finally:
                if connection is not None:
                    connection.close()

    def listing(self, key: str, micro_batch: int) -> list[tuple[str, int]] | None:
        """The algorithms and their workspace in bytes, None if not listed yet."""
        with self._open() as connection:
            command = f"SELECT algorithms FROM listings_1 {_WHERE}"
            row = connection.execute(command, (key, micro_batch)).fetchone()
            return None if row is None else [(name, size) for name, size in json.loads(row[0])]

    def store_listing(self, key: str, micro_batch: int, algorithms: list[tuple[str, int]]) -> None:
        """Keep the algorithms of a micro-batch and their workspace."""
        row = (key, micro_batch, json.dumps(algorithms))
        with self._open() as connection:
            connection.execute("INSERT OR REPLACE INTO listings_1 VALUES (?, ?, ?)", row)

    def times(self, key: str, micro_batch: int) -> dict[str, list[float]]:
        """The measured seconds by algorithm; an empty list for one that failed to run."""
        with self._open() as connection:
            command = f"SELECT algorithm, samples_s FROM times_1 {_WHERE}"
            rows = connection.execute(command, (key, micro_batch)).fetchall()
            return {algorithm: [*map(float, json.loads(samples))] for algorithm, samples in rows}

    def store_times(self, key: str, micro_batch: int, times: Mapping[str, list[float]]) -> None:
        """Keep measured seconds by algorithm."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        rows = [(key, micro_batch, name, json.dumps(own), now) for name, own in times.items()]
        with self._open() as connection:
            connection.executemany(_INSERT_TIMES, rows)

    def take(self, other: "BenchmarkCache") -> None:
        """Copy another cache's entries that this one lacks. Keys name the device."""
        with other._open() as connection:
            listings = connection.execute("SELECT * FROM listings_1").fetchall()
            rows = connection.execute("SELECT * FROM times_1").fetchall()
        with self._open() as connection:
            connection.executemany("INSERT OR IGNORE INTO listings_1 VALUES (?, ?, ?)", listings)
            connection.executemany(_INSERT_TIMES, rows)

    def __len__(self) -> int:
        with self._open() as connection:
            count: int = connection.execute("SELECT COUNT(*) FROM times_1").fetchone()[0]
        return count
