"""Datasets as uint8 tensors, and a loader that augments them in whole batches.

Example:
    >>> from repro.datasets import TensorLoader, load
    >>> data = load("digits")
    >>> loader = TensorLoader(data.train.images, data.train.labels, batch_size=128, padding=1)
    >>> images, labels = next(iter(loader))
    >>> tuple(images.shape)
    (128, 1, 8, 8)
"""

from repro.datasets.catalogue import NAMES, available, download, load, looked_for
from repro.datasets.decoding import StreamedImages, dense
from repro.datasets.image_data import (
    CorruptDatasetError,
    DataFolderError,
    DatasetError,
    DatasetNotFoundError,
    ImageData,
    Split,
)
from repro.datasets.loader import Ahead, TensorLoader, channel_statistics
from repro.datasets.patches import PatchLoader, low_resolution, noisy
from repro.datasets.phantom import phantom
from repro.datasets.timings import TIMES, EpochTimes, find_times, load_times

__all__ = [
    "NAMES", "TIMES", "Ahead", "CorruptDatasetError", "DataFolderError", "DatasetError",
    "DatasetNotFoundError", "EpochTimes", "ImageData", "PatchLoader", "Split", "StreamedImages",
    "TensorLoader", "available", "channel_statistics", "dense", "download", "find_times", "load",
    "load_times", "looked_for", "low_resolution", "noisy", "phantom",
]  # fmt: skip
