"""Datasets as uint8 tensors, and a loader that augments them in whole batches.

Example:
    >>> from repro.datasets import TensorLoader, load
    >>> data = load("digits")
    >>> loader = TensorLoader(data.train.images, data.train.labels, batch_size=128, padding=1)
    >>> images, labels = next(iter(loader))
    >>> tuple(images.shape)
    (128, 1, 8, 8)
"""

from repro.datasets.catalogue import NAMES, available, download, load, road_against_rest
from repro.datasets.generators import synthetic
from repro.datasets.image_data import (
    CorruptDatasetError,
    DatasetError,
    DatasetNotFoundError,
    ImageData,
    Split,
)
from repro.datasets.loader import TensorLoader, channel_statistics

__all__ = [
    "NAMES",
    "CorruptDatasetError",
    "DatasetError",
    "DatasetNotFoundError",
    "ImageData",
    "Split",
    "TensorLoader",
    "available",
    "channel_statistics",
    "download",
    "load",
    "road_against_rest",
    "synthetic",
]
