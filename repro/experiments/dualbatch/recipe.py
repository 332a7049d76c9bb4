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
from repro.experiments.recipes import NOT_STATED, compared

_SETS = {"cifar100": "CIFAR-100", "cifar10": "CIFAR-10"}
_SMALLER = "two cores have minutes (long: hours)"
Config = Mapping[str, Any]


def recipe() -> list[dict[str, str]]:
    """Return a row an item: the paper's value, those of our profiles, and why they differ."""
    return [*_of_cifar(), *_of_training(), *_of_workers(), *_of_imagenet(), *_of_memory()]


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
    augment = config["augment"]
    mirrored = ", mirrored" if augment["flip"] else ""
    return f"shifted by up to {augment['padding']} pixels{mirrored}"


def _precision(config: Config) -> str:
    return f"mixed, {config['autocast']}" if config["autocast"] else "single"


def _of_cifar() -> list[dict[str, str]]:
    resolution = PAPER["section3_2"]["resolution"]

    def side(profile: str) -> str:
        return str(second(profile)["sub_stages"][-1]["resolution"])

    return [
        compared("model", PAPER["recipe"]["model"], lambda p: _model(first(p)["model"]), _SMALLER),
        compared(
            "data",
            PAPER["recipe"]["cifar_data"],
            lambda p: " or ".join(_SETS.get(name, name) for name in DATASETS[p][CIFAR]),
            "the first that is at hand; captions name a stand-in",
        ),
        compared(
            "samples of an epoch",
            f"{PAPER['cifar_samples']:,}",
            lambda p: f"{first(p)['sub_stages'][0]['plan']['samples']:,}",
            _SMALLER,
        ),
        compared(
            "test samples",
            f"{PAPER['recipe']['cifar_test_samples']:,}",
            lambda p: f"{first(p)['test_samples']:,}",
            _SMALLER,
        ),
        compared("pixels", str(resolution), side, _SMALLER),
        compared(
            "augmentation",
            NOT_STATED,
            lambda p: _augmented(first(p)),
            "the paper names none; the field's usual one for these images",
        ),
        compared(
            "precision",
            NOT_STATED,
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
    scaled = "long: a quarter, as of the samples; quick: a tenth"
    return [
        compared(
            "B_L, section 5.1",
            str(PAPER["table2"]["large_batch"]),
            lambda p: str(_plans(first(p))[0].large_batch),
            scaled,
        ),
        compared(
            f"B_S at k = {K[1]:g}, n_S = 1 to {WORKERS}",
            _listed(by_k),
            lambda p: _listed([_plans(first(p, n))[0].small_batch for n in range(1, WORKERS + 1)]),
            scaled,
        ),
        compared(
            "B_L, section 5.2",
            _listed(table6["large_batches"]),
            lambda p: _listed([plan.large_batch for plan in _plans(second(p))]),
            scaled,
        ),
        compared(
            "k, section 5.1",
            _listed(K),
            lambda p: _listed([first(p, k=k)["k"] for k in K]),
        ),
        compared("k, section 5.2", str(PAPER["table6"]["k"]), lambda p: str(second(p)["k"])),
        compared(
            "a and b",
            "not printed",
            lambda p: f"b / a {_ratio(first(p)):.3g} samples",
            "inferred: the ratio that gives every B_S of Table 2; b in proportion to batch sizes",
        ),
        compared(
            "epochs and rates, section 5.1",
            _stages(training["stages"]),
            lambda p: _stages(first(p)["stages"]),
            _SMALLER,
        ),
        compared(
            "epochs and rates, section 5.2",
            _stages(PAPER["table7"]["stages"]),
            lambda p: _stages(second(p)["stages"]),
            _SMALLER,
        ),
        compared(
            "warm-up of the baseline, section 5.1",
            f"{training['warmup_epochs']} epochs from {rate:g}",
            lambda p: warmup(first(p, 0, 1.0)),
            "in proportion to the epochs",
        ),
        compared(
            "warm-up, section 5.2",
            NOT_STATED,
            lambda p: "none" if not second(p, 0)["warmup_epochs"] else "some",
            "section 5.1 gives it to its baseline alone",
        ),
        compared(
            "optimizer",
            NOT_STATED,
            optimizer,
            "equation 1 is of plain SGD; these are the usual values for ResNets on CIFAR",
        ),
        compared(
            "resolutions, section 5.2",
            _listed(table6["resolutions"]),
            lambda p: _listed([entry["resolution"] for entry in second(p)["sub_stages"]]),
            _SMALLER,
        ),
        compared(
            "dropout, section 5.2",
            _listed(PAPER["table7"]["dropouts"]),
            lambda p: _listed([entry["dropout"] for entry in second(p)["sub_stages"]]),
        ),
        compared(
            "place of dropout",
            NOT_STATED,
            lambda p: "before the last layer",
            "where classifiers of this family have it",
        ),
        compared(
            "resolution of tests",
            NOT_STATED,
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
        compared(
            "workers",
            f"{WORKERS}, a GPU each ({PAPER['recipe']['device']})",
            shown,
            "one device is what most have; real processes are timed for themselves",
        ),
        compared(
            "synchronisation",
            PAPER["recipe"]["synchronisation"],
            lambda p: str(first(p)["sync"]).upper(),
        ),
        compared(
            "model-update factor",
            PAPER["recipe"]["update_factor"],
            lambda p: factors.get(first(p)["factor"], str(first(p)["factor"])),
        ),
        compared("merge rule", NOT_STATED, merge, "that of the authors' later public code"),
        compared(
            "momentum after a pull",
            NOT_STATED,
            lambda p: first(p).get("optimizer_state", "restarted"),
            "each worker keeps its own; records of quick and long are older, and updates compares",
        ),
        compared(
            "seeds",
            NOT_STATED,
            lambda p: _listed(SEEDS[p]),
            "the paper shows one number a cell; --seeds takes fewer or more",
        ),
        compared(
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
        compared(
            "ImageNet: model",
            PAPER["recipe"]["model"],
            lambda p: _model(IMAGENET_SCALE[p]["model"]),
            _SMALLER,
            long=False,
        ),
        compared(
            "ImageNet: samples of an epoch",
            f"{PAPER['imagenet_samples']:,}",
            only(lambda c: f"{c['sub_stages'][0]['plan']['samples']:,}"),
            why,
        ),
        compared(
            "ImageNet: test samples",
            f"{PAPER['recipe']['imagenet_test_samples']:,}",
            only(lambda c: f"{c['test_samples']:,}"),
            why,
        ),
        compared(
            "ImageNet: epochs and rates",
            _stages(PAPER["table9"]["stages"]),
            only(lambda c: _stages(c["stages"])),
            why,
        ),
        compared(
            "ImageNet: resolutions",
            _listed(table["resolutions"]),
            at_scale(table["resolutions"], "pixels"),
            _SMALLER,
            long=False,
        ),
        compared(
            "ImageNet: B_L",
            _listed(table["large_batches"]),
            at_scale(table["large_batches"], "batches"),
            _SMALLER,
            long=False,
        ),
        compared(
            "ImageNet: dropout",
            _listed(PAPER["table9"]["dropouts"]),
            only(lambda c: _listed([entry["dropout"] for entry in c["sub_stages"]])),
            why,
        ),
        compared(
            "ImageNet: precision",
            PAPER["recipe"]["imagenet_precision"],
            lambda p: _precision(IMAGENET_SCALE[p]["compute"]),
            "bfloat16 needs no scaling of the loss; a CPU gains nothing by it",
            long=False,
        ),
        compared(
            "ImageNet: augmentation",
            NOT_STATED,
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
        compared(
            "Figure 13: limit of memory",
            f"{PAPER['figure13']['device_bytes'] / 1e9:g} GB",
            limit,
            "a card sold as 24 GB has 24 GiB; quick's models are too small for a limit to bind",
            long=False,
        ),
        compared(
            "Figure 13: batch sizes",
            _listed(PAPER["figure13"]["batch_sizes"]),
            lambda p: _listed(memory(p, CIFAR).config["batch_sizes"]),
            _SMALLER,
            long=False,
        ),
    ]
