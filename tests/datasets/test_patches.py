"""Aligned patches of inputs and targets, and how inputs are made."""

import numpy as np
import pytest
import torch
from PIL import Image

from repro.datasets import DatasetError, PatchLoader, low_resolution, noisy

HEIGHT, WIDTH, PATCH = 9, 12, 6


def images(count, channels=3, height=HEIGHT, width=WIDTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (count, channels, height, width)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


def pairs(scale):
    return images(13), images(13, 2, scale * HEIGHT, scale * WIDTH, seed=1)


def epoch(loader):
    """Return the inputs and targets of an epoch as pixels."""
    return [(255 * torch.cat(part)).round().to(torch.uint8) for part in zip(*loader, strict=True)]


def symmetries(image):
    """All eight ways in which a square (C, H, W) can be mirrored and turned."""
    for turned in (torch.rot90(image, k, (1, 2)) for k in range(4)):
        yield turned
        yield turned.flip(-1)


@pytest.mark.parametrize("crop", ["random", "center"])
@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("scale", [1, 2, 3])
def test_patches_by_brute_force(scale, augment, crop):
    """Each pair is one place of one image, mirrored and turned alike; in time all places are."""
    inputs, targets = pairs(scale)
    loader = PatchLoader(inputs, targets, 5, patch=PATCH, seed=3, augment=augment, crop=crop)
    windows = inputs.unfold(2, PATCH, 1).unfold(3, PATCH, 1)
    corners, counts = set(), np.zeros(8)
    for _ in range(20):
        numbers = []
        for small, large in zip(*epoch(loader), strict=True):
            same = [
                (windows == image[:, None, None]).all(-1).all(-1).all(1).nonzero().tolist()
                for image in symmetries(small)
            ]
            (which,) = (i for i, found in enumerate(same) if found)
            ((number, top, left),) = same[which]
            wanted, side = targets[number, :, scale * top :, scale * left :], scale * PATCH
            assert torch.equal([*symmetries(large)][which], wanted[:, :side, :side])
            numbers.append(number)
            corners.add((top, left))
            counts[which] += 1
        assert sorted(numbers) == list(range(13))
    every = {(y, x) for y in range(HEIGHT - PATCH + 1) for x in range(WIDTH - PATCH + 1)}
    assert corners == (every if crop == "random" else {(1, 3)})
    assert counts.min() >= 15 if augment else counts[0] == 260  # 32 of 260 each
    with pytest.raises(DatasetError, match="resolution would part inputs from targets"):
        loader.set_resolution(3)


def test_what_an_epoch_depends_on():
    """On the seed and its number: not on batch sizes, other random numbers, or augmentation."""

    def found(seed=0, number=0, size=4, augment=True):
        loader = PatchLoader(*pairs(2), size, patch=PATCH, seed=seed, augment=augment)
        loader.set_epoch(number)
        torch.manual_seed(number)
        return epoch(loader)

    first = found()
    assert all(map(torch.equal, found(size=5), first))
    for other in (found(number=1), found(seed=1)):
        assert not torch.equal(other[0], first[0])
    plain = found(augment=False)[0]
    assert torch.equal(plain.flatten(2).sort().values, first[0].flatten(2).sort().values)


@pytest.mark.gpu
def test_an_epoch_is_the_same_on_an_accelerator_and_waits_at_its_start_alone(device, no_waits):
    options = {"patch": PATCH, "augment": True}
    here, there = (PatchLoader(*pairs(2), 2, device=at, **options) for at in ("cpu", device))
    batches = iter(there)
    with no_waits():
        made = list(batches)
    for ours, wanted in zip(made, here, strict=True):
        assert all(torch.allclose(a.cpu(), b, atol=1e-6) for a, b in zip(ours, wanted, strict=True))


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4, 3, 17, 24), {}, r"inputs \(4, 3, 9, 12\) and targets \(4, 3, 17, 24\): expected as"),
        ((4, 3, 9, 6), {}, "the same whole multiple"),
        ((5, 3, 18, 24), {}, "as many targets"),
        ((4, 3, 18, 24), {"patch": 10}, r"crop_size=\(10, 10\) does not fit"),
        ((4, 3, 18, 24), {"flip": True}, "flip would part inputs from targets"),
    ],
)
def test_wrong_arguments(shape, options, message):
    targets = torch.zeros(shape, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        PatchLoader(images(4), targets, **{"batch_size": 2, "patch": 4} | options)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_low_resolution_as_pil_shrinks_it(scale):
    large = images(19, 3, 24, 36)
    small = low_resolution(large, scale)
    assert small.shape == (19, 3, 24 // scale, 36 // scale) and small.dtype == torch.uint8
    for plane, own in zip(large.flatten(0, 1), small.flatten(0, 1), strict=True):
        size = 36 // scale, 24 // scale
        wanted = Image.fromarray(plane.numpy()).resize(size, Image.Resampling.BICUBIC)
        gap = np.abs(np.asarray(wanted).astype(int) - own.numpy())
        assert gap.max() <= 2 and (gap > 1).mean() < 0.01  # PIL rounds after each direction


def test_noise():
    grey = torch.full((40, 1, 64, 64), 128, dtype=torch.uint8)
    before, noise = torch.get_rng_state(), noisy(grey, 0.1, 5)
    assert torch.equal(torch.get_rng_state(), before)
    gap = noise.float() - 128
    # Rounding adds a variance of a twelfth.
    assert float(gap.std()) == pytest.approx((25.5**2 + 1 / 12) ** 0.5, rel=0.01)
    assert abs(float(gap.mean())) < 0.3
    assert np.abs(np.corrcoef(gap.flatten(1).numpy()) - np.eye(40)).max() < 0.1  # images differ
    assert torch.equal(noisy(grey, 0.1, 5), noise) and noise.dtype == torch.uint8
    assert not torch.equal(noisy(grey, 0.1, 1), noise) and torch.equal(noisy(grey, 0.0, 0), grey)
    dark, bright = noisy(grey * 0, 0.1, 0), noisy(grey * 0 + 255, 0.1, 0)  # clipped, not wrapped
    assert dark.max() < 150 and bright.min() > 105
    assert (dark == 0).float().mean() == pytest.approx(0.5, abs=0.05)
    for sigma in (-0.1, float("nan")):
        with pytest.raises(DatasetError, match=f"sigma={sigma}: expected at least 0"):
            noisy(images(1), sigma, 0)
