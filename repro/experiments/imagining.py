"""Datasets that have shapes and no content, for rehearsals; see `repro.measure.fake_tensors`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from repro.datasets import ImageData, Split
from repro.datasets.catalogue import TRAIN_SHARE

# Images of the training and the test split, classes, height and width; masks have no labels.
_SETS: dict[str, tuple[int, int, int, tuple[int, int]]] = {
    "cifar10": (50_000, 10_000, 10, (32, 32)),
    "cifar100": (50_000, 10_000, 100, (32, 32)),
    "flowers102": (1_020, 6_149, 102, (500, 500)),
    "carvana": (4_080, 1_008, 2, (1280, 1918)),
    "imagenet": (1_281_167, 50_000, 1000, (224, 224)),
    "div2k": (800, 100, 0, (648, 2040)),
}
_MASKED = ("carvana",)
FLOWERS = 8_189  # of Flowers-102, in all its splits


def imagined_data(wanted: Mapping[str, Any], samples: tuple[int, int] | None = None) -> ImageData:
    """Return a dataset of the shape that `repro.datasets.load` would give; see `imagined`.

    Args:
        wanted: The ``dataset`` of a run's configuration.
        samples: Of the training and the test split, in the place of the dataset's own.
    """
    name = wanted["name"]
    if name == "phantom":
        counts, classes = (wanted["train"], wanted["test"]), 0
        sides, channels = (wanted["image_size"],) * 2, 1
    else:
        train, test, classes, sides = _SETS[name]
        counts, channels = (train, test), 3
    size = wanted.get("image_size")
    if size is not None and name != "phantom":
        sides = (size, size) if isinstance(size, int) else tuple(size)
    if wanted.get("split") == "random":
        cut = round(TRAIN_SHARE * FLOWERS)
        counts = (cut, FLOWERS - cut)
    counts = samples or counts

    def split(count: int) -> Split:
        images = torch.empty(count, channels, *sides, dtype=torch.uint8)
        labels = masks = None
        if name in _MASKED:
            masks = torch.empty(count, *sides, dtype=torch.uint8)
        elif classes:
            labels = torch.empty(count, dtype=torch.int64)
        return Split(images, labels, masks)

    return ImageData(
        name=name,
        record_name=name,
        kind="real",
        provenance="Imagined: shapes alone.",
        fingerprint="imagined",
        classes=tuple(map(str, range(classes))),
        train=split(counts[0]),
        test=split(counts[1]),
    )


def said(model: nn.Module) -> str:
    """Return a model's class with its number of parameters."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}, {count / 1e6:.3g} M parameters"
