"""Archives and folders of class folders or of images with masks, and the cache of decoded sets.

An archive is read in memory and never extracted, so that its member names reach no file system.
It is refused where a member has more than `MEMBER_BYTES`, where all images together take more than
the machine's memory, and where it unpacks to more than `BOMB_BYTES` and `BOMB_RATIO` times its
size; where a member of the layout is a link or a device, a name is there twice or leads out of the
archive; and where anything follows its end. A folder is refused where an image is no file.
"""

import contextlib
import hashlib
import logging
import lzma
import os
import pickle
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

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

MEMBER_BYTES = 2**28  # of one file in an archive; the largest of DIV2K has 2**23
BOMB_BYTES, BOMB_RATIO = 2**28, 100  # images hardly compress: theirs is below 2
_HEADER_BYTES = 2**20  # more than tarfile reads ahead, and than any name takes

_UNREADABLE = (
    pickle.UnpicklingError,
    AttributeError,
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
        CorruptDatasetError: The archive is damaged, truncated, no tar.xz, or is refused; see above.
    """
    files: dict[str, Encoded] = {}
    try:
        # Decompressed here rather than by tarfile, which takes a truncated stream for its end.
        with lzma.open(path) as opened:
            stream, held = _Bounded(opened, path), 0
            with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
                for member in tar:
                    inside = _checked(member, folders, path)
                    stream.expect(member.size)
                    if inside is None:
                        continue
                    if inside in files:
                        raise _refused(path, f"it holds {inside!r} twice")
                    held += member.size
                    if held > memory_bytes():
                        raise _refused(path, "its images take more than this machine's memory")
                    content = tar.extractfile(member)
                    files[inside] = content.read() if content else b""
            stream.finish(tar.offset)
        if not _ends_as_xz(path):
            raise _refused(path, "something else follows the end of its compressed stream")
    except CorruptDatasetError:
        raise
    # tarfile lets what it stumbles over in a damaged header through.
    except (
        lzma.LZMAError,
        tarfile.TarError,
        EOFError,
        ValueError,
        LookupError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
    ) as error:
        raise CorruptDatasetError(
            f"{path} is damaged or incomplete ({error}): delete it and copy or download it again"
        ) from error
    return files


def _ends_as_xz(path: Path) -> bool:
    """Whether a file's last bytes, padding aside, are the mark of a stream's end."""
    with path.open("rb") as file:
        file.seek(-min(path.stat().st_size, 1 << 10), os.SEEK_END)
        return file.read().rstrip(b"\0").endswith(b"YZ")


class _Bounded:
    """What an archive unpacks to, read only as far as it may go."""

    def __init__(self, stream: lzma.LZMAFile, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._most = max(BOMB_BYTES, BOMB_RATIO * path.stat().st_size)
        self._total = 0
        self._allowed = _HEADER_BYTES
        self._recent = b""

    def read(self, size: int) -> bytes:
        """Return up to so many bytes.

        Raises:
            CorruptDatasetError: They exceed what a member announced, or any proportion.
        """
        content = self._stream.read(size)
        self._total += len(content)
        if self._total > self._most:
            raise _refused(
                self._path,
                f"it unpacks to more than {self._most:,} bytes, {BOMB_RATIO} times its size",
            )
        if self._total > self._allowed:
            raise _refused(self._path, f"a name in it takes more than {_HEADER_BYTES:,} bytes")
        self._recent = self._recent[-len(content) :] + content
        return content

    def expect(self, size: int) -> None:
        """Allow for a member of so many bytes, and for the header of the next one."""
        self._allowed = self._total + size + _HEADER_BYTES

    def finish(self, end: int) -> None:
        """Read on to the end, where the checksum is.

        Raises:
            CorruptDatasetError: From byte `end` on there is no mark of an end, or more than that.
        """
        rest = self._recent[len(self._recent) - (self._total - end) :] if self._total > end else b""
        empty = not rest
        self._allowed = self._most
        # tarfile takes a damaged header for the end, and what follows for none of its business.
        while rest or (rest := self.read(1 << 20)):
            if rest.strip(b"\0"):
                raise _refused(self._path, f"something else follows its first {end:,} bytes")
            rest, empty = b"", False
        if empty:
            raise _refused(self._path, "it breaks off without tar's mark of the end")


def _refused(path: Path, reason: str) -> CorruptDatasetError:
    return CorruptDatasetError(
        f"{path} is refused: {reason}; pack it again from the images alone, with tar "
        "--dereference --hard-dereference"
    )


def _checked(member: tarfile.TarInfo, folders: int, path: Path) -> str | None:
    """Return the path of an image as `_inside` does; refuse what no dataset holds."""
    parts = PurePosixPath(member.name).parts
    if ".." in parts or member.name.startswith("/"):
        raise _refused(path, f"the name {member.name!r} leads out of it")
    if not 0 <= member.size <= MEMBER_BYTES:
        raise _refused(
            path, f"{member.name!r} has {member.size:,} bytes, the most are {MEMBER_BYTES:,}"
        )
    inside = _inside(member.name, folders)
    if member.isreg() or member.isdir():
        return inside if member.isreg() else None
    parts = parts[1:] if parts and parts[0] == "." else parts
    if len(parts) < 2 or parts[1] in SPLITS:  # it would hide images that it stands for
        raise _refused(path, f"{member.name!r} is a link or a device, not a file")
    return None


def read_folder(path: Path, folders: int = 1) -> dict[str, Encoded]:
    """List the images below a folder of the same layout, keyed by their path in it.

    Raises:
        CorruptDatasetError: One of them is no file, such as a link that leads nowhere.
    """
    files: dict[str, Encoded] = {}
    for file in _below(path, 2 + folders):
        inside = file.relative_to(path).as_posix()
        if _inside(f"_/{inside}", folders) is None:
            continue
        if not file.is_file():
            raise CorruptDatasetError(
                f"{file} is named as an image and is no file: remove it, or provide it again"
            )
        files[inside] = file
    return files


def _below(folder: Path, levels: int) -> Iterator[Path]:
    """Yield what lies so many levels below a folder, linked folders included."""
    for entry in sorted(folder.iterdir()):
        if levels == 1:
            yield entry
        elif entry.is_dir():
            yield from _below(entry, levels - 1)


def archive_at(path: Path) -> bool:
    """Whether a dataset's archive lies at a path.

    Raises:
        CorruptDatasetError: Something else does, such as a link that leads nowhere.
    """
    if path.is_file():
        return True
    if os.path.lexists(path):
        raise CorruptDatasetError(
            f"{path} is named as an archive and is no file, or a link that leads nowhere: remove "
            "it, or provide it again"
        )
    return False


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
    masks: dict[str, str] = {}
    for name in sorted(files):
        if name.split("/")[1] == "masks":
            other = masks.setdefault(name.rsplit(".", 1)[0], name)
            if other != name:
                raise CorruptDatasetError(f"{where}: {other} and {name} are masks of one image")
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
            names = ", ".join(items) or "none"
            raise CorruptDatasetError(
                f"{where} has no image of the {split} split (splits found: {names}): expected "
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

    The hash is remembered by path, size and times of change of every file, and checked when read.
    """
    files = sorted(files)
    stats = [(file, file.stat()) for file in files]
    # The time that no program sets tells of a content that came with another file's time.
    signature = digest(
        f"{file}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}" for file, stat in stats
    )
    remembered = paths.cache_dir() / "hashes" / signature
    with contextlib.suppress(OSError, ValueError):  # ValueError: two words, in UTF-8
        result, check = regular(remembered).read_text(encoding="utf-8").split()
        if check == digest([signature, result]):
            return result
    if len(files) == 1:
        result = file_sha256(files[0])
    else:
        result = digest(f"{f.relative_to(base).as_posix()}|{file_sha256(f)}" for f in files)
    text = f"{result} {digest([signature, result])}"
    # Where nothing can be kept, it is hashed again; the decoded set says what is wrong there.
    with contextlib.suppress(OSError), replacing(remembered) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return result


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hexadecimal digits.

    Raises:
        CorruptDatasetError: It is no file, but a pipe, say, which would be waited for.
    """
    if not path.is_file():
        raise CorruptDatasetError(f"{path} is no file: remove it, or provide the dataset again")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached(stem: str, build: Callable[[], Decoded]) -> Decoded:
    """Return the decoded set kept as `stem`, memory-mapped; build and keep it where missing.

    Every byte of it is compared with the digest that was kept with it, once in a process unless the
    file changes. A cache file that does not load, or is not what was written under this name, is
    built again, with a warning.

    Raises:
        DatasetError: The set cannot be kept.
    """
    path = paths.cache_dir() / f"{stem}.pt"
    try:
        return _read(regular(path), stem)
    except FileNotFoundError:
        pass
    except _UNREADABLE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        logger.warning("decoding again, for the cache file %s is damaged: %s", path, reason)
    try:
        regular(path).parent.mkdir(parents=True, exist_ok=True)  # before minutes are spent
        TemporaryDirectory(dir=path.parent).cleanup()
    except OSError as error:
        raise _unwritable(path, error) from error
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
        raise _unwritable(path, error) from error
    return _read(path, stem)


def _read(path: Path, stem: str) -> Decoded:
    version = _version(path, stem)
    state = torch.load(path, mmap=True, weights_only=True)
    splits = {name: Split(**tensors) for name, tensors in state["splits"].items()}
    decoded = Decoded(tuple(state["classes"]), splits)
    if version not in _compared or version != _version(path, stem):
        if state.get("digest") != _digest(stem, decoded):
            raise CorruptDatasetError(f"its content is not what was written as {path.name}")
        _compared.add(version)
    return decoded


_compared: set[tuple[str | int, ...]] = set()


def _version(path: Path, stem: str) -> tuple[str | int, ...]:
    state = path.stat()
    return (stem, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def _digest(stem: str, decoded: Decoded) -> str:
    """Hash a decoded set and the name that it is kept by."""
    splits = decoded.splits
    return digest([stem, list(decoded.classes), list(splits), tensor_digest(*splits.values())])


def _unwritable(path: Path, error: Exception) -> DatasetError:
    return DatasetError(
        f"cannot write the cache file {path} ({error}): make its folder writable, free some "
        "space, or name another folder in $REPRO_CACHE"
    )
