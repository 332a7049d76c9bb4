"""Epochs by mini-batch size in turns, for profiles whose trainings say nothing of time."""

from functools import partial

import torch

from repro.datasets import Ahead, ImageData
from repro.experiments.mbs.building import (
    Config,
    build_model,
    build_optimizer,
    train_loader,
    training_step,
)
from repro.experiments.outcome import Outcome
from repro.measure import time_interleaved
from repro.training import fit


def epochs(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Time whole epochs of training with and without MBS, in turns (Tables 4 and 5)."""
    assert data is not None
    torch.manual_seed(seed)
    trained = {}
    for name, (mini, micro) in config["ways"].items():
        way = dict(config) | {"mini_batch": mini, "micro_batch": micro, "epochs": 1}
        model = build_model(way, data, device)
        step = training_step(way, model, build_optimizer(way, model), device)
        loader = train_loader(way, data, mini, seed, config["train_samples"])
        trained[name] = partial(fit, model, step, Ahead(loader, device), epochs=1, device=device)
    timings = time_interleaved(trained, warmup=1, repeats=config["repeats"], device=device)
    return Outcome(metrics={}, timings=timings)
