"""How times follow batch sizes: least squares in each turn."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from repro.experiments.judge import EQUIVALENCE_LEVEL, Case, Cases, Estimate, NotRun
from repro.records import Record


def step_samples(record: Record, side: int) -> dict[int, list[float]]:
    """Return the seconds of a row of steps in each turn, by batch size."""
    sizes = record.config["batch_sizes"]
    return {n: record.timings[f"{side}px, step of {n}"]["samples_s"] for n in sizes}


def epoch_samples(record: Record, side: int) -> dict[int, list[float]]:
    """Return the seconds of an epoch in each turn, by batch size."""
    samples = record.config["samples"]
    sizes = record.config["batch_sizes"]
    timed = {n: record.timings.get(f"{side}px, {n}, {samples}") for n in sizes}
    return {n: timing["samples_s"] for n, timing in timed.items() if timing}


def bend(seconds: Mapping[int, float]) -> float:
    """Return how far times lie off the chord half way between the end sizes, in percent of it.

    Of the parabola by least squares through one time for each batch size.
    """
    sizes = _sizes(seconds)
    scaled = 2 * (sizes - sizes.min()) / np.ptp(sizes) - 1  # from -1 to 1
    square, _, middle = np.polyfit(scaled, list(seconds.values()), 2)
    return float(-100 * square / (middle + square))


def doubling(seconds: Mapping[int, float]) -> float:
    """Return what a batch of twice the size multiplies the time by, over all sizes.

    The slope of logarithms by least squares.
    """
    slope, _ = np.polyfit(np.log2(_sizes(seconds)), np.log2(list(seconds.values())), 1)
    return float(2**slope)


def _sizes(seconds: Mapping[int, float]) -> np.ndarray:
    if len(seconds) < 4:
        raise NotRun(f"times of {len(seconds)} batch sizes; four say something of a line")
    return np.array(list(seconds), dtype=float)


def by_turn(samples: Mapping[int, Sequence[float]]) -> list[dict[int, float]]:
    """Return the seconds by batch size of each turn."""
    return [dict(zip(samples, turn, strict=True)) for turn in zip(*samples.values(), strict=True)]


def farthest(names: Iterable[str], errors_of: Callable[[str], Mapping[str, Estimate]]) -> Cases:
    """Return of each group of predictions the two that decide of all of it.

    Where the interval that reaches farthest is within a margin, all are; where the one whose nearer
    end is farthest from 0 is beyond it, not all are. Both are widened for the choice.
    """
    found: dict[str, Case] = {}
    for name in names:
        try:
            errors = errors_of(name)
            if not errors:
                raise NotRun("no records")
        except NotRun as missing:
            found[name] = missing
            continue
        count = len(errors)
        widened = {one: replace(error, candidates=count) for one, error in errors.items()}
        reaches = {one: _reach(error) for one, error in widened.items()}
        surely = {one: _surely(error) for one, error in widened.items()}
        farthest_, surest = (max(ends, key=lambda one: ends[one]) for ends in (reaches, surely))
        label = f"farthest of {count}: {farthest_}"
        found[name] = replace(widened[farthest_], label=label)
        if surest != farthest_:
            label = f"surest of {count}: {surest}"
            found[f"{name}, surest"] = replace(widened[surest], label=label)
    return found


def _reach(error: Estimate) -> float:
    end = max(map(abs, error.interval(EQUIVALENCE_LEVEL)))
    return math.inf if math.isnan(end) else end


def _surely(error: Estimate) -> float:
    low, high = error.interval(EQUIVALENCE_LEVEL)
    return -math.inf if math.isnan(low) else max(low, -high)


def per_step(steps: Mapping[int, Sequence[float]], medians: Sequence[float]) -> list[list[float]]:
    """Return seconds of one step by size, then turn; samples are of several steps in a row.

    Args:
        steps: Samples of each turn, by batch size.
        medians: Seconds of one step, by batch size.
    """
    rows = list(steps.values())
    in_a_row = round(float(np.median(rows[0])) / medians[0])
    return [[seconds / in_a_row for seconds in row] for row in rows]


def lines(steps: Mapping[int, Sequence[float]], medians: Sequence[float]) -> list[np.ndarray]:
    """Return a and b of each turn, given as for `per_step`."""
    turns = zip(*per_step(steps, medians), strict=True)
    return [np.polyfit(list(steps), turn, 1) for turn in turns]
