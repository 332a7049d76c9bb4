"""What is run under each profile, and how its records are picked and read."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import LONG, PROCESSES, Results, Run, claims_of, reported
from repro.experiments.judge import BySeed, NotRun
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER = reported("adaptive")
CIFAR, DIV2K, PHANTOM = "CIFAR", "DIV2K", "Phantom"
TASKS = (CIFAR, DIV2K, PHANTOM)
STRATEGIES = ("best", "linear", "scheduled", "theta")
# Section III-E's SGD; and ours, not the paper's: what is used most today.
MORE = ("large", "noise")
# The paper's K instead of one that is found; and section III-E's decay where the cost saturates.
GIVEN, DECAY = "given", "decay"
NAMES = {
    "best": "best fixed batch",
    "linear": "linear scaling",
    "scheduled": "fixed μ, adaptive b",
    "theta": "θ-adaptive",
    "large": "SGD, large batch",
    "noise": "noise scale",
    GIVEN: "θ-adaptive, paper's K",
    DECAY: "θ-adaptive, decay on saturation",
}
TRAININGS = ("train", "variant")  # experiments
FIRST_EPOCHS = "first_epochs"  # of trainings, and no more; see `peaks.first_epochs`
LAYERWISE = ("LARS", "LAMB")
AVERAGING = ("allreduce", "all_to_all", "reduce_scatter")

_PICTURES = ("div2k", "bsds500", "photos")
_RECORDED = ("bsds500", "div2k", "photos")  # quick and long have records of BSDS500
DATASETS: dict[str, dict[str, tuple[str, ...]]] = {
    "smoke": {CIFAR: ("digits",), DIV2K: ("photos",), PHANTOM: ("phantom",)},
    "quick": {CIFAR: ("cifar10", "digits"), DIV2K: _RECORDED, PHANTOM: ("phantom",)},
    "long": {CIFAR: ("cifar10", "digits"), DIV2K: _RECORDED, PHANTOM: ("phantom",)},
    "gpu": {CIFAR: ("cifar10", "digits"), DIV2K: _PICTURES, PHANTOM: ("phantom",)},
    "paper": {CIFAR: ("cifar10", "digits"), DIV2K: _PICTURES, PHANTOM: ("phantom",)},
}

_RESNET8: dict[str, Any] = {"name": "resnet_cifar", "depth": 8, "width": 8}
_EDSR: dict[str, Any] = {"name": "edsr", "blocks": 2, "width": 16}
_GREY = {"scale": 1, "channels": 1}
_WHOLE = {"autocast": None, "channels_last": False, "captured": False}
_FAST = {"autocast": "bfloat16", "channels_last": True, "captured": True, "benchmark": True}
# On a CPU channels last is faster; bfloat16 is far slower on those without its instructions.
_COMPUTE: dict[str, dict[str, Any]] = {"gpu": _FAST, "long": _WHOLE | {"channels_last": True}}

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
        CIFAR: {
            "model": _RESNET8,
            "samples": (1000, 1000),
            "batches": 1 / 16,
            "lr": 1.0,
            "epochs": 20,
            "pixels": 16,
        },
        DIV2K: {
            "model": _EDSR,
            "samples": (200, 100),
            "batches": 1 / 4,
            "lr": 5.0,
            "epochs": 16,
            "pixels": 12,
        },
        PHANTOM: {
            "model": _EDSR | _GREY,
            "samples": (200, 100),
            "batches": 1 / 4,
            "lr": 5.0,
            "epochs": 16,
            "pixels": 16,
        },
    },
    # The paper's batches, rates and updates an epoch: CIFAR-10 whole and in batches of 128 and
    # more, a quarter of DIV2K's 800 images in batches of a quarter; K, the peak and the stop rule
    # have the epochs that they need.
    "long": {
        CIFAR: {
            "model": _RESNET8,
            "samples": (50_000, 10_000),
            "batches": 1.0,
            "lr": 1.0,
            "epochs": 35,
            "pixels": 16,
        },
        DIV2K: {
            "model": _EDSR,
            "samples": (200, 100),
            "batches": 1 / 4,
            "lr": 1.0,
            "epochs": 1100,
            "pixels": 12,
        },
        PHANTOM: {
            "model": _EDSR | _GREY,
            "samples": (200, 100),
            "batches": 1 / 4,
            "lr": 1.0,
            "epochs": 1100,
            "pixels": 16,
        },
    },
    # The papers' networks, batches and patches. Epochs of super-resolution and of noise are cut so
    # that a training ends within six minutes.
    "gpu": {
        CIFAR: {
            "model": {"name": "resnet20"},
            "samples": (50_000, 10_000),
            "batches": 1.0,
            "lr": 1.0,
            "epochs": 140,
            "pixels": 32,
        },
        DIV2K: {
            "model": {"name": "edsr"},
            "samples": (800, 100),
            "batches": 1.0,
            "lr": 1.0,
            "epochs": 250,
            "pixels": 48,
        },
        PHANTOM: {
            "model": {"name": "edsr", "blocks": 16} | _GREY,
            "samples": (1600, 200),
            "batches": 1.0,
            "lr": 1.0,
            "epochs": 600,
            "pixels": 32,
        },
    },
    "paper": {
        CIFAR: {
            "model": {"name": "resnet20"},
            "samples": (50_000, 10_000),
            "batches": 1.0,
            "lr": 1.0,
            "epochs": 140,
            "pixels": 32,
        },
        DIV2K: {
            "model": {"name": "edsr"},
            "samples": (800, 100),
            "batches": 1.0,
            "lr": 1.0,
            "epochs": 1400,
            "pixels": 48,
        },
        PHANTOM: {
            "model": {"name": "edsr", "blocks": 16} | _GREY,
            "samples": (1600, 200),
            "batches": 1.0,
            "lr": 1.0,
            "epochs": 1400,
            "pixels": 32,
        },
    },
}
_OPTIMIZERS = {
    # Momentum and weight decay are He et al.'s; Adam is EDSR's own (section VI-A).
    CIFAR: {"name": "SGD", "momentum": 0.9, "weight_decay": 1e-4},
    DIV2K: {"name": "Adam", "betas": [0.9, 0.999], "eps": 1e-8},
    PHANTOM: {"name": "Adam", "betas": [0.9, 0.999], "eps": 1e-8},
}
# Momentum and weight decay are SGD's; the trust coefficient and the factor of SGD's rates are ours:
# with them a layer moves by 0.2 to 1.6 % a step, and ten times that by its momentum.
_LAYERWISE: dict[str, dict[str, Any]] = {
    "LARS": {"name": "LARS", "momentum": 0.9, "weight_decay": 1e-4, "trust": 0.01},
    "LAMB": {"name": "LAMB", "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 1e-4},
}
_LAYERWISE_RATE = {"LARS": 1.0, "LAMB": 0.01}
# What the paper leaves open, and may be changed by --set where a run has it; see `CHOICES`.
_CHOSEN = {"last_batch": "full_rate"}
_CHOSEN_PSNR = {"psnr": "rgb"}
CHOICES = {
    "last_batch": {
        "full_rate": "a last, shorter mini-batch of an epoch is trained at the full rate, since "
        "Algorithm 1 knows no other",
        "in_proportion": "a last, shorter mini-batch of an epoch is trained at a rate in "
        "proportion, which keeps equation 2's noise scale",
    },
    "psnr": {
        "rgb": "PSNR is over all colours of whole crops, since section VI-A names neither colour "
        "nor border",
        "rgb_shaved": "PSNR is over all colours without a border of the scale and 6 pixels, as "
        "EDSR's own validation on DIV2K has it",
        "y_shaved": "PSNR is of the luma without a border of as many pixels as the scale, as "
        "super-resolution's benchmarks have it",
    },
}
NOISE = 0.1  # standard deviation of the noise on Phantom, as a share of the full range
SATURATED = 0.01  # least share by which a cost that is not saturated falls; the paper names none
# Of the embedded sets, where they are fewer than asked for.
PHOTOGRAPHS = {"bsds500": 200}  # to train on: several patches an epoch are cut from each
_SMALL_SETS = {"digits": (1_400, 355), "synthetic": (2_048, 512)}


def batch(profile: str, task: str, size: int) -> int:
    """Return the batch size that stands for one of the paper's."""
    return max(2, round(size * SCALE[profile][task]["batches"]))


def epochs_of(profile: str, task: str, epochs: float) -> int:
    """Return the number of epochs that stands for one of the paper's.

    That same number where trainings may last as long as the paper's, or longer by its stop rule.
    """
    share = min(1.0, SCALE[profile][task]["epochs"] / PAPER[task]["epochs"])
    return max(1, round(epochs * share))


def _interval(profile: str, task: str) -> int:
    """Return the paper's K; at the scale of the epochs where batches are no more the paper's."""
    interval: int = PAPER[task]["interval"]
    scale = SCALE[profile][task]
    # Twice, so that the batch grows within the training.
    whole = scale["batches"] == 1 and 2 * interval <= scale["epochs"]
    return interval if whole else epochs_of(profile, task, interval)


def patience_of(profile: str, task: str) -> int:
    """Return in how many epochs without a lower cost it is saturated (section III-E: not said).

    Ten, which is `Saturation`'s own, and a twelfth of a training that is shorter, of three at
    least.
    """
    return min(10, max(3, SCALE[profile][task]["epochs"] // 12))


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
        **_COMPUTE.get(profile, _WHOLE),
    }
    if task == CIFAR:
        return config | {"padding": scale["pixels"] // 8, "flip": name != "digits", "stop": None}
    noise = {"sigma": NOISE} if task == PHANTOM else {}
    return config | noise | {"patch": scale["pixels"], "stop": PAPER["stop"]}


def _rates(profile: str, task: str, strategy: str) -> dict[str, Any]:
    """Return the controller of a strategy, with the paper's sizes, rates and epochs at scale."""
    paper = PAPER[task]
    row, best = paper["theta" if strategy in (GIVEN, DECAY) else strategy], paper["best"]
    factor = SCALE[profile][task]["lr"]
    base = {"lr": factor * best["lr"], "batch": batch(profile, task, best["batch"])}
    decay = [epochs_of(profile, task, n) for n in paper.get("decay_at", [])]
    decays = {"decay": PAPER["decay"], "decay_at": decay}
    size = batch(profile, task, row["batch"])
    if strategy == "large":  # section III-E's; that its rate is the best one's is assumed
        return {"kind": "fixed", "batch": size, "lr": base["lr"], **decays}
    if strategy == "best":
        return {"kind": "fixed", "batch": size, "lr": base["lr"], **decays}
    if strategy == "linear":
        warmup = min(PAPER["warmup_epochs"], SCALE[profile][task]["epochs"] // 4)
        return {
            "kind": "linear",
            "batch": size,
            "base_batch": base["batch"],
            "base_lr": base["lr"],
            "warmup": warmup,
            **decays,
        }
    grown = {
        "batch": size,
        "max_batch": batch(profile, task, row["max_batch"]),
        "lr": factor * row["lr"],
    }
    if strategy == "scheduled":  # swaps the decays of the rate for growths of the batch
        return {"kind": "scheduled", **grown, "every": epochs_of(profile, task, row["every"])}
    theta = {"kind": "theta", **grown, "tolerance": PAPER["tolerance"]}
    if strategy == DECAY:
        rule = {"patience": patience_of(profile, task), "threshold": SATURATED}
        return theta | {"decay": PAPER["decay"], "saturation": rule}
    if strategy == GIVEN:
        return theta | decays | {"interval": _interval(profile, task)}
    return theta | decays


def training(profile: str, task: str, chosen: Mapping[str, str], strategy: str) -> Run:
    """Return the training of a task by a strategy.

    One of the paper's four; `GIVEN` with the paper's K, or `DECAY` where the cost saturates; on
    CIFAR ``large``, SGD at the large batch without scaling (section III-E), or ``noise``, which is
    not in the paper.
    """
    paper = "theta" if strategy == "noise" else strategy
    controller = _rates(profile, task, paper)
    if strategy == "noise":
        controller = {name: value for name, value in controller.items() if name != "tolerance"}
        controller |= {"kind": "noise", "batches": 8}
    config = _base(profile, task, chosen) | {"strategy": strategy, "controller": controller}
    if strategy in ("best", "linear", "large"):
        config["stands_for"] = PAPER[task][strategy]["batch"]
    return _training(profile, config, f"{task}, {NAMES[strategy]}")


def _training(profile: str, config: dict[str, Any], label: str) -> Run:
    """Return the run of a configuration; what `train` does not know is a ``variant``."""
    if profile in ("gpu", "paper"):
        config = config | _CHOSEN | ({} if config["task"] == CIFAR else _CHOSEN_PSNR)
    variant = config["optimizer"]["name"] in LAYERWISE or "saturation" in config["controller"]
    return Run("variant" if variant or "last_batch" in config else "train", config, label=label)


def left_out(profile: str, optimizer: str) -> bool:
    """Whether two cores have no time for an optimizer that the paper does not name."""
    return profile in ("quick", LONG) and optimizer == "LAMB"


def layerwise(profile: str, chosen: Mapping[str, str], optimizer: str, strategy: str) -> Run:
    """Return the training of CIFAR by ``linear`` or ``theta`` with LARS or LAMB (section V)."""
    controller = _rates(profile, CIFAR, strategy)
    for name in ("lr", "base_lr"):
        if name in controller:
            controller[name] *= _LAYERWISE_RATE[optimizer]
    changed = {
        "strategy": f"{strategy}_{optimizer}",
        "controller": controller,
        "optimizer": _LAYERWISE[optimizer],
        "stands_for": PAPER[CIFAR][strategy]["batch"],
    }
    label = f"{CIFAR}, {NAMES[strategy]}, {optimizer}"
    return _training(profile, _base(profile, CIFAR, chosen) | changed, label)


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
    changed = {"strategy": "fixed", "controller": controller, "stands_for": size}
    label = f"{task}, batch {controller['batch']}"
    return _training(profile, _base(profile, task, chosen) | changed, label)


def norms(profile: str, task: str, chosen: Mapping[str, str]) -> Run:
    """Return the gradient norms by which the maximum stable batch size is found (III-D)."""
    paper = PAPER[task]
    sizes = [paper["best"]["batch"]]
    while sizes[-1] < paper["linear"]["batch"]:
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
        label=task,
    )


def parallel(profile: str) -> Run:
    """Return the measurement of training steps on one and two processes (Figures 7 to 9, 11).

    Processes on CPUs, as the paper's, and of small models whatever the profile: one core is too
    slow for the paper's. Under `long` quick's, launched several times.
    """
    if profile == LONG:
        return replace(parallel("quick"), seeds=PROCESSES)
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
            "repeats": 2 if profile == "smoke" else 5,
        },
        seeds=(0,),
        label="steps of one and of two processes",
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


def trained(results: Results, task: str, strategy: str) -> list[Record]:
    """Return the trainings of a strategy that ended, diverged ones too."""
    trainings = _trainings(results, task, strategy)
    return [record for record in trainings if record.metrics["completed"]]


def diverged(results: Results, task: str, strategy: str) -> int:
    """Return how many trainings of a strategy ended in numbers that are not finite."""
    return sum(record.metrics["diverged"] for record in _trainings(results, task, strategy))


def _trainings(results: Results, task: str, strategy: str) -> list[Record]:
    return [r for name in TRAININGS for r in results.ok(name, task=task, strategy=strategy)]


def by_batch(results: Results, task: str) -> dict[int, list[Record]]:
    """Return the trainings with one batch size all along, by that size, without diverged ones."""
    by_size: dict[int, list[Record]] = {}
    for strategy in ("best", "fixed", "linear"):
        for record in trained(results, task, strategy):
            if not record.metrics["diverged"]:
                by_size.setdefault(record.config["controller"]["batch"], []).append(record)
    return dict(sorted(by_size.items()))


def metric(task: str) -> str:
    """Name the metric of a task in the records."""
    return "accuracy" if task == CIFAR else "psnr"


def unit(task: str) -> str:
    """Return the unit of differences of a task's metric."""
    return "points" if task == CIFAR else "dB"


def heading(task: str) -> str:
    """Name the metric of a task with its unit."""
    return "accuracy (%)" if task == CIFAR else "PSNR (dB)"


def kept_up(task: str) -> float:
    """Return by how much the paper lets a metric fall that it calls maintained: claims' margin.

    Of accuracies the 1 % that it names, in points; of PSNR the largest gap that it calls almost
    the same, in dB.
    """
    claim = claims_of("adaptive")["figure10" if task == CIFAR else "figure4"]["keeps_up"]
    assert isinstance(claim.margin, float)
    return claim.margin


def final(results: Results, records: Sequence[Record], name: str) -> BySeed:
    """Return a quantity after the last epoch, one value for each seed."""
    return results.cell(records, lambda record: record.metrics[name][-1])


def has_learned(results: Results, task: str) -> None:
    """Refuse a setting whose best fixed batch learned so little that ends cannot be compared.

    Of the paper's value it reaches less than half the accuracy, or ends 10 dB below the PSNR, at
    ten times the squared error.

    Raises:
        NotRun: It is such a setting.
    """
    best = [r for r in trained(results, task, "best") if not r.metrics["diverged"]]
    ends = [record.metrics[metric(task)][-1] for record in best]
    paper = PAPER[task]["best"]["value"]
    if ends and np.mean(ends) < (paper / 2 if task == CIFAR else paper - 10):
        shown = "%" if task == CIFAR else "dB"
        raise NotRun(
            f"our best fixed batch ends at {np.mean(ends):.1f} {shown} (paper {paper:.1f}): it has "
            "learned too little for a comparison to tell"
        )


def updates_of(records: Sequence[Record]) -> list[int]:
    """Return the parameter updates of each training: its averagings of gradients."""
    return [sum(record.metrics["updates"]) for record in records]


def curves(records: Sequence[Record], name: str) -> list[list[float]]:
    """Return a quantity by epoch, NaN where it is not defined, all cut to the shortest."""
    rows = [record.metrics[name] for record in records]
    shortest = min(map(len, rows), default=0)
    return [[np.nan if v is None else float(v) for v in row[:shortest]] for row in rows]


def consecutive(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return batch sizes and for how many epochs in a row each was used."""
    return [(size, len(list(epochs))) for size, epochs in itertools.groupby(sizes)]


def span(values: Sequence[float]) -> str:
    """Return counts as one number or as their range."""
    if not values:
        return DASH
    low, high = min(values), max(values)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def printed(row: Mapping[str, Any]) -> str:
    """Return the accuracy or PSNR that the paper prints of a strategy."""
    if "value" not in row:
        return DASH
    spread = f" ± {row['std']:.1f}" if "std" in row else ""
    return f"{row['value']:.2f}{spread}"


def ticks_of_two(axis: "Axes", points: Iterable[float], label: str) -> None:
    """Make an axis of batch sizes or nodes logarithmic, with a tick at every point."""
    axis.set_xscale("log", base=2)
    ticks = sorted(set(points))
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel(label)
