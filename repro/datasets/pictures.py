"""Photographs without labels, for super-resolution: DIV2K, and BSDS500 as its stand-in."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from repro.datasets.archives import file_sha256
from repro.datasets.decoding import Item, Prepare, centre, opened

NAMES = ("div2k", "bsds500")
URL = "https://data.vision.ee.ethz.ch/cvl/DIV2K/"
# DIV2K's archive and its SHA-256 by split. The authors publish no hashes; these are TensorFlow
# Datasets' (url_checksums/div2k.txt), used there to check every download.
_TRAIN = "9d0b9c463f6e35b6c62cc6a930ee2224f670b34c1df841a57670f9acf0f6c335"
_TEST = "20dd31fd84d777bc1cf5d6b7654a3f569c0aec74458ae094122ad1d0489900fc"
DIV2K = {"train": ("DIV2K_train_HR", _TRAIN), "test": ("DIV2K_valid_HR", _TEST)}


def lying(picture: Image.Image) -> Image.Image:
    """Turn a portrait picture by a quarter, so that all are landscape."""
    standing = picture.height > picture.width
    return picture.transpose(Image.Transpose.ROTATE_90) if standing else picture


def cut_alike(items: Iterable[Item]) -> Prepare:
    """A function that turns pictures and cuts the largest centre common to all."""
    sizes = []
    for item in items:
        with opened(item.name, item.image) as picture:
            sizes.append((min(picture.size), max(picture.size)))
    common = min(height for height, _ in sizes), min(width for _, width in sizes)
    return lambda picture: centre(lying(picture), common)


def fetch(folder: Path) -> None:
    """Download DIV2K's archives, check them, and unpack each into its split's folder, or nothing.

    Raises RuntimeError for another SHA-256; errors of torchvision are passed on.
    """
    from repro._torchvision import torchvision

    folder.mkdir(exist_ok=True)
    for split, (name, expected) in DIV2K.items():
        if (folder / split).exists():
            continue
        with TemporaryDirectory(dir=folder) as temporary:
            archive = Path(temporary) / f"{name}.zip"
            torchvision.datasets.utils.download_url(f"{URL}{archive.name}", temporary)
            if (received := file_sha256(archive)) != expected:
                raise RuntimeError(
                    f"{archive.name} came with SHA-256 {received}, expected is {expected}; nothing "
                    "was kept, try again"
                )
            torchvision.datasets.utils.extract_archive(str(archive), temporary)
            (Path(temporary) / name).rename(folder / split)
