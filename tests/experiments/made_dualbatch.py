"""Worlds in which dual-batch learning has been run: every record made up, as the paper has it."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import made
import numpy as np

from repro.datasets import TIMES
from repro.experiments import load_paper
from repro.experiments.design import Run
from repro.experiments.dualbatch import building, measuring, training
from repro.experiments.dualbatch.runs import CIFAR, IMAGENET, SCHEMES, SECTION_5_2, SECTION_5_2_3
from repro.experiments.dualbatch.runs import PAPER as REPORTED
from repro.experiments.query import Results

PAPER = load_paper("dualbatch")
CHOSEN = {CIFAR: "cifar100", "times": TIMES, IMAGENET: "imagenet"}
IN_A_ROW = 5
Config = Mapping[str, Any]


def paper_result(config: Config) -> Mapping[str, float]:
    """Return the paper's final loss and accuracy of a training."""
    n, k = config["n_small"], config["k"]
    if config["setting"] not in (SECTION_5_2, SECTION_5_2_3):
        if n == 0:
            return REPORTED["table5"]["baseline"]
        if config["factor"] != "linear":
            return REPORTED["table3"][n - 1][config["factor"]]
        (row,) = [r for r in REPORTED["table5"]["rows"] if (r["k"], r["n_small"]) == (k, n)]
        return row
    table = REPORTED["table8" if config["setting"] == SECTION_5_2 else "table10"]
    return table[SCHEMES[config["scheme"]]][n]


def paper_accuracy(config: Config) -> float:
    return paper_result(config)["accuracy"]


def paper_loss(config: Config) -> float:
    return paper_result(config)["loss"]


def line(side: int, batch: int) -> float:
    """Return the seconds of a step."""
    return 1e-6 * side**2 * batch + 1e-4 * side


def by_pixels(side: int, highest: int) -> float:
    """Return the seconds of an epoch at its large batch size."""
    return (side / highest) ** 2


def wobble(config: Config, seed: int) -> float:
    """Return what a seed adds, of deviation 1 and mean 0 over three, another in every cell."""
    angle = zlib.crc32(repr(config).encode()) % 628 / 100 + 2 * math.pi * seed / 3
    return 2 / math.sqrt(3) * math.cos(angle)


@dataclass(frozen=True)
class World:
    """Outcomes of all runs: as the paper has it, but for what is given.

    Attributes:
        accuracy: Final percent of a training, given its configuration.
        loss: Final test loss.
        spread: Points of accuracy between one seed and the next; a hundredth of it in loss and in
            shares of the wall time.
        step: Seconds of a step, given resolution and batch size.
        epoch: Seconds of an epoch over those by equation 2, given the same.
        cycled: Seconds of an epoch at its large batch size, given resolution and the highest.
        noise: Share by which a time varies from turn to turn.
        edit: By experiment, changes metrics in place, given them and the configuration.
        status: What a record is instead, such as `made.FAILED`; None for no record; {} for as it
            was.
    """

    accuracy: Callable[[Config], float] = paper_accuracy
    loss: Callable[[Config], float] = paper_loss
    spread: float = 0.02
    step: Callable[[int, int], float] = line
    epoch: Callable[[int, int], float] = lambda side, batch: 1.0
    cycled: Callable[[int, int], float] = by_pixels
    noise: float = 0.002
    edit: Mapping[str, Callable[[dict[str, Any], Config], None]] = field(default_factory=dict)
    status: Callable[[Run], Mapping[str, Any] | None] = lambda run: {}

    def _train(self, config: Config, seed: int) -> dict[str, Any]:
        off = self.spread * wobble(config, seed)
        accuracy = self.accuracy(config) + off
        loss = self.loss(config) * (1 + off / 100)
        virtual, wall = 100.0 * config["k"], 100.0 * (1 + off / 100)
        ray = config.get("engine") == "ray"
        return {
            "accuracy": [accuracy - 9, accuracy - 4, accuracy],
            "test_loss": [loss + 1, loss + 0.5, loss],
            "virtual_time_s": None if ray else [virtual / 3, virtual / 2, virtual],
            "wall_time_s": [wall / 3, wall / 2, wall],
            "plans": [
                training.plan_row(building.plan_of(entry["plan"]), entry["resolution"])
                for entry in config["sub_stages"]
            ],
            "commits": 12,
            "same_weights": True if config.get("verify") else None,
            "staleness": [0, 1, 2, 3, 3, 3],
            **({"held_out": [accuracy - 8, accuracy + 1]} if config.get("held_out") else {}),
        }

    def _turns(self, seconds: float, name: str, count: int) -> list[float]:
        """Return the samples of a time: the same in every run of the tests."""
        generator = np.random.default_rng(list(name.encode()))
        return (seconds * np.exp(self.noise * generator.standard_normal(count))).tolist()

    def _times(self, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
        sides, sizes, total = config["resolutions"], config["batch_sizes"], config["samples"]
        repeats = max(3, config["repeats"] // 2)
        taken: dict[str, list[float]] = {}
        fits, passes = [], []
        for side in sides:
            for n in sizes:
                name = f"{side}px, step of {n}"
                seconds = IN_A_ROW * self.step(side, n)
                taken[name] = self._turns(seconds, name, repeats)
            steps = [float(np.median(taken[f"{side}px, step of {n}"])) / IN_A_ROW for n in sizes]
            a, b = map(float, np.polyfit(sizes, steps, 1))
            fits.append({"resolution": side, "a": a, "b": b, "seconds": steps})
            rows = []
            for n in sizes if config["passes"] is True else config["passes"] or ():
                predicted = (a * n + b) * -(-total // n)
                name = f"{side}px, {n}, {total}"
                seconds = self.step(side, n) * -(-total // n) * self.epoch(side, n)
                taken[name] = self._turns(seconds, name, repeats)
                measured = float(np.median(taken[name]))
                rows.append({"batch": n, "measured_s": measured, "equation2_s": predicted})
            passes.append(rows)
        shares = [
            {
                "k": k,
                "n_small": n,
                "kind": kind,
                "batch": batch,
                "samples": 100 * n + batch,
                "measured_s": 1.02,
                "predicted_s": 1.0,
            }
            for k in config.get("plan_k", [])
            for n in (1, 2)
            for kind, batch in (("small", 10 * n), ("large", 500))
        ]
        if shares:
            shares.append({"k": 1.1, "n_small": 4, "error": "k is 1.1, for which there is no B_S"})
        timings = {name: {"samples_s": values, "warmup": 1} for name, values in taken.items()}
        return {"fits": fits, "passes": passes, "shares": shares}, timings

    def _synchronise(self, config: Config, seed: int) -> dict[str, Any]:
        """Return a log of two epochs, in which the workers end one after the other."""
        ends = [float(n) for n in range(1, 9)]
        behind = {"bsp": 0, "ssp": 1, "asp": 3}[config["sync"]]
        pulled = [0] * 4 + ([4] * 4 if config["sync"] == "bsp" else [1, 2, 3, 4])
        accuracy = {"bsp": 70.0, "ssp": 69.0, "asp": 67.0}[config["sync"]]
        return self._train(config, seed) | {
            "accuracy": [10.0, accuracy + self.spread * wobble(config, seed)],
            "virtual_time_s": [4.0, 8.0],
            "worker": [0, 1, 2, 3] * 2,
            "pulled": pulled,
            "staleness": [behind] * 8,
            "commit_s": ends,
        }

    def _flatness(self, config: Config, seed: int) -> dict[str, Any]:
        steep = {"small": 1.0, "large": 3.0, "dual": 2.0}[config["batches"]]
        noise = 1 + self.noise * wobble(config, seed)
        return {
            "accuracy": 70.0,
            "test_loss": 1.0 + steep / 10 + self.noise * wobble(config, seed),
            "train_loss": 0.5,
            "variances": [noise * 5.0 / n**noise for n in config["variance_batches"]],
            "rises": [[noise * steep * size**2] * config["directions"] for size in config["sizes"]],
            "worst_rise": noise * steep / 10,
            "line": {
                name: [0.5 + steep * (place - shift) ** 2 for place in config["places"]]
                for name, shift in (("train", 0.0), ("test", 0.1))
            },
        }

    def _own_plan(self, config: Config, seed: int) -> dict[str, Any]:
        (entry,) = config["sub_stages"]
        own = entry | {"plan": entry["plan"] | {"a": 1e-4, "b": 3e-3}}
        plan = {"small_batch": 9, "large_batch": 50, "small_samples": 9, "large_samples": 11}
        found = {"a": 1e-4, "b": 3e-3, "error": None, "plan": plan, "k_max": 1.3}
        return self._train({**config, "sub_stages": [own]}, seed) | found

    def _wall(self, config: Config) -> dict[str, Any]:
        """Return epochs that take k times as long, less at lower resolutions."""
        parts = []
        for part in config["parts"]:
            solved, shares = [], {}
            for number, kind in enumerate(part["epochs"]):
                sides = [k["resolution"] for k in part["epochs"] if k["in"] == kind["in"]]
                seconds = kind["k"] * self.cycled(kind["resolution"], max(sides))
                plan = {"small_batch": 9} if kind["k"] > 1 else None
                solved.append({"a": 1e-4, "b": 3e-3, "error": None, "plan": plan, "k_max": 1.3})
                shares[str(number)] = [
                    self._turns(share * seconds, f"{kind['in']}, {number}", config["rounds"])
                    for share in (1.0, 0.9)
                ]
            rounds = {"asp": self._turns(2.5, "asp", config["rounds"])} if not parts else {}
            parts.append({"solved": solved, "shares_s": shares, "round_s": rounds})
        return {"devices": 2, "parts": parts}

    def __call__(self, run: Run, seed: int) -> dict[str, Any] | None:
        changed = self.status(run)
        if changed is None:
            return None
        config = run.config
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "train": lambda: self._train(config, seed),
            "solve": lambda: measuring.solve(config, seed, None, "cpu").metrics,
            "published": _published,
            "schemes": lambda: measuring.schemes(config, seed, None, "cpu").metrics,
            "synchronise": lambda: self._synchronise(config, seed),
            "flatness": lambda: self._flatness(config, seed),
            "own_plan": lambda: self._own_plan(config, seed),
            "wall": lambda: self._wall(config),
            "memory": lambda: _memory(config),
        }
        metrics: dict[str, Any] = {}
        timings: dict[str, Any] = {}
        if changed.get("status", "ok") == "ok":
            if run.experiment == "times":
                metrics, timings = self._times(config)
            else:
                metrics = makers[run.experiment]()
            if run.experiment in self.edit:
                self.edit[run.experiment](metrics, config)
        dataset = None
        if config.get("dataset"):
            name = config["dataset"]["name"]
            kind = "synthetic" if name == "synthetic" else "real"
            dataset = {"name": name, "fingerprint": name, "kind": kind, "provenance": name}
        return {"metrics": metrics, "timings": timings, "dataset": dataset, **changed}


def _published() -> dict[str, Any]:
    shown = list(range(20, 501, 20))
    found = {}
    for name, error in (("PyTorch", 0.02), ("TensorFlow", 0.01)):
        epoch = [(5.66e-4 * n + 0.014) * -(-50_000 // n) for n in shown]
        found[name] = {
            "a": 5.66e-4,
            "b": 0.014,
            "largest_error": 3 * error,
            "largest_at": 3,
            "share_beyond": 0.0,
            "median_error": error,
            "batches": shown,
            "table2": [row["small_batch"] for row in REPORTED["table2"]["rows"]],
            "per_batch_s": [5.66e-4 * n + 0.014 for n in shown],
            "epoch_s": epoch,
            "predicted_s": epoch,
        }
    return {"frameworks": found}


def _memory(config: Config) -> dict[str, Any]:
    limit = config["limit_bytes"] or 2**26
    fixed, each = 2.0**20, 2.0**14
    largest = int((limit - fixed) / each)
    return {
        "batch_sizes": config["batch_sizes"],
        "peaks": [int(fixed + each * n) for n in config["batch_sizes"]],
        "fixed_bytes": fixed,
        "bytes_per_sample": each,
        "limit_bytes": limit,
        "predicted_max": largest,
        "measured_max": largest,
        "beyond": [[largest // 2, int(fixed + each * (largest // 2))]],
    }


def results(
    artefact: str,
    world: World | None = None,
    profile: str = "gpu",
    seeds: Sequence[int] = made.SEEDS,
) -> Results:
    """Return an artefact's results in a world."""
    chosen = {task: CHOSEN[task] for task in PAPER.datasets[profile]}
    return made.made_results(f"dualbatch/{artefact}", world or World(), chosen, profile, seeds)


def judge(
    target: str, profile: str = "gpu", seeds: Sequence[int] = made.SEEDS, **world: Any
) -> tuple[str, str]:
    """Return word and evidence of the claim ``ARTEFACT/KEY`` in a world."""
    artefact, _, key = target.partition("/")
    found = results(artefact, World(**world), profile, seeds=seeds)
    verdict = made.verdict(f"dualbatch/{artefact}/{key}", found)
    return verdict.word, verdict.evidence


def only(**config: Any) -> Callable[[Run], Mapping[str, Any] | None]:
    """Return the status of a world that has records of the runs with these values alone."""
    return lambda run: {} if all(run.config.get(k) == v for k, v in config.items()) else None


def rows(artefact: str, world: World | None = None, profile: str = "gpu", **options: Any) -> Any:
    """Return an artefact's table, as the question gives it."""
    return PAPER.artefacts[artefact].rows(results(artefact, world, profile, **options))


def caption(artefact: str, world: World | None = None, profile: str = "gpu", **options: Any) -> str:
    """Return an artefact's caption."""
    return PAPER.artefacts[artefact].caption(results(artefact, world, profile, **options))


def figure(artefact: str, world: World | None = None, profile: str = "gpu") -> Any:
    """Return an artefact's figure."""
    return PAPER.artefacts[artefact].draw(results(artefact, world, profile))


def panels(drawn: Any) -> dict[str, Any]:
    """Return the axes of a figure by title."""
    return {axis.get_title(): axis for axis in drawn.axes if axis.get_visible()}


def panel(drawn: Any, start: str) -> Any:
    """Return the one panel whose title begins so."""
    (found,) = (axis for title, axis in panels(drawn).items() if title.startswith(start))
    return found
