"""What the runs of out-of-core training come to; see `repro.experiments.rehearsing`."""

import json
from functools import cache
from typing import Any

from repro.experiments.design import Run
from repro.experiments.outofcore.building import training_step
from repro.experiments.outofcore.runs import (
    BY_SCHEDULE,
    GIB,
    HALF_MEASURED,
    MEASURED,
    MODES,
    PAPER,
)
from repro.experiments.rehearsing import Rehearsal
from repro.measure.fake_tensors import Work, first_steps, imagined


def rehearse(run: Run) -> Rehearsal | None:
    """Rehearse a measurement in core: its peak is what swapping has to bring below the limit.

    What swaps computes the same, and so is not built again.
    """
    config = run.config
    if run.experiment not in (MEASURED, HALF_MEASURED, BY_SCHEDULE):
        return None
    step = {name: config[name] for name in ("model", "image", "batch", "precision")}
    peak, work = _first_steps(json.dumps(step))
    height, width = config["image"]
    rounds = config["warmup"] + config["repeats"]
    within = config.get("limit_gib")
    in_core = config.get("mode") == MODES[0]
    fitting = PAPER["table1"]["batches"], PAPER["table1"]["in_core"]
    fits = {b: rate == rate for b, rate in zip(*fitting, strict=True)}
    return Rehearsal(
        f"{config['role']}, {'in core' if in_core else 'swapped or recomputed'}",
        f"batches of {height}×{width}, random numbers",
        rounds,
        ((rounds, work),),
        peak,
        within * GIB if within and in_core else None,
        # Its in-core limit is of float32.
        fits.get(config["batch"])
        if in_core and config["role"] == "ResNet-50" and run.experiment == MEASURED
        else None,
    )


@cache
def _first_steps(text: str) -> tuple[int, Work]:
    config: dict[str, Any] = json.loads(text)
    with imagined():
        return first_steps(training_step(config, "cpu"), [])
