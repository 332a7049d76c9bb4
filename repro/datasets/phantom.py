"""Randomised Shepp-Logan phantoms: the Phantom dataset of Lee et al., rebuilt.

Their section VI: "a randomized version of the classical Shepp-Logan phantom, where orientation,
shape and size of each of the ten ellipsoids are randomized. Phantom has 1600 training images and
the size of each image is 256×256." The ranges are not given in the paper; the ranges here are ours.
"""

import numpy as np
import torch

from repro.datasets.image_data import (
    ImageData,
    Size,
    Split,
    as_pair,
    check_counts,
    check_memory,
    check_size,
    digest,
)

# Intensity, half axes along x and y, centre x and y, rotation in degrees, on [-1, 1]². Geometry:
# Shepp and Logan, "The Fourier reconstruction of a head section" (1974), table 1; intensities
# with more contrast, as is usual since Toft, "The Radon Transform" (1996), table B.3.
ELLIPSES = np.array(
    [
        (1.0, 0.69, 0.92, 0.0, 0.0, 0.0),
        (-0.8, 0.6624, 0.874, 0.0, -0.0184, 0.0),
        (-0.2, 0.11, 0.31, 0.22, 0.0, -18.0),
        (-0.2, 0.16, 0.41, -0.22, 0.0, 18.0),
        (0.1, 0.21, 0.25, 0.0, 0.35, 0.0),
        (0.1, 0.046, 0.046, 0.0, 0.1, 0.0),
        (0.1, 0.046, 0.046, 0.0, -0.1, 0.0),
        (0.1, 0.046, 0.023, -0.08, -0.605, 0.0),
        (0.1, 0.023, 0.023, 0.0, -0.606, 0.0),
        (0.1, 0.023, 0.046, 0.06, -0.605, 0.0),
    ]
)
# The largest head, 0.92 √1.18, still lies within the image.
SIZES = (0.8, 1.0)  # factor of both half axes
SHAPES = (0.85, 1.18)  # factor of the ratio of the half axes
TURN = 15.0  # degrees, either way
VERSION = 1  # raised when the same ranges and options give other pixels


def draw_ellipses(ellipses: np.ndarray, size: int | Size) -> np.ndarray:
    """Draw the sum of ellipses, rows (E, 6) as in `ELLIPSES`, clipped to [0, 1].

    Pixels reach from -1 to 1 inclusive. Returns float64, (height, width).
    """
    height, width = as_pair(size)
    x, y = np.linspace(-1, 1, width)[None, :], np.linspace(1, -1, height)[:, None]
    image = np.zeros((height, width))
    for intensity, a, b, centre_x, centre_y, degrees in ellipses:
        cosine, sine = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
        along = ((x - centre_x) * cosine + (y - centre_y) * sine) / a
        across = ((y - centre_y) * cosine - (x - centre_x) * sine) / b
        image += intensity * (along**2 + across**2 <= 1)
    return image.clip(0, 1)


def randomised(random: np.random.Generator) -> np.ndarray:
    """The ellipses with random size, shape and orientation of each, (10, 6)."""
    count = len(ELLIPSES)
    size = random.uniform(*SIZES, count)
    ratio = np.exp(random.uniform(np.log(SHAPES[0]), np.log(SHAPES[1]), count) / 2)
    turn = random.uniform(-TURN, TURN, count)
    ellipses = ELLIPSES.copy()
    ellipses[:, 1] *= size * ratio
    ellipses[:, 2] *= size / ratio
    ellipses[:, 5] += turn
    return ellipses


def phantom(
    image_size: int | Size | None = None, *, train: int = 1600, test: int = 200, seed: int = 0
) -> ImageData:
    """Make grey phantoms of ten randomised ellipses, without labels or masks.

    Each image depends only on the seed and its number, so that a smaller set is the beginning of a
    larger one. The paper has 256 pixels a side and 1,600 training images; it does not state the
    number of test images.

    Raises:
        DatasetError: A count is below 1, or `image_size` is no size.
    """
    check_counts(train=train, test=test)
    check_counts(0, seed=seed)
    height, width = as_pair(check_size(image_size) or 256)
    check_memory(train + test, (1, height, width), "give fewer or smaller ones")

    def make(stream: int, count: int) -> Split:
        images = np.empty((count, 1, height, width), np.uint8)
        for number in range(count):
            random = np.random.Generator(np.random.PCG64([seed, stream, number]))
            image = draw_ellipses(randomised(random), (height, width))
            images[number, 0] = np.rint(255 * image)
        return Split(torch.from_numpy(images))

    ranges = [*ELLIPSES.ravel().tolist(), *SIZES, *SHAPES, TURN]
    options = [VERSION, *ranges, height, width, train, test, seed]
    provenance = (
        f"Phantom, generated as the paper's was: {train} + {test} grey images of {height}x{width} "
        "pixels, the ten ellipses of the Shepp-Logan phantom with size, shape and orientation "
        f"drawn at random, seed {seed}; how far they vary is our choice."
    )
    # Of the options, not the pixels: sines differ in the last bit between machines.
    key = digest(["phantom", *options])[:16]
    splits = make(1, train), make(2, test)
    return ImageData("phantom", "phantom", "synthetic", provenance, key, (), *splits)
