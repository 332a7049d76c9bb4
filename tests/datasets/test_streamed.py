"""Data of a training: images that stay encoded give the mini-batches of those in memory."""

import struct

import numpy as np
import pytest
import torch
from dataset_files import encode, random_image, write_folder
from torch import nn

from repro.datasets import CorruptDatasetError, StreamedImages, catalogue, embedded, load, sources
from repro.datasets.decoding import Item, decode
from repro.dualbatch import Share
from repro.experiments.captured import low_precision
from repro.experiments.dualbatch.building import TrainingData

PLAN = {"a": 1.0, "b": 0.0, "k": 1.0, "n_small": 0, "n_large": 2, "large_batch": 3}


@pytest.fixture(params=["val", "test"])
def root(tmp_path, request):
    """ImageNet as torchvision unpacks it, and as plain folders of classes."""
    for s, split in enumerate(("train", request.param)):
        for k, wnid in enumerate(("n01", "n02")):
            images = (encode(random_image(100 * s + 10 * k + i, 19, 23), "JPEG") for i in range(6))
            folder = f"imagenet/{split}/{wnid}/{wnid}"
            write_folder(tmp_path, {f"{folder}_{i}.JPEG": one for i, one in enumerate(images)})
    if request.param == "val":
        names = {"n01": ("tench", "Tinca"), "n02": ("shark",)}
        torch.save((names, ["n01"] * 4), tmp_path / "imagenet" / "meta.bin")
    return tmp_path


@pytest.fixture
def both(root, monkeypatch):
    whole = load("imagenet", root, image_size=16)
    monkeypatch.setattr(catalogue, "MEMORY_SHARE", 1e-12)
    return whole, load("imagenet", root, image_size=16)


def test_beyond_the_memory_images_stay_encoded(both, root):
    whole, encoded = both
    named = (root / "imagenet" / "meta.bin").exists()
    assert whole.classes == encoded.classes == (("tench", "shark") if named else ("n01", "n02"))
    assert whole.record_name == ("imagenet" if named else "imagenet-jpeg")
    assert load("imagenet", root, image_size=16, per_class=1).train.labels.tolist() == [0, 1]
    assert isinstance(encoded.train.images, StreamedImages)
    assert encoded.train.images.shape == whole.train.images.shape == (12, 3, 16, 16)
    assert encoded.train.images.decoded().equal(whole.train.images)
    assert encoded.train.labels.equal(whole.train.labels)
    some = encoded.train.evenly(5)
    assert isinstance(some.images, StreamedImages)
    assert some.images.decoded().equal(whole.train.evenly(5).images)
    of_one = whole.train.labels == 1
    for index in (of_one, slice(9, 12)):
        assert encoded.train.images[index].decoded().equal(whole.train.images[index])
    assert encoded.fingerprint == whole.fingerprint
    assert "decoded as they are needed" in encoded.provenance
    (root / "imagenet/train/n01/n01_2.JPEG").write_bytes(b"nothing")
    with pytest.raises(CorruptDatasetError, match="n01_2"):
        encoded.train.images[torch.tensor([0, 2])].decoded()


def test_folders_are_listed_once(root):
    source = sources.find("imagenet", root)
    source.content(1)
    assert source.listing(None)[1] is source.listing(None)[1]


@pytest.mark.parametrize("samples", [12, 8])
def test_mini_batches_and_evaluation_are_those_of_memory(both, samples):
    config = {
        "augment": {"padding": 2, "flip": True},
        "sub_stages": [{"resolution": 8, "dropout": None, "plan": PLAN | {"samples": samples}}],
        "test_samples": 11,
        "stages": [[1, 0.1]],
        "autocast": None,
    }
    assert low_precision(config) is None
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    share, found = Share(torch.tensor([3, 0, 7, 5]), 3, 8, 1), []
    for data in both:
        images = TrainingData(config, data, "cpu")
        found.append((list(images(share)), images.evaluation(config, "cpu")))
    for (ours, labels), (plain, wanted) in zip(found[1][0], found[0][0], strict=True):
        assert ours.equal(plain) and labels.equal(wanted) and ours.shape[2:] == (8, 8)
    assert found[0][1](model) == found[1][1](model)


SHADES = np.array([[0, 272, 30_000, 65_535]] * 4, np.uint16)


def tiff_of_12_bits() -> bytes:
    """SHADES, of which two pixels lie in three bytes."""
    tags = {256: 4, 257: 4, 258: 12, 259: 1, 262: 1, 266: 1, 273: 134, 277: 1, 278: 4, 279: 24}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    head = struct.pack("<4sIH", b"II*\0", 8, len(tags)) + entries + bytes(4)
    bits = "".join(f"{shade >> 4:012b}" for shade in SHADES.flatten().tolist())
    return head + int(bits, 2).to_bytes(24, "big")


GREY = {
    "PNG": encode(SHADES),
    "TIFF": encode(SHADES, "TIFF"),
    "TIFF of 12 bits": tiff_of_12_bits(),
    "TIFF, 0 is white": encode(65_535 - SHADES, "TIFF").replace(
        struct.pack("<HHII", 262, 3, 1, 1), struct.pack("<HHII", 262, 3, 1, 0)
    ),
    "PGM": b"P5 4 4 65535\n" + SHADES.astype(">u2").tobytes(),
    "PGM of 12 bits": b"P5 4 4 4095\n" + (SHADES >> 4).astype(">u2").tobytes(),
}


@pytest.mark.parametrize("kind", GREY)
def test_grey_of_more_than_8_bits_keeps_its_shades(kind):
    images = decode([Item("grey", GREY[kind], label=0)], None).images
    assert images[0, :, 0].tolist() == [[0, 1, 116, 255]] * 3


def test_a_photograph_of_16_bits_keeps_its_shades(tmp_path, monkeypatch):
    ramp = np.tile(np.arange(100, dtype=np.uint16) * 600, (80, 1))
    (tmp_path / "ramp.png").write_bytes(encode(ramp))
    monkeypatch.setattr(embedded, "PHOTOGRAPHS", {"ramp": str(tmp_path / "ramp.png")})
    data = load("photos", image_size=16, train_per_class=4, test_per_class=1)
    assert 16 <= len(data.train.images.unique()) <= 70


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_grey_without_a_known_largest_value_is_refused(dtype):
    encoded = encode(SHADES.astype(dtype), "TIFF")
    with pytest.raises(CorruptDatasetError, match="grey of 8, 12 or 16 bits is read"):
        decode([Item("grey", encoded, label=0)], None)
