"""What is run under each profile, and how its records are picked and described."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from repro.experiments.design import LONG, PROCESSES, Results, Run, reported
from repro.experiments.judge import BySeed, Cell
from repro.records import Record

PAPER = reported("dualbatch")
WORKERS: int = PAPER["workers"]
K: tuple[float, ...] = tuple(dict.fromkeys(row["k"] for row in PAPER["table2"]["rows"]))
ROLE = "ResNet-18"  # the paper's network
CIFAR, IMAGENET = "CIFAR", "ImageNet"
PARTS = {CIFAR: "cifar", IMAGENET: "imagenet"}  # their names in the paper's numbers
TIMES = "dualbatch_times"  # repro.datasets.TIMES, which torch stands behind
SECTION_5_1, SECTION_5_2, SECTION_5_2_3 = "section 5.1", "section 5.2", "section 5.2.3"
KEPT = "5.1, momentum kept"  # section 5.1 again, where its momentum restarts
SCHEMES = {"dual-batch": "dual_batch", "hybrid": "hybrid"}  # in the paper's numbers
ENGINES = ("local", "ray")
SOLVED = {"solve", "schemes"}  # experiments that measure nothing
TRAINED = {"train", "synchronise", "flatness", "own_plan"}
MIB = 2**20

_OWN = ("cifar100", "cifar10", "digits")
_RECORDED = ("cifar10", "cifar100", "digits")  # quick and long have records of CIFAR-10
DATASETS: dict[str, dict[str, tuple[str, ...]]] = {
    # The authors' raw measurements; where they are not at hand nothing stands in for them.
    "smoke": {CIFAR: ("digits",), "times": ()},
    "quick": {CIFAR: _RECORDED, "times": (TIMES,)},
    "long": {CIFAR: _RECORDED, "times": (TIMES,)},
    "gpu": {CIFAR: _OWN, "times": (TIMES,)},
    "paper": {CIFAR: _OWN, "times": (TIMES,), IMAGENET: ("imagenet",)},
}

_RESNET18: dict[str, Any] = {"name": "resnet18"}
_SMALL: dict[str, Any] = {"name": "resnet_cifar", "depth": 8, "width": 8}
_WHOLE = {"autocast": None, "channels_last": False}
_MIXED = {"autocast": "bfloat16", "channels_last": True}
# A small worker's steps are bound by launches.
_FAST = _MIXED | {"captured": True, "benchmark": True}
# Records of quick and long are older: where a configuration does not say, momentum restarts.
# Workers end together but for rounding: a jitter of 1 % of each share's time gives every seed an
# order of commits of its own. It is declared, not measured.
_WORKERS = {"optimizer_state": "kept", "jitter": 0.01}

# For each profile: the model; pixels for each of the paper's; the share of its batch sizes; samples
# of an epoch; test samples, and those measured before the last epoch where they are fewer; epochs
# of the stages; how a step is computed; what workers keep, and by how much their times vary.
SCALE: dict[str, dict[str, Any]] = {
    "smoke": {
        "model": _SMALL,
        "pixels": 0.25,
        "batches": 0.04,
        "train_samples": 80,
        "test_samples": 40,
        "stages": (2, 2, 2),
        "compute": _WHOLE,
    },
    "quick": {
        "model": _SMALL,
        "pixels": 0.5,
        "batches": 0.1,
        "train_samples": 1000,
        "test_samples": 1000,
        "stages": (4, 2, 2),
        "compute": _WHOLE,
    },
    # A quarter of the images in batches of a quarter: as many updates an epoch as in the paper. In
    # float32: bfloat16 gains only where the CPU multiplies it, and costs much on others.
    "long": {
        "model": _SMALL,
        "pixels": 0.5,
        "batches": 0.25,
        "train_samples": 12_500,
        "test_samples": 10_000,
        "watched_samples": 2_000,
        "stages": (16, 8, 4),
        "compute": _WHOLE | {"channels_last": True},
    },
    "gpu": {
        "model": _RESNET18,
        "pixels": 1.0,
        "batches": 1.0,
        "train_samples": 50_000,
        "test_samples": 10_000,
        "stages": (80, 40, 20),
        "compute": _FAST,
        "workers": _WORKERS,
    },
    "paper": {
        "model": _RESNET18,
        "pixels": 1.0,
        "batches": 1.0,
        "train_samples": 50_000,
        "test_samples": 10_000,
        "stages": (80, 40, 20),
        "compute": _WHOLE,
        "workers": _WORKERS,
    },
}

# Section 5.2.3, at scale: pixels for each of the paper's, share of its batch sizes.
IMAGENET_SCALE: dict[str, dict[str, Any]] = {
    "smoke": {"model": _SMALL, "pixels": 0.05, "batches": 0.1, "compute": _WHOLE},
    "quick": {"model": _SMALL | {"width": 16}, "pixels": 0.125, "batches": 0.04, "compute": _WHOLE},
    "gpu": {
        "model": {"name": "torchvision/resnet18"},
        "pixels": 1.0,
        "batches": 1.0,
        "compute": _MIXED,
    },
    # Mixed precision as in the paper; bfloat16 needs no scaling of the loss.
    "paper": {
        "model": {"name": "torchvision/resnet18"},
        "pixels": 1.0,
        "batches": 1.0,
        "compute": _MIXED,
    },
}


# Training and test images of the sets that are always there, where they are fewer than asked for.
_SMALL_SETS = {"digits": (1_400, 355), "synthetic": (2_048, 512)}


def _samples(profile: str, name: str) -> tuple[int, int]:
    train, test = _SMALL_SETS.get(name, (SCALE["paper"]["train_samples"],) * 2)
    return min(SCALE[profile]["train_samples"], train), min(SCALE[profile]["test_samples"], test)


def scaled(profile: str, batch: int) -> int:
    """Return the batch size that stands for one of the paper's on CIFAR."""
    return max(2, round(batch * SCALE[profile]["batches"]))


def pixels(profile: str, side: int) -> int:
    """Return the side that stands for one of the paper's on CIFAR."""
    return round(side * SCALE[profile]["pixels"])


def _dataset(profile: str, name: str) -> dict[str, Any]:
    scale = SCALE[profile]
    side = pixels(profile, 32)
    dataset: dict[str, Any] = {"name": name}
    if name == "synthetic":
        return dataset | {"image_size": side}
    if name == "digits":
        return dataset if side == 8 else dataset | {"image_size": side}
    if side != 32:
        dataset["image_size"] = side
    if profile in ("quick", "long"):  # decodes no more than it takes
        classes = 100 if name == "cifar100" else 10
        dataset["per_class"] = math.ceil(scale["train_samples"] / classes)
    return dataset


def _base(profile: str, chosen: Mapping[str, str]) -> dict[str, Any]:
    scale = SCALE[profile]
    name = chosen[CIFAR]
    return {
        "model": scale["model"],
        "dataset": _dataset(profile, name),
        # Sections 5.1.1 and 5.2.2 name no augmentation: the field's usual one for these images.
        "augment": {"padding": pixels(profile, 4), "flip": name != "digits"},
        **scale["compute"],
        **scale.get("workers", {}),
        **{key: scale[key] for key in ("watched_samples",) if key in scale},
    }


def _stages(profile: str, rates: Sequence[float]) -> list[list[float]]:
    epochs = SCALE[profile]["stages"]
    return [[count, rate] for count, rate in zip(epochs, rates, strict=True)]


def shortened(profile: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a training that is compared with others of its length: under gpu a quarter as long."""
    if profile != "gpu":
        return config
    stages = [[epochs // 4, rate] for epochs, rate in config["stages"]]
    return config | {"stages": stages, "warmup_epochs": math.ceil(config["warmup_epochs"] / 4)}


def time_coefficients(resolution: int, batches: float) -> tuple[float, float]:
    """Return a and b of the paper's devices at one of its resolutions, for scaled batch sizes.

    b / a is what gives Table 6. a at 32 and 24 pixels is what then gives the times of Table 8's
    trainings, 1,541 s and 1,385 s; at 288 pixels Table 10's 33,975 s, and at 160 and 224 it is
    taken in proportion to the pixels (the hybrid training is then 21,669 s, the paper's 22,161 s).
    With b scaled like the batch sizes B_S / B_L is the paper's.
    """
    ratio = PAPER["inferred"][f"ratio_{resolution}"]
    table = PAPER["table6"]["cifar" if resolution < 100 else "imagenet"]
    large = dict(zip(table["resolutions"], table["large_batches"], strict=True))[resolution]
    whole = PAPER["table8"]["dual_batch_s"] / 140
    seconds = {
        32: whole,
        24: PAPER["table8"]["hybrid_s"] / 70 - whole,
        288: PAPER["table10"]["dual_batch_s"] / 105,
    }
    if resolution in (160, 224):
        a, _ = time_coefficients(288, 1.0)
        a *= (resolution / 288) ** 2
    else:
        a = seconds[resolution] / table["large_samples"] / (1 + ratio / large)
    return a, a * ratio * batches


def plan_config(
    a: float,
    b: float,
    k: float,
    n_small: int,
    large_batch: int,
    samples: int,
    rounding: str = "nearest",
) -> dict[str, Any]:
    """Return the arguments of `DualBatchPlan.solve`."""
    return {
        "a": a,
        "b": b,
        "k": k,
        "n_small": n_small,
        "n_large": WORKERS - n_small,
        "large_batch": large_batch,
        "samples": samples,
        "rounding": rounding,
    }


def table5_training(
    profile: str, chosen: Mapping[str, str], k: float, n_small: int, factor: str = "linear"
) -> Run:
    """Return a training of section 5.1; the baseline, with warm-up, where n_small is 0."""
    scale, training = SCALE[profile], PAPER["training"]
    inferred = PAPER["inferred"]
    large = scaled(profile, PAPER["table2"]["large_batch"])
    plan = plan_config(
        inferred["a"],
        inferred["b"] * scale["batches"],
        k,
        n_small,
        large,
        _samples(profile, chosen[CIFAR])[0],
        "floor" if scale["batches"] == 1 else "nearest",
    )
    stages = _stages(profile, [rate for _, rate in training["stages"]])
    share = sum(scale["stages"]) / sum(epochs for epochs, _ in training["stages"])
    warmup = math.ceil(training["warmup_epochs"] * share) if n_small == 0 else 0
    workers_told = f"(n_S, n_L) = {workers(n_small)}"
    return Run(
        "train",
        _base(profile, chosen)
        | {
            "setting": SECTION_5_1,
            "n_small": n_small,
            "k": k if n_small else 1.0,
            "factor": factor if n_small else "linear",
            "stages": stages,
            "warmup_epochs": warmup,
            "sub_stages": [{"resolution": None, "dropout": None, "plan": plan}],
            "test_samples": _samples(profile, chosen[CIFAR])[1],
            "sync": "asp",
            "engine": "local",
        },
        label=f"k = {k:g}, {workers_told}, factor {factor}" if n_small else "baseline",
    )


def table8_training(profile: str, chosen: Mapping[str, str], n_small: int, hybrid: bool) -> Run:
    """Return a training of section 5.2.2: dual-batch learning, or the hybrid scheme."""
    scale, table = SCALE[profile], PAPER["table6"]["cifar"]
    sub_stages = []
    for side, large, dropout in zip(
        table["resolutions"], table["large_batches"], PAPER["table7"]["dropouts"], strict=True
    ):
        a, b = time_coefficients(side, scale["batches"])
        plan = plan_config(
            a,
            b,
            PAPER["table6"]["k"],
            n_small,
            scaled(profile, large),
            _samples(profile, chosen[CIFAR])[0],
        )
        sub_stages.append({"resolution": pixels(profile, side), "dropout": dropout, "plan": plan})
    return Run(
        "train",
        _base(profile, chosen)
        | {
            "setting": SECTION_5_2,
            "scheme": "hybrid" if hybrid else "dual-batch",
            "n_small": n_small,
            "k": PAPER["table6"]["k"],
            "factor": "linear",
            "stages": _stages(profile, [rate for _, rate in PAPER["table7"]["stages"]]),
            "warmup_epochs": 0,
            "sub_stages": sub_stages if hybrid else sub_stages[-1:],
            "test_samples": _samples(profile, chosen[CIFAR])[1],
            "sync": "asp",
            "engine": "local",
        },
        label=f"{'hybrid' if hybrid else 'dual-batch'}, n_S = {n_small}",
    )


def imagenet_training(profile: str, chosen: Mapping[str, str], n_small: int, hybrid: bool) -> Run:
    """Return a training of section 5.2.3, for the profile ``paper``."""
    table = PAPER["table6"]["imagenet"]
    sub_stages = []
    for side, large, dropout in zip(
        table["resolutions"], table["large_batches"], PAPER["table9"]["dropouts"], strict=True
    ):
        a, b = time_coefficients(side, 1.0)
        plan = plan_config(a, b, PAPER["table6"]["k"], n_small, large, PAPER["imagenet_samples"])
        sub_stages.append({"resolution": side, "dropout": dropout, "plan": plan})
    return Run(
        "train",
        {
            "model": IMAGENET_SCALE[profile]["model"],
            "dataset": {"name": chosen[IMAGENET], "image_size": 288},
            "augment": {"padding": 32, "flip": True},
            **IMAGENET_SCALE[profile]["compute"],
            **SCALE[profile].get("workers", {}),
            "setting": SECTION_5_2_3,
            "scheme": "hybrid" if hybrid else "dual-batch",
            "n_small": n_small,
            "k": PAPER["table6"]["k"],
            "factor": "linear",
            "stages": PAPER["table9"]["stages"],
            "warmup_epochs": 0,
            "sub_stages": sub_stages if hybrid else sub_stages[-1:],
            "test_samples": 50_000,
            "sync": "asp",
            "engine": "local",
        },
        label=f"ImageNet, {'hybrid' if hybrid else 'dual-batch'}, n_S = {n_small}",
    )


def solved(table: str) -> Run:
    """Return the solving of Table 2 or 6, or the schedule of Table 7 or 9."""
    return Run("solve", {"table": table, "inferred": PAPER["inferred"]}, seeds=(0,), label=table)


_TIMED = {  # batch sizes that are timed, as the paper's; at scale
    "smoke": (50, 500, 1000, 2000),
    "quick": (80, 120, 160, 200, 240, 300, 400, 500, 600),
}
# Of which whole epochs are timed; by default of all.
_EPOCHS_TIMED = {"gpu": [16, 38, 64, 87, 127, 160, 205, 256, 384, 500, 600]}
_ALL_TIMED = (
    16,
    32,
    38,
    64,
    83,
    87,
    96,
    127,
    128,
    154,
    160,
    192,
    205,
    242,
    256,
    320,
    384,
    448,
    500,
    560,
    600,
)


def step_times(profile: str) -> Run:
    """Return the timing of steps at both resolutions, and of the shares of Table 4.

    Under `long` of quick's epochs, in more turns and by several processes.
    """
    if profile == LONG:
        run = step_times("quick")
        return replace(run, config=run.config | {"repeats": 21}, seeds=PROCESSES)
    scale = SCALE[profile]
    sizes = sorted({scaled(profile, size) for size in _TIMED.get(profile, _ALL_TIMED)})
    large = PAPER["table6"]["cifar"]["large_batches"]
    return Run(
        "times",
        {
            "role": CIFAR,
            "classes": 100,
            "model": scale["model"],
            "dataset": None,
            **scale["compute"],
            "resolutions": [pixels(profile, side) for side in (24, 32)],
            "batch_sizes": sizes,
            "large_batches": [scaled(profile, size) for size in large],
            "plan_k": list(K),
            "plan_large_batch": scaled(profile, PAPER["table2"]["large_batch"]),
            "samples": scale["train_samples"],
            "passes": _EPOCHS_TIMED.get(profile, True),
            "repeats": {"smoke": 3, "quick": 5, "gpu": 3}.get(profile, 9),
        },
        seeds=(0,),
        label=CIFAR,
    )


def memory(profile: str, role: str) -> Run:
    """Return the measurement of peak memory, and of the largest batch under a limit (Figure 13)."""
    figure = PAPER["figure13"]
    scale = SCALE[profile] if role == CIFAR else IMAGENET_SCALE[profile]
    small = profile in ("smoke", "quick")
    divisor = {"smoke": 32, "quick": 8}.get(profile, 1)
    side = figure["cifar" if role == CIFAR else "imagenet"]["resolution"]
    return Run(
        "memory",
        {
            "role": role,
            "classes": 100 if role == CIFAR else 1000,
            "model": scale["model"],
            "autocast": None if role == CIFAR else scale["compute"]["autocast"],
            "channels_last": scale["compute"]["channels_last"],
            "resolution": max(8, round(side * scale["pixels"])),
            "batch_sizes": [size // divisor for size in figure["batch_sizes"]],
            # As many times the largest probe as the paper's device has over it, or its 24 GiB.
            "limit_over_largest_probe": 4 if small else None,
            "limit_bytes": None if small else figure["device_gib"] * 2**30,
        },
        seeds=(0,),
        label=role,
    )


def published_times(chosen: Mapping[str, str]) -> list[Run]:
    """Return the fit to the authors' raw measurements, where they are at hand."""
    if chosen.get("times") != TIMES:
        return []
    return [Run("published", {"dataset": {"name": TIMES}}, seeds=(0,), label="GTX 1080")]


def clusters(profile: str, chosen: Mapping[str, str]) -> list[Run]:
    """Return one training with two workers, by both engines; under smoke without a cluster."""
    base = table5_training(profile, chosen, K[1], 2).config
    plan = base["sub_stages"][0]["plan"] | {"n_small": 1, "n_large": 1}
    config = base | {
        "n_small": 1,
        "workers": 2,
        "verify": SCALE[profile]["train_samples"] <= 1000,
        "sub_stages": [base["sub_stages"][0] | {"plan": plan}],
    }
    return [
        Run("train", config | {"engine": engine}, seeds=(0,), label=f"two workers, {engine}")
        for engine in ENGINES[: 1 if profile == "smoke" else None]
    ]


def section51(results: Results, k: float, n_small: int, factor: str = "linear") -> list[Record]:
    """Return the trainings of section 5.1 that ended; the baseline has n_small = 0, whatever k."""
    return results.ok(
        "train", setting=SECTION_5_1, n_small=n_small, k=k if n_small else 1.0, factor=factor
    )


def section52(
    results: Results, n_small: int, scheme: str, setting: str = SECTION_5_2
) -> list[Record]:
    """Return the trainings of section 5.2 that ended: ``dual-batch`` or ``hybrid``."""
    return results.ok("train", setting=setting, n_small=n_small, scheme=scheme)


def final(results: Results, records: Sequence[Record], name: str) -> BySeed:
    """Return a metric after the last epoch, one value for each seed."""

    def read(record: Record) -> float:
        return float(record.metrics[name][-1])

    # All seeds with momentum kept were planned before any was looked at.
    if records and records[0].config.get("setting") == KEPT:
        return BySeed.of(records, read)
    return results.cell(records, read)


def by_process(results: Results, experiment: str, values: Sequence[float]) -> Cell:
    """Return one value of each process with its number; of one process its rounds as they are."""
    records = results.processes(experiment)
    if len(records) < 2:
        return values
    of = dict(zip((record.seed for record in records), values, strict=True))
    return results.cell(records, lambda record: of[record.seed])


def solved_rows(results: Results, table: str) -> list[dict[str, Any]]:
    """Return what was solved for a table, nothing where it was not."""
    record = results.first("solve", table=table)
    return record.metrics["rows"] if record else []


def measured(results: Results, experiment: str, role: str) -> dict[str, Any]:
    """Return the metrics of a measurement, empty where there is none."""
    there = results.first(experiment, role=role)
    return results.measured(experiment, role=role).metrics if there else {}


def config_of(results: Results, experiment: str, role: str) -> dict[str, Any]:
    """Return the configuration of a measurement, empty where there is none."""
    record = results.first(experiment, role=role)
    return record.config if record else {}


def frameworks(results: Results) -> dict[str, dict[str, Any]]:
    """Return what was fitted to the authors' raw measurements, by framework."""
    record = results.first("published")
    return record.metrics["frameworks"] if record else {}


def workers(n_small: int) -> str:
    """Return the numbers of workers as the paper has them."""
    return f"({n_small}, {WORKERS - n_small})"


def coefficients(a: float, b: float) -> dict[str, str]:
    """Return the time model t = a x + b as cells of a table."""
    return {
        "a (ms per sample)": f"{1e3 * a:.4f}",
        "b (ms per step)": f"{1e3 * b:.2f}",
        "b / a (samples)": f"{b / a:.1f}",
    }


def mix(n_small: int) -> str:
    """Return in words how many of the workers have small and how many have large batches."""
    parts = ((n_small, "small"), (WORKERS - n_small, "large"))
    return ", ".join(f"{count} {size}" for count, size in parts if count)
