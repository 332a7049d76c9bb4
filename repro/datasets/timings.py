"""Published measurements of training times, if available."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from repro import paths
from repro.datasets.image_data import CorruptDatasetError, DatasetNotFoundError, digest

TIMES = "dualbatch_times"
_FILES = {"PyTorch": "gtx1080_pytorch.npy", "TensorFlow": "gtx1080_tensorflow.npy"}


@dataclass(frozen=True, eq=False)
class EpochTimes:
    """Seconds of one epoch of ResNet-18 against the batch size, on a GTX 1080; see `ImageData`."""

    seconds: dict[str, NDArray[np.float64]]  # by framework, (500,): entry i is for batch size i + 1
    samples: int  # images in an epoch
    fingerprint: str  # of the numbers
    name: str = TIMES
    record_name: str = TIMES
    kind: Literal["real"] = "real"
    provenance: str = (
        "Raw measurements that the authors of dual-batch learning published: an epoch of 50,000 "
        "CIFAR images, ResNet-18, GTX 1080."
    )


def find_times(root: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder of `EpochTimes`, None if it is not available."""
    folders = [folder / TIMES for folder in paths.data_roots(root)]
    return next((f for f in folders if all((f / n).is_file() for n in _FILES.values())), None)


def load_times(root: str | os.PathLike[str] | None = None) -> EpochTimes:
    """Load the authors' raw measurements from ``dualbatch_times/*.npy``.

    Raises:
        DatasetNotFoundError: The files are in none of the searched folders.
        CorruptDatasetError: A file holds something else.
    """
    folder = find_times(root)
    if folder is None:
        searched = ", ".join(map(str, paths.data_roots(root)))
        raise DatasetNotFoundError(
            f"{TIMES!r} ({', '.join(_FILES.values())}) is in none of {searched}: copy the folder "
            "there, or set $REPRO_DATA"
        )
    seconds = {framework: _read(folder / name) for framework, name in _FILES.items()}
    fingerprint = digest(value for values in seconds.values() for value in values)[:16]
    return EpochTimes(seconds, 50_000, fingerprint)


def _read(path: Path) -> NDArray[np.float64]:
    try:
        values = np.trim_zeros(np.asarray(np.load(path), np.float64), "b")  # the last is empty
        if len(values) < 2 or values.ndim != 1 or not (np.isfinite(values) & (values > 0)).all():
            raise ValueError("expected seconds above 0 (finite) for batch sizes 1, 2, ...")
    except (OSError, ValueError, TypeError, EOFError, MemoryError) as error:
        raise CorruptDatasetError(f"{path} cannot be read ({error})") from error
    return values
