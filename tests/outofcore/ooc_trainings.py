"""Iterations with and without a block, for the tests of `repro.outofcore`."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from repro.outofcore import OutOfCore

KIB, MIB = 2**10, 2**20
AMPLE = 1 << 40
Step = Callable[[], Any]


def crowd(n: int = 8) -> list[torch.Tensor]:
    """Tensors of 4 KiB: all of them, one after the other, fill a small budget."""
    return [torch.full((KIB,), float(i)) for i in range(n)]


def touch(tensors: Sequence[torch.Tensor]) -> None:
    """Use each tensor, so that whatever else is on the device has to leave."""
    for tensor in tensors:
        tensor.mul_(1)


def back(loss: torch.Tensor) -> float:
    """Backpropagate a loss, and return it."""
    loss.backward()
    return loss.item()


def plain(make: Callable[[], Any], n: int = 4) -> list[Any]:
    """Return what `n` steps return without a block; `make` as for `same`."""
    torch.manual_seed(0)
    made = make()
    step = made[0] if isinstance(made, tuple) else made
    return [step() for _ in range(n)]


def within(budget: int, make: Callable[[], Any], n: int = 4) -> tuple[list[Any], OutOfCore]:
    """Return what `n` steps return within a budget, and the block."""
    torch.manual_seed(0)
    made = make()
    step, options = made if isinstance(made, tuple) else (made, {})
    seen = []
    with OutOfCore(budget, **options) as block:
        for _ in range(n):
            seen.append(step())
            if "optimizer" not in options:
                block.step()
    return seen, block


def same(budget: int, make: Callable[[], Any], n: int = 4) -> OutOfCore:
    """Check that steps return within a budget what they do without, and return the block.

    Args:
        budget: In bytes.
        make: Returns a step, or a step and the arguments of the block; random numbers are seeded.
        n: Steps. The block is told where each ends, unless `make` names an optimizer.
    """
    seen, block = within(budget, make, n)
    assert seen == plain(make, n)
    return block


def child(code: str, *arguments: str) -> str:
    """Run code that may crash in a process of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.strip()
