"""What the runs of the study come to; see `repro.experiments.rehearsing`."""

import json
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional

from repro import models
from repro.experiments.design import Run
from repro.experiments.imagining import said
from repro.experiments.rehearsing import Rehearsal
from repro.experiments.together.methods import Way
from repro.experiments.together.networks import build_model, build_problem
from repro.experiments.together.runs import LIMIT, TRAIN
from repro.experiments.together.training import MOMENTUM, WEIGHT_DECAY
from repro.measure.fake_tensors import Work, first_steps, imagined
from repro.training import plain_step


def rehearse(run: Run) -> Rehearsal | None:
    """Rehearse undivided training of what fits, whose peak sets the limit, or a training.

    A way that is not undivided computes the same, and so is not built again. Which epochs of a
    training have which batch is found in it: its time is that of the small batch throughout.
    """
    config = run.config
    if run.experiment == LIMIT:
        parts = ("model", "image", "fits")
        model, peak, work = _undivided(json.dumps({k: config[k] for k in parts if k in config}))
        rounds = (config["warmup"] + config["repeats"]) * sum(config["multiples"])
        return Rehearsal(model, "random numbers", rounds, ((rounds, work),), peak)
    if run.experiment != TRAIN:
        return None
    side, samples = config["sides"][-1], config["train_samples"]
    model, _, work = _training(json.dumps(config["model"]), side, config["small"])
    _, peak, _ = _training(json.dumps(config["model"]), side, config["large"])
    return Rehearsal(
        model,
        f"{samples:,} images of {side}×{side}",
        config["epochs"],
        ((config["epochs"] * samples / config["small"], work),),
        peak,
    )


@cache
def _undivided(text: str) -> tuple[str, int, Work]:
    config: dict[str, Any] = json.loads(text)
    with imagined():
        problem = build_problem(config, config["fits"])
        model = build_model(config, "cpu")
        way = Way("undivided", problem, model, "cpu", None, 1)
        peak, work = first_steps(way.step, [model, problem.inputs, problem.targets])
    return said(model), peak, work


@cache
def _training(text: str, side: int, batch: int) -> tuple[str, int, Work]:
    options: dict[str, Any] = json.loads(text)
    with imagined():
        model = models.build(options.pop("name"), **options).train()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )
        inputs = torch.zeros(batch, 3, side, side)
        labels = torch.zeros(batch, dtype=torch.int64)
        step = plain_step(model, functional.cross_entropy, optimizer, "cpu")
        peak, work = first_steps(partial(step, inputs, labels), [model, inputs, labels])
    return said(model), peak, work
