"""Processes: runs side by side, one function in a process of its own, a lock for each run.

Two processes of one thread each do more on two cores than one process of two: a step of a small
model is too little work to divide.
"""

import concurrent.futures
import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar

from filelock import FileLock, Timeout

from repro.measure.host import cores

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerDied(Exception):
    """A worker process ended in the midst of its work, which is lost."""


class Workers:
    """A number of processes, started at the first call of `map`, which end with the block.

    They leave Ctrl-C to this process, and end when it ends, however that comes.

    Args:
        count: How many, of one thread each; with less than two this process computes itself, unless
            `each_new`.
        each_new: Whether every item gets a process that has computed nothing before.
    """

    def __init__(self, count: int, each_new: bool = False) -> None:
        self.count = count
        self._most_items = 1 if each_new else None
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def __bool__(self) -> bool:
        return self.count > 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(at_once=kind is not None)

    def map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        goes_on: Callable[[Item], bool] = lambda item: True,
    ) -> Iterator[tuple[Item, Result]]:
        """Yield each item and what `function` returns for it, as they end.

        `goes_on` is asked before an item is handed out; where it says no, none is any more.
        `WorkerDied` where one was killed: all others are ended, and later calls start anew.
        """
        if not self and not self._most_items:
            yield from ((item, function(item)) for item in itertools.takewhile(goes_on, items))
            return
        if self._pool is None:
            spawning = multiprocessing.get_context("spawn")
            ends, self._alive = spawning.Pipe(duplex=False)
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self.count, spawning, _begin, (ends,), max_tasks_per_child=self._most_items
            )
        try:
            running: dict[concurrent.futures.Future[Result], Item] = {}
            waiting = itertools.takewhile(goes_on, items)
            while True:
                for item in itertools.islice(waiting, self.count - len(running)):
                    running[self._pool.submit(function, item)] = item
                if not running:
                    return
                ended, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
                for future in ended:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as broken:
            self._end(at_once=True)
            raise WorkerDied("a worker process was killed; free memory if it ran out") from broken
        except BaseException:  # an error of a run that ends all, Ctrl-C, or nobody asks further
            self._end(at_once=True)
            raise

    def _end(self, at_once: bool) -> None:
        pool, self._pool = self._pool, None
        if pool is None:
            return
        if at_once:
            self._alive.close()
        pool.shutdown(cancel_futures=True)
        self._alive.close()


def default_count(profile: str, device: str) -> int:
    """Return two where runs on a CPU take long enough that starting processes pays."""
    return 2 if device == "cpu" and profile in ("quick", "long") and cores() > 1 else 1


def _begin(ends: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    end_with(ends)


def end_with(ends: Connection) -> None:
    """Have this process, in a group of its own, end when the other end of a pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgrp()  # with what it starts, which ignores Ctrl-C, too
    threading.Thread(target=_end_with, args=(ends,), daemon=True).start()


def _end_with(ends: Connection) -> None:
    """End this process and its children when its starter closes the pipe, or ends itself."""
    with suppress(EOFError):
        ends.recv()
    os.killpg(os.getpgrp(), signal.SIGKILL)


_ANSWER = "answer: "  # libraries may print lines, too


def in_a_process(
    entry: str, arguments: Sequence[Any], environment: Mapping[str, str] | None = None
) -> Any:
    """Call ``module:function`` in a new process; arguments and result go by JSON.

    If it fails, the text of a `RuntimeError` ends as its error output does, without C++ frames.
    """
    module, _, name = entry.partition(":")
    code = f"import json, sys\nfrom {module} import {name}\n"
    code += f"print({_ANSWER!r} + json.dumps({name}(*json.load(sys.stdin))))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, **(environment or {})},
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if done.returncode or not answers:
        # An exception in a destructor has its message before dozens of C++ frames.
        lines = (line for line in done.stderr.splitlines() if not line.startswith("frame #"))
        said = "\n".join(lines)[-2000:]
        raise RuntimeError(f"the process of {entry} failed: {said}")
    return json.loads(answers[-1].removeprefix(_ANSWER))


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class NoLocksWarning(UserWarning):
    """The file system has no locks: runs at the same time may compute the same twice."""


@contextmanager
def locked(record: Path) -> Iterator[bool]:
    """Lock the run of a record; yield False where another process or thread computes it."""
    path = record.with_name(f".{record.stem}.lock")
    lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        why = f"{record.parent} has no file locks ({error.strerror})"
        warnings.warn(f"{why}: another process may compute the same", NoLocksWarning, stacklevel=3)
    try:
        yield True
    finally:
        with suppress(OSError):
            path.unlink()  # while it is locked; who opened it before finds that it is gone
        lock.release()


@contextmanager
def undisturbed(folder: Path, measured: bool) -> Iterator[bool]:
    """Keep measurements of a folder's runs apart from all others; yield False where one must wait.

    Any number of runs that measure nothing go on beside each other.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, (fcntl.LOCK_EX if measured else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        free = True
    except OSError as error:  # where there are no locks, `locked` says so
        free = not isinstance(error, BlockingIOError)
    try:
        yield free
    finally:
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)  # also where a forked process has it open
        os.close(opened)
