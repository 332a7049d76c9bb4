import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from repro.measure import LinearMemoryModel, TimeModel, probe, timing

SIZES = [1, 8, 64, 200, 500]
SECONDS = [0.01 * x + 0.1 + e for x, e in zip(SIZES, (3e-3, -1e-3, 2e-3, 4e-3, -2e-3), strict=True)]


def test_both_models_are_least_squares_lines():
    peaks = [1000, 1900, 9100, 30000, 61000]
    rows = np.stack([SIZES, np.ones(len(SIZES))], axis=1)  # by the normal equations of y = a x + b
    (a, slope), (b, fixed) = np.linalg.solve(rows.T @ rows, rows.T @ np.array([SECONDS, peaks]).T)
    time, memory = TimeModel.fit(SIZES, SECONDS), LinearMemoryModel.fit(SIZES, peaks)
    assert (time.a, time.b) == pytest.approx((a, b), rel=1e-9) and time.seconds == tuple(SECONDS)
    assert (memory.bytes_per_sample, memory.fixed_bytes) == pytest.approx((slope, fixed), rel=1e-9)
    exact = LinearMemoryModel.fit(SIZES, [7 * 2**30 + 123_457 * x for x in SIZES])
    assert (exact.fixed_bytes, exact.bytes_per_sample) == (7 * 2**30, 123_457)


def test_equations_2_and_3():
    rng = random.Random(0)
    for samples in (0, *(rng.randint(1, 999) for _ in range(200))):
        a, b, size = rng.uniform(1e-5, 1e-2), rng.uniform(0, 0.1), rng.randint(1, 99)
        batches = [min(size, samples - i) for i in range(0, samples, size)]
        model = TimeModel(a, b)
        assert model.epoch_time(size, samples) == pytest.approx(len(batches) * (a * size + b))
        assert model.pass_time(size, samples) == pytest.approx(sum(a * x + b for x in batches))
        approximate = model.epoch_time(size, samples, approximate=True)
        assert approximate == pytest.approx((a * size + b) * samples / size)
    for size, samples in ((0, 5), (5, -1)):
        for method in (model.epoch_time, model.pass_time):
            with pytest.raises(ValueError, match=f"batch_size is {size} and samples {samples}; gi"):
                method(size, samples)


def test_largest_batch_by_brute_force():
    rng = random.Random(1)
    for _ in range(300):
        p, a = rng.randint(0, 500), rng.randint(1, 60)
        model = LinearMemoryModel.fit([1, 3, 7], [p + a, p + 3 * a, p + 7 * a])
        limit = rng.choice([rng.randint(0, 3000), p + a * rng.randint(0, 40)])
        brute = max((b for b in range(1, 3001) if p + a * b <= limit), default=0)
        assert model.largest_batch(limit) == brute
    # A slope that is no whole number, and a limit between two batches.
    model = LinearMemoryModel.fit([1, 2, 3], [11, 12, 14])
    assert model.largest_batch(model.predict(5) + 0.1) == 5
    assert LinearMemoryModel(10, 2.1).largest_batch(12.1) == 1  # a division rounded to 0
    flat = LinearMemoryModel.fit([1, 2], [100, 90])  # noise: memory does not shrink
    assert (flat.fixed_bytes, flat.bytes_per_sample) == (95, 0)
    assert flat.largest_batch(94) == 0 and flat.largest_batch(95) > 10**9
    assert LinearMemoryModel(10, 2.1).largest_batch(math.inf) > 10**9


@pytest.mark.parametrize(
    ("sizes", "values", "message"),
    [
        ([8], [1.0], "got 1 batch sizes"),
        ([8, 8, 8], [1.0, 2.0, 3.0], "two or more distinct batch sizes"),
        ([8, 16, 32], [1.0, 2.0], "got 3 batch sizes .* and 2 values"),
        ([0, 16], [1.0, 2.0], "at least 1"),
        *(([8, 16], [bad, 2.0], "one positive value each") for bad in (math.nan, -1)),
    ],
)
def test_impossible_points(sizes, values, message):
    with pytest.raises(ValueError, match=f"the time model is fitted to .*{message}"):
        TimeModel.fit(sizes, values)


def test_impossible_lines():
    for a, b in ((0.0, 1.0), (1.0, math.nan)):
        with pytest.raises(ValueError, match=r"both must be finite and a above 0"):
            TimeModel(a, b)
    for values in ([200, 100], [100, 100]):
        with pytest.raises(ValueError, match="seconds per step do not increase"):
            TimeModel.fit([8, 16], values)
    for sizes, peaks in (([4, 4], [1, 2]), ([1, 2], [1])):
        with pytest.raises(ValueError, match="two or more distinct batch sizes"):
            LinearMemoryModel.fit(sizes, peaks)


class Machine:
    """Steps whose time is a clock's of their own and whose memory is allocated for real."""

    def __init__(self, monkeypatch, seconds, first=1, slow_calls=()):
        self.now_s, self.calls, self.made = 0.0, [], []
        self.seconds, self.first, self.slow_calls = seconds, first, slow_calls
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def make_step(self, size):
        self.made.append(size)
        calls = 0

        def step():
            nonlocal calls
            calls += 1
            kib = (32 + 4 * size) // (self.first if calls == 1 else 1)
            torch.empty(256 * kib)
            self.calls.append(size)
            self.now_s += self.seconds(size) + 100.0 * (len(self.calls) in self.slow_calls)

        return step


def test_probe_refuses_what_gives_no_line(monkeypatch):
    machine = Machine(monkeypatch, lambda size: 0.25 * size)
    for sizes in ([8], [8, 8], [0, 8], [1.5, 8]):
        with pytest.raises(ValueError, match=r"batch_sizes are .*; give two or more, distinct"):
            probe(machine.make_step, sizes)
    assert machine.made == []
    for kib in (64, 1024):  # the same for each size, and less for the larger one

        def make_step(size, kib=kib):
            return lambda: torch.empty(256 * (64 if size > 4 else kib))

        with pytest.raises(ValueError, match=r"peaks do not increase with .*measure larger"):
            probe(make_step, [4, 8])


@pytest.mark.parametrize("shared", [True, False])
def test_probe_counts_the_state_of_an_optimizer_with_each_size_or_with_none(shared, monkeypatch):
    made, machine = [], Machine(monkeypatch, None)

    def make_step(size):
        if not (made and shared):
            model = nn.Linear(64, 64, bias=False)
            made.append((model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)))
        model, optimizer = made[-1]
        inputs = torch.ones(size, 64)

        def step():
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            machine.now_s += size

        return step

    first, second = (probe(make_step, [4, 64, 256]).peaks for _ in range(2))
    assert first == second
    state = 0 if shared else 64 * 64 * 4
    assert first[4] == pytest.approx(2 * 64 * 64 * 4 + state, abs=2 * 4 * 64 * 4)


def test_probe_fits_both_lines_to_medians_taken_in_turns(monkeypatch):
    # The first step of each takes less memory, as one without optimizer state would. One slow step
    # is in the warm-up, one among the recorded ones. Before all, a step of the smallest size.
    machine = Machine(monkeypatch, lambda size: 0.25 * size + 2.0, first=4, slow_calls=(8, 13))
    probed = probe(machine.make_step, [16, 4, 8, 4], warmup=1, repeats=3)
    assert (probed.time.a, probed.time.b) == pytest.approx((0.25, 2.0))
    assert (probed.memory.bytes_per_sample, probed.memory.fixed_bytes) == (4 * 1024, 32 * 1024)
    assert probed.time.seconds == pytest.approx((3.0, 4.0, 6.0))
    assert probed.peaks == {4: 48 * 1024, 8: 64 * 1024, 16: 96 * 1024}
    assert probed.timings[8].samples_s == pytest.approx((4.0,) * 3)
    assert sum(s > 100 for t in probed.timings.values() for s in t.samples_s) == 1
    assert len(machine.calls) == 1 + 3 * 2 + 3 * (1 + 3)
    assert machine.calls[7:13] == [4, 8, 16, 16, 8, 4]
