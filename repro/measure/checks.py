"""Checks of arguments that every method makes."""

import operator
from typing import Any


def is_whole(value: Any, least: int | None = None, most: int | None = None) -> bool:
    """Whether a value is a whole number within bounds: an int or numpy's, and no truth value.

    Args:
        value: Anything.
        least: The smallest that is allowed, None for no bound.
        most: The largest.
    """
    if isinstance(value, bool):
        return False
    try:
        whole = operator.index(value)
    except TypeError:
        return False
    return (least is None or whole >= least) and (most is None or whole <= most)
