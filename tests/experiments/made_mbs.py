"""Records of Micro-Batch Streaming made up for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import made
from made import OUT_OF_MEMORY, SEEDS, Maker

from repro.experiments import load_paper
from repro.experiments.design import Results, Run
from repro.experiments.judge import Verdict

PAPER = load_paper("mbs")
CHOSEN = {"classification": "digits", "segmentation": "photos"}
INITIAL = {"ResNet-50": 16, "ResNet-101": 8, "AmoebaNet-D": 32, "U-Net": 16}
NOISE = (-0.5, 0.0, 0.5)  # by seed: mean 0, sample standard deviation 0.5


def results(
    artefact: str, make: Maker, profile: str = "paper", seeds: Sequence[int] = SEEDS
) -> Results:
    """Return results of an artefact, with digits and photographs for data."""
    return made.made_results(f"mbs/{artefact}", make, CHOSEN, profile, seeds)


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


def gradient_rows(divisions: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return what is compared of gradients: none summed, Algorithm 1 wrong where ragged."""
    rows = []
    for mini, micro in divisions:
        wrong = {"none": 3.0, "paper": 0.2 if mini % micro else 1e-16, "exact": 1e-16}
        rows += [
            {
                "mini_batch": mini,
                "micro_batch": micro,
                "frozen": frozen,
                "way": way,
                "error": error if frozen else error + 0.1,
                "length": mini // micro if way == "none" else 1.0,
            }
            for frozen in (True, False)
            for way, error in wrong.items()
        ]
    return rows


ONE_UPDATE = {"updates_between_micro_batches": 0, "updates_after": 1}


def plausible(run: Run, seed: int) -> Mapping[str, Any]:
    """Return an outcome as the paper has it: trained where it fits or is streamed."""
    if run.experiment == "size":
        metrics = {
            "limit_bytes": 3 * 2**20,
            "largest_that_fits": INITIAL[run.config["role"]] // 2,
            "predicted_largest": 17,
            "auto_micro_batch": 12,
            "auto_prediction_error": -0.0123,
        }
        return {"metrics": metrics}
    if run.experiment == "overhead":
        return overhead(1.5)
    if run.experiment == "foretell":
        return {"metrics": {"largest": 1 + INITIAL[run.config["role"]]}}
    if run.experiment == "gradients":
        return {"metrics": {"rows": gradient_rows(run.config["divisions"])}}
    if run.experiment == "normalised":
        away = {None: 0.0, "none": 0.5, "paper": 0.05, "exact": 0.0}[run.config["normalization"]]
        losses = [2.0 + away + NOISE[seed] / 100, 1.5 + away]
        told = {"train_loss": losses, "accuracy": [40.0, 60.0 - away], "best": 60.0 - away}
        return {"metrics": told | {"diverged": False}}
    if run.experiment == "twins":
        return twins(60.0 + NOISE[seed], 60.0 + NOISE[seed])
    if run.experiment == "timeline":
        spans = [["copy", 0, 0.0, 0.01], ["compute", 0, 0.01, 0.03]]
        told = {"spans": spans, "update": [0.03, 0.035], "copied": "host to device"}
        return {"metrics": told | ONE_UPDATE | {"micro_batches": 1}}
    if run.experiment == "file_epochs":
        files = run.config["train_samples"]
        metrics = {"files": files, "file_bytes": 8000 * files, "uncached": 1.0}
        timing = {"samples_s": [1.0 + NOISE[seed % 3] / 10, 1.0], "warmup": 1}
        return {"metrics": metrics, "timings": dict.fromkeys(run.config["ways"], timing)}
    limited = run.config["limit_fits"] or run.config.get("limit_bytes")
    if limited and not streamed(run) and beyond(run):
        return OUT_OF_MEMORY
    name = "iou" if run.config["role"] == "U-Net" else "accuracy"
    noise = NOISE[(seed + streamed(run)) % 3]  # pairs differ
    told = trained(60 + noise, 70 + noise, name=name, epoch_s=10.0 + NOISE[seed])
    samples = run.config["train_samples"]
    steps = -(-samples // run.config["mini_batch"]) if samples else 2
    return told | {"metrics": told["metrics"] | {"steps_per_epoch": steps}}
