import threading

import numpy as np
import pytest
import torch
from dataset_files import class_files, write
from torch.nn import functional

from repro.datasets import Ahead, PatchLoader, TensorLoader, channel_statistics, load, noisy

N, HEIGHT, WIDTH = 37, 9, 11
SHAPE = N, 3, HEIGHT, WIDTH
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8))
LABELS = torch.arange(N)  # each label names its image
MASKS = IMAGES[:, 0] // 3  # a function of the image, pixel by pixel
MOVED = {"padding": 2, "flip": True}


def raw(targets=LABELS, batch_size=8, images=IMAGES, **options):
    """A loader whose batches are pixels / 255."""
    return TensorLoader(images, targets, batch_size, mean=(0,) * 3, std=(1,) * 3, **options)


def epoch(loader):
    return [torch.cat(parts) for parts in zip(*loader, strict=True)]


@pytest.mark.parametrize("batch_size", [1, 8, 37, 50])
def test_batches_cover_the_data_once(batch_size):
    loader = raw(LABELS, batch_size)
    full, rest = divmod(N, batch_size)
    sizes = [len(y) for _, y in loader]
    assert sizes == [batch_size] * full + [rest] * (rest > 0) and len(sizes) == len(loader)
    pixels, seen = epoch(loader)
    assert len(seen.unique()) == len(seen) == sum(sizes)
    assert torch.allclose(pixels * 255, IMAGES[seen].float(), atol=1e-3)


def test_what_an_epoch_depends_on():
    """On the seed and its number: not on the batch size or other random numbers."""
    assert torch.equal(epoch(raw(shuffle=False))[1], LABELS)
    first, second = raw(seed=5, **MOVED), raw(LABELS, 3, seed=5, **MOVED)
    epochs = [epoch(first) for _ in range(3)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    second.set_epoch(2)
    assert all(map(torch.equal, epoch(second), epochs[2])) and second.epoch == 3
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(epochs[0][1], epochs[1][1])
    assert not torch.equal(epoch(raw(seed=6, **MOVED))[1], epochs[0][1])


def test_set_batch_size_and_resolution_between_epochs():
    loader = raw(LABELS, 10)
    running = iter(loader)
    assert len(next(running)[1]) == 10
    loader.set_batch_size(4)
    loader.set_resolution((5, 6))
    assert len(loader) == 10
    assert next(running)[0].shape == (10, 3, HEIGHT, WIDTH)  # as it began
    assert next(iter(loader))[0].shape == (4, 3, 5, 6)
    loader.set_resolution(None)
    assert next(iter(loader))[0].shape == (4, 3, HEIGHT, WIDTH)
    for call in (loader.set_batch_size, loader.set_resolution, loader.set_epoch):
        with pytest.raises(ValueError, match="-1"):
            call(-1)


@pytest.mark.parametrize(("padding", "size"), [(2, None), (0, (4, 7)), (3, 5)])
@pytest.mark.parametrize("flip", [False, True])
def test_crop_and_flip_against_brute_force(padding, size, flip):
    loader = raw(padding=padding, crop_size=size, flip=flip)
    padded = functional.pad(IMAGES, (padding,) * 4)
    windows = padded.unfold(2, loader.crop_size[0], 1).unfold(3, loader.crop_size[1], 1)
    used = set()
    for result, which in zip(*epoch(loader), strict=True):
        seen = (result * 255).round().byte()
        found = {
            (*place, mirrored)
            for mirrored in {False, flip}
            for place in (windows[which] == (seen.flip(-1) if mirrored else seen)[:, None, None])
            .all(-1).all(-1).all(0).nonzero().tolist()
        }  # fmt: skip
        assert len(found) == 1  # exactly one crop of its own image
        used |= found
    assert {mirrored for *_, mirrored in used} == {False, flip}
    assert len({place[:2] for place in used}) > N // 3


def test_the_callers_default_device_plays_no_part(tmp_path):
    def made():
        kept, left = load("flowers5", write(tmp_path, class_files())).train.parted(3)
        augmented = TensorLoader(kept.images, kept.labels, 2, **MOVED)
        patches = PatchLoader(left.images, left.images, 2, patch=4, augment=True)
        return [*epoch(augmented), *epoch(patches), noisy(left.images, 0.1, 0)]

    with torch.device("meta"):
        inside = made()
    assert all(map(torch.equal, inside, made()))


def test_masks_follow_their_images():
    pixels, cut = epoch(raw(MASKS, crop_size=8, **MOVED))
    assert cut.dtype == torch.int64 and cut.shape == (N, 8, 8)
    assert torch.equal(cut, (pixels[:, 0] * 255).round().long() // 3)


def test_resolution_of_images_and_masks():
    pixels, resized = epoch(raw(MASKS, shuffle=False, resolution=(5, 6)))
    options = {"mode": "bilinear", "antialias": True, "align_corners": False}
    expected = functional.interpolate(IMAGES.float() / 255, (5, 6), **options)
    assert torch.allclose(pixels, expected, atol=1e-5)
    rows = [int((i + 0.5) * HEIGHT / 5) for i in range(5)]
    columns = [int((i + 0.5) * WIDTH / 6) for i in range(6)]
    assert torch.equal(resized, MASKS[:, rows][:, :, columns].long())


def test_statistics_and_normalisation():
    mean, std = channel_statistics(IMAGES)
    scaled = IMAGES.double() / 255
    assert np.allclose(mean, scaled.mean((0, 2, 3)))
    assert np.allclose(std, scaled.std((0, 2, 3), correction=0))
    pixels, _ = epoch(TensorLoader(IMAGES, LABELS, 8))
    assert pixels.dtype == torch.float32
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(pixels.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: expected an int, at least 1"),
        ({"resolution": 4}, r"resolution=4 would squash crops of 9x11 pixels .* a pair"),
        ({"padding": -1}, "padding=-1: expected an int, at least 0"),
        ({"crop": "left"}, "'random' or 'center'"),
        ({"crop_size": 12}, "does not fit"),
        ({"mean": (0.5,)}, "each of the 3 channels"),
        ({"std": (0.5, float("nan"), 0.5)}, r"std=\(0.5, nan, 0.5\): expected a finite"),
        *(({"images": torch.full_like(IMAGES, v)}, "constant images have 0") for v in (0, 1, 251)),
        ({"images": IMAGES.float()}, "expected uint8"),
        ({"targets": LABELS[:-1]}, r"of shape \(36,\); expected int64 labels"),
        ({"targets": MASKS[:, 1:]}, r"masks \(N, H, W\) for images"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TensorLoader(**{"images": IMAGES, "targets": LABELS, "batch_size": 4} | change)


@pytest.mark.gpu
def test_the_same_batches_on_an_accelerator_without_a_wait(device, no_waits):
    here, there = (raw(MASKS, crop_size=8, device=where, **MOVED) for where in ("cpu", device))
    for a, b in zip(epoch(here), epoch(there), strict=True):
        assert b.device == device and torch.allclose(a.float(), b.cpu().float(), atol=1e-6)
    with no_waits():
        assert epoch(there)


@pytest.mark.gpu
def test_batches_made_ahead_are_the_loaders_in_pinned_memory(device):
    plain, ahead = raw(MASKS, **MOVED), Ahead(raw(MASKS, **MOVED), device)
    for _ in range(2):  # epochs
        for made, wanted in zip(ahead, plain, strict=True):
            assert all(map(torch.equal, made, wanted))
            assert all(tensor.is_pinned() for tensor in made)
    for _ in ahead:
        break  # its thread ends with the loop
    assert all(not thread.name.startswith("batches") for thread in threading.enumerate())

    def failing():
        yield torch.zeros(2), torch.zeros(2)
        raise OSError("the disk is gone")

    batches = iter(Ahead(failing(), device))
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_for_a_cpu_a_loaders_batches_are_passed_on():
    batches = [(torch.zeros(2), torch.zeros(2))]
    assert next(iter(Ahead(batches, "cpu"))) is batches[0]
    with pytest.raises(TypeError):  # not the end of the epoch
        list(Ahead([None, *batches], "cpu", always=True))
    with pytest.raises(ValueError, match="count=0: expected an int"):
        Ahead(batches, "cpu", count=0)
