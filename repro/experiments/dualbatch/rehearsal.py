"""What the runs of dual-batch learning come to; see `repro.experiments.rehearsing`."""

import json
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from repro.dualbatch import Share
from repro.experiments.design import Run
from repro.experiments.dualbatch import building
from repro.experiments.dualbatch.runs import SECTION_5_2_3
from repro.experiments.imagining import imagined_data, said
from repro.experiments.rehearsing import Rehearsal
from repro.measure.datasheets import DEVICES
from repro.measure.fake_tensors import Work, first_steps, imagined

GREY = ((0.5,) * 3, (0.25,) * 3)  # in the place of statistics of images without content


def rehearse(run: Run) -> Rehearsal | None:
    """Rehearse a training: a step of each kind of worker at each resolution.

    The workers take turns on one device: their steps add up, the peak is the largest step's. Of a
    measurement its largest steps are built: its time is left out.
    """
    config = run.config
    if "sub_stages" not in config:
        return _measurement(run) if run.experiment in ("times", "memory", "wall") else None
    stages = building.schedule_of(config)
    parts: list[tuple[float, Work]] = []
    peaks, model = [], ""
    for entry in config["sub_stages"]:
        plan = building.plan_of(entry["plan"])
        epochs = sum(epoch.resolution == entry["resolution"] for epoch in stages)
        for kind in plan.kinds:  # a worker each
            batch, share = plan.batch_of(kind), plan.share_of(kind)
            model, peak, work = _first_steps(json.dumps(config), entry["resolution"], batch)
            parts.append((epochs * share / batch, work))
            peaks.append(peak)
    imagenet = config["setting"] == SECTION_5_2_3
    wanted = config["dataset"]
    sides = {e["resolution"] or wanted.get("image_size", 32) for e in config["sub_stages"]}
    samples = config["sub_stages"][0]["plan"]["samples"]
    return Rehearsal(
        model,
        f"{samples:,} images of {', '.join(f'{side}×{side}' for side in sorted(sides))}",
        sum(epochs for epochs, _ in config["stages"]),
        tuple(parts),
        max(peaks),
        # Sections 5.1.1 and 5.2.3.
        DEVICES["RTX 3090" if imagenet else "GTX 1080"].memory_bytes,
        True,
    )


def _measurement(run: Run) -> Rehearsal:
    rehearsed = []
    for part in run.config.get("parts", [run.config]):
        config = run.config | part
        if "epochs" in part:
            sizes = {(kind["resolution"], kind["large_batch"]) for kind in part["epochs"]}
        else:
            sides = config.get("resolutions") or [config["resolution"]]
            sizes = {(side, max(config["batch_sizes"])) for side in sides}
        for side, batch in sorted(sizes):
            model, peak, work = _random_steps(json.dumps(config), side, batch)
            rehearsed.append(
                (f"{batch} images of {side}×{side}, random numbers", model, peak, work)
            )
    data, model, peak, work = max(rehearsed, key=lambda one: one[2])
    return Rehearsal(model, data, 0, ((0, work),), peak, run.config.get("limit_bytes"))


@cache
def _random_steps(text: str, resolution: int, batch: int) -> tuple[str, int, Work]:
    config: dict[str, Any] = json.loads(text) | {"captured": False}  # which needs a device
    with imagined():
        model = building.build_model(config, config["classes"])
        step = building.step_of(config, model, resolution, batch, "cpu")
        peak, work = first_steps(step, [model])
    return said(model), peak, work


@cache
def _first_steps(text: str, resolution: int | None, batch: int) -> tuple[str, int, Work]:
    config: dict[str, Any] = json.loads(text)
    # No step sees them, and which images a plan leaves is not known of images without content.
    config.pop("held_out", None)
    low = building.low_precision(config)
    with imagined(), mock.patch.object(building, "channel_statistics", lambda _: GREY):
        data = imagined_data(config["dataset"])
        images = building.TrainingData(config, data, "cpu")
        share = Share(torch.arange(batch), batch, resolution, 0)
        inputs, labels = next(iter(images(share)))
        model = building.build_model(config, data.num_classes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", low, enabled=low is not None):
                loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()

        peak, work = first_steps(partial(step), [model, inputs, labels])
    return said(model), peak, work
