import math
import random

import pytest
import torch
from test_controller import with_thetas as follow

from repro import adaptive
from repro.adaptive import DivergedError, LinearScaling, NoImprovement, NoiseScaleBatch
from repro.adaptive.gradients import NoiseScale

THETAS = [random.Random(2).uniform(-1, 3) for _ in range(12)]


def batches(steps):
    return [s.batch_size for s in steps]


def rates(steps):
    return [s.lr for s in steps]


def test_linear_scaling_climbs_with_every_iteration_of_five_epochs_as_goyals():
    steps = follow(LinearScaling(2048, 128, 0.1, decay_at=(8, 10)), THETAS)
    assert set(batches(steps)) == {2048}
    k, per_epoch = 16, 25
    climb = [s.lr_at((i + 1) / per_epoch) for s in steps[:5] for i in range(per_epoch)]
    iterations = 5 * per_epoch
    # η at the start, kη after five epochs, a constant amount at each iteration.
    wanted = [0.1 + (k - 1) * 0.1 * (t + 1) / iterations for t in range(iterations)]
    assert climb == pytest.approx(wanted)
    assert rates(steps)[5:] == pytest.approx([1.6] * 3 + [0.16] * 2 + [0.016] * 3)
    assert {s.lr_at(0.5) - s.lr for s in steps[5:]} == {0}


def test_scheduled_batch():
    # Section VI-C's: 256 doubled after every 30 epochs, the rate as it was.
    steps = follow(adaptive.ScheduledBatch(256, 2048, 0.2, every=30), [1.0] * 120)
    assert batches(steps) == [256] * 30 + [512] * 30 + [1024] * 30 + [2048] * 31
    assert set(rates(steps)) == {0.2}


class TestNoiseScaleBatch:
    def run(self, scales, **options):
        left = list(scales)
        controller = NoiseScaleBatch(8, 100, 0.1, lambda: left.pop(0), **options)
        steps = follow(controller, THETAS[: len(scales)])
        assert not left and controller.scale == scales[-1]
        return steps

    def test_part_of_a_factor_is_refused(self):
        with pytest.raises(ValueError, match=r"factors is 0\.5"):
            NoiseScaleBatch(8, 100, 0.1, lambda: 1.0, factors=0.5)

    def test_a_state_of_other_factors_is_refused_and_one_without_is_taken(self):
        one, other = (NoiseScaleBatch(8, 64, 0.1, lambda: 1.0, factors=n) for n in (1, math.inf))
        state = one.state_dict()
        with pytest.raises(ValueError, match="factors 1, here inf"):
            other.load_state_dict(state)
        del state["settings"]["factors"]  # of an earlier version
        one.load_state_dict(state)

    def test_several_factors_at_once(self):
        assert batches(self.run([3.0, 99.0], factors=math.inf)) == [8, 8, 64]

    def test_grows_up_to_the_scale_and_never_shrinks(self):
        steps = self.run([3.0, 15.9, 16.0, 4.0, 70.0, 99.9, 100.0, 5.0])
        assert batches(steps) == [8, 8, 8, 16, 16, 32, 64, 100, 100]
        assert rates(steps) == pytest.approx([0.1 * b / 8 for b in batches(steps)])

    def test_a_factor_of_less_than_a_sample_is_one(self):
        assert batches(self.run([99.0, 99.0], growth=1.01)) == [8, 9, 10]

    @pytest.mark.parametrize("scale", [math.inf, 1e9])
    def test_grows_by_one_factor_an_epoch(self, scale):
        steps = self.run([scale, 1.0, scale, scale], lr_exponent=0.5)
        assert batches(steps) == [8, 16, 16, 32, 64]
        assert rates(steps)[-1] == pytest.approx(0.1 * (64 / 8) ** 0.5)

    @pytest.mark.parametrize("signal", [-3.0, 0.0])
    def test_an_estimate_that_sees_noise_alone_is_averaged_with_others(self, signal):
        """By hand: noise 400, and signals of which the mean, by age, is positive at the third."""
        parts = [(400.0, signal), (400.0, -1.0), (400.0, 8.0), (400.0, 8.0)]
        left = [NoiseScale(*each) for each in parts]
        controller = NoiseScaleBatch(8, 100, 0.1, lambda: left.pop(0))
        steps, means = [controller.observe(10.0, [torch.zeros(1)])], [0.0, 0.0]
        for each in parts:
            means = [0.9 * m + 0.1 * value for m, value in zip(means, each, strict=True)]
            steps.append(controller.observe(9.0, [torch.ones(1)]))
            wanted = means[0] / means[1] if means[1] > 0 else math.inf
            assert controller.scale == pytest.approx(wanted)
        assert batches(steps) == [8, 8, 8, 16, 32]
        other = NoiseScaleBatch(8, 100, 0.1, float)
        other.load_state_dict(controller.state_dict())
        assert (other._noise, other._signal) == pytest.approx(tuple(means))

    def test_unlucky_estimates_do_not_lead_far_off(self):
        """Of 40 trainings of 8 epochs, whose |G|² seems negative in one of four epochs."""
        draw, ends = random.Random(0), []
        for _ in range(40):
            scale = lambda: NoiseScale(160.0, 1 + 1.4 * draw.gauss(0, 1))  # noqa: E731
            controller = NoiseScaleBatch(16, 4096, 0.1, scale)
            controller.observe(10.0, [torch.zeros(1)])
            ends.append([controller.observe(9.0, [torch.ones(1)]) for _ in range(8)][-1].batch_size)
        # The largest not above the scale of 160 is 128.
        assert sum(64 <= end <= 256 for end in ends) >= 34 and max(ends) <= 1024

    @pytest.mark.parametrize("of", [(math.nan,), (math.nan, -1.0), (math.inf, 1.0)])
    def test_a_scale_that_is_no_number_is_refused(self, of):
        controller = NoiseScaleBatch(8, 100, 0.1, lambda: NoiseScale(*of) if of[1:] else of[0])
        before = controller.observe(10.0, [torch.zeros(1)])
        with pytest.raises(DivergedError, match=r"the noise scale after epoch 1 is NaN"):
            controller.observe(9.0, [torch.ones(1)])
        assert controller.setting == before


def stops(values, least, patience):
    """The epoch after which training stops, by the rule of section VI-A read from the start."""
    for last in range(1, len(values) + 1):
        best, best_epoch = -math.inf, 0
        for epoch, value in enumerate(values[:last], 1):
            if value > best + least:
                best, best_epoch = value, epoch
        if last - best_epoch >= patience:
            return last
    return None


class TestNoImprovement:
    @pytest.mark.parametrize("seed", range(5))
    def test_random_metrics(self, seed):
        draw = random.Random(seed)
        least, patience = draw.choice([0.0, 0.1, 0.5]), draw.randint(1, 8)
        value, values = 20.0, []
        for _ in range(120):
            value += draw.choice([0.3, 0.11, 0.04, 0.0, -0.2, -0.1])
            values.append(value)
        rule = NoImprovement(least, patience)
        stopped = next((n for n, value in enumerate(values, 1) if rule.observe(value)), None)
        assert stopped == stops(values, least, patience)

    def test_papers_rule_ends_a_slow_creep_after_50_epochs(self):
        rule, creep = NoImprovement(), [30 + 0.001 * n for n in range(60)]
        assert [rule.observe(v) for v in creep] == [n >= 50 for n in range(60)]
        assert (rule.best, rule.best_epoch) == (30.0, 1)

    def test_refused(self):
        for given in ((-0.1, 3), (math.nan, 3), (0.1, 0)):
            with pytest.raises(ValueError, match=rf"least is {given[0]} and patience {given[1]}"):
                NoImprovement(*given)
        rule = NoImprovement(0.1, 2)
        rule.observe(30.0)
        with pytest.raises(DivergedError, match=r"the metric of epoch 2 is NaN"):
            rule.observe(math.nan)
