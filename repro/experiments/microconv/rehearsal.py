"""What the runs of μ-cuDNN come to; see `repro.experiments.rehearsing`."""

import json
from functools import cache
from typing import Any

from torch.nn import functional

from repro.experiments.design import Run
from repro.experiments.imagining import said
from repro.experiments.microconv.building import build_network
from repro.experiments.rehearsing import Rehearsal
from repro.measure.fake_tensors import Work, first_steps, imagined


def rehearse(run: Run) -> Rehearsal | None:
    """Rehearse a network's iterations, untuned; of kernels by themselves there is nothing to."""
    config = run.config
    if run.experiment != "iterations":
        return None
    wanted = {name: config[name] for name in ("model", "image", "batch", "dtype")}
    model, peak, work = _first_steps(json.dumps(wanted))
    # Torch's own twice, tuned without a limit, and held to one, in turns; the first three again
    # where that tunes anything, which it hardly does.
    forms = 1 + len(config["rivals"]) if "rivals" in config else 3 + len(config["ways"])
    rounds = forms * config["processes"] * config["repeats"]
    return Rehearsal(
        f"{config['role']}: {model}",
        f"{config['batch']} images of {config['image']}×{config['image']}, random numbers",
        rounds,
        ((rounds, work),),
        peak,
    )


@cache
def _first_steps(text: str) -> tuple[str, int, Work]:
    config: dict[str, Any] = json.loads(text)
    with imagined():
        model, images, labels = build_network(config, "cpu")

        def step() -> None:
            model.zero_grad(set_to_none=True)
            functional.cross_entropy(model(images), labels).backward()

        peak, work = first_steps(step, [model, images])
    return said(model), peak, work
