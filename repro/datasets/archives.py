"""Archives and folders of class folders or of images with masks, and the cache of decoded sets.

An archive is read in memory and never extracted, so that its member names reach no file system.
"""

import hashlib
import logging
import lzma
import pickle
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from repro import paths
from repro.datasets.decoding import Encoded, Item
from repro.datasets.image_data import CorruptDatasetError, DatasetError, Split, digest
from repro.measure.files import replacing

SPLITS = ("train", "val", "test")
SUFFIXES = {".jpg", ".jpeg", ".png"}

_UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """Splits by name, and the classes that their labels or masks index."""

    classes: tuple[str, ...]
    splits: dict[str, Split]


def read_archive(path: Path, folders: int = 1) -> dict[str, Encoded]:
    """Read the images of a `NAME.tar.xz`, keyed by their path below the top folder.

    Args:
        path: The archive.
        folders: How many there are between the split's folder and an image.

    Raises:
        CorruptDatasetError: The archive is damaged, truncated or no tar.xz.
    """
    files: dict[str, Encoded] = {}
    try:
        # Decompressed here rather than by tarfile, which takes a truncated stream for its end.
        with lzma.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    inside = _inside(member.name, folders)
                    if member.isreg() and inside is not None:
                        content = tar.extractfile(member)
                        files[inside] = content.read() if content else b""
            while stream.read(1 << 20):  # to the end, where the checksum is
                pass
    except (lzma.LZMAError, tarfile.TarError, EOFError) as error:
        raise CorruptDatasetError(
            f"{path} is damaged or incomplete ({error}): delete it and copy or download it again"
        ) from error
    return files


def read_folder(path: Path, folders: int = 1) -> dict[str, Encoded]:
    """List the images below a folder of the same layout, keyed by their path in it."""
    return {
        file.relative_to(path).as_posix(): file
        for file in path.rglob("*")
        if _inside(f"_/{file.relative_to(path).as_posix()}", folders) is not None
    }


def _inside(name: str, folders: int) -> str | None:
    """Return the path of an image below the top folder; None for what is not of the layout."""
    parts = PurePosixPath(name).parts
    parts = parts[1:] if parts and parts[0] == "." else parts
    if len(parts) != 3 + folders or parts[1] not in SPLITS or parts[-1].startswith("."):
        return None
    if PurePosixPath(parts[-1]).suffix.lower() not in SUFFIXES:
        return None
    return "/".join(parts[1:])


def labelled_items(
    files: Mapping[str, Encoded], where: Path
) -> tuple[tuple[str, ...], dict[str, list[Item]]]:
    """Group `SPLIT/CLASS/FILE` by split; the label is the rank of the class name.

    Raises:
        CorruptDatasetError: The train or the test split has no image.
    """
    classes = sorted({name.split("/")[1] for name in files})
    items: dict[str, list[Item]] = {}
    for name in sorted(files):
        split, label, _ = name.split("/")
        items.setdefault(split, []).append(
            Item(f"{where}: {name}", files[name], label=classes.index(label))
        )
    _require_splits(items, where, "{train,test}/<class>/*.jpg")
    return tuple(classes), items


def masked_items(files: Mapping[str, Encoded], where: Path) -> dict[str, list[Item]]:
    """Pair `SPLIT/images/STEM.jpg` with `SPLIT/masks/STEM.png`, by split.

    Raises:
        CorruptDatasetError: An image has no mask, or the train or the test split no image.
    """
    masks = {name.rsplit(".", 1)[0]: name for name in files if name.split("/")[1] == "masks"}
    items: dict[str, list[Item]] = {}
    for name in sorted(files):
        split, kind, file = name.split("/")
        if kind != "images":
            continue
        mask = masks.get(f"{split}/masks/{file.rsplit('.', 1)[0]}")
        if mask is None:
            raise CorruptDatasetError(f"{where}: {name} has no mask {split}/masks/*.png")
        items.setdefault(split, []).append(Item(f"{where}: {name}", files[name], mask=files[mask]))
    _require_splits(items, where, "{train,test}/images/*.jpg and masks/*.png")
    return items


def _require_splits(items: Mapping[str, Sequence[Item]], where: Path, layout: str) -> None:
    for split in ("train", "test"):
        if not items.get(split):
            found = ", ".join(items) or "none"
            raise CorruptDatasetError(
                f"{where} has no image of the {split} split (splits found: {found}): expected "
                f"{where.name.split('.')[0]}/{layout}"
            )


def first_of_each_class(items: Iterable[Item], per_class: int | None) -> list[Item]:
    """Return the first `per_class` items of every label, in order; all for None."""
    if per_class is None:
        return list(items)
    seen: dict[int | None, int] = {}
    kept = []
    for item in items:
        seen[item.label] = seen.get(item.label, 0) + 1
        if seen[item.label] <= per_class:
            kept.append(item)
    return kept


def content_hash(files: Sequence[Path], base: Path) -> str:
    """Return the SHA-256 of one file, or of the names and contents of several below `base`.

    The hash is remembered by path, size and modification time of every file.
    """
    files = sorted(files)
    stats = [(file, file.stat()) for file in files]
    signature = digest(f"{file}|{stat.st_size}|{stat.st_mtime_ns}" for file, stat in stats)
    remembered = paths.cache_dir() / "hashes" / signature
    if remembered.is_file() and len(text := remembered.read_text(encoding="utf-8").strip()) == 64:
        return text
    if len(files) == 1:
        result = _sha256(files[0])
    else:
        result = digest(f"{f.relative_to(base).as_posix()}|{_sha256(f)}" for f in files)
    _write(remembered, lambda temporary: temporary.write_text(result, encoding="utf-8"))
    return result


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached(stem: str, build: Callable[[], Decoded]) -> Decoded:
    """Return the decoded set kept as `stem`, memory-mapped; build and keep it where missing.

    A cache file that does not load is built again.
    """
    path = paths.cache_dir() / f"{stem}.pt"
    if path.is_file():
        try:
            return _read(path)
        except _UNREADABLE as error:
            logger.warning("decoding again, for the cache file %s is damaged: %s", path, error)
    built = build()
    state = {
        "classes": list(built.classes),
        "splits": {name: split.tensors() for name, split in built.splits.items()},
    }
    _write(path, lambda temporary: torch.save(state, temporary))
    return _read(path)


def _read(path: Path) -> Decoded:
    state = torch.load(path, mmap=True, weights_only=True)
    splits = {name: Split(**tensors) for name, tensors in state["splits"].items()}
    return Decoded(tuple(state["classes"]), splits)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name, then rename: no reader sees a half-written file."""
    try:
        with replacing(path) as temporary:
            write(temporary)
    except (OSError, RuntimeError) as error:
        raise DatasetError(
            f"cannot write the cache file {path} ({error}): make its folder writable, free some "
            "space, or name another folder in $REPRO_CACHE"
        ) from error
