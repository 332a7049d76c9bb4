"""How times follow batch sizes: least squares over the samples of turns, as gaps to be judged."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from repro.experiments.intervals import Gap, NotRun
from repro.experiments.judging import Verdict, combine, equivalence
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


def bend(samples: Mapping[int, Sequence[float]]) -> Gap:
    """Return how far times lie off the chord half way between the end sizes, in percent of it.

    Of the parabola through all samples by least squares; its residuals give the error.
    """
    sizes, seconds, turns = _flat(samples)
    scaled = 2 * (sizes - sizes.min()) / np.ptp(sizes) - 1  # from -1 to 1
    (middle, _, square), error, dof = _least_squares(
        np.stack([np.ones_like(scaled), scaled, scaled**2]), seconds, 2
    )
    chord = middle + square
    return _estimate(-100 * square / chord, 100 * error / chord, dof, turns, unit="%", digits=1)


def doubling(samples: Mapping[int, Sequence[float]]) -> Gap:
    """Return what a batch of twice the size multiplies the time by, over all sizes.

    The slope of logarithms by least squares; its residuals give the error.
    """
    sizes, seconds, turns = _flat(samples)
    logs = np.log2(sizes)
    (_, slope), error, dof = _least_squares(
        np.stack([np.ones_like(logs), logs]), np.log(seconds), 1
    )
    return _estimate(slope, error, dof, turns, log=True)


def _flat(samples: Mapping[int, Sequence[float]]) -> tuple[np.ndarray, np.ndarray, int]:
    pairs = [(float(n), value) for n, values in samples.items() for value in values]
    if len(samples) < 4:
        raise NotRun(f"times of {len(samples)} batch sizes; four say something of a line")
    sizes, seconds = np.array(pairs).T
    return sizes, seconds, min(len(values) for values in samples.values())


def _least_squares(
    terms: np.ndarray, values: np.ndarray, wanted: int
) -> tuple[np.ndarray, float, int]:
    """Return all coefficients, and the standard error of one with its degrees of freedom."""
    inverse = np.linalg.inv(terms @ terms.T)
    coefficients = inverse @ terms @ values
    dof = values.size - len(terms)
    variance = float(((values - coefficients @ terms) ** 2).sum()) / dof
    return coefficients, math.sqrt(variance * inverse[wanted, wanted]), dof


def _estimate(mean: float, error: float, dof: int, turns: int, **options: Any) -> Gap:
    # Of one turn more or less: the spread that gives this error as a difference of two cells.
    sd = float(error) * math.sqrt(turns / 2)
    return Gap(float(mean), float(error), dof, sd, trials="rounds", **options)


def all_within(gaps: Mapping[str, Gap], what: str, percent: float) -> Verdict:
    """Judge whether every error of a prediction lies within `percent`, and tell the largest.

    Of many cases some lie beyond by chance: one fails where its interval is beyond the margin even
    when widened for their number (Bonferroni).
    """
    if not gaps:
        raise NotRun("no records")
    margin = percent / 100
    parts = {}
    for name, gap in gaps.items():
        word, evidence = equivalence(name, gap, margin)
        if word == "not reproduced" and not _beyond(gap, math.log1p(margin), len(gaps)):
            word = "undecided"
        parts[name] = word, evidence
    words = [word for word, _ in parts.values()]
    said = {"reproduced": "within", "undecided": "open", "not reproduced": "beyond"}
    counted = ", ".join(f"{words.count(word)} {meaning}" for word, meaning in said.items())
    farthest = max(gaps, key=lambda name: abs(gaps[name].mean))
    return Verdict(
        combine(list(parts.values())).word,
        f"of {len(gaps)} {what} {counted}; the farthest: {parts[farthest][1]}",
    )


def _beyond(gap: Gap, limit: float, count: int) -> bool:
    low, high = gap.interval(1 - 0.10 / count)
    return low > limit or high < -limit


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
