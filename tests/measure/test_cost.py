import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from repro.measure import MemoryModel, TimeModel, probe, timing

SIZES = [1, 8, 64, 200, 500]
NOISE = [3e-3, -1e-3, 2e-3, 4e-3, -2e-3]
BAD_POINTS = [
    ([8], [1.0], "got 1 batch sizes"),
    ([], [], "got 0 batch sizes"),
    ([8, 8, 8], [1.0, 2.0, 3.0], "two or more distinct batch sizes"),
    ([8, 16, 32], [1.0, 2.0], "got 3 batch sizes .* and 2 values"),
    ([0, 16], [1.0, 2.0], "at least 1"),
    ([8, 16], [1.0, math.nan], "one positive value each"),
    ([8, 16], [1.0, math.inf], "one positive value each"),
    ([8, 16], [0.0, 2.0], "one positive value each"),
    ([8, 16], [-1.0, 2.0], "one positive value each"),
]


class TestTimeModel:
    @pytest.mark.parametrize("relative", [False, True])
    def test_a_known_line_is_recovered(self, relative):
        model = TimeModel.fit(SIZES, [5.6607e-4 * x + 0.0140412 for x in SIZES], relative)
        assert model.a == pytest.approx(5.6607e-4, rel=1e-9)
        assert model.b == pytest.approx(0.0140412, rel=1e-9)
        assert model.batch_sizes == tuple(SIZES)
        assert model.residuals == pytest.approx([0] * len(SIZES), abs=1e-12)

    def test_least_squares_by_the_normal_equations(self):
        seconds = [0.01 * x + 0.1 + noise for x, noise in zip(SIZES, NOISE, strict=True)]
        model = TimeModel.fit(SIZES, seconds)
        n, sx, sy = len(SIZES), sum(SIZES), sum(seconds)
        sxy = sum(x * y for x, y in zip(SIZES, seconds, strict=True))
        a = (n * sxy - sx * sy) / (n * sum(x * x for x in SIZES) - sx**2)
        assert model.a == pytest.approx(a, rel=1e-9)
        assert model.b == pytest.approx((sy - a * sx) / n, rel=1e-9)
        assert model.seconds == tuple(seconds)
        expected = [y - (a * x + model.b) for x, y in zip(SIZES, seconds, strict=True)]
        assert model.residuals == pytest.approx(expected, abs=1e-12)
        shares = [e / (a * x + model.b) for x, e in zip(SIZES, expected, strict=True)]
        assert model.relative_residuals == pytest.approx(shares, abs=1e-12)

    def test_a_relative_fit_minimises_relative_residuals(self):
        seconds = [0.01 * x + 0.1 + noise for x, noise in zip(SIZES, NOISE, strict=True)]
        x, y = np.array(SIZES, float), np.array(seconds)
        rows = np.stack([x / y, 1 / y], axis=1)
        a, b = np.linalg.solve(rows.T @ rows, rows.T @ np.ones(len(x)))
        model = TimeModel.fit(SIZES, seconds, relative=True)
        assert (model.a, model.b) == pytest.approx((a, b), rel=1e-9)
        assert model.a != pytest.approx(TimeModel.fit(SIZES, seconds).a, rel=1e-6)

    def test_equations_2_and_3(self):
        model = TimeModel(a=0.5, b=3.0)
        assert model.predict(10) == 8.0
        assert model.epoch_time(10, 101) == 88.0  # eleven whole batches
        assert model.epoch_time(10, 101, approximate=True) == pytest.approx(101 * 0.8)
        assert model.pass_time(10, 101) == 10 * 8.0 + 3.5  # ten whole ones and one of one
        assert model.epoch_time(10, 0) == model.pass_time(10, 0) == 0
        rng = random.Random(0)
        for _ in range(200):
            a, b = rng.uniform(1e-5, 1e-2), rng.uniform(0, 0.1)
            size, samples = rng.randint(1, 99), rng.randint(1, 999)
            batches = [min(size, samples - i) for i in range(0, samples, size)]
            model = TimeModel(a, b)
            assert model.epoch_time(size, samples) == pytest.approx(len(batches) * (a * size + b))
            assert model.pass_time(size, samples) == pytest.approx(sum(a * x + b for x in batches))
            approximate = model.epoch_time(size, samples, approximate=True)
            assert approximate == pytest.approx((a * size + b) * samples / size)

    @pytest.mark.parametrize("method", ["epoch_time", "pass_time"])
    @pytest.mark.parametrize(("size", "samples"), [(0, 5), (-1, 5), (5, -1)])
    def test_impossible_passes(self, method, size, samples):
        with pytest.raises(ValueError, match=f"batch_size is {size} and samples {samples}; give"):
            getattr(TimeModel(1.0, 1.0), method)(size, samples)

    @pytest.mark.parametrize(
        ("a", "b"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)]
    )
    def test_impossible_lines(self, a, b):
        with pytest.raises(ValueError, match=r"both must be finite and a above 0"):
            TimeModel(a, b)

    @pytest.mark.parametrize(("sizes", "values", "message"), BAD_POINTS)
    def test_impossible_points(self, sizes, values, message):
        with pytest.raises(ValueError, match=f"the time model is fitted to .*{message}"):
            TimeModel.fit(sizes, values)

    @pytest.mark.parametrize("seconds", [[2.0, 1.0], [1.0, 1.0]])
    def test_times_that_do_not_increase(self, seconds):
        with pytest.raises(ValueError, match=r"seconds per step do not increase .* at \[8, 16\]"):
            TimeModel.fit([8, 16], seconds)


class TestMemoryModel:
    def test_a_known_line_is_recovered_exactly(self):
        model = MemoryModel.fit(SIZES, [7 * 2**30 + 123_457 * x for x in SIZES])
        assert (model.fixed_bytes, model.bytes_per_sample) == (7 * 2**30, 123_457)
        assert model.residuals == (0, 0, 0, 0, 0)
        assert model.batch_sizes == tuple(SIZES)
        assert model.measured_bytes[1] == 7 * 2**30 + 123_457 * 8

    def test_least_squares(self):
        peaks = [1000, 1900, 9100, 30000, 61000]
        model = MemoryModel.fit(SIZES, peaks)
        a, p = np.polyfit(SIZES, peaks, 1)
        assert (model.bytes_per_sample, model.fixed_bytes) == pytest.approx((a, p), rel=1e-9)
        expected = [m - p - a * x for x, m in zip(SIZES, peaks, strict=True)]
        assert model.residuals == pytest.approx(expected, rel=1e-6)

    def test_max_batch_by_brute_force(self):
        rng = random.Random(1)
        for _ in range(300):
            p, a = rng.randint(0, 500), rng.randint(1, 60)
            model = MemoryModel.fit([1, 3, 7], [p + a, p + 3 * a, p + 7 * a])
            limit = rng.choice([rng.randint(0, 3000), p + a * rng.randint(0, 40)])
            brute = max((b for b in range(1, 3001) if p + a * b <= limit), default=0)
            assert model.max_batch(limit) == brute
        # A slope that is no whole number, and a limit between two batches.
        model = MemoryModel.fit([1, 2, 3], [11, 12, 14])
        assert model.max_batch(model.predict(5) + 0.1) == 5

    @pytest.mark.parametrize(("sizes", "values", "message"), BAD_POINTS)
    def test_impossible_points(self, sizes, values, message):
        with pytest.raises(ValueError, match=f"the memory model is fitted to .*{message}"):
            MemoryModel.fit(sizes, values)

    @pytest.mark.parametrize("peaks", [[200, 100], [100, 100]])
    def test_memory_that_does_not_increase(self, peaks):
        with pytest.raises(ValueError, match=r"bytes do not increase with the batch size"):
            MemoryModel.fit([8, 16], peaks)


class Machine:
    """Steps whose time is a clock's of their own and whose memory is allocated for real."""

    def __init__(self, monkeypatch, seconds, first=1, slow_calls=()):
        self.now_s, self.calls, self.made = 0.0, [], []
        self.seconds, self.first, self.slow_calls = seconds, first, slow_calls
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr(timing, "time", clock)

    def make_step(self, size):
        self.made.append(size)
        calls = 0

        def step():
            nonlocal calls
            calls += 1
            kib = (32 + 4 * size) // (self.first if calls == 1 else 1)
            torch.empty(256 * kib)
            self.calls.append(size)
            slow = 100.0 if len(self.calls) in self.slow_calls else 0.0
            self.now_s += self.seconds(size) + slow

        return step


class TestProbe:
    def test_both_lines(self, monkeypatch):
        # The first step of each takes less memory, as one without optimizer state would.
        machine = Machine(monkeypatch, lambda size: 0.25 * size + 2.0, first=4)
        probed = probe(machine.make_step, [16, 4, 8, 4], warmup=1, repeats=3)
        assert (probed.time.a, probed.time.b) == pytest.approx((0.25, 2.0))
        assert probed.memory.bytes_per_sample == 4 * 1024
        assert probed.memory.fixed_bytes == 32 * 1024
        assert probed.memory.batch_sizes == probed.time.batch_sizes == (4, 8, 16)
        assert probed.peaks == {4: 48 * 1024, 8: 64 * 1024, 16: 96 * 1024}
        assert set(probed.timings) == {4, 8, 16}
        assert probed.timings[8].samples_s == pytest.approx((4.0,) * 3)
        assert len(machine.calls) == 3 * 2 + 3 * (1 + 3)
        # Timed in turns, a slow spell of the machine would meet all of them.
        assert machine.calls[6:12] == [4, 8, 16, 16, 8, 4]

    def test_medians_and_warmup(self, monkeypatch):
        # One slow step in the warm-up, one among five recorded ones.
        machine = Machine(monkeypatch, lambda size: 0.5 * size + 1.0, slow_calls=(5, 10))
        probed = probe(machine.make_step, [2, 6], warmup=1, repeats=5)
        assert (probed.time.a, probed.time.b) == pytest.approx((0.5, 1.0))
        recorded = [*probed.timings[2].samples_s, *probed.timings[6].samples_s]
        assert max(recorded) > 100 and sum(s > 100 for s in recorded) == 1

    def test_relative(self, monkeypatch):
        seconds = {1: 1.0, 10: 1.4, 100: 11.5}
        machine = Machine(monkeypatch, seconds.__getitem__)
        probed = probe(machine.make_step, list(seconds), warmup=0, repeats=1, relative=True)
        expected = TimeModel.fit(list(seconds), list(seconds.values()), relative=True)
        absolute = TimeModel.fit(list(seconds), list(seconds.values()))
        assert probed.time.a == pytest.approx(expected.a)
        assert expected.a != pytest.approx(absolute.a, rel=1e-3)

    def test_what_is_resident_counts(self, monkeypatch):
        machine = Machine(monkeypatch, lambda size: float(size))
        tensors = [torch.zeros(256 * 8), torch.zeros(256 * 2)]  # 10 KiB
        probed = probe(machine.make_step, [1, 2, 3], resident=iter(tensors), warmup=0, repeats=1)
        assert probed.memory.fixed_bytes == (32 + 10) * 1024
        assert probed.memory.bytes_per_sample == 4 * 1024
        linear = torch.nn.Linear(256, 3, bias=False)  # 3 KiB
        probed = probe(machine.make_step, [1, 2], resident=linear, warmup=0, repeats=1)
        assert probed.memory.fixed_bytes == (32 + 3) * 1024

    def test_too_few_batch_sizes_are_refused_before_any_step(self, monkeypatch):
        machine = Machine(monkeypatch, lambda size: 1.0)
        for sizes in ([], [8], [8, 8], [0, 8]):
            with pytest.raises(ValueError, match=r"two or more distinct batch sizes"):
                probe(machine.make_step, sizes)
        assert machine.made == []

    def test_measurements_that_do_not_increase(self, monkeypatch):
        machine = Machine(monkeypatch, lambda size: 1.0 / size)
        with pytest.raises(ValueError, match=r"seconds per step do not increase"):
            probe(machine.make_step, [1, 2, 3], warmup=0, repeats=1)
