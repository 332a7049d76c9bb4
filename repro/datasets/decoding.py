"""Decoding of images to uint8 tensors, at once or, if they exceed the memory, as needed."""

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from repro.datasets.image_data import (
    CorruptDatasetError,
    DatasetError,
    Size,
    Split,
    as_pair,
    check_memory,
)

Prepare = Callable[[Image.Image], Image.Image]
Encoded = bytes | memoryview | Path | np.ndarray  # an array holds pixels already

# PIL reads some 40 more, and calls programs for some of them, such as Ghostscript for EPS.
FORMATS = ("JPEG", "PNG", "PPM", "TIFF", "BMP", "GIF", "WEBP")


@dataclass(frozen=True)
class Item:
    """One image, still encoded: its name for messages, its content, its label or mask."""

    name: str
    image: Encoded
    label: int | None = None
    mask: Encoded | None = None


def decode(items: Sequence[Item], size: int | Size | None, prepare: Prepare | None = None) -> Split:
    """Decode and resize `items`, in their order; `prepare` is applied before.

    There is at least one; all have a label, all a mask, or all neither. With None for `size` all
    must have one size. Raises DatasetError: an image cannot be decoded or has another size, a mask
    does not fit its image, or the images exceed the memory.
    """
    first, mask = _decode_one(items[0], size, prepare)
    check_memory(
        len(items), first.shape, "give a smaller image_size= or, for labelled sets, per_class="
    )
    images = np.empty((len(items), *first.shape), np.uint8)
    masks = None if mask is None else np.empty((len(items), *mask.shape), np.uint8)

    def fill(index: int) -> None:
        image, mask = _decode_one(items[index], size, prepare)
        if image.shape != first.shape:
            raise DatasetError(
                f"{items[index].name} is {image.shape[1]}x{image.shape[2]} pixels but "
                f"{items[0].name} {first.shape[1]}x{first.shape[2]}: the images differ in size, "
                "give image_size= to resize them to one"
            )
        images[index] = image
        if masks is not None:
            masks[index] = mask

    with ThreadPoolExecutor() as pool:  # PIL decodes without holding the interpreter lock
        list(pool.map(fill, range(len(items))))
    labels = [item.label for item in items if item.label is not None]
    return Split(
        torch.from_numpy(images),
        torch.tensor(labels, device="cpu") if labels else None,
        None if masks is None else torch.from_numpy(masks),
    )


class StreamedImages:
    """Encoded images in the place of a uint8 tensor (N, 3, H, W) that would exceed the memory.

    Indexing selects images, still encoded; `decoded` gives pixels, of `size` as of `decode`.
    """

    def __init__(self, items: Sequence[Item], size: int | Size) -> None:
        self._items, self._size = items, size
        self.shape = torch.Size((len(items), 3, *as_pair(size)))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Tensor | slice) -> "StreamedImages":
        # As of a tensor: also by a boolean mask.
        chosen = torch.arange(len(self), device="cpu")[index].tolist()
        return StreamedImages([self._items[i] for i in chosen], self._size)

    def decoded(self) -> Tensor:
        """Decode all images with a thread for each core: uint8, (N, 3, H, W)."""
        return decode(self._items, self._size).images


def dense(images: Tensor | StreamedImages) -> Tensor:
    """Images as a tensor, decoded if necessary."""
    return images.decoded() if isinstance(images, StreamedImages) else images


def resized_pixels(image: Image.Image, size: int | Size | None) -> np.ndarray:
    """Pixels of a grey or colour image, resized bilinearly with antialiasing: uint8 (C, H, W)."""
    pixels = np.asarray(_resize(image, size, Image.Resampling.BILINEAR))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _resize(image: Image.Image, size: int | Size | None, resample: Image.Resampling) -> Image.Image:
    if size is None:
        return image
    if isinstance(size, tuple):
        target = (size[1], size[0])
    else:
        scale = size / min(image.size)
        target = (max(size, round(image.width * scale)), max(size, round(image.height * scale)))
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and target[0] * target[1] > most:
        raise DatasetError(
            f"image_size= makes {target[0]}x{target[1]} pixels of an image of {image.width}x"
            f"{image.height}, more than {most:,} (PIL.Image.MAX_IMAGE_PIXELS): give a smaller one"
        )
    image = image.resize(target, resample)
    return image if isinstance(size, tuple) else centre(image, (size, size))


def centre(image: Image.Image, size: Size) -> Image.Image:
    """Cut the centre, (height, width), out of an image."""
    left, top = (image.width - size[1]) // 2, (image.height - size[0]) // 2
    return image.crop((left, top, left + size[1], top + size[0]))


def _decode_one(
    item: Item, size: int | Size | None, prepare: Prepare | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """The image, uint8 (3, H, W), and the mask, uint8 (H, W), of one item."""
    with opened(item.name, item.image) as encoded:
        image = in_colour(encoded)
    pixels = resized_pixels(prepare(image) if prepare else image, size)
    if item.mask is None:
        return pixels, None
    with opened(f"the mask of {item.name}", item.mask) as encoded:
        mask = _indices(encoded)
    if mask.size != image.size:
        raise CorruptDatasetError(
            f"{item.name}: its mask is {mask.size[0]}x{mask.size[1]} pixels and the image "
            f"{image.size[0]}x{image.size[1]}: they must be equal"
        )
    return pixels, np.asarray(_resize(mask, size, Image.Resampling.NEAREST))


@contextmanager
def opened(name: str, encoded: Encoded) -> Iterator[Image.Image]:
    """Open an image of one of `FORMATS`, with its name for errors; decode it inside the block.

    `CorruptDatasetError` where the file is no such image, is damaged, or has more pixels than
    `PIL.Image.MAX_IMAGE_PIXELS` (89 million by default).
    """
    if isinstance(encoded, np.ndarray):
        yield Image.fromarray(encoded)
        return
    source: Any = encoded if isinstance(encoded, Path) else io.BytesIO(encoded)
    if isinstance(encoded, Path) and not encoded.is_file():  # reading a pipe would wait
        raise CorruptDatasetError(f"{name} is no file: remove it, or provide the dataset again")
    try:
        with Image.open(source, formats=FORMATS) as image:
            most = Image.MAX_IMAGE_PIXELS  # from twice that on, `open` raises
            if most is not None and image.width * image.height > most:
                raise Image.DecompressionBombError
            yield image
    except DatasetError:
        raise
    # For damaged files, decoders raise almost any error: SyntaxError, struct.error, MemoryError.
    except Exception as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is none of {', '.join(FORMATS)}"
        elif isinstance(error, Image.DecompressionBombWarning | Image.DecompressionBombError):
            reason = f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels"
        raise CorruptDatasetError(
            f"{name} cannot be decoded ({reason}): provide it again, or take it out"
        ) from error


def in_colour(image: Image.Image) -> Image.Image:
    """An opened image as RGB; grey of 12 or 16 bits is scaled to 8, where Pillow clips to 255.

    ValueError: it holds grey of which no largest value is known.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        tags: Any = getattr(image, "tag_v2", {})
        most = 2 ** tags.get(ExifTags.Base.BitsPerSample, (16,))[0] - 1
        grey = np.asarray(image).astype(np.int64)
        if tags.get(ExifTags.Base.PhotometricInterpretation) == 0:  # white is 0
            grey = most - grey
        return Image.fromarray((grey * 255 // most).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("grey of 8, 12 or 16 bits is read, and this is signed, of 32 or a float")
    return image.convert("RGB")


def _indices(mask: Image.Image) -> Image.Image:
    """A mask as class indices: a GIF is black and white, other files hold the index itself."""
    if mask.format == "GIF":
        grey = np.asarray(mask.convert("L"))
        if not np.isin(grey, (0, 255)).all():
            raise ValueError("a GIF's mask is black and white, this has other colours: give PNG")
        return Image.fromarray(grey // 255)
    inside = str(mask.info.get("compression")).lower()  # of TIFF
    if mask.format == "JPEG" or "jpeg" in inside or inside == "webp":
        raise ValueError("a JPEG's values are not exact, and a mask's are class indices: give PNG")
    if mask.mode not in ("1", "L", "P"):
        raise ValueError(f"a mask holds one class index per pixel, this is {mask.mode}")
    # Pillow spreads other ranges over 0 to 255; tiles are of a file's images alone.
    file: Any = mask
    if mask.format == "PPM" and mask.mode == "L" and file.tile[0].args not in ("L", ("L", 255)):
        raise ValueError("a PGM's mask has 255 as its largest value, this another: give PNG")
    spread = {"L;2": 85, "L;4": 17}.get(file.tile[0].args, 1) if mask.format == "PNG" else 1
    return Image.fromarray(np.asarray(mask, dtype=np.uint8) // spread)
