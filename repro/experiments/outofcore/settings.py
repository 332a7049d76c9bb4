"""What is run under each profile, and what captions say of it."""

from collections.abc import Iterable
from typing import Any

from repro.experiments.captions import devices
from repro.experiments.design import Results, Run, reported
from repro.records import Record
from repro.report import DASH

PAPER = reported("outofcore")
GIB, MIB = 2**30, 2**20
RESNET, DENSENET, PIX2PIXHD, DEEPLAB = ROLES = "ResNet-50", "DenseNet", "Pix2PixHD", "DeepLabv3+"
MODES = IN_CORE, SCHEDULE, CHUNKS = "in_core", "schedule", "schedule_va"
PEERS = ("checkpointing", "save_on_cpu", "expandable_segments")
_PEERS = {"smoke": PEERS[:1], "quick": PEERS[:1], "gpu": PEERS, "paper": PEERS}
# Section 5.2 says float32; the others are our question. By autocast, as torch's users do.
FLOAT32 = "float32"
HALVES = ("bfloat16", "float16")
# Section 3's schedule and others, as `OutOfCore` runs them by name.
OURS, LITERAL, LMS, VDNN, ON_DEMAND = SCHEDULES = ("window", "paper", "lms", "vdnn", "on_demand")
LABELS = {
    "in_core": "in core",
    "schedule": "schedule",
    "schedule_va": "schedule + VA",
    "lms": "LMS",
    "paper": "schedule, to the letter",
    "packed_va": "packed + VA",
    "packed_fitted": "packed + VA, fitted chunks",
    "bound": "no schedule beats",
    "checkpointing": "checkpointing",
    "save_on_cpu": "save_on_cpu",
    "expandable_segments": "in core, expandable segments",
}
# What is analysed of ResNet-50: by the rate of the link, in bytes/s each way, and the share of the
# bytes that variables have; and by the size of a chunk, in MiB.
LINK_BATCHES = (928, 1120, 1440)
LINK_RATES = tuple(factor * PAPER["bandwidth_bytes_per_s"] for factor in (0.5, 1, 1.25, 2))
FEWER_BYTES = 0.8
CHUNK_BATCH, CHUNKS_MIB = 928, (2, 10, 20, 40, 80, 160)
# The experiments whose records have throughput and memory by batch size.
SIMULATED, MEASURED = "simulated", "measured"
# Simulated beside the paper's: plans of the whole iteration, with chunks of the paper's size and of
# sizes that variables have, up to so many times as large.
PACKED = "packed"
PACKED_MODES = PACKED_CHUNKS, FITTED = "packed_va", "packed_fitted"
LARGEST_CHUNK = 10
LEAST_CHUNK_MIB = 2  # section 4: of the device
BY_SCHEDULE = "by_schedule"
HALF, HALF_REACH, HALF_MEASURED = "half", "half_reach", "half_measured"
PLACES = {SIMULATED: "simulated, V100", MEASURED: "measured here"}

# Section 5: ResNet-50 and DenseNet on 224x224, Pix2PixHD on 512x1024, DeepLabv3+ on 513x513.
PUBLISHED: dict[str, dict[str, Any]] = {
    RESNET: {"model": {"name": "torchvision/resnet50"}, "image": [224, 224]},
    DENSENET: {"model": {"name": "torchvision/densenet121"}, "image": [224, 224]},
    PIX2PIXHD: {"model": {"name": "pix2pixhd"}, "image": [512, 1024]},
    DEEPLAB: {"model": {"name": "deeplabv3plus"}, "image": [513, 513]},
}
_TINY = {"model": {"name": "resnet_cifar", "depth": 8, "width": 4}, "image": [8, 8]}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "smoke": {
        RESNET: _TINY,
        DENSENET: {"model": {"name": "densenet40", "growth": 2}, "image": [8, 8]},
        PIX2PIXHD: {
            "model": {"name": "pix2pixhd", "width": 2, "blocks": 1, "downsamplings": 2},
            "image": [16, 16],
        },
        DEEPLAB: {"model": {"name": "deeplabv3plus", "width": 2}, "image": [33, 33]},
    },
    "quick": {
        RESNET: {"model": {"name": "resnet50", "width": 16}, "image": [20, 20]},
        DENSENET: {"model": {"name": "densenet40", "growth": 6}, "image": [16, 16]},
        # Channels at full resolution are scaled down with the width.
        PIX2PIXHD: {
            "model": {"name": "pix2pixhd", "in_channels": 4, "width": 8, "blocks": 3},
            "image": [32, 64],
        },
        DEEPLAB: {
            "model": {"name": "deeplabv3plus", "num_classes": 3, "width": 8},
            "image": [65, 65],
        },
    },
    "gpu": PUBLISHED,
    "paper": PUBLISHED,
}
# On a CPU the limit is chosen so that this is the largest batch size that fits in core.
_LARGEST_IN_CORE = {
    "smoke": dict.fromkeys(ROLES, 4),
    "quick": {RESNET: 12, DENSENET: 8, PIX2PIXHD: 4, DEEPLAB: 6},
}
# Table 1's batch sizes; on a CPU in the paper's proportion to the largest that fits in core.
BATCHES: dict[str, tuple[int, ...]] = {
    "smoke": (4, 16),
    "quick": (12, 32, 59, 91),  # the largest in core, 512, 928 and 1440
    "gpu": tuple(PAPER["table1"]["batches"]),
    "paper": tuple(PAPER["table1"]["batches"]),
}
# Figures 4 and 5: on a CPU the first is the largest in core, the others multiples.
GROWING: dict[str, dict[str, tuple[int, ...]]] = {
    "smoke": {DENSENET: (4, 12), PIX2PIXHD: (), DEEPLAB: ()},
    # On a CPU allocators are simulated, and so decide no claim: two networks show that they train.
    "quick": {DENSENET: (8, 32), PIX2PIXHD: (4, 16), DEEPLAB: ()},
}
# As far as the simulated allocators serve, and on.
_GROWING = {
    DENSENET: (64, 128, 192, 512, 1024, 1536, 2048),
    PIX2PIXHD: (2, 4, 8, 16, 24, 32, 48),
    DEEPLAB: (3, 6, 12, 32, 64, 96, 160, 192),
}
GROWING["gpu"] = GROWING["paper"] = _GROWING
# At the published sizes, simulated.
SIMULATED_BATCHES: dict[str, dict[str, tuple[int, ...]]] = {
    "smoke": {RESNET: (64, 1440), DENSENET: (), PIX2PIXHD: (), DEEPLAB: ()},
    "quick": {
        RESNET: tuple(PAPER["table1"]["batches"]),
        # The paper's largest in core and with scheduling alone, and ours, also with chunks.
        DENSENET: (128, 512, 768, 1536),
        PIX2PIXHD: (4, 5, 16, 20, 36),
        DEEPLAB: (6, 9, 32, 48, 144),
    },
}
SIMULATED_BATCHES["gpu"] = SIMULATED_BATCHES["paper"] = SIMULATED_BATCHES["quick"]
# In half precision, as many as hold about what 190, 928 and 1440 images do in float32.
HALF_BATCHES = (368, 1856, 2880)
HALF_MEASURED_BATCH = {"smoke": 16, "quick": 32, "gpu": 512, "paper": 512}
# By schedule: one batch size of a network whose operations are few, 4.9 times what fits in core.
_BY_SCHEDULE: dict[str, dict[str, Any]] = {
    "smoke": _TINY | {"batch": 16, "base_batch": 4},
    "quick": {
        "model": {"name": "resnet_cifar", "depth": 20, "width": 16},
        "image": [16, 16],
        "batch": 59,
        "base_batch": 12,
    },
    "gpu": PUBLISHED[RESNET] | {"batch": PAPER["claims"]["lms_batch"]},
}
_BY_SCHEDULE["paper"] = _BY_SCHEDULE["gpu"]
# What mapping or unmapping a chunk takes. The paper gives no number: its rows with and without
# chunks at 64 to 256 images lie 0.3 s an iteration apart in all, in which our simulation maps and
# unmaps 1,596 chunks.
MAP_S = 0.19e-3
# On a CPU ResNet-50's copies are paced: in the time of the largest iteration in core the link
# moves, each way, this share of the bytes that it holds, as the paper's does: 50 GB/s for 0.327 s
# (190 images at 581 images/s) are 0.98 of the 16.7 GB that our trace of it holds.
LINK_SHARE = 0.98
# By schedule, the same for all: about as much as that network holds there, in the time it takes.
LINK_BYTES_PER_S = 128 * MIB
WARMUP = {"smoke": 1, "quick": 1, "gpu": 2, "paper": 2}
REPEATS = {"smoke": 2, "quick": 4, "gpu": 10, "paper": 100}  # the paper averages 100
THREADS = {"smoke": 1, "quick": 1, "gpu": None, "paper": None}


def measured(profile: str, role: str, batch: int, mode: str, precision: str = FLOAT32) -> Run:
    """Return one way to train at one batch size, within the limit."""
    config = {
        "role": role,
        **MODELS[profile][role],
        "precision": precision,
        "batch": batch,
        "mode": mode,
        "warmup": WARMUP[profile],
        "repeats": REPEATS[profile],
        "threads": THREADS[profile],
    }
    if profile in _LARGEST_IN_CORE:
        fits = _LARGEST_IN_CORE[profile][role]
        config |= {"base_batch": fits, "limit_between": [fits, fits + 1]}
        if role == RESNET and mode in MODES[1:]:
            config["link_share"] = LINK_SHARE
    else:
        config["limit_gib"] = PAPER["limit_gib"]
    label = f"{role}, batch size {batch}, {LABELS[mode]}{_in(precision)}"
    experiment = MEASURED if precision == FLOAT32 else HALF_MEASURED
    return Run(experiment, config, seeds=(0,), label=label)


def _in(precision: str) -> str:
    return "" if precision == FLOAT32 else f", {precision}"


def by_schedule(profile: str, schedule: str) -> Run:
    """Return a training within as many bytes of tensors as the limit has, by one schedule."""
    config = {
        "role": RESNET,
        **_BY_SCHEDULE[profile],
        "precision": FLOAT32,
        "schedule": schedule,
        "warmup": WARMUP[profile],
        "repeats": REPEATS[profile],
        "threads": THREADS[profile],
    }
    base = config.get("base_batch")
    if base is None:
        config["limit_gib"] = PAPER["limit_gib"]
    else:
        config |= {"limit_between": [base, base + 1], "link_bytes_per_s": LINK_BYTES_PER_S}
    return Run(BY_SCHEDULE, config, seeds=(0,), label=f"by the schedule {schedule}")


def simulated(role: str, batch: int, precision: str = FLOAT32) -> Run:
    """Return the paper's setting on its own device, simulated from a trace."""
    config = {
        "role": role,
        **PUBLISHED[role],
        "precision": precision,
        "batch": batch,
        "limit_gib": PAPER["limit_gib"],
        "bandwidth": PAPER["bandwidth_bytes_per_s"],
        "baseline": _baseline(role),
        "tune": role == RESNET,
        "lms": role == RESNET,
        "map_s": MAP_S,
    }
    experiment = SIMULATED if precision == FLOAT32 else HALF
    label = f"{role}, batch size {batch}{_in(precision)}"
    return Run(experiment, config, seeds=(0,), label=label)


def reach(role: str, precision: str = FLOAT32) -> Run:
    """Return the search for the largest batch sizes of a published network."""
    config = {
        "role": role,
        **PUBLISHED[role],
        "precision": precision,
        "limit_gib": PAPER["limit_gib"],
        "lms": role == RESNET,
    }
    experiment = "reach" if precision == FLOAT32 else HALF_REACH
    return Run(experiment, config, seeds=(0,), label=role + _in(precision))


def half(profile: str) -> list[Run]:
    """Return ResNet-50 in half precision, simulated as published and measured, beside float32."""
    # A CPU computes float16 many times slower than float32.
    halves = HALVES if profile in ("gpu", "paper") else HALVES[:1]
    batch = HALF_MEASURED_BATCH[profile]
    measured_ones = [measured(profile, RESNET, batch, CHUNKS, p) for p in (FLOAT32, *halves)]
    if profile == "smoke":
        return measured_ones
    return [
        reach(RESNET),
        *(reach(RESNET, precision) for precision in halves),
        # The loss's scale apart, both have the same trace.
        *(simulated(RESNET, batch, HALVES[0]) for batch in HALF_BATCHES),
        *measured_ones,
    ]


def packed(batch: int) -> Run:
    """Return packed plans in the paper's setting, with chunks of its size and fitted ones."""
    config = {
        **_of_the_paper(RESNET),
        "batch": batch,
        "bandwidth": PAPER["bandwidth_bytes_per_s"],
        "map_s": MAP_S,
        "chunk_mib": PAPER["claims"]["chunk_mib"],
        "largest_chunk": LARGEST_CHUNK,
        "least_chunk_mib": LEAST_CHUNK_MIB,
    }
    return Run(PACKED, config, seeds=(0,), label=f"{RESNET}, batch size {batch}, packed")


def link(batch: int) -> Run:
    """Return the paper's setting at other rates of the link, and with fewer bytes."""
    config = {
        **_of_the_paper(RESNET),
        "batch": batch,
        "rates": list(LINK_RATES),
        "shares": [1.0, FEWER_BYTES],
    }
    return Run("link", config, seeds=(0,), label=f"{RESNET}, batch size {batch}")


def chunk_sizes(profile: str) -> Run:
    """Return the paper's setting with chunks of other sizes; under smoke of one other."""
    sizes = (PAPER["claims"]["chunk_mib"], CHUNKS_MIB[-1]) if profile == "smoke" else CHUNKS_MIB
    config = {
        **_of_the_paper(RESNET),
        "batch": CHUNK_BATCH,
        "bandwidth": PAPER["bandwidth_bytes_per_s"],
        "chunks_mib": list(sizes),
        "map_s": MAP_S,
    }
    return Run("chunk_sizes", config, seeds=(0,), label=f"{RESNET}, batch size {CHUNK_BATCH}")


def _of_the_paper(role: str) -> dict[str, Any]:
    limit = {"limit_gib": PAPER["limit_gib"], "baseline": _baseline(role)}
    return {"role": role, **PUBLISHED[role], "precision": FLOAT32, **limit}


def _baseline(role: str) -> dict[str, Any]:
    """Return published throughputs in core: of the network, or else those of ResNet-50."""
    if role == PIX2PIXHD:
        fits = PAPER["section52"]["in_core"][role]
        rate = PAPER["section52"]["pix2pixhd_images_per_s"]
        return {"role": role, **PUBLISHED[role], "batches": [fits], "images_per_s": [rate]}
    table = PAPER["table1"]
    fitting = [
        (b, rate)
        for b, rate in zip(table["batches"], table["in_core"], strict=True)
        if rate == rate
    ]
    batches, rates = zip(*fitting, strict=True)
    return {
        "role": RESNET,
        **PUBLISHED[RESNET],
        "batches": list(batches),
        "images_per_s": list(rates),
    }


def resnet(profile: str) -> list[Run]:
    """Return the runs of ResNet-50: simulated as published, and measured here."""
    runs = [simulated(RESNET, batch) for batch in SIMULATED_BATCHES[profile][RESNET]]
    if profile != "smoke":
        runs.append(reach(RESNET))
    return runs + [
        measured(profile, RESNET, batch, mode)
        for batch in BATCHES[profile]
        for mode in (*MODES, *_PEERS[profile])
    ]


def others(profile: str) -> list[Run]:
    """Return the runs of the other networks."""
    runs = [
        simulated(role, batch) for role in ROLES[1:] for batch in SIMULATED_BATCHES[profile][role]
    ]
    runs += [reach(role) for role in ROLES[1:] if SIMULATED_BATCHES[profile][role]]
    return runs + [
        measured(profile, role, batch, mode)
        for role in ROLES[1:]
        for batch in GROWING[profile][role]
        for mode in MODES
    ]


def schedules(profile: str) -> list[Run]:
    """Return a training by each of the schedules."""
    return [by_schedule(profile, schedule) for schedule in SCHEDULES]


def gib(count: float | None) -> str:
    """Return bytes as GiB, or as MiB where they are few."""
    if count is None:
        return DASH
    return f"{count / GIB:.2f} GiB" if count >= GIB / 4 else f"{count / MIB:.1f} MiB"


_MEASURING = (MEASURED, HALF_MEASURED, BY_SCHEDULE)
_OF_THE_V100 = (
    "SIMULATED, V100: nothing ran. Traces of the published networks (torch's operations on a CPU, "
    "at the published image sizes) are scheduled and timed by simulation, copies at "
    f"{PAPER['bandwidth_bytes_per_s'] / 1e9:g} GB/s each way; simulators of torch's allocator and "
    f"of the chunked one ({PAPER['claims']['chunk_mib']} MiB) serve them within "
    f"{PAPER['limit_gib']} GiB. Mapping a chunk takes {1e3 * MAP_S:g} ms of the device's time, "
    "our estimate from the paper's rows up to 256 images. What no schedule beats is what "
    "`repro.outofcore.bound` proves of the trace, the memory and the link. A function takes a "
    "fixed time and, as in the paper's figure 1, one in proportion to its bytes, fitted to the "
    "paper's throughputs in core of ResNet-50 "
    "(and taken for DenseNet and DeepLabv3+, too, of which it states none) and Pix2PixHD "
    f"({PAPER['section52']['pix2pixhd_images_per_s']:g} images/s), and no faster than the fastest "
    "of these. Budgets are found by trying: larger ones may be served."
)
_OF_PACKED = (
    'Packed: by plans of the whole iteration (`schedule="packed"`), not through a window, at the '
    "fastest of 16 budgets from half of the memory on. Fitted chunks are of a size that variables "
    f"of the network have, up to {LARGEST_CHUNK} times the paper's, whichever is fastest; to map "
    "one takes as long whatever its size, which is assumed: the paper says only that smaller ones "
    "cost more."
)
_OF_A_CPU = (
    "On a CPU the memory limit is SIMULATED: on tensors, for training in core and checkpointing; "
    "schedules get the largest budget whose requests the simulated allocators, scaled in "
    "proportion to the limit, serve within it. OutOfCore holds that budget and swaps to the same "
    "machine's memory. Each run was timed in turns with the largest mini-batch in core; claims "
    "judge the ratios to it by their spread, figures show their medians, tables median times. "
    "Seeing an operation costs some 30 μs, most of what is lost at small batch sizes."
)

_OF_A_LINK = (
    f"ResNet-50's copies are paced to a SIMULATED link, which moves {LINK_SHARE:.0%} of the bytes "
    "that the largest iteration in core holds in the time that it takes, each way, as the paper's "
    "does."
)


def facts(results: Results) -> Iterable[str]:
    """Yield what the records are: simulated or measured, device, networks, limits."""
    measured = [r for r in results.records if r.experiment in _MEASURING]
    if len(measured) < len(results.records):
        yield _OF_THE_V100
    if any(record.experiment == PACKED for record in results.records):
        yield _OF_PACKED
    if measured:
        yield f"Measured on {devices(measured)}; the paper's device is {PAPER['device']}."
        cpu = {r.experiment for r in measured if r.device["type"] == "cpu"}
        if cpu - {BY_SCHEDULE}:
            yield _OF_A_CPU
        elif cpu:
            yield (
                "OutOfCore swaps to the same machine's memory; each schedule was timed in turns "
                "with the largest mini-batch in core."
            )
        if any("link_share" in record.config for record in measured):
            yield _OF_A_LINK
        if any("link_bytes_per_s" in record.config for record in measured):
            rate = LINK_BYTES_PER_S / MIB
            yield f"Copies are paced to a SIMULATED link of {rate:g} MiB/s each way."
        yield from dict.fromkeys(map(_network, measured))
        yield "Inputs are SYNTHETIC (random numbers): only speed and memory are looked at."
    yield from _of_the_host(results)
    yield "x: out of memory, or no budget was found that the allocator serves."


def _of_the_host(results: Results) -> Iterable[str]:
    """Yield the most of the host's memory that was taken, and what was foretold of it."""
    rows = [
        (row["host_bytes"], record)
        for record in results.records
        if record.experiment in (SIMULATED, HALF) and record.status == "ok"
        for row in record.metrics["rows"].values()
        if row.get("host_bytes")
    ]
    if rows:
        most, record = max(rows, key=lambda row: row[0])
        yield (
            f"Simulated schedules take up to {gib(most)} of the host's memory "
            f"({record.config['role']}, {record.config['batch']} images); the paper's machine has "
            f"{PAPER['host_gb']} GB."
        )
    told = [
        (r.metrics["host_bytes"], r.metrics["host_foretold_bytes"])
        for r in results.records
        if r.status == "ok" and "host_foretold_bytes" in r.metrics
    ]
    if told:
        used, foretold = max(told)
        yield (
            f"Measured, what is swapped out takes up to {gib(used)} of the host's memory, where "
            f"{gib(foretold)} were foretold (`Trace.host_bytes`, in slabs of 32 MiB)."
        )


def _network(record: Record) -> str:
    config: dict[str, Any] = record.config
    options = ", ".join(f"{k} {v}" for k, v in config["model"].items() if k != "name")
    height, width = config["image"]
    limit = config.get("limit_between")
    within = (
        f"a limit that {limit[0]} images need in core and {limit[1]} exceed"
        if limit
        else f"a limit of {gib(config['limit_gib'] * GIB)}"
    )
    return (
        f"{config['role']} is {config['model']['name']}{f' ({options})' if options else ''} on "
        f"{height}×{width} pixels in {config['precision']} with {within}."
    )
