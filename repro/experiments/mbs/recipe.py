"""The paper's recipe beside ours, item by item, computed from `settings`."""

from collections.abc import Callable, Mapping
from typing import Any

from repro.experiments.design import SEEDS
from repro.experiments.mbs import settings
from repro.experiments.mbs.describing import side, side_in_paper
from repro.experiments.mbs.settings import (
    DATASETS,
    LARGE_BATCH,
    MINI_BATCHES,
    OPTIMIZERS,
    PAPER,
    ROLES,
    SMALL_BATCH,
)
from repro.experiments.recipes import NOT_STATED, compared

_MODELS = {
    "ResNet-50": "of a repository for CIFAR: stem of 3×3, stride 1, no pooling",
    "ResNet-101": "of the same repository",
    "AmoebaNet-D": "6 layers, 190 filters",
    "U-Net": "U-Net",
}
_SMALL = "two cores have five minutes (long: hours)"


def recipe() -> list[dict[str, str]]:
    """Return a row for each item.

    Returns:
        Rows with the columns item, paper, paper profile, gpu, long, quick, why they differ.
    """
    return [row for role in ROLES for row in _of_role(role)] + _of_all()


def _config(profile: str, role: str) -> Mapping[str, Any]:
    chosen = {task: names[0] for task, names in DATASETS[profile].items()}
    initial = PAPER["table2"][role]["mini_batch"]
    if profile == "gpu" and role not in settings.TRAINED_ON_GPU:
        return settings.epochs_in_turns(profile, role, chosen).config
    return settings.training(profile, role, chosen, initial, None).config


def _hours(role: str) -> str:
    times = [row["time_with"][0] for row in settings.paper_rows(role)]
    return f"{100 * min(times) / 3600:.1f} to {100 * max(times) / 3600:.1f}"


def _of_role(role: str) -> list[dict[str, str]]:
    def add(item: str, paper: str, ours: Callable[[Mapping[str, Any]], str], why: str) -> None:
        rows.append(compared(f"{role}: {item}", paper, lambda p: ours(_config(p, role)), why))

    rows: list[dict[str, str]] = []
    data = "Carvana" if role == "U-Net" else "Flowers-102"
    pixels = side_in_paper(role)
    rate = OPTIMIZERS[role]
    add("network", _MODELS[role], lambda c: _options(c["model"]), _SMALL)
    add(
        "data",
        f"{data}, no split given",
        lambda c: _options(c["dataset"]),
        "Flowers-102: 80 % of all 8,189 at random, since the official 1,020 (--set "
        "dataset.split=official) are fewer than a mini-batch of 1024 and do not fit the paper's "
        "epoch times; Carvana: every fifth car tests",
    )
    add(
        "image side",
        f"{pixels} px",
        lambda c: f"{side(c)} px",
        f"{_SMALL}; gpu: memory and time are measured at the paper's side",
    )
    add(
        "augmentation",
        "random crop of 384 from 959×640" if role == "U-Net" else NOT_STATED,
        lambda c: _options(c["augment"], None),
        "the field's usual shifts of an eighth and mirroring; of U-Net the mirroring is ours",
    )
    schedule = "falls linearly" if rate.get("schedule") else "constant"
    add(
        "optimizer",
        f"{rate['name']}, rate {rate['lr']:g}, {schedule}, decay {rate['weight_decay']:g}"
        + (f", momentum {rate['momentum']:g}" if "momentum" in rate else ""),
        lambda c: _options(c["optimizer"]),
        "a rate that falls does so by epochs, to a thousandth" if rate.get("schedule") else "",
    )
    add(
        "samples of an epoch, epochs",
        f"all, {NOT_STATED}",
        lambda c: f"{c['train_samples'] or 'all'}, {c.get('epochs', 'timed alone')}",
        f"100 epochs: half of the footnote's repository's 200; {_hours(role)} h a training by "
        f"the paper's times. Others: {_SMALL}, gpu six minutes a training",
    )
    rows.append(
        compared(
            f"{role}: mini-batches with MBS",
            ", ".join(str(row["mini_batch"]) for row in settings.paper_rows(role)),
            lambda profile: ", ".join(map(str, MINI_BATCHES[profile][role])),
            "the initial size, those whose overhead section 4.3.3 names, all samples",
        )
    )
    return rows


def _of_all() -> list[dict[str, str]]:
    def limit(profile: str) -> str:
        size = _config(profile, "ResNet-50").get("limit_bytes")
        return f"{size / 2**30:g} GiB (SIMULATED)" if size else "between the needs of two sizes"

    return [
        compared(
            "memory", PAPER["device"], limit, "on a CPU a budget over live tensors (SIMULATED)"
        ),
        compared(
            "micro-batch",
            "half the initial mini-batch; above it the largest that fits",
            lambda _: "the same",
            "",
        ),
        compared(
            "Table 1: mini-batches",
            f"not legible, {LARGE_BATCH}",
            lambda profile: f"{SMALL_BATCH[profile]}, {LARGE_BATCH}",
            "2 is assumed; the shorter profiles spare themselves so small a mini-batch",
        ),
        compared("seeds", "3", lambda profile: str(len(SEEDS[profile])), ""),
        compared(
            "IoU",
            NOT_STATED,
            lambda _: "all pixels of all test images pooled",
            "a mean over images weighs small cars more",
        ),
        compared("BatchNorm", "sees micro-batches", lambda _: "the same", ""),
        compared("time of an epoch", "mean", lambda _: "median of all but the first", "noise"),
    ]


def _options(options: Mapping[str, Any], first: str | None = "name") -> str:
    parts = [str(options[first])] if first else []
    parts += [f"{name} {value}" for name, value in options.items() if name != first]
    return ", ".join(parts)
