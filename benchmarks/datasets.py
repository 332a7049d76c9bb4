"""Feeding augmented CIFAR-10 batches: `TensorLoader` against torchvision's `DataLoader` pipeline.

Both crop randomly from a padding of 4, flip, convert to float32 and normalise, in batches of 128.
One timing is one epoch, of the loader's construction nothing (of `DataLoader` the start of its
workers, which every epoch repeats). The two alternate, after one warm-up of each.

`TensorLoader` runs on one thread by default, so that the ratio can be trusted on a shared machine:
a second one gains about a fifth when nothing else runs, but where another process wants the core,
OpenMP's busy waiting makes each of the many small operations cost a scheduler tick.

Run from the repository root: ``python -m benchmarks.datasets [--repeats 5] [--threads 1]``.
It takes CIFAR-10 where `repro.datasets` finds it.
"""

import argparse
import hashlib
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from repro._torchvision import torchvision
from repro.datasets import ImageData, TensorLoader, load

BATCH_SIZE = 128
PADDING = 4
WORKERS = 2
TARGET_RATIO = 20.0


def write_cifar10(data: ImageData, root: Path) -> type:
    """Write `data` in torchvision's layout; return a CIFAR10 class that knows its checksums."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    checksums = {}

    def write(name: str, content: dict[str, object]) -> None:
        (folder / name).write_bytes(pickle.dumps(content))
        checksums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()

    write("batches.meta", {"label_names": list(data.classes)})
    parts = [(f"data_batch_{k + 1}", data.train, slice(k, None, 5)) for k in range(5)]
    for name, split, rows in [*parts, ("test_batch", data.test, slice(None))]:
        pixels = split.images[rows].flatten(1).numpy()
        write(name, {"data": pixels, "labels": split.labels[rows].tolist()})

    class WrittenCIFAR10(torchvision.datasets.CIFAR10):
        train_list = tuple(
            (f"data_batch_{k + 1}", checksums[f"data_batch_{k + 1}"]) for k in range(5)
        )
        test_list = (("test_batch", checksums["test_batch"]),)
        meta = {**torchvision.datasets.CIFAR10.meta, "md5": checksums["batches.meta"]}  # noqa: RUF012

    # Worker processes started by spawn would look the class up by name; Linux forks.
    return WrittenCIFAR10


def torchvision_pipeline(data: ImageData, root: Path, loader: TensorLoader) -> DataLoader:
    """Build the pipeline of torchvision's own tutorials, on PIL images in worker processes."""
    transforms = torchvision.transforms
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=PADDING),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(loader.mean, loader.std),
        ]
    )
    dataset = write_cifar10(data, root)(root, train=True, transform=transform)
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=WORKERS)


def epoch_time_s(batches: Iterable[tuple[torch.Tensor, torch.Tensor]], images: int) -> float:
    """Return the seconds one epoch takes, all batches drawn and dropped."""
    start = time.perf_counter()
    seen = 0
    for pixels, _ in batches:
        seen += len(pixels)
    elapsed = time.perf_counter() - start
    if seen != images:
        raise RuntimeError(f"an epoch gave {seen} images, expected {images}")
    return elapsed


def main() -> None:
    """Time both pipelines, alternating, and print medians and their ratio."""
    parser = argparse.ArgumentParser(description="feeding CIFAR-10: TensorLoader or DataLoader")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of TensorLoader")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)  # DataLoader's workers have one each in any case

    data = load("cifar10")
    images = min(arguments.images, len(data.train))
    loader = TensorLoader(
        data.train.images[:images],
        data.train.labels[:images],
        BATCH_SIZE,
        padding=PADDING,
        flip=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        pipeline = torchvision_pipeline(data, Path(folder), loader)
        pipeline.dataset.data = pipeline.dataset.data[:images]
        pipelines: dict[str, Callable[[], float]] = {
            "torchvision": lambda: epoch_time_s(pipeline, images),
            "TensorLoader": lambda: epoch_time_s(loader, images),
        }
        times: dict[str, list[float]] = {name: [] for name in pipelines}
        for repeat in range(arguments.repeats + 1):
            for name, run in pipelines.items():
                elapsed = run()
                if repeat > 0:  # the first is the warm-up
                    times[name].append(elapsed)

    print(
        f"{images} images of {data.record_name} ({data.kind}), batch size {BATCH_SIZE}, "
        f"{torch.get_num_threads()} threads, {WORKERS} workers, n = {arguments.repeats}"
    )
    for name, samples in times.items():
        median = statistics.median(samples)
        print(
            f"{name:>13}: {median:7.3f} s per epoch (min {min(samples):.3f}, max "
            f"{max(samples):.3f}), {images / median:,.0f} images/s"
        )
    ratio = statistics.median(times["torchvision"]) / statistics.median(times["TensorLoader"])
    print(f"TensorLoader is {ratio:.1f} times faster (required: {TARGET_RATIO:.0f})")


if __name__ == "__main__":
    main()
