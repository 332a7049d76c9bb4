"""Records of Micro-Batch Streaming made up for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import made
from made import OUT_OF_MEMORY, SEEDS, Maker

from repro.experiments import load_paper
from repro.experiments.design import Run
from repro.experiments.judge import Verdict
from repro.experiments.mbs.runs import INITIAL
from repro.experiments.query import Results

PAPER = load_paper("mbs")
CHOSEN = {"classification": "digits", "segmentation": "photos"}
NOISE = (-0.5, 0.0, 0.5)  # by seed: mean 0, sample standard deviation 0.5


def results(
    artefact: str,
    make: Maker,
    profile: str = "paper",
    seeds: Sequence[int] = SEEDS,
    chosen: Mapping[str, str] = CHOSEN,
) -> Results:
    """Return results of an artefact, with digits and photographs for data."""
    return made.made_results(f"mbs/{artefact}", make, chosen, profile, seeds)


def judge(
    target: str, make: Maker, profile: str = "paper", seeds: Sequence[int] = SEEDS
) -> Verdict:
    """Return the verdict on ``ARTEFACT/KEY`` in a world where `make` says what comes out."""
    artefact, _, _ = target.partition("/")
    return made.verdict(f"mbs/{target}", results(artefact, make, profile, seeds))


def streamed(run: Run) -> bool:
    """Whether a training uses MBS."""
    return run.config["micro_batch"] is not None


def beyond(run: Run) -> bool:
    """Whether a mini-batch is larger than what fits undivided."""
    return bool(run.config["mini_batch"] > INITIAL[run.config["role"]])


def trained(
    *percent: float,
    name: str = "accuracy",
    epoch_s: float = 1.0,
    loss: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return a training's outcome, given the metric (and the loss) after each epoch."""
    curve = list(percent)
    return {
        "metrics": {
            "best": max(curve),
            "metric": name,
            name: curve,
            "train_loss": list(loss or [2.0 - k / 10 for k in range(len(curve))]),
            "limit_bytes": 3 * 2**20,
            "limit_simulated": True,
        },
        # The median counts, so that one slow epoch does not.
        "timings": {"epoch": {"samples_s": [epoch_s, 2 * epoch_s, epoch_s], "warmup": 1}},
    }


def twins(without: float, streamed: float) -> dict[str, Any]:
    """Return the outcome of twins, given the best accuracy of each, in percent."""
    best = {"without": without, "with": streamed}
    losses = {way: [2.0 - value / 100, 1.5 - value / 100] for way, value in best.items()}
    curves = {way: [value / 2, value] for way, value in best.items()}
    apart = [1e-15, abs(streamed - without) / 100]
    return {"metrics": {"best": best, "train_loss": losses, "accuracy": curves, "apart": apart}}


def overhead(
    halved: float, doubled: float | None = None, jitter: float = 0.01, repeats: int = 15
) -> dict[str, Any]:
    """Return the outcome of timing steps in turns, given the overheads in percent.

    Args:
        halved: Of the same mini-batch in two.
        doubled: Of twice the mini-batch; the same by default.
        jitter: Relative, from the fastest to the slowest sample.
        repeats: Samples of each way.
    """
    percent = {
        "undivided": 0.0,
        "halved": halved,
        "doubled": halved if doubled is None else doubled,
    }
    samples = {"undivided": 1, "halved": 1, "doubled": 2}
    swing = [1 + jitter * (k / max(1, repeats - 1) - 0.5) for k in range(repeats)]
    # Each way's samples in another order: what rounds share is no jitter of a ratio.
    turned = {way: swing[5 * n :] + swing[: 5 * n] for n, way in enumerate(percent)}
    times = {
        way: [0.1 * samples[way] * (1 + percent[way] / 100) * factor for factor in turned[way]]
        for way in percent
    }
    return {
        "metrics": {f"{way}_percent": percent[way] for way in ("halved", "doubled")},
        "timings": {way: {"samples_s": own, "warmup": 3} for way, own in times.items()},
    }


def plausible(run: Run, seed: int) -> Mapping[str, Any] | None:
    """Return trainings and steps as the paper has them: trained where it fits or is streamed."""
    if run.experiment == "overhead":
        return overhead(1.5)
    if run.experiment != "train":
        return None
    limited = run.config["limit_fits"] or run.config.get("limit_bytes")
    if limited and not streamed(run) and beyond(run):
        return OUT_OF_MEMORY
    name = "iou" if run.config["role"] == "U-Net" else "accuracy"
    noise = NOISE[(seed + streamed(run)) % 3]  # pairs differ
    told = trained(60 + noise, 70 + noise, name=name, epoch_s=10.0 + NOISE[seed])
    samples = run.config["train_samples"]
    steps = -(-samples // run.config["mini_batch"]) if samples else 2
    return told | {"metrics": told["metrics"] | {"steps_per_epoch": steps}}
