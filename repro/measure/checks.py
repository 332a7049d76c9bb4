"""Argument checks shared by all methods."""

import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any


def is_whole(value: Any, least: int | None = None, most: int | None = None) -> bool:
    """Whether a value is an integer (Python's or numpy's, no boolean) within the given bounds."""
    if isinstance(value, bool):
        return False
    try:
        whole = operator.index(value)
    except TypeError:
        return False
    return (least is None or whole >= least) and (most is None or whole <= most)


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer within bounds as an int; anything else raises a ValueError."""
    if not is_whole(value, least, most):
        allowed = f"at least {least:d}" if most is None else f"from {least:d} to {most}"
        raise ValueError(f"{name} is {value!r}; give a whole number, {allowed}")
    return int(value)


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number (Python's or numpy's), no boolean."""
    # numpy's booleans, text and tensors are not instances of Real.
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        return False


def choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise a ValueError unless a value is allowed."""
    known = list(allowed)
    if value not in known:
        raise ValueError(f"{name} is {value!r}; choose among {', '.join(map(str, known))}")
