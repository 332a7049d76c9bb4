"""Phantom: the ellipses of Shepp and Logan, and how they are varied."""

import inspect

import numpy as np
import pytest
import torch
from skimage.data import shepp_logan_phantom

from repro.datasets import DatasetError, available, load
from repro.datasets.phantom import (
    ELLIPSES,
    SHAPES,
    SIZES,
    TURN,
    draw_ellipses,
    randomised,
)
from repro.datasets.phantom import phantom as make


def generator(seed):
    return np.random.Generator(np.random.PCG64(seed))


def test_unvaried_it_is_scikit_images():
    """scikit-image ships a drawing of Toft's phantom, 400 pixels a side, stored as a PNG."""
    wanted = shepp_logan_phantom()
    ours = draw_ellipses(ELLIPSES, 400)
    assert ours.shape == wanted.shape == (400, 400)
    assert np.abs(ours - wanted).max() <= 0.5 / 255 + 1e-9
    assert len(np.unique(np.rint(255 * ours))) == len(np.unique(np.rint(255 * wanted))) >= 5


def test_intensities_are_where_they_belong():
    image = draw_ellipses(ELLIPSES, 201)
    assert image[0, 0] == image[-1, -1] == 0  # outside
    assert image[100 - 91, 100] == pytest.approx(1.0)  # the skull, at y = 0.91
    assert image[100 - 35, 100] == pytest.approx(0.3)  # ellipse e
    assert image[100, 100 - 25] == pytest.approx(0.0)  # ellipse d, the left one
    assert image[100, 100 - 60] == pytest.approx(0.2)


def test_one_ellipse_by_its_area_and_turn():
    """Pixels inside, against π a b; turned by 90 degrees it is the transposed image."""
    lying = draw_ellipses(np.array([(0.5, 0.8, 0.3, 0.0, 0.0, 0.0)]), 401)
    assert set(np.unique(lying)) == {0.0, 0.5}
    assert (lying > 0).sum() * (2 / 400) ** 2 == pytest.approx(np.pi * 0.8 * 0.3, rel=0.01)
    turned = draw_ellipses(np.array([(0.5, 0.8, 0.3, 0.0, 0.0, 90.0)]), 401)
    assert (turned != lying.T).mean() < 1e-3
    # Positive degrees turn against the clock: the far end of a turned bar lies up and right.
    bar = draw_ellipses(np.array([(1.0, 0.8, 0.05, 0.0, 0.0, 45.0)]), 101)
    assert bar[50 - 25, 50 + 25] == 1 and bar[50 + 25, 50 + 25] == 0
    moved = draw_ellipses(np.array([(1.0, 0.1, 0.1, 0.5, 0.5, 0.0)]), 101)
    assert moved[25, 75] == 1 and moved[75, 25] == 0


def test_clipping_and_pairs():
    two = np.array([(0.8, 0.5, 0.5, 0, 0, 0), (0.8, 0.5, 0.5, 0, 0, 0)])
    assert draw_ellipses(two, 11).max() == 1.0
    assert draw_ellipses(-two, 11).min() == 0.0
    assert draw_ellipses(ELLIPSES, (9, 17)).shape == (9, 17)


def test_parameters_stay_in_their_ranges():
    drawn = np.stack([randomised(generator(seed)) for seed in range(500)])  # (500, 10, 6)
    assert np.array_equal(drawn[:, :, (0, 3, 4)], np.broadcast_to(ELLIPSES[:, (0, 3, 4)],
                                                                  (500, 10, 3)))  # fmt: skip
    axes = drawn[:, :, 1:3] / ELLIPSES[:, 1:3]
    size, ratio = np.sqrt(axes.prod(-1)), axes[..., 0] / axes[..., 1]
    turn = drawn[:, :, 5] - ELLIPSES[:, 5]
    for values, (low, high) in ((size, SIZES), (ratio, SHAPES), (turn, (-TURN, TURN))):
        assert values.min() >= low - 1e-12 and values.max() <= high + 1e-12
        span = high - low
        assert values.min() < low + 0.02 * span and values.max() > high - 0.02 * span
        # Each of the ten varies, and on its own.
        assert (values.std(0) > 0.2 * span).all()
        matrix = np.corrcoef(values.T) - np.eye(10)
        assert np.abs(matrix).max() < 0.25
    assert drawn[:, 0, 1:3].max() <= 1  # the head, the first ellipse, lies within the image


def test_all_ten_differ_between_images():
    first, second = randomised(generator(0)), randomised(generator(1))
    assert (first[:, (1, 2, 5)] != second[:, (1, 2, 5)]).all()
    assert not (first[:, (1, 2, 5)] == ELLIPSES[:, (1, 2, 5)]).any()


def test_seeds_and_sizes_of_the_set():
    small, large = make(24, train=3, test=2), make(24, train=5, test=4)
    again, other = make(24, train=3, test=2), make(24, train=3, test=2, seed=1)
    assert torch.equal(small.train.images, again.train.images)
    assert torch.equal(small.test.images, again.test.images)
    assert torch.equal(small.train.images, large.train.images[:3])
    assert torch.equal(small.test.images, large.test.images[:2])
    assert len({image.numpy().tobytes() for split in (large.train, large.test, other.train)
                for image in split.images}) == 12  # fmt: skip
    assert small.fingerprint == again.fingerprint
    prints = {data.fingerprint for data in (small, large, other, make((24, 16), train=3, test=2))}
    assert len(prints) == 4


def test_an_image_is_a_drawing_of_varied_ellipses():
    data = make(16, train=2, test=1, seed=7)
    for stream, split in ((1, data.train), (2, data.test)):
        for number, image in enumerate(split.images):
            drawn = draw_ellipses(randomised(generator([7, stream, number])), 16)
            assert np.array_equal(image[0].numpy(), np.rint(255 * drawn))


def test_what_it_is():
    data = load("phantom", image_size=(12, 20), train=2, test=1)
    assert data.image_shape == (1, 12, 20) and data.train.images.dtype == torch.uint8
    assert (data.name, data.kind, data.classes) == ("phantom", "synthetic", ())
    assert data.train.labels is data.train.masks is data.val is None
    for text in ("2 + 1 grey images of 12x20", "drawn at random, seed 0", "our choice"):
        assert text in data.provenance
    assert available()["phantom"] == "generated"


def test_the_defaults_are_the_papers():
    known = {name: p.default for name, p in inspect.signature(make).parameters.items()}
    assert known == {"image_size": None, "train": 1600, "test": 200, "seed": 0}
    assert make(train=1, test=1).image_shape == (1, 256, 256)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": 0}, "train=0: expected an int, at least 1"),
        ({"test": 2.0}, r"test=2\.0: expected an int, at least 1"),
        ({"train": True}, "train=True"),
        ({"seed": -1}, "seed=-1: expected an int, at least 0"),
        ({"image_size": 0}, "image_size=0"),
        ({"image_size": (8, 8, 8)}, "image_size="),
        ({"per_class": 2}, "per_class=2: not for 'phantom'"),
        ({"sigma": 0.1}, "takes no option sigma: its own options are seed, test, train"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(DatasetError, match=message):
        load("phantom", **options)
