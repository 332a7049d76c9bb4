import math
import pickle
import random
from dataclasses import replace

import pytest

from repro.dualbatch import DualBatchPlan, InfeasiblePlan, largest_k
from repro.measure import TimeModel

GTX_1080 = TimeModel(5.6607e-4, 0.0140412)

# k, n_S, B_S, d_S, d_L, d_S / d_L
TABLE_2 = [
    (1.05, 1, 83, 10625, 13125, 0.810), (1.05, 2, 154, 11875, 13125, 0.905),
    (1.05, 3, 205, 12291, 13125, 0.936), (1.05, 4, 242, 12500, 0, None),
    (1.1, 1, 38, 8750, 13750, 0.636), (1.1, 2, 87, 11250, 13750, 0.818),
    (1.1, 3, 127, 12083, 13750, 0.879), (1.1, 4, 160, 12500, 0, None),
]  # fmt: skip

# b / a, B_L, then B_S for n_S = 1 to 4
CIFAR = [(41.89, 600, (130, 230, 294, 340)), (30.79, 560, (102, 185, 243, 286))]
IMAGENET = [
    (39.94, 2330, (156, 322, 464, 587)), (29.99, 1110, (112, 222, 310, 383)),
    (17.756, 740, (67, 135, 190, 236)),
]  # fmt: skip
# d, what it is for, then (d_S, d_L) for n_S = 0 to 4
TABLE_6 = [
    (50_000, CIFAR, [(0, 12500), (10625, 13125), (11875, 13125), (12292, 13125), (12500, 0)]),
    (
        1_281_167,
        IMAGENET,
        [(0, 320292), (272249, 336306), (304278, 336306), (314954, 336306), (320292, 0)],
    ),
]


def random_problem(rng):
    """A time model, workers, a large batch, and a feasible k by bisection on equations 4 to 7."""
    a = 10 ** rng.uniform(-6, -2)
    b = a * 10 ** rng.uniform(0, 2.5)
    n_small, n_large = rng.randint(1, 6), rng.randint(0, 6)
    large_batch = rng.randint(100, 3000)
    low, high = 1.0, (n_small + n_large) / n_large if n_large else 1e6
    for _ in range(200):
        k = (low + high) / 2
        share_large = k / (n_small + n_large)  # of one sample; equation 4
        share_small = (1 - n_large * share_large) / n_small  # equation 6
        one_at_a_time = (a + b) * share_small
        low, high = (k, high) if one_at_a_time > (a + b / large_batch) * share_large else (low, k)
    return TimeModel(a, b), n_small, n_large, large_batch, low


def solve(k, n_small, n_large, large_batch=500, samples=50_000, rounding="nearest", times=GTX_1080):
    return DualBatchPlan.solve(times, k, n_small, n_large, large_batch, samples, rounding)


class TestPapersTables:
    @pytest.mark.parametrize(("k", "n_small", "batch", "small", "large", "ratio"), TABLE_2)
    def test_table_2(self, k, n_small, batch, small, large, ratio):
        plan = solve(k, n_small, 4 - n_small, rounding="floor")
        assert (plan.small_batch, plan.small_samples, plan.large_samples) == (batch, small, large)
        # 0.9047... for 0.905; the paper cuts 0.6363, 0.8181, 0.8787 and 0.8095 at three digits.
        assert plan.update_factor == pytest.approx(ratio or 1.0, abs=0.0006)
        assert (plan.large_batch, plan.k, plan.n, plan.samples) == (500, k, 4, 50_000)
        times = [plan.time_of(kind) for kind in set(plan.kinds)]
        assert max(times) <= 1.01 * min(times)

    def test_a_share_that_is_whole_is_not_cut(self):
        # In floating point 1.15 times 50,000 / 4 is below 14,375.
        assert solve(1.15, 2, 2, rounding="floor").large_samples == 14375

    @pytest.mark.parametrize("n_small", range(5))
    @pytest.mark.parametrize(("samples", "machines", "shares"), TABLE_6)
    def test_table_6(self, samples, machines, shares, n_small):
        for ratio, large_batch, small_batches in machines:
            for a in (1.0, 3e-4):  # only b / a matters
                times = TimeModel(a, a * ratio)
                plan = solve(1.05, n_small, 4 - n_small, large_batch, samples, times=times)
                assert plan.small_batch == (small_batches[n_small - 1] if n_small else None)
                assert (plan.small_samples, plan.large_samples) == shares[n_small]
                times = [plan.time_of(kind) for kind in set(plan.kinds)]
                assert max(times) <= 1.01 * min(times)


class TestEquations:
    @pytest.mark.parametrize("rounding", ["nearest", "floor"])
    def test_4_to_8_with_random_inputs(self, rounding):
        rng = random.Random(rounding)
        # By how much a rounded number may be below and above the one that it came from.
        below, above = (0.5, 0.5) if rounding == "nearest" else (1.0, 0.0)
        for _ in range(400):
            model, n_small, n_large, large_batch, k_max = random_problem(rng)
            k = 1 + (k_max - 1) * rng.uniform(0.05, 0.98)
            d = rng.randint(10**9, 10**11)  # so that rounding a share hardly matters for B_S
            plan = solve(k, n_small, n_large, large_batch, d, rounding, model)
            n = n_small + n_large
            exact_large = k * d / n
            large = plan.large_samples if n_large else math.floor(exact_large + above)
            assert -below - 1e-3 <= large - exact_large <= above + 1e-3  # equation 4
            missed = n_large * large + n_small * plan.small_samples - d  # equation 6
            assert -below * n_small <= missed <= above * n_small
            # Equations 5 and 7: the exact B_S, which takes as long, lies within rounding.
            target = k * (model.a + model.b / large_batch) * d / n

            def seconds(batch, model=model, plan=plan):
                return (model.a + model.b / batch) * plan.small_samples

            low, high = plan.small_batch - above, plan.small_batch + below
            assert seconds(high) <= target * (1 + 1e-6)
            assert low < 1 or seconds(low) >= target * (1 - 1e-6)
            assert 1 <= plan.small_batch < large_batch
            factor = plan.small_samples / plan.large_samples if n_large else 1.0
            assert plan.update_factor == factor

    def test_largest_k_by_search(self):
        rng = random.Random(5)
        for _ in range(200):
            model, *workers, k_max = random_problem(rng)
            assert largest_k(model, *workers) == pytest.approx(k_max, rel=1e-9)
            arguments = {"samples": 10**10, "times": model}
            assert solve(k_max * (1 - 1e-8), *workers, **arguments).small_batch == 1
            for rounding in ("nearest", "floor"):  # of k as told
                told = solve(float(f"{k_max:.6g}"), *workers, rounding=rounding, **arguments)
                assert told.small_batch == 1
            with pytest.raises(InfeasiblePlan, match=r"B_S would be below one sample") as caught:
                solve(k_max * (1 + 1e-5), *workers, **arguments)
            assert caught.value.k_max == pytest.approx(k_max)


class TestParts:
    def test_by_kind(self):
        plan = solve(1.1, 1, 3, rounding="floor")
        assert plan.kinds == ("small", "large", "large", "large")
        assert (plan.batch_of("small"), plan.batch_of("large")) == (38, 500)
        assert (plan.share_of("small"), plan.share_of("large")) == (8750, 13750)
        factors = [plan.factor_of("small", scheme) for scheme in ("linear", "sqrt", "none")]
        assert factors == [8750 / 13750, math.sqrt(8750 / 13750), 1.0]
        assert plan.factor_of("large", "linear") == 1.0
        assert plan.time_of("small") == pytest.approx(5.6607e-4 * 8750 + 0.0140412 * 231)
        assert plan.time_of("large", TimeModel(1.0, 2.0)) == 13750 + 2 * 28
        with pytest.raises(ValueError, match=r"factor is 'cubic'; choose among linear, sqrt, none"):
            plan.factor_of("small", "cubic")
        for name, value in {"small_batch": None, "large_samples": 0, "k": math.nan}.items():
            with pytest.raises(ValueError, match=f"{name} is"):
                replace(plan, **{name: value})

    def test_one_kind_alone(self):
        # Without small-batch workers k plays no part, and b may be anything.
        plan = solve(7.0, 0, 3, 10, 101, times=TimeModel(1.0, -1.0))
        assert plan.kinds == ("large",) * 3
        assert (plan.small_batch, plan.small_samples, plan.large_samples) == (None, 0, 34)
        assert solve(1.1, 0, 3, 10, 101, "floor").large_samples == 33
        assert (plan.k, plan.update_factor) == (1.0, 1.0)
        with pytest.raises(ValueError, match=r"kind is 'small'; choose among large"):
            plan.batch_of("small")
        plan = solve(1.1, 2, 0)
        assert plan.factor_of("small", "linear") == plan.factor_of("small", "sqrt") == 1.0
        with pytest.raises(ValueError, match=r"kind is 'large'; choose among small"):
            plan.batch_of("large")


class TestErrors:
    @pytest.mark.parametrize("k", [1.0, 0.9, -2.0, 2])
    def test_the_feasible_k_are_named(self, k):
        k_max = largest_k(GTX_1080, 1, 3, 500)
        message = rf"k is {k:g}, .* 1 small-batch and 3 large-batch .* at most {k_max:.6g}"
        with pytest.raises(InfeasiblePlan, match=message) as caught:
            solve(k, 1, 3)
        again = pickle.loads(pickle.dumps(caught.value))  # it crosses processes
        assert (str(again), again.k, again.k_max) == (str(caught.value), k, k_max)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"n_small": 0, "n_large": 0}, r"n_small and n_large are 0; give at least one worker"),
            ({"samples": 3}, r"samples is 3; give a whole number, at least 4"),
            ({"rounding": "up"}, r"rounding is 'up'; choose among nearest, floor"),
            ({"samples": 8, "k": 1.01}, r"rounding leaves d_S = \d+ and d_L = \d+ of 8"),
            ({"k": 1.01, "large_batch": 2}, r"B_S would be 2, no smaller than B_L"),
            ({"times": TimeModel(1e-3, 0.0)}, r"b = 0 .* \(b > 0\).*probe smaller batch sizes"),
        ],
    )
    def test_arguments(self, change, message):
        with pytest.raises(ValueError, match=message):
            solve(**({"k": 1.1, "n_small": 2, "n_large": 2} | change))
