"""Photographs without labels, for super-resolution: DIV2K, and BSDS500 as its stand-in."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from repro.datasets.archives import Decoded, archive_at, file_sha256, read_archive, read_folder
from repro.datasets.decoding import Encoded, opened, resized_pixels
from repro.datasets.image_data import (
    CorruptDatasetError,
    Size,
    Split,
    check_memory,
)
from repro.datasets.sources import Source

NAMES = ("div2k", "bsds500")
DIV2K = {"train": "DIV2K_train_HR", "test": "DIV2K_valid_HR"}
_URL = "https://data.vision.ee.ethz.ch/cvl/DIV2K/"
# Bytes and SHA-256 of the archives. Its authors publish none; these are TensorFlow Datasets'
# (url_checksums/div2k.txt), which checks every download by them.
_ARCHIVES = {
    "DIV2K_train_HR": (
        3_530_603_713,
        "9d0b9c463f6e35b6c62cc6a930ee2224f670b34c1df841a57670f9acf0f6c335",
    ),
    "DIV2K_valid_HR": (
        448_993_893,
        "20dd31fd84d777bc1cf5d6b7654a3f569c0aec74458ae094122ad1d0489900fc",
    ),
}


def find(name: str, root: Path) -> Source | None:
    """Return where `root` holds a set of pictures, or None."""
    for folder in (root / name, root) if name == "div2k" else ():
        if all((folder / part).is_dir() for part in DIV2K.values()):
            return _source(name, "folders " + " and ".join(DIV2K.values()), folder)
    archive, folder = root / f"{name}.tar.xz", root / name
    if archive_at(archive):
        return _source(name, f"archive {archive.name}", archive)
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        return _source(name, f"folder {name}", folder)
    return None


def looked_for(name: str) -> list[str]:
    """Return the paths in a root that `find` looks for."""
    native = [f"{part}/" for part in DIV2K.values()] if name == "div2k" else []
    return [*native, f"{name}.tar.xz", f"{name}/{{train,test}}/"]


def download_url(name: str) -> str | None:
    """Return where the pictures are downloaded from; None if no address is known."""
    return f"{_URL}{DIV2K['train']}.zip" if name == "div2k" else None


def fetch(name: str, root: Path) -> None:
    """Download DIV2K's archives, check them, and unpack them into `root`, each whole or not at all.

    Raises:
        RuntimeError: What came is not what is expected.
        OSError: The network or the disk failed, or something else that torchvision raises.
    """
    from repro._torchvision import torchvision

    for part, (size, expected) in _ARCHIVES.items():
        if (root / part).exists():
            continue
        with TemporaryDirectory(dir=root) as temporary:
            folder = Path(temporary)
            archive = folder / f"{part}.zip"
            torchvision.datasets.utils.download_url(f"{_URL}{archive.name}", str(folder))
            received = file_sha256(archive)
            if received != expected:
                came = archive.stat().st_size
                raise RuntimeError(
                    f"{archive.name} came as {came:,} bytes with SHA-256 {received}, expected are "
                    f"{size:,} bytes with {expected}; nothing was kept, try again"
                )
            torchvision.datasets.utils.extract_archive(str(archive), str(folder))
            (folder / part).rename(root / part)


def _source(name: str, layout: str, path: Path) -> Source:
    def contents() -> dict[str, dict[str, Encoded]]:
        if path.is_dir() and (path / DIV2K["train"]).is_dir():
            return {
                split: {str(file): file for file in sorted((path / part).glob("*.png"))}
                for split, part in DIV2K.items()
            }
        files = read_archive(path, 0) if path.is_file() else read_folder(path, 0)
        splits: dict[str, dict[str, Encoded]] = {}
        for inside, content in sorted(files.items()):
            splits.setdefault(inside.split("/")[0], {})[inside] = content
        return {split: splits[split] for split in ("train", "val", "test") if split in splits}

    def files(per_class: int | None) -> Sequence[Path]:
        if path.is_file():
            return [path]
        pictures = (file for members in contents().values() for file in members.values())
        return [file for file in pictures if isinstance(file, Path)]

    def read(size: int | Size | None, per_class: int | None) -> Decoded:
        splits = contents()
        if not splits.get("train") or not splits.get("test"):
            raise CorruptDatasetError(
                f"{path} holds no picture for training or for testing: expected "
                f"{' or '.join(looked_for(name))}"
            )
        everything = [item for members in splits.values() for item in members.items()]
        shape = _common_size(everything) if size is None else None
        return Decoded(
            (),
            {split: Split(_decode(members, size, shape)) for split, members in splits.items()},
        )

    return Source(name, layout, path, files, read)


def _common_size(items: Sequence[tuple[str, Encoded]]) -> Size:
    """Return height and width of the largest picture, lying, that can be cut from all."""
    sizes = []
    for name, content in items:
        with opened(name, content) as picture:
            sizes.append((min(picture.size), max(picture.size)))
    return min(height for height, _ in sizes), min(width for _, width in sizes)


def _decode(
    members: dict[str, Encoded], size: int | Size | None, shape: Size | None
) -> torch.Tensor:
    images: list[np.ndarray[Any, Any]] = []
    for name, content in members.items():
        with opened(name, content) as encoded:
            picture = encoded.convert("RGB")
        if picture.height > picture.width:  # all pictures lie, so that they fit one tensor
            picture = picture.transpose(Image.Transpose.ROTATE_90)
        if shape is not None:
            top, left = (picture.height - shape[0]) // 2, (picture.width - shape[1]) // 2
            picture = picture.crop((left, top, left + shape[1], top + shape[0]))
        images.append(resized_pixels(picture, size))
        if len(images) == 1:
            check_memory(len(members), images[0].shape, "give a smaller image_size=")
    return torch.from_numpy(np.stack(images))
