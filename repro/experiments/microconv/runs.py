"""The runs of each profile, from the tables in ``paper.toml``, and the names of networks."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from repro.experiments import design
from repro.experiments.design import LONG, PROCESSES, Artefact, Chosen, Run, paper_toml
from repro.experiments.query import Results
from repro.experiments.view import panel
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
NETWORK_TYPES: tuple[str, ...] = tuple(CONTENT["deepbench"])  # of Table IV

ROLES = ("AlexNet", "ResNet-50", "DenseNet-40")
CAFFE, TABLE5_ALEXNET = "AlexNet, two groups", "AlexNet, Table V"
CAFFES = "Caffe's AlexNet"  # the paper's, but in Table V
ITERATED = (*ROLES, "ResNet-18", CAFFE)
TRIED = (*ITERATED, "SqueezeNet", "VGG-11")  # the last two are tuned without a limit alone
TO_THE_LETTER = ("gpu", "paper")  # profiles with the paper's networks and mini-batches
HALF = "fp16"
# Forms of whole iterations: torch's own twice, and tuned without a limit; the suffix names further
# rounds of these three alone.
PLAIN, AGAIN, FREE, MORE = "plain", "plain again", "tuned, no limit", ", more rounds"


@cache
def profile_of(name: str) -> dict[str, Any]:
    """A profile's table of ``paper.toml``, its tables completed by those of the one it is like."""
    own: dict[str, Any] = CONTENT["profiles"][name]
    like = profile_of(own["like"]) if "like" in own else {}
    tables = {key: like[key] | own[key] for key in own if isinstance(like.get(key), dict)}
    return like | own | tables


def _network(profile: str, role: str, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    """The part of a configuration that all experiments on a network have, and more."""
    own = profile_of(profile)
    common = {"role": role, "setting": precision, "algorithms": own["algorithms"]}
    common |= {"threads": own.get("threads")}
    return common | own["networks"][role] | CONTENT["precisions"][precision] | more


def policies(profile: str, role: str = "AlexNet") -> tuple[str, ...]:
    """The policies that a network is run with: `all` takes minutes for the large ones."""
    return POLICIES if role in profile_of(profile)["with_all"] else POLICIES[:2]


def alexnet_kernels(profile: str, policy: str = "") -> list[Run]:
    """The measurement of AlexNet's kernels from an empty cache, by default at the most sizes."""
    policy = policy or policies(profile)[-1]
    if profile == "gpu" and policy == "all":  # layer by layer, each of which takes a minute or so
        return [_layer(profile, name) for name in LAYERS]
    config = _network(profile, "AlexNet", policy=policy)
    return [Run("candidates", config, (0,), f"AlexNet, fp32, {policy}")]


def _layer(profile: str, name: str, **changes: Any) -> Run:
    changes = {"policy": "all", "layer": name, "kinds": list(KINDS)} | changes
    config = _network(profile, "AlexNet", **changes)
    return Run("candidates", config, (0,), f"AlexNet's {name}, {config['policy']}")


def conv2(profile: str) -> Run:
    """The measurement of AlexNet's second convolution; of `long` quick's by several processes."""
    if profile == LONG:
        return replace(conv2("quick"), seeds=PROCESSES)
    if profile == "gpu":
        return _layer(profile, "conv2")
    policy = "powerOfTwo" if profile == "quick" else "all"
    batch = profile_of(profile)["conv2_batch"]
    return _layer(profile, "conv2", kinds=["forward"], policy=policy, batch=batch)


@dataclass(frozen=True)
class Cell:
    """A network's kernels, divided within a limit of the paper's."""

    each_mib: float  # the paper's limit for each kernel
    policy: str = "undivided"  # of the micro-batch sizes
    role: str = "AlexNet"
    mode: str = "WR"  # or WD, with a total of as much for each of the paper's kernels
    precision: str = "fp32"  # a key of ``[precisions]``
    caffe: bool = False  # whether the mini-batch is Figure 11's, of ResNet-50 not Table V's

    @property
    def paper_batch(self) -> int:
        """The paper's mini-batch."""
        batches: dict[str, int] = PAPER["batches"]
        own = f"{self.role}, Caffe"
        return batches[own if self.caffe and own in batches else self.role]

    def limit_mib(self, profile: str) -> int | float:
        """The limit here. Under `long` it is as much for a sample: workspaces grow with it."""
        kernels = PAPER["figure11"]["kernels"][self.role] if self.mode == "WD" else 1
        if profile != LONG:
            return self.each_mib * kernels
        batch = profile_of(LONG)["networks"][self.role]["batch"]
        scaled = self.each_mib * kernels * batch / self.paper_batch
        return int(scaled) if scaled.is_integer() else scaled

    def told(self, profile: str) -> str:
        """The limit in words, and the paper's where that is another."""
        ran, paper = self.limit_mib(profile), self.limit_mib("paper")
        return f"{ran:,} MiB" + f" (paper {paper:,})" * (ran != paper)

    def run(self, profile: str) -> Run:
        """Its run."""
        limit, own = self.limit_mib(profile), {"mode": self.mode, "policy": self.policy}
        config = _network(profile, self.role, self.precision, limit_mib=limit, **own)
        if self.caffe and profile in TO_THE_LETTER:
            config["batch"] = self.paper_batch
        named = f"{self.role}, {self.precision}, {self.mode}, {limit:,} MiB, {self.policy}"
        return Run("network", config, (0,), named)


def iterations(profile: str, role: str) -> Run:
    """A network's whole iterations within a limit, by policy, in turns."""
    own, of = profile_of(profile), "quick" if profile == LONG else profile
    network, row = _network(of, role if role in ROLES else ROLES[0]), dict(own["iterated"][role])
    wr = row.pop("policies", POLICIES[:2] if "limit_mib" in row else [])
    shared = row.pop("wd", [])
    config = network | {
        "role": role,
        "algorithms": [*network["algorithms"], *own.get("low_memory", [])],
        "free": len(network["algorithms"]),  # of them, where no limit binds
        "limit_mib": None,
        "ways": [*(["WR", None, policy] for policy in wr), *(["WD", *pair] for pair in shared)],
        **{key: own[key] for key in ("processes", "pairs", "repeats")},
        **row,
    }
    if profile == LONG:
        config["threads"] = 1
    return Run("iterations", config, (0,), f"{role}, iterations")


def rivals(profile: str) -> list[Run]:
    """Torch's own iterations under other settings of torch, each in its own processes."""
    runs = []
    for role, names in CONTENT["rivals"]["runs"] if profile in TO_THE_LETTER else ():
        config = iterations(profile, role).config | {"ways": [], "rivals": names}
        runs.append(Run("iterations", config, (0,), f"{role}, {' and '.join(names)}"))
    return runs


def deepbench(profile: str, network_type: str, precision: str) -> Run:
    """The forward passes of one network type's layers."""
    own = profile_of(profile)
    config = {"role": network_type, "largest_mmacs": None, "of_each_size": None, **own["layers"]}
    config |= {"setting": precision, **CONTENT["precisions"][precision]}
    config |= {"algorithms": own["benchmark_algorithms"], "threads": own.get("threads")}
    config |= {"limit_mib": MODERATE, "policy": "powerOfTwo"}
    if precision == HALF:
        config |= {"algorithms": ["torch:native", "cudnn", "cudnn_half"], "max_error": 1e-2}
    return Run("deepbench", config, (0,), f"{network_type}, {precision}")


def cluster(profile: str) -> Run:
    """A network's times on unequal devices, one at a time, each tuned within Table III's limit."""
    own = profile_of(profile)
    config = own["cluster"] | {"role": "ResNet-18", "devices": ["fast", "slow"]}
    config |= {"tuned_with": own["algorithms"], "limit_mib": MODERATE, "policy": "powerOfTwo"}
    return Run("cluster", config | {"repeats": own["repeats"]}, (0,), "ResNet-18")


def optimisation(profile: str, chosen: Chosen) -> list[Run]:
    """AlexNet from an empty cache, the solver on made-up fronts and on ResNet-152's own kernels."""
    of = "quick" if profile == LONG else profile
    wanted = dict.fromkeys(("powerOfTwo", policies(of)[-1]))
    measured = [run for policy in wanted for run in alexnet_kernels(of, policy)]
    if profile == LONG:
        measured = [replace(run, seeds=PROCESSES) for run in measured]
    repeats: dict[str, Any] = {"repeats": 2 if profile == "smoke" else 5}
    sizes = {"role": "synthetic fronts", "sizes": [[159, 562], [465, 2500]], **repeats}
    limit = PAPER["optimisation"]["largest_mib"]
    config = _network(of, "ResNet-152", policy="powerOfTwo", limit_mib=limit, **repeats)
    own = Run("programme", config, (0,), "ResNet-152, its own kernels")
    return [*measured, Run("solver", sizes, (0,), "made-up fronts"), own]


def stands_in(record: Record, caffes: bool = False) -> bool:
    """Whether a record is of another network than the paper's, with `caffes` Caffe's AlexNet."""
    role, model = record.config["role"], record.config.get("model")
    papers = CONTENT["models"].get(CAFFE if caffes and role == "AlexNet" else role)
    return None not in (model, papers) and model != papers


def _own_network(record: Record) -> str:
    """The network that a record is of, such as ``ResNet-50 of width 16``."""
    model = record.config["model"]
    options = ", ".join(f"{key} {value}" for key, value in model.items() if key != "name")
    library, _, name = model["name"].rpartition("/")
    written = CONTENT["written"].get(name, name) + (f" of {options}" if options else "")
    return f"{library}'s {written}" if library else written


def network_name(record: Record, caffes: bool = False) -> str:
    """The network that ran, and the paper's where that is another; see `stands_in`."""
    role = str(record.config["role"])
    if not stands_in(record, caffes):
        return role
    return f"{_own_network(record)} (for {CAFFES if caffes and role == 'AlexNet' else role})"


def title_of(record: Record | None, role: str = CAFFES, part: str = "") -> str:
    """The title of a figure of one network, or of a part of it; `role` is the paper's."""
    if record is None:
        return "ours: not run"
    return panel(role, f"{part}{_own_network(record)}, mini-batch {record.config['batch']},")


def artefact(name: str, **functions: Any) -> Artefact:
    """An artefact of ``paper.toml``; its caption names networks that are not the paper's."""
    own = CONTENT["artefacts"][name]

    def marks(results: Results) -> Iterable[str]:
        records = [record for record in results.records if record.status == "ok"]
        others = [r.config["role"] for r in records if stands_in(r, own.get("caffes", False))]
        names = ", ".join(dict.fromkeys(r.replace(CAFFE, "AlexNet (two groups)") for r in others))
        if records:
            yield f"STAND-IN for the paper's {names}; " * bool(others) + "SYNTHETIC inputs."
        if (processes := len({record.seed for record in records})) > 1:
            yield f"Shown: the first of {processes} processes."
        if own.get("scaled") and results.profile == LONG:
            yield "Limits shrink with the mini-batch."

    return design.artefact("microconv", name, facts=marks, **functions)


def precisions_of(results: Results) -> list[str]:
    """The precisions that have records, in the order of the plan; float32 where there are none."""
    found = dict.fromkeys(r.config["setting"] for r in results.records if r.status == "ok")
    return list(found) or ["fp32"]
