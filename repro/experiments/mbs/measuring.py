"""What is measured of memory and time: sizes that fit, steps, epochs, files, a timeline."""

import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from repro.datasets import Ahead, ImageData, TensorLoader
from repro.datasets.decoding import opened, resized_pixels
from repro.experiments.design import Config, Outcome
from repro.experiments.mbs.training import Batch, Task
from repro.mbs import MicroBatchStreamer
from repro.measure import (
    LinearMemoryModel,
    MemoryBudget,
    Timing,
    is_out_of_memory,
    synchronize,
    time_interleaved,
)
from repro.measure.fake_tensors import first_steps, imagined
from repro.training import fit

QUALITY = 90  # of JPEG


def size(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Find the largest mini-batch that fits: by powers of two, by M(B) = p + B a, by the streamer.

    Undivided steps are timed for the model t(B) = c + B d (Table 2).
    """
    torch.manual_seed(seed)
    task, probed = Task(config, data, device), (2, 4, 8)
    peaks = task.undivided_peaks(probed)
    memory = LinearMemoryModel.fit(probed, peaks)  # M(B) = p + B a
    limit = task.limit()
    fits, tried = None if limit is None else 0, 2
    while limit is not None and tried <= config["largest"] and _fits(task, tried, limit):
        fits, tried = tried, 2 * tried

    batch, model = task.first_batch(config["largest"]), task.model()
    # Only the memory counts here, and Dice needs two passes to be exact.
    streamer = MicroBatchStreamer(model, task.loss, "auto", device=device, check="off")
    with MemoryBudget(limit, device, resident=model) if limit else nullcontext():
        streamer.backward(*batch)
    sizing = streamer.sizing
    assert sizing is not None

    steps = {
        str(count): partial(task.step(model, None), *task.first_batch(count))
        for count in (2, 4, 8, 16, 32)
    }
    metrics = {
        "limit_bytes": limit,
        "largest_that_fits": fits,
        "predicted_largest": None if limit is None else memory.largest_batch(limit),
        **asdict(memory),
        "probe_peaks": peaks,
        "auto_micro_batch": sizing.micro_batch_size,
        "auto_predicted_bytes": sizing.predicted_bytes,
        "auto_observed_bytes": sizing.observed_bytes,
        "auto_prediction_error": sizing.prediction_error,
    }
    timings = time_interleaved(steps, warmup=2, repeats=config["repeats"], device=device)
    return Outcome(metrics, timings, sizing.observed_bytes)


def _fits(task: Task, count: int, limit: int) -> bool:
    batch, model = task.first_batch(count), task.model()
    try:
        with MemoryBudget(limit, task.device, resident=model):
            task.two_steps(model, batch, None)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def step(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Take two steps of one mini-batch, with or without MBS, under a memory limit (Tables 4, 5)."""
    torch.manual_seed(seed)
    task, limit = Task(config, data, device), config["limit_bytes"]
    batch, model = task.first_batch(config["mini_batch"], seed), task.model()
    with MemoryBudget(limit, device, resident=model) as budget:
        task.two_steps(model, batch, config["micro_batch"])
    return Outcome({"limit_bytes": limit}, peak_bytes=budget.peak_reserved_bytes)


def predicted_size(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Predict the largest mini-batch by two steps of tensors without content (Table 2)."""
    task, peaks = Task(config, data, "cpu"), []
    for size in config["sizes"]:
        with imagined():
            model, inputs = task.model(), torch.empty(size, 3, *config["sides"])
            shape = (size, *config["sides"]) if task.segments else (size,)
            targets = torch.empty(shape, dtype=torch.int64)
            step = partial(task.step(model, None), inputs, targets)
            peak = first_steps(step, [model, inputs, targets])
        peaks.append(peak)
    memory, limit = LinearMemoryModel.fit(config["sizes"], peaks), config["device_bytes"]
    found = {"peaks": peaks, "limit_bytes": limit, "largest": memory.largest_batch(limit)}
    return Outcome(found | asdict(memory))


def overhead(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Time steps in turns: undivided, in halves, and of twice as many in two (section 4.3.3)."""
    torch.manual_seed(seed)
    task, initial = Task(config, data, device), config["mini_batch"]
    ways = {
        "undivided": (initial, None),
        "halved": (initial, config["micro_batch"]),
        "doubled": (2 * initial, initial),
    }
    steps = {
        name: partial(task.step(task.model(), micro), *task.first_batch(count))
        for name, (count, micro) in ways.items()
    }
    timings = time_interleaved(steps, warmup=3, repeats=config["repeats"], device=device)
    undivided, halved, doubled = (timings[name].median_s for name in ways)
    # Of medians, for a first look; claims take the ratio of each round.
    metrics = {"halved_percent": 100 * (halved / undivided - 1)}
    metrics["doubled_percent"] = 100 * (doubled / 2 / undivided - 1)
    return Outcome(metrics, timings)


def _in_turns(
    task: Task, seed: int, ways: Mapping[str, tuple[int | None, Iterable[Batch]]]
) -> dict[str, Timing]:
    """Time epochs of fresh models in turns, each of micro-batches (None: undivided) of a loader."""
    torch.manual_seed(seed)
    trained = {}
    for name, (micro, loader) in ways.items():
        step = task.step(model := task.model(), micro)
        trained[name] = partial(fit, model, step, loader, epochs=1, device=task.device)
    repeats = task.config["repeats"]
    return time_interleaved(trained, warmup=1, repeats=repeats, device=task.device)


def epochs(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Time whole epochs of training with and without MBS, in turns (Tables 4 and 5)."""
    task, samples = Task(config, data, device), config["train_samples"]
    ways = {
        name: (micro, Ahead(task.loader(mini, seed, samples), device))
        for name, (mini, micro) in config["ways"].items()
    }
    return Outcome({}, _in_turns(task, seed, ways))


def file_epochs(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Time epochs by mini-batch and by how the same images are read, in turns (section 4.3.3)."""
    task, ways = Task(config, data, device), {}
    images, labels = task.samples(data.train, config["train_samples"])
    options = {"seed": seed, **config["augment"]}
    with tempfile.TemporaryDirectory() as name:
        paths = write_files(images, Path(name))
        decoded = decode(paths, options["crop_size"])
        for way, (mini, micro, reading) in config["ways"].items():
            loader: Any = FileLoader(paths, decoded, labels, mini, **options)
            if reading == "memory":
                loader = Ahead(TensorLoader(decoded, labels, mini, **options), device)
            elif reading == "ahead":
                loader = Ahead(loader, device, count=1, always=True)
            ways[way] = (micro, loader)
        timings = _in_turns(task, seed, ways)
        uncached = uncached_share(paths)
        file_bytes = sum(path.stat().st_size for path in paths)
    return Outcome({"files": len(paths), "file_bytes": file_bytes, "uncached": uncached}, timings)


def write_files(images: Tensor, folder: Path) -> list[Path]:
    """Write each of some images, uint8 (N, 3, H, W), as a JPEG file of its own."""
    paths = [folder / f"{number:05d}.jpg" for number in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
        with path.open("wb") as file:
            Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
            file.flush()
            os.fsync(file.fileno())  # only what is written can leave the page cache
    return paths


def decode(paths: Iterable[Path], side: int) -> Tensor:
    """Read images, uint8 (N, 3, side, side); drop them from the page cache where Linux can."""
    pixels = []
    for path in paths:
        with path.open("rb", buffering=0) as file:
            content = file.read()
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with opened(path.name, content) as image:
            pixels.append(resized_pixels(image.convert("RGB"), side))
    return torch.from_numpy(np.stack(pixels))


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


class FileLoader(TensorLoader):
    """A `TensorLoader` that decodes each mini-batch from files when it is asked for."""

    def __init__(self, paths: Sequence[Path], images: Tensor, *args: Any, **options: Any) -> None:
        super().__init__(images, *args, **options)
        self._paths = paths

    def _cut(self, tensor: Tensor, index: Tensor, *args: Any, **options: Any) -> Tensor:
        own = decode([self._paths[i] for i in index.tolist()], tensor.shape[-1])
        return super()._cut(own, torch.arange(len(index)), *args, **options)


def timeline(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Trace one mini-batch: each micro-batch's copy and computation, then the update (Figure 2).

    On a CPU, where nothing is copied, the cropping and normalising of each piece takes its place.
    """
    torch.manual_seed(seed)
    task, count, micro = Task(config, data, device), config["mini_batch"], config["micro_batch"]
    model = task.model()
    optimizer, streamer = task.optimizer(model), task.streamer(model, micro, trace=True)
    versions: list[int] = []  # of the first parameter, as each micro-batch finds it
    first = next(model.parameters())
    model.register_forward_pre_hook(lambda *_: versions.append(first._version))
    pieces, batch = task.loader(micro, seed, count), task.first_batch(count, seed)
    copies: list[list[Any]] = []  # on a CPU

    def prepared() -> Iterator[Batch]:
        begun = time.perf_counter()
        for number, piece in enumerate(pieces):
            copies.append(["copy", number, begun - start, time.perf_counter() - start])
            yield piece
            begun = time.perf_counter()

    for _ in range(3):  # the last one is kept, the others warm up
        optimizer.zero_grad(set_to_none=True)
        versions.clear()
        copies.clear()
        synchronize(device)
        start = time.perf_counter()
        result = streamer.backward(prepared()) if device == "cpu" else streamer.backward(*batch)
        computed = time.perf_counter()
        optimizer.step()
        synchronize(device)
        updated = time.perf_counter()
    spans = [[s.kind, s.micro_batch, s.start_s, s.end_s] for s in streamer.timeline()]
    if device == "cpu":
        spans = [span for span in spans if span[0] == "compute"] + copies
    metrics = {"spans": spans, "update": [computed - start, updated - start]}
    metrics["copied"] = "pieces prepared on the CPU" if device == "cpu" else "host to device"
    metrics["micro_batches"] = result.num_micro_batches
    metrics["updates_between_micro_batches"] = len(set(versions)) - 1
    metrics["updates_after"] = int(first._version != versions[-1])
    return Outcome(metrics)
