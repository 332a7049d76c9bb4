"""How records are described: whose numbers they are, of which network and setting."""

from collections.abc import Iterable
from functools import partial

from repro.experiments.design import LONG
from repro.experiments.microconv.settings import (
    BATCHES,
    CAFFE,
    NETWORK_OF,
    PAPER,
    TABLE5_ALEXNET,
)
from repro.experiments.query import Results
from repro.experiments.view import panel
from repro.records import Record

CAFFES = "Caffe's AlexNet"  # the paper's, but in Table V

_TIMED = ("candidates", "network", "iterations", "deepbench", "cluster", "programme")


def stands_in(record: Record, caffes: bool = False) -> bool:
    """Return whether a record is of another network than the paper's.

    Args:
        record: Of a network, or of layers alone, which are the paper's.
        caffes: Whether the paper's AlexNet is Caffe's there, with two groups, and not the later
            one of Table V, which is torchvision's.
    """
    role, model = record.config["role"], record.config.get("model")
    if model is None or role not in NETWORK_OF:
        return False
    return bool(model != NETWORK_OF[CAFFE if caffes and role == "AlexNet" else role])


def marks(results: Results, caffes: bool = False) -> Iterable[str]:
    """Yield what of the records is not the paper's, for captions: networks and inputs.

    Args:
        results: Of an artefact.
        caffes: As of `stands_in`.
    """
    records = [record for record in results.records if record.status == "ok"]
    roles = dict.fromkeys(r.config["role"] for r in records if stands_in(r, caffes))
    names = ", ".join(role.replace(", two groups", " (two groups)") for role in roles)
    parts = [f"STAND-IN for the paper's {names}"] if roles else []
    if any(record.experiment in _TIMED for record in records):
        parts.append("SYNTHETIC inputs")
    if parts:
        yield f"{'; '.join(parts)}."
    if (processes := len({record.seed for record in records})) > 1:
        yield f"Shown: the first of {processes} processes."


caffe_marks = partial(marks, caffes=True)


def scaled_marks(results: Results, caffes: bool = True) -> Iterable[str]:
    """Yield `marks`, and that limits are scaled where they are."""
    yield from marks(results, caffes)
    if results.profile == LONG:
        yield "Limits shrink with the mini-batch."


_WRITTEN = {
    "alexnet": "AlexNet",
    "densenet40": "DenseNet-40",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "resnet152": "ResNet-152",
    "resnet_cifar": "ResNet for CIFAR",
    "squeezenet1_1": "SqueezeNet 1.1",
    "vgg11": "VGG-11",
}


def own_network(record: Record) -> str:
    """Return the network that a record is of, such as ``ResNet-50 of width 16``."""
    model = record.config["model"]
    options = ", ".join(f"{key} {value}" for key, value in model.items() if key != "name")
    library, _, name = model["name"].rpartition("/")
    of = f"{library}'s " if library else ""
    return f"{of}{_WRITTEN.get(name, name)}{f' of {options}' if options else ''}"


def network_name(record: Record, caffes: bool = False) -> str:
    """Return what ran, and for which network of the paper where that is another.

    Args:
        record: Of a network.
        caffes: As of `stands_in`.
    """
    role = record.config["role"]
    if not stands_in(record, caffes):
        return str(role)
    return f"{own_network(record)} (for {CAFFES if caffes and role == 'AlexNet' else role})"


def whose(record: Record | None, role: str, what: str = "") -> str:
    """Return the title of a figure of one network: ours, and whose place it takes.

    Args:
        record: None where there is none.
        role: The paper's network.
        what: Of it is shown, such as a layer.
    """
    if record is None:
        return "ours: not run"
    ours = f"{what}{own_network(record)}, mini-batch {record.config['batch']},"
    return panel(role, ours, "SYNTHETIC inputs")


# What a notebook's Setup says once for all that it shows.
HELD = (
    "A limit holds for every temporary byte of a convolution, also for those that torch's own "
    "(torch:native) allocates inside, which are measured. WR gives each kernel the same limit, WD "
    "shares one workspace out among all; powerOfTwo and all name the micro-batch sizes."
)


TUNED = (
    "A speed-up over undivided compares two runs through torch's own convolution, which each of "
    "them times in turns with its kernels."
)


def setup(records: Iterable[Record]) -> Iterable[str]:
    """Yield what all artefacts share: networks and what they stand in for, algorithms, limits."""
    records = [record for record in records if record.status == "ok"]
    yield f"The paper measured on {PAPER['device']}."
    if networks := _networks(records):
        yield f"Inputs and weights are random numbers (SYNTHETIC). Networks: {networks}."
    named = dict.fromkeys(name for r in records for name in r.config.get("algorithms", ()))
    if named:
        yield f"Divisions are made of {', '.join(sorted(named))}."
    if "torch:implicit" in named:
        yield (
            "torch:implicit, slow and of this package, is there for cuDNN's implicit GEMM: it "
            "needs next to no workspace. Where most undivided kernels are left to it, a gain over "
            "undivided is shown, but no claim is judged by it."
        )
    yield HELD
    yield TUNED
    if any(record.device["type"] == "cpu" for record in records):
        yield "On a CPU the process keeps the memory it frees, so that times hold no page faults."


_PUBLISHED = {
    "AlexNet": f"{BATCHES['AlexNet']}, and Caffe's network with two groups but for Table V",
    "ResNet-50": f"{BATCHES['ResNet-50']} in Table V, {BATCHES['ResNet-50, Caffe']} in Figure 11",
    "DenseNet-40": f"{BATCHES['DenseNet-40']}, k = 40",
    "ResNet-18": f"{BATCHES['ResNet-18']}",
    "ResNet-152": f"{BATCHES['ResNet-152']}, section IV-B2",
    CAFFE: f"{BATCHES['AlexNet']}, Caffe's",
    TABLE5_ALEXNET: f"{BATCHES['AlexNet']}",
    "SqueezeNet": "none",
    "VGG-11": "none",
}


def _networks(records: Iterable[Record]) -> str:
    """Return each network as it is here and in the paper, with the mini-batches that it has."""
    batches: dict[tuple[str, str], set[int]] = {}
    for record in records:
        config = record.config
        if "model" in config:
            ran = f"{own_network(record)}, {config['image']}×{config['image']} pixels"
            batches.setdefault((config["role"], ran), set()).add(config["batch"])
    return "; ".join(
        f"{role}: {ran}, mini-batch {' and '.join(map(str, sorted(sizes)))} "
        f"(the paper's: {_PUBLISHED.get(role, 'none')})"
        for (role, ran), sizes in sorted(batches.items())
    )
