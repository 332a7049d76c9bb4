"""Checks of arguments, and of states and losses, which must be finite."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from repro.measure.checks import is_whole


class NonFiniteError(FloatingPointError):
    """A worker's loss or weights became infinite or NaN; nothing of its share was merged.

    Attributes:
        worker: Number of the worker.
        epoch: Epoch of the share's setting, from 1; without a training loop around the
            `ParameterServer`, the number of the share.
        step: The first such mini-batch of the share, from 1; None without a training loop.
    """

    def __init__(
        self, what: str, worker: int, epoch: int, step: int | None, lr: float | None = None
    ) -> None:
        self.worker, self.epoch, self.step = worker, epoch, step
        self._arguments = (what, worker, epoch, step, lr)
        where = f"epoch {epoch}" if step is None else f"epoch {epoch}, step {step} of its share"
        rate = "" if lr is None else f" (it was {lr:g})"
        super().__init__(
            f"training diverged: {what} (worker {worker}, {where}); nothing of this share was "
            f"merged; lower the learning rate{rate}, or look for such values in data and loss"
        )

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Pickle by the arguments, for transfer between processes."""
        return NonFiniteError, self._arguments


class ClusterError(RuntimeError):
    """A cluster cannot be reached, is too small or died, or an exception cannot cross it."""


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number (Python's or numpy's), no boolean."""
    # numpy's booleans, text and tensors are not instances of Real.
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        return False


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer within bounds as an int; anything else raises a ValueError."""
    if not is_whole(value, least, most):
        allowed = f"at least {least:d}" if most is None else f"from {least:d} to {most}"
        raise ValueError(f"{name} is {value!r}; give a whole number, {allowed}")
    return int(value)


def positive(name: str, value: Any) -> float:
    """A finite number above 0 as a float; anything else raises a ValueError."""
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}; give a finite number above 0")
    return float(value)


def choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise a ValueError unless a value is allowed."""
    known = list(allowed)
    if value not in known:
        raise ValueError(f"{name} is {value!r}; choose among {', '.join(map(str, known))}")


def not_finite(state: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with NaN or an infinity, or None.

    One reduction for each tensor, and one wait for the device.
    """
    ends: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in state.values():
        if tensor.is_floating_point() and tensor.numel():
            # On a CPU ten times as fast as isfinite; NaN propagates.
            two = torch.aminmax(tensor.detach())
            ends.setdefault((tensor.dtype, tensor.device), []).extend(two)
    if all(bool(torch.stack(of_kind).isfinite().all()) for of_kind in ends.values()):
        return None
    return next(n for n, t in state.items() if t.is_floating_point() and not t.isfinite().all())
