"""What the runs of Micro-Batch Streaming come to; see `repro.experiments.rehearsing`."""

import json
from collections.abc import Mapping
from functools import cache, partial
from typing import Any
from unittest import mock

import torch

from repro.experiments.design import Run
from repro.experiments.imagining import imagined_data, said
from repro.experiments.mbs import training as building
from repro.experiments.mbs.cells import side
from repro.experiments.mbs.runs import INITIAL, SIDES
from repro.experiments.rehearsing import Rehearsal
from repro.measure.fake_tensors import Work, first_steps, imagined

GREY = ((0.5,) * 3, (0.25,) * 3)  # in the place of statistics of images without content


def rehearse(run: Run) -> Rehearsal | None:
    """Rehearse a training; a streamed one with two of its micro-batches for a mini-batch.

    Of a measurement the largest step that is sure to be made is built: its time is left out.
    """
    config = run.config
    if run.experiment == "foretell":  # which itself computes nothing
        return None
    whole, micro = _sizes(run)
    batch = whole if micro is None else min(whole, 2 * micro)
    names = ("role", "model", "dataset", "augment", "optimizer", "channels_last", "autocast")
    parts = {name: config[name] for name in names if name in config}
    wide = run.experiment == "gradients"
    model, images, samples, peak, work = _first_steps(
        json.dumps(parts | {"micro_batch": micro, "epochs": config.get("epochs", 1)}),
        batch,
        config.get("train_samples"),
        wide,
    )
    initial = INITIAL[config["role"]]
    # Of the lower resolution the paper says nothing.
    at_its_side = side(config) == SIDES[config["role"]]["high"]
    paper_tells = run.experiment in ("train", "step") and at_its_side
    epochs = config.get("epochs", 0) * (2 if run.experiment == "twins" else 1)
    return Rehearsal(
        model,
        images,
        epochs,
        ((epochs * samples / batch, work),),
        peak,
        config.get("limit_bytes"),
        (micro is not None or whole <= initial) if paper_tells else None,
    )


def _sizes(run: Run) -> tuple[int, int | None]:
    """Return the mini-batch to build, and its micro-batch where it is streamed."""
    config = run.config
    if run.experiment == "gradients":
        return max(mini for mini, _ in config["divisions"]), None
    if run.experiment in ("size", "epochs", "file_epochs"):
        return INITIAL[config["role"]], None
    if run.experiment == "normalised" and config["normalization"] is None:
        return config["mini_batch"], None
    return config["mini_batch"], config["micro_batch"]


@cache
def _first_steps(
    text: str, batch: int, samples: int | None, wide: bool
) -> tuple[str, str, int, int, Work]:
    config: Mapping[str, Any] = json.loads(text)
    with imagined(), mock.patch.object(building, "_statistics", lambda *_: GREY):
        data = imagined_data(config["dataset"])
        model = building.build_model(config, data.num_classes, "cpu")
        optimizer = building.build_optimizer(config, model)
        loader = building.train_loader(config, data, batch, 0, samples)
        inputs, targets = next(iter(loader))
        if wide:
            model, inputs = model.to(torch.float64), inputs.double()
        step = building.training_step(config, model, optimizer, "cpu")
        peak, work = first_steps(partial(step, inputs, targets), [model, inputs, targets])
        count = len(data.train) if samples is None else samples
        sides = "×".join(map(str, inputs.shape[2:]))
    return said(model), f"{count:,} images of {sides}", count, peak, work
