"""A virtual clock: what streams, events and waits take, where each operation takes what is said."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

import simulated_device_native as native
import torch


@dataclass(frozen=True)
class Costs:
    """What operations take; the host takes no time.

    Attributes:
        kernel_s: Seconds of a kernel, whatever its bytes.
        bytes_per_s: Rate of the bytes that a kernel reads and writes.
        copy_s: Seconds of a copy between the host and the device, whatever its bytes.
        in_bytes_per_s: Rate of copies to the device.
        out_bytes_per_s: Rate of copies to the host.
    """

    kernel_s: float
    bytes_per_s: float
    copy_s: float
    in_bytes_per_s: float
    out_bytes_per_s: float


@contextlib.contextmanager
def virtual_time(costs: Costs) -> Iterator[Callable[[], float]]:
    """Keep a virtual clock, from 0; events measure by it.

    An operation begins once its stream, what that waited for, and the host have come so far. An
    event is complete for the host once it has waited as long; asking does not make it so.

    Yields:
        What returns the seconds that device 0's default stream has come to.

    Raises:
        RuntimeError: Work is being deferred, or is to be within.
    """
    for index in range(native.DEVICES):
        torch.accelerator.synchronize(index)
    native.keep_time(*astuple(costs))
    native.set_patience(2**31 - 1)
    try:
        yield lambda: float(native.virtual_s(0, 0))
    finally:
        native.set_patience(1000)
        native.end_time()
