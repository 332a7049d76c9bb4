"""The runs of each profile, from the tables in ``paper.toml``, and the names of what ran."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from repro.experiments.captions import caption, panel
from repro.experiments.design import LONG, PROCESSES, Results, Run
from repro.experiments.outcome import paper_toml
from repro.records import Record

CONTENT = paper_toml("microconv")
PAPER = CONTENT["reported"]
MIB = 2**20

LIMITS_MIB: tuple[int, int, int] = tuple(PAPER["limits"]["each_mib"])
SMALL, MODERATE, AMPLE = LIMITS_MIB
POLICIES = ("undivided", "powerOfTwo", "all")
MODES = ("WR", "WD")
KINDS = {"forward": "F", "backward_data": "BD", "backward_filter": "BF"}
LAYERS = tuple(f"conv{number}" for number in range(1, 6))  # of AlexNet

ROLES = ("AlexNet", "ResNet-50", "DenseNet-40")
CAFFE, TABLE5_ALEXNET = "AlexNet, two groups", "AlexNet, Table V"
CAFFES = "Caffe's AlexNet"  # the paper's, but in Table V
ITERATED = (*ROLES, "ResNet-18", CAFFE)
ALONE = ("SqueezeNet", "VGG-11")  # tuned without a limit alone
TO_THE_LETTER = ("gpu", "paper")  # profiles with the paper's networks and mini-batches
HALF = "fp16"

# Torch's own convolutions under other settings of torch; see `iterating.SETTINGS`. Each has
# processes of its own, and to try all plans of a deep network takes minutes: few, by run.
RIVALS = _TEN, _EVERY, _CAPPED, _LEGACY = (
    "cudnn.benchmark",
    "cudnn.benchmark, all plans",
    "cudnn.benchmark, all plans, capped",
    "cudnn.benchmark, legacy API, capped",
)
_RIVALS = ((CAFFE, (_TEN, _EVERY)), (CAFFE, (_CAPPED, _LEGACY)), ("ResNet-50", (_TEN,)))


@cache
def profile_of(name: str) -> dict[str, Any]:
    """A profile's table of ``paper.toml``, its tables completed by those of the one it is like."""
    own: dict[str, Any] = CONTENT["profiles"][name]
    if "like" not in own:
        return own
    like = profile_of(own["like"])
    tables = {key: like[key] | own[key] for key in own if isinstance(like.get(key), dict)}
    return {**like, **own, **tables}


def _network(profile: str, role: str, precision: str = "fp32") -> dict[str, Any]:
    """The part of a configuration that all experiments on a network have."""
    own = profile_of(profile)
    return {
        "role": role,
        **own["networks"][role],
        "setting": precision,
        **CONTENT["precisions"][precision],
        "algorithms": own["algorithms"],
        "threads": own.get("threads"),
    }


def policies(profile: str, role: str = "AlexNet") -> tuple[str, ...]:
    """The policies that a network is run with: `all` takes minutes for the large ones."""
    return POLICIES if role in profile_of(profile)["with_all"] else POLICIES[:2]


def alexnet_kernels(profile: str, policy: str = "") -> list[Run]:
    """The measurement of AlexNet's kernels from an empty cache, by default at the most sizes.

    On a GPU `all` is measured layer by layer, each of which takes a minute or so.
    """
    policy = policy or policies(profile)[-1]
    if profile == "gpu" and policy == "all":
        return [_layer(profile, name) for name in LAYERS]
    config = _network(profile, "AlexNet") | {"policy": policy}
    return [Run("candidates", config, seeds=(0,), label=f"AlexNet, fp32, {policy}")]


def _layer(profile: str, name: str) -> Run:
    config = _network(profile, "AlexNet") | {"policy": "all", "layer": name, "kinds": list(KINDS)}
    return Run("candidates", config, seeds=(0,), label=f"AlexNet's {name}, all")


def repeated(run: Run) -> Run:
    """The same measurement by several processes."""
    return replace(run, seeds=PROCESSES)


def conv2(profile: str) -> Run:
    """The measurement of AlexNet's second convolution; of `long` quick's by several processes."""
    if profile == LONG:
        return repeated(conv2("quick"))
    if profile == "gpu":
        return _layer(profile, "conv2")
    policy = "powerOfTwo" if profile == "quick" else "all"
    config = _network(profile, "AlexNet") | {
        "batch": profile_of(profile)["conv2_batch"],
        "policy": policy,
        "layer": "conv2",
        "kinds": ["forward"],
    }
    return Run("candidates", config, seeds=(0,), label=f"AlexNet's conv2, {policy}")


def network(
    profile: str,
    role: str,
    mode: str,
    limit_mib: int,
    policy: str,
    precision: str = "fp32",
    caffe: bool = False,
) -> Run:
    """A network's kernels within the limit that stands for the paper's; see `limit_of`."""
    limit = limit_of(profile, role, mode, limit_mib, caffe)
    config = _network(profile, role, precision)
    config |= {"mode": mode, "limit_mib": limit, "policy": policy}
    if caffe and profile in TO_THE_LETTER:
        config["batch"] = _paper_batch(role, caffe)
    label = f"{role}, {precision}, {mode}, {limit:,} MiB, {policy}"
    return Run("network", config, seeds=(0,), label=label)


def limit_of(
    profile: str, role: str, mode: str, limit_mib: float, caffe: bool = False
) -> int | float:
    """The MiB that a network has where the paper's has `limit_mib` for each kernel.

    Under WD it is the total for all of the paper's kernels. Under `long` it is as much for a sample
    as in the paper: workspaces grow with the mini-batch. `caffe` takes the mini-batch of Figure 11,
    which is not Table V's of ResNet-50.
    """
    total = limit_mib * (PAPER["figure11"]["kernels"][role] if mode == "WD" else 1)
    if profile != LONG:
        return total
    scaled = total * profile_of(LONG)["networks"][role]["batch"] / _paper_batch(role, caffe)
    return int(scaled) if scaled.is_integer() else scaled


def _paper_batch(role: str, caffe: bool) -> int:
    batches: dict[str, int] = PAPER["batches"]
    return batches.get(f"{role}, Caffe", batches[role]) if caffe else batches[role]


def told_limit(profile: str, role: str, mode: str, limit_mib: float, caffe: bool = False) -> str:
    """`limit_of` in words, beside the paper's that it stands for where that is another."""
    ran, paper = (limit_of(p, role, mode, limit_mib, caffe) for p in (profile, "paper"))
    return f"{ran:,} MiB" + f" (paper {paper:,})" * (ran != paper)


def at_papers_batch(record: Record) -> float:
    """The MiB that a record's limit for each kernel is at the paper's mini-batch.

    Workspaces grow with the mini-batch, and a limit that does not shrink with it excludes less.
    """
    role = record.config["role"]
    role = "AlexNet" if role in (CAFFE, TABLE5_ALEXNET) else role
    limit: float = record.config["limit_mib"]
    return limit * PAPER["batches"][role] / record.config["batch"]


def iterated(profile: str) -> list[str]:
    """The networks whose whole iterations are run."""
    return [role for role in (*ITERATED, *ALONE) if role in profile_of(profile)["iterated"]]


def iterations(profile: str, role: str) -> Run:
    """A network's whole iterations within a limit, by policy, in turns."""
    own = profile_of(profile)
    row = dict(own["iterated"][role])
    network = _network("quick" if profile == LONG else profile, role if role in ROLES else ROLES[0])
    limit = row.pop("limit_mib", None)
    shared = row.pop("wd", [])
    wr = row.pop("policies", POLICIES[:2] if limit else [])
    config = network | {
        "role": role,
        "algorithms": [*network["algorithms"], *own.get("low_memory", [])],
        "free": len(network["algorithms"]),  # of them, where no limit binds
        "limit_mib": limit,
        "ways": [*(["WR", None, policy] for policy in wr), *(["WD", *pair] for pair in shared)],
        **{key: own[key] for key in ("processes", "pairs", "repeats")},
        **row,
    }
    if profile == LONG:
        config["threads"] = 1
    return Run("iterations", config, seeds=(0,), label=f"{role}, iterations")


def rivals(profile: str) -> list[Run]:
    """Torch's own iterations under other settings of torch, each in its own processes."""
    runs = []
    for role, names in _RIVALS if profile in TO_THE_LETTER else ():
        config = iterations(profile, role).config | {"ways": [], "rivals": list(names)}
        runs.append(Run("iterations", config, seeds=(0,), label=f"{role}, {' and '.join(names)}"))
    return runs


NETWORK_TYPES: tuple[str, ...] = tuple(CONTENT["deepbench"])  # of Table IV


def deepbench(profile: str, network_type: str, precision: str) -> Run:
    """The forward passes of one network type's layers."""
    own = profile_of(profile)
    config = {
        "role": network_type,
        "largest_mmacs": None,
        "of_each_size": None,
        **own["layers"],
        "setting": precision,
        **CONTENT["precisions"][precision],
        "algorithms": own["benchmark_algorithms"],
        "threads": own.get("threads"),
        "limit_mib": MODERATE,
        "policy": "powerOfTwo",
    }
    if precision == HALF:
        config |= {"algorithms": ["torch:native", "cudnn", "cudnn_half"], "max_error": 1e-2}
    return Run("deepbench", config, seeds=(0,), label=f"{network_type}, {precision}")


def cluster(profile: str) -> Run:
    """A network's times on unequal devices, one at a time, each tuned within Table III's limit."""
    own = profile_of(profile)
    config = own["cluster"] | {
        "role": "ResNet-18",
        "devices": ["fast", "slow"],
        "tuned_with": own["algorithms"],
        "limit_mib": MODERATE,
        "policy": "powerOfTwo",
        "repeats": own["repeats"],
    }
    return Run("cluster", config, seeds=(0,), label="ResNet-18")


def programmes(profile: str) -> list[Run]:
    """The solver on made-up fronts of the paper's sizes, and on ResNet-152's own kernels."""
    profile = "quick" if profile == LONG else profile
    repeats = 2 if profile == "smoke" else 5
    sizes = {"role": "synthetic fronts", "sizes": [[159, 562], [465, 2500]], "repeats": repeats}
    config = _network(profile, "ResNet-152") | {
        "policy": "powerOfTwo",
        "limit_mib": PAPER["optimisation"]["largest_mib"],
        "repeats": repeats,
    }
    return [
        Run("solver", sizes, seeds=(0,), label="made-up fronts"),
        Run("programme", config, seeds=(0,), label="ResNet-152, its own kernels"),
    ]


# The names of what ran.

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


def stands_in(record: Record, caffes: bool = False) -> bool:
    """Whether a record is of another network than the paper's.

    With `caffes` the paper's AlexNet is Caffe's, with two groups, and not Table V's.
    """
    role, model = record.config["role"], record.config.get("model")
    if model is None or role not in CONTENT["models"]:
        return False
    return bool(model != CONTENT["models"][CAFFE if caffes and role == "AlexNet" else role])


def _own_network(record: Record) -> str:
    """The network that a record is of, such as ``ResNet-50 of width 16``."""
    model = record.config["model"]
    options = ", ".join(f"{key} {value}" for key, value in model.items() if key != "name")
    library, _, name = model["name"].rpartition("/")
    of = f"{library}'s " if library else ""
    return f"{of}{_WRITTEN.get(name, name)}{f' of {options}' if options else ''}"


def network_name(record: Record, caffes: bool = False) -> str:
    """The network that ran, and the paper's where that is another; see `stands_in`."""
    role = str(record.config["role"])
    if not stands_in(record, caffes):
        return role
    return f"{_own_network(record)} (for {CAFFES if caffes and role == 'AlexNet' else role})"


def title_of(record: Record | None, role: str, part: str = "") -> str:
    """The title of a figure of one network, or a part of it: ours, and the paper's role it has."""
    if record is None:
        return "ours: not run"
    ours = f"{part}{_own_network(record)}, mini-batch {record.config['batch']},"
    return panel(role, ours, "SYNTHETIC inputs")


def captioned(
    lead: str,
    facts: Callable[[Results], Iterable[str]] = lambda results: (),
    *,
    caffes: bool = False,
    scaled: bool = False,
) -> Callable[[Results], str]:
    """A caption that goes on with what of the records is not the paper's: networks and inputs.

    Args:
        lead: What the table or figure shows.
        facts: Yields further sentences.
        caffes: As of `stands_in`.
        scaled: Whether limits shrink with the mini-batch under `long`.
    """

    def marks(results: Results) -> Iterable[str]:
        records = [record for record in results.records if record.status == "ok"]
        roles = dict.fromkeys(r.config["role"] for r in records if stands_in(r, caffes))
        names = ", ".join(role.replace(", two groups", " (two groups)") for role in roles)
        parts = [f"STAND-IN for the paper's {names}"] if roles else []
        if any(record.experiment != "solver" for record in records):
            parts.append("SYNTHETIC inputs")
        if parts:
            yield f"{'; '.join(parts)}."
        if (processes := len({record.seed for record in records})) > 1:
            yield f"Shown: the first of {processes} processes."
        if scaled and results.profile == LONG:
            yield "Limits shrink with the mini-batch."
        yield from facts(results)

    return caption(lead, marks)


def precisions_of(results: Results) -> Sequence[str]:
    """The precisions that have records, in the order of the plan."""
    return list(dict.fromkeys(r.config["setting"] for r in results.records if r.status == "ok"))
