"""Archives and folders of class folders or of images with masks, and the cache of decoded sets.

An archive is read in memory and never extracted, so that its member names reach no file system.
It is refused if it unpacks to more than the machine's memory or to more than `BOMB_BYTES` and
`BOMB_RATIO` times its size; if a member is neither a file nor a folder, or a name occurs twice or
leads out of the archive; and if anything follows its end.
"""

import hashlib
import io
import logging
import lzma
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from repro import paths
from repro.datasets.decoding import Encoded, Item
from repro.datasets.image_data import (
    CorruptDatasetError,
    DatasetError,
    Split,
    digest,
    tensor_digest,
)
from repro.measure.files import regular, replacing
from repro.measure.host import memory_bytes

SPLITS = ("train", "val", "test")
SUFFIXES = {".jpg", ".jpeg", ".png"}
BOMB_BYTES, BOMB_RATIO = 2**28, 100  # images hardly compress: their ratio is below 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """Splits by name, and the classes indexed by their labels or masks."""

    classes: tuple[str, ...]
    splits: dict[str, Split]


def read_archive(path: Path, folders: int = 1) -> dict[str, Encoded]:
    """Read the images of a `NAME.tar.xz`, keyed by their path below the top folder.

    Args:
        path: The archive.
        folders: Levels of folders between the split's and an image.

    Raises:
        CorruptDatasetError: The archive is damaged, truncated, no tar.xz, or is refused; see above.
    """
    files: dict[str, Encoded] = {}
    try:
        unpacked = _unpacked(path)
        content = memoryview(unpacked)
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                if ".." in parts or member.name.startswith("/"):
                    raise _refused(path, f"the name {member.name!r} leads out of it")
                if not (member.isdir() or member.isreg()) or member.issparse():
                    raise _refused(path, f"{member.name!r} is a link or a device, not a file")
                inside = None if member.isdir() else _inside(member.name, folders)
                if inside in files:
                    raise _refused(path, f"it holds {inside!r} twice")
                if inside is not None:
                    begin = member.offset_data
                    files[inside] = content[begin : begin + member.size]
        # tarfile treats a damaged header as the end, and ignores the rest.
        if unpacked[tar.offset :].strip(b"\0"):
            raise _refused(path, f"something else follows its first {tar.offset:,} bytes")
        if len(content) <= tar.offset:
            raise _refused(path, "it breaks off without tar's mark of the end")
    except (CorruptDatasetError, OSError):
        raise
    except Exception as error:  # tarfile raises almost any error for a damaged header
        raise CorruptDatasetError(
            f"{path} is damaged or incomplete ({error}): delete it and copy or download it again"
        ) from error
    return files


def _unpacked(path: Path) -> bytes:
    """Decompress an archive and check its checksum, unless it is too large.

    tarfile would treat a truncated stream as complete.
    """
    most = min(memory_bytes(), max(BOMB_BYTES, BOMB_RATIO * path.stat().st_size))
    content = io.BytesIO()
    with lzma.open(path) as stream:
        while part := stream.read(1 << 20):
            content.write(part)
            if content.tell() > most:
                reason = f"it unpacks to more than {most:,} bytes, the most that is read of it"
                raise _refused(path, reason)
    return content.getvalue()


def _refused(path: Path, reason: str) -> CorruptDatasetError:
    return CorruptDatasetError(
        f"{path} is refused: {reason}; pack it again from the images alone, with tar "
        "--dereference --hard-dereference"
    )


def _inside(name: str, folders: int) -> str | None:
    """The path of an image below the top folder; None for other files."""
    parts = PurePosixPath(name).parts
    parts = parts[1:] if parts and parts[0] == "." else parts
    if len(parts) != 3 + folders or parts[1] not in SPLITS or parts[-1].startswith("."):
        return None
    if PurePosixPath(parts[-1]).suffix.lower() not in SUFFIXES:
        return None
    return "/".join(parts[1:])


def read_folder(path: Path, folders: int = 1) -> dict[str, Encoded]:
    """List the images below a folder of the same layout, keyed by their path in it."""
    inside = {file.relative_to(path).as_posix(): file for file in _below(path, 2 + folders)}
    return {name: file for name, file in inside.items() if _inside(f"_/{name}", folders)}


def _below(folder: Path, levels: int) -> Iterator[Path]:
    """The entries `levels` levels below a folder, including linked folders.

    `Path.glob` would skip unreadable folders silently.
    """
    for entry in sorted(folder.iterdir()):
        if levels == 1:
            yield entry
        elif entry.is_dir():
            yield from _below(entry, levels - 1)


def labelled_items(
    files: Mapping[str, Encoded], where: Path
) -> tuple[tuple[str, ...], dict[str, list[Item]]]:
    """Group `SPLIT/CLASS/FILE` by split; the label is the rank of the class name.

    Raises:
        CorruptDatasetError: The train or the test split has no image.
    """
    classes = sorted({name.split("/")[1] for name in files})

    def item(name: str) -> Item:
        return Item(f"{where}: {name}", files[name], label=classes.index(name.split("/")[1]))

    return tuple(classes), _by_split(files, item, where, "{train,test}/<class>/*.jpg")


def masked_items(files: Mapping[str, Encoded], where: Path) -> dict[str, list[Item]]:
    """Pair `SPLIT/images/STEM.jpg` with `SPLIT/masks/STEM.png`, by split.

    Raises:
        CorruptDatasetError: An image has no mask, or the train or the test split no image.
    """
    masks: dict[str, str] = {}
    for name in sorted(name for name in files if name.split("/")[1] == "masks"):
        if (other := masks.setdefault(name.rsplit(".", 1)[0], name)) != name:
            raise CorruptDatasetError(f"{where}: {other} and {name} are masks of one image")

    def item(name: str) -> Item:
        split, _, file = name.split("/")
        if (mask := masks.get(f"{split}/masks/{file.rsplit('.', 1)[0]}")) is None:
            raise CorruptDatasetError(f"{where}: {name} has no mask {split}/masks/*.png")
        return Item(f"{where}: {name}", files[name], mask=files[mask])

    images = [name for name in files if name.split("/")[1] == "images"]
    return _by_split(images, item, where, "{train,test}/images/*.jpg and masks/*.png")


def plain_items(files: Mapping[str, Encoded], where: Path) -> dict[str, list[Item]]:
    """Group `SPLIT/FILE` by split.

    Raises:
        CorruptDatasetError: The train or the test split has no image.
    """
    return _by_split(
        files, lambda name: Item(f"{where}: {name}", files[name]), where, "{train,test}/*.png"
    )


def _by_split(
    names: Iterable[str], item: Callable[[str], Item], where: Path, layout: str
) -> dict[str, list[Item]]:
    items: dict[str, list[Item]] = {}
    for name in sorted(names):
        items.setdefault(name.split("/")[0], []).append(item(name))
    for split in ("train", "test"):
        if split not in items:
            raise CorruptDatasetError(
                f"{where} has no image of the {split} split (splits found: "
                f"{', '.join(items) or 'none'}): expected {where.name.split('.')[0]}/{layout}"
            )
    return items


def first_of_each_class(items: Iterable[Item], per_class: int | None) -> list[Item]:
    """The first `per_class` items of every label, in order; all for None."""
    seen: dict[int | None, int] = {}
    kept = []
    for item in items:
        seen[item.label] = seen.get(item.label, 0) + 1
        if per_class is None or seen[item.label] <= per_class:
            kept.append(item)
    return kept


def content_hash(files: Sequence[Path], base: Path) -> str:
    """SHA-256 of one file, or of the names and contents of several below `base`."""
    if len(files) == 1:
        return file_sha256(files[0])
    return digest(f"{f.relative_to(base).as_posix()}|{file_sha256(f)}" for f in sorted(files))


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits.

    Raises:
        CorruptDatasetError: It is no regular file; reading a pipe, for example, would wait.
    """
    if not path.is_file():
        raise CorruptDatasetError(f"{path} is no file: remove it, or provide the dataset again")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached(stem: str, build: Callable[[], Decoded]) -> Decoded:
    """Load the decoded set cached as `stem`, memory-mapped; build and cache it if missing.

    Every byte is checked against the stored digest. A cache file that does not load, or has changed
    since it was written, is built again, with a warning.

    Raises:
        DatasetError: The set cannot be kept.
    """
    path = paths.cache_dir() / f"{stem}.pt"
    try:
        return _read(path, stem)
    except FileNotFoundError:
        pass
    except Exception as error:  # torch.load raises almost any error for a damaged file
        reason = (str(error) or type(error).__name__).splitlines()[0]
        logger.warning("decoding again, for the cache file %s is damaged: %s", path, reason)
    built = build()
    state = {
        "classes": list(built.classes),
        "splits": {name: split.tensors() for name, split in built.splits.items()},
        "digest": _digest(stem, built),
    }
    try:
        with replacing(path) as temporary:
            torch.save(state, temporary)
    except (OSError, RuntimeError) as error:
        raise DatasetError(
            f"cannot write the cache file {path} ({error}): make its folder writable, free some "
            "space, or name another folder in $REPRO_CACHE"
        ) from error
    return _read(path, stem)


def _read(path: Path, stem: str) -> Decoded:
    state = torch.load(regular(path), mmap=True, weights_only=True)
    splits = {name: Split(**tensors) for name, tensors in state["splits"].items()}
    decoded = Decoded(tuple(state["classes"]), splits)
    if state.get("digest") != _digest(stem, decoded):
        raise CorruptDatasetError(f"its content is not what was written as {path.name}")
    return decoded


def _digest(stem: str, decoded: Decoded) -> str:
    splits = decoded.splits
    return digest([stem, list(decoded.classes), list(splits), tensor_digest(*splits.values())])
