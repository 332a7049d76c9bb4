"""What is run under each profile, and what captions and the setup say of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from repro.experiments.design import LONG, PROCESSES, Run, reported
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH

PAPER = reported("outofcore")
GIB, MIB = 2**30, 2**20
RESNET, DENSENET, PIX2PIXHD, DEEPLAB = ROLES = "ResNet-50", "DenseNet", "Pix2PixHD", "DeepLabv3+"
MODES = IN_CORE, SCHEDULE, CHUNKS = "in_core", "schedule", "schedule_va"
# Section 3 to the letter; MODES have our version of its schedule.
TO_THE_LETTER = ("paper", "paper_va")
PEERS = ("checkpointing", "save_on_cpu", "expandable_segments", "offload")
_BESIDE = {"smoke": PEERS[:1], "quick": PEERS[:1]}  # MODES; elsewhere all of these
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
    "paper_va": "schedule + VA, to the letter",
    "packed_va": "packed + VA",
    "packed_fitted": "packed + VA, fitted chunks",
    "bound": "no schedule beats",
    "checkpointing": "checkpointing",
    "save_on_cpu": "save_on_cpu",
    "expandable_segments": "in core, expandable segments",
    "offload": "asynchronous offload",
}
# In the order of their colours and marks, which all figures share.
WAYS = (*MODES, "paper", "lms", "packed_fitted", *PEERS[1:3], PEERS[0], *PEERS[3:])
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
PHYSICAL = "physical"
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
    "paper": tuple(PAPER["table1"]["batches"]),
}
# On a GPU that is lent for minutes: what decides a claim, by the way to train. Beyond 512 images
# save_on_cpu pins more than the host has, as torch rounds each tensor up to a power of two.
ON_A_GPU: dict[str, tuple[int, ...]] = {
    IN_CORE: (64, 128, 190, 256),
    SCHEDULE: (190, 256, 512, 928, 1248, 1440),
    CHUNKS: (190, 256, 512, 928, 1248, 1440),
    **dict.fromkeys(TO_THE_LETTER, (512, 928)),
    "checkpointing": (190, 256, 512, 928),
    "save_on_cpu": (190, 256, 512),
    "offload": (190, 256, 512),
    "expandable_segments": (190, 256),
}
BATCHES["gpu"] = tuple(sorted({batch for some in ON_A_GPU.values() for batch in some}))
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
GROWING["paper"] = _GROWING
# What 64 GiB of host memory hold: each try pins it anew.
GROWING["gpu"] = {
    DENSENET: (64, 128, 192, 512),
    PIX2PIXHD: (2, 4, 8, 16, 32),
    DEEPLAB: (3, 6, 12, 32),
}
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
WARMUP = {"smoke": 1, "quick": 1, "gpu": 1, "paper": 2}
REPEATS = {"smoke": 2, "quick": 3, "gpu": 7, "paper": 100}  # the paper averages 100
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
    """Return a training within as many bytes of tensors as the limit has, by one schedule.

    Under `long` that of quick, in more rounds and by several processes.
    """
    if profile == LONG:
        run = by_schedule("quick", schedule)
        return replace(run, config=run.config | {"repeats": 9}, seeds=PROCESSES)
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


def physical(role: str, batch: int) -> Run:
    """Return an iteration's requests, served without a limit by torch's allocator and by chunks."""
    config = {
        "role": role,
        **PUBLISHED[role],
        "precision": FLOAT32,
        "batch": batch,
        "limit_gib": PAPER["limit_gib"],
        "chunk_mib": PAPER["claims"]["chunk_mib"],
    }
    label = f"{role}, batch size {batch}, requests without a limit"
    return Run(PHYSICAL, config, seeds=(0,), label=label)


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
    if profile == "gpu":
        by_mode = ON_A_GPU
    else:
        ways = (*MODES, *_BESIDE.get(profile, (*TO_THE_LETTER, *PEERS)))
        by_mode = dict.fromkeys(ways, BATCHES[profile])
    pairs = [(batch, mode) for mode, some in by_mode.items() for batch in some]
    # By batch size: whatever stops it early leaves whole columns of the table.
    pairs.sort(key=lambda pair: pair[0])
    return runs + [measured(profile, RESNET, *pair) for pair in pairs]


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


MEASURING = (MEASURED, HALF_MEASURED, BY_SCHEDULE)
_OF_THE_V100 = (
    "SIMULATED V100: nothing ran on one. Torch's operations on the published networks, at the "
    "published image sizes, are recorded as traces. A schedule is planned for each trace and timed "
    f"by a model: copies at {PAPER['bandwidth_bytes_per_s'] / 1e9:g} GB/s each way, "
    f"{PAPER['limit_gib']} GiB of memory, served by simulators of torch's allocator and of chunks "
    f"of {PAPER['claims']['chunk_mib']} MiB.",
    "A simulated function takes a fixed time and a time in proportion to its bytes, as in the "
    "paper's figure 1. Both are fitted to the paper's images/s in core, of ResNet-50 and of "
    f"Pix2PixHD ({PAPER['section52']['pix2pixhd_images_per_s']:g} images/s); DenseNet and "
    "DeepLabv3+, of which the paper gives none, take ResNet-50's. No iteration runs faster than "
    f"the fastest of these. To map a chunk takes {1e3 * MAP_S:g} ms, our estimate from the paper's "
    "rows up to 256 images.",
    "No schedule beats: a bound that repro.outofcore.bound proves from the trace, the memory and "
    "the link. Budgets are found by trying, so that larger ones may be served. x: out of memory, "
    "or no budget was found that the allocator serves.",
)
_OF_PACKED = (
    "Packed: the plan looks at the whole iteration, not through a window, within the fastest of 16 "
    "budgets. Fitted chunks have the size of one of the network's variables, up to "
    f"{LARGEST_CHUNK} times the paper's chunk, whichever is fastest. That mapping one takes as "
    "long whatever its size is our assumption."
)
_OF_PHYSICAL = (
    "Without a limit, allocators serve the requests of the published networks' traces, of which "
    "nothing is computed: of all tensors in core, and by a schedule of "
    f"{PAPER['limit_gib']} GiB of tensors at most. Torch's allocator is SIMULATED. Chunks are "
    "mapped by the allocator of section 4 itself, in this machine's memory, and not written."
)
_OF_A_CPU = (
    "Measured here, the memory limit is SIMULATED. In core and with checkpointing it is a limit on "
    "tensors. A schedule gets the largest budget that the simulated allocators serve within it, "
    "their sizes in proportion to the limit. OutOfCore holds that budget, and swaps to the memory "
    "of the same machine. Each run is timed in turns with the largest mini-batch in core. Claims "
    "and figures take the ratios within these rounds, tables the median times. To see an operation "
    "costs some 30 μs, most of what is lost at small batch sizes."
)
_OF_A_LINK = (
    f"ResNet-50's copies are paced to a SIMULATED link. While the largest iteration in core runs, "
    f"it moves {LINK_SHARE:.0%} of the bytes which that holds, each way, as the paper's does."
)
_OF_SCHEDULES = (
    "By schedule, copies are paced to a SIMULATED link of "
    f"{LINK_BYTES_PER_S / MIB:g} MiB/s each way. All get the same budget: as many bytes of tensors "
    "as the limit has, whatever an allocator makes of them. Windows are 1.5 times the budget. LMS "
    "and vDNN know no budget; LMS has the fastest of its pairs of distances that keeps it."
)
_OF_HALVES = (
    "Half precision is torch's automatic mixed precision: activations in half, weights and the "
    "optimizer's state in float32. The loss in float16 is scaled by a fixed number. Traces are "
    "recorded with torch's lists of operations for a CPU."
)
_OF_TABLE1 = (
    "Columns of Table 1 are the paper's batch sizes, in brackets over the largest in core. What is "
    "measured here on a CPU has batch sizes of its own, in the same proportion."
)


def facts(results: Results) -> Iterable[str]:
    """Yield in a few words how the records depart from the paper; `setup` says the rest."""
    measured = [record for record in results.records if record.experiment in MEASURING]
    if len(measured) < len(results.records):
        yield "V100: SIMULATED."
    if measured:
        yield f"Measured: {departures([record.config for record in measured])}."


def departures(configs: Sequence[Mapping[str, Any]]) -> str:
    """Return what measured runs have instead of the paper's network, memory, link and data."""
    networks = {config["role"] for config in configs if config["model"] != _published(config)}
    parts = [f"STAND-IN network{'s' * (len(networks) > 1)}"] if networks else []
    paced = any(_is_paced(config) for config in configs)
    parts.append(f"SIMULATED memory limit{' and link' * paced}")
    return ", ".join([*parts, "SYNTHETIC images"])


def _published(config: Mapping[str, Any]) -> Any:
    return PUBLISHED[config["role"]]["model"]


def _is_paced(config: Mapping[str, Any]) -> bool:
    return "link_share" in config or "link_bytes_per_s" in config


def setup(records: Sequence[Record]) -> Iterable[str]:
    """Yield what artefacts share: simulated or measured, networks, limits, the host's memory."""
    measured = [record for record in records if record.experiment in MEASURING]
    if len(measured) < len(records):
        yield from _OF_THE_V100
    if any(record.experiment == PACKED for record in records):
        yield _OF_PACKED
    if any(record.experiment == PHYSICAL for record in records):
        yield _OF_PHYSICAL
    if any(record.device["type"] == "cpu" for record in measured):
        yield _OF_A_CPU
    if any("link_share" in record.config for record in measured):
        yield _OF_A_LINK
    if any("link_bytes_per_s" in record.config for record in measured):
        yield _OF_SCHEDULES
    if any(record.experiment in (HALF, HALF_MEASURED) for record in records):
        yield _OF_HALVES
    if any(record.config["role"] == RESNET for record in measured):
        yield _OF_TABLE1
    networks = list(dict.fromkeys(map(_network, measured)))
    if networks:
        yield (
            f"The paper's device is {PAPER['device']}. Measured networks: {'; '.join(networks)}. "
            "Their images are SYNTHETIC (random numbers), for only speed and memory are looked at."
        )
    yield from _of_the_host(records)


def _of_the_host(records: Sequence[Record]) -> Iterable[str]:
    """Yield the most of the host's memory that was taken, and what was foretold of it."""
    rows = [
        (row["host_bytes"], record.config)
        for record in records
        if record.experiment in (SIMULATED, HALF) and record.status == "ok"
        for row in record.metrics["rows"].values()
        if row.get("host_bytes")
    ]
    if rows:
        most, config = max(rows, key=lambda row: row[0])
        yield (
            f"Simulated schedules take up to {gib(most)} of the host's memory "
            f"({config['role']}, {config['batch']} images); the paper's machine has "
            f"{PAPER['host_gb']} GB."
        )
    pairs = [
        (record.metrics["host_bytes"], record.metrics["host_foretold_bytes"])
        for record in records
        if record.status == "ok" and "host_foretold_bytes" in record.metrics
    ]
    if pairs:
        used, foretold = max(pairs)
        yield (
            f"Measured schedules take up to {gib(used)} of the host's memory, where "
            f"{gib(foretold)} were foretold (Trace.host_bytes, in slabs of 32 MiB)."
        )


_NAMES = {
    "torchvision/resnet50": "ResNet-50",
    "torchvision/densenet121": "DenseNet-121",
    "densenet40": "DenseNet-40",
    "pix2pixhd": "Pix2PixHD",
    "deeplabv3plus": "DeepLabv3+",
    "resnet50": "ResNet-50",
}


def network_name(config: Mapping[str, Any]) -> str:
    """Return what the network of a run is called, such as ``ResNet-50 of width 16``."""
    model = config["model"]
    if model["name"] == "resnet_cifar":
        return f"ResNet-{model['depth']}"
    if config["model"] == _published(config):
        return _NAMES[model["name"]]
    size = [f"{word} {model[word]}" for word in ("width", "growth") if word in model]
    return " of ".join([_NAMES[model["name"]], *size])


def _network(record: Record) -> str:
    config: Mapping[str, Any] = record.config
    height, width = config["image"]
    limit = config.get("limit_between")
    within = (
        f"a limit which {limit[0]} images fit in core and {limit[1]} do not"
        if limit
        else f"a limit of {gib(config['limit_gib'] * GIB)}"
    )
    name = network_name(config)
    role = f" for {config['role']}" if name != config["role"] else ""
    return f"{name}{role} on {height}×{width} pixels in {config['precision']}, within {within}"
