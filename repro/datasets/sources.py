"""Where a dataset can lie in a folder: layouts of others (torchvision, Kaggle) and archives."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from repro.datasets.archives import (
    Decoded,
    archive_at,
    first_of_each_class,
    labelled_items,
    masked_items,
    read_archive,
    read_folder,
)
from repro.datasets.decoding import Item, decode, resized_pixels
from repro.datasets.image_data import CorruptDatasetError, DatasetError, Size, Split, labels_tensor

CAMVID_CLASSES = (
    "sky",
    "building",
    "pole",
    "road",
    "pavement",
    "tree",
    "sign",
    "fence",
    "car",
    "pedestrian",
    "bicyclist",
    "unlabelled",
)
MASK_CLASSES = {"camvid": CAMVID_CLASSES, "carvana": ("background", "car")}
CARVANA_TEST_EVERY = 5  # every fifth car


Encoded = tuple[Sequence[str], dict[str, list[Item]]]


@dataclass(frozen=True)
class Source:
    """One place that holds a dataset.

    Attributes:
        record_name: Name for records.
        layout: What lies there, in words.
        path: Archive or folder.
        files: Lists the files whose content is the dataset's, given `per_class`.
        decode: Reads it, given `image_size` and `per_class`.
        encoded: Lists classes and images by split, given `per_class`, where they can stay encoded.
    """

    record_name: str
    layout: str
    path: Path
    files: Callable[[int | None], Sequence[Path]]
    decode: Callable[[int | Size | None, int | None], Decoded]
    encoded: Callable[[int | None], Encoded] | None = None


def find(name: str, root: Path) -> Source | None:
    """Return where `root` holds dataset `name`, or None. Layouts of others come first."""
    native = _NATIVE.get(name)
    source = native(name, root) if native else None
    return source or _archive(name, root)


def looked_for(name: str) -> list[str]:
    """Return the paths in a root that `find` looks for."""
    kinds = "{images,masks}" if name in MASK_CLASSES else "<class>"
    own_layouts = [f"{name}.tar.xz", f"{name}/{{train,test}}/{kinds}/"]
    return _NATIVE_PATHS.get(name, []) + own_layouts


def _archive(name: str, root: Path) -> Source | None:
    archive, folder = root / f"{name}.tar.xz", root / name
    if archive_at(archive):
        return _folders_source(name, archive)
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        return _folders_source(name, folder)
    return None


def _folders_source(name: str, path: Path) -> Source:
    """A `NAME.tar.xz`, or the folder that it unpacks to."""
    is_archive = path.is_file()

    def files(per_class: int | None) -> list[Path]:
        if is_archive:
            return [path]
        return [file for file in read_folder(path).values() if isinstance(file, Path)]

    def read(size: int | Size | None, per_class: int | None) -> Decoded:
        contents = read_archive(path) if is_archive else read_folder(path)
        if name not in MASK_CLASSES:
            classes, items = labelled_items(contents, path)
            return _decode_items(classes, items, size, per_class)
        decoded = _decode_items(MASK_CLASSES[name], masked_items(contents, path), size, None)
        return _checked_masks(decoded, path)

    def encoded(per_class: int | None) -> Encoded:
        classes, items = labelled_items(read_folder(path), path)
        return classes, {s: first_of_each_class(members, per_class) for s, members in items.items()}

    # Elsewhere the images may have been recompressed, which changes accuracies.
    record_name = f"{name}-jpeg" if name in _NATIVE else name
    kind = "archive" if is_archive else "folder"
    # An archive is read as a whole: where its images exceed the memory it has to be unpacked.
    streams = encoded if name == "imagenet" and not is_archive else None
    return Source(record_name, f"{kind} {path.name}", path, files, read, streams)


def _decode_items(
    classes: Sequence[str],
    items: dict[str, list[Item]],
    size: int | Size | None,
    per_class: int | None,
) -> Decoded:
    splits = {
        split: decode(first_of_each_class(members, per_class), size)
        for split, members in items.items()
    }
    shapes = {split: tuple(s.images.shape[1:]) for split, s in splits.items()}
    if len(set(shapes.values())) > 1:
        raise DatasetError(
            f"the splits' images differ in size, {shapes}: give image_size= to resize them to one"
        )
    return Decoded(tuple(classes), splits)


def _checked_masks(decoded: Decoded, path: Path) -> Decoded:
    for name, split in decoded.splits.items():
        if split.masks is not None and int(split.masks.max()) >= len(decoded.classes):
            raise CorruptDatasetError(
                f"{path}: a mask of {name} holds the value {int(split.masks.max())}; expected "
                f"class indices 0 to {len(decoded.classes) - 1}"
            )
    return decoded


def _cifar(name: str, root: Path) -> Source | None:
    folder = root / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    if not folder.is_dir():
        return None

    def read(size: int | Size | None, per_class: int | None) -> Decoded:
        splits = {}
        for split in ("train", "test"):
            dataset = _torchvision_class(name)(root, train=split == "train")
            images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
            labels = labels_tensor(dataset.targets)
            kept = _first_of_each_label(labels, per_class)
            splits[split] = _resized(Split(images[kept], labels[kept]), size)
        return Decoded(tuple(dataset.classes), splits)

    return Source(name, f"torchvision folder {folder.name}", folder, lambda _: _files(folder), read)


def _flowers102(name: str, root: Path) -> Source | None:
    folder = root / "flowers-102"
    if not folder.is_dir():
        return None

    def read(size: int | Size | None, per_class: int | None) -> Decoded:
        items: dict[str, list[Item]] = {}
        for split in ("train", "val", "test"):
            # With `Path` for a loader the dataset yields file names in place of pictures.
            dataset = _torchvision_class(name)(root, split=split, loader=Path)
            pairs = [dataset[i] for i in range(len(dataset))]
            items[split] = [Item(str(file), file, label=label) for file, label in pairs]
        return _decode_items(dataset.classes, items, size, per_class)

    return Source(name, f"torchvision folder {folder.name}", folder, lambda _: _files(folder), read)


def _imagenet(name: str, root: Path) -> Source | None:
    for folder in (root / "imagenet", root):
        if any((folder / m).is_file() for m in ("meta.bin", "ILSVRC2012_devkit_t12.tar.gz")):
            break
    else:
        return None

    @functools.cache
    def listing() -> tuple[tuple[str, ...], dict[str, list[Item]]]:
        items = {}
        for split, theirs in (("train", "train"), ("test", "val")):
            # torchvision unpacks its archives into this folder the first time.
            dataset = _torchvision_class(name)(folder, split=theirs)
            items[split] = [Item(file, Path(file), label=k) for file, k in dataset.samples]
        return tuple(names[0] for names in dataset.classes), items

    def files(per_class: int | None) -> list[Path]:
        # Only what is loaded is hashed: the whole of it is 150 GB.
        kept = [first_of_each_class(members, per_class) for members in listing()[1].values()]
        return [Path(item.name) for members in kept for item in members]

    def encoded(per_class: int | None) -> Encoded:
        classes, items = listing()
        return classes, {s: first_of_each_class(members, per_class) for s, members in items.items()}

    def read(size: int | Size | None, per_class: int | None) -> Decoded:
        classes, items = listing()
        return _decode_items(classes, items, size, per_class)

    return Source(name, "torchvision ImageNet folder", folder, files, read, encoded)


def _carvana(name: str, root: Path) -> Source | None:
    for folder in (root / "carvana", root):
        if (folder / "train").is_dir() and (folder / "train_masks").is_dir():
            break
    else:
        return None

    def read(size: int | Size | None, per_class: int | None) -> Decoded:
        images = sorted((folder / "train").glob("*.jpg"))
        # Sixteen views of one car share the name up to the underscore: a car is train or test.
        cars = sorted({image.stem.rsplit("_", 1)[0] for image in images})
        held_out = set(cars[CARVANA_TEST_EVERY - 1 :: CARVANA_TEST_EVERY])
        items: dict[str, list[Item]] = {"train": [], "test": []}
        for image in images:
            mask = folder / "train_masks" / f"{image.stem}_mask.gif"
            if not mask.is_file():
                raise CorruptDatasetError(
                    f"{image} has no mask {mask}: unpack train_masks.zip again"
                )
            split = "test" if image.stem.rsplit("_", 1)[0] in held_out else "train"
            items[split].append(Item(str(image), image, mask=mask))
        if not items["test"]:
            raise CorruptDatasetError(
                f"{folder} holds {len(cars)} cars: expected at least {CARVANA_TEST_EVERY}, for "
                f"every {CARVANA_TEST_EVERY}th is test"
            )
        return _checked_masks(_decode_items(MASK_CLASSES[name], items, size, None), folder)

    def files(per_class: int | None) -> list[Path]:
        return [*_files(folder / "train"), *_files(folder / "train_masks")]

    return Source(name, "Kaggle folders train, train_masks", folder, files, read)


_NATIVE: dict[str, Callable[[str, Path], Source | None]] = {
    "cifar10": _cifar,
    "cifar100": _cifar,
    "flowers102": _flowers102,
    "imagenet": _imagenet,
    "carvana": _carvana,
}
_NATIVE_PATHS = {
    "cifar10": ["cifar-10-batches-py/"],
    "cifar100": ["cifar-100-python/"],
    "flowers102": ["flowers-102/"],
    "imagenet": ["imagenet/ or the root itself with ILSVRC2012_devkit_t12.tar.gz or meta.bin"],
    "carvana": ["carvana/ or the root itself with train/*.jpg and train_masks/*_mask.gif"],
}
_CLASS_NAMES = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "flowers102": "Flowers102",
    "imagenet": "ImageNet",
}


def _torchvision_class(name: str) -> Any:
    from repro._torchvision import torchvision

    return getattr(torchvision.datasets, _CLASS_NAMES[name])


def fetch(name: str, root: Path) -> None:
    """Let torchvision download `name` into `root`; raises what torchvision and urllib raise."""
    _torchvision_class(name)(root, download=True)


def download_url(name: str) -> str | None:
    """Return where torchvision downloads `name` from; None if it cannot."""
    if name in ("cifar10", "cifar100"):
        return str(_torchvision_class(name).url)
    if name == "flowers102":
        flowers = _torchvision_class(name)
        return f"{flowers._download_url_prefix}{flowers._file_dict['image'][0]}"
    return None


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def _first_of_each_label(labels: torch.Tensor, per_class: int | None) -> torch.Tensor:
    """Return the places, in order, of the first `per_class` of every label."""
    if per_class is None:
        return torch.arange(len(labels))
    places = [(labels == k).nonzero().flatten()[:per_class] for k in labels.unique()]
    return torch.cat(places).sort().values


def _resized(split: Split, size: int | Size | None) -> Split:
    if size is None:
        return split
    pictures = (Image.fromarray(image.permute(1, 2, 0).numpy()) for image in split.images)
    resized = np.stack([resized_pixels(picture, size) for picture in pictures])
    return Split(torch.from_numpy(resized), split.labels)
