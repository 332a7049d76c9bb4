"""The experiments of θ-adaptive batch sizes, as they are executed and measured."""

import math
import time
from typing import Any

import torch
from torch import Tensor

from repro import adaptive
from repro.datasets import ImageData
from repro.experiments.adaptive import building
from repro.experiments.adaptive.runs import METRIC, SIMILAR
from repro.experiments.captured import CapturedPasses, captured_step, low_precision
from repro.experiments.design import Config, Outcome
from repro.measure import Timing
from repro.training import Step as TrainingStep
from repro.training import fit

COST_BATCH = 500  # images computed at once for F of the whole training set


class Training:
    """A training under way, shown to its controller at w_0, with its measurements so far."""

    def __init__(self, config: Config, seed: int, data: ImageData, device: str) -> None:
        torch.manual_seed(seed)
        self.config, self.diverged = config, False
        self.loader, self.evaluate = building.build_data(config, data, seed, device)
        self.model = building.build_model(config, data.num_classes, device)
        self.controller = building.build_controller(config, self.model, self.loader, seed)
        loss_fn = building.loss_of(config)
        cost = adaptive.full_cost(self.model, self.loader, COST_BATCH, loss_fn=loss_fn)
        self.setting = self.controller.observe(cost, self.model.parameters())
        self.optimizer = building.build_optimizer(config, self.model)
        self.stop = adaptive.NoImprovement(**config["stop"]) if config["stop"] else None
        names = ("train_cost", "theta", "batch_size", "lr", "updates", "interval", "time_s",
                 "control_s", METRIC[config["task"]], "test_loss")  # fmt: skip
        self.history: dict[str, list[Any]] = {name: [] for name in names}
        self.history["initial_cost"] = [cost]

    def epoch(self, step: TrainingStep, device: str) -> bool:
        """Train and measure one epoch by a step that returns a mini-batch's loss; go on or not."""
        setting, config = self.setting, self.config
        self.loader.set_batch_size(setting.batch_size)
        self.loader.set_epoch(setting.epoch - 1)
        steps, done = len(self.loader), 0

        def at_its_rate(inputs: Tensor, targets: Tensor) -> Tensor:
            nonlocal done
            done += 1
            adaptive.set_lr(self.optimizer, setting.lr_at(done / steps))
            return step(inputs, targets)

        result = fit(self.model, at_its_rate, self.loader, epochs=1, device=device)[0]
        start = time.perf_counter()
        cost, name = result.train_loss, METRIC[config["task"]]
        try:
            self.setting = self.controller.observe(cost, self.model.parameters())
            control_s = time.perf_counter() - start
            metrics = self.evaluate(self.model)
            stops = self.stop is not None and self.stop.observe(metrics[name])
        except adaptive.DivergedError:
            self.diverged = True
            return False
        row = {"train_cost": cost, "theta": self.setting.theta, "lr": setting.lr, "updates": done}
        row |= {"batch_size": setting.batch_size, "interval": self.setting.interval}
        row |= {"time_s": result.time_s, "control_s": control_s, name: metrics[name]}
        row["test_loss"] = metrics.get("test_loss", metrics.get("test_l1"))
        for key, value in row.items():
            self.history[key].append(value)
        return not stops and setting.epoch < config["epochs"]


def train(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Train by one strategy; a training that diverges ends there, which is a result."""
    run = Training(config, seed, data, device)
    loss, low = building.loss_of(config), low_precision(config)
    options = config["captured"], config["channels_last"]
    step = captured_step(CapturedPasses(run.model, loss, low, *options), run.optimizer)
    while run.epoch(step, device):
        pass
    completed, stop = len(run.history["train_cost"]), run.stop
    summary = {
        "completed": completed,
        "diverged": run.diverged,
        "stopped": stop is not None and stop.patience <= completed - stop.best_epoch,
        "best_epoch": stop.best_epoch if stop else None,
    }
    timings = {"epoch": Timing(tuple(run.history["time_s"]), warmup=0)}
    return Outcome(metrics=run.history | summary, timings=timings)


def norms(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Measure gradient norms by batch size at w_0 and after some epochs (section III-D)."""
    run = Training(config, seed, data, device)
    loss_fn = building.loss_of(config)
    step = captured_step(CapturedPasses(run.model, loss_fn, captured=False), run.optimizer)
    sizes = [size for size in config["sizes"] if size <= config["train_samples"]]
    given: dict[str, Any] = {"loss_fn": loss_fn, "batches": config["batches"], "seed": seed}
    points, trained = [], 0
    for epochs in config["after"]:
        for _ in range(epochs - trained):
            run.epoch(step, device)
        trained = epochs
        measured = adaptive.gradient_norms(run.model, run.loader, sizes, **given)
        point = {"epochs": epochs, "stable": adaptive.stable_batch(measured, SIMILAR)}
        point["norms"] = [norm.mean for norm in measured]
        point["errors"] = [None if math.isnan(norm.error) else norm.error for norm in measured]
        points.append(point)
    return Outcome({"sizes": sizes, "points": points})
