import threading

import numpy as np
import pytest
import torch
from torch.nn import functional

from repro.datasets import Ahead, TensorLoader, channel_statistics

N, HEIGHT, WIDTH = 37, 9, 11


@pytest.fixture(scope="module")
def images():
    return torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (N, 3, HEIGHT, WIDTH), np.uint8)
    )


@pytest.fixture(scope="module")
def labels():
    return torch.arange(N)  # each label names its image


@pytest.fixture(scope="module")
def masks(images):
    return images[:, 0] // 3  # a function of the image, pixel by pixel


def raw(images, targets, batch_size=8, **options):
    """A loader whose batches are pixels / 255."""
    return TensorLoader(images, targets, batch_size, mean=(0,) * 3, std=(1,) * 3, **options)


def epoch(loader):
    batches = list(loader)
    return torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 8, 37, 50])
def test_batches_cover_the_data_once(images, labels, batch_size, drop_last):
    if drop_last and batch_size > N:
        with pytest.raises(ValueError, match="leaves no batch"):
            TensorLoader(images, labels, batch_size, drop_last=drop_last)
        return
    loader = raw(images, labels, batch_size, drop_last=drop_last)
    sizes = [len(y) for _, y in loader]
    assert len(sizes) == len(loader)
    full, rest = divmod(N, batch_size)
    assert sizes == [batch_size] * full + [rest] * (rest > 0 and not drop_last)
    pixels, seen = epoch(loader)
    assert len(seen.unique()) == len(seen) == sum(sizes)
    assert torch.allclose(pixels * 255, images[seen].float(), atol=1e-3)


def test_without_shuffling_the_order_is_that_of_the_data(images, labels):
    assert torch.equal(epoch(raw(images, labels, shuffle=False))[1], labels)


def test_order_is_a_function_of_seed_and_epoch(images, labels):
    options = {"padding": 2, "flip": True}
    first, second = raw(images, labels, seed=5, **options), raw(images, labels, seed=5, **options)
    epochs = [epoch(first) for _ in range(3)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    second.set_epoch(2)
    pixels, seen = epoch(second)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(pixels, epochs[2][0]) and torch.equal(seen, epochs[2][1])
    assert second.epoch == 3
    assert not torch.equal(epochs[0][1], epochs[1][1])
    assert not torch.equal(epoch(raw(images, labels, seed=6, **options))[1], epochs[0][1])


def test_augmentation_does_not_depend_on_batch_size(images, labels):
    options = {"padding": 2, "flip": True}
    small = epoch(raw(images, labels, 3, **options))
    large = epoch(raw(images, labels, 20, **options))
    assert torch.equal(small[0], large[0]) and torch.equal(small[1], large[1])


def test_set_batch_size_and_resolution_between_epochs(images, labels):
    loader = raw(images, labels, 10)
    running = iter(loader)
    assert len(next(running)[1]) == 10
    loader.set_batch_size(4)
    loader.set_resolution((5, 6))
    assert len(loader) == 10
    assert next(iter(running))[0].shape == (10, 3, HEIGHT, WIDTH)  # as it began
    assert next(iter(loader))[0].shape == (4, 3, 5, 6)
    loader.set_resolution(None)
    assert next(iter(loader))[0].shape == (4, 3, HEIGHT, WIDTH)


def slow(image, padding, mode, corner, size, mirrored):
    """One image, by numpy: the independent implementation."""
    image = image.numpy()
    pads = ((0, 0), (padding, padding), (padding, padding))
    image = np.pad(image, pads, mode="constant" if mode == "zeros" else "reflect")
    top, left = corner
    image = image[:, top : top + size[0], left : left + size[1]]
    return image[:, :, ::-1] if mirrored else image


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize(("padding", "size"), [(2, None), (0, (4, 7)), (3, 5), (0, None)])
@pytest.mark.parametrize("flip", [False, True])
def test_crop_and_flip_against_brute_force(images, labels, mode, padding, size, flip):
    loader = raw(images, labels, padding=padding, padding_mode=mode, crop_size=size, flip=flip)
    pixels, seen = epoch(loader)
    cut = loader.crop_size
    used = set()
    for result, which in zip((pixels * 255).round().byte(), seen, strict=True):
        found = {
            (top, left, mirrored)
            for top in range(HEIGHT + 2 * padding - cut[0] + 1)
            for left in range(WIDTH + 2 * padding - cut[1] + 1)
            for mirrored in {False, flip}
            if np.array_equal(
                slow(images[which], padding, mode, (top, left), cut, mirrored), result
            )
        }
        # Exactly one crop of its own image; reflection makes some windows their own mirror image.
        assert len(found) == 1 or (found and mode == "reflect")
        used |= found
    if flip:
        assert {mirrored for *_, mirrored in used} == {False, True}
    if padding or size:
        assert len({place[:2] for place in used}) > N // 3


def test_center_crop(images, labels):
    pixels, seen = epoch(raw(images, labels, crop="center", crop_size=(5, 5)))
    assert torch.allclose(pixels * 255, images[seen, :, 2:7, 3:8].float(), atol=1e-3)


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_masks_follow_their_images(images, masks, mode):
    loader = raw(images, masks, padding=2, padding_mode=mode, crop_size=8, flip=True)
    pixels, cut = epoch(loader)
    assert cut.dtype == torch.int64 and cut.shape == (N, 8, 8)
    assert torch.equal(cut, (pixels[:, 0] * 255).round().long() // 3)


def test_mask_fill(images, masks):
    loader = raw(images, torch.zeros_like(masks), padding=2, crop_size=(13, 15), mask_fill=7)
    _, cut = epoch(loader)
    assert (
        (cut[:, 2:-2, 2:-2] == 0).all() and (cut[:, :2] == 7).all() and (cut[..., -2:] == 7).all()
    )


def test_resolution_of_images_and_masks(images, masks):
    loader = raw(images, masks, shuffle=False, resolution=(5, 6))
    pixels, resized = epoch(loader)
    expected = functional.interpolate(
        images.float() / 255, (5, 6), mode="bilinear", antialias=True, align_corners=False
    )
    assert torch.allclose(pixels, expected, atol=1e-5)
    rows = [int((i + 0.5) * HEIGHT / 5) for i in range(5)]
    columns = [int((i + 0.5) * WIDTH / 6) for i in range(6)]
    assert torch.equal(resized, masks[:, rows][:, :, columns].long())


def test_statistics_and_normalisation(images, labels):
    mean, std = channel_statistics(images)
    scaled = images.double() / 255
    assert np.allclose(mean, scaled.mean((0, 2, 3)))
    assert np.allclose(std, scaled.std((0, 2, 3), correction=0))
    pixels, _ = epoch(TensorLoader(images, labels, 8))
    assert pixels.dtype == torch.float32
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(pixels.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)


def test_a_batch_stays_valid(images, labels):
    loader = raw(images, labels, 5, padding=2, flip=True)
    kept, copies = [], []
    for x, _ in loader:
        kept.append(x)
        copies.append(x.clone())
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    before = images.clone()
    kept[0].zero_()
    assert torch.equal(images, before)


def test_a_slice_of_a_larger_tensor(images, labels):
    for options in ({"padding": 1}, {"crop_size": 4}):
        part = raw(images[10:], labels[10:], **options)
        copied = raw(images[10:].clone(), labels[10:], **options)
        assert torch.equal(epoch(part)[0], epoch(copied)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: expected at least 1"),
        ({"batch_size": -3}, "batch_size=-3"),
        ({"batch_size": 2.5}, "batch_size=2.5: expected an int"),
        ({"resolution": 0}, "resolution=0"),
        ({"resolution": (4, 4, 4)}, "resolution="),
        ({"resolution": 4}, r"resolution=4 would squash crops of 9x11 pixels .* a pair"),
        ({"resolution": 4.5, "crop_size": 8}, "resolution=4.5: expected an int"),
        ({"seed": True}, "seed=True: expected an int"),
        ({"std": (0.5, float("nan"), 0.5)}, r"std=\(0.5, nan, 0.5\): expected finite"),
        ({"padding": -1}, "padding=-1"),
        ({"padding": 9, "padding_mode": "reflect"}, "at most 8"),
        ({"padding_mode": "wrap"}, "'zeros' or 'reflect'"),
        ({"crop": "left"}, "'random' or 'center'"),
        ({"crop_size": 12}, "does not fit"),
        ({"seed": -1}, "seed=-1"),
        ({"mean": (0.5,)}, "3 channels"),
        ({"std": (0.5, 0, 0.5)}, "expected positive"),
        ({"mask_fill": 256}, "0 to 255"),
    ],
)
def test_bad_options(images, labels, change, message):
    options = {"batch_size": 4, **change}
    with pytest.raises(ValueError, match=message):
        TensorLoader(images, labels, **options)


def test_numpys_numbers_are_numbers(images, labels):
    one, other = (
        raw(images, labels, kind(8), seed=kind(3), crop_size=kind(8), resolution=kind(5))
        for kind in (int, np.int16)
    )
    assert torch.equal(epoch(one)[0], epoch(other)[0])


def test_bad_data(images, labels, masks):
    for bad_images, bad_targets, message in [
        (images.float(), labels, "expected uint8"),
        (images[0], labels, "expected uint8"),
        (images[:0], labels[:0], "expected uint8"),
        (images, labels[:-1], "37 images but 36 targets"),
        (images, labels.int(), "expected int64 labels"),
        (images, masks[:, 1:], "of the images' size"),
        (images, masks.long(), "expected int64 labels"),
    ]:
        with pytest.raises(ValueError, match=message):
            TensorLoader(bad_images, bad_targets, 4)
    loader = TensorLoader(images, labels, 4)
    for call in (loader.set_batch_size, loader.set_resolution, loader.set_epoch):
        with pytest.raises(ValueError, match="-1"):
            call(-1)


@pytest.mark.gpu
def test_the_same_batches_on_an_accelerator(device, images, masks):
    options = {"padding": 2, "flip": True, "crop_size": 8}
    here, there = raw(images, masks, **options), raw(images, masks, device=device, **options)
    for a, b in zip(epoch(here), epoch(there), strict=True):
        assert b.device == device and torch.allclose(a.float(), b.cpu().float(), atol=1e-6)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_loader_on_the_device(device, no_waits, images, masks):
    loader = raw(images, masks, device=device, padding=2, flip=True, crop_size=8)
    epoch(loader)
    with no_waits():
        assert epoch(loader)


@pytest.mark.gpu
def test_batches_made_ahead_are_the_loaders_in_pinned_memory(device, images, masks):
    options = {"padding": 2, "flip": True}
    loader, plain = raw(images, masks, **options), raw(images, masks, **options)
    ahead = Ahead(loader, device)
    for _ in range(2):  # epochs
        made = list(ahead)
        assert all(tensor.is_pinned() for batch in made for tensor in batch)
        for one, other in zip(made, plain, strict=True):
            assert all(map(torch.equal, one, other))
    for _ in ahead:
        break  # its thread ends with the loop
    assert all(not thread.name.startswith("batches") for thread in threading.enumerate())


@pytest.mark.gpu
def test_an_error_of_a_loader_that_works_ahead_is_the_callers(device):
    def loader():
        yield torch.zeros(2), torch.zeros(2)
        raise OSError("the disk is gone")

    batches = iter(Ahead(loader(), device))
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_for_a_cpu_a_loaders_batches_are_passed_on():
    batches = [(torch.zeros(2), torch.zeros(2))]
    assert next(iter(Ahead(batches, "cpu"))) is batches[0]
    with pytest.raises(ValueError, match="count is 0"):
        Ahead(batches, "cpu", count=0)
