"""What a run would build, hold and take, found without its data, its device or its time.

A paper's ``rehearsal.py`` builds model, data and optimizer of a run as the run itself does, but on
tensors that have shapes and no content, and takes the first training step. A recipe that cannot
start fails here.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from repro.datasets import ImageData, Split
from repro.datasets.catalogue import TRAIN_SHARE
from repro.experiments.design import Artefact, Paper, Run
from repro.measure import MemoryMeter
from repro.report import DASH

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A device by its data sheet, dense rates.

    Attributes:
        name: As its maker calls it.
        flops: Of float32 in matrix products and convolutions, a second.
        low_flops: The same in 16 bits with sums of 32.
        bandwidth: Bytes a second of its memory.
        memory_bytes: What it has.
    """

    name: str
    flops: float
    low_flops: float
    bandwidth: float
    memory_bytes: int


DEVICES = {
    device.name: device
    for device in (
        # float32 outside tensor cores, which torch's convolutions leave by default for TF32.
        Device("GTX 1080", 8.9e12, 8.9e12, 320e9, 8 * GIB),
        Device("RTX 3090", 35.6e12, 71e12, 936e9, 24 * GIB),
        Device("A100", 156e12, 312e12, 2039e9, 80 * GIB),
        Device("H100", 495e12, 989e12, 3350e9, 80 * GIB),
        Device("H200", 495e12, 989e12, 4800e9, 141 * 10**9),
    )
}
REACHED = 0.4  # of a data sheet's rates: what convolutional networks get as a rule
LAUNCH_S = 5e-6  # that an operation takes at least
GROUNDS = (
    "Memory is of live tensors in the first two steps; a kernel's workspace comes on top. Times "
    f"are ESTIMATED, not measured: each operation by itself at {100 * REACHED:.0f} % of the data "
    f"sheet's rate of computing or moving, at least {1e6 * LAUNCH_S:.0f} μs; loading, evaluation "
    "and processes are not in them."
)


@dataclass(frozen=True)
class Work:
    """What the operations of a step compute and move: (operations, bytes, in 16 bits) each."""

    operations: tuple[tuple[int, int, bool], ...]

    @property
    def flops(self) -> int:
        """Floating-point operations of all matrix products and convolutions."""
        return sum(flops for flops, _, _ in self.operations)

    def seconds(self, device: Device) -> float:
        """Estimate the time: each operation takes what it computes or what it moves, the longer.

        Operations are not fused, and a data sheet's rates are reached by the share `REACHED`.
        """
        return sum(
            max(
                flops / (REACHED * (device.low_flops if low else device.flops)),
                moved / (REACHED * device.bandwidth),
                LAUNCH_S,
            )
            for flops, moved, low in self.operations
        )


@dataclass(frozen=True)
class Rehearsal:
    """What a run comes to.

    Attributes:
        model: As torch's module is called, with the number of its parameters.
        data: Images of an epoch and their sides.
        epochs: Of the whole run.
        parts: Training steps of the whole run that are alike, and the work of one of them.
        peak_bytes: Of two steps on the device: live tensors, no kernel's workspace.
        limit_bytes: That the run sets on the device, or its paper's device has; None for neither.
        expected: Whether it fits into that by the paper; None where the paper does not say.
    """

    model: str
    data: str
    epochs: float
    parts: tuple[tuple[float, Work], ...]
    peak_bytes: int
    limit_bytes: int | None = None
    expected: bool | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the peak lies within the limit; None where there is none."""
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes

    def seconds(self, device: Device) -> float:
        """Estimate the time of the whole run on a device; see `Work.seconds`."""
        return sum(steps * work.seconds(device) for steps, work in self.parts)


class Rehearsed(TorchDispatchMode):
    """Notes what every operation under it computes and moves."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[int, int, bool]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "is_view", False):
            return result
        flops = 0
        packet = getattr(func, "_overloadpacket", func)
        if packet in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
        tensors = list(_tensors((args, kwargs, result)))
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        low = any(tensor.element_size() == 2 for tensor in tensors)
        if moved:
            self.operations.append((flops, moved, low))
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


class _Ones(TorchDispatchMode):
    """Answers 1 where a number is asked of a tensor that has no content, such as of a loss."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def imagined() -> Iterator[None]:
    """Make tensors inside that have shapes and no content, whatever their size.

    Whoever asks one for a number, such as a loss for whether it is finite, gets 1.
    """

    def to(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
        # torch's own swaps tensors, which those that have no content refuse. All lie on one device,
        # and a layout changes no size.
        return module

    with FakeTensorMode(), _Ones(), mock.patch.object(nn.Module, "to", to):
        yield


def first_steps(
    step: Callable[[], Any], resident: Sequence[nn.Module | Tensor]
) -> tuple[int, Work]:
    """Take two training steps; return the peak of live bytes, and the work of the second.

    Only in the second does the optimizer have its state.

    Args:
        step: Updates the model by a mini-batch.
        resident: Modules and tensors that lie on the device before.
    """
    tensors = [
        tensor
        for one in resident
        for tensor in ([*one.parameters(), *one.buffers()] if isinstance(one, nn.Module) else [one])
    ]
    with MemoryMeter("cpu", resident=tensors) as meter:
        step()
        with Rehearsed() as noted:
            step()
    return meter.peak_bytes, Work(tuple(noted.operations))


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


def rehearse(paper: Paper, run: Run) -> Rehearsal | None:
    """Rehearse a run; None where it computes or measures what is no training.

    Raises:
        Exception: Whatever the run itself would raise at its start.
    """
    module = importlib.import_module(f"repro.experiments.{paper.key}.rehearsal")
    found: Rehearsal | None = module.rehearse(run)
    return found


def table(
    paper: Paper, artefact: Artefact, runs: Sequence[Run], seeds: int, device: Device
) -> list[dict[str, str]]:
    """Return what an artefact's runs come to, a row for each model and size of images.

    Args:
        paper: Of the artefact.
        artefact: Whose runs they are.
        runs: Of one profile.
        seeds: Of a run that names none.
        device: By whose data sheet times are estimated.
    """
    groups: dict[tuple[str, str, float], list[tuple[Rehearsal, int]]] = {}
    others = 0
    for run in runs:
        found = rehearse(paper, run)
        if found is None:
            others += 1
            continue
        count = seeds if run.seeds is None else len(run.seeds)
        groups.setdefault((found.model, found.data, found.epochs), []).append((found, count))
    name = f"{paper.key}/{artefact.name}"
    rows = [
        {
            "artefact": name,
            "runs": str(sum(count for _, count in own)),
            "model": model,
            "data": data,
            "epochs": f"{epochs:g}",
            "peak (GiB)": _range([one.peak_bytes / GIB for one, _ in own]),
            "limit (GiB)": _range([o.limit_bytes / GIB for o, _ in own if o.limit_bytes]) or DASH,
            "fit": _count([o.fits for o, _ in own if o.fits is not None]),
            "as in the paper": _count(
                [o.fits == o.expected for o, _ in own if None not in (o.fits, o.expected)]
            ),
            f"h on {device.name} (ESTIMATED)": _hours(own, device),
        }
        for (model, data, epochs), own in groups.items()
    ]
    if others:
        row = dict.fromkeys(rows[0] if rows else ("artefact", "runs", "model"), DASH)
        rows.append(row | {"artefact": name, "runs": str(others), "model": "solved or measured"})
    return rows


def _hours(own: Sequence[tuple[Rehearsal, int]], device: Device) -> str:
    # What runs out of memory takes no time.
    took = [count * one.seconds(device) for one, count in own if one.fits is not False]
    return f"{sum(took) / 3600:.2g}"


def _count(values: Sequence[bool]) -> str:
    return f"{sum(values)} of {len(values)}" if values else DASH


def _range(values: Sequence[float]) -> str:
    ends = [f"{value:.3g}" for value in (min(values), max(values))] if values else []
    return " to ".join(dict.fromkeys(ends))
