"""The runs of out-of-core training under each profile; ``paper.toml`` has networks and sizes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from repro.experiments.design import LONG, PROCESSES, Chosen, Run, paper_toml

_TOML = paper_toml("outofcore")
PAPER, PROFILES, MODELS = _TOML["reported"], _TOML["profiles"], _TOML["models"]
SIMULATION = _TOML["simulation"]
LABELS: dict[str, str] = _TOML["labels"]  # of methods to train
SCHEDULES: dict[str, str] = _TOML["schedules"]  # in words, by the names that `OutOfCore` has
GIB, MIB = 2**30, 2**20
RESNET, PIX2PIXHD = "ResNet-50", "Pix2PixHD"
ROLES: tuple[str, ...] = tuple(MODELS["published"])
OTHERS = ROLES[1:]
MODES = IN_CORE, SCHEDULE, CHUNKS = "in_core", "schedule", "schedule_va"
# Section 3 to the letter; MODES have our version of its schedule.
TO_THE_LETTER = ("paper", "paper_va")
PEERS = ("checkpointing", "save_on_cpu", "expandable_segments", "offload")
PACKED_MODES = PACKED_CHUNKS, FITTED = "packed_va", "packed_fitted"
# Experiments; those that measure have a version in half precision, as those that simulate have.
SIMULATED, MEASURED, PACKED, PHYSICAL = "simulated", "measured", "packed", "physical"
BY_SCHEDULE, HALF, HALF_REACH, HALF_MEASURED = "by_schedule", "half", "half_reach", "half_measured"
MEASURING = (MEASURED, HALF_MEASURED, BY_SCHEDULE)
# Section 5.2 says float32; the others are our question. By autocast, as torch's users do.
FLOAT32, HALVES = "float32", ("bfloat16", "float16")
_IN = {FLOAT32: "", **{precision: f", {precision}" for precision in HALVES}}  # in labels
CLAIMS, TABLE = PAPER["claims"], PAPER["table1"]
IN_CORE_BATCH, LMS_BATCH = CLAIMS["in_core_batch"], CLAIMS["lms_batch"]
LARGEST_BATCH = CLAIMS["largest_batch"]
RATE, CHUNK_MIB = PAPER["bandwidth_bytes_per_s"], CLAIMS["chunk_mib"]


def published(mode: str) -> dict[int, float]:
    """The paper's images/s of ResNet-50 by batch size, of those that trained."""
    pairs = zip(TABLE["batches"], TABLE[mode], strict=True)
    return {batch: rate for batch, rate in pairs if rate == rate}


def faster(batch: int) -> float:
    """The paper's images/s at a batch size, without chunks or with, whichever are more."""
    return max(published(CHUNKS)[batch], published(SCHEDULE).get(batch, 0))


def gib(count: float | None) -> str | None:
    """Bytes as GiB, or as MiB where they are few."""
    if count is None:
        return None
    return f"{count / GIB:.2f} GiB" if count >= GIB / 4 else f"{count / MIB:.1f} MiB"


def network_name(config: Mapping[str, Any]) -> str:
    """The name of a run's network, such as ``ResNet-50 of width 16``."""
    model = config["model"]
    if model["name"] == "resnet_cifar":
        return f"ResNet-{model['depth']}"
    name: str = _TOML["networks"][model["name"]]
    if model == MODELS["published"][config["role"]]["model"]:
        return name
    return " of ".join([name, *(f"{k} {model[k]}" for k in ("width", "growth") if k in model)])


def _baseline(role: str) -> dict[str, Any]:
    """The published throughputs in core: of the network, or else those of ResNet-50."""
    own, rates = RESNET, published(IN_CORE)
    if role == PIX2PIXHD:
        own, section = role, PAPER["section52"]
        rates = {section["in_core"][role]: section["pix2pixhd_images_per_s"]}
    values = {"batches": list(rates), "images_per_s": list(rates.values())}
    return {"role": own, **MODELS["published"][own], **values}


def _simulation(
    experiment: str, role: str, more: str = "", precision: str = FLOAT32, **config: Any
) -> Run:
    """A run of the paper's setting on its own device; nothing is computed."""
    setting = {"role": role, **MODELS["published"][role], "precision": precision}
    setting |= {"limit_gib": PAPER["limit_gib"], **config}
    at = f", batch size {config['batch']}" if "batch" in config else ""
    return Run(experiment, setting, seeds=(0,), label=f"{role}{at}{more}{_IN[precision]}")


def _timed(experiment: str, role: str, more: str = "", **config: Any) -> Run:
    """One whose functions and copies take time."""
    config |= {"bandwidth": RATE, "baseline": _baseline(role), "map_s": SIMULATION["map_s"]}
    return _simulation(experiment, role, more, **config)


def simulated(role: str, batch: int, precision: str = FLOAT32) -> Run:
    """An iteration by all schedules, simulated from a trace."""
    name, own = SIMULATED if precision == FLOAT32 else HALF, role == RESNET
    return _timed(name, role, precision=precision, batch=batch, tune=own, lms=own)


def reach(role: str, precision: str = FLOAT32) -> Run:
    """The search for the largest batch sizes of a published network."""
    experiment = "reach" if precision == FLOAT32 else HALF_REACH
    return _simulation(experiment, role, precision=precision, lms=role == RESNET)


def packed(batch: int) -> Run:
    """Plans of the whole iteration, with chunks of the paper's size and fitted ones."""
    own = {name: SIMULATION[name] for name in ("largest_chunk", "least_chunk_mib")}
    return _timed(PACKED, RESNET, ", packed", batch=batch, chunk_mib=CHUNK_MIB, **own)


def physical(role: str, batch: int) -> Run:
    """An iteration's requests, served without a limit by torch's allocator and by chunks."""
    label = ", requests without a limit"
    return _simulation(PHYSICAL, role, label, batch=batch, chunk_mib=CHUNK_MIB)


def link(profile: str, chosen: Chosen) -> list[Run]:
    """The paper's setting at other rates of the link, and with fewer bytes."""
    own: dict[str, Any] = {"rates": SIMULATION["link_rates"], "shares": SIMULATION["link_shares"]}
    batches = SIMULATION["link_batches"][: 1 if profile == "smoke" else None]
    return [
        _simulation("link", RESNET, batch=b, baseline=_baseline(RESNET), **own) for b in batches
    ]


def chunk_sizes(profile: str, chosen: Chosen) -> list[Run]:
    """The paper's setting with chunks of other sizes; under smoke of one other."""
    sizes = SIMULATION["chunks_mib"]
    sizes = [CHUNK_MIB, sizes[-1]] if profile == "smoke" else sizes
    return [_timed("chunk_sizes", RESNET, batch=SIMULATION["chunk_batch"], chunks_mib=sizes)]


def _limit(fits: int | None) -> dict[str, Any]:
    """The paper's memory, or just enough for a batch size that is to fit in core."""
    if fits is None:
        return {"limit_gib": PAPER["limit_gib"]}
    return {"base_batch": fits, "limit_between": [fits, fits + 1]}


def measured(profile: str, role: str, batch: int, mode: str, precision: str = FLOAT32) -> Run:
    """A method at one batch size, within the limit."""
    at = PROFILES[profile]
    config = {"role": role, **MODELS[at["models"]][role], "precision": precision, "batch": batch}
    config |= {"mode": mode, "threads": None, **at["timed"]}
    config |= _limit(at.get("in_core", {}).get(role))
    if "in_core" in at and role == RESNET and mode in MODES[1:]:
        config["link_share"] = _TOML["link"]["share"]
    label = f"{role}, batch size {batch}, {LABELS[mode]}{_IN[precision]}"
    experiment = MEASURED if precision == FLOAT32 else HALF_MEASURED
    return Run(experiment, config, seeds=(0,), label=label)


def _simulated(profile: str, experiment: Callable[[str, int], Run], *roles: str) -> list[Run]:
    """The runs of an experiment on published networks, at the batch sizes that are simulated."""
    batches = PROFILES["smoke" if profile == "smoke" else "quick"]["simulated"]
    return [experiment(role, batch) for role in roles for batch in batches[role]]


def resnet(profile: str) -> list[Run]:
    """The runs of ResNet-50: simulated as published, and measured here, by batch size."""
    at, runs = PROFILES[profile], _simulated(profile, simulated, RESNET)
    if profile != "smoke":
        runs.append(reach(RESNET))
    methods = at["ways"]
    if isinstance(methods, list):
        methods = dict.fromkeys(methods, at["measured"][RESNET])
    pairs = [(batch, mode) for mode, some in methods.items() for batch in some]
    return runs + [measured(profile, RESNET, *p) for p in sorted(pairs, key=lambda p: p[0])]


def table1(profile: str, chosen: Chosen) -> list[Run]:
    """ResNet-50 by every method, by batch size; packed plans where copies cannot be hidden."""
    beyond = () if profile == "smoke" else (b for b in TABLE["batches"] if b > 2 * IN_CORE_BATCH)
    return resnet(profile) + [packed(batch) for batch in beyond]


def figure3(profile: str, chosen: Chosen) -> list[Run]:
    """ResNet-50 in core and swapped, by batch size."""
    runs = [run for run in resnet(profile) if run.experiment != "reach"]
    return [run for run in runs if run.config.get("mode", IN_CORE) in MODES]


def others(profile: str, chosen: Chosen) -> list[Run]:
    """The runs of the other networks."""
    tried, runs = PROFILES[profile]["measured"], _simulated(profile, simulated, *OTHERS)
    runs += [reach(role) for role in OTHERS if profile != "smoke"]
    return runs + [
        measured(profile, role, batch, mode)
        for role in OTHERS
        for batch in tried[role]
        for mode in MODES
    ]


def figure5(profile: str, chosen: Chosen) -> list[Run]:
    """The same, and the requests of their iterations, served without a limit."""
    return others(profile, chosen) + _simulated(profile, physical, *OTHERS)


def schedules(profile: str, chosen: Chosen) -> list[Run]:
    """A training within as many bytes of tensors as the limit has, by each of the schedules."""
    if profile == LONG:
        return [
            replace(run, config=run.config | {"repeats": 9}, seeds=PROCESSES)
            for run in schedules("quick", chosen)
        ]
    own = PROFILES[profile].get("by_schedule")
    setting = own or {**MODELS["published"][RESNET], "batch": LMS_BATCH}
    config = {"role": RESNET, **setting, "precision": FLOAT32}
    config |= {"threads": None, **PROFILES[profile]["timed"], **_limit(setting.get("base_batch"))}
    if own:
        config["link_bytes_per_s"] = _TOML["link"]["bytes_per_s"]
    return [
        Run(BY_SCHEDULE, config | {"schedule": name}, (0,), label=f"by the schedule {name}")
        for name in SCHEDULES
    ]


def precisions(profile: str, chosen: Chosen) -> list[Run]:
    """ResNet-50 in half precision, simulated as published and measured, and in float32."""
    halves, batch = PROFILES[profile]["halves"], PROFILES[profile]["half_batch"]
    timed = [measured(profile, RESNET, batch, CHUNKS, kind) for kind in (FLOAT32, *halves)]
    if profile == "smoke":
        return timed
    return [
        *(reach(RESNET, precision) for precision in (FLOAT32, *halves)),
        # The loss's scale apart, both have the same trace.
        *(simulated(RESNET, b, HALVES[0]) for b in SIMULATION["half_batches"]),
        *timed,
    ]
