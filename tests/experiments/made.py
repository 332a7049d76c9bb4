"""Records made up for tests: of every run of an artefact, what a function says of it."""

from collections.abc import Callable, Mapping
from typing import Any

from invented import make_record

from repro.experiments import load_paper
from repro.experiments.design import Results, Run, Verdict

PAPER = load_paper("mbs")
CHOSEN = {"classification": "digits", "segmentation": "photos"}
SEEDS = (0, 1, 2)
INITIAL = {"ResNet-50": 16, "ResNet-101": 8, "AmoebaNet-D": 32, "U-Net": 16}

# Given a run and a seed: the changes to its record, None for no record.
Maker = Callable[[Run, int], Mapping[str, Any] | None]


def made_results(artefact: str, make: Maker, profile: str = "gpu", seeds=SEEDS) -> Results:
    runs = PAPER.artefacts[artefact].runs(profile, CHOSEN)
    records = []
    for run in runs:
        for seed in run.seeds if run.seeds is not None else seeds:
            changes = make(run, seed)
            if changes is not None:
                values = {"config": run.config, "seed": seed, **changes}
                records.append(make_record(run.experiment, **values))
    return Results(runs, seeds, records)


def trained(*percent: float, name: str = "accuracy", epoch_s: float = 1.0) -> dict[str, Any]:
    """Return a training's outcome, given the metric after each epoch."""
    curve = list(percent)
    return {
        "metrics": {
            "best": max(curve),
            "metric": name,
            name: curve,
            "train_loss": [2.0 - k / 10 for k in range(len(curve))],
            "limit_bytes": 3 * 2**20,
            "limit_simulated": True,
        },
        "timings": {"epoch": {"samples_s": [epoch_s, 2 * epoch_s, epoch_s], "warmup": 1}},
    }


def overhead(halved: float, doubled: float | None = None) -> dict[str, Any]:
    """Return the outcome of timing steps, given the overheads in percent."""
    timing = {"samples_s": [0.1] * 15, "warmup": 3}
    return {
        "metrics": {
            "halved_percent": halved,
            "doubled_percent": halved if doubled is None else doubled,
        },
        "timings": dict.fromkeys(("undivided", "halved", "doubled"), timing),
    }


ONE_UPDATE = {"updates_between_micro_batches": 0, "updates_after": 1}
OUT_OF_MEMORY = {"status": "out_of_memory", "error": "OutOfMemoryError: no room"}
FAILED = {"status": "failed", "error": "ValueError: wrong"}


def verdict(artefact: str, beginning: str, results: Results) -> Verdict:
    """Return the verdict on the artefact's claim that begins so."""
    claims = [c for c in PAPER.artefacts[artefact].claims if c.text.startswith(beginning)]
    assert len(claims) == 1, [c.text for c in PAPER.artefacts[artefact].claims]
    return claims[0].check(results)
