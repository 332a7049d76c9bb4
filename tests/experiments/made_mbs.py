"""Records of Micro-Batch Streaming made up for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import made
from made import OUT_OF_MEMORY, Maker, timing

from repro.experiments import load_paper
from repro.experiments.design import Run, paper_toml
from repro.experiments.judge import Cases
from repro.experiments.mbs.runs import INITIAL
from repro.experiments.query import Results

PAPER = load_paper("mbs")
CHOSEN = {"classification": "digits", "segmentation": "photos"}
NOISE = (-0.5, 0.0, 0.5)  # by seed: mean 0, sample standard deviation 0.5


def results(artefact: str, make: Maker, profile: str = "paper") -> Results:
    """Return results of an artefact, with digits and photographs for data."""
    return made.made_results(f"mbs/{artefact}", make, CHOSEN, profile)


def claimed(target: str, found: Results) -> Cases:
    """Return the numbers behind the claim ``ARTEFACT/KEY``."""
    artefact, _, key = target.partition("/")
    return PAPER.artefacts[artefact].claims[key](found)


def holds(artefact: str, found: Results) -> dict[str, str]:
    """Return what each check of an artefact says, by its key in ``paper.toml``."""
    keys = paper_toml("mbs")["artefacts"][artefact]["checks"]
    checks = PAPER.artefacts[artefact].checks
    return {key: check.row(found)["holds"] for key, check in zip(keys, checks, strict=True)}


def streamed(run: Run) -> bool:
    """Whether a training uses MBS."""
    return run.config["micro_batch"] is not None


def beyond(run: Run) -> bool:
    """Whether a mini-batch is larger than what fits undivided."""
    return bool(run.config["mini_batch"] > INITIAL[run.config["role"]])


def trained(*percent: float, epoch_s: float = 1.0, loss: Sequence[float] = ()) -> dict[str, Any]:
    """Return a training's outcome, given the metric (and the loss) after each epoch."""
    curve = list(percent)
    losses = list(loss or [2.0 - k / 10 for k in range(len(curve))])
    metrics = {"best": max(curve), "accuracy": curve, "iou": curve, "train_loss": losses}
    # The median counts, so that one slow epoch does not.
    return {"metrics": metrics, "timings": {"epoch": timing(epoch_s, 2 * epoch_s, epoch_s)}}


def of_trainings(make: Maker) -> Maker:
    """Ask `make` of the trainings that fit or are streamed; the others run out of memory."""

    def whole(run: Run, seed: int) -> Mapping[str, Any] | None:
        if run.experiment != "train":
            return None
        return make(run, seed) if streamed(run) or not beyond(run) else OUT_OF_MEMORY

    return whole
