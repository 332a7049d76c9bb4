"""A file of benchmark results, so that nothing is measured twice."""

import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


class CacheError(ValueError):
    """A benchmark cache cannot be opened or written, or the file is no such cache."""


class CacheWarning(UserWarning):
    """Results are kept in memory, since the default benchmark cache cannot be used."""


def key_of(kernel: Kernel) -> str:
    """A kernel's key on this machine, as JSON: all that affects its measured times."""
    facts = {
        "kernel": kernel.facts(),
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
        else:
            try:
                regular(self.path)  # opening a pipe would wait
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CacheError(self._problem(error)) from error
        with self._open() as connection:
            connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")  # it can be written

    def _problem(self, error: Exception) -> str:
        return (
            f"the benchmark cache {self.path} cannot be used: {error}; give another file as "
            f"cache=, delete this one, or give cache=None to keep the results in memory"
        )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._memory is not None:
                with self._memory:
                    yield self._memory
                return
            connection = None
            try:
                # Another process may hold the file for a while; each call opens it anew, which is
                # also safe across a fork.
                connection = sqlite3.connect(str(self.path), timeout=60)
                with connection:
                    yield connection
            except (sqlite3.Error, ValueError, TypeError) as error:  # such as by a row's contents
                raise CacheError(self._problem(error)) from error
            finally:
                if connection is not None:
                    connection.close()

    def _write(self, command: str, rows: list[tuple[object, ...]]) -> None:
        with self._open() as connection:
            connection.executemany(command, rows)

    def listing(self, key: str, micro_batch: int) -> list[tuple[str, int]] | None:
        """The algorithms and their workspace in bytes, None if not listed yet."""
        with self._open() as connection:
            command = f"SELECT algorithms FROM listings_1 {_WHERE}"
            row = connection.execute(command, (key, micro_batch)).fetchone()
            return None if row is None else [(name, size) for name, size in json.loads(row[0])]

    def store_listing(self, key: str, micro_batch: int, algorithms: list[tuple[str, int]]) -> None:
        """Keep the algorithms of a micro-batch and their workspace."""
        row = (key, micro_batch, json.dumps(algorithms))
        self._write("INSERT OR REPLACE INTO listings_1 VALUES (?, ?, ?)", [row])

    def times(self, key: str, micro_batch: int) -> dict[str, list[float]]:
        """The measured seconds by algorithm; an empty list for one that failed to run."""
        with self._open() as connection:
            command = f"SELECT algorithm, samples_s FROM times_1 {_WHERE}"
            rows = connection.execute(command, (key, micro_batch)).fetchall()
            return {algorithm: [*map(float, json.loads(samples))] for algorithm, samples in rows}

    def store_times(self, key: str, micro_batch: int, times: Mapping[str, list[float]]) -> None:
        """Keep measured seconds by algorithm."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        rows: list[tuple[object, ...]] = [
            (key, micro_batch, algorithm, json.dumps(samples), now)
            for algorithm, samples in times.items()
        ]
        self._write("INSERT OR IGNORE INTO times_1 VALUES (?, ?, ?, ?, ?)", rows)

    def take(self, other: "BenchmarkCache") -> int:
        """Copy another cache's entries that this one lacks; return the number of copied times.

        Keys name the device, so that caches of several machines can be merged.
        """
        with other._open() as connection:
            listings = connection.execute("SELECT * FROM listings_1").fetchall()
            rows = connection.execute("SELECT * FROM times_1").fetchall()
        before = len(self)
        self._write("INSERT OR IGNORE INTO listings_1 VALUES (?, ?, ?)", listings)
        self._write("INSERT OR IGNORE INTO times_1 VALUES (?, ?, ?, ?, ?)", rows)
        return len(self) - before

    def contents(
        self,
    ) -> Iterator[tuple[str, int, list[tuple[str, int]], dict[str, list[float]]]]:
        """Yield (key, micro-batch, algorithms with their bytes, seconds by algorithm)."""
        with self._open() as connection:
            rows = connection.execute("SELECT * FROM listings_1 ORDER BY 1, 2").fetchall()
        for key, micro_batch, algorithms in rows:
            listed = [(name, size) for name, size in json.loads(algorithms)]
            yield key, micro_batch, listed, self.times(key, micro_batch)

    def clear(self) -> None:
        """Forget everything."""
        with self._open() as connection:
            connection.executescript("DELETE FROM listings_1; DELETE FROM times_1;")

    def __len__(self) -> int:
        """Number of stored times."""
        with self._open() as connection:
            count: int = connection.execute("SELECT COUNT(*) FROM times_1").fetchone()[0]
        return count
