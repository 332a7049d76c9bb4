"""Records of out-of-core training made up for tests: as the paper has it, but for rules."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import made
from made import OUT_OF_MEMORY, Maker

from repro.experiments import load_paper
from repro.experiments.design import Run
from repro.experiments.judge import Verdict
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.runs import (
    GIB,
    MEASURED,
    MIB,
    MODES,
    PIX2PIXHD,
    RESNET,
    ROLES,
    SIMULATED,
)
from repro.experiments.query import Results

DENSENET, _, DEEPLAB = ROLES[1:]
PAPER = load_paper("outofcore")
GPU = {"type": "cuda", "name": "NVIDIA X", "slug": "x", "memory_bytes": 2**36}
LARGEST = "the largest"  # in a key of `World`: the largest batch size that the way trains
RATE = 100.0  # images/s of the largest mini-batch in core
RELATIVE = {  # to the speed in core; what is missing is 1.2
    (RESNET, "schedule"): 0.7,
    (RESNET, "schedule_va"): 0.75,
    (RESNET, "lms"): 0.55,
    (RESNET, "paper"): 0.65,
    (RESNET, "checkpointing"): 0.6,
    (RESNET, "save_on_cpu"): 0.5,
    (RESNET, "offload"): 0.6,
}

# The largest batch sizes in core, with scheduling alone and with chunks, about as the paper has it.
REACH: dict[str, dict[str, tuple[int, int, int]]] = {
    SIMULATED: {
        RESNET: (190, 928, 1472),
        DENSENET: (128, 512, 1536),
        PIX2PIXHD: (5, 20, 36),
        DEEPLAB: (9, 48, 144),
    },
    "smoke": {
        RESNET: (4, 16, 16),
        DENSENET: (4, 12, 12),
        PIX2PIXHD: (0, 0, 0),
        DEEPLAB: (0, 0, 0),
    },
    "quick": {
        RESNET: (12, 59, 91),
        DENSENET: (8, 32, 32),
        PIX2PIXHD: (4, 16, 16),
        DEEPLAB: (0, 0, 0),
    },
    "paper": {
        RESNET: (190, 928, 1440),
        DENSENET: (128, 512, 1024),
        PIX2PIXHD: (4, 16, 32),
        DEEPLAB: (6, 32, 64),
    },
}

Key = tuple[str | int, ...]


def _of(rules: Mapping[Key, Any], default: Any, *cell: str | int) -> Any:
    """Return the value of the last rule whose key's parts are all the cell's."""
    for key, value in rules.items():
        if set(key) <= set(cell):
            default = value
    return default


@dataclass(frozen=True)
class World:
    """Outcomes of all runs: as the paper has it, but for rules.

    A rule's key names any of: place, network, way to train, batch size, `LARGEST`.

    Attributes:
        profile: Of the runs.
        places: Which of "simulated" and "measured" have records.
        reach: Largest batch size that fits, 0 for none; a way to train stands for its own.
        relative: Throughput over that of the largest mini-batch in core.
        budget: Share of the limit that the schedule is given.
        taken: Share of the limit that the allocator takes.
        internal: MiB that chunks lose inside, simulated.
        moved: MiB that are moved in an iteration.
        foretold: MiB that were foretold of the 30 that lie on the host.
        status: What a record is instead, such as `FAILED`; None where there is none.
        noise: By what the logarithms of timed iterations lie above and below in turns.
    """

    profile: str = "quick"
    places: tuple[str, ...] = (SIMULATED, MEASURED)
    reach: Mapping[Key, int | str] = field(default_factory=dict)
    relative: Mapping[Key, float] = field(default_factory=dict)
    budget: Mapping[Key, float] = field(default_factory=dict)
    taken: Mapping[Key, float] = field(default_factory=dict)
    internal: Mapping[Key, int] = field(default_factory=dict)
    moved: Mapping[Key, int] = field(default_factory=dict)
    foretold: Mapping[Key, int] = field(default_factory=dict)
    status: Mapping[Key, Mapping[str, Any] | None] = field(default_factory=dict)
    noise: float = 0.003

    @property
    def on_gpu(self) -> bool:
        return self.profile == "paper"

    def limit(self, where: str) -> int:
        return 16 * GIB if where == SIMULATED or self.on_gpu else 64 * MIB

    def reached(self, where: str, role: str, mode: str, half: bool = False) -> int:
        sizes = REACH[SIMULATED if where == SIMULATED else self.profile][role]
        usual = dict(zip(MODES, sizes, strict=True))
        usual |= {"lms": sizes[1], "paper": sizes[1], "expandable_segments": sizes[0]}
        usual |= dict.fromkeys([*runs.PACKED_MODES, "paper_va"], sizes[2])
        usual["checkpointing"] = {"smoke": 4, "quick": 32}.get(self.profile, 512)
        usual["save_on_cpu"] = usual["offload"] = 256
        if half:  # whatever it is, twice as large fits
            usual = {name: 2 * size for name, size in usual.items()}
        found = _of(self.reach, usual[mode], where, role, mode, *["half"] * half)
        return usual[found] if isinstance(found, str) else found

    def row(
        self, where: str, role: str, mode: str, batch: int, half: bool = False
    ) -> dict[str, Any] | None:
        """Return the numbers of a way to train, None where it does not fit."""
        most = self.reached(where, role, mode, half)
        if batch > most:
            return None
        cell = (where, role, mode, batch, *([LARGEST] if batch == most else []), *["half"] * half)
        usual = RELATIVE.get((role, mode), 1.2)
        if mode in ("in_core", "expandable_segments"):
            usual = 1.0 if batch == most or half else 0.8
        limit = self.limit(where)
        reserved = int(limit * _of(self.taken, 0.95 if mode == "schedule_va" else 0.9, *cell))
        row = {
            "time_s": batch / (RATE * _of(self.relative, usual, *cell)),
            "reserved_bytes": reserved,
            "held_bytes": reserved - MIB,
        }
        if mode in ("schedule", "schedule_va", "lms", "paper", "paper_va"):
            share = _of(self.budget, 0.85 if mode == "schedule_va" else 0.5, *cell)
            row |= {"budget_bytes": int(limit * share), "window_bytes": 8 * MIB}
            moved = _of(self.moved, 50 if half else 100, *cell)
            row |= {"host_bytes": 30 * MIB, "bytes_moved": moved * MIB}
            if where == MEASURED:
                row["host_foretold_bytes"] = _of(self.foretold, 32, *cell) * MIB
        if where == SIMULATED:
            row["internal_bytes"] = MIB * _of(self.internal, 2000 - batch, *cell)
        return row

    def __call__(self, run: Run, seed: int) -> Mapping[str, Any] | None:
        config = run.config
        if run.experiment in ("link", "chunk_sizes"):
            return self.analysed(run) if SIMULATED in self.places else None
        role, batch = config["role"], config.get("batch", "looked for")
        if run.experiment == runs.PHYSICAL:
            return self.physical(role, batch) if SIMULATED in self.places else None
        half = config["precision"] != runs.FLOAT32
        measuring = (MEASURED, runs.HALF_MEASURED, runs.BY_SCHEDULE)
        where = MEASURED if run.experiment in measuring else SIMULATED
        if where not in self.places:
            return None
        of_gpu = {"device": GPU} if where == MEASURED and self.on_gpu else {}
        way = config.get("mode", config.get("schedule", "no mode"))
        unusual = _of(self.status, "as usual", where, role, batch, way, run.experiment)
        if unusual != "as usual":
            return unusual and unusual | of_gpu
        modes = (*MODES, *["lms", *runs.TO_THE_LETTER] * config.get("lms", False))
        if run.experiment in ("reach", runs.HALF_REACH):
            found = [mode for mode in modes if mode not in runs.TO_THE_LETTER]
            sizes = {mode: self.reached(where, role, mode, half) for mode in found}
            return {"metrics": {"limit_bytes": self.limit(where), **sizes}}
        if run.experiment in (SIMULATED, runs.HALF):
            return self.simulated(role, batch, modes, half)
        if run.experiment == runs.PACKED:
            return self.packed(role, batch)
        if run.experiment == runs.BY_SCHEDULE:
            return {**self.scheduled(config), **of_gpu}
        return {**self.measured(config, half), **of_gpu}

    def scheduled(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a training by a schedule; the paper's is 1.3 times as fast as LMS."""
        name, batch = config["schedule"], config["batch"]
        usual = {"window": 0.8, "paper": 0.7, "lms": 0.54, "vdnn": 0.5, "on_demand": 0.4}[name]
        seconds = batch / (RATE * _of(self.relative, usual, runs.BY_SCHEDULE, name))
        scatter = [seconds * math.exp(sign * self.noise) for sign in (1, -1, 1, -1)]
        timings = {"iteration": timing(*scatter)}
        if not self.on_gpu:
            timings["reference"] = timing(*[config["base_batch"] / RATE] * 4)
        counts = {"bytes_moved": 9, "held_bytes": 8, "host_bytes": 7, "host_foretold_bytes": 8}
        return {"metrics": counts | {"limit_bytes": self.limit(MEASURED)}, "timings": timings}

    def analysed(self, run: Run) -> Mapping[str, Any] | None:
        """Return 0.8 of the paper's images/s at its rate, the bound 0.02 above; chunks by size."""
        unusual = _of(self.status, "as usual", SIMULATED, run.experiment)
        if unusual != "as usual":
            return unusual
        config = run.config
        if run.experiment == "link":
            batch = config["batch"]
            least = runs.faster(batch)
            rows = []
            for share in config["shares"]:
                for rate in config["rates"]:
                    speed = min(1.2, 0.8 * rate / runs.RATE / share) * least
                    speed *= _of(self.relative, 1.0, "link", batch, share)
                    row = {"share": share, "rate": rate, "bytes_moved": int(rate)}
                    row |= {"time_s": batch / speed, "bound_s": batch / speed / 1.02}
                    rows.append(row)
            return {"metrics": {"limit_bytes": 16 * GIB, "compute_s": 1.0, "rows": rows}}
        table = {}
        for mib in config["chunks_mib"]:
            # The paper's is the fastest: smaller ones map more, larger ones have less budget.
            slow = 1 + abs(math.log2(mib / 40)) / 10
            table[str(mib)] = {
                "time_s": slow * _of(self.relative, 1.0, "chunk", mib),
                "unmapped_s": 1.0,
                "internal_bytes": mib * MIB * _of(self.internal, 20, "chunk", mib),
                "map_operations": 20_000 // mib,
                "budget_bytes": 16 * GIB - 20 * mib * MIB,
            }
        return {"metrics": {"limit_bytes": 16 * GIB, "rows": table}}

    def simulated(self, role: str, batch: int, modes: Sequence[str], half: bool) -> dict[str, Any]:
        rows = {mode: self.row(SIMULATED, role, mode, batch, half) for mode in modes}
        metrics = {
            "limit_bytes": self.limit(SIMULATED),
            "peak_bytes": batch * 80 * MIB,
            "bound_s": batch / (RATE * _of(self.relative, 1.25, SIMULATED, role, "bound")),
            "rows": {mode: row for mode, row in rows.items() if row is not None},
        }
        if "in_core" in metrics["rows"]:
            del metrics["rows"]["in_core"]["held_bytes"]  # it is the peak
        return {"metrics": metrics}

    def packed(self, role: str, batch: int) -> dict[str, Any]:
        rows = {mode: self.row(SIMULATED, role, mode, batch) for mode in runs.PACKED_MODES}
        fitted = {mode: row for mode, row in rows.items() if row is not None}
        for row in fitted.values():
            row |= {"chunk_bytes": 80 * MIB, "time_by_bytes_s": 2 * row["time_s"]}
        metrics = {"limit_bytes": self.limit(SIMULATED), "peak_bytes": batch * 80 * MIB}
        return {"metrics": metrics | {"rows": fitted}}

    def physical(self, role: str, batch: int) -> Mapping[str, Any] | None:
        """Return twice what is in use for torch's allocator, and 1.1 times for chunks."""
        unusual = _of(self.status, "as usual", SIMULATED, role, batch, runs.PHYSICAL)
        if unusual != "as usual":
            return unusual
        rows = {
            mode: {
                "used_bytes": used,
                "torch_bytes": int(used * _of(self.taken, 2.0, mode, runs.PHYSICAL, "torch")),
                "chunks_bytes": int(used * _of(self.taken, 1.1, mode, runs.PHYSICAL, "chunks")),
            }
            for mode, used in (("in_core", batch * 80 * MIB), ("schedule", 16 * GIB))
        }
        return {"metrics": {"peak_bytes": batch * 80 * MIB, "rows": rows}}

    def measured(self, config: Mapping[str, Any], half: bool) -> Mapping[str, Any]:
        mode = config["mode"]
        row = self.row(MEASURED, config["role"], mode, config["batch"], half)
        if row is None:
            return OUT_OF_MEMORY
        seconds = row.pop("time_s")
        scatter = [seconds * math.exp(sign * self.noise) for sign in (1, -1, 1, -1)]
        timings = {"iteration": timing(*scatter)}
        if not self.on_gpu:
            timings["reference"] = timing(*[config["base_batch"] / RATE] * 4)
            if mode not in ("schedule", "schedule_va"):
                del row["reserved_bytes"]  # the limit is on tensors
        return {"metrics": row | {"limit_bytes": self.limit(MEASURED)}, "timings": timings}


def timing(*seconds: float) -> dict[str, Any]:
    return {"samples_s": list(seconds), "warmup": 1}


def results(artefact: str, make: Maker, profile: str = "quick") -> Results:
    return made.made_results(f"outofcore/{artefact}", make, {}, profile, seeds=(0,))


def judged(claim: str, world: World) -> Verdict:
    """Judge ``ARTEFACT/KEY`` in a world."""
    artefact = claim.partition("/")[0]
    return made.verdict(f"outofcore/{claim}", results(artefact, world, world.profile))


def checked(artefact: str, world: World, words: str = "") -> dict[str, str]:
    """Return the artefact's first check in a world, as a row, or the one that has these words."""
    texts = [check.text for check in PAPER.artefacts[artefact].checks]
    (number, *_) = [number for number, text in enumerate(texts) if words in text]
    return made.check_row(f"outofcore/{artefact}", number, results(artefact, world, world.profile))


def table(artefact: str, make: Maker, profile: str = "quick") -> list[Mapping[str, Any]]:
    return list(PAPER.artefacts[artefact].rows(results(artefact, make, profile)))


def paper_name(network: str) -> str:
    """Return what the paper calls a network of a table: ``DenseNet-121 (for DenseNet)``."""
    return network.rpartition("(for ")[2].removesuffix(")")


def panels(artefact: str, make: Maker, profile: str = "quick") -> dict[str, Any]:
    """Draw a figure, and return its visible panels by title, in one line each."""
    figure = PAPER.artefacts[artefact].draw(results(artefact, make, profile))
    return {" ".join(axis.get_title().split()): axis for axis in figure.axes if axis.get_visible()}


def curves(axis: Any) -> dict[str, list[tuple[float, float]]]:
    """Return the curves by label, but for the limit and what has no label."""
    return {
        line.get_label(): list(zip(*line.get_data(), strict=True))
        for line in axis.get_lines()
        if line.get_label() != "memory limit" and not line.get_label().startswith("_")
    }


# Titles of panels.
V100 = "ours: ResNet-50, SIMULATED V100"
HERE = "ours: ResNet-50 of width 16 for ResNet-50, measured, SIMULATED memory limit and link"


def is_hollow(axis: Any, label: str) -> bool:
    """Return whether the marks of all curves of a label are hollow; there has to be one."""
    marks = [line for line in axis.get_lines() if line.get_label() == label]
    assert marks, label
    return all(mark.get_markerfacecolor() == "none" for mark in marks)


def limit_of(axis: Any) -> float | None:
    lines = [line for line in axis.get_lines() if line.get_label() == "memory limit"]
    return lines[0].get_ydata()[0] if lines else None


def nothing(run: Run, seed: int) -> None:
    return None
