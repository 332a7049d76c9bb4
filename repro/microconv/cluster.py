"""Distribute a mini-batch among devices of unequal speed (section III-E, Figure 13)."""

import json
import math
import operator
import re
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from repro.measure.checks import is_whole
from repro.microconv.cache import BenchmarkCache
from repro.microconv.kernels import Kernel
from repro.microconv.optimize import Candidate, batch_of, best_division, limit_of

D = TypeVar("D", bound=Hashable)


def cached_times(
    kernels: Sequence[tuple[str, Kernel, int]],
    cache: BenchmarkCache,
    limit_bytes: int | None = None,
) -> dict[str, dict[int, float]]:
    """Seconds of a network's convolutions on each device with measurements in a cache.

    Each node measures by `tune`, and one cache merges all measurements (`BenchmarkCache.take`), as
    the paper's nodes share a file (section III-E). As in the paper, the convolutions' time counts
    as the time of the pass.

    Args:
        kernels: Kernels from `find_kernels`, on any device.
        cache: Measurements of one or several machines.
        limit_bytes: Workspace of each kernel; None for no limit.

    Returns:
        By device (a CPU with its threads), then by batch size up to the kernels' own, the seconds
        of all kernels, each in its fastest division, for `split_batch`. Devices that lack a kernel,
        and sizes that are no sum of measured micro-batches, are left out.

    Raises:
        ValueError: The limit is no number of bytes, or `cache` is no cache.
    """
    if limit_bytes is not None:
        limit_bytes = limit_of(limit_bytes, "limit_bytes", ", or None")
    if not isinstance(cache, BenchmarkCache):
        raise ValueError(f"cache is {cache!r}; give a BenchmarkCache, of a file or in memory")
    shapes = [_shape_of(kernel.facts()) for _, kernel, _ in kernels]
    ways: dict[str, dict[str, dict[int, list[Candidate]]]] = {}
    for key, micro_batch, listed, times in cache.contents():
        facts = json.loads(key)
        shape = _shape_of(facts["kernel"])
        if shape not in shapes:
            continue
        threads = re.search(r"threads (\d+)", facts["backend"])
        device = facts["device"] + (f", {threads[1]} threads" if threads else "")
        candidates = ways.setdefault(device, {}).setdefault(shape, {}).setdefault(micro_batch, [])
        candidates += [
            Candidate(name, statistics.median(times[name]), size)
            for name, size in listed
            if times.get(name)
        ]
    totals: dict[str, dict[int, float]] = {}
    for device, by_shape in ways.items():
        for size in range(1, max((batch for _, _, batch in kernels), default=0) + 1):
            with suppress(ValueError, KeyError):
                best = [best_division(size, by_shape[shape], limit_bytes) for shape in shapes]
                totals.setdefault(device, {})[size] = math.fsum(d.time_s for d in best)
    return totals


def _shape_of(facts: Mapping[str, Any]) -> str:
    """A kernel without its device, which has a different name on each machine."""
    return json.dumps({k: v for k, v in facts.items() if k != "device"}, sort_keys=True)


def split_batch(batch: int, times: Mapping[D, Mapping[int, float]]) -> dict[D, int]:
    """Give each device a batch size so that the slowest one finishes first.

    Minimises max over g of Σ_b t_gb x_gb with Σ x_gb b = B and at most one size for each device.
    Among the splits with the least maximum, the one with the smallest sum of times is returned.

    Differs from the paper: two dynamic programmes over the assigned samples, of the maximum and
    of the sum, instead of an integer programme; exact, and without tolerances.

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
    batch = batch_of(batch)
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
