"""`split_batch` against exhaustive search; `test_updates` trains by its shares."""

import itertools
import math
import random

import pytest

from repro.microconv import split_batch


def exhaustive(batch, times):
    """(Slowest, sum) of the best split over every choice of at most one size; None without one."""
    options = [[(0, 0), *measured.items()] for measured in times.values()]
    splits = [
        (max(time for _, time in choice), sum(time for _, time in choice))
        for choice in itertools.product(*options)
        if sum(size for size, _ in choice) == batch
    ]
    return min(splits, default=None)


def draw(rng, time):
    return {
        f"gpu{index}": {
            rng.randint(1, 14): time(rng) for _ in range(rng.randint(0 if index else 1, 6))
        }
        for index in range(rng.randint(1, 4))
    }


@pytest.mark.parametrize("most", [9, 2**30])  # many ties, and none
def test_against_exhaustive_search(most):
    rng, solved = random.Random(0), 0
    for _ in range(300):
        # Sums are exact in floating point.
        batch, times = rng.randint(1, 24), draw(rng, lambda rng: rng.randint(0, most) * 2.0**-40)
        expected = exhaustive(batch, times)
        if expected is None:
            with pytest.raises(ValueError, match=f"sums to the mini-batch {batch};"):
                split_batch(batch, times)
            continue
        solved += 1
        split = split_batch(batch, times)
        assert sum(split.values()) == batch
        taken = [times[device][size] for device, size in split.items()]
        assert (max(taken), sum(taken)) == expected
    assert 100 < solved < 275


@pytest.mark.parametrize(
    ("batch", "times", "message"),
    [
        *((n, {"a": {1: 1.0}}, f"batch is {n}; give a whole number, at least 1") for n in
          (0, 2.5, True, None)),
        *((4, {"a": {4: 1.0}, "b": {2: 1.0, n: time}}, f"'b' has the time {time} at batch size")
          for n, time in ((0, 1.0), (1.5, 1.0), (True, 1.0), (4, -0.1), (4, math.nan))),
        *((8, times, r"sums to the mini-batch 8; the sizes are .*: measure")
          for times in ({}, {"a": {}}, {"a": {2: 1.0, 4: 1.0}, "b": {9: 1.0}})),
        (6, {"a": {4: 1.0, 2: 1.0}}, r"'a': \[2, 4\]"),  # one device does not take two sizes
    ],
)  # fmt: skip
def test_what_cannot_be_split(batch, times, message):
    with pytest.raises(ValueError, match=message):
        split_batch(batch, times)
