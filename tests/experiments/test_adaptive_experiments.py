"""What the experiments on θ-adaptive batch sizes run, on toys."""

import copy
import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from repro import datasets
from repro.adaptive import METHODS, DivergedError, full_cost
from repro.experiments import captured, load_paper
from repro.experiments.adaptive import (
    building,
    experiments,
    peaks,
    settings,
    worker,
)
from repro.experiments.adaptive.settings import CIFAR, DIV2K, PHANTOM, STRATEGIES, TASKS
from repro.experiments.outcome import Outcome
from repro.records import RecordStore
from repro.training import plain_step

DESIGN = load_paper("adaptive")
CHOSEN = {CIFAR: "digits", DIV2K: "photos", PHANTOM: "phantom"}
SMALL = {"train_samples": 44, "test_samples": 20}  # no multiple of a batch size

TRAININGS = [(task, s) for task in TASKS for s in STRATEGIES] + [(CIFAR, "large"), (CIFAR, "noise")]
TOYS = {
    **{
        f"{task}, {s}": ("train", settings.training("smoke", task, CHOSEN, s).config | SMALL)
        for task, s in TRAININGS
    },
    **{
        f"{task}, norms": ("norms", settings.norms("smoke", task, CHOSEN).config | SMALL)
        for task in TASKS
    },
}


def load(config: Any) -> Any:
    options = dict(config["dataset"])
    return datasets.load(options.pop("name"), **options)


def train(config: Any, seed: int = 0) -> dict[str, Any]:
    return experiments.train(config, seed, load(config), "cpu").metrics


def untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in metrics.items() if k not in ("time_s", "control_s")}


def theta(task=CIFAR, **changes: Any) -> dict[str, Any]:
    return TOYS[f"{task}, theta"][1] | changes


@pytest.fixture(scope="module")
def toys() -> dict[str, Outcome]:
    made = {}
    for name, (experiment, config) in TOYS.items():
        data, function = load(config), DESIGN.experiments[experiment].function
        made[name] = function(config, 0, data, "cpu")
    return made


class TestEveryRun:
    @pytest.mark.parametrize("name", TOYS)
    def test_metrics_and_timings_can_be_written(self, toys, name, tmp_path, make_record):
        outcome = toys[name]
        store = RecordStore(tmp_path)
        record = make_record(
            "x", paper="adaptive", config=TOYS[name][1], key="k", metrics=outcome.metrics
        )
        store.write(record)
        (read,) = store.load("adaptive")
        # As text, for a norm of one mini-batch has no standard error, NaN.
        texts = (json.dumps(m, sort_keys=True) for m in (read.metrics, outcome.metrics))
        assert len(set(texts)) == 1


class TestTrain:
    @pytest.mark.parametrize(("task", "strategy"), TRAININGS)
    def test_what_is_recorded(self, toys, task, strategy):
        config = TOYS[f"{task}, {strategy}"][1]
        outcome = toys[f"{task}, {strategy}"]
        metrics, own = outcome.metrics, config["controller"]
        epochs, name = config["epochs"], "accuracy" if task == CIFAR else "psnr"
        for key in (
            "train_cost",
            "theta",
            "batch_size",
            "lr",
            "updates",
            "interval",
            "time_s",
            "control_s",
            "test_loss",
            name,
        ):
            assert len(metrics[key]) == epochs, key
        sizes = metrics["batch_size"]
        assert metrics["updates"] == [math.ceil(44 / size) for size in sizes]
        assert sizes[0] == own["batch"] and max(sizes) <= own.get("max_batch", own["batch"])
        assert all(
            b in (a, min(2 * a, own.get("max_batch", a))) or strategy == "noise"
            for a, b in itertools.pairwise(sizes)
        )
        assert (metrics["completed"], metrics["diverged"]) == (epochs, False)
        assert metrics["stopped"] is False  # four epochs, and fifty without a rise to stop
        assert (metrics["best_epoch"] is None) == (task == CIFAR)
        assert outcome.timings["epoch"].samples_s == tuple(metrics["time_s"])
        assert all(math.isfinite(value) for value in metrics["train_cost"] + metrics[name])

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_batches_and_rates_are_the_controllers(self, toys, strategy):
        """The controller of the configuration, shown the recorded θ again, decides the same."""
        config = TOYS[f"CIFAR, {strategy}"][1]
        metrics = toys[f"CIFAR, {strategy}"].metrics
        controller = building.build_controller(config, None, None, 0)
        start, moved = torch.zeros(1), torch.ones(1)
        step = controller.observe(0.0, [start])
        for n, value in enumerate(metrics["theta"]):
            assert (step.batch_size, step.lr) == pytest.approx(
                (metrics["batch_size"][n], metrics["lr"][n])
            )
            step = controller.observe(-value, [moved])
            assert step.interval == metrics["interval"][n]

    @pytest.mark.slow
    def test_theta_is_equation_4(self):
        """F(w_0), F(w_1) and the distance from the model itself, after one epoch."""
        config = theta(epochs=1)
        data = load(config)
        run = experiments.Training.start(config, 0, data, "cpu")
        before = [p.detach().double().clone() for p in run.model.parameters()]
        step = captured.CapturedStep(run.model, building.loss_of(config), run.optimizer)
        losses, sizes = [], []

        def noted(inputs, targets):
            losses.append(float(step(inputs, targets)))
            sizes.append(len(inputs))
            return torch.tensor(losses[-1])

        assert run.epoch(noted, "cpu") is False  # it was the last
        cost = sum(a * b for a, b in zip(losses, sizes, strict=True)) / sum(sizes)
        gap = torch.cat(
            [
                (p.detach().double() - w).flatten()
                for p, w in zip(run.model.parameters(), before, strict=True)
            ]
        )
        (initial,) = run.history["initial_cost"]
        assert run.history["train_cost"] == pytest.approx([cost], rel=1e-5)
        wanted = (initial - cost) / float(gap.norm())
        assert run.history["theta"] == pytest.approx([wanted], rel=1e-4)
        assert sizes == [8] * 5 + [4]

    def test_the_initial_cost_is_of_the_whole_set_at_w_0(self, toys):
        config = theta()
        torch.manual_seed(0)
        data = load(config)
        loader, _ = building.build_data(config, data, 0, "cpu")
        model = building.build_model(config, 10, "cpu")
        images, labels = zip(*loader, strict=True)
        expected = full_cost(model, (torch.cat(images), torch.cat(labels)), 44)
        found = toys["CIFAR, theta"].metrics["initial_cost"][0]
        assert found == pytest.approx(expected, rel=1e-5)

    def test_the_same_seed_repeats_exactly_and_another_does_not(self, toys):
        torch.rand(3)  # whatever ran before in the process
        config = TOYS["Phantom, theta"][1]
        first = toys["Phantom, theta"].metrics
        assert untimed(train(config)) == untimed(first)
        assert train(config, 1)["train_cost"] != first["train_cost"]

    @pytest.mark.parametrize("task", TASKS)
    def test_the_first_epochs_are_a_whole_trainings(self, toys, task):
        (run, _) = peaks.first_epochs("long", task, CHOSEN)
        whole = settings.training("long", task, CHOSEN, "best")
        (changed,) = {k for k in whole.config if whole.config[k] != run.config[k]}
        assert changed == "epochs" and run.config.keys() == whole.config.keys()
        config = TOYS[f"{task}, best"][1]
        first, all_ = train(config | {"epochs": 2}), toys[f"{task}, best"].metrics
        assert first["completed"] == 2 < all_["completed"]
        assert first["theta"] == all_["theta"][:2]

    def test_strategies_begin_alike(self, toys):
        starts = {toys[f"CIFAR, {s}"].metrics["initial_cost"][0] for s in STRATEGIES}
        assert max(starts) - min(starts) < 1e-5

    def test_the_full_cost(self, toys):
        metrics = train(theta(cost="full", epochs=2))
        running = toys["CIFAR, theta"].metrics
        assert metrics["completed"] == 2 and not metrics["diverged"]
        assert metrics["initial_cost"] == running["initial_cost"]
        assert metrics["train_cost"][0] != running["train_cost"][0]
        # Training itself is the same in the first epoch.
        assert metrics["accuracy"][0] == running["accuracy"][0]

    def test_the_full_cost_by_hand(self):
        config = theta(cost="full", epochs=1)
        data = load(config)
        run = experiments.Training.start(config, 0, data, "cpu")
        run.epoch(captured.CapturedStep(run.model, building.loss_of(config), run.optimizer), "cpu")
        # The cost was computed over an epoch of its own, of the same augmentation.
        run.loader.set_epoch(1)
        run.loader.set_batch_size(44)
        ((images, labels),) = list(run.loader)
        run.model.train()
        with torch.no_grad():
            cost = nn.functional.cross_entropy(run.model(images), labels)
        assert run.history["train_cost"] == pytest.approx([float(cost)], rel=1e-5)

    @pytest.mark.parametrize("task", TASKS)
    def test_a_training_that_diverges_is_recorded(self, task):
        config = TOYS[f"{task}, best"][1]
        name = "SGD" if task == CIFAR else "Adam"
        assert config["optimizer"]["name"] == name
        metrics = train(config | {"controller": config["controller"] | {"lr": 1e30}})
        assert metrics["diverged"] is True
        assert metrics["completed"] == len(metrics["train_cost"]) < config["epochs"]
        assert json.loads(json.dumps(metrics)) == metrics
        assert all(math.isfinite(value) for value in metrics["train_cost"])

    def test_parameters_that_leave_their_range_diverge_too(self, monkeypatch):
        """After the last update of an epoch: its cost is finite, the parameters are not."""
        config = TOYS["CIFAR, best"][1]

        def last(self, inputs, targets):
            with torch.no_grad():
                next(iter(self.passes._parameters)).fill_(math.inf)
            return torch.tensor(1.0)

        monkeypatch.setattr(captured.CapturedStep, "__call__", last)
        assert train(config)["diverged"] is True

    def test_a_psnr_that_is_no_number_does_not_raise(self, monkeypatch):
        config = TOYS["Phantom, best"][1]
        monkeypatch.setattr(
            building, "evaluate_psnr", lambda *args: {"psnr": math.nan, "test_l1": 1.0}
        )
        assert train(config)["diverged"] is True

    def test_a_noise_scale_that_is_no_number_diverges(self):
        config = TOYS["CIFAR, noise"][1]
        run = experiments.Training.start(config, 0, load(config), "cpu")
        run.controller._measure = lambda: math.nan
        step = captured.CapturedStep(run.model, building.loss_of(config), run.optimizer)
        assert run.epoch(step, "cpu") is False
        assert run.diverged and run.history["train_cost"] == []

    @pytest.mark.parametrize("place", ["observe", "evaluate"])
    def test_other_errors_are_no_divergence(self, place, monkeypatch):
        """A mistake in the code, of the same class as Python's own errors, is told."""
        config = TOYS["Phantom, best"][1]
        run = experiments.Training.start(config, 0, load(config), "cpu")

        def wrong(*args):
            raise ValueError("a mistake")

        monkeypatch.setattr(
            *((run.controller, "observe") if place == "observe" else (run, "evaluate")), wrong
        )
        step = captured.CapturedStep(run.model, building.loss_of(config), run.optimizer)
        with pytest.raises(ValueError, match="a mistake"):
            run.epoch(step, "cpu")
        assert not run.diverged and issubclass(DivergedError, ValueError)

    def test_the_stop_rule(self):
        """No rise of 100 dB: the first epoch is the best, two more are the patience."""
        config = theta(PHANTOM, epochs=9, stop={"least": 100.0, "patience": 2})
        metrics = train(config)
        assert (metrics["completed"], metrics["stopped"], metrics["best_epoch"]) == (3, True, 1)

    def test_a_rule_that_is_not_met(self):
        metrics = train(theta(PHANTOM, epochs=3, stop={"least": 0.0, "patience": 3}))
        assert (metrics["completed"], metrics["stopped"]) == (3, False)

    def test_the_rate_climbs_within_an_epoch(self):
        config = TOYS["CIFAR, linear"][1]
        run = experiments.Training.start(config, 0, load(config), "cpu")
        rates = []

        def step(inputs, targets):
            rates.append(run.optimizer.param_groups[0]["lr"])
            return torch.tensor(1.0)

        warmup = config["controller"]["warmup"]
        with torch.no_grad():
            for _ in range(warmup + 1):
                next(run.model.parameters()).add_(0.1)
                run.epoch(step, "cpu")
        # 44 of 64 samples a batch: one step an epoch, at the rate at its end.
        end = run.controller.initial_lr
        low = config["controller"]["base_lr"]
        wanted = [low + (end - low) * (n + 1) / warmup for n in range(warmup)]
        assert rates == pytest.approx([*wanted, end])


class TestNorms:
    @pytest.mark.parametrize("task", TASKS)
    def test_what_tables_read(self, toys, task):
        config = TOYS[f"{task}, norms"][1]
        metrics = toys[f"{task}, norms"].metrics
        assert metrics["sizes"] == [n for n in config["sizes"] if n <= 44]
        assert [point["epochs"] for point in metrics["points"]] == config["after"]
        for point in metrics["points"]:
            assert len(point["norms"]) == len(point["errors"]) == len(metrics["sizes"])
            assert point["stable"] in metrics["sizes"] and min(point["norms"]) > 0
            limit = 0.9 * point["norms"][0]
            stable = metrics["sizes"][0]
            for size, norm in zip(metrics["sizes"], point["norms"], strict=True):
                if norm < limit:
                    break
                stable = size
            assert point["stable"] == stable

    def test_training_is_that_of_the_best_batch(self):
        """The measurement in between changes nothing: θ's run goes the same way."""
        config = TOYS["CIFAR, norms"][1]
        data = load(config)
        metrics = experiments.norms(config, 0, data, "cpu").metrics
        once = experiments.norms(config | {"after": [config["after"][-1]]}, 0, data, "cpu").metrics
        assert json.dumps(once["points"]) == json.dumps(metrics["points"][-1:])


class TestCapturedStep:
    def test_on_a_cpu_it_is_the_plain_step(self):
        """Bit for bit, over batches that grow and one that is ragged."""
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
        )
        other = copy.deepcopy(model)
        loss_fn = nn.functional.cross_entropy
        optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, other)]
        ours = captured.CapturedStep(model, loss_fn, optimizers[0])
        plain = plain_step(other, loss_fn, optimizers[1], "cpu")
        for size in (4, 8, 3, 16):
            batch = torch.randn(size, 3, 8, 8), torch.randint(5, (size,))
            assert torch.equal(ours(*batch), plain(*batch))
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b)

    def test_autocast_and_layout(self):
        seen = []

        class Net(nn.Conv2d):
            def forward(self, x):
                y = super().forward(x)
                last = torch.channels_last
                seen.append((y.dtype, x.is_contiguous(memory_format=last)))
                return y.float()

        model = Net(3, 4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batch = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 6, 6)
        step = captured.CapturedStep(
            model, nn.functional.l1_loss, optimizer, torch.bfloat16, channels_last=True
        )
        assert not step(*batch).requires_grad
        captured.CapturedStep(model, nn.functional.l1_loss, optimizer)(*batch)
        assert seen == [(torch.bfloat16, True), (torch.float32, False)]


class TestBuilding:
    @pytest.mark.parametrize("task", [DIV2K, PHANTOM])
    def test_pairs(self, task):
        config = theta(task)
        data = load(config)
        loader, evaluate = building.build_data(config, data, 0, "cpu")
        inputs, targets = next(iter(loader))
        scale, patch = (2 if task == DIV2K else 1), config["patch"]
        assert inputs.shape[2:] == (patch, patch) and targets.shape[2:] == (scale * patch,) * 2
        assert sum(len(x) for x, _ in loader) == 44
        model = building.build_model(config, 0, "cpu")
        first = evaluate(model)
        assert first == evaluate(model) and set(first) == {"psnr", "test_l1"}
        if task == PHANTOM:
            error = (255 * (inputs - targets)).flatten()
            assert 10 < float(error.std()) < 30  # σ is 25.5, less what black and white clip

    def test_controllers_are_of_their_kinds(self):
        names = {
            name: type(building.build_controller(config, None, None, 0)).__name__
            for name, (_, config) in TOYS.items()
        }
        kinds = {
            "best": "FixedBatch",
            "large": "FixedBatch",
            "linear": "LinearScaling",
            "scheduled": "ScheduledBatch",
            "theta": "ThetaController",
            "noise": "NoiseScaleBatch",
            "norms": "FixedBatch",
        }
        assert names == {name: kinds[name.split(", ")[1]] for name in TOYS}

    def test_a_validation_split_comes_before_the_test_split(self):
        config = theta() | {"test_samples": 10}
        data = load(config)
        black = datasets.Split(torch.zeros(12, 1, 8, 8, dtype=torch.uint8), torch.full((12,), 3))
        _, evaluate = building.build_data(config, replace(data, val=black), 0, "cpu")

        class Three(nn.Module):
            def forward(self, x):
                return nn.functional.one_hot(torch.full((len(x),), 3), 10).float()

        assert evaluate(Three())["accuracy"] == 100


def measured():
    """The smoke profile's measurement, with less of everything."""
    config = settings.parallel("smoke").config
    job = config["jobs"][CIFAR]
    return config | {
        "jobs": {CIFAR: job | {"sizes": job["sizes"][:2]}},
        "messages": config["messages"][:2],
        "repeats": 1,
        "seed": 0,
    }


class TestParallel:
    @pytest.mark.exhaustive
    def test_two_processes(self):
        config = measured()
        found = worker.launch(config, 2)
        assert set(found) == {CIFAR}
        own = found[CIFAR]
        sizes = config["jobs"][CIFAR]["sizes"]
        steps = {(step["averaging"], step["batch"]): step for step in own["steps"]}
        assert set(steps) == {(way, n) for way in ("none", *METHODS) for n in sizes}
        for (way, _), step in steps.items():
            assert step["processes"] == (1 if way == "none" else 2)
            assert step["total_s"] > 0 and step["computation_s"] > 0 and step["blocked_s"] >= 0
            assert (step["communication_s"] > 0) == (way != "none")
            assert len(step["samples_s"]) == 1
        assert set(own["messages"]) == set(METHODS)
        for found_ in own["messages"].values():
            assert [(size, n) for size, n, _ in found_] == [(n, 2) for n in config["messages"]]
        assert own["difference"] <= 1e-5 and own["buckets"] >= 1
        model = building.build_model(config["jobs"][CIFAR], 10, "cpu")
        assert own["gradient_bytes"] == 4 * sum(p.numel() for p in model.parameters())
