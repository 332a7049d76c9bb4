"""What is run under each profile: tasks, strategies, batch sizes, extents."""

from collections.abc import Mapping
from typing import Any

from repro.experiments.design import Run, reported

PAPER = reported("adaptive")
CIFAR, DIV2K, PHANTOM = "CIFAR", "DIV2K", "Phantom"
TASKS = (CIFAR, DIV2K, PHANTOM)
STRATEGIES = ("best", "linear", "scheduled", "theta")
AVERAGING = ("allreduce", "all_to_all", "reduce_scatter")

_PICTURES = ("div2k", "bsds500", "photos")
DATASETS: dict[str, dict[str, tuple[str, ...]]] = {
    "smoke": {CIFAR: ("digits",), DIV2K: ("photos",), PHANTOM: ("phantom",)},
    "quick": {CIFAR: ("cifar10", "digits"), DIV2K: _PICTURES, PHANTOM: ("phantom",)},
    "gpu": {CIFAR: ("cifar10", "digits"), DIV2K: _PICTURES, PHANTOM: ("phantom",)},
    "paper": {CIFAR: ("cifar10", "digits"), DIV2K: _PICTURES, PHANTOM: ("phantom",)},
}

_RESNET8: dict[str, Any] = {"name": "resnet_cifar", "depth": 8, "width": 8}
_EDSR: dict[str, Any] = {"name": "edsr", "blocks": 2, "width": 16}
_BASELINE: dict[str, Any] = {"name": "edsr", "blocks": 16, "width": 64, "residual_scale": 1.0}
_GREY = {"scale": 1, "channels": 1}
_WHOLE = {"autocast": None, "channels_last": False, "captured": False}
_FAST = {"autocast": "bfloat16", "channels_last": True, "captured": True}

# For each task and profile: the model; samples of an epoch and of the test; the share of the
# paper's batch sizes; a factor of its rates; epochs; pixels of the images or patches.
_TINY = {"batches": 1 / 8, "samples": (64, 32), "epochs": 4, "lr": 5.0}
SCALE: dict[str, dict[str, dict[str, Any]]] = {
    "smoke": {
        CIFAR: _TINY
        | {"model": _RESNET8 | {"width": 4}, "pixels": 8, "batches": 1 / 32, "lr": 1.0},
        DIV2K: _TINY | {"model": _EDSR | {"blocks": 1, "width": 8}, "pixels": 8},
        PHANTOM: _TINY | {"model": _EDSR | _GREY | {"blocks": 1, "width": 8}, "pixels": 8},
    },
    "quick": {
        CIFAR: {"model": _RESNET8, "samples": (1000, 1000), "batches": 1 / 16, "lr": 1.0,
                "epochs": 20, "pixels": 16},
        DIV2K: {"model": _EDSR, "samples": (200, 100), "batches": 1 / 4, "lr": 5.0, "epochs": 16,
                "pixels": 12},
        PHANTOM: {"model": _EDSR | _GREY, "samples": (200, 100), "batches": 1 / 4, "lr": 5.0,
                  "epochs": 16, "pixels": 16},
    },
    "gpu": {
        CIFAR: {"model": {"name": "resnet20"}, "samples": (50_000, 10_000), "batches": 1.0,
                "lr": 1.0, "epochs": 140, "pixels": 32},
        DIV2K: {"model": _BASELINE, "samples": (800, 100), "batches": 1.0, "lr": 1.0,
                "epochs": 120, "pixels": 48},
        PHANTOM: {"model": _BASELINE | _GREY, "samples": (1600, 200), "batches": 1.0, "lr": 1.0,
                  "epochs": 120, "pixels": 32},
    },
    "paper": {
        CIFAR: {"model": {"name": "resnet20"}, "samples": (50_000, 10_000), "batches": 1.0,
                "lr": 1.0, "epochs": 140, "pixels": 32},
        DIV2K: {"model": {"name": "edsr"}, "samples": (800, 100), "batches": 1.0, "lr": 1.0,
                "epochs": 1400, "pixels": 48},
        PHANTOM: {"model": {"name": "edsr", "blocks": 16} | _GREY, "samples": (1600, 200),
                  "batches": 1.0, "lr": 1.0, "epochs": 1400, "pixels": 32},
    },
}  # fmt: skip
_OPTIMIZERS = {
    # Momentum and weight decay are He et al.'s; Adam is EDSR's own (section VI-A).
    CIFAR: {"name": "SGD", "momentum": 0.9, "weight_decay": 1e-4},
    DIV2K: {"name": "Adam", "betas": [0.9, 0.999], "eps": 1e-8},
    PHANTOM: {"name": "Adam", "betas": [0.9, 0.999], "eps": 1e-8},
}
NOISE = 0.1  # standard deviation of the noise on Phantom, as a share of the full range
# Of the embedded sets, where they are fewer than asked for.
_SMALL_SETS = {"digits": (1_400, 355), "bsds500": (200, 200), "synthetic": (2_048, 512)}


def batch(profile: str, task: str, size: int) -> int:
    """Return the batch size that stands for one of the paper's."""
    return max(2, round(size * SCALE[profile][task]["batches"]))


def epochs_of(profile: str, task: str, epochs: float) -> int:
    """Return the number of epochs that stands for one of the paper's."""
    return max(1, round(epochs * SCALE[profile][task]["epochs"] / PAPER[task]["epochs"]))


def _samples(profile: str, task: str, name: str) -> tuple[int, int]:
    wanted = SCALE[profile][task]["samples"]
    train, test = _SMALL_SETS.get(name, wanted)
    return min(wanted[0], train), min(wanted[1], test)


def _dataset(profile: str, task: str, name: str) -> dict[str, Any]:
    scale = SCALE[profile][task]
    train, test = _samples(profile, task, name)
    if task == CIFAR:
        side = {} if name == "digits" and scale["pixels"] == 8 else {"image_size": scale["pixels"]}
        if name == "cifar10":
            side = side if scale["pixels"] != 32 else {}
            few = {"per_class": train // 10} if train < 10_000 else {}
            return {"name": name, **side, **few}
        return {"name": name, **side}
    if task == PHANTOM:
        size = PAPER[PHANTOM]["size"] if scale["pixels"] == PAPER[PHANTOM]["patch"] else 64
        return {"name": name, "image_size": size, "train": train, "test": test}
    if name == "photos":
        each = {"train_per_class": -(-train // 8), "test_per_class": -(-test // 8)}
        return {"name": name, "image_size": 2 * scale["pixels"], **each}
    if name == "synthetic":
        return {"name": name, "image_size": 4 * scale["pixels"]}
    return {"name": name}


def _base(profile: str, task: str, chosen: Mapping[str, str]) -> dict[str, Any]:
    scale = SCALE[profile][task]
    name = chosen[task]
    train, test = _samples(profile, task, name)
    config: dict[str, Any] = {
        "task": task,
        "model": scale["model"],
        "dataset": _dataset(profile, task, name),
        "train_samples": train,
        "test_samples": test,
        "optimizer": _OPTIMIZERS[task],
        "epochs": scale["epochs"],
        "cost": "running",
        **(_FAST if profile == "gpu" else _WHOLE),
    }
    if task == CIFAR:
        return config | {"padding": scale["pixels"] // 8, "flip": name != "digits", "stop": None}
    noise = {"sigma": NOISE} if task == PHANTOM else {}
    return config | noise | {"patch": scale["pixels"], "stop": PAPER["stop"]}


def _rates(profile: str, task: str, strategy: str) -> dict[str, Any]:
    """Return the controller of a strategy, with the paper's sizes, rates and epochs at scale."""
    paper = PAPER[task]
    own, best = paper[strategy], paper["best"]
    factor = SCALE[profile][task]["lr"]
    base = {"lr": factor * best["lr"], "batch": batch(profile, task, best["batch"])}
    decay = [epochs_of(profile, task, n) for n in paper.get("decay_at", [])]
    decays = {"decay": PAPER["decay"], "decay_at": decay}
    size = batch(profile, task, own["batch"])
    if strategy == "large":  # section III-E's; that its rate is the best one's is assumed
        return {"kind": "fixed", "batch": size, "lr": base["lr"], **decays}
    if strategy == "best":
        return {"kind": "fixed", "batch": size, "lr": base["lr"], **decays}
    if strategy == "linear":
        warmup = min(PAPER["warmup_epochs"], SCALE[profile][task]["epochs"] // 4)
        return {"kind": "linear", "batch": size, "base_batch": base["batch"],
                "base_lr": base["lr"], "warmup": warmup, **decays}  # fmt: skip
    grown = {"batch": size, "max_batch": batch(profile, task, own["max_batch"]),
             "lr": factor * own["lr"]}  # fmt: skip
    if strategy == "scheduled":  # swaps the decays of the rate for growths of the batch
        return {"kind": "scheduled", **grown, "every": epochs_of(profile, task, own["every"])}
    return {"kind": "theta", **grown, **decays, "tolerance": PAPER["tolerance"]}


def training(profile: str, task: str, chosen: Mapping[str, str], strategy: str) -> Run:
    """Return the training of a task by a strategy.

    One of the paper's four; on CIFAR ``large``, SGD at the large batch without scaling (section
    III-E), or ``noise``, which is not in the paper.
    """
    paper = "theta" if strategy == "noise" else strategy
    controller = _rates(profile, task, paper)
    if strategy == "noise":
        controller = {name: value for name, value in controller.items() if name != "tolerance"}
        controller |= {"kind": "noise", "batches": 8}
    config = _base(profile, task, chosen) | {"strategy": strategy, "controller": controller}
    if strategy in ("best", "linear", "large"):
        config["stands_for"] = PAPER[task][strategy]["batch"]
    return Run("train", config)


def fixed(profile: str, task: str, chosen: Mapping[str, str], size: int) -> Run:
    """Return the training of a task with one batch size, its rate in proportion (Figures 1, 2)."""
    best, linear = PAPER[task]["best"], PAPER[task]["linear"]
    if size == best["batch"]:
        return training(profile, task, chosen, "best")
    if size == linear["batch"]:
        return training(profile, task, chosen, "linear")
    controller = _rates(profile, task, "best") | {
        "batch": batch(profile, task, size),
        "lr": SCALE[profile][task]["lr"] * best["lr"] * size / best["batch"],
    }
    own = {"strategy": "fixed", "controller": controller, "stands_for": size}
    return Run("train", _base(profile, task, chosen) | own)


def norms(profile: str, task: str, chosen: Mapping[str, str]) -> Run:
    """Return the gradient norms by which the maximum stable batch size is found (III-D)."""
    own = PAPER[task]
    sizes = [own["best"]["batch"]]
    while sizes[-1] < own["linear"]["batch"]:
        sizes.append(2 * sizes[-1])
    config = _base(profile, task, chosen)
    return Run(
        "norms",
        config
        | {
            "strategy": "norms",
            "controller": _rates(profile, task, "best"),
            "sizes": sorted({batch(profile, task, size) for size in sizes}),
            "batches": 4 if profile == "smoke" else 8,
            "after": [0, 2],
        },
    )


def parallel(profile: str) -> Run:
    """Return the measurement of training steps on one and two processes (Figures 7 to 9, 11).

    Processes on CPUs, as the paper's, and of small models whatever the profile: one core is too
    slow for the paper's.
    """
    at = "smoke" if profile == "smoke" else "quick"
    return Run(
        "parallel",
        {
            "jobs": {task: _job(at, task) for task in TASKS},
            "averaging": list(AVERAGING),
            "processes": 2,
            "bucket_bytes": 2**14,
            "messages": [2**n for n in range(10, 21, 2)],
            "warmup": 1,
            "repeats": 3 if profile == "smoke" else 5,
        },
        seeds=(0,),
    )


def _job(profile: str, task: str) -> dict[str, Any]:
    scale, paper = SCALE[profile][task], PAPER[task]
    sizes = [paper["best"]["batch"]]  # and all that a growing batch takes
    while sizes[-1] < paper["theta"]["max_batch"]:
        sizes.append(2 * sizes[-1])
    side, channels = scale["pixels"], scale["model"].get("channels", 3)
    up = side * scale["model"].get("scale", 2)
    return {
        "task": task,
        "model": scale["model"],
        "optimizer": _OPTIMIZERS[task],
        "input": [channels, side, side],
        "target": None if task == CIFAR else [channels, up, up],
        "sizes": sorted({batch(profile, task, n) for n in sizes}),
    }
