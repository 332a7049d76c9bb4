"""Devices' data sheets, and the share of their rates that programs reach."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A device's data sheet, with its dense rates a second.

    `flops` are float32 operations in matrix products and convolutions, `low_flops` the same in 16
    bits with sums in 32, `bandwidth` is memory's bytes, `link` those that copies from or to the
    host move over PCIe.
    """

    name: str
    flops: float
    low_flops: float
    bandwidth: float
    memory_bytes: int
    link: float

    def seconds(self, flops: ArrayLike, moved: ArrayLike, low: ArrayLike) -> NDArray[np.float64]:
        """Seconds of operations: the longer of computing and moving bytes, each at `REACHED`.

        Those in 16 bits are marked in `low`. Operations are not fused.
        """
        computing = np.asarray(flops) / (REACHED * np.where(low, self.low_flops, self.flops))
        moving = np.asarray(moved) / (REACHED * self.bandwidth)
        return np.maximum(np.maximum(computing, moving), LAUNCH_S)


DEVICES = {
    device.name: device
    for device in (
        # float32 outside tensor cores; torch's convolutions use TF32 by default if available.
        Device("GTX 1080", 8.9e12, 8.9e12, 320e9, 8 * GIB, 15.8e9),
        Device("RTX 3090", 35.6e12, 71e12, 936e9, 24 * GIB, 31.5e9),
        Device("A100", 156e12, 312e12, 2039e9, 80 * GIB, 31.5e9),
        Device("H100", 495e12, 989e12, 3350e9, 80 * GIB, 63e9),
        Device("H200", 495e12, 989e12, 4800e9, 141 * 10**9, 63e9),
    )
}
REACHED = 0.4  # share of a data sheet's rates that convolutional networks typically reach
COPIED = 0.85  # share of a link's rate that copies reach: 54.5 to 55.1 of 63 GB/s by two cards
LAUNCH_S = 5e-6  # least time of an operation
