"""Checks of arguments, and of states and losses that have to be finite."""

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
        epoch: From 1, of the setting that the share was trained with; where a `ParameterServer` is
            used alone, the number of the share.
        step: The mini-batch of the share, from 1, where it was seen first; None where a
            `ParameterServer` is used alone.
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
        """Pickle by the arguments: it crosses processes."""
        return NonFiniteError, self._arguments


class ClusterError(RuntimeError):
    """A cluster cannot be reached, is too small or died, or an exception cannot cross it."""


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number: a float, an int or numpy's, and no truth value."""
    # numpy's truth values are no Real, as little as text and tensors.
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        return False


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number within bounds as an int; anything else raises a ValueError."""
    if not is_whole(value, least, most):
        allowed = f"at least {least:d}" if most is None else f"from {least:d} to {most}"
        raise ValueError(f"{name} is {value!r}; give a whole number, {allowed}")
    return int(value)


def positive(name: str, value: Any) -> float | int:
    """A finite number above 0 as Python's own; anything else raises a ValueError."""
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}; give a finite number above 0")
    return plain(value)


def plain(value: Any) -> float | int:
    """A number as Python's own int or float: checkpoints are compared by text."""
    if type(value) in (int, float):
        return value  # type: ignore[no-any-return]
    return int(value) if is_whole(value) else float(value)


def choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise a ValueError where a value is none of those that are allowed."""
    known = list(allowed)
    if value not in known:
        raise ValueError(f"{name} is {value!r}; choose among {', '.join(map(str, known))}")


def instance(name: str, value: Any, kind: type) -> None:
    """Raise a ValueError where a value is of another type."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is of type {type(value).__name__}; give a {kind.__name__}")


def function(name: str, value: Any, optional: bool = False) -> None:
    """Raise a ValueError where a value cannot be called."""
    if not callable(value) and not (optional and value is None):
        raise ValueError(f"{name} is of type {type(value).__name__}; give a function")


def not_finite(state: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor that holds NaN or an infinity, None where none does.

    One reduction for each tensor, and the device is waited for once.
    """
    ends: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in state.values():
        if tensor.is_floating_point() and tensor.numel():
            # Ten times as fast on a CPU as isfinite; NaN comes through.
            two = torch.aminmax(tensor.detach())
            ends.setdefault((tensor.dtype, tensor.device), []).extend(two)
    if all(bool(torch.stack(of_kind).isfinite().all()) for of_kind in ends.values()):
        return None
    return next(n for n, t in state.items() if t.is_floating_point() and not t.isfinite().all())
