"""From encoded images to uint8 tensors."""

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from repro.datasets.image_data import (
    CorruptDatasetError,
    DatasetError,
    Size,
    Split,
    labels_tensor,
)

Encoded = bytes | Path

THREADED_PIXELS = 100 * 100  # of an encoded image, from which on threads pay


@dataclass(frozen=True)
class Item:
    """One image, still encoded: its name for messages, its content, its label or mask."""

    name: str
    image: Encoded
    label: int | None = None
    mask: Encoded | None = None


def decode(items: Sequence[Item], size: int | Size | None) -> Split:
    """Decode and resize `items`, in their order.

    Args:
        items: At least one; all with a label or all with a mask.
        size: None keeps the size, which all images must then share; an int resizes the short
            side to it and cuts the centre; a pair (height, width) resizes to exactly that.

    Raises:
        CorruptDatasetError: An image cannot be decoded, or a mask does not fit its image.
        DatasetError: `size` is None and the images differ in size, or they exceed the memory.
    """
    first, _ = _decode_one(items[0], size)
    needed, there = (
        len(items) * first.nbytes,
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    if needed > there:
        raise DatasetError(
            f"{len(items)} images of {first.shape[1]}x{first.shape[2]} pixels take "
            f"{needed / 1e9:.0f} GB and this machine has {there / 1e9:.0f} GB of memory: give a "
            "smaller image_size= or, for labelled sets, per_class="
        )
    images = np.empty((len(items), *first.shape), np.uint8)
    masks = None
    if items[0].mask is not None:
        masks = np.empty((len(items), *first.shape[1:]), np.uint8)

    def fill(index: int) -> None:
        image, mask = _decode_one(items[index], size)
        if image.shape != first.shape:
            raise DatasetError(
                f"{items[index].name} is {image.shape[1]}x{image.shape[2]} pixels but "
                f"{items[0].name} {first.shape[1]}x{first.shape[2]}: the images differ in size, "
                "give image_size= to resize them to one"
            )
        images[index] = image
        if masks is not None:
            masks[index] = mask

    # PIL decodes without holding the interpreter lock, so that threads suffice; for small images,
    # most of whose time is spent in Python, they only wait for each other.
    with Image.open(_source(items[0].image)) as opened:
        small = opened.width * opened.height < THREADED_PIXELS
    with ThreadPoolExecutor(1 if small else None) as pool:
        for _ in map(fill, range(len(items))) if small else pool.map(fill, range(len(items))):
            pass
    labels = [item.label for item in items if item.label is not None]
    return Split(
        torch.from_numpy(images),
        labels_tensor(labels) if labels else None,
        None if masks is None else torch.from_numpy(masks),
    )


def resized_pixels(image: Image.Image, size: int | Size | None) -> np.ndarray:
    """Return a grey or colour image, resized bilinearly with antialiasing, as uint8 (C, H, W)."""
    pixels = np.asarray(_resize(image, size, Image.Resampling.BILINEAR))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _resize(image: Image.Image, size: int | Size | None, resample: Image.Resampling) -> Image.Image:
    width, height = image.size
    if size is None:
        return image
    if isinstance(size, tuple):
        target = (size[1], size[0])
        return image if image.size == target else image.resize(target, resample)
    scale = size / min(width, height)
    target = (max(size, round(width * scale)), max(size, round(height * scale)))
    if image.size != target:
        image = image.resize(target, resample)
    left, top = (target[0] - size) // 2, (target[1] - size) // 2
    return image.crop((left, top, left + size, top + size))


def _decode_one(item: Item, size: int | Size | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the image, uint8 (3, H, W), and the mask, uint8 (H, W), of one item."""
    try:
        with Image.open(_source(item.image)) as opened:
            image = opened.convert("RGB")
        mask = None if item.mask is None else _open_mask(item.mask)
    # PIL raises SyntaxError for some broken PNG files, ValueError and OSError for others.
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise CorruptDatasetError(
            f"{item.name} cannot be decoded ({error}): provide the dataset again"
        ) from error
    pixels = resized_pixels(image, size)
    if mask is None:
        return pixels, None
    if mask.size != image.size:
        raise CorruptDatasetError(
            f"{item.name}: its mask is {mask.size[0]}x{mask.size[1]} pixels and the image "
            f"{image.size[0]}x{image.size[1]}: they must be equal"
        )
    return pixels, np.asarray(_resize(mask, size, Image.Resampling.NEAREST))


def open_picture(name: str, encoded: Encoded) -> Image.Image:
    """Open an image whose pixels are not decoded yet.

    Raises:
        CorruptDatasetError: It is no image.
    """
    try:
        return Image.open(_source(encoded))
    except (OSError, SyntaxError, ValueError) as error:
        raise CorruptDatasetError(
            f"{name} cannot be decoded ({error}): provide the dataset again"
        ) from error


def _source(encoded: Encoded) -> Any:
    return io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded


def _open_mask(encoded: Encoded) -> Image.Image:
    """Open a mask as class indices: a GIF is black and white, all else holds the index itself."""
    with Image.open(_source(encoded)) as opened:
        if opened.format == "GIF":
            return opened.convert("L").point(lambda value: int(value > 127))
        if opened.mode not in ("1", "L", "P"):
            raise ValueError(f"a mask holds one class index per pixel, this is {opened.mode}")
        return Image.fromarray(np.asarray(opened, dtype=np.uint8))
