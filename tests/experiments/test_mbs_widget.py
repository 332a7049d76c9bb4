"""Planning a mini-batch from the measured models, against a simulation."""

import math

import numpy as np
import pytest

from repro.experiments.mbs.widget import plan_streaming

MIB = 2**20


def size_record(make_record, fixed, each, step_s, sample_s):
    sizes = (2, 4, 8, 16, 32)
    values = {
        "config": {"role": "ResNet-50", "model": {"name": "resnet_cifar", "depth": 8, "width": 8}},
        "metrics": {"fixed_bytes": fixed, "bytes_per_sample": each, "limit_bytes": int(fixed * 3)},
        # A median, so that one slow sample does not matter.
        "timings": {
            str(n): {"samples_s": [step_s + sample_s * n] * 4 + [99.0], "warmup": 2} for n in sizes
        },
    }
    return make_record("size", **values)


def simulate(fixed, each, step_s, sample_s, limit, mini_batch):
    """Fill micro-batches with as many samples as fit; return sizes and seconds."""
    largest = max((n for n in range(mini_batch + 1) if fixed + each * n <= limit), default=0)
    if not largest:
        return [], math.nan
    sizes = [min(largest, mini_batch - first) for first in range(0, mini_batch, largest)]
    return sizes, sum(step_s + sample_s * n for n in sizes)


def test_against_a_simulation(make_record):
    random = np.random.default_rng(0)
    for _ in range(300):
        fixed, each = map(int, random.integers(1, 2000, 2))
        step_s, sample_s = map(float, random.integers(1, 9, 2) / 8)
        limit, mini_batch = map(int, random.integers(1, [9000, 130]))
        record = size_record(make_record, float(fixed), float(each), step_s, sample_s)
        plan = plan_streaming(record, limit / MIB, [mini_batch]).loc[mini_batch]
        sizes, seconds = simulate(fixed, each, step_s, sample_s, limit, mini_batch)
        each_ms = 1e3 * seconds / mini_batch
        assert (plan["number"], plan["size"]) == (len(sizes), sizes[0] if sizes else 0)
        assert plan.undivided_mib * MIB == fixed + each * mini_batch
        assert plan.streamed_mib * MIB == fixed + each * max(1, plan["size"])
        assert plan.streamed_ms == pytest.approx(each_ms, nan_ok=True)
        undivided = each_ms if len(sizes) == 1 else math.nan
        assert plan.undivided_ms == pytest.approx(undivided, nan_ok=True)
        assert not sizes or plan.streamed_mib * MIB <= limit
