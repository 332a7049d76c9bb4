"""What is run under each profile, and what captions say.

There is no paper: the questions are this package's own, between the five. What was predicted of
them, before there were records, stands in ``paper.toml``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro.experiments.design import Run
from repro.experiments.query import Results

# ---- Part 1: under one memory limit

LIMIT, FORETELL = "limit", "foretell"
NETWORKS = RESNET, DENSENET, UNET, TRANSFORMER = (
    "ResNet-18",
    "DenseNet",
    "U-Net",
    "Transformer",
)
LABELS = {
    "undivided": "undivided",
    "accumulation": "accumulation by hand",
    "mbs": "MBS",
    "mbs_deferred": "MBS, deferred BatchNorm",
    "outofcore": "out-of-core, memory",
    "outofcore_file": "out-of-core, file",
    "checkpointing": "checkpointing",
    "save_on_cpu": "save_on_cpu",
    "checkpointing_mbs": "checkpointing + MBS",
    "mbs_in_outofcore": "MBS in out-of-core",
    "tuned_mbs": "tuned convolutions + MBS",
    "tuned_outofcore": "tuned convolutions in out-of-core",
}
MODES = tuple(LABELS)
SPLITS = ("accumulation", "mbs", "mbs_deferred")  # divide the mini-batch by samples
KEEPS = ("outofcore", "outofcore_file", "checkpointing", "save_on_cpu")  # and these do not
TUNED = ("tuned_mbs", "tuned_outofcore")
BATCHNORM = (RESNET, DENSENET, UNET)  # the networks that look at more than one sample

_TINY_IMAGE = [8, 8]
_TRANSFORMER = {"name": "transformer", "vocabulary": 64, "heads": 2}
_MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "smoke": {
        RESNET: {
            "model": {"name": "resnet_cifar", "depth": 8, "width": 4},
            "image": _TINY_IMAGE,
        },
        DENSENET: {"model": {"name": "densenet", "depth": 10, "growth": 2}, "image": _TINY_IMAGE},
        UNET: {"model": {"name": "unet", "width": 2, "depth": 2}, "image": _TINY_IMAGE},
        TRANSFORMER: {"model": _TRANSFORMER | {"length": 8, "width": 8, "layers": 2}},
    },
    "quick": {
        RESNET: {"model": {"name": "resnet18", "width": 8}, "image": [16, 16]},
        DENSENET: {"model": {"name": "densenet", "depth": 13, "growth": 8}, "image": [16, 16]},
        UNET: {"model": {"name": "unet", "width": 8, "depth": 2}, "image": [20, 20]},
        TRANSFORMER: {"model": _TRANSFORMER | {"length": 32, "width": 64, "layers": 3}},
    },
    "gpu": {
        RESNET: {"model": {"name": "resnet18", "width": 64}, "image": [64, 64]},
        DENSENET: {"model": {"name": "densenet", "depth": 40, "growth": 12}, "image": [32, 32]},
        UNET: {"model": {"name": "unet", "width": 32, "depth": 4}, "image": [128, 128]},
        TRANSFORMER: {
            "model": _TRANSFORMER
            | {"vocabulary": 4096, "heads": 8, "length": 256, "width": 512, "layers": 12}
        },
    },
}
_MODELS["paper"] = _MODELS["gpu"]
FITS = {"smoke": 4, "quick": 8, "gpu": 32, "paper": 32}  # samples, undivided
MULTIPLES: Mapping[str, Sequence[int]] = {
    "smoke": (1, 4),
    "quick": (1, 4, 16),
    "gpu": (1, 2, 4, 8, 16),
    "paper": (1, 2, 4, 8, 16),
}
# On a CPU tuning takes longer than what is tuned, and swapping within each micro-batch longest; on
# a GPU tuning takes a minute or two.
_FEWER: Mapping[str, Mapping[str, Sequence[int]]] = {
    "mbs_in_outofcore": {"quick": (1, 4)},
    "tuned_mbs": {"smoke": (4,), "quick": (4,), "gpu": (4,)},
    "tuned_outofcore": {"smoke": (4,), "quick": (4,), "gpu": (4,)},
}
_TUNED_POLICY = {"smoke": "undivided", "quick": "undivided", "gpu": "powerOfTwo", "paper": "all"}
WARMUP = {"smoke": 0, "quick": 1, "gpu": 2, "paper": 2}  # beside the steps that are watched before
REPEATS = {"smoke": 2, "quick": 7, "long": 15, "gpu": 10, "paper": 30}


def modes_of(profile: str, network: str) -> tuple[str, ...]:
    """Return the methods that a network is trained by."""
    if profile == "smoke" and network != RESNET:
        return ("undivided", "outofcore" if network == UNET else "mbs")
    tuned = network == RESNET or (profile in ("gpu", "paper") and network != TRANSFORMER)
    kept = MODES if tuned else tuple(mode for mode in MODES if mode not in TUNED)
    if profile in ("gpu", "paper"):  # swapping to a file is a CPU's
        kept = tuple(mode for mode in kept if mode != "outofcore_file")
    if network not in BATCHNORM:
        kept = tuple(mode for mode in kept if mode != "mbs_deferred")
    return kept


def under_limit(profile: str) -> list[Run]:
    """Return a run for each network and method, of all sizes of mini-batch."""
    runs = []
    for network in NETWORKS:
        for mode in modes_of(profile, network):
            tuned = {"policy": _TUNED_POLICY[profile]} if mode in TUNED else {}
            config = {
                "network": network,
                **_MODELS[profile][network],
                "mode": mode,
                "fits": FITS[profile],
                "multiples": list(_FEWER.get(mode, {}).get(profile, MULTIPLES[profile])),
                "warmup": WARMUP[profile],
                "repeats": REPEATS[profile],
                "threads": 1 if profile in ("smoke", "quick") else None,
                **tuned,
            }
            runs.append(Run(LIMIT, config, seeds=(0,), label=f"{network}, {LABELS[mode]}"))
    return runs


PROBE_S = {"smoke": 0.5, "quick": 4.0, "gpu": 8.0, "paper": 8.0}


def foretold(profile: str) -> list[Run]:
    """Return a run for each network, of all its ways but tuned ones."""
    return [
        Run(
            FORETELL,
            {
                "network": network,
                **_MODELS[profile][network],
                "modes": [mode for mode in modes_of(profile, network) if mode not in TUNED],
                "fits": FITS[profile],
                "multiples": list(MULTIPLES[profile]),
                "probe_s": PROBE_S[profile],
                "threads": 1 if profile in ("smoke", "quick") else None,
            },
            seeds=(0,),
            label=f"{network}, by advise",
        )
        for network in NETWORKS
    ]


@dataclass(frozen=True)
class Point:
    """One method at one multiple of the largest mini-batch that fits.

    Attributes:
        batch: Samples.
        fits: None where the way is not for the device.
        why: Why it does not fit.
        micro: Samples of a micro-batch; None where it is not divided.
        peak_bytes: Of live tensors as the limit counts them; 0 where it does not fit.
        host_bytes: Swapped or saved there at most.
        gradient_error: Norm of the difference to the whole mini-batch's, over its norm.
        batchnorm_error: The same of running statistics after one step; None without BatchNorm.
        step_s: Timed rounds.
        reference_s: Of the undivided step of what fits, in turns with them.
        share: Of the two mini-batches, the reference's over this one's.
    """

    batch: int
    fits: bool | None
    why: str
    micro: int | None = None
    peak_bytes: int = 0
    host_bytes: int = 0
    gradient_error: float = 0.0
    batchnorm_error: float | None = None
    step_s: Sequence[float] = ()
    reference_s: Sequence[float] = ()
    share: float = 1.0

    @property
    def slowdowns(self) -> list[float]:
        """Seconds of an image over those undivided, round by round."""
        pairs = zip(self.step_s, self.reference_s, strict=True)
        return [self.share * ours / theirs for ours, theirs in pairs]

    @property
    def speed(self) -> float | None:
        """Images a second over those undivided: the geometric mean of the rounds."""
        rounds = self.slowdowns
        return math.exp(-math.fsum(map(math.log, rounds)) / len(rounds)) if rounds else None


def points(results: Results, network: str, mode: str) -> dict[int, Point]:
    """Return what was measured of a way by the multiple of what fits; empty without a record."""
    record = results.first(LIMIT, network=network, mode=mode)
    if record is None:
        return {}
    by_multiple = {}
    for row in record.metrics["points"]:
        multiple = row["multiple"]
        fields: dict[str, Any] = {key: value for key, value in row.items() if key != "multiple"}
        if row["fits"]:
            fields["step_s"] = record.timings[f"step ×{multiple}"]["samples_s"]
            fields["reference_s"] = record.timings[f"reference ×{multiple}"]["samples_s"]
            fields["share"] = record.config["fits"] / row["batch"]
        by_multiple[multiple] = Point(**fields)
    return by_multiple


def is_simulated(results: Results) -> bool:
    """Whether the limit is one that the device does not have: on a CPU."""
    return any(record.device["type"] == "cpu" for record in results.select(LIMIT))


def facts(results: Results) -> Iterable[str]:
    """Yield what a caption says of the measurements under a limit."""
    if results.select(LIMIT):
        yield f"{'SIMULATED limit, ' * is_simulated(results)}SYNTHETIC data."


# ---- Part 2: towards one accuracy

CIFAR = "CIFAR"
DATASETS: dict[str, dict[str, tuple[str, ...]]] = {
    "smoke": {CIFAR: ("digits",)},
    "quick": {CIFAR: ("cifar10", "digits")},
    "long": {CIFAR: ("cifar10", "digits")},
    "gpu": {CIFAR: ("cifar10", "digits")},
    "paper": {CIFAR: ("cifar10", "digits")},
}

TRAIN, PACE = "train", "pace"
STRATEGIES = {
    "fixed": "fixed small batch",
    "linear": "linear scaling",
    "theta": "θ-adaptive",
    "noise": "noise scale",
    "dual": "dual-batch",
    "hybrid": "hybrid, cyclic resolution",
    "theta_mbs": "θ-adaptive, streamed beyond memory",
    "dual_mbs": "dual-batch, workers that stream",
    "cyclic_theta": "θ-adaptive, cyclic resolution",
}
ALONE = ("linear", "theta", "noise", "dual", "hybrid")
TOGETHER = ("theta_mbs", "dual_mbs", "cyclic_theta")

# Images to train, held out of these, to test; epochs; the batch that learns best as it is known
# from θ-adaptive training's own records, what a device takes, the large one; the sides of images.
_RESNET8 = {"name": "resnet_cifar", "depth": 8, "width": 8}
_SCALE: dict[str, dict[str, Any]] = {
    "smoke": {
        "model": _RESNET8 | {"width": 4},
        "images": (64, 32, 32),
        "epochs": 4,
        "batches": (8, 16, 32),
        "sides": (6, 8),
        "rates": (0.1,),
    },
    "quick": {
        "model": _RESNET8,
        "images": (640, 240, 500),
        "epochs": 10,
        "batches": (16, 32, 128),
        "sides": (12, 16),
        "rates": (0.02, 0.08, 0.32),
    },
    # Half of the images and batches of gpu's, at half of the pixels.
    "long": {
        "model": _RESNET8,
        "images": (6_250, 1_250, 5_000),
        "epochs": 12,
        "batches": (32, 128, 512),
        "sides": (12, 16),
        "rates": (0.02, 0.08, 0.32),
    },
    "gpu": {
        "model": {"name": "resnet20"},
        "images": (12_500, 2_500, 10_000),
        "epochs": 12,
        "batches": (64, 256, 1024),
        "sides": (24, 32),
        "rates": (0.0125, 0.05, 0.2, 0.8),
    },
    "paper": {
        "model": {"name": "resnet20"},
        "images": (45_000, 5_000, 10_000),
        "epochs": 60,
        "batches": (128, 512, 2048),
        "sides": (24, 32),
        "rates": (0.0125, 0.05, 0.2, 0.8),
    },
}
# On a GPU, whose launches bind a step of ResNet-20. What MBS streams stays eager, and so does
# `cudnn.benchmark` stay off: its search takes longer than it saves in trainings of seconds.
_FAST = {"autocast": "bfloat16", "channels_last": True, "captured": True}
_COMPUTE: dict[str, dict[str, Any]] = {"gpu": _FAST}
_DIGITS = (1000, 400, 300)  # the set has no more
DEVICES, K, DECAY = 4, 1.1, 0.2
# Seconds of a step over those of an image, on the simulated machine: what Table 2 of dual-batch
# learning fixes of its devices.
STEP_IMAGES: float = 24.8


def _dataset(profile: str, name: str) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """Return which images are loaded, and how many train, are held out and test."""
    scale = _SCALE[profile]
    images: tuple[int, int, int] = scale["images"]
    side = scale["sides"][-1]
    if name != "cifar10":
        options = {} if profile == "smoke" else {"image_size": side}
        fewer = (min(a, b) for a, b in zip(images, _DIGITS, strict=True))
        return {"name": name, **options}, (next(fewer), next(fewer), next(fewer))
    few = {"per_class": (images[0] + images[1]) // 10} if images[0] < 10_000 else {}
    return {"name": name, **({"image_size": side} if side != 32 else {}), **few}, images


def trainings(profile: str, chosen: Mapping[str, str]) -> list[Run]:
    """Return every strategy at every rate, and what times a step."""
    scale = _SCALE[profile]
    dataset, (train, held_out, test) = _dataset(profile, chosen[CIFAR])
    small, memory, large = scale["batches"]
    runs = []
    for strategy, label in STRATEGIES.items():
        for rate in scale["rates"]:
            config = {
                "strategy": strategy,
                "rate": rate,
                "model": scale["model"],
                "dataset": dataset,
                "train_samples": train,
                "held_out": held_out,
                "test_samples": test,
                "padding": scale["sides"][-1] // 8,
                "flip": chosen[CIFAR] != "digits",
                "epochs": scale["epochs"],
                "warmup": max(1, scale["epochs"] // 6),
                "decay_at": max(2, 4 * scale["epochs"] // 5) if scale["epochs"] > 4 else 2,
                "decay": DECAY,
                "small": small,
                "memory": memory,
                "large": large,
                "sides": list(scale["sides"]),
                "devices": DEVICES,
                "step_images": STEP_IMAGES,
                "k": K,
                **_COMPUTE.get(profile, {}),
            }
            runs.append(Run(TRAIN, config, label=f"{label}, rate {rate:g}"))
    timed = {
        "model": scale["model"],
        "sides": list(scale["sides"]),
        "sizes": [small, memory, large],
        "warmup": 1,
        "repeats": REPEATS[profile],
        "threads": 1 if profile in ("smoke", "quick", "long") else None,
        **_COMPUTE.get(profile, {}),
    }
    return [*runs, Run(PACE, timed, seeds=(0,), label="steps by size and resolution")]
