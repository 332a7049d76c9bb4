"""Distribute a mini-batch among devices of unequal speed (section III-E, Figure 13)."""

import math
import operator
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from repro.measure.checks import is_whole, whole

D = TypeVar("D", bound=Hashable)


def split_batch(batch: int, times: Mapping[D, Mapping[int, float]]) -> dict[D, int]:
    """Give each device a batch size so that the slowest one finishes first.

    Minimises max over g of Σ_b t_gb x_gb with Σ x_gb b = B and at most one size for each device;
    among equals the sum of times. Differs from the paper: two dynamic programmes over the assigned
    samples, of the maximum and of the sum, instead of an integer programme; exact.

    Args:
        batch: The mini-batch size B.
        times: By device, then by batch size, the seconds of a forward and backward pass.

    Returns:
        The batch size of every participating device; a device that would only slow the others
        down is left out.

    Raises:
        ValueError: `batch` is below 1, a time is negative or not finite, a size is below 1, or no
            choice of sizes sums to the mini-batch.
    """
    batch = whole("batch", batch, 1)
    for device, measured in times.items():
        for size, time in measured.items():
            if not (is_whole(size, 1) and math.isfinite(time) and time >= 0):
                raise ValueError(
                    f"device {device!r} has the time {time} at batch size {size}; sizes are whole "
                    f"numbers from 1 and times finite seconds >= 0"
                )
    slowest, _ = _best_split(batch, times, math.inf, max)
    if slowest == math.inf:
        sizes = {device: sorted(map(int, measured)) for device, measured in times.items()}
        raise ValueError(
            f"no choice of at most one size for each device sums to the mini-batch {batch}; the "
            f"sizes are {sizes}: measure more of them"
        )
    return _best_split(batch, times, slowest, operator.add)[1]


def _best_split(
    batch: int,
    times: Mapping[D, Mapping[int, float]],
    bound: float,
    combine: Callable[[float, float], float],
) -> tuple[float, dict[D, int]]:
    """The least maximum or sum of times within a bound, and the sizes that attain it."""
    # By samples assigned so far.
    best: dict[int, tuple[float, dict[D, int]]] = {0: (0.0, {})}
    for device, measured in times.items():
        extended = dict(best)
        for taken, (cost, split) in best.items():
            for size, time in measured.items():
                now, more = taken + int(size), combine(cost, time)
                if now <= batch and time <= bound and more < extended.get(now, (math.inf,))[0]:
                    extended[now] = (more, {**split, device: int(size)})
        best = extended
    return best.get(batch, (math.inf, {}))
