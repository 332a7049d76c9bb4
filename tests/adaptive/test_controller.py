import copy
import inspect
import io
import math
import random
import warnings

import pytest
import torch
from torch import nn

from repro import adaptive
from repro.adaptive import DivergenceWarning, Saturation, StartingPoint, ThetaController, set_lr
from repro.adaptive.distance import CHUNK
from repro.measure import MemoryMeter

START = [torch.zeros(2, 3, dtype=torch.float64), torch.zeros((), dtype=torch.float64)]


def at(distance):
    """Parameters at a distance from the start: (3, 4, 12) / 13 of it in the first, the rest 0."""
    first = torch.zeros(2, 3, dtype=torch.float64)
    first[0, 0], first[0, 2] = 3 * distance / 13, 4 * distance / 13
    return [first, torch.tensor(12 * distance / 13, dtype=torch.float64)]


def follow(controller, costs, distances, first_cost=10.0):
    """Return the settings of all epochs of a training, the one after the last included."""
    steps = [controller.observe(first_cost, START)]
    for cost, distance in zip(costs, distances, strict=True):
        steps.append(controller.observe(cost, at(distance)))
    return steps


def falling(epochs):
    return [10.0 * 0.95 ** (i + 1) for i in range(epochs)]


def with_thetas(controller, thetas):
    """Follow a training whose cost falls in every epoch."""
    costs = falling(len(thetas))
    distances = [(10.0 - cost) / theta for cost, theta in zip(costs, thetas, strict=True)]
    return follow(controller, costs, distances)


def algorithm_1(thetas, b_s, b_m, mu_0, factor=2, tolerance=0.10, beta=0.1, decay_at=()):
    """Algorithm 1 as printed, with section III-E after line 12: B and μ of each epoch, and K."""
    batch, mu, k = b_s, mu_0, math.inf
    before, decayed = None, False
    settings = [(batch, mu, None)]
    for n, theta in enumerate(thetas, start=1):
        if k == math.inf:
            found = before is not None and abs(theta - before) / abs(before) <= tolerance
            k = n if found else k
            before = theta
        if n % k == 0 and batch < b_m:
            larger = min(round(batch * factor), b_m)
            mu *= larger / batch
            batch = larger
        if n in decay_at:
            mu = (mu if decayed else mu_0) * beta
            decayed = True
        settings.append((batch, mu, None if k == math.inf else k))
    return settings


def check(steps, expected):
    assert [(s.batch_size, s.interval) for s in steps] == [(b, k) for b, _, k in expected]
    assert [s.lr for s in steps] == pytest.approx([mu for _, mu, _ in expected], rel=1e-12)
    assert [s.epoch for s in steps] == list(range(1, len(steps) + 1))


def curve(seed, epochs=24):
    """Thetas that rise, peak and wander, as in Figures 2 and 6."""
    draw = random.Random(seed)
    thetas = [draw.uniform(0.2, 2)]
    for _ in range(epochs - 1):
        thetas.append(thetas[-1] * draw.choice([1.5, 1.2, 0.8, 0.95, 1.05, 1.11, 0.89]))
    return thetas


class TestTheta:
    def test_equation_4_worked_out_by_hand(self):
        # ‖(3, 4, 0, 12)‖ = 13 and ‖(0, 0, 5, 12)‖ = 13; cost falls by 2.6, then 6.5, then rises.
        start = [torch.tensor([1.0, 2.0, 2.0]), torch.tensor([[-1.0]])]
        controller = ThetaController(8, 64, 0.1)
        assert controller.observe(9.0, start).theta is None
        one = [torch.tensor([4.0, 6.0, 2.0]), torch.tensor([[11.0]])]
        two = [torch.tensor([1.0, 2.0, 7.0]), torch.tensor([[-13.0]])]
        assert controller.observe(6.4, one).theta == pytest.approx(0.2)
        assert controller.observe(2.5, two).theta == pytest.approx(0.5)
        assert controller.observe(10.3, one).theta == pytest.approx(-0.1)

    def test_parameters_that_have_not_moved_have_no_theta_and_do_not_saturate(self):
        steps = follow(ThetaController(8, 64, 0.1), [9.0, 8.9, 8.0, 7.0], [0.0, 0.0, 1.0, 1.5])
        assert [s.theta for s in steps] == [None, None, None, 2.0, 2.0]
        assert [s.interval for s in steps] == [None, None, None, None, 4]


class TestAlgorithm1:
    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("b_m", [32, 100, 256])
    def test_random_curves(self, seed, b_m):
        draw, thetas = random.Random(seed), curve(seed)
        decay_at = sorted(draw.sample(range(1, 24), 3))
        factor, tolerance = draw.choice([2, 3, 1.5]), draw.choice([0.1, 0.06, 0.2])
        controller = ThetaController(32, b_m, 0.2, factor, tolerance, decay=0.3, decay_at=decay_at)
        expected = algorithm_1(thetas, 32, b_m, 0.2, factor, tolerance, 0.3, decay_at)
        check(with_thetas(controller, thetas), expected)

    def test_a_factor_of_less_than_a_sample_is_one(self):
        steps = with_thetas(ThetaController(8, 64, 0.1, 1.01, interval=1), curve(0, 3))
        assert [s.batch_size for s in steps] == [8, 9, 10, 11]

    @pytest.mark.parametrize(
        ("costs", "thetas"),
        [
            ([11.0, 9.95, 9.9], [-1, 1, 1]),  # the lowest, but they have not been falling
            ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.2], [1, 2, 4, 8, 16, 32, 32]),  # not the lowest
        ],
    )
    def test_k_is_not_found_without_progress(self, costs, thetas):
        distances = [(10.0 - cost) / theta for cost, theta in zip(costs, thetas, strict=True)]
        steps = follow(ThetaController(8, 64, 0.1), costs, distances)
        assert [s.theta for s in steps[1:]] == pytest.approx(thetas)
        assert {s.interval for s in steps} == {None}

    @pytest.mark.filterwarnings("ignore::repro.adaptive.DivergenceWarning")
    @pytest.mark.parametrize(
        ("interval", "costs", "batches"),
        [
            # They fall, from above that of w_0.
            (10, [20.0 - i for i in range(10)], [8]),
            # They fall again, but to no less than at the growth before.
            (2, [9.0, 8.0, 8.5, 8.4, 8.3, 8.2, 8.15, 8.1, 8.05, 8.01], [8, 16]),
            # The growth before was at a cost that was low by chance.
            (5, [9.0, 8.0, 7.0, 6.0, 3.0, 4.4, 4.2, 4.0, 3.8, 3.6], [8, 16, 32]),
            # The last ten fall, all since the growth before do not.
            (20, [9.75 - i / 4 for i in range(20)] + [4.9 + i / 4 for i in range(11)]
             + [7.3 - i / 9 for i in range(9)], [8, 16]),
        ],
    )  # fmt: skip
    def test_a_growth_waits_for_progress(self, interval, costs, batches):
        steps = follow(ThetaController(8, 64, 0.1, interval=interval), costs, [1.0] * len(costs))
        assert sorted({s.batch_size for s in steps}) == batches


class TestDecay:
    def test_saturation_is_three_epochs_in_a_row_without_a_fall_by_a_tenth(self):
        costs = [10.0, 9.5, 9.2, 9.1, 8.0, 7.9, 7.8, 7.7, 7.6, 7.5, 7.4, -9.0, -9.1, -9.2, -9.3]
        fixed = adaptive.FixedBatch(8, 1.0, decay_at=Saturation(3, 0.1))
        steps = follow(fixed, costs, [1.0] * len(costs))
        assert [n for n in range(1, len(steps)) if steps[n].lr < steps[n - 1].lr] == [4, 8, 11, 15]


# Costs after 10.0 at w_0, and the largest batch (of 8 at first) that they may lead to.
UNHEALTHY = {
    "rising": ([10.0 * 1.1**i for i in range(1, 30)], 8),
    "constant": ([10.0] * 29, 8),
    "fallen, then rising": ([6.0, 5.0, 4.5] + [4.5 * 1.1**i for i in range(1, 27)], 16),
}


class TestDivergence:
    @pytest.mark.parametrize("name", UNHEALTHY)
    def test_what_makes_no_progress_grows_nothing_and_is_named(self, name):
        costs, largest = UNHEALTHY[name]
        controller = ThetaController(8, 8 * 2**10, 0.1)
        with pytest.warns(DivergenceWarning, match=r"makes no progress or diverges") as warned:
            # θ is all but constant wherever the cost changes little.
            steps = follow(controller, costs, [5.0 + 0.01 * i for i in range(29)])
        assert len(warned) == 1 and max(s.batch_size for s in steps) <= largest
        assert max(s.lr for s in steps) <= 0.1 * largest / 8
        assert steps[-1].diverging and not any(s.diverging for s in steps[:5])

    def test_a_warning_that_is_an_error_leaves_all_as_it_was(self):
        costs, distances = [6.0, 5.0, 4.5, *(4.5 * 1.1**i for i in range(1, 11))], range(1, 14)
        controller = ThetaController(8, 64, 0.1)
        seen = []
        with warnings.catch_warnings():
            warnings.simplefilter("error", DivergenceWarning)
            with pytest.raises(DivergenceWarning):
                for cost, distance in zip([10.0, *costs], [0, *distances], strict=True):
                    seen.append(copy.deepcopy(controller.state_dict()))
                    controller.observe(cost, [torch.tensor([float(distance)])])
        assert repr(controller.state_dict()) == repr(seen[-1])

    def test_what_is_lost_within_the_scatter_is_no_loss(self):
        costs = [9.9, 10.1, 10.1] * 8
        steps = follow(ThetaController(8, 64, 0.1), costs, [float(i + 1) for i in range(24)])
        assert not any(s.diverging for s in steps)

    def test_a_new_lowest_cost_ends_it(self):
        costs = [6.0, 5.0, 4.5, *(4.5 * 1.1**i for i in range(1, 11)), 4.0, 3.9]
        with pytest.warns(DivergenceWarning):
            steps = follow(ThetaController(8, 64, 0.1), costs, [5 + 0.01 * i for i in range(15)])
        assert [s.diverging for s in steps] == [False] * 10 + [True] * 4 + [False] * 2
        assert [s.batch_size for s in steps] == [8] * 3 + [16] * 13

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::repro.adaptive.DivergenceWarning")
    @pytest.mark.parametrize("distance", [lambda i: i**0.5, float, lambda i: 5.0 + 0.01 * i])
    def test_noise_is_no_progress(self, distance):
        """Constant costs but for noise, and such that rise by 0.2 % an epoch after a good one."""
        distances = [distance(i + 1) for i in range(100)]
        factors = {"constant": [], "rising": []}
        for seed in range(60):
            draw = random.Random(seed)
            noise = [1 + 0.01 * draw.gauss(0, 1) for _ in range(101)]
            rising = [10 * noise[0], *(6 * 1.002**i * noise[i + 1] for i in range(100))]
            for name, costs in (("constant", [10 * x for x in noise]), ("rising", rising)):
                steps = follow(ThetaController(8, 256, 0.1), costs[1:], distances, costs[0])
                factors[name].append(steps[-1].batch_size // 8)
        assert sum(factor > 1 for factor in factors["constant"]) <= 7
        assert max(factors["constant"]) <= 8
        assert sum(factor > 2 for factor in factors["rising"]) <= 4  # the good one may grow once

    @pytest.mark.parametrize("seed", range(4))
    def test_a_healthy_training_with_noise_reaches_the_largest_batch(self, seed):
        draw = random.Random(seed)
        costs = [(1.5 + 8.5 * 0.93**i) * (1 + 0.02 * draw.gauss(0, 1)) for i in range(141)]
        distances = [(i + 1) ** 0.5 for i in range(140)]
        steps = follow(ThetaController(8, 256, 0.1), costs[1:], distances, costs[0])
        assert steps[-1].batch_size == 256 and not any(s.diverging for s in steps)


class TestWarmUp:
    def test_path(self):
        steps = with_thetas(ThetaController(8, 64, 0.5, warmup=4, warmup_from=0.1), [1.0] * 7)
        assert [s.lr_before for s in steps[:4]] == pytest.approx([0.1, 0.2, 0.3, 0.4])
        assert [s.lr for s in steps[:4]] == pytest.approx([0.2, 0.3, 0.4, 0.5])
        assert [s.lr_before for s in steps[4:]] == [None] * 4
        assert [steps[1].lr_at(done) for done in (0, 0.5, 1)] == pytest.approx([0.2, 0.25, 0.3])
        # θ does not change at all, and yet is not compared before the warm-up is over.
        assert [s.interval for s in steps] == [None] * 5 + [5] * 3
        assert [s.batch_size for s in steps] == [8] * 5 + [16] * 3

    def test_a_growth_within_it_scales_the_climb(self):
        steps = with_thetas(ThetaController(8, 16, 0.5, warmup=4, interval=2), curve(2, 5))
        assert [s.lr for s in steps] == pytest.approx([0.125, 0.25, 0.75, 1.0, 1.0, 1.0])


SCALES = [random.Random(7).uniform(4, 300) for _ in range(14)]


def noise_driven():
    """`epoch` says which scale comes."""
    scale, decay = lambda: SCALES[controller.epoch], Saturation(2, 0.05)
    controller = adaptive.NoiseScaleBatch(8, 200, 0.1, scale, decay_at=decay)
    controller.epoch = 0
    return controller


WARMED = {"warmup": 3, "warmup_from": 0.01, "lr_exponent": 0.5}
MAKERS = {
    "theta": lambda: ThetaController(8, 100, 0.1, decay_at=(5, 9)),
    "theta, all options": lambda: ThetaController(
        8, 100, 0.1, 1.5, 0.3, decay=0.2, decay_at=Saturation(2, 0.1), **WARMED
    ),
    "fixed": lambda: adaptive.FixedBatch(32, 0.1, decay_at=[4, 7], decay=0.5),
    "linear": lambda: adaptive.LinearScaling(256, 32, 0.1, decay_at=(6,)),
    "every": lambda: adaptive.ScheduledBatch(8, 64, 0.1, every=3, warmup=2),
    "noise": noise_driven,
}


class TestSaving:
    @pytest.mark.parametrize("name", MAKERS)
    def test_every_option_is_among_the_settings_that_are_compared(self, name):
        controller = MAKERS[name]()
        options = {p for kind in type(controller).__mro__[:-1]
                   for p in inspect.signature(kind).parameters}  # fmt: skip
        # Of these others follow; `interval` is `fixed_interval` there.
        options -= {"options", "measure", "interval", "batch_size", "lr", "base_batch", "base_lr"}
        assert options <= {*controller.state_dict()["settings"]}

    @pytest.mark.filterwarnings("ignore::repro.adaptive.DivergenceWarning")
    @pytest.mark.parametrize("name", MAKERS)
    def test_resumed_at_any_epoch_is_as_uninterrupted(self, name):
        epochs = len(SCALES)
        costs = [*falling(epochs - 6), 8.0, 8.5, 9.0, 3.0, 2.9, 2.8]
        observed = [(10.0, START)]
        for cost, theta in zip(costs, curve(4, epochs), strict=True):
            observed.append((cost, at((10 - cost) / theta)))

        def go_on(controller, first, last):
            steps = []
            for i in range(first, last):
                if name == "noise":
                    controller.epoch = i - 1
                steps.append(controller.observe(*observed[i]))
            return steps

        whole = go_on(MAKERS[name](), 0, epochs + 1)
        assert len({(s.batch_size, s.lr) for s in whole}) > 1
        for cut in range(epochs + 1):
            before = MAKERS[name]()
            first, file = go_on(before, 0, cut), io.BytesIO()
            torch.save(before.state_dict(), file)
            file.seek(0)
            after = MAKERS[name]()
            after.load_state_dict(torch.load(file, weights_only=True))
            if cut:
                assert after.setting == first[-1]
            assert first + go_on(after, cut, epochs + 1) == whole

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (ThetaController(8, 64, 0.2), r"\(initial_lr 0.2, here 0.1\)"),
            (
                adaptive.ScheduledBatch(8, 64, 0.1, every=3),
                r"kind 'ScheduledBatch', here 'ThetaController'",
            ),
        ],
    )
    def test_other_settings_are_refused_and_change_nothing(self, other, message):
        follow(other, [7.0, 6.0, 6.0], [1.0, 2.0, 3.0])
        controller = ThetaController(8, 64, 0.1)
        follow(controller, [9.0, 5.0], [1.0, 2.0])
        before = frozen(controller)
        with pytest.raises(ValueError, match=message):
            controller.load_state_dict(other.state_dict())
        assert frozen(controller) == before


def frozen(controller):
    state = controller.state_dict()
    start = state.pop("start")
    return state | {"start": start and [t.tolist() for t in start]}, controller.setting


class TestRefused:
    @pytest.mark.parametrize("name", MAKERS)
    @pytest.mark.parametrize(
        ("cost", "parameters", "message"),
        [
            (math.nan, at(2.0), r"the cost of epoch 3 is nan, .* training has diverged"),
            (
                5.0,
                [torch.full((2, 3), math.nan), torch.zeros(())],
                r"of epoch 3 is 5.0, and the distance of .* nan",
            ),
            (5.0, at(1.0)[:1], r"parameter 1 is missing, and \(\) in w_0"),
            (
                5.0,
                [torch.zeros(3, 2), torch.zeros(())],
                r"parameter 0 is \(3, 2\), and \(2, 3\) in w_0; give .* same order",
            ),
        ],
    )
    def test_observation_leaves_the_controller_as_it_was(self, name, cost, parameters, message):
        controller, undisturbed = MAKERS[name](), MAKERS[name]()
        for each in (controller, undisturbed):
            follow(each, [9.0, 8.0], [1.0, 1.5])
        before = frozen(controller)
        with pytest.raises(ValueError, match=message) as caught:
            controller.observe(cost, parameters)
        # Numbers that are not finite are a result, parameters of another model a mistake.
        finite = math.isfinite(cost) and all(bool(p.isfinite().all()) for p in parameters)
        assert isinstance(caught.value, adaptive.DivergedError) == (not finite)
        assert frozen(controller) == before
        assert controller.observe(6.0, at(2.0)) == undisturbed.observe(6.0, at(2.0))

    def test_first_observation_does_not_begin(self):
        controller = ThetaController(8, 64, 0.1)
        for cost, parameters in ((math.nan, START), (5.0, []), (5.0, [torch.tensor([math.nan])])):
            with pytest.raises(ValueError, match=r"of epoch 0 is nan|no parameters|w_0 nan"):
                controller.observe(cost, parameters)
        assert controller.observe(1.0, START).epoch == 1

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"initial_batch": 8.0}, r"initial_batch is 8.0; give a whole number"),
            ({"max_batch": 7}, r"max_batch is 7; give a whole number, at least 8"),
            ({"growth": 1}, r"growth is 1; give a number above 1"),
            ({"tolerance": -0.1}, r"tolerance is -0.1; give a number at least 0"),
            ({"decay_at": (3, 3)}, r"give epochs that rise, such as"),
            ({"decay_at": 80}, "decay_at is 80; give epochs that rise"),
            ({"initial_lr": "0.1"}, "initial_lr is '0.1'; give a number above 0"),
            ({"warmup_from": 0.2}, r"warmup_from is 0.2; give a number 0 to initial_lr, 0.1"),
            ({"interval": 0}, r"interval is 0; give a whole number, at least 1"),
        ],
    )
    def test_arguments(self, given, message):
        with pytest.raises(ValueError, match=message):
            ThetaController(**({"initial_batch": 8, "max_batch": 64, "initial_lr": 0.1} | given))


def big():
    generator = torch.Generator().manual_seed(0)
    shapes = [(1025, 3000), (CHUNK + 7,), (33, 40, 32, 32), (), (3, 0)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[2] = tensors[2].to(memory_format=torch.channels_last)
    return tensors


class TestDistance:
    def test_is_the_norm_of_the_whole_difference(self):
        before, now = big(), [2 * w + 0.5 for w in big()]
        assert now[2].is_contiguous(memory_format=torch.channels_last)
        flat = [torch.cat([w.double().flatten() for w in ws]) for ws in (before, now)]
        wanted = float(torch.norm(flat[0] - flat[1]))
        assert StartingPoint(before).distance(now) == pytest.approx(wanted, rel=1e-6)
        assert StartingPoint(before).distance(before) == 0
        # another layout of the same values
        now[2] = now[2].contiguous()
        assert StartingPoint(before).distance(now) == pytest.approx(wanted, rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.double, torch.cfloat])
    @pytest.mark.parametrize("step", [2.0**-13, 2.0**9])
    def test_small_and_large_steps_of_every_type(self, dtype, step):
        before = torch.zeros(1000, dtype=dtype)
        # A power of two, which every type has.
        now = torch.full_like(before, step * 1j if dtype.is_complex else step)
        assert StartingPoint([before]).distance([now]) == pytest.approx(step * 1000**0.5, rel=1e-6)

    def test_whole_numbers_and_masks(self):
        before = [torch.tensor([0, 10], dtype=torch.uint8), torch.tensor([True, False])]
        now = [torch.tensor([3, 6], dtype=torch.uint8), torch.tensor([True, False])]
        assert StartingPoint(before).distance(now) == 5

    def test_needs_no_second_copy(self):
        parameters = big()
        size = sum(w.nbytes for w in parameters)
        controller = ThetaController(8, 64, 0.1)
        with MemoryMeter(resident=parameters) as meter:
            controller.observe(2.0, parameters)
            kept = meter.live_bytes - meter.start_bytes
        assert kept == pytest.approx(size, rel=1e-3)
        moved = [w + 1 for w in parameters]
        resident = [*parameters, *moved, *controller.state_dict()["start"]]
        with MemoryMeter(resident=resident) as meter:
            step = controller.observe(1.0, moved)
            assert meter.live_bytes - meter.start_bytes < 1000
        assert step.theta == pytest.approx((size / 4) ** -0.5, rel=1e-5)
        assert meter.peak_bytes - meter.start_bytes < 2 * 4 * CHUNK + 1000 < size


class TestGroups:
    """Rates of groups are set in proportion."""

    def optimizer(self, *rates, lr=None, kind=torch.optim.SGD):
        groups = [{"params": [nn.Parameter(torch.ones(1))]} for _ in rates]
        for group, rate in zip(groups, rates, strict=True):
            group |= {} if rate is None else {"lr": rate}
        return kind(groups, **({} if lr is None else {"lr": lr}))

    @pytest.mark.parametrize(
        ("rates", "lr", "wanted"),
        [
            ((None, 0.01), 0.1, (0.2, 0.02)),
            ((0.01, None), 0.1, (0.02, 0.2)),
            ((0.1, None), 0.01, (2.0, 0.2)),  # a head that learns faster than the rest
            ((0.5, 0.05), None, (0.2, 0.02)),  # none has the optimizer's own
            ((None, None), 0.0, (0.2, 0.2)),
            ((None, 0.05), 0.0, (0.0, 0.2)),
            ((torch.tensor(0.1), torch.tensor(0.05)), torch.tensor(0.1), (0.2, 0.1)),
        ],
    )
    def test_keep_their_proportion_however_often_they_are_set(self, rates, lr, wanted):
        optimizer = self.optimizer(*rates, lr=lr)
        for rate in (0.2, 1.6, 0.004, 0.2):
            set_lr(optimizer, rate)
            set_rates = [float(group["lr"]) for group in optimizer.param_groups]
            assert set_rates == pytest.approx([rate / 0.2 * share for share in wanted], rel=1e-6)

    def test_through_saving_and_with_a_group_added_later(self):
        optimizer = self.optimizer(None, 0.01, lr=0.1)
        set_lr(optimizer, 0.2)
        other = self.optimizer(None, 0.01, lr=0.1)
        other.load_state_dict(optimizer.state_dict())
        for rate in ({"lr": 0.05}, {}):  # of the present 0.2, and the optimizer's own
            other.add_param_group({"params": [nn.Parameter(torch.ones(1))], **rate})
        set_lr(other, 0.4)
        assert [g["lr"] for g in other.param_groups] == pytest.approx([0.4, 0.04, 0.1, 0.4])

    def test_of_an_optimizer_that_wraps_others(self):
        within = [self.optimizer(None, lr=0.1), self.optimizer(None, lr=0.01)]
        groups = [group for one in within for group in one.param_groups]
        set_lr(type("Both", (), {"param_groups": groups, "step": None})(), 0.2)
        assert [g["lr"] for g in groups] == pytest.approx([0.2, 0.02])

    def test_a_group_added_at_rate_0_has_its_share_of_the_optimizers_own(self):
        optimizer = self.optimizer(None, lr=0.1)
        set_lr(optimizer, 0.0)
        for rate in ({"lr": 0.05}, {}):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **rate})
        set_lr(optimizer, 0.4)
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.4, 0.2, 0.4])

    def test_a_scheduler_is_refused_before_anything_is_set(self):
        optimizer = self.optimizer(None, 0.01, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        with pytest.raises(adaptive.SchedulerError, match=r"leave it out .* or set_lr"):
            set_lr(optimizer, 0.2)
        assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.01]
        optimizer.step()
        scheduler.step()

    @pytest.mark.parametrize("tensor", [False, True])
    def test_a_rate_that_another_has_changed_is_refused(self, tensor):
        lr = torch.tensor(0.1) if tensor else 0.1
        optimizer = self.optimizer(None, 0.01, lr=lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        set_lr(optimizer, 0.5)
        scheduler.step(1.0)
        set_lr(optimizer, 0.5)
        scheduler.step(1.0)  # a plateau
        other = self.optimizer(None, 0.01, lr=lr)
        other.load_state_dict(optimizer.state_dict())
        for each in (optimizer, other):
            message = r"or another, sets the rates \(now 0.05, 0.005\)"
            with pytest.raises(adaptive.SchedulerError, match=message):
                set_lr(each, 0.5)
            assert float(each.param_groups[0]["lr"]) == pytest.approx(0.05)
