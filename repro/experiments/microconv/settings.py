"""What is run under each profile, and how its records are picked and described."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repro.experiments.design import LONG, PROCESSES, Run, reported
from repro.experiments.judge import Estimate, exactly
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from repro.microconv import Candidate, Division

Entry = dict[str, Any]  # a kernel in a record's metrics

PAPER = reported("microconv")
MIB = 2**20
NATIVE = "torch:native"  # torch's own convolution
_PACKAGES = "torch:"  # all others that begin so are this package's: no library has them
KINDS = {"forward": "F", "backward_data": "BD", "backward_filter": "BF"}

LIMITS_MIB: tuple[int, ...] = tuple(PAPER["limits"]["each_mib"])  # small, moderate, ample
POLICIES = ("undivided", "powerOfTwo", "all")
MODES = ("WR", "WD")

BATCHES: dict[str, int] = PAPER["batches"]
_ALEXNET = {"name": "torchvision/alexnet"}
_RESNET50 = {"name": "torchvision/resnet50"}
_DENSENET = {"name": "densenet40", "growth": 40}
_PAPER: dict[str, dict[str, Any]] = {
    "AlexNet": {"model": _ALEXNET, "image": 224, "batch": BATCHES["AlexNet"]},
    "ResNet-50": {"model": _RESNET50, "image": 224, "batch": BATCHES["ResNet-50"]},
    "DenseNet-40": {"model": _DENSENET, "image": 32, "batch": BATCHES["DenseNet-40"]},
}
_RESNET152 = {"name": "torchvision/resnet152"}
_LARGEST: dict[str, dict[str, Any]] = {
    "ResNet-152": {"model": _RESNET152, "image": 224, "batch": BATCHES["ResNet-152"]}
}
_CAFFE: dict[str, Any] = {"model": {"name": "alexnet"}, "image": 227}  # two groups
# The paper's AlexNet is Caffe's, but in Table V the later one, without groups.
TABLE5_ALEXNET = "AlexNet, Table V"
_TO_THE_LETTER = (
    _PAPER
    | {"AlexNet": _CAFFE | {"batch": BATCHES["AlexNet"]}, TABLE5_ALEXNET: _PAPER["AlexNet"]}
    | _LARGEST
)
NETWORKS: dict[str, dict[str, dict[str, Any]]] = {
    "smoke": {
        "AlexNet": {
            "model": {"name": "resnet_cifar", "depth": 8, "width": 4},
            "image": 16,
            "batch": 4,
        },
        "ResNet-50": {
            "model": {"name": "resnet_cifar", "depth": 8, "width": 4},
            "image": 16,
            "batch": 2,
        },
        "DenseNet-40": {"model": {"name": "densenet40", "growth": 2}, "image": 8, "batch": 2},
        "ResNet-152": {
            "model": {"name": "resnet_cifar", "depth": 14, "width": 4},
            "image": 16,
            "batch": 2,
        },
    },
    "quick": {
        "AlexNet": _PAPER["AlexNet"] | {"batch": 8},
        "ResNet-50": _PAPER["ResNet-50"] | {"image": 64, "batch": 4},
        "DenseNet-40": {"model": {"name": "densenet40", "growth": 16}, "image": 16, "batch": 4},
        # Of ResNet-50's size, whose kernels it has: they are measured once.
        "ResNet-152": {"model": _RESNET152, "image": 64, "batch": 4},
    },
    # The paper's networks at a quarter of its mini-batches (ResNet-50 in Figure 11: half,
    # DenseNet-40: a sixteenth), and of its limits (`limit_of`).
    LONG: {
        "AlexNet": _PAPER["AlexNet"] | {"batch": 64},
        "ResNet-50": _PAPER["ResNet-50"] | {"batch": 16},
        "DenseNet-40": _PAPER["DenseNet-40"] | {"batch": 16},
    },
    "gpu": _TO_THE_LETTER,
    "paper": _TO_THE_LETTER,
}
ROLES = tuple(_PAPER)

# Data type and how float32 products are rounded. The paper's P100 has neither TF32 nor bf16.
_IEEE = {"dtype": "float32", "math": "ieee"}
SETTINGS: dict[str, dict[str, dict[str, str]]] = {
    "smoke": {"fp32": _IEEE},
    "quick": {"fp32": _IEEE},
    LONG: {"fp32": _IEEE},
    "gpu": {
        "fp32": _IEEE,
        "tf32": {"dtype": "float32", "math": "tf32"},
        "bf16": {"dtype": "bfloat16", "math": "ieee"},
    },
    "paper": {"fp32": _IEEE},
}

# Of Figure 8 alone, where a device computes it in float32 (PSEUDO_HALF) and in itself (TRUE_HALF).
HALF = "fp16"
_HALF = {"dtype": "float16", "math": "ieee"}
_WITH_HALF = ("gpu", "paper")
_TRUE_HALF: dict[str, Any] = {
    "algorithms": ["torch:native", "cudnn", "cudnn_half"],
    "max_error": 1e-2,
}

# What divisions are made of. On a CPU our own algorithms hardly ever win, and would take most of
# the measuring; some of them are in the layer benchmark. Where limits bind, one is there that needs
# next to no workspace, as cuDNN's implicit GEMM. The profile smoke is for any device.
ALGORITHMS = {
    "smoke": ["torch:native", "torch:im2col"],
    "quick": ["torch:native", "nnpack"],
    LONG: ["torch:native", "torch:implicit", "nnpack"],
    "gpu": ["torch:native", "cudnn"],
    "paper": ["torch:native", "cudnn"],
}
_SOME = ["torch:native", "torch:im2col", "torch:implicit", "torch:winograd", "nnpack"]
EVERYTHING = {
    "smoke": ["torch"],
    "quick": _SOME,
    # Figure 8 is cuDNN's; this package's own algorithms would take most of the measuring.
    "gpu": ["torch:native", "cudnn"],
    "paper": ["torch:native", "cudnn"],
}

# `all` measures every size up to the mini-batch; the networks where that takes minutes go without.
_WITH_ALL: dict[str, tuple[str, ...]] = {
    "smoke": ROLES,
    "quick": ("AlexNet",),
    LONG: (),
    "gpu": ("AlexNet",),
    "paper": (*ROLES, TABLE5_ALEXNET),
}
# On a GPU `all` is measured layer by layer, each of which takes a minute or so.
LAYERS = tuple(f"conv{number}" for number in range(1, 6))  # of AlexNet
_BY_LAYER = ("gpu",)
REPEATS = {"smoke": 2, "quick": 3, "gpu": 10, "paper": 50}
CONV2_BATCH = {"smoke": 4, "quick": 64, "gpu": 256, "paper": 256}
THREADS = {"smoke": 1, "quick": 2, LONG: 2, "gpu": None, "paper": None}


def base(profile: str, role: str, setting: str = "fp32") -> dict[str, Any]:
    """Return what all experiments on a network share."""
    return {
        "role": role,
        **NETWORKS[profile][role],
        "setting": setting,
        **SETTINGS[profile][setting],
        "algorithms": ALGORITHMS[profile],
        "threads": THREADS[profile],
    }


def policies(profile: str, role: str) -> tuple[str, ...]:
    """Return the policies that a network is run with."""
    return POLICIES if role in _WITH_ALL[profile] else POLICIES[:2]


def candidates(profile: str, role: str, policy: str, setting: str = "fp32") -> Run:
    """Return the measurement of a network's kernels, from an empty cache."""
    config = base(profile, role, setting) | {"policy": policy}
    return Run("candidates", config, seeds=(0,), label=f"{role}, {setting}, {policy}")


def alexnet_kernels(profile: str, policy: str) -> list[Run]:
    """Return the measurement of all of AlexNet's kernels, in one run or layer by layer."""
    if profile not in _BY_LAYER or policy != "all":
        return [candidates(profile, "AlexNet", policy)]
    return [_layer(profile, name, list(KINDS)) for name in LAYERS]


def _layer(profile: str, name: str, kinds: list[str]) -> Run:
    config = base(profile, "AlexNet") | {"policy": "all", "layer": name, "kinds": kinds}
    return Run("candidates", config, seeds=(0,), label=f"AlexNet's {name}, all")


def repeated(run: Run) -> Run:
    """Return a measurement by several processes."""
    return replace(run, seeds=PROCESSES)


def conv2(profile: str) -> Run:
    """Return the measurement of AlexNet's second convolution (Figures 6 and 10).

    Under `long` that of quick, by several processes.
    """
    if profile == LONG:
        return repeated(conv2("quick"))
    if profile in _BY_LAYER:
        return _layer(profile, "conv2", list(KINDS))
    policy = "powerOfTwo" if profile == "quick" else "all"
    config = base(profile, "AlexNet") | {"batch": CONV2_BATCH[profile], "policy": policy}
    config |= {"layer": "conv2", "kinds": ["forward"]}
    return Run("candidates", config, seeds=(0,), label=f"AlexNet's conv2, {policy}")


def network(
    profile: str,
    role: str,
    mode: str,
    limit_mib: int,
    policy: str,
    setting: str = "fp32",
    caffe: bool = False,
) -> Run:
    """Return one network's kernels within a limit, which is `limit_of` the paper's."""
    total = limit_of(profile, role, mode, limit_mib, caffe)
    config = base(profile, role, setting) | {"mode": mode, "limit_mib": total, "policy": policy}
    if caffe and NETWORKS[profile] is _TO_THE_LETTER:
        config["batch"] = figure11_batch(role)
    return Run(
        "network",
        config,
        seeds=(0,),
        label=f"{role}, {setting}, {mode}, {total:,} MiB, {policy}",
    )


def limit_of(profile: str, role: str, mode: str, limit_mib: float, caffe: bool = False) -> float:
    """Return the MiB that a network has where the paper's has `limit_mib` for each kernel.

    The limit is of each kernel under WR; under WD the total is that times the paper's number of
    kernels, so that the adjoined bars of Figure 11 have the same workspace in all. Under `long` it
    is as much for a sample as in the paper: workspaces grow with the mini-batch.

    Args:
        profile: Under which it runs.
        role: The network.
        mode: WR or WD.
        limit_mib: The paper's.
        caffe: Whether with the mini-batch of Figure 11, which is not Table V's of ResNet-50.
    """
    total = wd_total(role, limit_mib) if mode == "WD" else limit_mib
    if profile != LONG:
        return total
    batch = figure11_batch(role) if caffe else BATCHES[role]
    scaled = total * NETWORKS[LONG][role]["batch"] / batch
    return int(scaled) if scaled.is_integer() else scaled


def figure11_batch(role: str) -> int:
    """Return the paper's mini-batch of a network in Figure 11, which is not always Table V's."""
    return BATCHES.get(f"{role}, Caffe", BATCHES[role])


def told_limit(profile: str, role: str, mode: str, limit_mib: float, caffe: bool = False) -> str:
    """Return `limit_of` in words, beside the paper's that it stands for where that is another."""
    ran, paper = (limit_of(p, role, mode, limit_mib, caffe) for p in (profile, "paper"))
    return f"{ran:,} MiB" + f" (paper {paper:,})" * (ran != paper)


def wd_total(role: str, limit_mib: float) -> float:
    """Return the workspace of all kernels that WD has where WR has `limit_mib` for each."""
    kernels: int = PAPER["figure11"]["kernels"][role]
    return limit_mib * kernels


# Whole iterations, by network: what is changed of it, the limit for each kernel in MiB, and in what
# ways it is run: mode, total under WD, policy. On a CPU the limit is one at which undivided still
# fits, and torch's own convolutions do not: filters that are reordered take bytes that no smaller
# mini-batch saves, so that the paper's bytes per sample are out of reach for some kernels. ResNets
# are narrow in `quick`, so that images and not filters take the memory, as in the paper's.
Way = tuple[str, float | None, str]
_UNDIVIDED, _TWO, _ALL = (("WR", None, policy) for policy in POLICIES)
_SMALL_WAYS: tuple[Way, ...] = (_UNDIVIDED, _TWO)


def _wd(total_mib: float, policy: str) -> Way:
    return "WD", total_mib, policy


def _narrow(name: str, batch: int) -> dict[str, Any]:
    return {"model": {"name": name, "width": 16}, "image": 32, "batch": batch}


_RESNET18 = {"name": "torchvision/resnet18"}
CAFFE = "AlexNet, two groups"
NETWORK_OF: dict[str, dict[str, Any]] = {
    role: network["model"] for role, network in (_PAPER | _LARGEST).items()
} | {"ResNet-18": _RESNET18, CAFFE: _CAFFE["model"]}  # as the paper has them
_SQUEEZENET = {"model": {"name": "torchvision/squeezenet1_1"}}
_VGG11 = {"model": {"name": "torchvision/vgg11"}}
Iterated = tuple[dict[str, Any], float | None, tuple[Way, ...]]
_ITERATED: dict[str, dict[str, Iterated]] = {
    "smoke": {
        "AlexNet": ({}, 0.05, (*_SMALL_WAYS, _ALL, _wd(0.4, "all"))),
        "ResNet-50": ({}, 0.05, _SMALL_WAYS),
        "DenseNet-40": ({}, 0.02, _SMALL_WAYS),
        "ResNet-18": (
            {"model": {"name": "resnet18", "width": 4}, "image": 16, "batch": 2},
            0.05,
            _SMALL_WAYS,
        ),
        CAFFE: ({"model": {"name": "alexnet", "width": 6}, "image": 67}, 0.3, _SMALL_WAYS),
        "SqueezeNet": (_SQUEEZENET | {"image": 32, "batch": 2}, None, ()),
        "VGG-11": ({"model": {"name": "resnet18", "width": 4}, "image": 16, "batch": 2}, None, ()),
    },
    "quick": {
        # WD with what WR has in all.
        "AlexNet": ({}, 5.5, (*_SMALL_WAYS, _wd(82.5, "powerOfTwo"))),
        "ResNet-50": (_narrow("resnet50", 8), 1.5, _SMALL_WAYS),
        "DenseNet-40": ({}, 0.9, _SMALL_WAYS),
        "ResNet-18": (_narrow("resnet18", 16), 1.5, _SMALL_WAYS),
        # Others take the rest of five minutes: AlexNet in two groups, SqueezeNet, VGG-11.
    },
}
# With one thread: with two `tune` leaves most networks to torch, and nothing is there to compare.
_ITERATED[LONG] = _ITERATED["quick"] | {
    "SqueezeNet": (_SQUEEZENET | {"image": 224, "batch": 16}, None, ()),
    "VGG-11": (_VGG11 | {"image": 112, "batch": 4}, None, ()),
}
_ON_A_GPU: dict[str, Iterated] = {
    "AlexNet": (_PAPER["AlexNet"], LIMITS_MIB[1], _SMALL_WAYS),  # Table V's
    "ResNet-50": ({}, LIMITS_MIB[1], _SMALL_WAYS),
    "DenseNet-40": ({}, LIMITS_MIB[1], _SMALL_WAYS),
    "ResNet-18": (
        {"model": _RESNET18, "image": 224, "batch": BATCHES["ResNet-18"]},
        LIMITS_MIB[1],
        _SMALL_WAYS,
    ),
    CAFFE: (
        _CAFFE,
        LIMITS_MIB[1],
        (*_SMALL_WAYS, _ALL, _wd(120, "all"), _wd(960, "all")),
    ),
    "SqueezeNet": (_SQUEEZENET | {"image": 224, "batch": 64}, None, ()),
    "VGG-11": (_VGG11 | {"image": 224, "batch": 64}, None, ()),
}
ITERATED = (*ROLES, "ResNet-18", CAFFE)
# Tuned without a limit alone: their kernels' gains once did not reach the model.
ALONE = ("SqueezeNet", "VGG-11")
_ITERATED["gpu"] = {role: _ON_A_GPU[role] for role in ITERATED}
_PROCESSES = {"smoke": 1, "quick": 3, LONG: len(PROCESSES), "gpu": 3, "paper": 5}
# WD over WR asked for 40 when it had fifteen, ResNet-50 divided for 62 when it had five.
_MORE_PROCESSES = {(LONG, "AlexNet"): 40, (LONG, "ResNet-50"): 62}
# Rounds of torch's own twice and tuned without a limit, where that tunes anything.
_PAIRS = {"smoke": 2, "quick": 8, "gpu": 10, "paper": 50}
_FEWER_PAIRS = {("quick", "AlexNet"): 4}  # they take a second each
_MORE_REPEATS = {("quick", "ResNet-50"): 5, ("quick", "ResNet-18"): 5}  # they take 0.1 s each
_LOW_MEMORY = {"quick": ["torch:direct", "torch:im2col"]}  # as cuDNN's implicit GEMM


def iterated(profile: str) -> tuple[str, ...]:
    """Return the networks whose whole iterations are run."""
    known = _ITERATED.get(profile, _ON_A_GPU)
    return tuple(role for role in (*ITERATED, *ALONE) if role in known)


def iterations(profile: str, role: str) -> Run:
    """Return a network's whole iterations under a limit that binds, by policy, in turns."""
    changes, limit_mib, ways = _ITERATED.get(profile, _ON_A_GPU)[role]
    processes = _MORE_PROCESSES.get((profile, role), _PROCESSES[profile])
    threads = {"threads": 1} if profile == LONG else {}
    profile = "quick" if profile == LONG else profile
    common = base(profile, role if role in ROLES else "AlexNet")
    config = common | threads | {"role": role} | changes
    config["algorithms"] = [*common["algorithms"], *_LOW_MEMORY.get(profile, [])]
    config["free"] = len(common["algorithms"])  # of them, where no limit binds
    config |= {
        "limit_mib": limit_mib,
        "ways": [list(way) for way in ways],
        "processes": processes,
        "pairs": _FEWER_PAIRS.get((profile, role), _PAIRS[profile]),
        "repeats": _MORE_REPEATS.get((profile, role), REPEATS[profile]),
    }
    return Run("iterations", config, seeds=(0,), label=f"{role}, iterations")


# What torch does by itself on CUDA, beside our gains: see `iterating.RIVALS`. Each setting has
# processes of its own, and to try all plans of a deep network takes minutes: few, by run.
RIVALS = _TEN, _EVERY, _CAPPED, _LEGACY = (
    "cudnn.benchmark",
    "cudnn.benchmark, all plans",
    "cudnn.benchmark, all plans, capped",
    "cudnn.benchmark, legacy API, capped",
)
_RIVALS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (CAFFE, (_TEN, _EVERY)),
    (CAFFE, (_CAPPED, _LEGACY)),
    ("ResNet-50", (_TEN,)),
)


def rivals(profile: str) -> list[Run]:
    """Return torch's own iterations under other settings of torch, each in its own processes."""
    if profile not in ("gpu", "paper"):
        return []
    runs = []
    for role, names in _RIVALS:
        config = iterations(profile, role).config | {"ways": [], "rivals": list(names)}
        runs.append(Run("iterations", config, seeds=(0,), label=f"{role}, {' and '.join(names)}"))
    return runs


def settings(profile: str) -> tuple[str, ...]:
    """Return the settings of precision of a profile."""
    return tuple(SETTINGS[profile])


def benchmark_settings(profile: str) -> tuple[str, ...]:
    """Return those of the layer benchmark, whose numbers in the paper are of half precision."""
    return ("fp32", *[HALF] * (profile in _WITH_HALF))


# Table IV; `deepbench` has their layers.
NETWORK_TYPES = ("DeepSpeech", "OCR", "Face recognition", "Vision", "Speaker ID", "ResNet")

# The batch size's factor (4 in the paper); where layers are chosen: the largest that is run, in
# millions of multiplications at that batch size, and how many of each kernel size, cheapest first.
DEEPBENCH: dict[str, dict[str, Any]] = {
    "smoke": {"factor": 1, "largest_mmacs": 60, "of_each_size": 1},
    "quick": {"factor": 4, "largest_mmacs": 3000, "of_each_size": 1},
    "gpu": {"factor": 4, "largest_mmacs": None, "of_each_size": None},
    "paper": {"factor": 4, "largest_mmacs": None, "of_each_size": None},
}


def deepbench(profile: str, network_type: str, setting: str) -> Run:
    """Return the forward passes of one network type's layers."""
    config = {
        "role": network_type,
        **DEEPBENCH[profile],
        "setting": setting,
        **({HALF: _HALF} | SETTINGS[profile])[setting],
        "algorithms": EVERYTHING[profile],
        "threads": THREADS[profile],
        "limit_mib": LIMITS_MIB[1],
        "policy": "powerOfTwo",
    }
    config |= _TRUE_HALF if setting == HALF else {}
    return Run("deepbench", config, seeds=(0,), label=f"{network_type}, {setting}")


_CLUSTER: dict[str, dict[str, Any]] = {
    "smoke": {"model": {"name": "resnet18", "width": 4}, "image": 16, "batch": 8},
    "quick": {"model": {"name": "resnet18", "width": 16}, "image": 32, "batch": 32},
    "gpu": {"model": {"name": "torchvision/resnet18"}, "image": 224, "batch": 32},
    "paper": {"model": {"name": "torchvision/resnet18"}, "image": 224, "batch": 32},
}


def cluster(profile: str) -> Run:
    """Return the times of forward and backward passes on unequal devices, one at a time.

    Each is tuned within the limit of Table III.
    """
    config = _CLUSTER[profile] | {
        "role": "ResNet-18",
        "devices": ["fast", "slow"],
        "tuned_with": ALGORITHMS[profile],
        "limit_mib": LIMITS_MIB[1],
        "policy": "powerOfTwo",
        "repeats": REPEATS[profile],
    }
    return Run("cluster", config, seeds=(0,), label="ResNet-18")


def programme(profile: str) -> Run:
    """Return the 0-1 programme of ResNet-152's own kernels, with the total that the paper names."""
    if profile == LONG:
        return programme("quick")
    config = base(profile, "ResNet-152") | {
        "policy": "powerOfTwo",
        "limit_mib": PAPER["optimisation"]["largest_mib"],
        "repeats": 2 if profile == "smoke" else 5,
    }
    return Run("programme", config, seeds=(0,), label="ResNet-152, its own kernels")


def solver(profile: str) -> Run:
    """Return the solver's time on programmes of the paper's sizes."""
    sizes = [[159, 562], [465, 2500]]
    config = {"role": "synthetic fronts", "sizes": sizes, "repeats": 2 if profile == "smoke" else 5}
    return Run("solver", config, seeds=(0,), label="made-up fronts")


def best_candidates(results: Results, role: str, setting: str = "fp32") -> Record | None:
    """Return the measurement of a whole network with the most micro-batch sizes."""
    for policy in ("all", "powerOfTwo"):
        for record in results.ok("candidates", role=role, setting=setting, policy=policy):
            if not record.config.get("layer"):
                return record
        layers = results.ok("candidates", role=role, setting=setting, policy=policy)
        if whole := _joined(layers):
            return whole
    return None


def _joined(records: Sequence[Record]) -> Record | None:
    """Return the measurements of a network's layers as one, None where a layer is missing."""
    parts = {record.config.get("layer"): record for record in records}
    if any(name not in parts for name in LAYERS):
        return None
    layers = [parts[name] for name in LAYERS]
    metrics: dict[str, Any] = {
        name: sum(record.metrics[name] for record in layers)
        for name in ("benchmark_s", "optimise_s", "measured")
    }
    metrics["kernels"] = [entry for record in layers for entry in record.metrics["kernels"]]
    config = {k: v for k, v in layers[0].config.items() if k not in ("layer", "kinds")}
    return replace(layers[0], config=config, metrics=metrics)


def tunings(results: Results, policy: str) -> list[Record]:
    """Return the first tunings of AlexNet by a policy, one of each process."""
    records = results.ok("candidates", policy=policy)
    if not any(record.config.get("layer") for record in records):
        return records
    whole = _joined(records)
    return [] if whole is None else [whole]


def kernels_of(record: Record | None) -> list[Entry]:
    """Return a record's kernels, none where there is no record."""
    return [] if record is None else record.metrics["kernels"]


def conv2_entry(results: Results) -> Entry | None:
    """Return AlexNet's second convolution, forward."""
    entries = kernels_of(results.first("candidates", layer="conv2"))
    return next((entry for entry in entries if entry["kind"] == "forward"), None)


def candidates_of(entry: Entry, policy: str = "all") -> "dict[int, list[Candidate]]":
    """Return a kernel's candidates for the micro-batch sizes of a policy."""
    from repro.microconv import Candidate, micro_batch_sizes

    wanted = set(micro_batch_sizes(entry["batch"], policy))
    return {
        int(size): [Candidate(*way) for way in ways]
        for size, ways in entry["candidates"].items()
        if int(size) in wanted
    }


def divide(entry: Entry, limit_mib: float, policy: str = "all") -> "Division | None":
    """Return the fastest division of a kernel within a limit, None where none fits."""
    from repro.microconv import best_division

    try:
        return best_division(entry["batch"], candidates_of(entry, policy), int(limit_mib * MIB))
    except ValueError:
        return None


def divided_again(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of `candidates` that follow from the times that it measured."""
    entries = metrics["kernels"]
    checked = [
        row
        | {
            "parts": division.parts,
            "workspace_bytes": division.workspace_bytes,
            "predicted_s": division.time_s,
        }
        for row in metrics["checked"]
        if (division := divide(entries[0], row["limit_mib"], row["policy"])) is not None
    ]
    different = {(e["kind"], e["shape"], e["batch"]): e for e in entries}.values()
    return {
        "checked": checked,
        "infeasible_at_64_mib": sum(divide(e, 64, config["policy"]) is None for e in different),
    }


def front(entry: Entry, limit_mib: float | None = None) -> "list[Division]":
    """Return a kernel's desirable divisions within a limit; none where nothing fits."""
    from repro.microconv import pareto_front

    limit = None if limit_mib is None else int(limit_mib * MIB)
    try:
        return pareto_front(entry["batch"], candidates_of(entry), limit)
    except ValueError:
        return []


def label(entry: Entry) -> str:
    """Return a short name of a kernel, such as ``conv2 F``."""
    return f"{entry['layer']} {KINDS[entry['kind']]}"


def stands_for_mib(record: Record, limit_mib: float) -> float:
    """Return what a limit for each kernel is at the mini-batch of the paper's network.

    Workspaces grow with the mini-batch, and a limit that does not shrink with it excludes less.
    """
    return limit_mib * paper_batch(record.config["role"]) / record.config["batch"]


def paper_batch(role: str) -> int:
    """Return the paper's mini-batch of a network."""
    return BATCHES["AlexNet" if role in (CAFFE, TABLE5_ALEXNET) else role]


def table5_role(profile: str, role: str) -> str:
    """Return under which name Table V's network runs: its AlexNet is not that of the figures."""
    return TABLE5_ALEXNET if role == "AlexNet" and TABLE5_ALEXNET in NETWORKS[profile] else role


def ran(record: Record | None) -> list[Entry]:
    """Return a network's kernels, and torch's own against themselves, as they ran."""
    return [*kernels_of(record), *(record.metrics.get("own", []) if record else [])]


def ours_alone(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return this package's algorithms where a division is made of nothing else, else none.

    They stand in for an algorithm of a library that needs next to no workspace.
    """
    names = tuple(sorted({str(name) for _, name in row.get("parts", [])}))
    every = all(name.startswith(_PACKAGES) and name != NATIVE for name in names)
    return names if every else ()


class Scatter(NamedTuple):
    """What one comparison with torch's own convolution scatters by, on a log scale.

    Attributes:
        sd: Standard deviation; NaN where nothing is known.
        dof: Its degrees of freedom.
    """

    sd: float
    dof: int


def own_scatter(rows: Iterable[Mapping[str, Any]]) -> Scatter:
    """Return what comparisons with torch's own convolution scatter by.

    Where a division is torch's own convolution undivided, its time and torch's are two medians of
    the same thing, taken in turns as all others are: what they differ by is no effect.

    Args:
        rows: Kernels as they ran, with ``parts``, ``batch``, ``time_s`` and ``native_s``.
    """
    pairs = {
        (row["time_s"], row["native_s"])
        for row in rows
        if row.get("parts") == [[row["batch"], NATIVE]]
    }
    if not pairs:
        return Scatter(math.nan, 0)
    squares = [math.log(time_s / native_s) ** 2 for time_s, native_s in pairs]
    return Scatter(math.sqrt(math.fsum(squares) / len(squares)), len(squares))


def compared(mean: float, weight: float, scatter: Scatter) -> Estimate:
    """Return the logarithm of a ratio that is made of comparisons with torch's own.

    Args:
        mean: The logarithm.
        weight: Of the scatter in the error: the root of the sum of the comparisons' squared
            shares; 0 where nothing that was compared differs.
        scatter: Of one comparison (`own_scatter`).
    """
    if not weight:
        return exactly(math.exp(mean), log=True)
    error, dof = scatter.sd * weight, scatter.dof or math.nan
    return Estimate(mean, error, dof, log=True, trials="measurements")


def median(record: Record, name: str) -> float:
    """Return the median of a record's timing, in seconds."""
    return float(np.median(record.timings[name]["samples_s"]))


def settings_of(results: Results) -> list[str]:
    """Return the settings of precision that have records, in the order of the plan."""
    return list(dict.fromkeys(r.config["setting"] for r in results.records if r.status == "ok"))


def ms(seconds: float | None, digits: int = 1) -> str:
    """Return seconds as milliseconds."""
    return DASH if seconds is None else f"{1e3 * seconds:,.{digits}f}"


def mib(count: float | None) -> str:
    """Return bytes as MiB."""
    return DASH if count is None else f"{count / MIB:,.1f}"


def times(ratio: float | None) -> str:
    """Return a ratio as ``1.23×``."""
    return DASH if ratio is None else f"{ratio:.2f}×"
