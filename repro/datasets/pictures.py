"""Photographs without labels, for super-resolution: DIV2K, and BSDS500 as its stand-in."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from repro.datasets.archives import Decoded, read_archive, read_folder
from repro.datasets.decoding import Encoded, open_picture, resized_pixels
from repro.datasets.image_data import CorruptDatasetError, Size, Split
from repro.datasets.sources import Source

NAMES = ("div2k", "bsds500")
DIV2K = {"train": "DIV2K_train_HR", "test": "DIV2K_valid_HR"}
_URL = "http://data.vision.ee.ethz.ch/cvl/DIV2K/"


def find(name: str, root: Path) -> Source | None:
    """Return where `root` holds a set of pictures, or None."""
    for folder in (root / name, root) if name == "div2k" else ():
        if all((folder / part).is_dir() for part in DIV2K.values()):
            return _source(name, "folders " + " and ".join(DIV2K.values()), folder)
    archive, folder = root / f"{name}.tar.xz", root / name
    if archive.is_file():
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
    """Download and unpack the archives of DIV2K into `root`; raises what torchvision raises."""
    from repro._torchvision import torchvision

    for part in DIV2K.values():
        torchvision.datasets.utils.download_and_extract_archive(
            f"{_URL}{part}.zip", str(root), remove_finished=True
        )


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
        found = (file for members in contents().values() for file in members.values())
        return [file for file in found if isinstance(file, Path)]

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
        with open_picture(name, content) as picture:
            sizes.append((min(picture.size), max(picture.size)))
    return min(height for height, _ in sizes), min(width for _, width in sizes)


def _decode(
    members: dict[str, Encoded], size: int | Size | None, shape: Size | None
) -> torch.Tensor:
    images: list[np.ndarray[Any, Any]] = []
    for name, content in members.items():
        with open_picture(name, content) as opened:
            try:
                picture = opened.convert("RGB")
            except (OSError, SyntaxError, ValueError) as error:
                raise CorruptDatasetError(
                    f"{name} cannot be decoded ({error}): provide the dataset again"
                ) from error
        if picture.height > picture.width:  # all pictures lie, so that they fit one tensor
            picture = picture.transpose(Image.Transpose.ROTATE_90)
        if shape is not None:
            top, left = (picture.height - shape[0]) // 2, (picture.width - shape[1]) // 2
            picture = picture.crop((left, top, left + shape[1], top + shape[0]))
        images.append(resized_pixels(picture, size))
    return torch.from_numpy(np.stack(images))
