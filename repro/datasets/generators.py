"""Synthetic images with a class structure that a small CNN can learn."""

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
    tensor_digest,
)

COARSE = 4  # cells along each side of a pattern
CHUNK = 64  # images made at once


def synthetic(
    image_size: int | Size | None = None,
    *,
    train: int = 2048,
    test: int = 512,
    num_classes: int = 10,
    channels: int = 3,
    seed: int = 0,
) -> ImageData:
    """Make images that each mix their class's pattern, an individual pattern, and noise.

    All arithmetic is on integers, so that every machine makes the same pixels.

    Args:
        image_size: Side or (height, width) in pixels; None is 32.
        train: Training images.
        test: Test images, of the same class patterns.
        num_classes: Classes, as evenly frequent as the counts allow.
        channels: Channels of the images.
        seed: Seed of the patterns and the images.

    Raises:
        DatasetError: A count is too small, or `image_size` is no size.
    """
    height, width = as_pair(check_size(image_size) or 32)
    check_counts(train=train, test=test, channels=channels)
    check_counts(2, num_classes=num_classes)
    check_counts(0, seed=seed)
    check_memory(train + test, (channels, height, width), "give fewer or smaller ones")
    coarse = _generator(seed, 0).integers(0, 256, (num_classes, channels, COARSE, COARSE))
    patterns = _upsample(coarse, height, width)
    splits = [
        _make(patterns, count, _generator(seed, stream))
        for stream, count in ((1, train), (2, test))
    ]
    provenance = (
        f"Synthetic: {train} + {test} images of {channels}x{height}x{width} generated with seed "
        f"{seed}, {num_classes} classes."
    )
    classes = tuple(f"class {k}" for k in range(num_classes))
    key = tensor_digest(*splits)[:16]
    return ImageData("synthetic", "synthetic", "synthetic", provenance, key, classes, *splits)


def _generator(seed: int, stream: int) -> np.random.Generator:
    # Separate streams: the test images stay the same when the number of training images changes.
    return np.random.Generator(np.random.PCG64([seed, stream]))


def _upsample(coarse: np.ndarray, height: int, width: int) -> np.ndarray:
    """Interpolate (..., a, b) patterns of 0 to 255 bilinearly to int32 (..., height, width)."""
    result = coarse.astype(np.int32)
    for axis, side in ((-2, height), (-1, width)):
        cells = result.shape[axis] - 1
        position = np.arange(side, dtype=np.int32) * (cells * 256) // max(side - 1, 1)
        lower = np.minimum(position // 256, cells - 1)
        weight = position - 256 * lower
        weight = weight[:, None] if axis == -2 else weight
        low, high = np.take(result, lower, axis), np.take(result, lower + 1, axis)
        result = (low * (256 - weight) + high * weight) // 256
    return result


def _make(patterns: np.ndarray, count: int, random: np.random.Generator) -> Split:
    labels = random.permutation(np.arange(count) % len(patterns))
    images = np.empty((count, *patterns.shape[1:]), np.uint8)
    for start in range(0, count, CHUNK):
        rows = slice(start, start + CHUNK)
        images[rows] = _mix(patterns[labels[rows]], random)
    return Split(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


def _mix(clean: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Mix clean images (n, C, H, W) with a smooth pattern of their own and with noise."""
    n, channels, height, width = clean.shape
    pattern = _upsample(random.integers(0, 256, (n, channels, COARSE, COARSE)), height, width)
    noise = random.integers(0, 256, clean.shape, np.uint8)
    return ((6 * clean + 5 * pattern + 5 * noise.astype(np.int32)) // 16).astype(np.uint8)
