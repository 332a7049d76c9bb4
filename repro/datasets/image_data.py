"""A dataset in memory, its errors, and digests and checks for all datasets."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from repro.measure.checks import is_whole
from repro.measure.host import memory_bytes

Size = tuple[int, int]  # height, width in pixels


class DatasetError(ValueError):
    """A request for a dataset cannot be fulfilled."""


class DatasetNotFoundError(DatasetError):
    """A known dataset is in none of the searched folders and could not be downloaded."""


class DataFolderError(DatasetError):
    """The folder for datasets, given as an argument or as `$REPRO_DATA`, is no folder."""


class CorruptDatasetError(DatasetError):
    """A file of a dataset is damaged, incomplete or laid out differently than documented."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images of one split with their labels, their masks or both."""

    images: Tensor  # uint8, (N, C, H, W)
    labels: Tensor | None = None  # int64 class index, (N,)
    masks: Tensor | None = None  # uint8 class index of every pixel, (N, H, W)

    def __len__(self) -> int:
        return len(self.images)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by field name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def chosen(self, index: Tensor) -> "Split":
        """The samples of these indices, in their order."""
        return Split(**{name: tensor[index] for name, tensor in self.tensors().items()})

    def evenly(self, count: int) -> "Split":
        """`count` samples at even distances, since sets on disk are ordered by class.

        All of them are the split itself. Raises DatasetError if there are fewer, or `count` is
        below 1.
        """
        taken = self._evenly(count)
        return self if count == len(self) else self.chosen(taken)

    def parted(self, count: int) -> tuple["Split", "Split"]:
        """The samples of `evenly` and the rest; raises DatasetError if that is empty."""
        if count == len(self):
            raise DatasetError(f"{count} samples of {count} leave none: give fewer")
        taken = self._evenly(count)
        left = torch.ones(len(self), dtype=torch.bool, device="cpu")
        left[taken] = False
        return self.chosen(taken), self.chosen(left)

    def _evenly(self, count: int) -> Tensor:
        if not 1 <= count <= len(self):
            raise DatasetError(f"{count} samples of {len(self)}: give 1 to {len(self)}")
        for dtype in (torch.float32, torch.float64):  # the former, as of the records that there are
            places = torch.linspace(0, len(self) - 1, count, dtype=dtype, device="cpu").round()
            if len(places.unique()) == count:  # else float32 is too coarse for so many
                break
        return places.long()


@dataclass(frozen=True, eq=False)
class ImageData:
    """A dataset in memory.

    The fingerprint is a hash of the source's content and of its resizing and cutting, equal on
    every machine for equal files.
    """

    name: str  # as given to `load`
    record_name: str  # for records: it distinguishes e.g. `cifar10` and `cifar10-jpeg`
    kind: Literal["real", "synthetic"]
    provenance: str  # one sentence: source, recompression, and the set it is a stand-in for
    fingerprint: str  # 16 hexadecimal digits
    classes: tuple[str, ...]  # names by label, or by the value of a mask if there are no labels
    train: Split
    test: Split
    val: Split | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)


def digest(parts: Iterable[object]) -> str:
    """SHA-256 of the text of all parts, in their order: 64 hexadecimal digits."""
    joined = "\x1f".join(str(part) for part in parts)
    # The name of a file need not be UTF-8.
    return hashlib.sha256(joined.encode(errors="surrogateescape")).hexdigest()


def tensor_digest(*splits: Split) -> str:
    """SHA-256 of name, shape, dtype and content of all tensors: 64 hexadecimal digits."""
    sha = hashlib.sha256()
    for split in splits:
        for name, tensor in split.tensors().items():
            sha.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()


def check_memory(count: int, shape: tuple[int, ...], advice: str) -> None:
    """Refuse images of `shape` bytes that exceed the memory of machine or container."""
    needed, available = count * math.prod(shape), memory_bytes()
    if needed > available:
        size = "x".join(map(str, shape[-2:]))
        raise DatasetError(
            f"{count} images of {size} pixels take {needed / 1e9:,.0f} GB and this machine has "
            f"{available / 1e9:,.0f} GB of memory: {advice}"
        )


def check_counts(least: int = 1, **given: object) -> None:
    """Refuse the first option, by its name, that is no integer of at least `least`."""
    for name, value in given.items():
        if not is_whole(value, least):
            raise DatasetError(f"{name}={value!r}: expected an int, at least {least}")


def check_size(size: int | Size | None, name: str = "image_size") -> int | Size | None:
    """A size if it is None, a positive int or a pair of them; else a DatasetError."""
    if size is None:
        return None
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2 or not all(is_whole(side, 1) for side in sides):
        raise DatasetError(
            f"{name}={size!r}: expected None, an int, or a pair (height, width) of ints, all at "
            "least 1"
        )
    return (int(sides[0]), int(sides[1])) if isinstance(size, tuple | list) else int(size)


def as_pair(image_size: int | Size) -> Size:
    """Height and width of images of this size."""
    return (image_size, image_size) if isinstance(image_size, int) else image_size
