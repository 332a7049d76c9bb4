"""The experiments of θ-adaptive batch sizes: what is executed and measured."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from repro.adaptive import (
    DivergedError,
    NoImprovement,
    Step,
    full_cost,
    gradient_norms,
    set_lr,
    stable_batch,
)
from repro.datasets import ImageData
from repro.experiments.adaptive import building
from repro.experiments.adaptive.building import Config, Loader
from repro.experiments.captured import CapturedStep
from repro.experiments.outcome import Outcome
from repro.measure import Timing
from repro.training import fit

COST_BATCH = 500  # images computed at once for F of the whole training set
STABLE = 0.10  # share by which norms of stable batch sizes may differ; the paper names none


@dataclass
class Training:
    """A training under way: everything that a checkpoint needs, and what was measured so far."""

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Loader
    controller: Any
    evaluate: building.Evaluate
    setting: Step
    stop: NoImprovement | None
    history: dict[str, list[Any]] = field(default_factory=dict)
    diverged: bool = False

    @classmethod
    def start(cls, config: Config, seed: int, data: ImageData, device: str) -> "Training":
        """Build a training, and show the controller w_0."""
        torch.manual_seed(seed)
        loader, evaluate = building.build_data(config, data, seed, device)
        model = building.build_model(config, data.num_classes, device)
        controller = building.build_controller(config, model, loader, seed)
        cost = full_cost(model, loader, COST_BATCH, loss_fn=building.loss_of(config))
        setting = controller.observe(cost, model.parameters())
        rule = config["stop"]
        names = (
            "train_cost",
            "theta",
            "batch_size",
            "lr",
            "updates",
            "interval",
            "time_s",
            "control_s",
            building.metric_of(config),
            "test_loss",
        )
        return cls(
            config,
            model,
            building.build_optimizer(config, model),
            loader,
            controller,
            evaluate,
            setting,
            NoImprovement(**rule) if rule else None,
            {name: [] for name in names} | {"initial_cost": [cost]},
        )

    def epoch(self, step: Callable[[Tensor, Tensor], Tensor], device: str) -> bool:
        """Train and measure one epoch; return whether to go on.

        Args:
            step: Updates the model by a mini-batch and returns its loss.
            device: Waited for at the end.
        """
        setting, config = self.setting, self.config
        self.loader.set_batch_size(setting.batch_size)
        self.loader.set_epoch(setting.epoch - 1)
        steps, done = len(self.loader), 0

        def at_its_rate(inputs: Tensor, targets: Tensor) -> Tensor:
            nonlocal done
            done += 1
            set_lr(self.optimizer, setting.lr_at(done / steps))
            return step(inputs, targets)

        result = fit(self.model, at_its_rate, self.loader, epochs=1, device=device)[0]
        start = time.perf_counter()
        cost = result.train_loss
        name = building.metric_of(config)
        try:
            if config["cost"] == "full":
                loss_fn = building.loss_of(config)
                cost = full_cost(self.model, self.loader, COST_BATCH, loss_fn=loss_fn)
            self.setting = self.controller.observe(cost, self.model.parameters())
            control_s = time.perf_counter() - start
            metrics = self.evaluate(self.model)
            stops = self.stop is not None and self.stop.observe(metrics[name])
        except DivergedError:
            self.diverged = True
            return False
        row = {
            "train_cost": cost,
            "theta": self.setting.theta,
            "batch_size": setting.batch_size,
            "lr": setting.lr,
            "updates": done,
            "interval": self.setting.interval,
            "time_s": result.time_s,
            "control_s": control_s,
            name: metrics[name],
            "test_loss": metrics.get("test_loss", metrics.get("test_l1")),
        }
        for key, value in row.items():
            self.history[key].append(value)
        return not stops and setting.epoch < config["epochs"]


def train(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Train by one strategy in one process (Figures 1 to 6 and 10, Tables I to III).

    A training that diverges ends there; that is a result.
    """
    assert data is not None
    run = Training.start(config, seed, data, device)
    step = CapturedStep(
        run.model,
        building.loss_of(config),
        run.optimizer,
        building.low_precision(config),
        config["captured"],
        config["channels_last"],
    )
    while run.epoch(step, device):
        pass
    completed = len(run.history["train_cost"])
    stopped = run.stop is not None and run.stop.patience <= completed - run.stop.best_epoch
    return Outcome(
        metrics=run.history
        | {
            "completed": completed,
            "diverged": run.diverged,
            "stopped": stopped,
            "best_epoch": run.stop.best_epoch if run.stop else None,
        },
        timings={"epoch": Timing(tuple(run.history["time_s"]), warmup=0)},
    )


def norms(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Measure gradient norms by batch size at w_0 and after some epochs (section III-D)."""
    assert data is not None
    run = Training.start(config, seed, data, device)
    step = CapturedStep(run.model, building.loss_of(config), run.optimizer, captured=False)
    sizes = [size for size in config["sizes"] if size <= config["train_samples"]]
    points = []
    for epoch in range(max(config["after"]) + 1):
        if epoch in config["after"]:
            measured = gradient_norms(
                run.model,
                run.loader,
                sizes,
                loss_fn=building.loss_of(config),
                batches=config["batches"],
                seed=seed,
            )
            points.append(
                {
                    "epochs": epoch,
                    "stable": stable_batch(measured, STABLE),
                    "norms": [norm.mean for norm in measured],
                    "errors": [
                        None if norm.error != norm.error else norm.error for norm in measured
                    ],
                }
            )
        if epoch < max(config["after"]):
            run.epoch(step, device)
    return Outcome({"sizes": sizes, "points": points})
