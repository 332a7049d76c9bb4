"""Argument checks shared by all methods."""

import operator
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
