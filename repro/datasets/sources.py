"""Layouts of a dataset in a folder: others' (torchvision, Kaggle) and our archives."""

import functools
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from repro.datasets import pictures
from repro.datasets.archives import Decoded, content_hash, read_archive, read_folder
from repro.datasets.decoding import Encoded, Item, decode
from repro.datasets.image_data import CorruptDatasetError, DatasetError, Size, digest

CAMVID_CLASSES = (
    *("sky", "building", "pole", "road", "pavement", "tree"),
    *("sign", "fence", "car", "pedestrian", "bicyclist", "unlabelled"),
)
MASK_CLASSES = {"camvid": CAMVID_CLASSES, "carvana": ("background", "car")}
CARVANA_TEST_EVERY = 5  # every fifth car

Listing = tuple[tuple[str, ...], dict[str, list[Item]]]  # classes, images by split


@dataclass(frozen=True)
class Source:
    """One place that holds a dataset."""

    record_name: str  # for records
    layout: str  # in words
    path: Path  # archive or folder
    everything: Callable[[], Listing]  # lists classes and all images by split
    # Lists the files with the dataset's content; None for ImageNet's, which may stay encoded.
    hashed: Callable[[], list[Path]] | None

    @property
    def located(self) -> str:
        """Layout and path, in words."""
        return f"{self.layout} at {self.path}"

    def listing(self, per_class: int | None) -> Listing:
        """Classes, and the first `per_class` images of each class (None: all) by split."""
        classes, items = self.everything()
        if per_class is None:
            return classes, items
        kept = {}
        for split, members in items.items():
            ranks: dict[int | None, Iterator[int]] = defaultdict(itertools.count)
            kept[split] = [item for item in members if next(ranks[item.label]) < per_class]
        return classes, kept

    def content(self, per_class: int | None) -> str:
        """A hash of the files' names and contents; of images that may stay encoded, of sizes."""
        if self.hashed is not None:
            return content_hash(self.hashed(), self.path)
        members = self.listing(per_class)[1].values()
        files = [cast(Path, item.image) for items in members for item in items]
        sized = sorted((f.relative_to(self.path).as_posix(), f.stat().st_size) for f in files)
        return digest(f"{name}|{size}" for name, size in sized)

    def decode(self, size: int | Size | None, per_class: int | None) -> Decoded:
        """Decode the images of `listing`, resized to `size`, into splits of one size."""
        classes, items = self.listing(per_class)
        prepare = None
        if self.record_name in pictures.NAMES:
            everything = [item for members in items.values() for item in members]
            prepare = pictures.cut_alike(everything) if size is None else pictures.lying
        splits = {split: decode(members, size, prepare) for split, members in items.items()}
        shapes = {split: tuple(s.images.shape[1:]) for split, s in splits.items()}
        if len(set(shapes.values())) > 1:
            raise DatasetError(
                f"the splits' images differ in size, {shapes}: give image_size= to resize them to "
                "one"
            )
        for name, split in splits.items():
            if split.masks is not None and (most := int(split.masks.max())) >= len(classes):
                raise CorruptDatasetError(
                    f"{self.path}: a mask of {name} holds the value {most}; expected class indices "
                    f"0 to {len(classes) - 1}"
                )
        return Decoded(classes, splits)


def find(name: str, root: Path) -> Source | None:
    """The source of dataset `name` in `root`, or None. Others' layouts come first."""
    native = _NATIVE[name][0](name, root) if name in _NATIVE else None
    return native or _own_layout(name, root)


def looked_for(name: str) -> list[str]:
    """The paths in a root that `find` looks for."""
    native = [_NATIVE[name][1]] if name in _NATIVE else []
    return [*native, f"{name}.tar.xz", f"{name}/{{train,test}}/{_below(name)}"]


def _below(name: str) -> str:
    """The folders of a split in our own layout, in words."""
    if name in pictures.NAMES:
        return ""
    return "{images,masks}/" if name in MASK_CLASSES else "<class>/"


def _own_layout(name: str, root: Path) -> Source | None:
    """A `NAME.tar.xz`, or the folder that it unpacks to."""
    archive, folder = root / f"{name}.tar.xz", root / name
    packed = os.path.lexists(archive)  # even if it is invalid: nothing else replaces it
    if not packed and not ((folder / "train").is_dir() and (folder / "test").is_dir()):
        return None
    path = archive if packed else folder

    def contents() -> dict[str, Encoded]:
        return (read_archive if packed else read_folder)(path, int(name not in pictures.NAMES))

    def listed() -> Listing:
        return _listed(name, contents(), path)

    def hashed() -> list[Path]:
        return [path] if packed else [cast(Path, file) for file in contents().values()]

    return Source(
        # In other layouts the images may have been recompressed, which changes accuracies.
        record_name=f"{name}-jpeg" if name in _NATIVE else name,
        layout=f"{'archive' if packed else 'folder'} {path.name}",
        path=path,
        everything=listed if packed else functools.cache(listed),
        # An archive is read as a whole: if its images exceed the memory, it must be unpacked.
        hashed=hashed if packed or name != "imagenet" else None,
    )


def _listed(name: str, files: Mapping[str, Encoded], where: Path) -> Listing:
    """The listing of our own layout: labels are ranks of classes, masks are named as images."""
    classes = MASK_CLASSES.get(name, ())
    masked, labelled = name in MASK_CLASSES, name not in (*MASK_CLASSES, *pictures.NAMES)
    if labelled:
        classes = tuple(sorted({file.split("/")[1] for file in files}))
    masks: dict[str, str] = {}
    for file in sorted(file for file in files if masked and "/masks/" in file):
        if (other := masks.setdefault(file.rsplit(".", 1)[0], file)) != file:
            raise CorruptDatasetError(f"{where}: {other} and {file} are masks of one image")
    items: dict[str, list[Item]] = {}
    for file in sorted(files):
        split, *folder, last = file.split("/")
        label = classes.index(folder[0]) if labelled else None
        mask = None
        if masked:
            if folder != ["images"]:
                continue
            stem = f"{split}/masks/{last.rsplit('.', 1)[0]}"
            if stem not in masks:
                raise CorruptDatasetError(f"{where}: {file} has no mask {stem}.png")
            mask = files[masks[stem]]
        items.setdefault(split, []).append(Item(f"{where}: {file}", files[file], label, mask))
    for split in ("train", "test"):
        if split not in items:
            raise CorruptDatasetError(
                f"{where} has no image of the {split} split (splits found: "
                f"{', '.join(items) or 'none'}): expected {name}/{{train,test}}/{_below(name)}*.jpg"
            )
    return classes, items


def _torchvision(name: str, root: Path) -> Source | None:
    folder = root / _TORCHVISION[name][1]
    if not folder.is_dir():
        return None

    def everything() -> Listing:
        items = {}
        for split in ("train", "val", "test") if name == "flowers102" else ("train", "test"):
            if name == "flowers102":
                # With `Path` as the loader, the dataset yields file names instead of pictures.
                dataset = _torchvision_class(name)(root, split=split, loader=Path)
                pairs = [dataset[i] for i in range(len(dataset))]
            else:
                dataset = _torchvision_class(name)(root, train=split == "train")
                pairs = list(zip(dataset.data, dataset.targets, strict=True))
            items[split] = [
                Item(str(image) if isinstance(image, Path) else f"{split} {i}", image, label)
                for i, (image, label) in enumerate(pairs)
            ]
        return tuple(dataset.classes), items

    layout = f"torchvision folder {folder.name}"
    return Source(name, layout, folder, everything, lambda: _files(folder))


def _imagenet(name: str, root: Path) -> Source | None:
    folder, marks = root / name, ("meta.bin", "ILSVRC2012_devkit_t12.tar.gz")
    if not any((folder / mark).is_file() for mark in marks):
        return None

    @functools.cache  # listed for its content and for its images
    def everything() -> Listing:
        items = {}
        for split, theirs in (("train", "train"), ("test", "val")):
            # torchvision unpacks its archives into this folder the first time.
            dataset = _torchvision_class(name)(folder, split=theirs)
            items[split] = [Item(file, Path(file), label=k) for file, k in dataset.samples]
        return tuple(names[0] for names in dataset.classes), items

    return Source(name, "torchvision ImageNet folder", folder, everything, None)


def _carvana(name: str, root: Path) -> Source | None:
    folder, parts = root / name, ("train", "train_masks")
    if not all((folder / part).is_dir() for part in parts):
        return None

    def everything() -> Listing:
        # Sixteen views of one car share the name up to the underscore, and stay in one split.
        images = sorted((folder / "train").glob("[!.]*.jpg"))
        views = [(image.stem.rsplit("_", 1)[0], image) for image in images]
        held_out = sorted({car for car, _ in views})[CARVANA_TEST_EVERY - 1 :: CARVANA_TEST_EVERY]
        items: dict[str, list[Item]] = {"train": [], "test": []}
        for car, image in views:
            mask = folder / "train_masks" / f"{image.stem}_mask.gif"
            if not mask.is_file():
                raise CorruptDatasetError(
                    f"{image} has no mask {mask}: unpack train_masks.zip again"
                )
            items["test" if car in held_out else "train"].append(Item(str(image), image, mask=mask))
        if not held_out:
            raise CorruptDatasetError(f"{folder} holds fewer than {CARVANA_TEST_EVERY} cars")
        return MASK_CLASSES[name], items

    hashed = functools.partial(_files, *(folder / part for part in parts))
    return Source(name, "Kaggle folders train, train_masks", folder, everything, hashed)


def _files(*folders: Path) -> list[Path]:
    """Return the folders' files; hidden ones, such as .DS_Store, are no data."""
    return [
        file
        for folder in folders
        for file in folder.rglob("*")
        if file.is_file() and "/." not in f"/{file.relative_to(folder).as_posix()}"
    ]


_TORCHVISION = {
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
    "flowers102": ("Flowers102", "flowers-102"),
    "imagenet": ("ImageNet", "imagenet"),
}
_NATIVE: dict[str, tuple[Callable[[str, Path], Source | None], str]] = {
    "cifar10": (_torchvision, "cifar-10-batches-py/"),
    "cifar100": (_torchvision, "cifar-100-python/"),
    "flowers102": (_torchvision, "flowers-102/"),
    "imagenet": (_imagenet, "imagenet/{ILSVRC2012_devkit_t12.tar.gz or meta.bin}"),
    "carvana": (_carvana, "carvana/{train/*.jpg,train_masks/*_mask.gif}"),
}


def _torchvision_class(name: str) -> Any:
    from repro._torchvision import torchvision

    return getattr(torchvision.datasets, _TORCHVISION[name][0])


def fetch(name: str, root: Path) -> None:
    """Download `name` into `root`; errors of torchvision and urllib are passed on."""
    if name == "div2k":
        pictures.fetch(root / name)
    else:
        _torchvision_class(name)(root, download=True)
