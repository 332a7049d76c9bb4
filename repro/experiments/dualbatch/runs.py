"""The runs of each artefact under each profile; the tables of numbers are in ``paper.toml``."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from repro.experiments.design import LONG, PROCESSES, Chosen, Run, paper_toml

_TOML = paper_toml("dualbatch")
PAPER: dict[str, Any] = _TOML["reported"]
PROFILES: dict[str, Any] = _TOML["profiles"]
WORKERS: int = PAPER["workers"]
K: tuple[float, ...] = tuple(dict.fromkeys(row["k"] for row in PAPER["table2"]["rows"]))
KS = {f"k = {k:g}": k for k in K}
CIFAR, IMAGENET = "CIFAR", "ImageNet"
PARTS = {CIFAR: "cifar", IMAGENET: "imagenet"}  # their names in the paper's numbers
SCHEMES = {"dual-batch": "dual_batch", "hybrid": "hybrid"}  # likewise
# Settings of trainings; where the momentum of section 5.1 restarts, KEPT is the same with it kept.
SECTION_5_1, SECTION_5_2, SECTION_5_2_3 = "section 5.1", "section 5.2", "section 5.2.3"
KEPT, SEARCH = "5.1, momentum kept", "5.1, rates"
FACTORS = {"linear": "d_S/d_L", "sqrt": "√(d_S/d_L)", "none": "none"}
STEPS_IN_A_ROW = 5  # that are timed as one
HALF = WORKERS // 2  # small-batch workers, where one mix of both sizes is enough

# By learning rate: held-out images choose it, other seeds judge the gain at it.
HELD_OUT = 5  # one of so many training images
RATES = (0.5, 1.0, 2.0, 4.0)  # times the paper's
SEARCHED = (0, 3, WORKERS)  # small-batch workers, at the larger k
SEARCH_SEEDS = (0, 1, 2)

# By synchronisation and merge rule.
BOUND = 1  # shares that SSP lets a worker run ahead
RULES = ("journal", "conference", "delta")
SYNCS = [("bsp", "average"), *itertools.product(("bsp", "asp", "ssp"), RULES)]
SHOWN = [("bsp", "average"), ("ssp", "journal"), ("asp", "journal")]  # in Figure 2
STRAGGLER = 3.0  # times as long as the plan knows that the last worker takes
STRAGGLING = [("ssp", 0), ("ssp", 1), ("ssp", 2), ("asp", None)]  # with their bounds

# Around the end of a training.
KINDS = {"small": "small batches", "large": "large batches", "dual": "dual batches"}
PERTURBED = (0.1, 0.2, 0.3, 0.5)  # lengths of perturbations, as shares of every filter's
WORST = 0.05  # length of a step up the gradient, Foret et al.'s default
PLACES = tuple(round(-1 + 0.2 * step, 1) for step in range(11))  # along a direction

OWN = "own"  # epochs by plans for times measured here


def mix(n_small: int) -> str:
    """The mix of workers in words: ``1 small, 3 large``."""
    parts = {"small": n_small, "large": WORKERS - n_small}
    return ", ".join(f"{count} {size}" for size, count in parts.items() if count)


def _scale(profile: str, role: str = CIFAR) -> dict[str, Any]:
    scale: dict[str, Any] = PROFILES[profile][PARTS[role]]
    return scale | {"compute": {"autocast": None} | scale["compute"]}


def _with_epochs(config: dict[str, Any], epochs: Sequence[float] | None) -> dict[str, Any]:
    """The configuration with other numbers of epochs at its rates; None changes nothing."""
    stages = zip(epochs or (), config["stages"], strict=bool(epochs))
    return config | ({"stages": [[n, rate] for n, (_, rate) in stages]} if epochs else {})


def _compared(profile: str, run: Run) -> dict[str, Any]:
    """A training that is compared with others of its length: under gpu a quarter as long."""
    epochs = PROFILES[profile].get("compared")
    warmup = math.ceil(run.config["warmup_epochs"] / (4 if epochs else 1))
    return _with_epochs(run.config, epochs) | {"warmup_epochs": warmup}


def _replanned(config: dict[str, Any], **plan: Any) -> dict[str, Any]:
    """The configuration of section 5.1 with changes in its one plan."""
    (entry,) = config["sub_stages"]
    return config | {"sub_stages": [entry | {"plan": entry["plan"] | plan}]}


def _samples(profile: str, role: str, name: str, which: str) -> int:
    wanted: int = _scale(profile, role)[f"{which}_samples"]
    there = {"train": 1_400, "test": 355}  # of the digits, fewer than asked for
    return min(wanted, there[which]) if name == "digits" else wanted


def _data(profile: str, role: str, name: str) -> dict[str, Any]:
    """Data set and augmentation: the paper names none, so the field's usual one."""
    dataset: dict[str, Any] = {"name": name}
    if role == IMAGENET:
        dataset["image_size"] = 288
        return {"dataset": dataset, "augment": {"padding": 32, "flip": True}}
    scale = _scale(profile)
    side, shift = (round(pixels * scale["pixels"]) for pixels in (32, 4))
    if side != (8 if name == "digits" else 32):
        dataset["image_size"] = side
    if name.startswith("cifar") and profile in ("quick", LONG):  # decodes no more than it takes
        classes = 100 if name == "cifar100" else 10
        dataset["per_class"] = math.ceil(scale["train_samples"] / classes)
    return {"dataset": dataset, "augment": {"padding": shift, "flip": name != "digits"}}


def _training(
    profile: str, chosen: Chosen, role: str, stages: Sequence[Sequence[float]], **config: Any
) -> dict[str, Any]:
    scale, name = _scale(profile, role), chosen[role]
    made = {
        "model": scale["model"],
        **_data(profile, role, name),
        **scale["compute"],
        **scale.get("training", {}),
        "factor": "linear",
        "warmup_epochs": 0,
        "test_samples": _samples(profile, role, name, "test"),
        "sync": "asp",
        "engine": "local",
        "stages": stages,
    }
    return _with_epochs(made, scale["stages"]) | config


def section51(
    profile: str, chosen: Chosen, k: float, n_small: int, factor: str = "linear", **more: Any
) -> Run:
    """A training of section 5.1; the baseline, with warm-up, where n_small is 0."""
    scale, training, inferred = _scale(profile), PAPER["training"], PAPER["inferred"]
    plan = {"a": inferred["a"], "b": inferred["b"] * scale["batches"], "k": k}
    plan |= {"n_small": n_small, "n_large": WORKERS - n_small}
    plan |= {
        "large_batch": max(2, round(PAPER["table2"]["large_batch"] * scale["batches"])),
        "samples": _samples(profile, CIFAR, chosen[CIFAR], "train"),
        "rounding": "floor" if scale["batches"] == 1 else "nearest",
    }
    share = sum(scale["stages"]) / sum(epochs for epochs, _ in training["stages"])
    config = {
        "setting": SECTION_5_1,
        "n_small": n_small,
        "k": k if n_small else 1.0,
        "factor": factor if n_small else "linear",
        "warmup_epochs": 0 if n_small else math.ceil(training["warmup_epochs"] * share),
        "sub_stages": [{"resolution": None, "dropout": None, "plan": plan}],
    }
    label = f"k = {k:g}, {mix(n_small)}, factor {factor}" if n_small else "baseline"
    trained = _training(profile, chosen, CIFAR, training["stages"], **(config | more))
    return Run("train", trained, label=label)


def section52(profile: str, chosen: Chosen, n_small: int, scheme: str, role: str = CIFAR) -> Run:
    """A training of section 5.2.2, or of 5.2.3 on ImageNet: ``dual-batch`` or ``hybrid``."""
    schedule, k = PAPER["table7" if role == CIFAR else "table9"], PAPER["table6"]["k"]
    samples = _samples(profile, role, chosen[role], "train")
    shared = {"k": k, "n_small": n_small, "n_large": WORKERS - n_small, "samples": samples}
    shared["rounding"] = "nearest"
    sub_stages = []
    for stage in _scale(profile, role)["sub_stages"]:
        plan = {name: stage[name] for name in ("a", "b", "large_batch")} | shared
        sub_stages.append({n: stage[n] for n in ("resolution", "dropout")} | {"plan": plan})
    config = {
        "setting": SECTION_5_2 if role == CIFAR else SECTION_5_2_3,
        "scheme": scheme,
        "n_small": n_small,
        "k": k,
        "sub_stages": sub_stages if scheme == "hybrid" else sub_stages[-1:],
    }
    trained = _training(profile, chosen, role, schedule["stages"], **config)
    return Run("train", trained, label=f"{role}, {scheme}, n_S = {n_small}")


def _schemes(profile: str, chosen: Chosen, role: str = CIFAR) -> list[Run]:
    pairs = itertools.product(SCHEMES, range(WORKERS + 1))
    return [section52(profile, chosen, n_small, scheme, role) for scheme, n_small in pairs]


def _solved(table: str) -> list[Run]:
    """Table 2 or 6 by equations 4 to 8, or the schedule of Table 7 or 9."""
    return [Run("solve", {"table": table, "inferred": PAPER["inferred"]}, (0,), label=table)]


def table5(profile: str, chosen: Chosen) -> Iterator[Run]:
    """The baseline and trainings by k and mix, some again with momentum kept."""
    yield section51(profile, chosen, 1.0, 0)
    yield from (section51(profile, chosen, k, n) for k in K for n in range(1, WORKERS + 1))
    again = PROFILES[profile].get("kept", {"n_small": ()})
    seeds = tuple(again["seeds"]) if "seeds" in again else None
    for n in again["n_small"]:
        run = section51(profile, chosen, K[1], n, setting=KEPT, optimizer_state="kept")
        yield replace(run, seeds=seeds, label=f"{run.label}, momentum kept")


def rates_of(profile: str, n_small: int) -> tuple[float, ...]:
    """The rates tried; one more where the highest of the four was the best."""
    return (*RATES, 8.0) if (profile, n_small) == (LONG, 0) else RATES


def _rates(profile: str, chosen: Chosen) -> Iterator[Run]:
    """Trainings by rate at three mixes, with images held out."""
    seeds = (0,) if profile in ("smoke", "quick", "gpu") else SEARCH_SEEDS
    for n in SEARCHED:
        config = _compared(profile, section51(profile, chosen, K[1], n))
        samples = config["sub_stages"][0]["plan"]["samples"]
        config = _replanned(config, samples=samples - samples // HELD_OUT)
        for rate in rates_of(profile, n):
            stages = [[epochs, lr * rate] for epochs, lr in config["stages"]]
            own = {"setting": SEARCH, "rate": rate, "stages": stages, "held_out": True}
            yield Run("train", config | own, seeds, label=f"{mix(n)}, rate ×{rate:g}")


def step_times(profile: str) -> Run:
    """Times of steps and epochs at both resolutions, and of the shares of Table 4."""
    if profile == LONG:
        run = step_times("quick")
        return replace(run, config=run.config | {"repeats": 21}, seeds=PROCESSES)
    scale = _scale(profile)
    config = {"role": CIFAR, "classes": 100, "model": scale["model"], "dataset": None}
    config |= {**scale["compute"], "plan_k": list(K), **PROFILES[profile]["times"]}
    return Run("times", config, seeds=(0,), label=CIFAR)


def _published(chosen: Chosen) -> list[Run]:
    """The line through the authors' raw measurements, where they are at hand."""
    at_hand = chosen.get("times") == "dualbatch_times"
    config = {"dataset": {"name": "dualbatch_times"}}
    return [Run("published", config, seeds=(0,), label="GTX 1080")] * at_hand


def memory(profile: str, role: str) -> Run:
    """Peak memory by batch size, and the largest batch under a limit."""
    scale = _scale(profile, role)
    config = {"role": role, "classes": 100 if role == CIFAR else 1000, "model": scale["model"]}
    config |= {
        "autocast": None if role == CIFAR else scale["compute"]["autocast"],
        "channels_last": scale["compute"]["channels_last"],
        "limit_over_largest_probe": None,
        "limit_bytes": None,
        **PROFILES[profile]["memory"][PARTS[role]],
    }
    return Run("memory", config, seeds=(0,), label=role)


def synchronised(profile: str, chosen: Chosen, sync: str, merge: str) -> Run:
    """A training on one plan of Table 5, by a synchronisation and a merge rule."""
    staleness = BOUND if sync == "ssp" else None
    run = section51(profile, chosen, K[1], HALF, sync=sync, staleness=staleness, merge=merge)
    config = _with_epochs(run.config, PROFILES[profile].get("synchronise_stages"))
    seeds = (0, 1) if profile == "quick" else None
    return Run("synchronise", config, seeds, label=f"{sync}, {merge}")


def _synchronisation(profile: str, chosen: Chosen) -> Iterator[Run]:
    """A training by every synchronisation and merge rule, some with a slow worker; real workers."""
    yield from (synchronised(profile, chosen, *way) for way in SYNCS)
    # Who is ahead of whom is no matter of size: long shows quick's.
    own = "quick" if profile == LONG else profile
    for sync, bound in STRAGGLING if "straggler_stages" in PROFILES[own] else ():
        run = synchronised(own, chosen, sync, RULES[0])
        config = _with_epochs(run.config, PROFILES[own]["straggler_stages"])
        config |= {"staleness": bound, "straggler": STRAGGLER}
        yield replace(run, config=config, label=f"{sync}, s = {bound}, a straggler")
    yield wall(profile)


def engines(profile: str, chosen: Chosen) -> list[Run]:
    """One training with two workers, by both engines; under smoke without a cluster."""
    config = section51(profile, chosen, K[1], 2).config
    verify = _scale(profile)["train_samples"] <= 1000
    config = _replanned(config, n_small=1, n_large=1) | {"n_small": 1, "workers": 2}
    return [
        Run("train", config | {"engine": name, "verify": verify}, (0,), f"two workers, {name}")
        for name in ("local", "ray")[: 1 if profile == "smoke" else None]
    ]


def flatness(profile: str, chosen: Chosen) -> Iterator[Run]:
    """A training with small, large and dual batches, by one schedule and without warm-up."""
    (row,) = [r for r in PAPER["table2"]["rows"] if (r["k"], r["n_small"]) == (K[1], HALF)]
    at = {"sizes": list(PERTURBED), "worst_size": WORST, "places": list(PLACES)}
    for kind, label in KINDS.items():
        run = section51(profile, chosen, K[1], HALF if kind == "dual" else 0)
        config = _with_epochs(_compared(profile, run), PROFILES[profile].get("flatness_stages"))
        del config["engine"]
        if kind == "small":
            small = max(2, round(row["small_batch"] * _scale(profile)["batches"]))
            config = _replanned(config, large_batch=small)
        config |= {"batches": kind, "warmup_epochs": 0, **PROFILES[profile]["flatness"], **at}
        seeds = (0, 1) if profile == "quick" else None
        yield Run("flatness", config, seeds, label=label)


def own_plan(profile: str, chosen: Chosen) -> list[Run]:
    """The baseline, a training by the paper's plan and one by our own, and real workers.

    The a and b of our own plan are the paper's until the run has measured its own.
    """
    theirs = section51(profile, chosen, K[1], HALF)
    config = _replanned(theirs.config, rounding="nearest")
    large = config["sub_stages"][0]["plan"]["large_batch"]
    config["measured"] = {
        "resolution": round(PAPER["section3_2"]["resolution"] * _scale(profile)["pixels"]),
        "batch_sizes": sorted({max(2, round(share * large)) for share in (0.15, 0.3, 0.6, 1.0)}),
        "repeats": 5,
    }
    # One seed will do where the spread is known from Table 5's trainings.
    seeds = (0,) if profile in ("smoke", "quick") else None
    ours = Run("own_plan", config, seeds, label=f"own plan, {theirs.label}")
    return [section51(profile, chosen, 1.0, 0), theirs, ours, wall(profile)]


def wall(profile: str) -> Run:
    """The timing of two real workers, by plans for their own times and for the paper's ratio."""
    if profile == LONG:
        return replace(wall("quick"), seeds=PROCESSES)
    config = dict(PROFILES[profile]["wall"])
    own = {"a": None, "b": None}
    config["parts"] = [
        {"autocast": None, **part, "epochs": [own | kind for kind in part["epochs"]]}
        for part in config["parts"]
    ]
    return Run("wall", config, seeds=(0,), label="two real workers")


RUNS: dict[str, Callable[[str, Chosen], Iterable[Run]]] = {
    "figure1": flatness,
    "figure2": lambda profile, chosen: [synchronised(profile, chosen, *way) for way in SHOWN],
    "figure3": lambda profile, chosen: [step_times(profile), *_published(chosen)],
    "figure4": lambda profile, chosen: [step_times(profile), *_published(chosen)],
    "table1": lambda profile, chosen: [
        Run("schemes", {"n_small": 1, "stages": PAPER["table1"]["stages"]}, (0,), "three schemes")
    ],
    "table2": lambda profile, chosen: [*_solved("table2"), *_published(chosen)],
    "table3": lambda profile, chosen: [
        section51(profile, chosen, K[1], n, factor) for n in range(1, WORKERS) for factor in FACTORS
    ],
    "table4": lambda profile, chosen: [step_times(profile)],
    "table5": table5,
    "table6": lambda profile, chosen: _solved("table6"),
    "table7": lambda profile, chosen: _solved("table7"),
    # The time of real workers does not depend on how long they train.
    "table8": lambda profile, chosen: [*_schemes(profile, chosen), wall(profile)],
    "table9": lambda profile, chosen: _solved("table9"),
    "table10": lambda profile, chosen: [
        wall(profile),
        *(_schemes(profile, chosen, IMAGENET) if chosen.get(IMAGENET) else []),
    ],
    "figure13": lambda profile, chosen: [memory(profile, role) for role in PARTS],
    "synchronisation": _synchronisation,
    "flatness": flatness,
    "own_plan": own_plan,
    "engines": engines,
    "updates": table5,
    "rates": _rates,
    "gains": lambda profile, chosen: [*table5(profile, chosen), *_schemes(profile, chosen)],
}
