"""The runs of Micro-Batch Streaming under each profile; ``paper.toml`` has sizes and extents."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from repro.experiments.design import LONG, PROCESSES, Chosen, Run, paper_toml

_TOML = paper_toml("mbs")
PAPER, PROFILES, DATASETS = _TOML["reported"], _TOML["profiles"], _TOML["datasets"]
SIDES: dict[str, dict[str, int]] = _TOML["sides"]  # of images in pixels
PUBLISHED: dict[str, dict[str, Any]] = _TOML["models"]["published"]

CLASSIFIERS = ("ResNet-50", "ResNet-101", "AmoebaNet-D")
ROLES = (*CLASSIFIERS, "U-Net")
INITIAL = {role: PAPER["table2"][role]["mini_batch"] for role in ROLES}  # fits, its double does not
LARGE_BATCH = 16  # of Table 1

# Section 4.2.3 has 8,189 images and names no split. The official one trains on 1,020, fewer than
# the largest mini-batch, 1024; and an epoch of 226.8 s on the paper's card is 36 images of
# ResNet-50 a second if it is all of them and 4.5 if it is 1,020: 14 and 1.7 TFLOP/s of its 36.
FLOWERS_SPLIT = "random"  # or "official"
# For the mini-batch that is all of the training set (section 1).
_ALL_SAMPLES = {
    "flowers102": {"random": 6551, "official": 1020}[FLOWERS_SPLIT],
    "carvana": 4080,
}
# Under gpu memory and time are measured at the paper's image sides, which is this resolution.
# Accuracy takes smaller images, of the networks that train in minutes, in bfloat16 and with few
# seeds; memory and time are of float32 (convolutions: TF32).
AS_IN_PAPER = "as in the paper"
TRAINED_ON_GPU = ("ResNet-50", "U-Net")
_GPU_SEEDS = (0, 1)
# Comparisons of trainings epoch by epoch need few.
_SHORT_ON_GPU = {"train_samples": 1024, "test_samples": 512, "epochs": 8}
# cuDNN times its algorithms, but not where memory is measured: their trials take workspace.
_BENCHMARK = {"benchmark": True}
_SMALL = ("smoke", "quick", LONG)


def task_of(role: str) -> str:
    """Return the task that a model of the paper is trained for."""
    return "segmentation" if role == "U-Net" else "classification"


def paper_rows(role: str) -> list[dict[str, Any]]:
    """Return a model's rows of Table 4 or 5, the initial mini-batch first."""
    return [row for table in ("table4", "table5") for row in PAPER[table] if row["model"] == role]


def micro_batch_of(role: str, mini_batch: int) -> int:
    """Section 4.3.2: half the initial mini-batch, above it the largest that fits undivided."""
    initial: int = INITIAL[role]
    return initial // 2 if mini_batch <= initial else initial


def extent_of(profile: str, role: str) -> dict[str, int | None]:
    """Return training samples of an epoch, test samples (None: all) and epochs."""
    extents = PROFILES[profile]["extent"]
    return _counts({**extents["all"], **extents.get(role, {})})


def _counts(extent: Mapping[str, Any]) -> dict[str, int | None]:
    return {name: None if value == "all" else value for name, value in extent.items()}


def streamed_sizes(profile: str, role: str) -> Sequence[int]:
    """Return the mini-batches that are trained with MBS, the initial one first."""
    sizes = PROFILES[profile].get("mini_batches")
    chosen: Sequence[int] = (
        sizes[role] if sizes else [row["mini_batch"] for row in paper_rows(role)]
    )
    return chosen


def _images(profile: str, role: str, name: str, resolution: str) -> dict[str, Any]:
    """Return a dataset's options and how it is cropped, for a resolution."""
    small, low = profile in _SMALL, resolution == "low"
    reduced = profile == "gpu" and resolution != AS_IN_PAPER
    if task_of(role) == "classification":
        high, lower = (16, 4) if name == "digits" else (32, 16)
        if not small:
            high, lower = (64, 32) if reduced else (SIDES[role]["high"], 32)
        size = lower if low else high
        dataset: dict[str, Any] = {"name": name, "image_size": size}
        if name == "flowers102" and resolution == AS_IN_PAPER:
            dataset["per_class"] = 10  # as many as an epoch that is timed, decoded in seconds
        elif name == "flowers102" and not small:
            dataset["split"] = FLOWERS_SPLIT
        return {"dataset": dataset, "augment": {"padding": size // 8, "flip": name != "digits"}}
    # A random square of 384 from 640 rows, at every scale.
    side = (24 if low else 48) if small else (96 if low else 384)
    side = side // 2 if profile == "smoke" else side // 4 if reduced else side
    # Where only memory and time count, no more rows are decoded than the crop has.
    rows = side if resolution == AS_IN_PAPER else side * 640 // 384
    dataset = {"name": name, "image_size": [rows, rows * 959 // 640]}
    if name == "camvid":
        dataset["binary"] = True
    if name == "photos":
        side = min(side, 24 if low else 48)  # the photographs hold no larger patches
        dataset = {"name": name, "image_size": side * 640 // 384}
    if name == "synthetic":
        dataset |= {"masks": True, "num_classes": 2}
    return {"dataset": dataset, "augment": {"crop_size": side, "flip": True}}


def base_config(
    profile: str, role: str, chosen: Chosen, resolution: str = "high", limited: bool = True
) -> dict[str, Any]:
    """Return the part of a configuration that all experiments of a model share.

    At small scale the limit is set so that the paper's initial mini-batch fits and its double does
    not; the lower resolution fits anywhere. Under ``gpu`` and ``paper`` it is the paper's card's.
    """
    card = profile in ("gpu", "paper")
    limit: dict[str, int | None] = {
        "limit_fits": INITIAL[role] if limited and not card and resolution != "low" else None
    }
    if card:
        limit["limit_bytes"] = PAPER["device_bytes"] if limited else None
    return {
        "role": role,
        "model": _TOML["models"][PROFILES[profile]["models"]][role],
        "resolution": resolution,
        **_images(profile, role, chosen[task_of(role)], resolution),
        "optimizer": _TOML["optimizers"][role],
        **limit,
        **({"channels_last": True} if profile == "gpu" else {}),
    }


def measured_config(
    profile: str, role: str, chosen: Chosen, limited: bool = True, benchmark: bool = True
) -> dict[str, Any]:
    """Return the same for measurements of memory and time, at the paper's sides under ``gpu``."""
    resolution = AS_IN_PAPER if profile == "gpu" else "high"
    config = base_config(profile, role, chosen, resolution, limited)
    return config | (_BENCHMARK if profile == "gpu" and benchmark else {})


def training(
    profile: str,
    role: str,
    chosen: Chosen,
    mini_batch: int,
    micro_batch: int | None,
    resolution: str = "high",
    timed: bool = True,
    extent: Mapping[str, Any] | None = None,
) -> Run:
    """Return one training run; without MBS where `micro_batch` is None.

    Trainings that are not timed may run side by side; under `long` and `gpu` see `epochs`.
    """
    config = base_config(profile, role, chosen, resolution)
    config |= _counts(extent) if extent else extent_of(profile, role)
    config |= {} if timed and profile not in (LONG, "gpu") else {"timed": False}
    config |= {"autocast": "bfloat16", **_BENCHMARK} if profile == "gpu" else {}
    length = f", {extent['epochs']} epochs" if extent else ""
    return Run(
        "train",
        config | {"mini_batch": mini_batch, "micro_batch": micro_batch},
        seeds=_GPU_SEEDS if profile == "gpu" else None,
        label=f"{role}, {resolution} resolution, {_division(mini_batch, micro_batch)}{length}",
    )


def _division(mini_batch: int, micro_batch: int | None) -> str:
    micro = f"micro-batch {micro_batch}" if micro_batch else "undivided"
    return f"mini-batch {mini_batch}, {micro}"


def streamed_training(profile: str, role: str, chosen: Chosen, size: int) -> Run:
    """Return a training with MBS in the paper's micro-batches."""
    return training(profile, role, chosen, size, micro_batch_of(role, size))


def initial_pair(profile: str, role: str, chosen: Chosen) -> list[Run]:
    """Return the trainings without and with MBS at the initial mini-batch size (Table 2).

    There are none of a network that a profile does not train.
    """
    if profile == "gpu" and role not in TRAINED_ON_GPU:
        return []
    initial = INITIAL[role]
    undivided = training(profile, role, chosen, initial, None)
    return [undivided, streamed_training(profile, role, chosen, initial)]


def resolutions(profile: str, chosen: Chosen) -> list[Run]:
    """Return Table 1's trainings: two batch sizes at two resolutions; one is Table 4's or 5's."""
    extent = PROFILES[profile].get("table1_extent")
    return [
        training(
            profile, role, chosen, size, None, side, side == "high" and size == LARGE_BATCH, extent
        )
        for role in ("ResNet-50", "U-Net")
        for side in ("low", "high")
        for size in (PROFILES[profile]["small_batch"], LARGE_BATCH)
    ]


def tables_4_5(profile: str, chosen: Chosen, roles: Sequence[str]) -> list[Run]:
    """Return trainings by mini-batch size with and without MBS, and the steps timed in turns."""
    planned = []
    for role in roles:
        planned += (_on_gpu if profile == "gpu" else _pairs)(profile, role, chosen)
    if profile in (LONG, "gpu"):  # trainings that run side by side say nothing of time
        planned += [epochs(profile, role, chosen) for role in roles]
    return planned + [overhead(profile, role, chosen) for role in roles]


def _pairs(profile: str, role: str, chosen: Chosen) -> list[Run]:
    """Return trainings of every size of the paper's that an epoch's samples fill.

    Without MBS most only run out of memory.
    """
    samples = extent_of(profile, role)["train_samples"]
    streamed = streamed_sizes(profile, role)
    runs = []
    for size in (row["mini_batch"] for row in paper_rows(role)):
        if samples is None or size <= samples:
            run = training(profile, role, chosen, size, None)
            # Where the limit is set by the initial size, twice that fails for every seed.
            sure = run.config["limit_fits"] and size > run.config["limit_fits"]
            runs.append(replace(run, seeds=(0,)) if sure else run)
        if size in streamed:
            runs.append(streamed_training(profile, role, chosen, size))
    whole = _ALL_SAMPLES.get(chosen[task_of(role)])
    if samples is None and whole:
        runs.append(streamed_training(profile, role, chosen, whole))
    if profile == LONG and samples and samples not in streamed:
        # All samples as one mini-batch, which tells of memory alone.
        runs.append(replace(streamed_training(LONG, role, chosen, samples), seeds=(0,)))
    return runs


def _on_gpu(profile: str, role: str, chosen: Chosen) -> list[Run]:
    """Return the trainings at smaller images, and steps at the paper's under its memory limit."""
    sizes = streamed_sizes(profile, role)
    runs = initial_pair(profile, role, chosen)
    if role in TRAINED_ON_GPU:
        runs += [streamed_training(profile, role, chosen, size) for size in sizes[1:]]
        if whole := _ALL_SAMPLES.get(chosen[task_of(role)]):
            runs.append(replace(streamed_training(profile, role, chosen, whole), seeds=(0,)))
    steps = [(row["mini_batch"], None) for row in paper_rows(role)]
    for mini, micro in (*steps, (sizes[-1], micro_batch_of(role, sizes[-1]))):
        config = measured_config(profile, role, chosen, benchmark=False)
        config |= {"mini_batch": mini, "micro_batch": micro}
        runs.append(Run("step", config, seeds=(0,), label=f"{role}, {_division(mini, micro)}"))
    return runs


def _of_quick(chosen: Chosen) -> dict[str, str]:
    """Return the datasets of the same tasks under `quick`: the length of a training is no time."""
    known = DATASETS["quick"]
    return {t: name if name in known[t] else known[t][0] for t, name in chosen.items()}


def epochs(profile: str, role: str, chosen: Chosen) -> Run:
    """Return the times of epochs by mini-batch size, in turns.

    Under `long` of several processes, of quick's epochs: of its sizes, and of those of `long` that
    such an epoch fills.
    """
    if profile == "gpu":
        sizes: Sequence[int] = PROFILES["gpu"]["timed"][role]
        config = measured_config("gpu", role, chosen)
        config |= {"train_samples": sizes[-1], "repeats": 3}
    else:
        samples = extent_of("quick", role)["train_samples"]
        assert samples is not None
        filled = {size for size in streamed_sizes(LONG, role) if size <= samples}
        sizes = sorted(filled.union(streamed_sizes("quick", role)))
        config = base_config("quick", role, _of_quick(chosen))
        config |= {"train_samples": samples, "repeats": 7}
    ways: dict[str, list[int | None]] = {f"{INITIAL[role]}, undivided": [INITIAL[role], None]}
    ways |= {f"{size}, streamed": [size, micro_batch_of(role, size)] for size in sizes}
    seeds = (0,) if profile == "gpu" else PROCESSES
    return Run("epochs", config | {"ways": ways}, seeds, label=f"{role}, epochs in turns")


def _repeated(run: Run, repeats: int) -> Run:
    """Return a measurement of `quick` for `long`: in more turns and by several processes."""
    return replace(run, config=run.config | {"repeats": repeats}, seeds=PROCESSES)


FILES_ROLE = "ResNet-50"
# Ways to read images, in words.
READINGS = {
    "memory": "in memory",
    "ahead": "from files, a mini-batch ahead",
    "asked": "from files, when asked for",
}


def file_epochs(profile: str, chosen: Chosen) -> Run:
    """Return the times of epochs whose images are decoded from files, and of those in memory.

    Of the smallest mini-batch beyond memory, and the largest that an epoch's images fill. Files
    have the paper's 224 pixels wherever the network sees fewer, but for toys.
    """
    if profile == LONG:
        return _repeated(file_epochs("quick", _of_quick(chosen)), 11)
    config = measured_config(profile, FILES_ROLE, chosen, limited=False)
    seen = config["dataset"]["image_size"]
    stored = 48 if profile == "smoke" else SIDES[FILES_ROLE]["high"]
    config["dataset"] |= {"image_size": stored}
    if config["dataset"]["name"] == "flowers5":
        config["dataset"]["per_class"] = 110  # as many as an epoch, decoded in seconds
    config["augment"] |= {"crop_size": seen}
    largest = {"smoke": 64, "quick": 512}.get(profile, 1024)
    ways = {
        f"{size}, {reading}": [size, micro_batch_of(FILES_ROLE, size), reading]
        for size in (2 * INITIAL[FILES_ROLE], largest)
        for reading in READINGS
    }
    config |= {"train_samples": largest, "ways": ways}
    config |= {"repeats": {"smoke": 2, "quick": 4}.get(profile, 5)}
    return Run("file_epochs", config, seeds=(0,), label=f"{FILES_ROLE}, epochs from files")


def overhead(profile: str, role: str, chosen: Chosen) -> Run:
    """Return the step times with and without MBS at the initial size, taken in turns."""
    if profile == LONG:
        return _repeated(overhead("quick", role, _of_quick(chosen)), 31)
    config = measured_config(profile, role, chosen)
    config |= {"repeats": {"smoke": 3, "quick": 11}.get(profile, 15)}
    return Run("overhead", config | PAPER["table2"][role], seeds=(0,), label=role)


def sizes(profile: str, chosen: Chosen) -> list[Run]:
    """Return Table 2's search for the largest mini-batch of each model, here and predicted."""
    extent = {"largest": 128, "repeats": {"quick": 4}.get(profile, 7)}
    if profile == "smoke":
        extent = {"largest": 32, "repeats": 2}
    runs = []
    for role in ROLES:
        config = measured_config(profile, role, chosen, benchmark=False)
        runs.append(Run("size", config | extent, seeds=(0,), label=role))
    predicted = ("U-Net",) if profile == "smoke" else ROLES  # the others take seconds each
    return runs + [_predicted(role) for role in predicted]


def _predicted(role: str) -> Run:
    """Return the memory that a published model takes at the published sizes."""
    initial, side = INITIAL[role], SIDES[role]["high"]
    config = {
        "role": role,
        "model": PUBLISHED[role],
        "optimizer": _TOML["optimizers"][role],
        "classes": 1 if role == "U-Net" else 102,
        "sides": [side, side],
        "sizes": [initial // 2, initial],
        "device_bytes": PAPER["device_bytes"],
        "resolution": "high",
        "augment": {"crop_size": side},
    }
    return Run("foretell", config, seeds=(0,), label=role)


def normalisations(profile: str, chosen: Chosen, ways: Sequence[str | None]) -> list[Run]:
    """Return section 3.4's comparisons of gradients, and ResNet-50's trainings by each way.

    None is the whole mini-batch, which is to be compared with: there is no limit.
    """
    even, ragged = PAPER["normalisation"]["even"], PAPER["normalisation"]["ragged"]
    # Too large for toys; and, whole, for one card: 70 images of ResNet-50 at 224 pixels take 83
    # GiB, their gradients in float64 twice that.
    if profile in ("smoke", "paper"):
        even, ragged = ([size // 4 for size in sizes] for sizes in (even, ragged))
    runs = []
    for role in ("ResNet-50", "U-Net"):
        config = base_config(profile, role, chosen)
        if "limit_bytes" in config:
            config["limit_bytes"] = None
        runs.append(Run("gradients", config | {"divisions": [even, ragged]}, (0,), label=role))
    mini, micro = ragged
    config = base_config(profile, "ResNet-50", chosen, limited=False)
    config |= _SHORT_ON_GPU if profile == "gpu" else extent_of(profile, "ResNet-50")
    for way in ways:
        sizes = {"mini_batch": mini, "micro_batch": micro, "normalization": way}
        label = f"ResNet-50, mini-batch {mini}, {way or 'undivided'}"
        runs.append(Run("normalised", config | sizes, label=label))
    return runs


def paired_training(profile: str, chosen: Chosen, norm: str, dtype: str = "float32") -> Run:
    """Return ResNet-50's training at the initial mini-batch, twice: without and with MBS.

    Args:
        profile: Which one.
        chosen: The dataset of each task.
        norm: ``batch``, or ``group`` for GroupNorm in the place of BatchNorm.
        dtype: ``float32``, or ``float64``, which is slow: one seed trains no longer than in quick.
    """
    role, wide = "ResNet-50", dtype == "float64"
    config = base_config(profile, role, chosen, limited=False)
    config |= extent_of("quick" if wide and profile != "smoke" else profile, role)
    config |= _SHORT_ON_GPU if profile == "gpu" and not wide else {}
    initial = INITIAL[role]
    config |= {"mini_batch": initial, "micro_batch": micro_batch_of(role, initial)}
    name = f"{'GroupNorm' if norm == 'group' else 'BatchNorm'}{' in float64' if wide else ''}"
    return Run(
        "twins",
        config | {"norm": norm, "dtype": dtype},
        seeds=(0,) if wide else None,
        label=f"{role}, {name}, without and with MBS",
    )


def timeline(profile: str, chosen: Chosen) -> Run:
    """Return the traced mini-batch of Figure 2."""
    config = measured_config(profile, "ResNet-50", chosen, benchmark=False)
    return Run("timeline", config | {"mini_batch": 64, "micro_batch": 16}, (0,), label="ResNet-50")
