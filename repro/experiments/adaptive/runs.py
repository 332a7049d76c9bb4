"""Which trainings and measurements each profile has: the paper's, at the profile's scale.

The scales are ``[profiles]`` in ``paper.toml``, the paper's own values ``[reported]``.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from repro.experiments.design import LONG, PROCESSES, Chosen, Config, Run, paper_toml

_TOML = paper_toml("adaptive")
PAPER, PROFILES, OPTIMIZERS = _TOML["reported"], _TOML["profiles"], _TOML["optimizers"]
CIFAR, DIV2K, PHANTOM = TASKS = ("CIFAR", "DIV2K", "Phantom")
METRIC = {CIFAR: "accuracy", DIV2K: "psnr", PHANTOM: "psnr"}  # that is to be high
STRATEGIES = ("best", "linear", "scheduled", "theta")
# θ-adaptive with the paper's K instead of one that is found, and with section III-E's decay.
GIVEN, DECAY = "given", "decay"
# Section III-E's SGD; and ours, not the paper's: the batch size by the noise scale.
MORE = ("large", "noise")
NAMES: dict[str, str] = _TOML["names"]
LAYERWISE = {"LARS": 1.0, "LAMB": 0.01}  # factors of SGD's rates
TRAININGS, FIRST_EPOCHS = ("train", "variant"), "first_epochs"  # experiments
AVERAGING = ("allreduce", "all_to_all", "reduce_scatter")
FAST = {"autocast": "bfloat16", "channels_last": True, "captured": True, "benchmark": True}
SIMILAR = 0.10  # share by which norms of stable batch sizes may differ; the paper names none
SATURATED = 0.01  # least share by which a cost that is not saturated falls; the paper names none
NOISE = 0.1  # standard deviation of the noise on Phantom, as a share of the full range
_SIZES: dict[str, dict[str, list[int]]] = {  # batch sizes of trainings that keep theirs
    "figure1": {DIV2K: PAPER[DIV2K]["figure1"]},
    "figure2": {CIFAR: PAPER[CIFAR]["figure2"]},
    "figure6": {
        task: [PAPER[task][name]["batch"] for name in ("best", "theta", "linear")]
        for task in (DIV2K, PHANTOM)
    },
}


def batch(profile: str, task: str, size: int) -> int:
    """One of the paper's batch sizes at a profile's scale."""
    return max(2, round(size * PROFILES[profile][task]["batches"]))


def epochs_of(profile: str, task: str, epochs: float) -> int:
    """A number of the paper's epochs at a profile's scale; never more of them."""
    share = min(1.0, PROFILES[profile][task]["epochs"] / PAPER[task]["epochs"])
    return max(1, round(epochs * share))


def paper_schedule(task: str, strategy: str) -> list[tuple[int, int]]:
    """The paper's batch sizes, and for how many epochs it used each."""
    paper = PAPER[task][strategy]
    epochs = paper.get("epochs", PAPER[task]["epochs"])
    if "max_batch" not in paper:
        return [(paper["batch"], epochs)]
    every = PAPER[task]["interval"] if strategy == "theta" else paper["every"]
    *grown, last = _doubled(paper["batch"], paper["max_batch"])
    return [*((size, every) for size in grown), (last, epochs - len(grown) * every)]


def _doubled(size: int, largest: int) -> list[int]:
    sizes = [size]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return sizes


def consecutive(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Batch sizes, and for how many epochs in a row each was used."""
    return [(size, len(list(epochs))) for size, epochs in itertools.groupby(sizes)]


def _dataset(at: Any, task: str, name: str, train: int, test: int) -> dict[str, Any]:
    pixels = at["pixels"]
    if task == PHANTOM:
        size = PAPER[task]["size"] if pixels == PAPER[task]["patch"] else 64
        return {"name": name, "image_size": size, "train": train, "test": test}
    if task == CIFAR:
        side = {} if pixels == {"digits": 8, "cifar10": 32}[name] else {"image_size": pixels}
        few = name == "cifar10" and train < 10_000
        return {"name": name, **side, **({"per_class": train // 10} if few else {})}
    if name == "photos":
        each = {"train_per_class": -(-train // 8), "test_per_class": -(-test // 8)}
        return {"name": name, "image_size": 2 * pixels, **each}
    return {"name": name}


def _base(profile: str, task: str, name: str) -> dict[str, Any]:
    """The configuration that all trainings of a task share, on the data set of this name."""
    at, wanted = PROFILES[profile][task], PROFILES[profile][task]["samples"]
    train, test = map(min, wanted, (1_400, 355) if name == "digits" else wanted)
    last = PROFILES[profile].get("channels_last", False)
    plain = {"autocast": None, "channels_last": last, "captured": False}
    config = {
        "task": task,
        "model": at["model"],
        "dataset": _dataset(at, task, name, train, test),
        "train_samples": train,
        "test_samples": test,
        "optimizer": OPTIMIZERS[task],
        "epochs": at["epochs"],
        "cost": "running",
        **(FAST if PROFILES[profile].get("fast") else plain),
    }
    if task == CIFAR:
        return config | {"padding": at["pixels"] // 8, "flip": name != "digits", "stop": None}
    noise = {"sigma": NOISE} if task == PHANTOM else {}
    return config | noise | {"patch": at["pixels"], "stop": PAPER["stop"]}


def controller(profile: str, task: str, strategy: str) -> dict[str, Any]:
    """A strategy's controller: the paper's sizes, rates and epochs at scale."""
    paper, at = PAPER[task], PROFILES[profile][task]
    row = paper.get(strategy, paper["theta"])  # GIVEN, DECAY and noise begin as θ-adaptive
    size, base_lr = batch(profile, task, row["batch"]), at["lr"] * paper["best"]["lr"]
    decay_at = [epochs_of(profile, task, n) for n in paper.get("decay_at", [])]
    decays = {"decay": PAPER["decay"], "decay_at": decay_at}
    if strategy in ("best", "large"):  # that the large batch's rate is the best one's is assumed
        return {"kind": "fixed", "batch": size, "lr": base_lr, **decays}
    if strategy == "linear":
        base = {"base_batch": batch(profile, task, paper["best"]["batch"]), "base_lr": base_lr}
        warmup = min(PAPER["warmup_epochs"], at["epochs"] // 4)
        return {"kind": "linear", "batch": size, **base, "warmup": warmup, **decays}
    grown = {
        "batch": size,
        "max_batch": batch(profile, task, row["max_batch"]),
        "lr": at["lr"] * row["lr"],
    }
    if strategy == "scheduled":  # swaps the decays of the rate for growths of the batch
        return {"kind": "scheduled", **grown, "every": epochs_of(profile, task, row["every"])}
    if strategy == "noise":
        return {"kind": "noise", **grown, **decays, "batches": 8}
    theta = {"kind": "theta", **grown, "tolerance": PAPER["tolerance"]}
    if strategy == DECAY:
        # Section III-E says no patience: ten is `Saturation`'s own, a short training has less.
        rule = {"patience": min(10, max(3, at["epochs"] // 12)), "threshold": SATURATED}
        return theta | {"decay": PAPER["decay"], "saturation": rule}
    if strategy == GIVEN:
        # At the scale of the epochs but where batches are the paper's and grow within the training.
        interval = int(paper["interval"])
        whole = at["batches"] == 1 and 2 * interval <= at["epochs"]
        theta["interval"] = interval if whole else epochs_of(profile, task, interval)
    return theta | decays


def training(
    profile: str, task: str, chosen: Chosen, strategy: str, changes: Config | None = None
) -> Run:
    """The training of a task by a key of `NAMES`, or by one such as ``linear_LARS``."""
    name, _, optimizer = strategy.partition("_")
    config = _base(profile, task, chosen[task]) | {"strategy": strategy}
    config["controller"] = own = controller(profile, task, name)
    if optimizer or strategy in ("best", "linear", "large"):
        config["stands_for"] = PAPER[task][name]["batch"]
    if optimizer:
        config["optimizer"] = OPTIMIZERS[optimizer]
        for rate in own.keys() & {"lr", "base_lr"}:
            own[rate] *= LAYERWISE[optimizer]
    if profile in ("gpu", "paper"):  # said there; the paper leaves both open
        config |= {"last_batch": "full_rate"} | ({} if task == CIFAR else {"psnr": "rgb"})
    config |= changes or {}
    # A variant has options that are younger than the first records of `train`.
    variant = optimizer or "saturation" in own or "last_batch" in config
    label = f"{task}, {NAMES.get(name, name)}{f', {optimizer}' if optimizer else ''}"
    return Run("variant" if variant else "train", config, label=label)


def fixed(profile: str, task: str, chosen: Chosen, size: int) -> Run:
    """The training with one of the paper's batch sizes, its rate in proportion (Figures 1, 2)."""
    paper = PAPER[task]
    for strategy in ("best", "linear"):
        if size == paper[strategy]["batch"]:
            return training(profile, task, chosen, strategy)
    rate = PROFILES[profile][task]["lr"] * paper["best"]["lr"] * size / paper["best"]["batch"]
    own = {"batch": batch(profile, task, size), "lr": rate}
    changes = {"controller": controller(profile, task, "best") | own, "stands_for": size}
    run = training(profile, task, chosen, "best", changes | {"strategy": "fixed"})
    return replace(run, label=f"{task}, batch {own['batch']}")


def strategies(profile: str, chosen: Chosen, task: str) -> list[Run]:
    """A training by each strategy, by two more on CIFAR, else with section III-E's decay."""
    names = (*STRATEGIES, GIVEN, *(MORE if task == CIFAR else (DECAY,)))
    return [training(profile, task, chosen, name) for name in names]


def layerwise(profile: str, chosen: Chosen) -> list[Run]:
    """Linear scaling and θ-adaptive training by SGD, LARS and LAMB (section V)."""
    few = profile in ("quick", LONG)  # two cores have no time for LAMB, which is not the paper's
    optimizers = ["", "_LARS", *([] if few else ["_LAMB"])]
    names = [f"{name}{optimizer}" for optimizer in optimizers for name in ("linear", "theta")]
    return [training(profile, CIFAR, chosen, name) for name in names]


def by_size(profile: str, chosen: Chosen, figure: str) -> Iterator[Run]:
    """The trainings with the batch sizes of Figure 1, 2 or 6; θ-adaptive ones for their K."""
    for task, sizes in _SIZES[figure].items():
        yield from (fixed(profile, task, chosen, size) for size in sizes)
        if figure == "figure1":
            continue
        yield training(profile, task, chosen, "theta")
        rule = PROFILES[profile][task].get("first_epochs")
        for name in ("best", "theta") if rule else ():
            run, epochs = fixed(profile, task, chosen, PAPER[task][name]["batch"]), rule["epochs"]
            yield Run(
                FIRST_EPOCHS,
                run.config | {"epochs": epochs},
                seeds=tuple(range(100, 100 + rule["seeds"])),
                label=f"{run.label}, first {epochs} epochs",
                extra=True,
            )


def stable(profile: str, chosen: Chosen) -> Iterator[Run]:
    """The gradient norms of every task (section III-D), and the trainings with one batch size."""
    for task in TASKS:
        sizes = _doubled(PAPER[task]["best"]["batch"], PAPER[task]["linear"]["batch"])
        config = _base(profile, task, chosen[task]) | {
            "strategy": "norms",
            "controller": controller(profile, task, "best"),
            "sizes": sorted({batch(profile, task, size) for size in sizes}),
            "batches": 4 if profile == "smoke" else 8,
            "after": [0, 2],
        }
        yield Run("norms", config, label=task)
    trainings = [run for figure in _SIZES for run in by_size(profile, chosen, figure)]
    # A training whose batch size changes says nothing about one size, and one that ends early
    # nothing about where it ends.
    whole = [run for run in trainings if run.experiment != FIRST_EPOCHS]
    yield from dict.fromkeys(run for run in whole if "stands_for" in run.config)


def parallel(profile: str, chosen: Chosen) -> list[Run]:
    """Training steps of small models on one and on two processes (Figures 7 to 9, 11)."""
    if profile == LONG:
        return [replace(run, seeds=PROCESSES) for run in parallel("quick", chosen)]
    at = "smoke" if profile == "smoke" else "quick"
    config = {
        "jobs": {task: _job(PROFILES[at][task], task) for task in TASKS},
        "averaging": list(AVERAGING),
        "processes": 2,
        "bucket_bytes": 2**14,
        "messages": [2**n for n in range(10, 21, 2)],
        "warmup": 1,
        "repeats": 2 if profile == "smoke" else 5,
    }
    return [Run("parallel", config, seeds=(0,), label="steps of one and of two processes")]


def _job(at: Config, task: str) -> dict[str, Any]:
    paper = PAPER[task]
    side, channels = at["pixels"], at["model"].get("channels", 3)
    up = side * at["model"].get("scale", 2)
    sizes = _doubled(paper["best"]["batch"], paper["theta"]["max_batch"])
    return {
        "task": task,
        "model": at["model"],
        "optimizer": OPTIMIZERS[task],
        "input": [channels, side, side],
        "target": None if task == CIFAR else [channels, up, up],
        "sizes": sorted({max(2, round(n * at["batches"])) for n in sizes}),
    }
