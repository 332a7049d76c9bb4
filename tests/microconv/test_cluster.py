import itertools
import json
import math
import random
import re

import numpy as np
import pytest
import torch

from repro.microconv import (
    BenchmarkCache,
    Convolution,
    Kernel,
    cached_times,
    find_kernels,
    split_batch,
    tune,
)
from repro.microconv.cache import Key


def exhaustive(batch, times):
    """(Slowest, sum) of the best split over every choice of at most one size; None without one."""
    devices = list(times)
    options = [[(0, 0), *times[device].items()] for device in devices]
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


@pytest.mark.parametrize(
    "time",
    [
        lambda rng: rng.randint(0, 9),  # many ties
        lambda rng: rng.randint(1, 1000),
        lambda rng: rng.randint(1, 2**30) * 2.0**-40,  # sums are exact in floating point
    ],
    ids=["ties", "whole", "real"],
)
@pytest.mark.parametrize("block", range(4))
def test_against_exhaustive_search(time, block):
    rng = random.Random(block)
    solved = refused = 0
    for _ in range(120):
        batch, times = rng.randint(1, 24), draw(rng, time)
        expected = exhaustive(batch, times)
        if expected is None:
            refused += 1
            with pytest.raises(ValueError, match=f"sums to the mini-batch {batch};"):
                split_batch(batch, times)
            continue
        solved += 1
        split = split_batch(batch, times)
        assert sum(split.values()) == batch
        taken = [times[device][size] for device, size in split.items()]
        assert (max(taken), sum(taken)) == expected
    assert solved > 40 and refused > 10


def test_equal_devices_share_equally_and_unequal_ones_by_speed():
    linear = {size: float(size) for size in range(1, 257)}
    assert split_batch(256, {"a": linear, "b": linear}) == {"a": 128, "b": 128}
    twice = {size: size / 3 for size in range(1, 257)}
    assert split_batch(256, {"slow": linear, "fast": twice}) == {"slow": 64, "fast": 192}


def test_a_device_that_would_only_slow_the_others_down_is_left_out():
    sizes = range(1, 33)
    fast = {size: 0.1 + 0.01 * size for size in sizes}
    assert split_batch(32, {"a": fast, "slow": {size: 5.0 * size for size in sizes}}) == {"a": 32}
    # It could take a share within the same slowest time, but only at more time in all.
    times = {"a": {4: 3.0, 3: 3.0}, "b": {1: 2.0}, "c": {4: 3.0}}
    assert split_batch(4, times) in ({"a": 4}, {"c": 4})


def test_the_order_of_the_devices_is_kept_and_they_are_anything_hashable():
    times = {("node", 1): {2: 1.0}, None: {1: 1.0}, 3: {4: 1.0}}
    assert list(split_batch(7, times)) == [("node", 1), None, 3]


def test_whole_numbers_of_numpy():
    # As they come out of a data frame; beyond 62 a shift of numpy's own integers overflows.
    times = {name: {np.int64(size): np.float64(size) for size in (64, 128)} for name in "ab"}
    assert split_batch(128, times) == {"a": 64, "b": 64}
    assert split_batch(np.int64(256), times) == {"a": 128, "b": 128}


def test_large_batches_are_fast_and_exact():
    times = {
        f"gpu{g}": {size: 0.003 + size * (1 + g) * 1e-4 for size in range(1, 513)} for g in range(6)
    }
    split = split_batch(1024, times)
    assert sum(split.values()) == 1024
    slowest = max(times[device][size] for device, size in split.items())
    # One sample less of the slowest time, and what all can do within it is too little.
    below = [
        max((s for s, t in measured.items() if t < slowest), default=0)
        for measured in times.values()
    ]
    assert sum(below) < 1024


class TestErrors:
    @pytest.mark.parametrize("batch", [0, -4, 2.5, True, None])
    def test_batch(self, batch):
        with pytest.raises(ValueError, match=f"batch is {batch}; it must be a whole number from 1"):
            split_batch(batch, {"a": {1: 1.0}})

    @pytest.mark.parametrize(
        ("size", "time"),
        [(0, 1.0), (-1, 1.0), (1.5, 1.0), (True, 1.0), (4, -0.1), (4, math.nan), (4, math.inf)],
    )
    def test_sizes_and_times(self, size, time):
        message = re.escape(f"device 'b' has the time {time} at batch size {size};")
        with pytest.raises(ValueError, match=message):
            split_batch(4, {"a": {4: 1.0}, "b": {2: 1.0, size: time}})

    @pytest.mark.parametrize("times", [{}, {"a": {}}, {"a": {2: 1.0, 4: 1.0}, "b": {9: 1.0}}])
    def test_sizes_that_do_not_sum(self, times):
        with pytest.raises(
            ValueError, match=r"sums to the mini-batch 8; the sizes are .*: measure"
        ):
            split_batch(8, times)

    def test_one_device_does_not_take_two_sizes(self):
        with pytest.raises(ValueError, match=r"'a': \[2, 4\]"):
            split_batch(6, {"a": {4: 1.0, 2: 1.0}})


class TestFromCaches:
    """What `split_batch` is given by the measurements of several machines."""

    @staticmethod
    def kernel(device="cpu", kind="forward"):
        return Kernel(kind, Convolution(3, 8, 8, 4, (3, 3)), device=device)

    def node(self, name, seconds, sizes=(1, 2, 4), threads=1, kinds=("forward", "backward_filter")):
        """A cache as another machine has it: a micro-batch of b takes `seconds` × b."""
        cache = BenchmarkCache(None)
        for kind in kinds:
            facts = {
                "kernel": self.kernel("cuda:0", kind).facts(),
                "backend": f"torch 2, threads {threads}",
                "device": name,
            }
            key = Key(json.dumps(facts, sort_keys=True))
            for b in sizes:
                cache.store_listing(key, b, [("torch:fft", 100 * b), ("torch:native", 0)])
                times = {"torch:fft": [seconds * b], "torch:native": [3 * seconds * b]}
                cache.store_times(key, b, times)
        return cache

    def network(self, batch=4):
        return [("conv", self.kernel(kind=kind), batch) for kind in ("forward", "backward_filter")]

    def test_one_cache_takes_over_those_of_all_nodes_and_the_split_is_by_speed(self):
        merged = self.node("fast", 1.0)
        assert merged.take(self.node("slow", 3.0)) == 12
        assert merged.take(self.node("slow", 9.0)) == 0  # known: the first stays
        times = cached_times(self.network(), merged)
        assert times == {
            "fast, 1 threads": {b: pytest.approx(2.0 * b) for b in (1, 2, 3, 4)},
            "slow, 1 threads": {b: pytest.approx(6.0 * b) for b in (1, 2, 3, 4)},
        }
        assert split_batch(4, times) == {"fast, 1 threads": 3, "slow, 1 threads": 1}

    def test_a_limit_leaves_slower_algorithms(self):
        node = self.node("fast", 1.0)
        assert cached_times(self.network(), node, 0)["fast, 1 threads"][4] == pytest.approx(24.0)
        assert cached_times(self.network(), node, 100)["fast, 1 threads"][4] == pytest.approx(8.0)

    def test_a_limit_or_cache_that_is_none(self):
        for limit in (-1, 1e6, True):
            with pytest.raises(ValueError, match=r"limit_bytes is .*; it must be at least 0"):
                cached_times(self.network(), self.node("fast", 1.0), limit)
        with pytest.raises(ValueError, match="cache is 'file'; give a BenchmarkCache"):
            cached_times(self.network(), "file")

    def test_a_device_without_all_kernels_and_sizes_that_are_no_sum_are_left_out(self):
        merged = self.node("fast", 1.0, sizes=(2,))
        merged.take(self.node("part", 0.1, kinds=("forward",)))
        assert set(cached_times(self.network(), merged)) == {"fast, 1 threads"}
        assert set(cached_times(self.network(), merged)["fast, 1 threads"]) == {2, 4}
        assert cached_times([], merged) == {}

    def test_what_tune_has_measured(self, tmp_path):
        model, x = torch.nn.Conv2d(3, 4, 3), torch.zeros(4, 3, 8, 8)
        cache = BenchmarkCache(tmp_path / "node.sqlite")
        tune(model, x, cache=cache)
        ((device, times),) = cached_times(find_kernels(model, x), cache).items()
        assert "threads" in device and set(times) == {1, 2, 3, 4} and min(times.values()) > 0
