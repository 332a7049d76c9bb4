"""The actions of a swap plan."""

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The effect of an action on one variable."""

    SWAP_IN = "swap in"  # take device memory and start the copy from the host
    ALLOCATE = "allocate"  # take device memory; the next function overwrites it whole
    SWAP_OUT = "swap out"  # start the copy to the host; the device memory stays taken
    RELEASE = "release"  # wait for its copy to the host, if one runs, and free the device memory


class Action(NamedTuple):
    """One action on one variable."""

    kind: Kind
    variable: str
