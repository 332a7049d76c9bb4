"""Small datasets in every layout: the files of each, and how to write them."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def encode(pixels: np.ndarray, form: str = "PNG", **options: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **options)
    return buffer.getvalue()


def random_image(seed: int, height: int = 8, width: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def class_files(name: str = "flowers5", per_class: int = 3) -> dict[str, bytes]:
    """Two classes, train and test, lossless PNG."""
    return {
        f"{name}/{split}/{label}/{i:04d}.png": encode(random_image(s * 100 + k * 10 + i))
        for s, split in enumerate(("train", "test"))
        for k, label in enumerate(("ant", "bee"))
        for i in range(per_class)
    }


def mask_files(name: str, splits=("train", "val", "test"), classes: int = 12) -> dict[str, bytes]:
    files = {}
    for s, split in enumerate(splits):
        for i in range(2):
            mask = np.random.default_rng(s * 10 + i).integers(0, classes, (12, 16), np.uint8)
            files[f"{name}/{split}/images/{i}.png"] = encode(random_image(s * 10 + i, 12, 16))
            files[f"{name}/{split}/masks/{i}.png"] = encode(mask)
    return files


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz") as tar:
        for name in reversed(list(files)):  # the loader's order is not the archive's
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))
    return path


def write_folder(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def write(root: Path, files: dict[str, bytes], packed: bool = True) -> Path:
    """Write a set as its archive or its folder, and return the data folder."""
    if packed:
        write_archive(root / f"{next(iter(files)).partition('/')[0]}.tar.xz", files)
    else:
        write_folder(root, files)
    return root
