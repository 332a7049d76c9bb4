"""Archives and folders of encoded images, and the cache of decoded sets.

An archive is read in memory and never extracted, so that its member names reach no file system.
It is refused if it unpacks to more than the machine's memory or to more than `BOMB_BYTES` and
`BOMB_RATIO` times its size; if a member is neither a file nor a folder, or a name occurs twice or
leads out of the archive; and if its end is missing or anything follows it.
"""

import hashlib
import io
import logging
import lzma
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from repro.datasets.decoding import Encoded
from repro.datasets.image_data import (
    CorruptDatasetError,
    DatasetError,
    Split,
    digest,
    tensor_digest,
)
from repro.measure.files import cache_folder, regular, replacing
from repro.measure.host import memory_bytes

SPLITS = ("train", "val", "test")
SUFFIXES = {".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".bmp", ".gif", ".webp"}
BOMB_BYTES, BOMB_RATIO = 2**28, 100  # images hardly compress: their ratio is below 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """Splits by name, and the classes indexed by their labels or masks."""

    classes: tuple[str, ...]
    splits: dict[str, Split]


def read_archive(path: Path, folders: int = 1) -> dict[str, Encoded]:
    """Read the images of a `NAME.tar.xz`, keyed by their path below the top folder.

    `folders` are the levels of folders between the split's and an image. `CorruptDatasetError`
    where the archive is damaged, truncated, no tar.xz, or is refused; see above.
    """
    files: dict[str, Encoded] = {}
    others: list[str] = []
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
                inside = "/".join(parts[1:])
                if member.isdir() or not _is_image(inside, folders):
                    others += [] if member.isdir() else [inside]
                    continue
                if inside in files:
                    raise _refused(path, f"it holds {inside!r} twice")
                files[inside] = content[member.offset_data : member.offset_data + member.size]
        # tarfile takes a damaged header for the end, and ignores the rest.
        if len(content) <= tar.offset or unpacked[tar.offset :].strip(b"\0"):
            end = f"its first {tar.offset:,} bytes"
            raise _refused(path, f"it breaks off, or something else follows, after {end}")
    except (CorruptDatasetError, OSError):
        raise
    except Exception as error:  # tarfile raises almost any error for a damaged header
        raise CorruptDatasetError(
            f"{path} is damaged or incomplete ({error}): delete it and copy or download it again"
        ) from error
    _tell(path, others, folders)
    return files


def _unpacked(path: Path) -> bytes:
    """Decompress an archive unless it is too large; tarfile would not notice a truncated one."""
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


def _is_image(name: str, folders: int) -> bool:
    """Whether a path below the top folder is ``SPLIT/.../FILE`` of an image, nothing hidden."""
    split, *between = name.split("/")
    file = PurePosixPath(name)
    known = split in SPLITS and file.suffix.lower() in SUFFIXES
    return known and len(between) == folders + 1 and "/." not in name


def read_folder(path: Path, folders: int = 1) -> dict[str, Encoded]:
    """List the images below a folder of the same layout, keyed by their path in it."""
    inside = {file.relative_to(path).as_posix(): file for file in _below(path, 2 + folders)}
    images: dict[str, Encoded] = {
        name: file for name, file in inside.items() if _is_image(name, folders)
    }
    _tell(path, [name for name in inside if name not in images], folders)
    return images


def _tell(path: Path, others: Sequence[str], folders: int) -> None:
    """Warn of what lies in a split and is not read; a class without images has no label."""
    seen = [name for name in others if name.split("/")[0] in SPLITS and "/." not in name]
    if seen:
        logger.warning(
            "%s: %d files or folders are left out, such as %s: images are %s/FILE, and end in %s",
            *(path, len(seen), seen[0], "/".join(["SPLIT", *["FOLDER"] * folders])),
            ", ".join(sorted(SUFFIXES)),
        )


def _below(folder: Path, levels: int) -> Iterator[Path]:
    """The entries `levels` levels below a folder; `glob` would skip what it cannot read."""
    for entry in sorted(folder.iterdir()):
        if levels == 1:
            yield entry
        elif entry.is_dir():
            yield from _below(entry, levels - 1)


def content_hash(files: Sequence[Path], base: Path) -> str:
    """SHA-256 of one file, or of the names and contents of several below `base`."""
    if len(files) == 1:
        return file_sha256(files[0])
    return digest(f"{f.relative_to(base).as_posix()}|{file_sha256(f)}" for f in sorted(files))


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal digits; refused if it is none, as a pipe would wait."""
    if not path.is_file():
        raise CorruptDatasetError(f"{path} is no file: remove it, or provide the dataset again")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached(stem: str, build: Callable[[], Decoded]) -> Decoded:
    """Load the decoded set cached as `stem`, memory-mapped; build and cache it if missing.

    Every byte is checked against the stored digest. A cache file that does not load, or has changed
    since it was written, is built again, with a warning. `DatasetError` where it cannot be kept.
    """
    try:
        path = cache_folder() / f"{stem}.pt"
    except OSError as error:
        raise DatasetError(f"there is no place for decoded datasets: {error}") from error
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
