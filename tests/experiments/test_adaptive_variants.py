"""Trainings with a decay on saturation, with LARS and LAMB, and with the choices left open."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from repro import datasets
from repro.datasets import PatchLoader
from repro.experiments.adaptive import building, experiments, layerwise, settings, variants
from repro.experiments.adaptive.settings import CIFAR, DECAY, DIV2K, GIVEN, LAYERWISE

CHOSEN = {"CIFAR": "digits", "DIV2K": "photos", "Phantom": "phantom"}
SMALL = {"train_samples": 43, "test_samples": 20}  # no multiple of a batch size


def config_of(strategy="theta", task=CIFAR, **changes):
    return settings.training("smoke", task, CHOSEN, strategy).config | SMALL | changes


def load(config):
    options = dict(config["dataset"])
    return datasets.load(options.pop("name"), **options)


def train(config):
    found = variants.train(config, 0, load(config), "cpu").metrics
    return {k: v for k, v in found.items() if k not in ("time_s", "control_s")}


class TestTraining:
    @pytest.mark.parametrize("task", [CIFAR, DIV2K])
    def test_what_train_knows_is_trained_alike(self, task):
        config = config_of(GIVEN, task)
        plain = experiments.train(config, 0, load(config), "cpu").metrics
        chosen = {"last_batch": "full_rate", "psnr": "rgb"}
        assert train(config | chosen) == {k: plain[k] for k in train(config)}

    def test_the_papers_k_is_grown_by(self):
        """10 of 1,100 epochs are one of 4: after every epoch, as long as costs fall."""
        config = config_of(GIVEN, DIV2K)
        found, own = train(config), config["controller"]
        costs = found["initial_cost"] + found["train_cost"]
        assert costs == sorted(costs, reverse=True)
        assert found["batch_size"] == [min(own["max_batch"], own["batch"] * 2**n) for n in range(4)]
        assert set(found["interval"]) == {1}

    def test_a_saturated_cost_decays_the_rate(self):
        """Section III-E: first to μ_0 β, then by β; here no cost falls by 99 %."""
        config = config_of(DECAY, DIV2K, epochs=5)
        config["controller"] |= {"saturation": {"patience": 2, "threshold": 0.99}}
        found = train(config)
        start = config["controller"]["lr"]
        rates = found["lr"]
        # The first epoch's cost is the lowest so far; two later it is saturated, and again.
        assert rates[3:] == pytest.approx(
            [
                0.1 * start * s / b
                for s, b in zip(found["batch_size"][3:], [found["batch_size"][3]] * 2, strict=True)
            ]
        )
        never = config | {
            "controller": config["controller"] | {"saturation": {"patience": 100, "threshold": 0.0}}
        }
        assert min(train(never)["lr"]) == start

    @pytest.mark.parametrize("optimizer", LAYERWISE)
    def test_it_trains(self, optimizer):
        config = settings.layerwise("smoke", CHOSEN, optimizer, "theta").config | {"epochs": 3}
        found = train(config)
        assert not found["diverged"] and found["train_cost"][-1] < found["initial_cost"][0]
        run = variants.start(config, 0, load(config), "cpu")
        assert type(run.optimizer).__name__ == optimizer


class TestLastBatch:
    def rates(self, chosen):
        config = config_of("best", epochs=1, last_batch=chosen)
        run = variants.start(config, 0, load(config), "cpu")
        seen = []

        def step(inputs, targets):
            seen.append((len(inputs), run.optimizer.param_groups[0]["lr"]))
            return run.model(inputs).detach().sum()

        run.epoch(variants.stepping(run, step), "cpu")
        return config["controller"], seen

    def test_the_rate_is_full_or_in_proportion(self):
        own, full = self.rates("full_rate")
        assert [size for size, _ in full][-1] < own["batch"]
        assert {rate for _, rate in full} == {own["lr"]}
        own, less = self.rates("in_proportion")
        size, rate = less[-1]
        assert rate == pytest.approx(own["lr"] * size / own["batch"])
        assert less[:-1] == full[:-1]

    def test_another_choice_is_refused(self):
        with pytest.raises(ValueError, match="last_batch is 'none'; choose full_rate"):
            self.rates("none")


class TestPSNR:
    @pytest.mark.parametrize(("choice", "border"), [("rgb_shaved", 8), ("y_shaved", 2)])
    def test_by_hand(self, choice, border):
        config = config_of(task=DIV2K, psnr=choice, patch=12)
        config["dataset"] = config["dataset"] | {"image_size": 24}
        data = load(config)
        run = variants.start(config, 0, data, "cpu")
        test = building._some(data.val or data.test, config["test_samples"])
        crops = PatchLoader(
            *building._pairs(config, test, 2), 100, patch=12, shuffle=False, crop="center"
        )
        (inputs, targets), *_ = crops
        with torch.no_grad():
            restored = run.model(inputs).clamp(0, 1).double().numpy()
        target = targets.double().numpy()
        cut = slice(border, -border)
        if choice == "y_shaved":
            # MATLAB's rgb2ycbcr, of which the benchmarks take the first.
            weights = np.array([65.481, 128.553, 24.966])[:, None, None] / 255
            restored, target = ((weights * x).sum(1, keepdims=True) for x in (restored, target))
        error = ((restored - target)[..., cut, cut] ** 2).mean((1, 2, 3))
        wanted = np.mean(-10 * np.log10(error))
        assert run.evaluate(run.model)["psnr"] == pytest.approx(wanted, abs=1e-4)
        plain = variants.start(config | {"psnr": "rgb"}, 0, data, "cpu")
        assert plain.evaluate(plain.model)["psnr"] != pytest.approx(wanted, abs=1e-3)

    def test_another_choice_is_refused(self):
        config = config_of(task=DIV2K, psnr="best")
        with pytest.raises(ValueError, match="psnr is 'best'; choose rgb, rgb_shaved, y_shaved"):
            variants.start(config, 0, load(config), "cpu")


def layer():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    return weight, nn.Parameter(torch.randn(4, dtype=torch.float64))


class TestLayerwise:
    def test_lars_by_its_formulas(self):
        weight, bias = layer()
        optimizer = layerwise.LARS([weight, bias], 0.5, 0.9, 0.01, trust=0.02)
        w, b = weight.detach().numpy().copy(), bias.detach().numpy().copy()
        velocity, of_bias = np.zeros_like(w), np.zeros_like(b)
        for n, rate in enumerate((0.5, 0.25)):
            optimizer.param_groups[0]["lr"] = rate
            gradient, slope = np.cos(w + n), np.sin(b)
            weight.grad, bias.grad = torch.tensor(gradient), torch.tensor(slope)
            optimizer.step()
            norm = np.linalg.norm(w)
            local = 0.02 * norm / (np.linalg.norm(gradient) + 0.01 * norm)  # equation 6
            velocity = 0.9 * velocity + rate * local * (gradient + 0.01 * w)
            of_bias = 0.9 * of_bias + rate * slope
            w, b = w - velocity, b - of_bias
            np.testing.assert_allclose(weight.detach().numpy(), w, rtol=1e-12)
            np.testing.assert_allclose(bias.detach().numpy(), b, rtol=1e-12)

    def test_lamb_by_its_formulas(self):
        weight, bias = layer()
        optimizer = layerwise.LAMB([weight, bias], 0.1, weight_decay=0.01)
        w, b = weight.detach().numpy().copy(), bias.detach().numpy().copy()
        moments = {"w": (0.0, 0.0), "b": (0.0, 0.0)}
        for n in (1, 2):
            gradients = {"w": np.cos(w), "b": np.sin(b)}
            weight.grad, bias.grad = map(torch.tensor, gradients.values())
            optimizer.step()
            steps = {}
            for name, own in gradients.items():
                m, v = moments[name]
                moments[name] = m, v = 0.9 * m + 0.1 * own, 0.999 * v + 0.001 * own**2
                steps[name] = m / (1 - 0.9**n) / (np.sqrt(v / (1 - 0.999**n)) + 1e-6)
            update = steps["w"] + 0.01 * w
            w = w - 0.1 * np.linalg.norm(w) / np.linalg.norm(update) * update
            b = b - 0.1 * steps["b"]
            np.testing.assert_allclose(weight.detach().numpy(), w, rtol=1e-9)
            np.testing.assert_allclose(bias.detach().numpy(), b, rtol=1e-9)

    @pytest.mark.parametrize("kind", [layerwise.LARS, layerwise.LAMB])
    def test_a_layer_or_gradient_of_zeros_has_no_ratio(self, kind):
        for zero in (True, False):
            weight = nn.Parameter(torch.zeros(2, 2) if zero else torch.ones(2, 2))
            optimizer = kind([weight], 0.1)
            weight.grad = torch.ones(2, 2) if zero else torch.zeros(2, 2)
            optimizer.step()
            assert weight.isfinite().all()

    def test_bad_arguments(self):
        weight, _ = layer()
        with pytest.raises(ValueError, match="trust 0; give"):
            layerwise.LARS([weight], 0.1, trust=0)
        with pytest.raises(ValueError, match=r"betas \(0.9, 1.0\)"):
            layerwise.LAMB([weight], 0.1, betas=(0.9, 1.0))
        assert math.isclose(layerwise.LARS([weight], 0.1).defaults["trust"], 0.001)
