"""What the paper trains with, item by item, and what each profile here does instead, and why.

Every value is read from the paper's numbers or from the runs that a profile plans; where the paper
is silent, our choice stands with its ground.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from repro.experiments.design import SEEDS
from repro.experiments.dualbatch.settings import (
    CIFAR,
    DATASETS,
    IMAGENET,
    IMAGENET_SCALE,
    PAPER,
    WORKERS,
    K,
    imagenet_training,
    memory,
    table5_training,
    table8_training,
)

SILENT = "not stated"
PROFILES = {"paper profile": "paper", "gpu": "gpu", "quick": "quick"}
_SETS = {"cifar100": "CIFAR-100", "cifar10": "CIFAR-10"}
_SMALLER = "quick runs in minutes on two cores"
Config = Mapping[str, Any]


def recipe() -> list[dict[str, str]]:
    """Return a row an item: the paper's value, that of three profiles, and why they differ."""
    return [*_of_cifar(), *_of_training(), *_of_workers(), *_of_imagenet(), *_of_memory()]


def _row(item: str, paper: str, ours: Callable[[str], str], why: str = "") -> dict[str, str]:
    cells = {column: ours(profile) for column, profile in PROFILES.items()}
    same = all(cell == paper for cell in cells.values())
    return {"item": item, "paper": paper, **cells, "why they differ": "" if same else why}


def _chosen(profile: str) -> dict[str, str]:
    return {task: names[0] for task, names in DATASETS[profile].items() if names}


def first(profile: str, n_small: int = 1, k: float = K[1]) -> Config:
    """Return the configuration of a training of section 5.1."""
    return table5_training(profile, _chosen(profile), k, n_small).config


def second(profile: str, n_small: int = 1) -> Config:
    """Return the configuration of a training by the hybrid scheme, section 5.2.2."""
    return table8_training(profile, _chosen(profile), n_small, True).config


def third() -> Config:
    """Return the configuration of a training on ImageNet, section 5.2.3, under `paper`."""
    return imagenet_training("paper", _chosen("paper"), 1, True).config


def _plans(config: Config) -> list[Any]:
    from repro.experiments.dualbatch.building import plan_of  # which torch stands behind

    return [plan_of(entry["plan"]) for entry in config["sub_stages"]]


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(f"{v:,}" if isinstance(v, int) else str(v) for v in values)


def _stages(stages: Sequence[Sequence[float]]) -> str:
    return ", ".join(f"{int(epochs)} epochs at {rate:g}" for epochs, rate in stages)


def _model(model: Config) -> str:
    if model["name"].rpartition("/")[2] == "resnet18":
        return "ResNet-18"
    options = ", ".join(f"{key} {value}" for key, value in model.items() if key != "name")
    return f"{model['name']} ({options})" if options else str(model["name"])


def _augmented(config: Config) -> str:
    own = config["augment"]
    mirrored = ", mirrored" if own["flip"] else ""
    return f"shifted by up to {own['padding']} pixels{mirrored}"


def _precision(config: Config) -> str:
    return f"mixed, {config['autocast']}" if config["autocast"] else "single"


def _of_cifar() -> list[dict[str, str]]:
    resolution = PAPER["section3_2"]["resolution"]

    def side(profile: str) -> str:
        return str(second(profile)["sub_stages"][-1]["resolution"])

    return [
        _row("model", PAPER["recipe"]["model"], lambda p: _model(first(p)["model"]), _SMALLER),
        _row(
            "data",
            PAPER["recipe"]["cifar_data"],
            lambda p: " or ".join(_SETS.get(name, name) for name in DATASETS[p][CIFAR]),
            "the first that is at hand; captions name a stand-in",
        ),
        _row(
            "samples of an epoch",
            f"{PAPER['cifar_samples']:,}",
            lambda p: f"{first(p)['sub_stages'][0]['plan']['samples']:,}",
            _SMALLER,
        ),
        _row(
            "test samples",
            f"{PAPER['recipe']['cifar_test_samples']:,}",
            lambda p: f"{first(p)['test_samples']:,}",
            _SMALLER,
        ),
        _row("pixels", str(resolution), side, _SMALLER),
        _row(
            "augmentation",
            SILENT,
            lambda p: _augmented(first(p)),
            "the paper names none; the field's usual one for these images",
        ),
        _row(
            "precision",
            SILENT,
            lambda p: _precision(first(p)),
            "single where the paper is silent; gpu takes what the device is fast at, and replays "
            "steps as CUDA graphs",
        ),
    ]


def _of_training() -> list[dict[str, str]]:
    def warmup(config: Config) -> str:
        from repro.experiments.dualbatch.building import schedule_of

        start = f"{schedule_of(config)[0].lr:g}"
        return f"{config['warmup_epochs']} epochs from {start}"

    def optimizer(profile: str) -> str:
        import torch

        from repro.dualbatch.worker import sgd

        made = sgd([torch.zeros(1, requires_grad=True)], 1.0).defaults
        return f"SGD, momentum {made['momentum']:g}, weight decay {made['weight_decay']:g}"

    training = PAPER["training"]
    rate = training["stages"][0][1] * training["warmup_start"]
    table6 = PAPER["table6"]["cifar"]
    by_k = [row["small_batch"] for row in PAPER["table2"]["rows"] if row["k"] == K[1]]
    scaled = "batch sizes in proportion to the samples that quick can train"
    return [
        _row(
            "B_L, section 5.1",
            str(PAPER["table2"]["large_batch"]),
            lambda p: str(_plans(first(p))[0].large_batch),
            scaled,
        ),
        _row(
            f"B_S at k = {K[1]:g}, n_S = 1 to {WORKERS}",
            _listed(by_k),
            lambda p: _listed([_plans(first(p, n))[0].small_batch for n in range(1, WORKERS + 1)]),
            scaled,
        ),
        _row(
            "B_L, section 5.2",
            _listed(table6["large_batches"]),
            lambda p: _listed([plan.large_batch for plan in _plans(second(p))]),
            scaled,
        ),
        _row(
            "k, section 5.1",
            _listed(K),
            lambda p: _listed([first(p, k=k)["k"] for k in K]),
        ),
        _row("k, section 5.2", str(PAPER["table6"]["k"]), lambda p: str(second(p)["k"])),
        _row(
            "a and b",
            "not printed",
            lambda p: f"b / a {_ratio(first(p)):.3g} samples",
            "inferred: the ratio that gives every B_S of Table 2; b in proportion to batch sizes",
        ),
        _row(
            "epochs and rates, section 5.1",
            _stages(training["stages"]),
            lambda p: _stages(first(p)["stages"]),
            _SMALLER,
        ),
        _row(
            "epochs and rates, section 5.2",
            _stages(PAPER["table7"]["stages"]),
            lambda p: _stages(second(p)["stages"]),
            _SMALLER,
        ),
        _row(
            "warm-up of the baseline, section 5.1",
            f"{training['warmup_epochs']} epochs from {rate:g}",
            lambda p: warmup(first(p, 0, 1.0)),
            "in proportion to the epochs",
        ),
        _row(
            "warm-up, section 5.2",
            SILENT,
            lambda p: "none" if not second(p, 0)["warmup_epochs"] else "some",
            "section 5.1 gives it to its baseline alone",
        ),
        _row(
            "optimizer",
            SILENT,
            optimizer,
            "equation 1 is of plain SGD; these are the usual values for ResNets on CIFAR",
        ),
        _row(
            "resolutions, section 5.2",
            _listed(table6["resolutions"]),
            lambda p: _listed([entry["resolution"] for entry in second(p)["sub_stages"]]),
            _SMALLER,
        ),
        _row(
            "dropout, section 5.2",
            _listed(PAPER["table7"]["dropouts"]),
            lambda p: _listed([entry["dropout"] for entry in second(p)["sub_stages"]]),
        ),
        _row(
            "place of dropout",
            SILENT,
            lambda p: "before the last layer",
            "where classifiers of this family have it",
        ),
        _row(
            "resolution of tests",
            SILENT,
            lambda p: "the images' own",
            "so that all schemes are tested alike",
        ),
    ]


def _ratio(config: Config) -> float:
    plan = config["sub_stages"][0]["plan"]
    return float(plan["b"] / plan["a"])


def _of_workers() -> list[dict[str, str]]:
    def merge(profile: str) -> str:
        import torch

        from repro.dualbatch import ParameterServer

        server = ParameterServer({"w": torch.zeros(1)}, 1, first(profile)["sync"])
        rules = {"journal": "w ← (w + f w_i) / (1 + f)"}
        return rules.get(server.merge, server.merge)

    def shown(profile: str) -> str:
        plan = _plans(first(profile))[0]
        return f"{plan.n}, in turns on one device"

    factors = {"linear": "d_S/d_L"}
    return [
        _row(
            "workers",
            f"{WORKERS}, a GPU each ({PAPER['recipe']['device']})",
            shown,
            "one device is what most have; real processes are timed for themselves",
        ),
        _row(
            "synchronisation",
            PAPER["recipe"]["synchronisation"],
            lambda p: str(first(p)["sync"]).upper(),
        ),
        _row(
            "model-update factor",
            PAPER["recipe"]["update_factor"],
            lambda p: factors.get(first(p)["factor"], str(first(p)["factor"])),
        ),
        _row("merge rule", SILENT, merge, "that of the authors' later public code"),
        _row(
            "momentum after a pull",
            SILENT,
            lambda p: "starts anew",
            "a worker without memory can be replaced, and its share done again to the same bits",
        ),
        _row(
            "seeds",
            SILENT,
            lambda p: _listed(SEEDS[p]),
            "the paper shows one number a cell; --seeds takes fewer or more",
        ),
        _row(
            "framework",
            PAPER["recipe"]["framework"],
            lambda p: "PyTorch",
            "one framework for five papers",
        ),
    ]


def _of_imagenet() -> list[dict[str, str]]:
    table = PAPER["table6"]["imagenet"]
    why = "trained under paper alone, which needs ImageNet; elsewhere times at scale"

    def only(read: Callable[[Config], str]) -> Callable[[str], str]:
        return lambda profile: read(third()) if IMAGENET in DATASETS[profile] else "not trained"

    def at_scale(values: Sequence[int], key: str) -> Callable[[str], str]:
        return lambda p: _listed([round(v * IMAGENET_SCALE[p][key]) for v in values])

    return [
        _row(
            "ImageNet: model",
            PAPER["recipe"]["model"],
            lambda p: _model(IMAGENET_SCALE[p]["model"]),
            _SMALLER,
        ),
        _row(
            "ImageNet: samples of an epoch",
            f"{PAPER['imagenet_samples']:,}",
            only(lambda c: f"{c['sub_stages'][0]['plan']['samples']:,}"),
            why,
        ),
        _row(
            "ImageNet: test samples",
            f"{PAPER['recipe']['imagenet_test_samples']:,}",
            only(lambda c: f"{c['test_samples']:,}"),
            why,
        ),
        _row(
            "ImageNet: epochs and rates",
            _stages(PAPER["table9"]["stages"]),
            only(lambda c: _stages(c["stages"])),
            why,
        ),
        _row(
            "ImageNet: resolutions",
            _listed(table["resolutions"]),
            at_scale(table["resolutions"], "pixels"),
            _SMALLER,
        ),
        _row(
            "ImageNet: B_L",
            _listed(table["large_batches"]),
            at_scale(table["large_batches"], "batches"),
            _SMALLER,
        ),
        _row(
            "ImageNet: dropout",
            _listed(PAPER["table9"]["dropouts"]),
            only(lambda c: _listed([entry["dropout"] for entry in c["sub_stages"]])),
            why,
        ),
        _row(
            "ImageNet: precision",
            PAPER["recipe"]["imagenet_precision"],
            lambda p: _precision(IMAGENET_SCALE[p]["compute"]),
            "bfloat16 needs no scaling of the loss; a CPU gains nothing by it",
        ),
        _row(
            "ImageNet: augmentation",
            SILENT,
            only(_augmented),
            "as on CIFAR, the shift in proportion; elsewhere nothing is trained",
        ),
    ]


def _of_memory() -> list[dict[str, str]]:
    def limit(profile: str) -> str:
        config = memory(profile, CIFAR).config
        if config["limit_bytes"] is None:
            return f"{config['limit_over_largest_probe']} times the largest probe"
        return f"{config['limit_bytes'] / 2**30:g} GiB"

    return [
        _row(
            "Figure 13: limit of memory",
            f"{PAPER['figure13']['device_bytes'] / 1e9:g} GB",
            limit,
            "a card sold as 24 GB has 24 GiB; quick's models are too small for a limit to bind",
        ),
        _row(
            "Figure 13: batch sizes",
            _listed(PAPER["figure13"]["batch_sizes"]),
            lambda p: _listed(memory(p, CIFAR).config["batch_sizes"]),
            _SMALLER,
        ),
    ]
