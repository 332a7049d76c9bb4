"""The experiments on θ-adaptive batch sizes, each on toys; the optimizers of section V."""

import math
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing import ProcessRaisedException

from repro.experiments import captured
from repro.experiments.adaptive import building, experiments, overlap, runs, worker
from repro.experiments.adaptive.runs import CIFAR, DECAY, DIV2K, PHANTOM, TASKS
from repro.experiments.one_run import load
from repro.measure import describe_device

CHOSEN = {CIFAR: "digits", DIV2K: "photos", PHANTOM: "phantom"}


def config_of(strategy="theta", task=CIFAR, **changes):
    small = {"train_samples": 43, "test_samples": 20}
    return runs.training("smoke", task, CHOSEN, strategy).config | small | changes


def train(config):
    found = experiments.train(config, 0, load(config, None), "cpu").metrics
    return {k: v for k, v in found.items() if k not in ("time_s", "control_s")}


def start(config):
    run = experiments.Training(config, 0, load(config, None), "cpu")
    passes = captured.CapturedPasses(run.model, building.loss_of(config))
    return run, captured.captured_step(passes, run.optimizer)


class TestTrain:
    def test_theta_is_equation_4(self):
        """F(w_0), F(w_1) and the distance from the model itself, after one epoch."""
        run, step = start(config_of(epochs=1))
        before = [p.detach().double().clone() for p in run.model.parameters()]
        losses, sizes = [], []

        def noted(inputs, targets):
            losses.append(float(step(inputs, targets)))
            sizes.append(len(inputs))
            return torch.tensor(losses[-1])

        assert run.epoch(noted, "cpu") is False  # it was the last
        cost = sum(a * b for a, b in zip(losses, sizes, strict=True)) / sum(sizes)
        moved = zip(run.model.parameters(), before, strict=True)
        gap = torch.cat([(p.detach().double() - w).flatten() for p, w in moved])
        (initial,) = run.history["initial_cost"]
        assert run.history["train_cost"] == pytest.approx([cost], rel=1e-5)
        assert run.history["theta"] == pytest.approx([(initial - cost) / float(gap.norm())], 1e-4)
        assert sizes == [8] * 5 + [3]

    @pytest.mark.parametrize("task", TASKS)
    def test_a_training_that_diverges_is_recorded(self, task):
        config = config_of("best", task)
        metrics = train(config | {"controller": config["controller"] | {"lr": 1e30}})
        assert metrics["diverged"] is True
        assert metrics["completed"] == len(metrics["train_cost"]) < config["epochs"]
        assert all(math.isfinite(value) for value in metrics["train_cost"])

    def test_whatever_is_no_number_diverges(self, monkeypatch):
        run, step = start(config_of("noise"))
        run.controller._measure = lambda: math.nan
        assert run.epoch(step, "cpu") is False
        assert run.diverged and run.history["train_cost"] == []
        nowhere = {"psnr": math.nan, "test_l1": 1.0}
        with monkeypatch.context() as patch:
            patch.setattr(building, "evaluate_psnr", lambda *args, **options: nowhere)
            assert train(config_of("best", PHANTOM))["diverged"] is True

        def last(self, inputs, targets):  # its cost is finite, the parameters are not
            with torch.no_grad():
                next(iter(self._parameters)).fill_(math.inf)
            return torch.tensor(1.0)

        monkeypatch.setattr(captured.CapturedPasses, "__call__", last)
        assert train(config_of("best"))["diverged"] is True

    def test_the_stop_rule(self):
        """No rise of 100 dB: the first epoch is the best, two more are the patience."""
        metrics = train(config_of("theta", PHANTOM, epochs=9, stop={"least": 100.0, "patience": 2}))
        assert (metrics["completed"], metrics["stopped"], metrics["best_epoch"]) == (3, True, 1)

    def test_the_rate_climbs_within_an_epoch(self):
        """43 of 64 samples a batch: one step an epoch, at the rate at its end."""
        config = config_of("linear")
        run, _ = start(config)
        rates, warmup = [], config["controller"]["warmup"]

        def step(inputs, targets):
            rates.append(run.optimizer.param_groups[0]["lr"])
            return torch.tensor(1.0)

        with torch.no_grad():
            for _ in range(warmup + 1):
                next(run.model.parameters()).add_(0.1)
                run.epoch(step, "cpu")
        end, low = run.controller.initial_lr, config["controller"]["base_lr"]
        wanted = [low + (end - low) * (n + 1) / warmup for n in range(warmup)]
        assert rates == pytest.approx([*wanted, end])

    def test_a_saturated_cost_decays_the_rate(self):
        """Section III-E: first to μ_0 β, then by β; here no cost falls by 99 %."""
        config = config_of(DECAY, DIV2K, epochs=5)
        config["controller"] |= {"saturation": {"patience": 2, "threshold": 0.99}}
        found, lr = train(config), config["controller"]["lr"]
        fourth, fifth = found["batch_size"][3:]
        # The first epoch's cost is the lowest so far; two later it is saturated, and again.
        assert found["lr"][3:] == pytest.approx([0.1 * lr, 0.1 * lr * fifth / fourth])


class TestOverlap:
    def test_a_sleeping_layer_has_the_gradient_of_its_sum(self):
        layer, x = overlap.SleepingLayer(3), torch.ones(2, 1, requires_grad=True)
        layer(x).sum().backward()
        assert layer.weight.grad.tolist() == [2.0, 2.0, 2.0] and x.grad.tolist() == [[1.0], [1.0]]

    @pytest.mark.slow
    def test_averaging_hides_under_computation(self):
        (run,) = overlap.runs("quick", CHOSEN)
        changes = {"ratios": {"1": 1.0}, "repeats": 4}
        found = overlap.asleep(run.config | changes, 0, None, "cpu").metrics["ratios"]["1"]
        # The quickest round of each: other work on the machine only makes rounds slower.
        quickest = {kind: [min(found[kind])] for kind in ("after_s", "within_s")}
        # Of what can hide 65 to 80 % do, also beside other work on two cores. In one bucket after
        # the backward pass, where nothing can, it is below 20 %.
        assert overlap.hidden(found | quickest).mean > 40


class TestWorkers:
    """Measurements in processes of their own: what is told of a failure, and when they end."""

    @pytest.mark.slow
    def test_a_worker_that_fails_is_named(self):
        job = runs.parallel("smoke", {})[0].config | {"jobs": {"CIFAR": {}}, "seed": 0}
        with pytest.raises(ProcessRaisedException, match=r"(?s)Process 0 terminated.*KeyError"):
            worker.launch(job, 2)

    def test_a_launch_ends_at_its_limit_whatever_hangs(self):
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"2 processes did not end in 0.2 s"):
            worker.launch(60, 2, timeout_s=0.2, function=time.sleep)
        assert time.monotonic() - start < 20

    def test_the_measurement_is_of_cpus_whatever_the_device(self, monkeypatch):
        asked = []
        monkeypatch.setattr(worker, "launch", lambda *given: asked.append(given) or {"CIFAR": {}})
        for profile in ("quick", "paper"):
            config = runs.parallel(profile, {})[0].config
            found = worker.parallel(config, 3, None, "cuda").metrics
            assert asked.pop() == ({**config, "seed": 3}, 2)
            assert found == {"tasks": {"CIFAR": {}}, "device": describe_device("cpu")["name"]}


class TestLayerwise:
    @pytest.fixture
    def layer(self):
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(*size, dtype=torch.float64)) for size in ((4, 3), (4,))]

    def test_lars_by_its_formulas(self, layer):
        optimizer = building.LARS(layer, 0.5, momentum=0.9, weight_decay=0.01, trust=0.02)
        w, b = (p.detach().numpy().copy() for p in layer)
        velocity, of_bias = np.zeros_like(w), np.zeros_like(b)
        for n, rate in enumerate((0.5, 0.25)):
            optimizer.param_groups[0]["lr"] = rate
            gradient, slope = np.cos(w + n), np.sin(b)
            layer[0].grad, layer[1].grad = torch.tensor(gradient), torch.tensor(slope)
            optimizer.step()
            norm = np.linalg.norm(w)
            local = 0.02 * norm / (np.linalg.norm(gradient) + 0.01 * norm)  # equation 6
            velocity = 0.9 * velocity + rate * local * (gradient + 0.01 * w)
            of_bias = 0.9 * of_bias + rate * slope
            w, b = w - velocity, b - of_bias
            np.testing.assert_allclose(layer[0].detach().numpy(), w, rtol=1e-12)
            np.testing.assert_allclose(layer[1].detach().numpy(), b, rtol=1e-12)

    def test_lamb_by_its_formulas(self, layer):
        optimizer = building.LAMB(layer, 0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)
        w, b = (p.detach().numpy().copy() for p in layer)
        moments = [(0.0, 0.0), (0.0, 0.0)]
        for n in (1, 2):
            steps = []
            for place, own in enumerate((np.cos(w), np.sin(b))):
                layer[place].grad = torch.tensor(own)
                m, v = moments[place]
                moments[place] = m, v = 0.9 * m + 0.1 * own, 0.999 * v + 0.001 * own**2
                steps.append(m / (1 - 0.9**n) / (np.sqrt(v / (1 - 0.999**n)) + 1e-6))
            optimizer.step()
            update = steps[0] + 0.01 * w
            w = w - 0.1 * np.linalg.norm(w) / np.linalg.norm(update) * update
            b = b - 0.1 * steps[1]
            np.testing.assert_allclose(layer[0].detach().numpy(), w, rtol=1e-9)
            np.testing.assert_allclose(layer[1].detach().numpy(), b, rtol=1e-9)

    @pytest.mark.parametrize("name", ["LARS", "LAMB"])
    def test_a_gradient_of_zeros_has_no_ratio(self, name):
        model = nn.Linear(2, 2, bias=False)
        model.weight.grad = torch.zeros(2, 2)
        building.build_optimizer({"optimizer": runs.OPTIMIZERS[name]}, model).step()
        assert model.weight.isfinite().all()
