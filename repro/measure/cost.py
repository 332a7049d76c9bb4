"""Time and memory of a training step as straight lines of the batch size.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", section 3.2
(equations 2 and 3, time) and section 5.3 (equation 9, memory).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from repro.measure.checks import is_whole
from repro.measure.memory import LinearMemoryModel, MemoryMeter, comparable_peaks
from repro.measure.timing import Timing, time_interleaved


@dataclass(frozen=True)
class TimeModel:
    """Seconds of a training step as a straight line of the batch size x, t = a x + b."""

    a: float  # seconds per sample, above 0
    b: float  # seconds per step
    seconds: tuple[float, ...] = ()  # per step, as measured; empty for a line that was not fitted

    def __post_init__(self) -> None:
        if not (math.isfinite(self.a) and math.isfinite(self.b)) or self.a <= 0:
            raise ValueError(
                f"a is {self.a} s per sample and b {self.b} s per step; both must be finite and a "
                "above 0"
            )

    @classmethod
    def fit(cls, batch_sizes: Sequence[int], seconds_per_batch: Sequence[float]) -> "TimeModel":
        """Fit the line by least squares (section 3.2).

        Raises ValueError if the points are too few, or time does not increase with the batch size.
        """
        sizes, seconds = np.asarray(batch_sizes, float), np.asarray(seconds_per_batch, float)
        positive = all(
            (values > 0).all() and (values < np.inf).all() for values in (sizes, seconds)
        )
        if len(sizes) != len(seconds) or len({*sizes}) < 2 or not positive:
            raise ValueError(
                "the time model is fitted to two or more distinct batch sizes of at least 1, with "
                f"one positive value each; got {len(sizes)} batch sizes {sizes[:8].tolist()} and "
                f"{len(seconds)} values {seconds[:8].tolist()}"
            )
        a, b = np.polyfit(sizes, seconds, 1)
        # Equal values give a slope of rounding errors.
        if a * np.ptp(sizes) <= 1e-9 * seconds.max():
            raise ValueError(
                f"seconds per step do not increase with the batch size: {seconds[:8].tolist()} at "
                f"{sizes[:8].tolist()}; measure larger batch sizes, or more repeats"
            )
        return cls(float(a), float(b), tuple(seconds.tolist()))

    def predict(self, batch_size: int) -> float:
        """Seconds of one step, a x + b."""
        return self.a * batch_size + self.b

    def epoch_time(self, batch_size: int, samples: int, approximate: bool = False) -> float:
        """Seconds of one pass over `samples`; a ValueError where there can be none.

        By equation 2, (a x + b) ⌈d / x⌉, which counts the last batch as full; with `approximate`
        by equation 3, (a + b / x) d.
        """
        self._check_pass(batch_size, samples)
        if approximate:
            return (self.a + self.b / batch_size) * samples
        return self.predict(batch_size) * math.ceil(samples / batch_size)

    def pass_time(self, batch_size: int, samples: int) -> float:
        """Seconds of one pass with the last batch at its true size: a d + b ⌈d / x⌉."""
        self._check_pass(batch_size, samples)
        return self.a * samples + self.b * math.ceil(samples / batch_size)

    @staticmethod
    def _check_pass(batch_size: int, samples: int) -> None:
        if batch_size < 1 or samples < 0:
            raise ValueError(
                f"batch_size is {batch_size} and samples {samples}; give at least 1 and 0"
            )


@dataclass(frozen=True)
class Probe:
    """Lines fitted to medians of `timings` and to `peaks` (bytes), both by batch size."""

    time: TimeModel
    memory: LinearMemoryModel
    timings: Mapping[int, Timing]
    peaks: Mapping[int, int]


def probe(
    make_step: Callable[[int], Callable[[], Any]],
    batch_sizes: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    warmup: int = 2,
    repeats: int = 5,
) -> Probe:
    """Measure training steps of several batch sizes and fit lines of time and memory.

    `make_step` returns a function that runs one training step of a batch size. Times are medians;
    each round measures every batch size once. A peak is that of two steps, so that it includes the
    optimizer's state; see `comparable_peaks` for the bytes counted. On a CPU it leaves out what is
    in memory before: the batch, and the state of an optimizer that all sizes share. Raises
    ValueError if there are fewer than two sizes, or peaks or times do not increase.
    """
    sizes, meters = sorted(set(batch_sizes)), []
    if len(sizes) < 2 or not all(is_whole(size, 1) for size in sizes):
        raise ValueError(f"batch_sizes are {sizes}; give two or more, distinct, from 1 on")
    # An optimizer that all sizes share makes its state now, and not in the first size's peak.
    make_step(sizes[0])()
    for size in sizes:
        step = make_step(size)
        with MemoryMeter(device) as meter:
            step()
            step()  # the optimizer made its state in the first
        meters.append(meter)
        del step
    peaks = dict(zip(sizes, comparable_peaks(meters), strict=True))
    memory = LinearMemoryModel.fit(sizes, list(peaks.values()))
    if memory.bytes_per_sample <= 0:
        raise ValueError(
            f"peaks do not increase with the batch size: {peaks} bytes; measure larger batch sizes"
        )
    steps = {str(size): make_step(size) for size in sizes}
    timed = time_interleaved(steps, warmup=warmup, repeats=repeats, device=device)
    timings = {int(name): timing for name, timing in timed.items()}
    time = TimeModel.fit(sizes, [timings[size].median_s for size in sizes])
    return Probe(time, memory, timings, peaks)
