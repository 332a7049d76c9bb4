"""The datasets by name: searching and loading."""

import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from repro import paths
from repro.datasets import embedded, phantom, pictures, sources
from repro.datasets.archives import SPLITS, Decoded, cached
from repro.datasets.decoding import StreamedImages
from repro.datasets.image_data import (
    CorruptDatasetError,
    DataFolderError,
    DatasetError,
    DatasetNotFoundError,
    ImageData,
    Size,
    Split,
    check_counts,
    check_size,
    digest,
)
from repro.measure.host import memory_bytes

Root = str | os.PathLike[str] | None

EMBEDDED = {"digits": "inside scikit-learn", "photos": "inside scikit-image"}
LABELLED = ("cifar10", "cifar100", "flowers102", "flowers5", "imagenet")
ON_DISK = (*LABELLED, "carvana", "camvid", *pictures.NAMES)
NAMES = (*EMBEDDED, *ON_DISK, "phantom")

ROAD = sources.CAMVID_CLASSES.index("road")
FORMAT = 1  # raised when the same files decode to other pixels, labels or splits
PROBE_TIMEOUT_S = 5.0
MEMORY_SHARE = 0.5  # of the machine's memory, at most, for the decoded images of ImageNet
TRAIN_SHARE = 0.8  # of all images, if a set is divided at random

_MADE: dict[str, Callable[..., ImageData]] = {  # need no files from the user
    "digits": embedded.digits,
    "photos": embedded.photos,
    "phantom": phantom.phantom,
}
_CONTENT = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "flowers102": "Oxford Flowers-102",
    "flowers5": "Photographs of 5 kinds of flowers, a stand-in for Flowers-102",
    "carvana": "Carvana cars with masks",
    "camvid": "CamVid road scenes with masks of 11 classes and unlabelled",
    "imagenet": "ImageNet (ILSVRC2012)",
    "div2k": "DIV2K photographs in high resolution",
    "bsds500": "Photographs of BSDS500, a stand-in for DIV2K",
}
_ADDRESSES = {  # of the first file of a download
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "cifar100": "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    "flowers102": "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/102flowers.tgz",
    "div2k": f"{pictures.URL}{pictures.DIV2K['train'][0]}.zip",
}
_BY_HAND = {
    "imagenet": "image-net.org gives it to registered users only",
    "carvana": "Kaggle gives it to registered users only",
}


def load(
    name: str,
    root: Root = None,
    *,
    image_size: int | Size | None = None,
    per_class: int | None = None,
    binary: bool = False,
    split: str = "official",
    download: bool = True,
    **options: Any,
) -> ImageData:
    """Load a dataset as uint8 tensors.

    Searched in order: `root`, `$REPRO_DATA`, `./data`, each for the layouts listed in
    `data/README.md`; then a download if torchvision has one. The decoded set is cached in
    `repro.measure.files.cache_folder()` and memory-mapped the next time.

    Args:
        name: One of `NAMES`.
        root: Folder searched first, made by a download if it is missing.
        image_size: None keeps the size; an int resizes the short side and cuts the centre; a pair
            (height, width) resizes to exactly that. Masks follow by nearest neighbour. Pictures
            of different sizes (`div2k`, `bsds500`) are turned to landscape, and with None cut to
            the largest centre common to all. ImageNet's images that would take more than half of
            the memory stay encoded (`StreamedImages` instead of tensors).
        per_class: Keep the first `per_class` images of each class in every split; labelled sets on
            disk only.
        binary: For `camvid`, make masks of road (1) against the rest (0).
        split: For `flowers102`, ``official`` (1,020 images to train on, 1,020 to validate, 6,149
            to test), or ``random``: of all images `TRAIN_SHARE` to train on and the rest to test,
            divided equally on every machine.
        download: Try to download a missing set.
        **options: Of `phantom.phantom` or `embedded.photos`.

    Raises:
        DataFolderError: `root` or `$REPRO_DATA` is no folder, and the dataset lies in a later one.
        DatasetNotFoundError: The dataset was not found and could not be downloaded.
        CorruptDatasetError: Its files are damaged or incomplete.
        DatasetError: The name is unknown, or an option does not fit it.
        TypeError: A generated or embedded set has no such option.
    """
    _check_name(name)
    size = check_size(image_size)
    _check_options(name, per_class, binary, split, options)
    if name in _MADE:
        return _MADE[name](size, **options)
    source = _find(name, root)
    if source is None:
        fetched = _fetch(name, root) if download else "not tried, download=False"
        if isinstance(fetched, str):
            raise _not_found(name, root, fetched)
        source = fetched
    elif not source.path.is_relative_to(paths.data_roots(root)[0]) and (
        problem := paths.data_problem(root)
    ):
        raise DataFolderError(problem)
    data = _read(name, source, size, per_class, split)
    if not binary:
        return data
    splits = {
        name: replace(split, masks=(split.masks == ROAD).byte())
        for name in SPLITS
        if (split := getattr(data, name)) is not None
    }
    return replace(
        data,
        record_name=f"{data.record_name}-road",
        provenance=f"{data.provenance[:-1]}; masks road against rest, a stand-in for Carvana.",
        fingerprint=digest([data.fingerprint, "road"])[:16],
        classes=("rest", "road"),
        **splits,
    )


def divided_anew(decoded: Decoded) -> Decoded:
    """Divide the images of all splits at random into ``train`` and ``test``; see `TRAIN_SHARE`."""
    tensors = [split.tensors() for split in decoded.splits.values()]
    whole = Split(**{name: torch.cat([part[name] for part in tensors]) for name in tensors[0]})
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0), device="cpu")
    cut = round(TRAIN_SHARE * len(whole))
    parts = {"train": order[:cut], "test": order[cut:]}
    return Decoded(
        decoded.classes, {name: whole.chosen(part.sort().values) for name, part in parts.items()}
    )


def available(root: Root = None) -> dict[str, str]:
    """The names that `load` can load now without a download, with their locations.

    Raises:
        DataFolderError: `root` or `$REPRO_DATA` is no folder.
    """
    if problem := paths.data_problem(root):
        raise DataFolderError(problem)
    on_disk = {name: source.located for name in ON_DISK if (source := _find(name, root))}
    return {**EMBEDDED, **on_disk, "phantom": "generated"}


def looked_for(name: str) -> str:
    """The paths, below the searched folders, at which `load` looks for a dataset."""
    return " or ".join(sources.looked_for(name))


def download(names: Sequence[str] = ON_DISK, root: Root = None) -> dict[str, str]:
    """Download missing datasets as far as the network allows; return the outcome by name.

    They go to `root`, by default to the first writable of `$REPRO_DATA` and `./data`. Raises
    DatasetError for an unknown name; all other errors are in the report.
    """
    report = {}
    for name in names:
        _check_name(name)
        if name not in ON_DISK:
            report[name] = f"present: {EMBEDDED.get(name, 'generated')}"
        elif source := _find(name, root):
            report[name] = f"present: {source.located}"
        elif isinstance(found := _fetch(name, root), str):
            report[name] = f"not downloaded: {found}"
        else:
            report[name] = f"downloaded: {found.located}"
    return report


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise DatasetError(f"unknown dataset {name!r}: expected one of {', '.join(NAMES)}")


def _check_options(
    name: str, per_class: int | None, binary: bool, split: str, options: Mapping[str, Any]
) -> None:
    if per_class is not None:
        check_counts(per_class=per_class)
    if split not in ("official", "random"):
        raise DatasetError(f"split={split!r}: expected 'official' or 'random'")
    for option, given, names in (
        ("per_class", per_class is not None, LABELLED),
        ("binary", binary, ("camvid",)),
        ("split", split == "random", ("flowers102",)),
    ):
        if given and name not in names:
            raise DatasetError(f"{option}= is not for {name!r}, only for {', '.join(names)}")
    if options and name not in _MADE:
        raise DatasetError(f"{name!r} takes no option {', '.join(options)}")
    if split == "random" and per_class is not None:
        raise DatasetError("split='random' takes all images: leave out per_class")


def _find(name: str, root: Root) -> sources.Source | None:
    candidates = (sources.find(name, folder) for folder in paths.data_roots(root))
    return next((source for source in candidates if source is not None), None)


def _not_found(name: str, root: Root, why: str) -> DatasetNotFoundError:
    folders = "\n  ".join(str(folder) for folder in paths.data_roots(root))
    files = "\n  ".join(sources.looked_for(name))
    return DatasetNotFoundError(
        f"dataset {name!r} was not found.\nLooked for:\n  {files}\nin the folders:\n  {folders}"
        f"\nDownload: {why}.\nThree ways to provide it, with the layouts of data/README.md:"
        f"\n  1. --data FOLDER on the command line, load({name!r}, root=FOLDER) in Python"
        "\n  2. set $REPRO_DATA to its folder\n  3. put it into ./data"
        f"\nOr name data that is always there: {' or '.join(map(repr, _MADE))}."
    )


def _fetch(name: str, root: Root) -> sources.Source | str:
    """Download a dataset; return its source, or the reason of the failure."""
    if (url := _ADDRESSES.get(name)) is None:
        return _BY_HAND.get(name, "no public address is known that serves this layout")
    # A closed network may drop packets, and torchvision waits without a limit.
    try:
        request = urllib.request.Request(url, method="HEAD")
        urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code in (403, 407):  # a refusal; other codes may concern only HEAD
            return f"{url} is refused ({error})"
    except OSError as error:
        return f"{url} cannot be reached ({error})"
    folders = paths.data_roots(root)
    for folder in folders[:1] if root is not None else folders:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            try:
                sources.fetch(name, folder)
            except (OSError, RuntimeError, EOFError, ImportError) as error:
                return f"{url} failed ({error})"
            return _find(name, root) or "it finished, but left nothing that can be loaded"
    return "no folder to download to is writable"


def _streamed(
    source: sources.Source, size: int | Size | None, per_class: int | None
) -> Decoded | None:
    """A set with encoded images; None unless decoded images would exceed the memory."""
    if source.hashed is not None or size is None:
        return None
    classes, items = source.listing(per_class)
    images: dict[str, Any] = {name: StreamedImages(own, size) for name, own in items.items()}
    if sum(own.shape.numel() for own in images.values()) <= MEMORY_SHARE * memory_bytes():
        return None
    with torch.device("cpu"):
        labels = {name: torch.tensor([item.label for item in own]) for name, own in items.items()}
    return Decoded(classes, {name: Split(own, labels[name]) for name, own in images.items()})


def _read(
    name: str, source: sources.Source, size: int | Size | None, per_class: int | None, split: str
) -> ImageData:
    anew = [split] if split != "official" else []

    def build() -> Decoded:
        decoded = source.decode(size, per_class)
        return divided_anew(decoded) if anew else decoded

    try:
        content = source.content(per_class)
        key = digest([FORMAT, source.record_name, content, size, per_class, *anew])[:16]
        decoded = _streamed(source, size, per_class) or cached(f"{name}-{key}", build)
    # torchvision raises RuntimeError for a wrong checksum, OSError for a missing file.
    except (RuntimeError, OSError, EOFError) as error:
        raise CorruptDatasetError(
            f"{source.path} is damaged, incomplete or not readable ({error}): provide it again; "
            "torchvision unpacks ImageNet beside its archives the first time and needs to write "
            "there once"
        ) from error
    note = ""
    if source.record_name.endswith("-jpeg"):
        note = ", perhaps recompressed: accuracies may run below those of the original"
    if anew:
        count = sum(map(len, decoded.splits.values()))
        note += f", {count:,} images divided at random, {100 * TRAIN_SHARE:.0f} % to train on"
    if per_class is not None:
        note += f", the first {per_class} images of each class"
    if size is not None:
        note += f", resized to {size}"
    if isinstance(decoded.splits["train"].images, StreamedImages):
        note += ", decoded as they are needed"
    return ImageData(
        name=name,
        record_name=source.record_name,
        kind="real",
        provenance=f"{_CONTENT[name]} from {source.layout}{note}.",
        fingerprint=key,
        classes=decoded.classes,
        **decoded.splits,
    )
