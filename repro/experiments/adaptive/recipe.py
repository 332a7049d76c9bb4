"""The paper's recipe beside ours, item by item: what the notebook shows as a table.

All of it is computed from `settings` and ``paper.toml``.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from repro.experiments.adaptive import settings
from repro.experiments.adaptive.settings import (
    CHOICES,
    CIFAR,
    DATASETS,
    DECAY,
    DIV2K,
    GIVEN,
    LAYERWISE,
    PAPER,
    PHANTOM,
    SCALE,
    TASKS,
)
from repro.experiments.design import LONG, SEEDS
from repro.experiments.recipes import NOT_STATED, compared

_SMALL = "two cores have five minutes (long: hours)"
_MODELS = {
    CIFAR: "ResNet-20",
    DIV2K: "EDSR",
    PHANTOM: "modified EDSR, 16 residual blocks",
}
_FIXED = ("best", "linear")
_GROWING = ("scheduled", "theta")

Config = Mapping[str, Any]


def recipe() -> list[dict[str, str]]:
    """Return a row for each item of each task.

    Returns:
        Rows with the columns item, paper, paper profile, gpu, long, quick, why they differ.
    """
    rows = [row for task in TASKS for row in _of_task(task)]
    rows += [
        compared(
            f"{CIFAR}: {optimizer}",
            "goes together, no recipe given" if optimizer == "LARS" else "not named",
            lambda profile, optimizer=optimizer: _layerwise(profile, optimizer),  # type: ignore[misc]
            "trust, decay and rates are ours: a layer moves by about a percent a step",
        )
        for optimizer in LAYERWISE
    ]
    return rows


def _config(profile: str, task: str, strategy: str) -> Config:
    chosen = {name: choices[0] for name, choices in DATASETS[profile].items()}
    return settings.training(profile, task, chosen, strategy).config


def _of_task(task: str) -> list[dict[str, str]]:
    paper, rows = PAPER[task], []

    def add(item: str, stated: str, ours: Callable[[Config], str], why: str = "") -> None:
        """Add an item that every strategy has alike."""
        row = compared(f"{task}: {item}", stated, lambda p: ours(_config(p, task, "theta")), why)
        rows.append(row)

    def by(
        item: str, strategy: str, stated: str, ours: Callable[[Config], str], why: str = ""
    ) -> None:
        name = f"{task}: {item}, {settings.NAMES[strategy]}"
        rows.append(compared(name, stated, lambda p: ours(_config(p, task, strategy)), why))

    which = "which EDSR is not stated: its final one is taken; "
    add("model", _MODELS[task], _model, f"{'' if task == CIFAR else which}{_SMALL}")
    stands_in = "BSDS500 or embedded photographs where DIV2K is not at hand; " * (task == DIV2K)
    add(
        "training images",
        f"{paper['samples']:,}",
        lambda c: f"{c['train_samples']:,} of {c['dataset']['name']}",
        f"{stands_in}{_SMALL}",
    )
    add(
        "images to validate",
        NOT_STATED,
        lambda c: f"{c['test_samples']:,}",
        _VALIDATED[task],
    )
    if task == CIFAR:
        add(
            "augmentation",
            NOT_STATED,
            lambda c: f"padding {c['padding']}, flips" if c["flip"] else f"padding {c['padding']}",
            "He et al.'s, as the network",
        )
    else:
        add("patch", f"{paper['patch']}×{paper['patch']}", lambda c: f"{c['patch']}", _SMALL)
        add("augmentation", NOT_STATED, lambda c: "flips, transposition", "EDSR's")
        add(
            "scale of the inputs",
            NOT_STATED if task == DIV2K else "as the targets",
            lambda c: f"{c['model'].get('scale', 2)}",
            "twice, the first that EDSR trains" if task == DIV2K else "",
        )
    if task == PHANTOM:
        add(
            "noise to remove",
            NOT_STATED,
            lambda c: f"{c['sigma']:g} of the full range",
            f"ours: a PSNR of {-20 * math.log10(settings.NOISE):g} dB before it is removed",
        )
    he = "SGD; momentum and weight decay are He et al.'s" * (task == CIFAR)
    add("optimizer", NOT_STATED if he else "Adam, as EDSR's", _optimizer, he)
    factor = SCALE["quick"][task]["lr"]
    faster = f"; quick takes {factor:g} times the rates, for few epochs" if factor != 1 else ""
    for strategy in (*_FIXED, *_GROWING):
        theirs = paper[strategy]
        sizes = f"{theirs['batch']}" + (
            f" ~ {theirs['max_batch']}" if "max_batch" in theirs else ""
        )
        by("batch size", strategy, sizes, _sizes, _scaled(task))
        grown = theirs["lr"] * theirs.get("max_batch", theirs["batch"]) / theirs["batch"]
        rate = f"{theirs['lr']:g}" + (f" ~ {grown:g}" if "max_batch" in theirs else "")
        printed = "the tables print growing rates, the text fixes them" * (strategy == "scheduled")
        by("rate", strategy, rate, _rate, f"{printed}{faster}".removeprefix("; "))
    by(
        "warm-up",
        "linear",
        f"gradual, {PAPER['warmup_epochs']} epochs",
        lambda c: f"{c['controller']['warmup']} epochs",
        "a quarter of a training at most",
    )
    by(
        "growth",
        "scheduled",
        f"every {paper['scheduled']['every']} epochs" if task == CIFAR else NOT_STATED,
        lambda c: f"every {c['controller']['every']} epochs",
        _in_share(task)
        + ("" if task == CIFAR else "; the share of section VI-C's training, ASSUMED"),
    )
    by(
        "K",
        "theta",
        f"{paper['interval']}, read off a curve",
        lambda c: f"found, where θ changes by at most {100 * c['controller']['tolerance']:g} %",
        "Algorithm 1 finds it; beside it the paper's is run",
    )
    by(
        "K",
        GIVEN,
        f"{paper['interval']}",
        lambda c: f"{c['controller']['interval']}",
        _in_share(task),
    )
    decays = paper.get("decay_at")
    add(
        "decay of the rate",
        f"×{PAPER['decay']:g} after {' and '.join(map(str, decays))} epochs"
        if decays
        else NOT_STATED,
        lambda c: _decays(c["controller"]),
        _in_share(task) if decays else "none, as EDSR's own come after more updates than these",
    )
    if not decays:
        by(
            "decay of the rate",
            DECAY,
            "where the cost saturates (section III-E), when is not stated",
            _saturation,
            "ours: saturated where the cost falls no more",
        )
    add(
        "epochs",
        f"{paper['epochs']:,}",
        lambda c: f"{'at most ' if c['stop'] else ''}{c['epochs']:,}",
        _SMALL
        if task == CIFAR
        else f"{paper['epochs']:,} are the proposed method's, the longest "
        f"{max(paper[s]['epochs'] for s in (*_FIXED, *_GROWING)):,}; {_SMALL}, a GPU 25",
    )
    if task != CIFAR:
        add(
            "stop rule",
            _stop(PAPER["stop"]),
            lambda c: _stop(c["stop"]),
            "",
        )
    add(
        "metric",
        "validation accuracy" if task == CIFAR else "1-crop validation PSNR",
        lambda c: "validation accuracy" if task == CIFAR else "PSNR of a central crop of each",
        "",
    )
    if task != CIFAR:
        add(
            "colour and border of PSNR",
            NOT_STATED,
            lambda c: c.get("psnr", next(iter(CHOICES["psnr"]))),
            f"{_ground('psnr')}; others by --set psnr={'|'.join([*CHOICES['psnr']][1:])}",
        )
    add(
        "last, shorter mini-batch",
        NOT_STATED,
        lambda c: c.get("last_batch", next(iter(CHOICES["last_batch"]))),
        f"{_ground('last_batch')}; others by --set last_batch="
        f"{'|'.join([*CHOICES['last_batch']][1:])}",
    )
    add(
        "F of θ",
        NOT_STATED,
        lambda c: {"running": "mean of the mini-batches' losses"}[c["cost"]],
        "it costs nothing, and is what a curve of the training cost shows",
    )
    add(
        "precision",
        NOT_STATED,
        lambda c: c["autocast"] or "float32",
        "gpu takes what such a device is made for",
    )
    seeds = "± of the accuracies; of how many is not stated" if task == CIFAR else NOT_STATED
    rows.append(
        compared(
            f"{task}: seeds",
            seeds,
            lambda profile: f"{len(SEEDS[profile])}",
            "three are the least that tell a spread; long has more",
        )
    )
    return rows


_VALIDATED = {
    CIFAR: "the test set, or a part of it",
    DIV2K: "the validation set that DIV2K ships, as EDSR's; as many of what stands in",
    PHANTOM: "an eighth of the training images, by quick and long a half",
}


def _in_share(task: str) -> str:
    return f"the same share of the {PAPER[task]['epochs']:,} epochs, of one at least"


def _ground(key: str) -> str:
    """Return what speaks for the first choice, from what captions say."""
    return next(iter(CHOICES[key].values()))


def _scaled(task: str) -> str:
    """Say which profiles take a share of the paper's batch sizes."""
    shares = {p: SCALE[p][task]["batches"] for p in ("quick", LONG)}
    return "; ".join(f"{p}: 1/{round(1 / n)} of the sizes" for p, n in shares.items() if n != 1)


def _model(config: Config) -> str:
    options = ", ".join(f"{k} {v}" for k, v in config["model"].items() if k != "name")
    return f"{config['model']['name']}{f' ({options})' if options else ''}"


def _optimizer(config: Config) -> str:
    optimizer = config["optimizer"]
    return ", ".join(
        [optimizer["name"], *(f"{k} {v}" for k, v in optimizer.items() if k != "name")]
    )


def _sizes(config: Config) -> str:
    controller = config["controller"]
    return f"{controller['batch']}" + (
        f" ~ {controller['max_batch']}" if "max_batch" in controller else ""
    )


def _rate(config: Config) -> str:
    controller = config["controller"]
    if controller["kind"] == "linear":
        return f"{controller['base_lr'] * controller['batch'] / controller['base_batch']:g}"
    if controller["kind"] != "theta":
        return f"{controller['lr']:g}"
    grown = controller["lr"] * controller["max_batch"] / controller["batch"]
    return f"{controller['lr']:g} ~ {grown:g}"


def _decays(controller: Config) -> str:
    if not controller["decay_at"]:
        return "none"
    listed = " and ".join(map(str, controller["decay_at"]))
    return f"×{controller['decay']:g} after {listed} epochs"


def _saturation(config: Config) -> str:
    rule = config["controller"]["saturation"]
    return (
        f"×{config['controller']['decay']:g} after {rule['patience']} epochs without a fall by "
        f"{100 * rule['threshold']:g} %"
    )


def _stop(rule: Config) -> str:
    return f"PSNR not up by {rule['least']:g} dB in {rule['patience']} epochs"


def _layerwise(profile: str, optimizer: str) -> str:
    chosen = {name: choices[0] for name, choices in DATASETS[profile].items()}
    if settings.left_out(profile, optimizer):
        return "not run"
    config = settings.layerwise(profile, chosen, optimizer, "theta").config
    return f"{_optimizer(config)}; rate {_rate(config)}"
