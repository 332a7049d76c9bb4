"""Protection of tensors in transfer from interrupts, forked processes and other threads."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import CodeType, FrameType
from typing import Any, Self

import torch
import torch.utils.dlpack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from repro.measure.memory import tensors_in
from repro.outofcore.host import MOVER
from repro.outofcore.operations import Operations, RawAccess
from repro.outofcore.residency import Residency

# ---- interrupts


class Uninterrupted:
    """Delays a keyboard interrupt of the main thread from `__enter__` to `__exit__`.

    Else Python raises it between any two steps, even while bytes are counted or pointers change. A
    function with this `code` is not interrupted before it enters this context either.
    """

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self.depth = 0  # of nested contexts
        self.pending: tuple[int, FrameType | None] | None = None  # a delayed interrupt
        self._before: Any = None  # the earlier handler, while ours is installed

    def install(self) -> None:
        """Handle the signal, if it has a handler and this is the main thread."""
        before = signal.getsignal(signal.SIGINT)
        if callable(before) and threading.current_thread() is threading.main_thread():
            self._before = before
            signal.signal(signal.SIGINT, self._handle)

    def remove(self) -> None:
        """Restore the signal's handler; the caller delivers a pending interrupt."""
        if self._before is not None and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        inside, at = self.depth > 0, frame
        while at is not None and not inside:
            inside, at = at.f_code is self._code, at.f_back
        if inside:
            self.pending = number, frame
        else:
            self._before(number, frame)

    def deliver(self) -> None:
        """Raise the pending interrupt, if there is one."""
        if self.pending is not None and not self.depth:
            given, self.pending = self.pending, None
            self._before(*given)

    def __enter__(self) -> Self:
        self.depth += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1
        self.deliver()


# ---- processes forked within a block: they read its tensors, and never move them

process = os.getpid()


def _forked() -> None:
    global process
    process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)  # cheaper than os.getpid() at every operation


class SwappedOutError(RuntimeError):
    """A value cannot be brought to the process that reads it."""


def check_readable(residency: Residency, values: list[Any], from_file: bool) -> None:
    """Raise if a forked process reads what it cannot: it has a copy of memory, not of a file."""
    if residency.lies and not from_file:
        return
    for tensor in tensors_in(values):
        variable = residency.look_up(tensor)
        if variable is not None and not (variable.resident and variable.incoming is None):
            raise SwappedOutError(
                f"a process that was forked within an OutOfCore block reads a tensor of "
                f"{variable.nbytes} bytes that is swapped out"
                f"{' to a file' if from_file else ''}: name it in exclude=, or start "
                "such processes (a DataLoader's workers) before the block, or by "
                'multiprocessing_context="spawn"'
            )


# ---- threads. A mode of torch applies to one thread. While a block is entered, new threads, and
# work submitted to pools, therefore begin by entering their own modes. Threads that were started
# before the block are not seen.

# The names of torch's to_dlpack, the only function that returns an address unseen by modes.
_DLPACK: tuple[Any, ...] = (
    (torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch._C, "_to_dlpack")
)  # fmt: skip
_to_dlpack = torch._C._to_dlpack
_start, _submit = threading.Thread.start, ThreadPoolExecutor.submit
_backward: Any = torch.autograd._engine_run_backward


_blocks: list[Any] = []  # of `OutOfCore`, entered


def _seen() -> list[Any]:
    return [m.owner for m in _get_current_dispatch_mode_stack() if isinstance(m, Operations)]


def _within(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for block in tuple(_blocks):
            if not any(block is other for other in _seen()):
                stack.enter_context(RawAccess(block))
                stack.enter_context(Operations(block))
        return call(*args, **kwargs)


def _start_within(thread: threading.Thread) -> None:
    if thread.name.startswith(MOVER):
        return _start(thread)
    run = thread.run

    def begin() -> None:
        del thread.run  # the class's own again
        _within(run)

    thread.run = begin  # type: ignore[method-assign]
    return _start(thread)


def _submit_within(
    pool: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return _submit(pool, partial(_within, fn), *args, **kwargs)


def _backward_within(*args: Any, **kwargs: Any) -> Any:
    """Run a backward pass under `RawAccess`, which torch leaves out in `Tensor.backward`."""
    with ExitStack() as stack:
        for block in _seen():
            stack.enter_context(RawAccess(block, len(_get_current_dispatch_mode_stack())))
        return _backward(*args, **kwargs)


def _to_dlpack_within(tensor: torch.Tensor) -> object:
    for block in tuple(_blocks):
        block.bring(tensor, lock=True)
    return _to_dlpack(tensor)


def _patch(start: Any, submit: Any, backward: Any, export: Any) -> None:
    patched: Any = threading.Thread, ThreadPoolExecutor, torch.autograd
    patched[0].start, patched[1].submit, patched[2]._engine_run_backward = start, submit, backward
    for owner, name in _DLPACK:
        setattr(owner, name, export)


def watch(block: Any) -> Callable[[], None]:
    """Let threads see a block from now on; return a function that ends this."""
    _blocks.append(block)
    _patch(_start_within, _submit_within, _backward_within, _to_dlpack_within)

    def end() -> None:
        _blocks.remove(block)
        if not _blocks:
            _patch(_start, _submit, _backward, _to_dlpack)

    return end
