"""Epochs whose images are decoded from files, with and without reading ahead."""

import os
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from repro.datasets import Ahead, ImageData, TensorLoader
from repro.datasets.decoding import opened, resized_pixels
from repro.experiments.mbs.building import (
    Batch,
    Config,
    build_model,
    build_optimizer,
    images_and_targets,
    training_step,
)
from repro.experiments.outcome import Outcome
from repro.measure import time_interleaved
from repro.training import fit

QUALITY = 90  # of JPEG


def write_files(images: torch.Tensor, folder: Path) -> list[Path]:
    """Write each image as a JPEG file of its own, onto the disk and not just into its cache.

    Args:
        images: uint8, (N, 3, H, W).
        folder: That is there.
    """
    paths = [folder / f"{number:05d}.jpg" for number in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
        with path.open("wb") as file:
            Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
            file.flush()
            os.fsync(file.fileno())  # what is not written yet cannot leave the page cache
    return paths


def read_uncached(path: Path) -> bytes:
    """Return a file's content, and take it out of the page cache, so that the next read is cold.

    Where the system cannot (it is no Linux, or the folder lies in memory), it stays.
    """
    with path.open("rb", buffering=0) as file:
        content = file.read()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return content


def uncached_share(paths: Sequence[Path]) -> float | None:
    """Return the share of files that are not in the page cache, None where that is unknown."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    uncached = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            try:
                os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
            except BlockingIOError:  # it would wait for the disk
                uncached += 1
            except OSError:  # the file system does not answer
                return None
    return uncached / len(paths)


def decoded(paths: Iterable[Path], side: int) -> torch.Tensor:
    """Return images read from files one after the other, uint8 (N, 3, side, side)."""
    pixels = []
    for path in paths:
        with opened(path.name, read_uncached(path)) as image:
            pixels.append(resized_pixels(image.convert("RGB"), side))
    return torch.from_numpy(np.stack(pixels))


class FileLoader(TensorLoader):
    """A `TensorLoader` that decodes each mini-batch from files when it is asked for.

    Order and augmentation, and so the mini-batches, are those of the images in memory.

    Args:
        paths: A file of each image.
        images: What they decode to; of it only shape and statistics are taken.
        labels: int64, (N,).
        batch_size: Images in a mini-batch.
        options: Of `TensorLoader`.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        images: torch.Tensor,
        labels: torch.Tensor,
        batch_size: int,
        **options: Any,
    ) -> None:
        super().__init__(images, labels, batch_size, **options)
        self._paths = paths

    def _cut(
        self,
        tensor: torch.Tensor,
        index: torch.Tensor,
        corner: torch.Tensor,
        flips: torch.Tensor,
        fill: int,
    ) -> torch.Tensor:
        own = decoded([self._paths[i] for i in index.tolist()], tensor.shape[-1])
        return super()._cut(own, torch.arange(len(index)), corner, flips, fill)


def loader_of(
    reading: str,
    paths: Sequence[Path],
    images: torch.Tensor,
    labels: torch.Tensor,
    batch_size: int,
    device: str,
    **options: Any,
) -> Iterable[Batch]:
    """Return the mini-batches by a way of reading.

    Args:
        reading: ``memory``, images decoded before; ``asked``, decoded when a mini-batch is asked
            for; ``ahead``, by a thread while the mini-batch before it trains.
        paths: As for `FileLoader`, and so are the others.
        images: Likewise.
        labels: Likewise.
        batch_size: Likewise.
        device: The device that trains.
        options: Likewise.
    """
    if reading == "memory":
        return Ahead(TensorLoader(images, labels, batch_size, **options), device)
    loader = FileLoader(paths, images, labels, batch_size, **options)
    return Ahead(loader, device, count=1, always=True) if reading == "ahead" else loader


def file_epochs(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Time epochs with MBS by mini-batch and way of reading the images, in turns (section 4.3.3).

    What an epoch has in memory was decoded from the same files, so that all ways train alike.
    """
    assert data is not None
    torch.manual_seed(seed)
    images, labels = images_and_targets(config, data.train, config["train_samples"])
    with tempfile.TemporaryDirectory() as name:
        paths = write_files(images, Path(name))
        resident = decoded(paths, config["augment"]["crop_size"])
        trained = {}
        for way, (mini, micro, reading) in config["ways"].items():
            own = dict(config) | {"mini_batch": mini, "micro_batch": micro}
            model = build_model(own, data, device)
            step = training_step(own, model, build_optimizer(own, model), device)
            loader = loader_of(
                reading, paths, resident, labels, mini, device, seed=seed, **config["augment"]
            )
            trained[way] = partial(fit, model, step, loader, epochs=1, device=device)
        timings = time_interleaved(trained, warmup=1, repeats=config["repeats"], device=device)
        uncached = uncached_share(paths)
        file_bytes = sum(path.stat().st_size for path in paths)
    metrics = {"files": len(paths), "file_bytes": file_bytes, "uncached": uncached}
    return Outcome(metrics=metrics, timings=timings)
