"""What the runs of θ-adaptive training come to; see `repro.experiments.rehearsing`."""

import json
from functools import cache, partial
from typing import Any
from unittest import mock

from repro.experiments.adaptive import building, experiments
from repro.experiments.adaptive.runs import TRAININGS
from repro.experiments.captured import CapturedStep
from repro.experiments.design import Run
from repro.experiments.imagining import imagined_data, said
from repro.experiments.rehearsing import Rehearsal
from repro.measure.fake_tensors import Work, first_steps, imagined


def rehearse(run: Run) -> Rehearsal | None:
    """Rehearse a training at its first batch size and its largest; the epochs are the most it has.

    Which epochs have which size is found in the training: its time is that of all epochs at the
    first size, an upper bound.
    """
    if run.experiment not in (*TRAININGS, "norms"):
        return None  # processes of their own time random numbers
    config = run.config
    controller = config["controller"]
    text, samples = json.dumps(config), config["train_samples"]
    epochs = config["epochs"] if run.experiment in TRAININGS else max(config["after"])
    largest = max([_largest(controller), *config.get("sizes", ())])
    rehearsed = [_first_steps(text, min(n, samples)) for n in {controller["batch"], largest}]
    model, data, _, work = _first_steps(text, min(controller["batch"], samples))
    return Rehearsal(
        model,
        f"{samples:,} {data}",
        epochs,
        ((epochs * samples / min(controller["batch"], samples), work),),
        max(peak for _, _, peak, _ in rehearsed),
    )


def _largest(controller: dict[str, Any]) -> int:
    return int(controller.get("max_batch", controller["batch"]))


@cache
def _first_steps(text: str, batch: int) -> tuple[str, str, int, Work]:
    config: dict[str, Any] = json.loads(text)
    config["captured"] = False  # which changes no number, and needs a device
    grey = ((0.5,) * 3, (0.25,) * 3)  # in the place of statistics of images without content
    with (
        imagined(),
        mock.patch.object(building, "channel_statistics", lambda _: grey),
        mock.patch.object(experiments, "full_cost", lambda *_, **__: 1.0),
    ):
        data = imagined_data(config["dataset"])
        run = experiments.Training.start(config, 0, data, "cpu")
        run.loader.set_batch_size(batch)
        inputs, targets = next(iter(run.loader))
        step = CapturedStep(
            run.model,
            building.loss_of(config),
            run.optimizer,
            building.low_precision(config),
            False,
            config["channels_last"],
        )
        peak, work = first_steps(partial(step, inputs, targets), [run.model, inputs, targets])
    sides = "×".join(map(str, inputs.shape[2:]))
    kind = "images" if config["task"] == "CIFAR" else "patches"
    return said(run.model), f"{kind} of {sides}", peak, work
