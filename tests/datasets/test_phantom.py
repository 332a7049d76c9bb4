"""Phantom: the ellipses of Shepp and Logan, and how they are varied."""

import numpy as np
from skimage.data import shepp_logan_phantom

from repro.datasets.phantom import ELLIPSES, SHAPES, SIZES, TURN, draw_ellipses, randomised
from repro.datasets.phantom import phantom as make


def generator(seed):
    return np.random.Generator(np.random.PCG64(seed))


def test_unvaried_it_is_scikit_images():
    """scikit-image ships a drawing of Toft's phantom, 400 pixels a side, stored as a PNG."""
    wanted, ours = shepp_logan_phantom(), draw_ellipses(ELLIPSES, 400)
    assert ours.shape == wanted.shape == (400, 400)
    assert np.abs(ours - wanted).max() <= 0.5 / 255 + 1e-9
    assert len(np.unique(np.rint(255 * ours))) == len(np.unique(np.rint(255 * wanted))) >= 5


def test_parameters_stay_in_their_ranges():
    drawn = np.stack([randomised(generator(seed)) for seed in range(500)])  # (500, 10, 6)
    fixed = drawn[:, :, (0, 3, 4)]
    assert np.array_equal(fixed, np.broadcast_to(ELLIPSES[:, (0, 3, 4)], fixed.shape))
    axes = drawn[:, :, 1:3] / ELLIPSES[:, 1:3]
    size, ratio = np.sqrt(axes.prod(-1)), axes[..., 0] / axes[..., 1]
    turn = drawn[:, :, 5] - ELLIPSES[:, 5]
    for values, (low, high) in ((size, SIZES), (ratio, SHAPES), (turn, (-TURN, TURN))):
        assert values.min() >= low - 1e-12 and values.max() <= high + 1e-12
        assert (values.std(0) > 0.2 * (high - low)).all()  # each of the ten varies, on its own
        assert np.abs(np.corrcoef(values.T) - np.eye(10)).max() < 0.25
    assert drawn[:, 0, 1:3].max() <= 1  # the head, the first ellipse, lies within the image


def test_an_image_is_a_drawing_of_varied_ellipses_from_its_seed_and_number():
    small, large = make(16, train=2, test=1, seed=7), make(16, train=4, test=3, seed=7)
    for data in (small, large):
        for stream, split in ((1, data.train), (2, data.test)):
            for number, image in enumerate(split.images):
                drawn = draw_ellipses(randomised(generator([7, stream, number])), 16)
                assert np.array_equal(image[0].numpy(), np.rint(255 * drawn))
    assert len({image.numpy().tobytes() for split in (large.train, large.test)
                for image in split.images}) == 7  # fmt: skip
    again, other = make(16, train=2, test=1, seed=7), make((16, 12), train=2, test=1, seed=7)
    prints = {data.fingerprint for data in (small, large, other, make(16, train=2, test=1))}
    assert len(prints) == 4 and again.fingerprint == small.fingerprint
