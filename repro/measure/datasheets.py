"""Devices by their data sheets, and the share of these rates that programs reach."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A device by its data sheet, dense rates.

    Attributes:
        name: As its maker calls it.
        flops: Of float32 in matrix products and convolutions, a second.
        low_flops: The same in 16 bits with sums of 32.
        bandwidth: Bytes a second of its memory.
        memory_bytes: What it has.
    """

    name: str
    flops: float
    low_flops: float
    bandwidth: float
    memory_bytes: int


DEVICES = {
    device.name: device
    for device in (
        # float32 outside tensor cores, which torch's convolutions leave by default for TF32.
        Device("GTX 1080", 8.9e12, 8.9e12, 320e9, 8 * GIB),
        Device("RTX 3090", 35.6e12, 71e12, 936e9, 24 * GIB),
        Device("A100", 156e12, 312e12, 2039e9, 80 * GIB),
        Device("H100", 495e12, 989e12, 3350e9, 80 * GIB),
        Device("H200", 495e12, 989e12, 4800e9, 141 * 10**9),
    )
}
REACHED = 0.4  # of a data sheet's rates, as convolutional networks do as a rule
LAUNCH_S = 5e-6  # that an operation takes at least
