"""What the trainings of Part 2 and the measurements of Part 1 take, profile by profile."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from repro.experiments.design import SEEDS
from repro.experiments.recipes import compared
from repro.experiments.together.learning import MOMENTUM, WEIGHT_DECAY
from repro.experiments.together.settings import (
    CIFAR,
    DATASETS,
    LABELS,
    NETWORKS,
    TRAIN,
    modes_of,
    trainings,
    under_limit,
)

_NO_PAPER = "no paper"
_SMALL = "two cores have five minutes for all of it (long: hours)"


def recipe() -> list[dict[str, str]]:
    """Return a row for each item.

    Returns:
        Rows with the columns item, paper, paper profile, gpu, long, quick, why they differ.
    """
    rows = [_of_limit(network, aspect) for network in NETWORKS for aspect in ("network", "ways")]
    for item, describe in _TRAINING.items():
        rows.append(compared(f"Part 2: {item}", _NO_PAPER, partial(_described, describe), _SMALL))
    rows.append(compared("Part 2: rates searched", _NO_PAPER, _rates, _SMALL))
    rows.append(compared("Part 2: seeds", _NO_PAPER, lambda p: str(len(SEEDS[p]))))
    return rows


def _of_limit(network: str, aspect: str) -> dict[str, str]:
    def describe(profile: str) -> str:
        configs = [r.config for r in under_limit(profile) if r.config["network"] == network]
        first = configs[0]
        if aspect == "ways":
            return ", ".join(LABELS[mode] for mode in modes_of(profile, network))
        side = "×".join(map(str, first.get("image", [])))
        options = _options(first["model"]) + (f", images of {side}" if side else "")
        return f"{options}; {first['fits']} samples fit, tried at ×{first['multiples']}"

    why = _SMALL if aspect == "network" else "a file is for what a CPU swaps; tuning takes long"
    return compared(f"Part 1, {network}: {aspect}", _NO_PAPER, describe, why, long=False)


def _options(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _configs(profile: str) -> list[Mapping[str, Any]]:
    chosen = {CIFAR: DATASETS[profile][CIFAR][0]}
    return [run.config for run in trainings(profile, chosen) if run.experiment == TRAIN]


def _described(describe: Callable[[Mapping[str, Any]], str], profile: str) -> str:
    return describe(_configs(profile)[0])


def _rates(profile: str) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted({c["rate"] for c in _configs(profile)}))


_TRAINING: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "network": lambda c: _options(c["model"]),
    "images": lambda c: (
        f"{c['train_samples']:,} train, {c['held_out']:,} held out, {c['test_samples']:,} test"
    ),
    "sides of images": lambda c: ", ".join(map(str, c["sides"])),
    "epochs": lambda c: str(c["epochs"]),
    "small batch, what a device takes, large batch": lambda c: (
        f"{c['small']}, {c['memory']}, {c['large']}"
    ),
    "optimizer": lambda c: f"SGD, momentum {MOMENTUM:g}, decay of weights {WEIGHT_DECAY:g}",
    "rate falls": lambda c: f"to {c['decay']:g} of it after epoch {c['decay_at']}",
    "augmentation": lambda c: f"shifts by {c['padding']} pixels, mirroring",
    "workers, k of dual-batch learning": lambda c: f"{c['devices']}, {c['k']:g}",
}
