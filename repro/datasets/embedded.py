"""Real images inside scikit-learn and scikit-image, available on every machine."""

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from repro.datasets.decoding import in_colour, opened, resized_pixels
from repro.datasets.image_data import (
    DatasetError,
    ImageData,
    Size,
    Split,
    as_pair,
    check_counts,
    check_memory,
    check_size,
    digest,
    tensor_digest,
)

PHOTOGRAPHS = {
    "astronaut": "astronaut.png", "cat": "chelsea.png", "coffee": "coffee.png",
    "galaxies": "hubble_deep_field.jpg", "motorcycle": "motorcycle_left.png",
    "retina": "retina.jpg", "rocket": "rocket.jpg", "tissue": "ihc.png",
}  # fmt: skip


def digits(image_size: int | Size | None = None) -> ImageData:
    """Load scikit-learn's 1,797 handwritten grey digits of 8x8; every fifth of a class is test."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # Values run from 0 to 16.
    pixels = (bunch.images.astype(np.int64) * 255 // 16).astype(np.uint8)
    resized = [resized_pixels(Image.fromarray(image), image_size) for image in pixels]
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    whole = Split(torch.from_numpy(np.stack(resized)), labels)
    one_hot = torch.nn.functional.one_hot(labels)
    is_test = (one_hot.cumsum(0) * one_hot).sum(1) % 5 == 0  # position in its class, from 1
    train, test = (whole.chosen(part.nonzero().flatten()) for part in (~is_test, is_test))
    provenance = (
        "Handwritten digits of 8x8 grey pixels (UCI) that ship inside scikit-learn; every fifth of "
        "a class is test."
    )
    classes = tuple(str(label) for label in range(10))
    key = tensor_digest(train, test)[:16]
    return ImageData("digits", "digits", "real", provenance, key, classes, train, test)


def photos(
    image_size: int | Size | None = None,
    *,
    train_per_class: int = 128,
    test_per_class: int = 32,
    seed: int = 0,
) -> ImageData:
    """Cut patches from the colour photographs inside the scikit-image wheel.

    The class is the photograph. Training patches lie in its left 70 %, test patches in its right
    30 %, at places drawn by `seed`. A mask is 1 where the luminance exceeds Otsu's threshold of the
    whole photograph. `image_size` is that of a patch, not resized; None is 64. `DatasetError`
    where a patch does not fit the smallest photograph's test region, or a count is below 1.
    """
    height, width = as_pair(check_size(image_size) or 64)
    check_counts(train_per_class=train_per_class, test_per_class=test_per_class)
    check_counts(0, seed=seed)
    # Found, not imported: skimage.data would look for a download folder.
    spec = importlib.util.find_spec("skimage")
    assert spec is not None and spec.origin is not None
    files = [Path(spec.origin).parent / "data" / file for file in PHOTOGRAPHS.values()]
    photographs = [_photograph(file) for file in files]
    largest = (
        min(len(image) for image, _ in photographs),
        min(image.shape[1] - _border(image) for image, _ in photographs),
    )
    if height > largest[0] or width > largest[1]:
        raise DatasetError(
            f"image_size={height}x{width}: patches that lie in the test region of every photograph "
            f"are at most {largest[0]}x{largest[1]}; give a smaller size"
        )
    count = len(photographs) * (train_per_class + test_per_class)
    check_memory(count, (4, height, width), "give fewer of them")  # three colours and a mask
    random = np.random.Generator(np.random.PCG64(seed))
    splits = []
    for count, right in ((train_per_class, False), (test_per_class, True)):
        images, masks = [], []
        for image, mask in photographs:
            first, last = (_border(image), image.shape[1]) if right else (0, _border(image))
            tops = random.integers(0, len(image) - height + 1, count)
            lefts = random.integers(first, last - width + 1, count)
            for top, left in zip(tops, lefts, strict=True):
                window = (slice(top, top + height), slice(left, left + width))
                images.append(image[window].transpose(2, 0, 1))
                masks.append(mask[window])
        labels = torch.arange(len(photographs), device="cpu").repeat_interleave(count)
        splits.append(
            Split(torch.from_numpy(np.stack(images)), labels, torch.from_numpy(np.stack(masks)))
        )
    # Of the files, not the pixels: JPEG decoders differ in the last bit.
    content = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    options = [height, width, train_per_class, test_per_class, seed]
    provenance = (
        f"Patches of {height}x{width} pixels from {len(files)} colour photographs inside the "
        "scikit-image wheel; class = photograph, training patches from its left 70 % and test "
        "patches from its right 30 %, masks = Otsu foreground of luminance, not annotations."
    )
    key = digest(["photos", 1, *content, *options])[:16]
    return ImageData("photos", "photos", "real", provenance, key, tuple(PHOTOGRAPHS), *splits)


def _border(image: np.ndarray) -> int:
    """The first column of a photograph's test region."""
    return image.shape[1] * 7 // 10


def _photograph(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A photograph, uint8 (H, W, 3), and its Otsu foreground, uint8 (H, W)."""
    from skimage.filters import threshold_otsu

    with opened(str(path), path) as encoded:
        colour = in_colour(encoded)
    luminance = np.asarray(colour.convert("L"))
    return np.asarray(colour), (luminance > threshold_otsu(luminance)).astype(np.uint8)
