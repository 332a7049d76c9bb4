"""Processes that carry out runs side by side, for runs whose result is no measurement.

Two processes of one thread each do more on two cores than one process of two: a step of a small
model is too little work to divide.
"""

import concurrent.futures
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self, TypeVar

from repro.measure.host import cores

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerDied(Exception):
    """A worker process ended in the midst of its work, which is lost."""


class Workers:
    """A number of processes, started at the first call of `map`, which end with the block.

    They compute with one thread each, leave Ctrl-C to this process, and end when it ends, however
    that comes.

    Args:
        count: How many; less than two are none, and `map` is not to be called.
        each_new: Whether every item gets a process that has computed nothing before: what is
            measured in it shares no place in memory with earlier work. Here one will do.
    """

    def __init__(self, count: int, each_new: bool = False) -> None:
        self.count = count
        self._most_items = 1 if each_new else None
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def __bool__(self) -> bool:
        return self.count > 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(at_once=kind is not None)

    def map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        goes_on: Callable[[Item], bool] = lambda item: True,
    ) -> Iterator[tuple[Item, Result]]:
        """Yield each item and what `function` returns for it, as they end.

        Args:
            function: Of a module's top level, as items and results go through pickle.
            items: Handed out in this order, as processes are free.
            goes_on: Asked before an item is handed out; where it says no, none is any more.

        Raises:
            WorkerDied: One was killed; all others are ended, and later calls start anew.
        """
        if self._pool is None:
            spawning = multiprocessing.get_context("spawn")
            ends, self._alive = spawning.Pipe(duplex=False)
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self.count, spawning, _begin, (ends,), max_tasks_per_child=self._most_items
            )
        try:
            running: dict[concurrent.futures.Future[Result], Item] = {}
            waiting = deque(items)
            while True:
                while waiting and len(running) < self.count:
                    if not goes_on(waiting[0]):
                        waiting.clear()
                        break
                    item = waiting.popleft()
                    running[self._pool.submit(function, item)] = item
                if not running:
                    return
                ended, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
                for future in ended:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as broken:
            self._end(at_once=True)
            raise WorkerDied("a worker process was killed, perhaps for want of memory") from broken
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # with what it starts, which ignores Ctrl-C, too
    threading.Thread(target=_end_with, args=(ends,), daemon=True).start()


def _end_with(ends: Connection) -> None:
    """End this process and its children when its starter closes the pipe, or ends itself."""
    with suppress(EOFError):
        ends.recv()
    if hasattr(os, "killpg"):
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
