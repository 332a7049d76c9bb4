"""What is run under each profile: networks, layers, batch sizes, limits, settings."""

from typing import Any

from repro.experiments.design import Run, reported

MIB = 2**20
LIMITS_MIB = (8, 64, 512)  # of Caffe, of Caffe2, and ample (section IV)
POLICIES = ("undivided", "powerOfTwo", "all")
MODES = ("WR", "WD")

# Section IV-B: mini-batch sizes 256, 64 (TensorFlow) and 32 (Caffe), 256.
_ALEXNET = {"name": "torchvision/alexnet"}
_RESNET50 = {"name": "torchvision/resnet50"}
_DENSENET = {"name": "densenet40", "growth": 40}
_PAPER: dict[str, dict[str, Any]] = {
    "AlexNet": {"model": _ALEXNET, "image": 224, "batch": 256},
    "ResNet-50": {"model": _RESNET50, "image": 224, "batch": 64},
    "DenseNet-40": {"model": _DENSENET, "image": 32, "batch": 256},
}
NETWORKS: dict[str, dict[str, dict[str, Any]]] = {
    "smoke": {
        "AlexNet": {
            "model": {"name": "resnet_cifar", "depth": 8, "width": 4}, "image": 16, "batch": 4,
        },
        "ResNet-50": {
            "model": {"name": "resnet_cifar", "depth": 8, "width": 4}, "image": 16, "batch": 2,
        },
        "DenseNet-40": {"model": {"name": "densenet40", "growth": 2}, "image": 8, "batch": 2},
    },
    "quick": {
        "AlexNet": _PAPER["AlexNet"] | {"batch": 16},
        "ResNet-50": _PAPER["ResNet-50"] | {"image": 64, "batch": 4},
        "DenseNet-40": _PAPER["DenseNet-40"] | {"image": 16, "batch": 4},
    },
    "gpu": _PAPER,
    "paper": _PAPER,
}  # fmt: skip
ROLES = tuple(_PAPER)

# Data type and how float32 products are rounded. The paper's P100 has neither TF32 nor bf16.
_IEEE = {"dtype": "float32", "math": "ieee"}
SETTINGS: dict[str, dict[str, dict[str, str]]] = {
    "smoke": {"fp32": _IEEE},
    "quick": {"fp32": _IEEE},
    "gpu": {
        "fp32": _IEEE,
        "tf32": {"dtype": "float32", "math": "tf32"},
        "bf16": {"dtype": "bfloat16", "math": "ieee"},
    },
    "paper": {"fp32": _IEEE},
}

# What divisions are made of. On a CPU our own algorithms hardly ever win, and would take most of
# the measuring; two of them are in the layer benchmark.
_FEW = ["torch:native", "nnpack"]
ALGORITHMS = {"smoke": _FEW, "quick": _FEW, "gpu": ["torch:native", "cudnn"],
              "paper": ["torch:native", "cudnn"]}  # fmt: skip
_SOME = ["torch:native", "torch:im2col", "torch:winograd", "nnpack"]
EVERYTHING = {"smoke": ["torch", "nnpack"], "quick": _SOME,
              "gpu": ["torch", "cudnn"], "paper": ["torch", "cudnn"]}  # fmt: skip

# `all` measures every size up to the mini-batch; the networks where that takes minutes go without.
_WITH_ALL = {
    "smoke": ROLES,
    "quick": ("AlexNet",),
    "gpu": ("AlexNet",),
    "paper": ROLES,
}
REPEATS = {"smoke": 2, "quick": 3, "gpu": 10, "paper": 50}
CONV2_BATCH = {"smoke": 4, "quick": 64, "gpu": 256, "paper": 256}
THREADS = {"smoke": 1, "quick": 2, "gpu": None, "paper": None}


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
    return Run("candidates", base(profile, role, setting) | {"policy": policy}, seeds=(0,))


def conv2(profile: str) -> Run:
    """Return the measurement of AlexNet's second convolution (Figures 6 and 10)."""
    policy = "powerOfTwo" if profile == "quick" else "all"
    config = base(profile, "AlexNet") | {"batch": CONV2_BATCH[profile], "policy": policy}
    return Run("candidates", config | {"layer": "conv2", "kinds": ["forward"]}, seeds=(0,))


def network(
    profile: str, role: str, mode: str, limit_mib: int, policy: str, setting: str = "fp32"
) -> Run:
    """Return one tuned network, timed beside the untuned one.

    The limit is of each kernel under WR; under WD the total is that times the paper's number of
    kernels, so that the adjoined bars of Figure 11 have the same workspace in all.
    """
    kernels = reported("microconv")["figure11"]["kernels"][role] if mode == "WD" else 1
    return Run(
        "network",
        base(profile, role, setting)
        | {
            "mode": mode,
            "limit_mib": limit_mib * kernels,
            "policy": policy,
            "repeats": REPEATS[profile],
        },
        seeds=(0,),
    )


def settings(profile: str) -> tuple[str, ...]:
    """Return the settings of precision of a profile."""
    return tuple(SETTINGS[profile])


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
        **SETTINGS[profile][setting],
        "algorithms": EVERYTHING[profile],
        "threads": THREADS[profile],
        "limit_mib": 64,
        "policy": "powerOfTwo",
    }
    return Run("deepbench", config, seeds=(0,))


_CLUSTER: dict[str, dict[str, Any]] = {
    "smoke": {"model": {"name": "resnet18", "width": 4}, "image": 16, "batch": 8},
    "quick": {"model": {"name": "torchvision/resnet18"}, "image": 64, "batch": 32},
    "gpu": {"model": {"name": "torchvision/resnet18"}, "image": 224, "batch": 32},
    "paper": {"model": {"name": "torchvision/resnet18"}, "image": 224, "batch": 32},
}


def cluster(profile: str) -> Run:
    """Return the times of forward and backward passes on unequal devices, one at a time."""
    devices = ["fast", "slow"]
    config = _CLUSTER[profile] | {"devices": devices, "repeats": REPEATS[profile]}
    return Run("cluster", config | {"role": "ResNet-18"}, seeds=(0,))


def solver(profile: str) -> Run:
    """Return the solver's time on programmes of the paper's sizes."""
    sizes = [[159, 562], [465, 2500]]
    config = {"role": "synthetic fronts", "sizes": sizes, "repeats": 5}
    return Run("solver", config, seeds=(0,))
