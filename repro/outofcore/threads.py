"""Threads beside the one that trains: what they do with its tensors is seen, too.

A mode of torch holds in one thread alone. While a block is entered, threads that are started and
work that is submitted to pools of threads therefore begin by entering modes of their own. Threads
that run since before the block are not seen.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
import torch.utils.dlpack
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from repro.outofcore.host import MOVER
from repro.outofcore.operations import Operations, RawAccess

# What torch's to_dlpack is called by; unlike the others that give addresses, no mode sees it.
_DLPACK: tuple[tuple[Any, str], ...] = (
    (torch, "to_dlpack"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch._C, "_to_dlpack"),
)
_to_dlpack = torch._C._to_dlpack
_start, _submit = threading.Thread.start, ThreadPoolExecutor.submit


class Block(Protocol):
    """A block as other threads see it."""

    device: torch.device

    @property
    def entered(self) -> bool:
        """Whether it is."""

    def run_beside(
        self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operation of another thread."""

    def bring(self, tensor: torch.Tensor, lock: bool) -> None:
        """Have a tensor's bytes where its address says."""

    def snapshot(self, tensor: torch.Tensor, keep: bool = False) -> torch.UntypedStorage:
        """Return a copy of a tensor's storage on the host."""

    def hold_sizes(self, values: Iterable[object]) -> None:
        """Keep tensors of whole numbers where they are."""


_blocks: list[Block] = []


class Beside:
    """What sees the operations of another thread."""

    def __init__(self, block: Block) -> None:
        self.block, self.device = block, block.device

    def run(self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        if not self.block.entered:  # it was left while the thread goes on
            return operation(*args, **kwargs)
        return self.block.run_beside(operation, args, kwargs)

    def bring(self, tensor: torch.Tensor, lock: bool) -> None:
        """Have a tensor's bytes where its address says."""
        if self.block.entered:
            self.block.bring(tensor, lock)

    def snapshot(self, tensor: torch.Tensor, keep: bool = False) -> torch.UntypedStorage:
        """Return a copy of a tensor's storage on the host."""
        return self.block.snapshot(tensor, keep) if self.block.entered else tensor.untyped_storage()

    def hold_sizes(self, values: Iterable[object]) -> None:
        """Keep tensors of whole numbers where they are."""
        if self.block.entered:
            self.block.hold_sizes(values)


def _within(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    owners = [m.owner for m in _get_current_dispatch_mode_stack() if isinstance(m, Operations)]
    seen = [owner.block if isinstance(owner, Beside) else owner for owner in owners]
    with ExitStack() as stack:
        for block in tuple(_blocks):
            if not any(block is other for other in seen):
                beside = Beside(block)
                stack.enter_context(RawAccess(beside))
                stack.enter_context(Operations(beside))
        return call(*args, **kwargs)


def _start_within(thread: threading.Thread) -> None:
    if thread.name.startswith(MOVER):
        return _start(thread)
    run = thread.run

    def begin() -> None:
        del thread.run  # as it was
        _within(run)

    thread.run = begin  # type: ignore[method-assign]
    return _start(thread)


def _submit_within(
    pool: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return _submit(pool, partial(_within, fn), *args, **kwargs)


def _to_dlpack_within(tensor: torch.Tensor) -> object:
    for block in tuple(_blocks):
        block.bring(tensor, lock=True)
    return _to_dlpack(tensor)


def watch(block: Block) -> Callable[[], None]:
    """Have threads see a block from now on; return what ends it."""
    _blocks.append(block)
    patched: Any = threading.Thread, ThreadPoolExecutor
    patched[0].start, patched[1].submit = _start_within, _submit_within
    for owner, name in _DLPACK:
        setattr(owner, name, _to_dlpack_within)

    def end() -> None:
        _blocks.remove(block)
        if not _blocks:
            patched[0].start, patched[1].submit = _start, _submit
            for owner, name in _DLPACK:
                setattr(owner, name, _to_dlpack)

    return end
