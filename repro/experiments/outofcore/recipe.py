"""The paper's recipe beside ours, item by item, computed from `settings`."""

from functools import partial

from repro.experiments.outofcore.settings import (
    BATCHES,
    GROWING,
    MODELS,
    PAPER,
    REPEATS,
    RESNET,
    ROLES,
    THREADS,
)
from repro.experiments.recipes import NOT_STATED, compared

_compared = partial(compared, long=False)  # that profile compares schedules alone
_SMALL = "two cores have five minutes"
_SIDES = {"Pix2PixHD": "512×1024", "DeepLabv3+": "513×513"}


def recipe() -> list[dict[str, str]]:
    """Return a row for each item.

    Returns:
        Rows with the columns item, paper, paper profile, gpu, long, quick, why they differ.
    """
    rows = [
        _compared(
            "device", PAPER["device"], lambda _: "the machine's", "Table 1 is SIMULATED, too"
        ),
        _compared(
            "memory",
            f"{PAPER['limit_gib']} GiB",
            lambda p: (
                "between the needs of two batch sizes (SIMULATED)"
                if p == "quick"
                else f"{PAPER['limit_gib']} GiB (a limit)"
            ),
            "which sizes fit in core is set so",
        ),
    ]
    for role in ROLES:
        height, width = MODELS["paper"][role]["image"]
        rows.append(
            _compared(
                f"{role}: network and image",
                f"{role}, {_SIDES.get(role, f'{height}×{width}')}",
                lambda p, role=role: _network(p, role),  # type: ignore[misc]
                f"DenseNet-121 is assumed, the paper names no depth; {_SMALL}"
                if role == "DenseNet"
                else _SMALL,
            )
        )
        batches = BATCHES if role == RESNET else {p: sizes[role] for p, sizes in GROWING.items()}
        rows.append(
            _compared(
                f"{role}: batch sizes",
                ", ".join(map(str, PAPER["table1"]["batches"])) if role == RESNET else "drawn",
                lambda p, batches=batches: ", ".join(map(str, batches[p])) or "none",  # type: ignore[misc]
                "in proportion to the largest that fits in core",
            )
        )
    rows += [
        _compared("data", NOT_STATED, lambda _: "SYNTHETIC", "only speed and memory are looked at"),
        _compared(
            "iterations averaged",
            "100",
            lambda p: f"median of {REPEATS[p]}",
            f"{_SMALL}; long: 9 of each schedule, by five processes",
        ),
        _compared(
            "threads",
            NOT_STATED,
            lambda p: str(THREADS[p] or "all"),
            "as records of a CPU are made",
        ),
    ]
    return rows


def _network(profile: str, role: str) -> str:
    setting = MODELS[profile][role]
    height, width = setting["image"]
    options = "".join(f", {k} {v}" for k, v in setting["model"].items() if k != "name")
    return f"{setting['model']['name']}{options}, {height}×{width}"
