"""The runs of the study under each profile; ``paper.toml`` has sizes, extents and labels.

There is no paper: the questions are this package's own, between the five. What was predicted of
them, before there were records, is in ``paper.toml``.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from repro.experiments import design
from repro.experiments.design import Chosen, Run, paper_toml

_TOML = paper_toml("together")
PROFILES = _TOML["profiles"]
LABELS: Mapping[str, str] = _TOML["methods"]
STRATEGIES: Mapping[str, str] = _TOML["strategies"]

# ---- Part 1: under one memory limit

LIMIT, FORETELL = "limit", "foretell"
NETWORKS = RESNET, DENSENET, UNET, TRANSFORMER = ("ResNet-18", "DenseNet", "U-Net", "Transformer")
BATCHNORM = (RESNET, DENSENET, UNET)  # the networks that look at more than one sample
TUNED = ("tuned_mbs", "tuned_outofcore")


def modes_of(profile: str, network: str) -> list[str]:
    """The methods that train a network."""
    if profile == "smoke" and network != RESNET:
        return ["undivided", "outofcore" if network == UNET else "mbs"]
    card = profile in ("gpu", "paper")
    left_out = {"outofcore_file"} if card else set()  # only a CPU swaps to a file
    if network not in BATCHNORM:
        left_out.add("mbs_deferred")
    if network == TRANSFORMER or (network != RESNET and not card):
        left_out.update(TUNED)
    return [mode for mode in LABELS if mode not in left_out]


def under_limit(profile: str) -> Iterator[Run]:
    """A run for each network and method, of all sizes of mini-batch."""
    sizes = PROFILES[profile]
    for network in NETWORKS:
        for mode in modes_of(profile, network):
            config = _network(profile, network) | {
                "mode": mode,
                "multiples": sizes.get("fewer", {}).get(mode, sizes["multiples"]),
                "warmup": sizes["warmup"],  # after the steps that are watched
                "repeats": sizes["repeats"],
                **({"policy": sizes["policy"]} if mode in TUNED else {}),
            }
            yield Run(LIMIT, config, seeds=(0,), label=f"{network}, {LABELS[mode]}")


def predictions(profile: str) -> Iterator[Run]:
    """A run for each network, which predicts of all its methods but tuned ones."""
    sizes = PROFILES[profile]
    for network in NETWORKS:
        modes = [mode for mode in modes_of(profile, network) if mode not in TUNED]
        config = _network(profile, network) | {"modes": modes}
        config |= {name: sizes[name] for name in ("multiples", "probe_s")}
        yield Run(FORETELL, config, seeds=(0,), label=f"{network}, by advise")


def _network(profile: str, network: str) -> dict[str, Any]:
    sizes = PROFILES[profile]
    own = _TOML["models"][sizes["models"]][network]
    return {"network": network, **own, "fits": sizes["fits"], "threads": sizes.get("threads")}


# ---- Part 2: towards one accuracy

CIFAR = "CIFAR"
TRAIN, PACE = "train", "pace"
ALONE = ("linear", "theta", "noise", "dual", "hybrid")
TOGETHER = ("theta_mbs", "dual_mbs", "cyclic_theta")
_DIGITS = (1000, 400, 300)  # the set has no more


def trainings(profile: str, chosen: Chosen) -> list[Run]:
    """Every strategy at every rate, and a run that times a step."""
    sizes = PROFILES[profile]
    epochs, side = sizes["epochs"], sizes["sides"][-1]
    common = {"model": sizes["model"], "sides": sizes["sides"], **sizes.get("compute", {})}
    shared = {
        **common,
        **_images(profile, chosen[CIFAR]),
        **_TOML["training"],
        **dict(zip(("small", "memory", "large"), sizes["batches"], strict=True)),
        "padding": side // 8,
        "flip": chosen[CIFAR] != "digits",
        "epochs": epochs,
        "warmup": max(1, epochs // 6),
        "decay_at": max(2, 4 * epochs // 5) if epochs > 4 else 2,
    }
    turns = {"warmup": 1, "repeats": sizes["repeats"], "threads": sizes.get("threads")}
    paced = {**common, **turns, "sizes": sizes["batches"]}
    planned = [
        Run(TRAIN, {"strategy": name, "rate": rate, **shared}, label=f"{label}, rate {rate:g}")
        for name, label in STRATEGIES.items()
        for rate in sorted([*sizes["rates"], *sizes.get("beyond", {}).get(name, ())])
    ]
    return [*planned, Run(PACE, paced, seeds=(0,), label="steps by size and resolution")]


def _images(profile: str, name: str) -> dict[str, Any]:
    """Which images are loaded, and how many train, are held out and test."""
    train, held_out, test = counts = PROFILES[profile]["images"]
    side = PROFILES[profile]["sides"][-1]
    dataset: dict[str, Any] = {"name": name}
    if name == "cifar10":
        dataset |= {"image_size": side} if side != 32 else {}
        dataset |= {"per_class": (train + held_out) // 10} if train < 10_000 else {}
    else:
        dataset |= {} if profile == "smoke" else {"image_size": side}
        train, held_out, test = map(min, counts, _DIGITS)
    extent = {"train_samples": train, "held_out": held_out, "test_samples": test}
    return {"dataset": dataset, **extent}


artefact = partial(design.artefact, "together")
