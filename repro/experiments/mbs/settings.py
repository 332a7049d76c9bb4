"""What is run under each profile, and how its records are picked and described."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from repro.experiments.design import LONG, PROCESSES, Results, Run, reported
from repro.experiments.judge import BySeed, Estimate, difference
from repro.records import Record

PAPER = reported("mbs")
MIB = 2**20
UNITS = {"accuracy": "test accuracy (%)", "iou": "test IoU (%)"}

CLASSIFIERS = ("ResNet-50", "ResNet-101", "AmoebaNet-D")
ROLES = (*CLASSIFIERS, "U-Net")

# Section 4.2.4. The number of epochs and any augmentation are not given there.
_SGD = {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ResNet-50": _SGD,
    "ResNet-101": _SGD,
    "AmoebaNet-D": _SGD | {"lr": 0.1, "weight_decay": 1e-4, "schedule": "linear"},
    "U-Net": {"name": "adam", "lr": 0.01, "weight_decay": 5e-4},
}

PUBLISHED: dict[str, dict[str, Any]] = {
    # The repository of section 4.2.2's footnote has a stem of 3x3 without stride or pooling, which
    # takes sixteen times the memory of ImageNet's at 224 pixels: with it 16 and 8 fill the card.
    # GiB of live tensors in two float32 steps at Table 2's size, and at its double (24 are there):
    # ResNet-50 19.0, 37.8; ResNet-101 14.6, 28.9; AmoebaNet-D 18.4, 36.7; U-Net 13.0, 25.6.
    "ResNet-50": {"name": "resnet50"},
    "ResNet-101": {"name": "resnet101"},
    "AmoebaNet-D": {"name": "amoebanet_d", "num_layers": 6, "num_filters": 190},
    "U-Net": {"name": "unet", "width": 64, "depth": 4},
}
_SMALL: dict[str, dict[str, Any]] = {
    "ResNet-50": {"name": "resnet_cifar", "depth": 8, "width": 8},
    "ResNet-101": {"name": "resnet_cifar", "depth": 14, "width": 8},
    "AmoebaNet-D": {"name": "amoebanet_d", "num_layers": 3, "num_filters": 16},
    "U-Net": {"name": "unet", "width": 4, "depth": 3},
}
_TINY = _SMALL | {
    "ResNet-101": {"name": "resnet_cifar", "depth": 8, "width": 4},
    "AmoebaNet-D": {"name": "amoebanet_d", "num_layers": 3, "num_filters": 8},
    "U-Net": {"name": "unet", "width": 2, "depth": 2},
}
MODELS = {
    "smoke": _TINY,
    "quick": _SMALL,
    LONG: _SMALL,  # forty epochs of deeper ones would take two cores more than eight hours
    "gpu": PUBLISHED,
    "paper": PUBLISHED,
}

# Section 4.2.3; Table 1 has the lower ones.
PAPER_SIDES = {
    ("ResNet-50", "high"): 224,
    ("ResNet-50", "low"): 32,
    ("ResNet-101", "high"): 224,
    ("AmoebaNet-D", "high"): 416,
    ("U-Net", "high"): 384,
    ("U-Net", "low"): 96,
}

DATASETS: dict[str, dict[str, tuple[str, ...]]] = {
    "smoke": {"classification": ("digits",), "segmentation": ("photos",)},
    "quick": {
        "classification": ("flowers5", "flowers102", "digits"),
        "segmentation": ("camvid", "carvana", "photos"),
    },
    LONG: {
        "classification": ("cifar10", "flowers102", "flowers5", "digits"),
        "segmentation": ("camvid", "carvana", "photos"),
    },
    "gpu": {
        "classification": ("flowers102", "flowers5", "digits"),
        "segmentation": ("carvana", "camvid", "photos"),
    },
    "paper": {
        "classification": ("flowers102", "flowers5", "digits"),
        "segmentation": ("carvana", "camvid", "photos"),
    },
}

# Section 4.2.3 has 8,189 images and names no split. The official one trains on 1,020, fewer than
# the largest mini-batch, 1024; and an epoch of 226.8 s on the paper's card is 36 images of
# ResNet-50 a second if it is all of them and 4.5 if it is 1,020: 14 and 1.7 TFLOP/s of its 36.
FLOWERS_SPLIT = "random"  # or "official"

# Training samples in an epoch (None: all; a set with fewer is gone through more than once), test
# samples, epochs. The paper gives no number of epochs; 100 of them are 2.6 to 11 hours a training
# on its card by its own times, and half of the 200 of the repository of its footnote.
_ALL: dict[str, int | None] = {"train_samples": None, "test_samples": None, "epochs": 100}
# A run of gpu has to end within six minutes. Estimated, not measured: an H100's host launches a
# micro-batch of ResNet-50 in some 12 ms, so that 25 epochs in micro-batches of 8 take 4 minutes.
_GPU = _ALL | {"epochs": 25}
_SMOKE: dict[str, int | None] = {"train_samples": 64, "test_samples": 32, "epochs": 2}
_LONGER: dict[str, int | None] = {"train_samples": 5000, "test_samples": 2000, "epochs": 40}
_QUICK: dict[str, int | None] = {"train_samples": 256, "test_samples": 256, "epochs": 3}
EXTENT = {
    "smoke": dict.fromkeys(ROLES, _SMOKE),
    "quick": dict.fromkeys(ROLES, _QUICK)
    | {"ResNet-50": _QUICK | {"train_samples": 512}, "U-Net": _QUICK | {"test_samples": 96}},
    # So many updates that mini-batches of 128 converge; of the slowest three networks fewer.
    LONG: dict.fromkeys(ROLES, _LONGER)
    | {
        "ResNet-101": _LONGER | {"epochs": 20},
        "AmoebaNet-D": {"train_samples": 2000, "test_samples": 2000, "epochs": 20},
        "U-Net": {"train_samples": 256, "test_samples": 96, "epochs": 60},
    },
    "gpu": dict.fromkeys(ROLES, _GPU) | {"U-Net": _GPU | {"epochs": 20}},
    "paper": dict.fromkeys(ROLES, _ALL),
}
# Of the mini-batches of 4 that Table 1 alone has, and of what it compares them with.
TABLE1_EXTENT = {"gpu": _GPU | {"train_samples": 2048, "epochs": 10}}

# Streamed mini-batch sizes, the paper's initial one first: the largest that fits undivided.
_PAPER_SIZES = {
    role: tuple(
        row["mini_batch"]
        for table in ("table4", "table5")
        for row in PAPER[table]
        if row["model"] == role
    )
    for role in ROLES
}
MINI_BATCHES: dict[str, dict[str, tuple[int, ...]]] = {
    "smoke": {"ResNet-50": (16, 32), "ResNet-101": (8,), "AmoebaNet-D": (32,), "U-Net": (16, 32)},
    "quick": {
        # The sizes whose overhead section 4.3.3 gives, the optimum, and all of an epoch's samples.
        "ResNet-50": (16, 32, 128, 512),
        "ResNet-101": (8, 128, 256),
        "AmoebaNet-D": (32, 256),
        "U-Net": (16, 128, 256),
    },
    LONG: {
        "ResNet-50": (16, 32, 128, 512, 1024),
        "ResNet-101": (8, 32, 128, 1024),
        "AmoebaNet-D": (32, 128, 256, 1024),
        "U-Net": (16, 64, 128, 256),
    },
    "gpu": {
        "ResNet-50": (16, 32, 128, 512, 1024),
        "ResNet-101": (8, 128, 512, 1024),
        "AmoebaNet-D": (32, 256, 512, 1024),
        "U-Net": (16, 32, 128, 1024),
    },
    "paper": _PAPER_SIZES,
}
# Under gpu memory and time are measured at the paper's image sides, which a configuration's
# resolution `AS_IN_PAPER` says. Accuracy takes smaller images, of the networks that train in
# minutes, in bfloat16 and with few seeds; memory and time are of float32 (convolutions: TF32).
AS_IN_PAPER = "as in the paper"
TRAINED_ON_GPU = ("ResNet-50", "U-Net")
_GPU_SEEDS = (0, 1)
# Sizes whose epochs are timed, the initial one undivided, too. An epoch has the last one's samples.
TIMED_ON_GPU = {
    "ResNet-50": (16, 32, 128, 1024),
    "ResNet-101": (8, 128, 512),
    "AmoebaNet-D": (32, 256, 512),
    "U-Net": (16, 128, 512),
}
# cuDNN times its algorithms, but not where memory is measured: their trials take workspace.
_BENCHMARK = {"benchmark": True}
# Of the papers' own data, for the mini-batch that is all of them (section 1).
_ALL_TRAINING_SAMPLES = {
    "flowers102": {"random": 6551, "official": 1020}[FLOWERS_SPLIT],
    "carvana": 4080,
}
# Table 1's two sizes. The shorter profiles spare themselves the smallest one.
SMALL_BATCH = {"smoke": 4, "quick": 4, LONG: 4, "gpu": 4, "paper": 2}
LARGE_BATCH = 16


def task_of(role: str) -> str:
    """Return the task that a model of the paper is trained for."""
    return "segmentation" if role == "U-Net" else "classification"


def micro_batch_of(role: str, mini_batch: int) -> int:
    """Section 4.3.2: half the initial mini-batch, above it the largest that fits undivided."""
    initial: int = PAPER["table2"][role]["mini_batch"]
    return initial // 2 if mini_batch <= initial else initial


def measured_at(profile: str) -> str:
    """Return the resolution at which a profile measures memory and time."""
    return AS_IN_PAPER if profile == "gpu" else "high"


def _images(profile: str, role: str, name: str, resolution: str) -> dict[str, Any]:
    """Return a dataset's options and how it is cropped, for a resolution."""
    small, low = profile in ("smoke", "quick", LONG), resolution == "low"
    reduced = profile == "gpu" and resolution != AS_IN_PAPER
    if task_of(role) == "classification":
        if small:
            high_size, low_size = (16, 4) if name == "digits" else (32, 16)
        elif reduced:
            high_size, low_size = 64, 32
        else:
            high_size = 416 if role == "AmoebaNet-D" else 224
            low_size = 32
        size = low_size if low else high_size
        dataset: dict[str, Any] = {"name": name, "image_size": size}
        if name == "flowers102" and resolution == AS_IN_PAPER:
            dataset["per_class"] = 10  # as many as an epoch that is timed, decoded in seconds
        elif name == "flowers102" and not small:
            dataset["split"] = FLOWERS_SPLIT
        augment = {"padding": size // 8, "flip": name != "digits"}
    else:
        # A random square of 384 from 640 rows, at every scale.
        side = (24 if low else 48) if small else (96 if low else 384)
        side = side // 2 if profile == "smoke" else side // 4 if reduced else side
        # Where only memory and time count, no more rows are decoded than the crop has.
        rows = side if resolution == AS_IN_PAPER else side * 640 // 384
        columns = rows * 959 // 640
        dataset = {"name": name, "image_size": [rows, columns]}
        if name == "camvid":
            dataset["binary"] = True
        if name == "photos":
            side = min(side, 24 if low else 48)  # the photographs hold no larger patches
            dataset = {"name": name, "image_size": side * 640 // 384}
        augment = {"crop_size": side, "flip": True}
    if name == "synthetic" and task_of(role) == "segmentation":
        dataset |= {"masks": True, "num_classes": 2}
    return {"dataset": dataset, "augment": augment}


def base_config(
    profile: str, role: str, chosen: Mapping[str, str], resolution: str = "high"
) -> dict[str, Any]:
    """Return what all experiments of a model share under a profile."""
    initial, low = PAPER["table2"][role]["mini_batch"], resolution == "low"
    # At small scale the limit is set so that the paper's initial mini-batch fits and its double
    # does not; the lower resolution fits anywhere.
    limit = {"limit_fits": None if low else initial}
    if profile in ("gpu", "paper"):
        limit = {"limit_fits": None, "limit_bytes": PAPER["device_bytes"]}
    return {
        "role": role,
        "model": MODELS[profile][role],
        "resolution": resolution,
        **_images(profile, role, chosen[task_of(role)], resolution),
        "optimizer": OPTIMIZERS[role],
        **limit,
        **({"channels_last": True} if profile == "gpu" else {}),
    }


def training(
    profile: str,
    role: str,
    chosen: Mapping[str, str],
    mini_batch: int,
    micro_batch: int | None,
    low: bool = False,
    timed: bool = True,
    extent: Mapping[str, int | None] | None = None,
) -> Run:
    """Return one training run; without MBS where `micro_batch` is None.

    What is not timed may run beside others; under `long` and `gpu` see `epochs_in_turns`.
    """
    config = base_config(profile, role, chosen, "low" if low else "high")
    config |= extent or EXTENT[profile][role]
    config |= {} if timed and profile not in (LONG, "gpu") else {"timed": False}
    config |= {"autocast": "bfloat16", **_BENCHMARK} if profile == "gpu" else {}
    length = f", {extent['epochs']} epochs" if extent else ""
    return Run(
        "train",
        config | {"mini_batch": mini_batch, "micro_batch": micro_batch},
        seeds=_GPU_SEEDS if profile == "gpu" else None,
        label=f"{role}, {config['resolution']} resolution, {_division(mini_batch, micro_batch)}"
        f"{length}",
    )


def _division(mini_batch: int, micro_batch: int | None) -> str:
    micro = f"micro-batch {micro_batch}" if micro_batch else "undivided"
    return f"mini-batch {mini_batch}, {micro}"


def step(role: str, chosen: Mapping[str, str], mini_batch: int, micro_batch: int | None) -> Run:
    """Return two steps of one mini-batch at the paper's resolution under its memory limit."""
    return Run(
        "step",
        base_config("gpu", role, chosen, AS_IN_PAPER)
        | {"mini_batch": mini_batch, "micro_batch": micro_batch},
        seeds=(0,),
        label=f"{role}, {_division(mini_batch, micro_batch)}",
    )


def pairs(profile: str, role: str, chosen: Mapping[str, str]) -> list[Run]:
    """Return the trainings without and with MBS of Tables 4 and 5.

    Without MBS every size of the paper's is tried that an epoch's samples fill, since most only
    say that they do not fit.
    """
    if profile == "gpu":
        return _pairs_on_gpu(role, chosen)
    samples = EXTENT[profile][role]["train_samples"]
    runs = []
    for size in _PAPER_SIZES[role]:
        if samples is None or size <= samples:
            run = training(profile, role, chosen, size, None)
            # A limit that is set so that the double of the initial size does not fit says so to
            # every seed.
            sure = run.config["limit_fits"] and size > run.config["limit_fits"]
            runs.append(replace(run, seeds=(0,)) if sure else run)
        if size in MINI_BATCHES[profile][role]:
            runs.append(training(profile, role, chosen, size, micro_batch_of(role, size)))
    whole = _ALL_TRAINING_SAMPLES.get(chosen[task_of(role)])
    if samples is None and whole:
        runs.append(training(profile, role, chosen, whole, micro_batch_of(role, whole)))
    if profile == LONG and samples and samples not in MINI_BATCHES[LONG][role]:
        # Of a training set that is larger than the paper's, for what it says of memory alone.
        run = training(LONG, role, chosen, samples, micro_batch_of(role, samples))
        runs.append(replace(run, seeds=(0,)))
    return runs


def _pairs_on_gpu(role: str, chosen: Mapping[str, str]) -> list[Run]:
    """Return the trainings at smaller images, and steps at the paper's under its memory limit."""
    sizes = MINI_BATCHES["gpu"][role]
    runs = initial_pair("gpu", role, chosen)
    if role in TRAINED_ON_GPU:
        whole = _ALL_TRAINING_SAMPLES.get(chosen[task_of(role)], 0)
        for size in (*sizes[1:], *([whole] if whole else [])):
            run = training("gpu", role, chosen, size, micro_batch_of(role, size))
            runs.append(replace(run, seeds=(0,)) if size == whole else run)
    runs += [step(role, chosen, size, None) for size in _PAPER_SIZES[role]]
    return [*runs, step(role, chosen, sizes[-1], micro_batch_of(role, sizes[-1]))]


def initial_pair(profile: str, role: str, chosen: Mapping[str, str]) -> list[Run]:
    """Return the trainings without and with MBS at the initial mini-batch size (Table 2).

    There are none of a network that a profile does not train.
    """
    if profile == "gpu" and role not in TRAINED_ON_GPU:
        return []
    initial = PAPER["table2"][role]["mini_batch"]
    micro = micro_batch_of(role, initial)
    return [training(profile, role, chosen, initial, way) for way in (None, micro)]


def sizing(profile: str, role: str, chosen: Mapping[str, str]) -> Run:
    """Return the measurement of how memory and time grow with the mini-batch."""
    extent = {"largest": 128, "repeats": {"quick": 4}.get(profile, 7)}
    if profile == "smoke":
        extent = {"largest": 32, "repeats": 2}
    config = base_config(profile, role, chosen, measured_at(profile)) | extent
    return Run("size", config, seeds=(0,), label=role)


def _of_quick(chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the datasets of the same tasks under `quick`: how long is trained changes no time."""
    known = DATASETS["quick"]
    return {t: name if name in known[t] else known[t][0] for t, name in chosen.items()}


def epochs_in_turns(profile: str, role: str, chosen: Mapping[str, str]) -> Run:
    """Return the times of epochs, by mini-batch size in turns.

    Under `long` of several processes, of quick's epochs: of its sizes, and of those of `long` that
    such an epoch fills.
    """
    initial = PAPER["table2"][role]["mini_batch"]
    if profile == "gpu":
        sizes: Sequence[int] = TIMED_ON_GPU[role]
        config = base_config("gpu", role, chosen, AS_IN_PAPER)
        config |= {"train_samples": sizes[-1], "repeats": 3, **_BENCHMARK}
    else:
        samples = EXTENT["quick"][role]["train_samples"]
        assert samples is not None
        filled = {size for size in MINI_BATCHES[LONG][role] if size <= samples}
        sizes = sorted(filled.union(MINI_BATCHES["quick"][role]))
        config = base_config("quick", role, _of_quick(chosen))
        config |= {"train_samples": samples, "repeats": 7}
    ways: dict[str, list[int | None]] = {f"{initial}, undivided": [initial, None]}
    for size in sizes:
        ways[f"{size}, streamed"] = [size, micro_batch_of(role, size)]
    return Run(
        "epochs",
        config | {"ways": ways},
        seeds=(0,) if profile == "gpu" else PROCESSES,
        label=f"{role}, epochs in turns",
    )


FILES_ROLE = "ResNet-50"
# Ways to read images, as a table says them.
READINGS = {
    "memory": "in memory",
    "ahead": "from files, a mini-batch ahead",
    "asked": "from files, when asked for",
}


def file_epochs(profile: str, chosen: Mapping[str, str]) -> Run:
    """Return the times of epochs whose images are decoded from files, and of those in memory.

    Of the smallest mini-batch beyond memory, and the largest that an epoch's images fill. Files
    have the paper's 224 pixels wherever the network sees fewer, but for toys. Under `long` those of
    quick, in more turns and by several processes.
    """
    if profile == LONG:
        run = file_epochs("quick", _of_quick(chosen))
        return replace(run, config=run.config | {"repeats": 11}, seeds=PROCESSES)
    config = base_config(profile, FILES_ROLE, chosen, measured_at(profile))
    config |= {name: None for name in ("limit_fits", "limit_bytes") if name in config}
    seen = config["dataset"]["image_size"]
    stored = 48 if profile == "smoke" else PAPER_SIDES[FILES_ROLE, "high"]
    config["dataset"] = config["dataset"] | {"image_size": stored}
    if config["dataset"]["name"] == "flowers5":
        config["dataset"]["per_class"] = 110  # as many as an epoch, decoded in seconds
    config["augment"] = config["augment"] | {"crop_size": seen}
    initial = PAPER["table2"][FILES_ROLE]["mini_batch"]
    largest = {"smoke": 64, "quick": 512}.get(profile, 1024)
    ways = {
        f"{size}, {reading}": [size, micro_batch_of(FILES_ROLE, size), reading]
        for size in (2 * initial, largest)
        for reading in READINGS
    }
    config |= {"train_samples": largest, "ways": ways}
    config |= {"repeats": {"smoke": 2, "quick": 4}.get(profile, 5)}
    config |= _BENCHMARK if profile == "gpu" else {}
    return Run("file_epochs", config, seeds=(0,), label=f"{FILES_ROLE}, epochs from files")


def overhead(profile: str, role: str, chosen: Mapping[str, str]) -> Run:
    """Return the step times with and without MBS at the initial size, taken in turns.

    Under `long` those of quick, in more turns and by several processes.
    """
    if profile == LONG:
        run = overhead("quick", role, _of_quick(chosen))
        return replace(run, config=run.config | {"repeats": 31}, seeds=PROCESSES)
    initial = PAPER["table2"][role]
    config = base_config(profile, role, chosen, measured_at(profile)) | {
        "repeats": {"smoke": 3, "quick": 11}.get(profile, 15)
    }
    config |= _BENCHMARK if profile == "gpu" else {}
    return Run("overhead", config | initial, seeds=(0,), label=role)


# Where the sizes of `normalisation` are too large: for toys; and, whole, for one card: 70 images of
# ResNet-50 at 224 pixels take 83 GiB, their gradients in float64 twice that.
_QUARTERED = ("smoke", "paper")


def gradient_errors(profile: str, role: str, chosen: Mapping[str, str]) -> Run:
    """Return the comparison of accumulated gradients with the whole mini-batch's (section 3.4)."""
    config = base_config(profile, role, chosen)
    divisions = [PAPER["normalisation"][name] for name in ("even", "ragged")]
    if profile in _QUARTERED:
        divisions = [[mini // 4, micro // 4] for mini, micro in divisions]
    if "limit_bytes" in config:
        config["limit_bytes"] = None  # the whole mini-batch is to be compared with, in float64
    return Run("gradients", config | {"divisions": divisions}, seeds=(0,), label=role)


# What compares trainings epoch by epoch needs few.
_SHORT_ON_GPU: dict[str, int | None] = {"train_samples": 1024, "test_samples": 512, "epochs": 8}


def normalised_training(profile: str, chosen: Mapping[str, str], way: str | None) -> Run:
    """Return a training of ResNet-50 by a way of normalisation; undivided where it is None."""
    config = base_config(profile, "ResNet-50", chosen) | EXTENT[profile]["ResNet-50"]
    if profile == "quick":
        config["train_samples"] = 512
    if profile == "gpu":
        config |= _SHORT_ON_GPU
    mini, micro = PAPER["normalisation"]["ragged"]
    if profile in _QUARTERED:
        mini, micro = mini // 4, micro // 4
    limit = {"limit_fits": None}  # the whole mini-batch is to be compared with
    if "limit_bytes" in config:
        limit["limit_bytes"] = None
    return Run(
        "normalised",
        config | limit | {"mini_batch": mini, "micro_batch": micro, "normalization": way},
        label=f"ResNet-50, mini-batch {mini}, {way or 'undivided'}",
    )


def twins(profile: str, chosen: Mapping[str, str], norm: str, dtype: str = "float32") -> Run:
    """Return ResNet-50's training at the initial mini-batch, twice: without and with MBS.

    Args:
        profile: Which one.
        chosen: The dataset of each task.
        norm: ``batch``, or ``group`` for GroupNorm in the place of BatchNorm.
        dtype: ``float32``, or ``float64``, which is slow: one seed trains no longer than in quick.
    """
    initial: int = PAPER["table2"]["ResNet-50"]["mini_batch"]
    wide = dtype == "float64"
    extent = EXTENT["quick" if wide and profile != "smoke" else profile]["ResNet-50"]
    if profile == "gpu" and not wide:
        extent = _SHORT_ON_GPU
    config = base_config(profile, "ResNet-50", chosen) | extent
    config |= {name: None for name in ("limit_fits", "limit_bytes") if name in config}
    sizes = {"mini_batch": initial, "micro_batch": micro_batch_of("ResNet-50", initial)}
    name = f"{'GroupNorm' if norm == 'group' else 'BatchNorm'}{' in float64' if wide else ''}"
    return Run(
        "twins",
        config | sizes | {"norm": norm, "dtype": dtype},
        seeds=(0,) if wide else None,
        label=f"ResNet-50, {name}, without and with MBS",
    )


def foretold(role: str) -> Run:
    """Return the memory that a published model takes at the published sizes (Table 2)."""
    initial = PAPER["table2"][role]["mini_batch"]
    side = PAPER_SIDES[role, "high"]
    return Run(
        "foretell",
        {
            "role": role,
            "model": MODELS["paper"][role],
            "optimizer": OPTIMIZERS[role],
            "classes": 1 if role == "U-Net" else 102,
            "sides": [side, side],
            "sizes": [initial // 2, initial],
            "device_bytes": PAPER["device_bytes"],
            "resolution": "high",
            "augment": {"crop_size": side},
        },
        seeds=(0,),
        label=role,
    )


def timeline(profile: str, chosen: Mapping[str, str]) -> Run:
    """Return the traced mini-batch of Figure 2."""
    config = base_config(profile, "ResNet-50", chosen, measured_at(profile))
    return Run(
        "timeline", config | {"mini_batch": 64, "micro_batch": 16}, seeds=(0,), label="ResNet-50"
    )


def paper_rows(role: str) -> list[dict[str, Any]]:
    """Return a model's rows of Table 4 or 5, the initial mini-batch first."""
    return [row for table in ("table4", "table5") for row in PAPER[table] if row["model"] == role]


def trained(results: Results, role: str, **config: Any) -> list[Record]:
    """Return a model's trainings."""
    return results.select("train", role=role, **config)


def trainings(results: Results, role: str, mini_batch: int, streamed: bool) -> list[Record]:
    """Return the trainings of a model at the higher resolution, one per seed."""
    config = {"mini_batch": mini_batch, "resolution": "high"}
    return [
        record
        for record in trained(results, role, **config)
        if (record.config["micro_batch"] is not None) == streamed
    ]


def best(results: Results, records: Sequence[Record]) -> BySeed:
    """Return the best metric of every training that ran, in percent."""
    ran = [record for record in records if record.status == "ok"]
    return results.cell(ran, lambda record: float(record.metrics["best"]))


def image_points(records: Sequence[Record]) -> float:
    """Return what one test image is of an accuracy, in points; 0 of IoU, which counts pixels."""
    tested = [r for r in records if r.config["role"] in CLASSIFIERS]
    return 100 / min((r.config["test_samples"] or math.inf for r in tested), default=math.inf)


def gap(results: Results, first: Sequence[Record], second: Sequence[Record]) -> Estimate:
    """Return the best metric of some trainings less that of others, in points, seed by seed.

    Raises:
        NotRun: They share no seed.
    """
    values = best(results, first), best(results, second)
    return difference(*values, unit="points", resolution=image_points([*first, *second]))


def epoch_times(records: Sequence[Record]) -> list[float]:
    """Return the median seconds of an epoch of every training that ran."""
    times = [record.timings["epoch"]["samples_s"] for record in records if record.status == "ok"]
    return [float(np.median(samples)) for samples in times if samples]


def status_or(records: Sequence[Record], text: str) -> str:
    """Return `text`, or what became of the runs where none succeeded."""
    if not records:
        return "not run"
    if any(record.status == "ok" for record in records):
        return text
    return "out of memory" if records[0].status == "out_of_memory" else "error"
