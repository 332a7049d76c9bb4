"""Processes that are forked within a block: they read what it has, and never move it."""

import os
from typing import Any

from repro.outofcore.recording import tensors_in
from repro.outofcore.residency import Residency

process = os.getpid()


def _forked() -> None:
    global process
    process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)  # to ask the system at every operation takes time


class SwappedOutError(RuntimeError):
    """A value is asked for where it cannot be brought to."""


def check_readable(residency: Residency, values: list[Any], from_file: bool) -> None:
    """Refuse what a forked process cannot read: of memory it has its own copy, not of a file.

    Args:
        residency: What it has of the block's.
        values: What it reads: tensors, lists of them, and others.
        from_file: Tensors are swapped out to a file.

    Raises:
        SwappedOutError: A tensor was swapped out when the process was forked.
    """
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
