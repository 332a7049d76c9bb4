"""Worlds for the tests of θ-adaptive training: what every run of it comes to, as the paper has it.

A test changes one thing of a world, and asks what becomes of a verdict, a table or a figure.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import made

from repro.adaptive import ScalingModel
from repro.experiments.adaptive.runs import CIFAR, DIV2K, FIRST_EPOCHS, PAPER, PHANTOM, TRAININGS
from repro.experiments.adaptive.strategies import reported_of
from repro.experiments.design import Run
from repro.experiments.judge import Verdict
from repro.experiments.query import Results

CHOSEN = {CIFAR: "cifar10", DIV2K: "div2k", PHANTOM: "phantom"}
KINDS = {"phantom": "synthetic"}  # of data sets that are not real
# What the paper does not print: of linear scaling and the third method on CIFAR-10, and between;
# of LARS and LAMB.
UNSAID = {
    (CIFAR, "linear"): 85.0,
    (CIFAR, "scheduled"): 86.0,
    (CIFAR, "noise"): 90.5,
    (CIFAR, "linear_LARS"): 88.0,
    (CIFAR, "theta_LARS"): 91.0,
    (CIFAR, "linear_LAMB"): 87.0,
    (CIFAR, "theta_LAMB"): 89.0,
    (CIFAR, 256): 91.0,
    (DIV2K, 32): 33.59,
    (DIV2K, 64): 33.59,
    (DIV2K, 128): 32.0,
    (PHANTOM, 32): 52.4,
}
Config = Mapping[str, Any]

# How much of a world's scatter a strategy has, so that the differences of any two have some.
OWN = {"best": 0, "theta": -1, "fixed": -1, "theta_LARS": 2, "theta_LAMB": 2}

# Steps that follow the model exactly: blocked by communication everywhere, in all of its parts.
MODEL = ScalingModel(1e-3, 4e-3, 0.03, 0.2, overlap=0.5)
BYTES, BUCKETS = 40_000, 3


def paper_final(config: Config) -> float:
    """Return the accuracy or PSNR that a training ends with."""
    task, strategy = config["task"], config["strategy"]
    key = config["stands_for"] if strategy == "fixed" else strategy
    return UNSAID[task, key] if (task, key) in UNSAID else reported_of(task, key)["value"]


def interval_of(config: Config, seed: int = 0) -> int:
    return max(2, min(PAPER[config["task"]]["interval"], config["epochs"] // 2))


def peak_of(config: Config, seed: int = 0) -> int:
    """θ of the larger batch peaks later, of B_s in epoch K; θ-adaptive's just before."""
    if "max_batch" in config["controller"]:
        return interval_of(config) - 1
    ratio = config["stands_for"] / PAPER[config["task"]]["theta"]["batch"]
    return max(1, interval_of(config) + round(math.log2(ratio)))


def batch_sizes(config: Config, interval: int) -> list[int]:
    own = config["controller"]
    every = own.get("every", interval)
    largest = own.get("max_batch", own["batch"])
    return [min(largest, own["batch"] * 2 ** (n // every)) for n in range(config["epochs"])]


def theta_curve(epochs: int, peak: int, first: int, height: float, rise: float) -> list[float]:
    """Rise to the peak, fall to 0.8 of it until the first decay, then reach `rise` times that."""
    values = []
    for n in range(1, epochs + 1):
        if n <= peak:
            values.append(height * n / peak)
        elif n <= first:
            values.append(height * (1 - 0.2 * (n - peak) / (first - peak)))
        else:
            share = (n - first) / (epochs - first)
            values.append(0.8 * height * (1 + (rise - 1) * share))
    return values


def measured_task(sizes, ways, model=MODEL, jitter=0.01, processes=2) -> dict[str, Any]:
    """Return what processes measure whose steps follow a model; turns differ by `jitter`.

    Turns of the smallest batch and of all-to-all go the other way, so that ratios differ too.
    """
    steps = []
    for n in sizes:
        for way in ("none", *ways):
            cost = model.step(n, 1 if way == "none" else processes)
            # An allreduce hides nothing.
            blocked = cost.communication_s if way == "allreduce" else cost.blocked_s
            total = cost.computation_s + blocked
            own = jitter * (-1) ** ((n == min(sizes)) + (way == "all_to_all"))
            steps.append(
                {
                    "batch": n,
                    "processes": 1 if way == "none" else processes,
                    "averaging": way,
                    "computation_s": cost.computation_s,
                    "communication_s": cost.communication_s,
                    "summation_s": 0.0,
                    "blocked_s": blocked,
                    "total_s": total,
                    "samples_s": [total * math.exp(own * k) for k in (-2, -1, 0, 1, 2)],
                }
            )
    alpha, beta = model.latency_s / BUCKETS, model.transfer_s / BYTES
    messages = [
        (size, processes, 2 * (processes - 1) * (alpha + beta * size / processes))
        for size in (2**10, 2**14, 2**18)
    ]
    return {
        "processes": processes,
        "steps": steps,
        "messages": dict.fromkeys(ways, messages),
        "difference": 0.0,
        "gradient_bytes": BYTES,
        "buckets": BUCKETS,
    }


@dataclass(frozen=True)
class World:
    """Outcomes of all runs: as the paper has it, but for what is given.

    Functions are given a training's configuration and seed. `spread` is between one seed and the
    next in all trainings alike, `scatter` in each strategy by itself (see `OWN`), `jitter` between
    one turn of a step and the next, as a share. `rise` is θ at the end over θ at the first decay,
    `cost` the training cost at the end, of 2.3 at the start, `height` that of θ's peak; `norm` is
    given the batch size over B_s at scale. After `length` epochs a training diverges. `edit`
    changes metrics in place, by experiment (``train`` for all trainings); `status` is a record
    instead, such as `made.FAILED`, None for no record.
    """

    final: Callable[[Config], float] = paper_final
    spread: float = 0.0
    scatter: float = 0.0
    peak: Callable[[Config, int], int] = peak_of
    rise: Callable[[Config, int], float] = lambda c, seed: 1.0 if c["strategy"] == "theta" else 1.5
    cost: Callable[[Config, int], float] = lambda config, seed: 0.02
    height: Callable[[Config, int], float] = lambda c, s: 0.01 * c["controller"]["batch"] ** 0.3
    interval: Callable[[Config, int], int | None] = interval_of
    norm: Callable[[float, int], float] = lambda ratio, seed: 1.0 if ratio <= 1 else 0.5 / ratio
    model: ScalingModel = MODEL
    jitter: float = 0.01
    length: Callable[[Config, int], int | None] = lambda config, seed: None
    edit: Mapping[str, Callable[[dict[str, Any], Config], None]] = field(default_factory=dict)
    status: Callable[[Run], Mapping[str, Any] | None] = lambda run: {}
    device: Mapping[str, Any] | None = None

    def _train(self, config: Config, seed: int) -> dict[str, Any]:
        epochs, own = config["epochs"], config["controller"]
        interval = self.interval(config, seed) if own["kind"] == "theta" else None
        interval = own.get("interval", interval)
        sizes = batch_sizes(config, interval or epochs + 1)
        own_scatter = self.scatter * OWN.get(config["strategy"], 1)
        end = self.final(config) + (self.spread + own_scatter) * (seed - 1)
        shares = [n / epochs for n in range(1, epochs + 1)]
        share = 80 / 140 if config["task"] == CIFAR else 1
        first = (own.get("decay_at") or [round(share * epochs)])[0]
        name = "accuracy" if config["task"] == CIFAR else "psnr"
        rate = own.get("lr") or own["base_lr"] * own["batch"] / own["base_batch"]
        height, rise = self.height(config, seed), self.rise(config, seed)
        found = range(1, epochs + 1)
        metrics: dict[str, Any] = {
            name: [end - 10 * (1 - share) for share in shares],
            "train_cost": [2.3 + (self.cost(config, seed) - 2.3) * share for share in shares],
            "theta": theta_curve(epochs, self.peak(config, seed), first, height, rise),
            "batch_size": sizes,
            "lr": [rate * size / sizes[0] for size in sizes],
            "updates": [-(-config["train_samples"] // size) for size in sizes],
            "interval": [interval if interval and n >= interval else None for n in found],
            "time_s": [1.0] * epochs,
            "control_s": [0.01] * epochs,
            "test_loss": shares,
        }
        if "saturation" in own:
            metrics["lr"][-1] = own["decay"] * rate
        diverged = self.length(config, seed)
        if diverged is not None:
            metrics = {key: values[:diverged] for key, values in metrics.items()}
        completed = len(metrics["theta"])
        return metrics | {
            "initial_cost": [2.3],
            "completed": completed,
            "diverged": diverged is not None,
            "stopped": bool(config["stop"]) and diverged is None,
            "best_epoch": completed if config["stop"] else None,
        }

    def _norms(self, config: Config, seed: int) -> dict[str, Any]:
        sizes = [n for n in config["sizes"] if n <= config["train_samples"]]
        own = PAPER[config["task"]]
        start = own["theta"]["batch"] * config["controller"]["batch"] / own["best"]["batch"]
        norms = [self.norm(size / start, seed) for size in sizes]
        stable = max(n for n, norm in zip(sizes, norms, strict=True) if norm >= 0.9 * norms[0])
        errors = {0: [math.nan] * len(sizes)}
        points = [
            {
                "epochs": n,
                "stable": stable,
                "norms": norms,
                "errors": errors.get(n, [0.01] * len(sizes)),
            }
            for n in config["after"]
        ]
        return {"sizes": sizes, "points": points}

    def _parallel(self, config: Config) -> dict[str, Any]:
        ways = config["averaging"]
        tasks = {
            task: measured_task(job["sizes"], ways, self.model, self.jitter)
            for task, job in config["jobs"].items()
        }
        return {"tasks": tasks, "device": "a CPU"}

    def __call__(self, run: Run, seed: int) -> dict[str, Any] | None:
        """Return the changes to the record of a run."""
        changed = self.status(run)
        if changed is None:
            return None
        config = run.config
        metrics: dict[str, Any] = {}
        if changed.get("status", "ok") == "ok":
            trains = (*TRAININGS, FIRST_EPOCHS)
            experiment = "train" if run.experiment in trains else run.experiment
            if experiment == "train":
                metrics = self._train(config, seed)
            elif experiment == "norms":
                metrics = self._norms(config, seed)
            elif experiment == "asleep":
                times = {"computation_s": 0.04, "after_s": [0.06] * 3, "within_s": [0.05] * 3}
                metrics = {"ratios": dict.fromkeys(config["ratios"], times)}
            else:
                metrics = self._parallel(config)
            if experiment in self.edit:
                self.edit[experiment](metrics, config)
        dataset = None
        if "dataset" in config:
            name = config["dataset"]["name"]
            kind = KINDS.get(name, "real")
            dataset = {"name": name, "fingerprint": name, "kind": kind, "provenance": name}
        device = {"device": dict(self.device)} if self.device else {}
        return {"metrics": metrics, "dataset": dataset, **device, **changed}


def nothing(run: Run) -> None:
    return None


def only_strategies(*strategies):
    return lambda run: {} if run.config.get("strategy") in strategies else None


def results_of(artefact, world=None, profile="gpu", chosen=CHOSEN, seeds=made.SEEDS) -> Results:
    target = f"adaptive/{artefact}"
    return made.made_results(target, world or World(), chosen, profile, seeds)


def judge(target: str, world=None, profile="gpu", **options) -> Verdict:
    """Return the verdict on ``ARTEFACT/KEY`` in a world."""
    artefact, _, _ = target.partition("/")
    return made.verdict(f"adaptive/{target}", results_of(artefact, world, profile, **options))


def checked(artefact: str, world=None, profile="gpu", place=0) -> dict[str, str]:
    """Return a check of an artefact in a world."""
    return made.check_row(f"adaptive/{artefact}", place, results_of(artefact, world, profile))
