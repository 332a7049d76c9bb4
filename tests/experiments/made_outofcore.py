"""Records of out-of-core training made up for tests: as the paper has it, but for rules."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import made
from made import OUT_OF_MEMORY, Maker, timing

from repro.experiments import load_paper
from repro.experiments.design import Run
from repro.experiments.judge import Verdict
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.runs import GIB, MEASURED, MIB, MODES, PIX2PIXHD, RESNET, SIMULATED
from repro.experiments.query import Results

DENSENET, _, DEEPLAB = runs.ROLES[1:]
PAPER = load_paper("outofcore")
GPU = {"type": "cuda", "name": "NVIDIA X", "slug": "x", "memory_bytes": 2**36}
LARGEST = "the largest"  # in a rule: the largest batch size that the way trains
RATE = 100.0  # images/s of the largest mini-batch in core
RELATIVE = {  # ResNet-50's to the speed in core; 1.2 of other networks
    "schedule": 0.7, "schedule_va": 0.75, "lms": 0.55, "paper": 0.65, "checkpointing": 0.6,
    "save_on_cpu": 0.5, "offload": 0.6,
}  # fmt: skip
BY_SCHEDULE = {"window": 0.8, "paper": 0.7, "lms": 0.54, "vdnn": 0.5, "on_demand": 0.4}
# The largest batch sizes in core, with scheduling alone and with chunks, about as the paper has it.
REACH: dict[str, dict[str, tuple[int, int, int]]] = {
    SIMULATED: {RESNET: (190, 928, 1472), DENSENET: (128, 512, 1536), PIX2PIXHD: (5, 20, 36),
                DEEPLAB: (9, 48, 144)},
    "quick": {RESNET: (12, 59, 91), DENSENET: (8, 32, 32), PIX2PIXHD: (4, 16, 16)},
    "paper": {RESNET: (190, 928, 1440), DENSENET: (128, 512, 1536), PIX2PIXHD: (4, 16, 32),
              DEEPLAB: (6, 32, 96)},
}  # fmt: skip
Rules = Mapping[tuple[str | float, ...], Any]


@dataclass(frozen=True)
class World:
    """Outcomes of all runs: as the paper has it, but for rules.

    A rule's key begins with a quantity; then it names any of place, network, way to train, batch
    size, ``half`` and `LARGEST`. The quantities: ``reach`` (a batch size, or the way that reaches
    as far), ``relative`` (speed over the largest in core), ``budget`` (a share of the limit),
    ``predicted`` (MiB of the 30 on the host), ``status`` (a record's, None for no record).

    Attributes:
        profile: Of the runs.
        rules: The last that matches counts.
        places: Which of "simulated" and "measured" have records.
    """

    profile: str = "quick"
    rules: Rules = field(default_factory=dict)
    places: tuple[str, ...] = (SIMULATED, MEASURED)

    def of(self, quantity: str, usual: Any, *cell: str | float) -> Any:
        for key, value in self.rules.items():
            if key[0] == quantity and set(key[1:]) <= set(cell):
                usual = value
        return usual

    def limit(self, where: str) -> int:
        return 16 * GIB if where == SIMULATED or self.profile == "paper" else 64 * MIB

    def reached(self, where: str, role: str, mode: str, half: bool = False) -> int:
        sizes = REACH[SIMULATED if where == SIMULATED else self.profile].get(role, (0, 0, 0))
        usual = dict(zip(MODES, sizes, strict=True))
        usual |= {"lms": sizes[1], "paper": sizes[1], "expandable_segments": sizes[0]}
        usual |= dict.fromkeys([*runs.PACKED_MODES, "paper_va"], sizes[2])
        usual["checkpointing"] = 32 if self.profile == "quick" else 512
        usual["save_on_cpu"] = usual["offload"] = 256
        found = self.of("reach", usual[mode], where, role, mode, *["half"] * half)
        return (1 + half) * usual.get(found, found)

    def row(
        self, where: str, role: str, mode: str, batch: int, half: bool = False
    ) -> dict[str, Any] | None:
        """The numbers of a way to train, None where it does not fit."""
        most = self.reached(where, role, mode, half)
        if batch > most:
            return None
        cell = (where, role, mode, batch, *[LARGEST] * (batch == most), *["half"] * half)
        usual = RELATIVE.get(mode, 1.2) if role == RESNET else 1.2
        if mode in ("in_core", "expandable_segments"):
            usual = 1.0 if batch == most or half else 0.8
        limit = self.limit(where)
        reserved = int(limit * (0.95 if mode == "schedule_va" else 0.9))
        speed = RATE * self.of("relative", usual, *cell)
        row = {"time_s": batch / speed, "reserved_bytes": reserved, "held_bytes": reserved - MIB}
        if mode in ("schedule", "schedule_va", "lms", "paper", "paper_va"):
            share = self.of("budget", 0.85 if mode == "schedule_va" else 0.5, *cell)
            moved = (50 if half else 100) * MIB
            row |= {"budget_bytes": int(limit * share), "bytes_moved": moved}
            row["host_bytes"] = 30 * MIB
            if where == MEASURED:
                row["host_foretold_bytes"] = self.of("predicted", 32, *cell) * MIB
        return row

    def __call__(self, run: Run, seed: int) -> Mapping[str, Any] | None:
        config, name = run.config, run.experiment
        role, batch = config["role"], config.get("batch", 0)
        where = MEASURED if name in runs.MEASURING else SIMULATED
        mode = config.get("mode", config.get("schedule", ""))
        status = self.of("status", "ok", where, role, batch, mode, name)
        if where not in self.places or status is None:
            return None
        of_gpu = {"device": GPU} if where == MEASURED and self.profile == "paper" else {}
        if status != "ok":
            return status | of_gpu
        half = config["precision"] != runs.FLOAT32
        if name == runs.PHYSICAL:
            return {"metrics": {"rows": {}}}
        if name == runs.BY_SCHEDULE:
            return self.by_schedule(config) | of_gpu
        if where == MEASURED:
            return self.measured(config, half) | of_gpu
        ways = [*MODES, *["lms", *runs.TO_THE_LETTER] * config.get("lms", False)]
        metrics: dict[str, Any] = {"limit_bytes": self.limit(SIMULATED)}
        if name in ("reach", runs.HALF_REACH):
            found = {way: self.reached(where, role, way, half) for way in ways}
            return {"metrics": metrics | found}
        if name == runs.PACKED:
            ways = list(runs.PACKED_MODES)
        rows = {way: self.row(SIMULATED, role, way, batch, half) for way in ways}
        metrics |= {"peak_bytes": batch * 80 * MIB, "rows": {w: r for w, r in rows.items() if r}}
        if name != runs.PACKED:
            metrics["bound_s"] = batch / (RATE * 1.25)
            metrics["rows"].get("in_core", {}).pop("held_bytes", None)  # it is the peak
        return {"metrics": metrics}

    def timed(self, seconds: float, config: Mapping[str, Any]) -> dict[str, Any]:
        scatter = [seconds * math.exp(sign * 0.003) for sign in (1, -1, 1, -1)]
        timings = {"iteration": timing(*scatter)}
        if self.profile != "paper":
            timings["reference"] = timing(*[config["base_batch"] / RATE] * 4)
        return timings

    def by_schedule(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A training by a schedule; the paper's is 1.3 times as fast as LMS."""
        name = config["schedule"]
        speed = RATE * self.of("relative", BY_SCHEDULE[name], runs.BY_SCHEDULE, name)
        metrics = {"bytes_moved": 9, "limit_bytes": self.limit(MEASURED)}
        return {"metrics": metrics, "timings": self.timed(config["batch"] / speed, config)}

    def measured(self, config: Mapping[str, Any], half: bool) -> dict[str, Any]:
        mode = config["mode"]
        row = self.row(MEASURED, config["role"], mode, config["batch"], half)
        if row is None:
            return dict(OUT_OF_MEMORY)
        timings = self.timed(row.pop("time_s"), config)
        if self.profile != "paper" and mode not in ("schedule", "schedule_va"):
            del row["reserved_bytes"]  # the limit is on tensors
        return {"metrics": row | {"limit_bytes": self.limit(MEASURED)}, "timings": timings}


def results(artefact: str, make: Maker, profile: str = "") -> Results:
    profile = profile or getattr(make, "profile", "quick")
    return made.made_results(f"outofcore/{artefact}", make, {}, profile, seeds=(0,))


def judged(claim: str, world: World) -> Verdict:
    """Judge ``ARTEFACT/KEY`` in a world."""
    return made.verdict(f"outofcore/{claim}", results(claim.partition("/")[0], world))
