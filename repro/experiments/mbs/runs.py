"""The runs of Micro-Batch Streaming under each profile; ``paper.toml`` has sizes and extents."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
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
# Under gpu memory and time are measured at the paper's image sides, which is this resolution.
# Accuracy takes smaller images, of the networks that train in minutes, in bfloat16 and with few
# seeds; memory and time are of float32 (convolutions: TF32).
AS_IN_PAPER = "as in the paper"
NORMALISATIONS = (None, "none", "paper", "exact")  # None: the whole mini-batch
NORMS = {  # of paired trainings
    ("batch", "float32"): "BatchNorm",
    ("group", "float32"): "GroupNorm in its place",
    ("group", "float64"): "GroupNorm, in float64",
}
FILES_ROLE = "ResNet-50"
READINGS: dict[str, str] = _TOML["readings"]  # of images, in words


def task_of(role: str) -> str:
    """Return the task that a model of the paper is trained for."""
    return "segmentation" if role == "U-Net" else "classification"


def paper_rows(role: str) -> list[dict[str, Any]]:
    """Return a model's rows of Table 4 or 5, the initial mini-batch first."""
    return [row for row in (*PAPER["table4"], *PAPER["table5"]) if row["model"] == role]


def micro_batch_of(role: str, mini_batch: int) -> int:
    """Section 4.3.2: half the initial mini-batch, above it the largest that fits undivided."""
    initial: int = INITIAL[role]
    return initial // 2 if mini_batch <= initial else initial


def extent_of(profile: str, role: str, kind: str = "") -> dict[str, int | None]:
    """Return training and test samples (None: all) and epochs, of a `kind` that the profile has."""
    sizes = PROFILES[profile]
    extent = sizes.get(kind) or sizes["extent"]["all"] | sizes["extent"].get(role, {})
    return {name: None if value == "all" else value for name, value in extent.items()}


def _images(profile: str, role: str, name: str, resolution: str) -> dict[str, Any]:
    """Return a dataset's options and how it is cropped, for a resolution."""
    task, exact = task_of(role), resolution == AS_IN_PAPER
    sides = {} if exact else PROFILES[profile].get("sides", {})
    end = "low" if resolution == "low" else "high"
    side = sides.get(name, sides.get(task, SIDES[role]))[end]
    dataset: dict[str, Any] = {"name": name, "image_size": side}
    if task == "classification":
        if name == "flowers102" and exact:
            dataset["per_class"] = 10  # as many as an epoch that is timed, decoded in seconds
        elif name == "flowers102" and profile in ("gpu", "paper"):
            # Section 4.2.3 has 8,189 images and names no split. The official one trains on 1,020,
            # fewer than the largest mini-batch, 1024; and an epoch of 226.8 s on the paper's card
            # is 36 images of ResNet-50 a second if it is all of them and 4.5 if it is 1,020.
            dataset["split"] = "random"
        return {"dataset": dataset, "augment": {"padding": side // 8, "flip": name != "digits"}}
    if name == "photos":  # which hold no larger patches
        side = min(side, 24 if end == "low" else 48)
        dataset["image_size"] = side * 640 // 384
    else:
        # A random square of 384 from 640 rows, at every scale; where only memory and time count,
        # no more rows are decoded than the crop has.
        rows = side if exact else side * 640 // 384
        dataset["image_size"] = [rows, rows * 959 // 640]
    if name == "camvid":
        dataset["binary"] = True
    return {"dataset": dataset, "augment": {"crop_size": side, "flip": True}}


def base_config(
    profile: str, role: str, chosen: Chosen, resolution: str = "high", limited: bool = True
) -> dict[str, Any]:
    """Return the part of a configuration that all experiments of a model share.

    The limit is the paper's card's; at small scale twice the initial mini-batch is not to fit.
    """
    limit: dict[str, int | None] = {"limit_fits": None}
    if profile in ("gpu", "paper"):
        limit["limit_bytes"] = PAPER["device_bytes"] if limited else None
    elif limited and resolution != "low":
        limit["limit_fits"] = INITIAL[role]
    return {
        "role": role,
        "model": _TOML["models"][PROFILES[profile]["models"]][role],
        "resolution": resolution,
        **_images(profile, role, chosen[task_of(role)], resolution),
        "optimizer": _TOML["optimizers"][role],
        **limit,
        **({"channels_last": True} if profile == "gpu" else {}),
    }


def training(
    profile: str,
    role: str,
    chosen: Chosen,
    mini_batch: int,
    streamed: bool,
    resolution: str = "high",
    kind: str = "",
) -> Run:
    """Return one training, with or without MBS; those that are not timed may run side by side."""
    micro = micro_batch_of(role, mini_batch) if streamed else None
    timed = not kind or (resolution, mini_batch) == ("high", LARGE_BATCH)
    config = base_config(profile, role, chosen, resolution) | extent_of(profile, role, kind)
    config |= {} if timed and profile not in (LONG, "gpu") else {"timed": False}
    config |= PROFILES[profile].get("compute", {})
    length = f", {config['epochs']} epochs" if kind in PROFILES[profile] else ""
    seeds = PROFILES[profile].get("seeds")
    return Run(
        "train",
        config | {"mini_batch": mini_batch, "micro_batch": micro},
        seeds=seeds and tuple(seeds),
        label=f"{role}, {resolution} resolution, {_division(mini_batch, micro)}{length}",
    )


def _division(mini_batch: int, micro_batch: int | None) -> str:
    micro = f"micro-batch {micro_batch}" if micro_batch else "undivided"
    return f"mini-batch {mini_batch}, {micro}"


def initial_pairs(profile: str, chosen: Chosen, roles: Sequence[str]) -> list[Run]:
    """Return the trainings without and with MBS at the initial mini-batch size (Table 2)."""
    trained = [role for role in roles if role in PROFILES[profile].get("trains", ROLES)]
    pairs = product(trained, (False, True))
    return [training(profile, role, chosen, INITIAL[role], way) for role, way in pairs]


def resolutions(profile: str, chosen: Chosen) -> list[Run]:
    """Return Table 1's trainings: two batch sizes at two resolutions; one is Table 4's or 5's."""
    return [
        training(profile, role, chosen, size, False, side, "table1_extent")
        for role in ("ResNet-50", "U-Net")
        for side in ("low", "high")
        for size in (PROFILES[profile]["small_batch"], LARGE_BATCH)
    ]


def tables_4_5(profile: str, chosen: Chosen, roles: Sequence[str]) -> list[Run]:
    """Return trainings by mini-batch size with and without MBS, and the steps timed in turns."""
    trained = _on_gpu if profile == "gpu" else _pairs
    planned = [run for role in roles for run in trained(profile, role, chosen)]
    if profile in (LONG, "gpu"):  # trainings that run side by side say nothing of time
        planned += [epochs(profile, role, chosen) for role in roles]
    # Steps with and without MBS at the initial size.
    options = PAPER["table2"]
    return planned + [_measurement("overhead", profile, r, chosen, **options[r]) for r in roles]


def _pairs(profile: str, role: str, chosen: Chosen) -> Iterator[Run]:
    """Return trainings of every size of the paper's that an epoch's samples fill."""
    trains = partial(training, profile, role, chosen)
    samples, paper = extent_of(profile, role)["train_samples"], paper_rows(role)
    every = [row["mini_batch"] for row in paper]
    sizes = PROFILES[profile].get("mini_batches", {role: every})[role]
    for size in every:
        if samples is None or size <= samples:
            run = trains(size, False)
            # Where the limit is set by the initial size, twice that fails for every seed.
            sure = run.config["limit_fits"] and size > run.config["limit_fits"]
            yield replace(run, seeds=(0,)) if sure else run
        if size in sizes:
            yield trains(size, True)
    if samples is None and (whole := _TOML["whole"].get(chosen[task_of(role)])):
        yield trains(whole, True)
    if profile == LONG and samples and samples not in sizes:
        # All samples as one mini-batch, which tells of memory alone.
        yield replace(trains(samples, True), seeds=(0,))


def _on_gpu(profile: str, role: str, chosen: Chosen) -> Iterator[Run]:
    """Return the trainings at smaller images, and steps at the paper's under its memory limit."""
    sizes, pair = PROFILES[profile]["mini_batches"][role], initial_pairs(profile, chosen, [role])
    if pair:
        yield from pair
        yield from (training(profile, role, chosen, size, True) for size in sizes[1:])
        if whole := _TOML["whole"].get(chosen[task_of(role)]):
            yield replace(training(profile, role, chosen, whole, True), seeds=(0,))
    steps = [(row["mini_batch"], None) for row in paper_rows(role)]
    for mini, micro in (*steps, (sizes[-1], micro_batch_of(role, sizes[-1]))):
        more = {"mini_batch": mini, "micro_batch": micro}
        yield _measurement("step", profile, role, chosen, f", {_division(mini, micro)}", **more)


def _measurement(
    experiment: str, profile: str, role: str, chosen: Chosen, label: str = "", **more: Any
) -> Run:
    """Return a measurement of memory or time; `long` has that of `quick`, by several processes."""
    extent = PROFILES[profile]["measured"].get(experiment, {})
    seeds: tuple[int, ...] = (0,)
    if profile == LONG:
        seeds, profile, known = PROCESSES, "quick", DATASETS["quick"]
        chosen = {t: name if name in known[t] else known[t][0] for t, name in chosen.items()}
    resolution = AS_IN_PAPER if profile == "gpu" else "high"
    limited = experiment != "file_epochs"
    config = base_config(profile, role, chosen, resolution, limited) | extent | more
    if profile == "gpu" and experiment in ("overhead", "epochs", "file_epochs"):
        # cuDNN times its algorithms, but not where memory is measured: trials take workspace.
        config["benchmark"] = True
    return Run(experiment, config, seeds, label=role + label)


def epochs(profile: str, role: str, chosen: Chosen) -> Run:
    """Return the times of epochs by mini-batch size, in turns."""
    sizes = PROFILES[profile]["timed"][role]
    ways = {f"{INITIAL[role]}, undivided": [INITIAL[role], None]}
    ways |= {f"{size}, streamed": [size, micro_batch_of(role, size)] for size in sizes}
    more, label = {"train_samples": sizes[-1], "ways": ways}, ", epochs in turns"
    return _measurement("epochs", profile, role, chosen, label, **more)


def file_epochs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the times of epochs whose images are decoded from files, and of those in memory."""
    role, largest = FILES_ROLE, PROFILES[profile]["measured"]["file_epochs"]["train_samples"]
    ways = {
        f"{size}, {reading}": [size, micro_batch_of(role, size), reading]
        for size in (2 * INITIAL[role], largest)
        for reading in READINGS
    }
    label = ", epochs from files"
    run = _measurement("file_epochs", profile, role, chosen, label, ways=ways)
    dataset = run.config["dataset"]
    run.config["augment"]["crop_size"] = dataset["image_size"]
    dataset["image_size"] = 48 if profile == "smoke" else SIDES[role]["high"]
    if dataset["name"] == "flowers5":
        dataset["per_class"] = 110  # as many as an epoch, decoded in seconds
    return [run]


def sizes(profile: str, chosen: Chosen) -> Iterator[Run]:
    """Return Table 2's search for the largest mini-batch of each model, here and predicted."""
    yield from (_measurement("size", profile, role, chosen) for role in ROLES)
    common = {"device_bytes": PAPER["device_bytes"], "resolution": "high"}
    for role in ["U-Net"] if profile == "smoke" else ROLES:  # the others take seconds each
        side, optimizer = SIDES[role]["high"], _TOML["optimizers"][role]
        config = {"role": role, "model": PUBLISHED[role], "optimizer": optimizer, **common}
        config |= {"sides": [side, side], "augment": {"crop_size": side}}
        config |= {"sizes": [INITIAL[role] // 2, INITIAL[role]]}
        config |= {"classes": 1 if role == "U-Net" else 102}
        yield Run("foretell", config, seeds=(0,), label=role)


def normalisations(profile: str, chosen: Chosen) -> Iterator[Run]:
    """Return section 3.4's comparisons of gradients, and ResNet-50's trainings with each."""
    divisions = PROFILES[profile]["divisions"]
    for role in ("ResNet-50", "U-Net"):
        config = base_config(profile, role, chosen) | {"divisions": divisions}
        config |= {"limit_bytes": None} if "limit_bytes" in config else {}
        yield Run("gradients", config, (0,), label=role)
    role, (mini, micro) = "ResNet-50", divisions[-1]
    config = base_config(profile, role, chosen, limited=False) | extent_of(profile, role, "short")
    for way in NORMALISATIONS:
        sizes = {"mini_batch": mini, "micro_batch": micro, "normalization": way}
        label = f"{role}, mini-batch {mini}, {way or 'undivided'}"
        yield Run("normalised", config | sizes, label=label)


def paired_trainings(profile: str, chosen: Chosen) -> Iterator[Run]:
    """Return ResNet-50's training at the initial mini-batch, without and with MBS, by norm."""
    role, initial = "ResNet-50", INITIAL["ResNet-50"]
    for norm, dtype in NORMS:
        wide = dtype == "float64"
        length = extent_of("quick" if wide and profile != "smoke" else profile, role, "short")
        config = base_config(profile, role, chosen, limited=False) | length
        config |= {"mini_batch": initial, "micro_batch": initial // 2, "norm": norm, "dtype": dtype}
        label = f"{role}, {norm} norm, {dtype}, without and with MBS"
        yield Run("twins", config, seeds=(0,) if wide else None, label=label)


def timeline(profile: str, chosen: Chosen) -> list[Run]:
    """Return the traced mini-batch of Figure 2."""
    return [_measurement("timeline", profile, "ResNet-50", chosen, mini_batch=64, micro_batch=16)]
