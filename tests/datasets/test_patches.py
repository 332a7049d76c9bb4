"""Aligned patches of inputs and targets, and how inputs are made."""

import numpy as np
import pytest
import torch
from PIL import Image

from repro.datasets import DatasetError, PatchLoader, low_resolution, noisy

HEIGHT, WIDTH = 9, 12


def images(count, channels=3, height=HEIGHT, width=WIDTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (count, channels, height, width)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


def coded(count, scale):
    """Pixels that say whose they are, and where: number, row and column, of 1 or of s x s each."""
    inputs = torch.empty(count, 3, HEIGHT, WIDTH, dtype=torch.uint8)
    inputs[:, 0] = torch.arange(count)[:, None, None]
    inputs[:, 1] = torch.arange(HEIGHT)[:, None]
    inputs[:, 2] = torch.arange(WIDTH)
    return inputs, inputs.repeat_interleave(scale, 2).repeat_interleave(scale, 3)


def whole(tensor):
    return (255 * tensor).round().to(torch.uint8)


def epoch(loader):
    """Return the inputs and targets of an epoch as pixels."""
    parts = list(loader)
    return [whole(torch.cat(part)) for part in zip(*parts, strict=True)]


def symmetries(image):
    """All eight ways in which a square (C, H, W) can be mirrored and turned."""
    for turned in (torch.rot90(image, k, (1, 2)) for k in range(4)):
        yield turned
        yield turned.flip(-1)


class TestPatches:
    @pytest.mark.parametrize("augment", [False, True])
    @pytest.mark.parametrize("scale", [1, 2, 3, 4])
    def test_targets_shrink_to_their_inputs(self, scale, augment):
        loader = PatchLoader(*coded(13, scale), 5, patch=4, seed=3, augment=augment)
        for _ in range(3):
            for inputs, targets in loader:
                assert inputs.dtype == targets.dtype == torch.float32
                assert inputs.shape[1:] == (3, 4, 4) and targets.shape[1:] == (
                    3,
                    4 * scale,
                    4 * scale,
                )
                assert inputs.is_contiguous()
                torch.testing.assert_close(targets[..., ::scale, ::scale], inputs, rtol=0, atol=0)
                torch.testing.assert_close(
                    torch.nn.functional.avg_pool2d(targets, scale), inputs, rtol=0, atol=1e-6
                )

    def test_pixels_inside_a_cell_keep_their_places(self):
        """Inputs name the cell; targets the place inside it: rows 0 to 2, columns 0 to 2."""
        inputs, _ = coded(4, 3)
        rows = torch.arange(3 * HEIGHT)[:, None].expand(-1, 3 * WIDTH)
        columns = torch.arange(3 * WIDTH).expand(3 * HEIGHT, -1)
        targets = torch.stack([rows, columns]).to(torch.uint8).expand(4, -1, -1, -1)
        for inputs_, targets_ in PatchLoader(inputs, targets, 4, patch=5, seed=1):
            top, left = (whole(inputs_[:, c, 0, 0]).long() for c in (1, 2))
            for n in range(4):
                assert whole(targets_[n, 0, :, 0]).tolist() == list(
                    range(3 * top[n], 3 * top[n] + 15)
                )
                assert whole(targets_[n, 1, 0]).tolist() == list(
                    range(3 * left[n], 3 * left[n] + 15)
                )

    @pytest.mark.parametrize("batch_size", [1, 5, 13, 40])
    def test_every_image_once_and_the_batch_size_changes_nothing(self, batch_size):
        inputs, targets = coded(13, 2)
        loader = PatchLoader(inputs, targets, batch_size, patch=4, seed=2)
        assert len(loader) == -(-13 // batch_size)
        found = epoch(loader)
        assert sorted(found[0][:, 0, 0, 0].tolist()) == list(range(13))
        for ours, other in zip(found, epoch(PatchLoader(inputs, targets, 13, patch=4, seed=2)),
                               strict=True):  # fmt: skip
            assert torch.equal(ours, other)

    @pytest.mark.parametrize("batch_size", [1, 5, 13])
    def test_nor_does_it_change_the_augmentation(self, batch_size):
        data = images(13), images(13, 3, 2 * HEIGHT, 2 * WIDTH)
        ours = epoch(PatchLoader(*data, batch_size, patch=4, seed=2, augment=True))
        other = epoch(PatchLoader(*data, 8, patch=4, seed=2, augment=True))
        assert torch.equal(ours[0], other[0]) and torch.equal(ours[1], other[1])

    def test_seeds_and_epochs(self):
        data = coded(13, 2)

        def found(seed, number):
            loader = PatchLoader(*data, 4, patch=4, seed=seed, augment=True)
            loader.set_epoch(number)
            torch.manual_seed(number)  # of no importance
            before = torch.get_rng_state()
            pixels = epoch(loader)[0]
            assert torch.equal(torch.get_rng_state(), before)
            assert loader.epoch == number + 1
            return pixels

        first = found(0, 0)
        assert torch.equal(found(0, 0), first)
        assert not torch.equal(found(0, 1), first) and not torch.equal(found(1, 0), first)
        loader = PatchLoader(*data, 4, patch=4, augment=True)
        assert torch.equal(epoch(loader)[0], first)
        assert torch.equal(epoch(loader)[0], found(0, 1))  # epochs count on

    def test_all_places_are_cut(self):
        inputs, targets = coded(13, 1)
        loader = PatchLoader(inputs, targets, 13, patch=5, seed=0)
        corners = {tuple(image[1:, 0, 0].tolist()) for _ in range(40) for image in epoch(loader)[0]}
        assert corners == {(y, x) for y in range(HEIGHT - 4) for x in range(WIDTH - 4)}

    def test_the_centre(self):
        inputs, targets = coded(6, 2)
        loader = PatchLoader(inputs, targets, 4, patch=4, shuffle=False, crop="center")
        for _ in range(2):
            cut, large = epoch(loader)
            assert torch.equal(cut, inputs[..., 2:6, 4:8])
            assert torch.equal(large, targets[..., 4:12, 8:16])

    def test_a_whole_image_is_a_patch_too(self):
        inputs, targets = images(3, 1, 6, 6), images(3, 2, 12, 12, seed=1)
        found = epoch(PatchLoader(inputs, targets, 2, patch=6, shuffle=False))
        assert torch.equal(found[0], inputs) and torch.equal(found[1], targets)

    def test_the_batch_size_between_epochs_and_within(self):
        loader = PatchLoader(*coded(12, 1), 4, patch=4)
        batches = iter(loader)
        assert len(next(batches)[0]) == 4
        loader.set_batch_size(6)
        assert loader.batch_size == 6 and len(loader) == 2
        assert [len(x) for x, _ in batches] == [4, 4]
        assert [len(x) for x, _ in loader] == [6, 6]
        loader.set_batch_size(5)
        assert [len(x) for x, _ in loader] == [5, 5, 2]
        assert len(PatchLoader(*coded(12, 1), 5, patch=4, drop_last=True)) == 2


class TestAugmentation:
    def test_one_of_eight_symmetries_and_the_same_for_both(self):
        inputs = images(40, 2, 6, 6)
        targets = images(40, 1, 12, 12, seed=1)
        seen = []
        loader = PatchLoader(inputs, targets, 16, patch=6, shuffle=False, augment=True)
        for _ in range(5):
            for n, (small, large) in enumerate(zip(*epoch(loader), strict=True)):
                (which,) = [i for i, s in enumerate(symmetries(inputs[n])) if torch.equal(s, small)]
                assert torch.equal(list(symmetries(targets[n]))[which], large)
                seen.append(which)
        counts = np.bincount(seen, minlength=8)
        assert len(counts) == 8 and counts.min() >= 10 and counts.max() <= 45  # 25 of 200 each

    def test_the_draws_are_made_once_per_epoch(self, monkeypatch):
        """All at its start: nothing is drawn, and copied to a device, per mini-batch."""
        loader = PatchLoader(*coded(13, 2), 2, patch=4, seed=1, augment=True)
        made, randint = [], torch.randint

        def counted(*args, **options):
            made.append(args)
            return randint(*args, **options)

        monkeypatch.setattr(torch, "randint", counted)
        for _ in range(2):
            made.clear()
            batches = iter(loader)
            before = len(made)
            assert any(args[:2] == (2, (3, 13, 1, 1, 1)) for args in made)
            assert len(list(batches)) == 7
            assert [args for args in made[before:] if args[0] == 2] == []

    def test_the_batch_size_of_the_epoch_decides_whose_draws_they_are(self):
        data = coded(13, 2)
        wanted = epoch(PatchLoader(*data, 3, patch=4, seed=1, augment=True))[0]
        loader = PatchLoader(*data, 3, patch=4, seed=1, augment=True)
        batches = iter(loader)
        found = [next(batches)[0]]
        loader.set_batch_size(5)  # of the next epoch
        assert torch.equal(whole(torch.cat(found + [x for x, _ in batches])), wanted)

    def test_none_without_asking(self):
        inputs = images(20, 1, 6, 6)
        found, _ = epoch(PatchLoader(inputs, inputs, 8, patch=6, shuffle=False))
        assert torch.equal(found, inputs)

    def test_the_places_do_not_depend_on_it(self):
        data = coded(13, 2)
        plain, turned = (
            epoch(PatchLoader(*data, 5, patch=4, seed=1, augment=a))[0] for a in (False, True)
        )
        assert torch.equal(plain.flatten(2).sort().values, turned.flatten(2).sort().values)
        assert not torch.equal(plain, turned)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4, 3, 17, 24), {}, r"inputs \(4, 3, 9, 12\) and targets \(4, 3, 17, 24\): expected as"),
        ((4, 3, 18, 36), {}, "the same whole multiple"),
        ((4, 3, 9, 6), {}, "the same whole multiple"),
        ((5, 3, 18, 24), {}, "as many targets"),
        ((4, 3, 18, 24), {"patch": 10}, r"crop_size=\(10, 10\) does not fit"),
        ((4, 3, 18, 24), {"patch": 0}, "crop_size=0: expected at least 1"),
        ((4, 3, 18, 24), {"seed": -1}, "seed=-1"),
        ((4, 3, 18, 24), {"batch_size": 0}, "batch_size=0"),
        ((4, 3, 18, 24), {"batch_size": 5, "drop_last": True}, "leaves no batch"),
        ((4, 3, 18, 24), {"crop": "middle"}, "crop='middle'"),
    ],
)
def test_wrong_arguments(shape, options, message):
    targets = torch.zeros(shape, dtype=torch.uint8)
    given = {"batch_size": 2, "patch": 4} | options
    with pytest.raises(ValueError, match=message):
        PatchLoader(images(4), targets, **given)


def test_wrong_settings_later():
    loader = PatchLoader(*coded(4, 2), 2, patch=4)
    with pytest.raises(ValueError, match="batch_size=0"):
        loader.set_batch_size(0)
    with pytest.raises(ValueError, match="epoch=-1"):
        loader.set_epoch(-1)
    assert (loader.batch_size, loader.epoch) == (2, 0)


class TestLowResolution:
    @pytest.mark.parametrize("scale", [2, 3, 4])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_as_pil_shrinks_it(self, scale, channels):
        large = images(19, channels, 24, 36)
        small = low_resolution(large, scale)
        assert (
            small.shape == (19, channels, 24 // scale, 36 // scale) and small.dtype == torch.uint8
        )
        for image, ours in zip(large, small, strict=True):
            for plane, own in zip(image, ours, strict=True):
                wanted = Image.fromarray(plane.numpy()).resize(
                    (36 // scale, 24 // scale), Image.Resampling.BICUBIC
                )
                # PIL rounds after each direction.
                gap = np.abs(np.asarray(wanted).astype(int) - own.numpy())
                assert gap.max() <= 2 and (gap > 1).mean() < 0.01

    def test_what_shrinking_keeps(self):
        constant = torch.arange(0, 250, 10, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
        assert torch.equal(low_resolution(constant, 2), constant[..., :4, :4])
        some = images(5)
        assert torch.equal(low_resolution(some, 1), some)
        ramp = torch.arange(0, 240, 5, dtype=torch.uint8).expand(1, 1, 48, 48)
        inner = low_resolution(ramp, 2)[..., 4:-4].float()
        centres = (ramp[..., ::2].float() + ramp[..., 1::2].float()) / 2
        assert (inner - centres[..., :24, 4:-4]).abs().max() <= 0.5 + 1e-4

    def test_rest_rows_and_columns_are_left_out(self):
        large = images(2, 3, 11, 14)
        assert torch.equal(low_resolution(large, 4), low_resolution(large[..., :8, :12], 4))

    def test_values_stay_in_range(self):
        edges = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
        edges[..., 8:] = 255
        small = low_resolution(edges, 2)  # bicubic would over- and undershoot, and wrap
        assert small[..., 0, 0] == 0 and small[..., 0, -1] == 255
        assert (small[0, 0, 0].int().diff() >= 0).all()

    @pytest.mark.parametrize("scale", [0, -1, 10])
    def test_wrong_scales(self, scale):
        with pytest.raises(DatasetError, match=f"scale={scale} for images of 9x12: give 1 to"):
            low_resolution(images(1), scale)


class TestNoise:
    def test_mean_and_deviation(self):
        grey = torch.full((40, 1, 64, 64), 128, dtype=torch.uint8)
        gap = noisy(grey, 0.1, 5).float() - 128
        # Rounding adds a variance of a twelfth.
        assert float(gap.std()) == pytest.approx((25.5**2 + 1 / 12) ** 0.5, rel=0.01)
        assert abs(float(gap.mean())) < 0.3
        flat = gap.flatten(1)
        assert np.abs(np.corrcoef(flat.numpy()) - np.eye(40)).max() < 0.1  # images differ

    def test_the_seed_alone_decides(self):
        some = images(20)
        before = torch.get_rng_state()
        first = noisy(some, 0.1, 0)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(5)
        assert torch.equal(noisy(some, 0.1, 0), first) and first.dtype == torch.uint8
        assert not torch.equal(noisy(some, 0.1, 1), first)
        grey = torch.full_like(some, 100)
        assert torch.equal(noisy(grey, 0.01, 3).int() - 100,
                           noisy(grey + 50, 0.01, 3).int() - 150)  # fmt: skip

    def test_clipped_not_wrapped(self):
        black = torch.zeros(4, 1, 32, 32, dtype=torch.uint8)
        dark, bright = noisy(black, 0.1, 0), noisy(black + 255, 0.1, 0)
        assert dark.max() < 150 and bright.min() > 105
        assert (dark == 0).float().mean() == pytest.approx(0.5, abs=0.05)

    def test_none(self):
        some = images(3)
        assert torch.equal(noisy(some, 0.0, 0), some)

    @pytest.mark.parametrize("sigma", [-0.1, float("nan")])
    def test_wrong_sigma(self, sigma):
        with pytest.raises(DatasetError, match=f"sigma={sigma}: expected at least 0"):
            noisy(images(1), sigma, 0)
