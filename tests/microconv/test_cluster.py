import itertools
import json
import math
import random

import pytest

from repro.microconv import (
    BenchmarkCache,
    Convolution,
    Kernel,
    cached_times,
    split_batch,
)


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
        *((n, {"a": {1: 1.0}}, f"batch is {n}; it must be a whole number from 1") for n in
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


def kernel(device="cpu", kind="forward"):
    return Kernel(kind, Convolution(3, 8, 8, 4, (3, 3)), device=device)


def node(name, seconds, sizes=(1, 2, 4), kinds=("forward", "backward_filter")):
    """A cache as another machine has it: a micro-batch of b takes `seconds` × b."""
    cache = BenchmarkCache(None)
    for kind in kinds:
        facts = {"kernel": kernel("cuda:0", kind).facts(), "device": name}
        key = json.dumps(facts | {"backend": "torch 2, threads 1"}, sort_keys=True)
        for b in sizes:
            cache.store_listing(key, b, [("torch:im2col", 100 * b), ("torch:native", 0)])
            times = {"torch:im2col": [seconds * b], "torch:native": [3 * seconds * b]}
            cache.store_times(key, b, times)
    return cache


NETWORK = [("conv", kernel(kind=kind), 4) for kind in ("forward", "backward_filter")]


def test_one_cache_takes_over_those_of_all_nodes_and_the_split_is_by_speed():
    merged = node("fast", 1.0)
    assert merged.take(node("slow", 3.0)) == 12
    assert merged.take(node("slow", 9.0)) == 0  # known: the first stays
    times = cached_times(NETWORK, merged)
    assert times == {
        "fast, 1 threads": {b: pytest.approx(2.0 * b) for b in (1, 2, 3, 4)},
        "slow, 1 threads": {b: pytest.approx(6.0 * b) for b in (1, 2, 3, 4)},
    }
    assert split_batch(4, times) == {"fast, 1 threads": 3, "slow, 1 threads": 1}
    for limit, seconds in ((0, 24.0), (100, 8.0)):  # leaves slower algorithms
        of_fast = cached_times(NETWORK, merged, limit)["fast, 1 threads"]
        assert of_fast[4] == pytest.approx(seconds)
    for limit in (-1, 1e6, True):
        with pytest.raises(ValueError, match=r"limit_bytes is .*; it must be at least 0"):
            cached_times(NETWORK, merged, limit)
    with pytest.raises(ValueError, match="cache is 'file'; give a BenchmarkCache"):
        cached_times(NETWORK, "file")


def test_a_device_without_all_kernels_and_sizes_that_are_no_sum_are_left_out():
    merged = node("fast", 1.0, sizes=(2,))
    merged.take(node("part", 0.1, kinds=("forward",)))
    ((device, times),) = cached_times(NETWORK, merged).items()
    assert device == "fast, 1 threads" and set(times) == {2, 4}
    assert cached_times([], merged) == {}
