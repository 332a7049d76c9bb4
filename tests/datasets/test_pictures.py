"""Photographs for super-resolution in every layout: lying, cut to one size, or resized."""

import io
import zipfile
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from dataset_files import encode, random_image, write
from PIL import Image

from repro._torchvision import torchvision
from repro.datasets import CorruptDatasetError, available, download, load, pictures

# Height and width of the pictures, some standing; the largest cut that all have is 10 x 14.
SIZES = {"train": [(12, 16), (18, 10), (10, 20)], "test": [(14, 11), (13, 15)]}
COMMON = (10, 14)
LAYOUTS = ("folder", "archive", "native")  # the last comes first in a search


def pixels(split, number):
    return random_image(100 * (split == "test") + number, *SIZES[split][number])


def files(layout, name="div2k"):
    """A set's files; natively DIV2K's own folders."""
    native = {split: f"div2k/{own}" for split, own in pictures.DIV2K.items()}
    return {
        f"{native[split] if layout == 'native' else f'{name}/{split}'}/{k:04d}.png": encode(
            pixels(split, k)
        )
        for split, sizes in SIZES.items()
        for k in range(len(sizes))
    }


def lying(image):
    """A standing picture is turned by a quarter, against the clock."""
    return np.rot90(image) if image.shape[0] > image.shape[1] else image


def cut(image, size=COMMON):
    top, left = ((have - want) // 2 for have, want in zip(image.shape, size, strict=False))
    return image[top : top + size[0], left : left + size[1]]


@pytest.mark.parametrize(
    ("layout", "name"),
    [*((layout, "div2k") for layout in LAYOUTS), ("archive", "bsds500"), ("folder", "bsds500")],
)
def test_every_layout(tmp_path, layout, name):
    root = write(tmp_path / "data", files(layout, name), layout == "archive")
    data = load(name, root)
    assert data.image_shape == (3, *COMMON) and data.train.images.dtype == torch.uint8
    assert (len(data.train), len(data.test), data.val, data.classes) == (3, 2, None, ())
    for split, images in (("train", data.train.images), ("test", data.test.images)):
        for number, image in enumerate(images):
            assert np.array_equal(image.permute(1, 2, 0), cut(lying(pixels(split, number))))
    assert data.train.labels is data.train.masks is None
    assert ("stand-in for DIV2K" in data.provenance) == (name == "bsds500")
    assert [other for other in ("div2k", "bsds500") if other in available(root)] == [name]


def test_the_order_of_the_search_and_a_validation_split(tmp_path):
    """Own folders before an archive, an archive before a folder of splits."""
    for layout, said in (("folder", "folder div2k"), ("archive", "archive div2k.tar.xz"),
                         ("native", "folders DIV2K_train_HR")):  # fmt: skip
        more = {"div2k/val/1.png": encode(random_image(9, 30, 30))} if layout == "archive" else {}
        write(tmp_path, files(layout) | more, layout == "archive")
        assert available(tmp_path)["div2k"].startswith(said)
        val = load("div2k", tmp_path).val
        assert val.images.shape == (1, 3, *COMMON) if more else val is None


@pytest.mark.parametrize("size", [8, (6, 9)])
def test_image_size(tmp_path, size):
    data = load("div2k", write(tmp_path, files("native"), False), image_size=size)
    height, width = (size, size) if isinstance(size, int) else size
    assert data.image_shape == (3, height, width)
    for number, image in enumerate(data.train.images):
        whole = Image.fromarray(np.ascontiguousarray(lying(pixels("train", number))))
        scaled = round(whole.width * size / whole.height) if size == 8 else width
        wanted = np.asarray(whole.resize((scaled, height), Image.Resampling.BILINEAR))
        assert np.array_equal(image.permute(1, 2, 0), cut(wanted, (height, width)))


def test_grey_and_jpeg_become_colour(tmp_path):
    grey = np.arange(120, dtype=np.uint8).reshape(10, 12)
    mixed = {"bsds500/train/a.png": encode(grey), "bsds500/test/c.png": encode(grey),
             "bsds500/train/b.jpg": encode(random_image(1, 10, 12), "JPEG")}  # fmt: skip
    data = load("bsds500", write(tmp_path, mixed, False))
    assert data.train.images.shape == (2, 3, 10, 12)
    assert torch.equal(data.train.images[0], torch.from_numpy(grey).expand(3, -1, -1))
    write(tmp_path, {"bsds500/test/c.png": encode(255 - grey)}, False)
    assert load("bsds500", tmp_path).fingerprint != data.fingerprint


@pytest.mark.parametrize("layout", ["native", "archive", "folder"])
def test_damaged_pictures_and_missing_splits(tmp_path, layout):
    packed, whole = layout == "archive", files(layout)
    bad = next(iter(whole))
    write(tmp_path, whole | {bad: whole[bad][: len(whole[bad]) // 2]}, packed)
    for size in (None, 8):
        with pytest.raises(CorruptDatasetError, match=r"0000\.png cannot be decoded"):
            load("div2k", tmp_path, image_size=size)
    for split, own in pictures.DIV2K.items():
        left = {k: v for k, v in whole.items() if f"/{split}/" not in k and own not in k}
        empty = tmp_path / split / "div2k" / (own if layout == "native" else split)
        if not packed:
            empty.mkdir(parents=True)
        with pytest.raises(CorruptDatasetError, match=r"no image of .*expected "):
            load("div2k", write(tmp_path / split, left, packed))
    assert not list((tmp_path / "cache").glob("*.pt"))


def test_a_download(tmp_path, monkeypatch):
    """What the network would give is put in its place by hand."""
    taken, archives, new = [], {}, tmp_path / "new"
    for part in pictures.DIV2K.values():
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for name, content in files("native").items():
                if name.startswith(f"div2k/{part}"):
                    archive.writestr(name.removeprefix("div2k/"), content)
        archives[part] = packed.getvalue()

    def give(url, root):
        taken.append(url)
        (Path(root) / Path(url).name).write_bytes(archives[Path(url).stem])

    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(torchvision.datasets.utils, "download_url", give)
    # What comes is not DIV2K, though a zip of the same layout: nothing of it stays.
    said = download(["div2k"], new)["div2k"]
    assert "SHA-256" in said and pictures._ARCHIVES["DIV2K_train_HR"] in said
    assert list((new / "div2k").iterdir()) == []
    expected = {part: sha256(content).hexdigest() for part, content in archives.items()}
    monkeypatch.setattr(pictures, "_ARCHIVES", expected)
    taken.clear()
    assert download(["div2k"], new)["div2k"].startswith("downloaded: folders DIV2K")
    assert [Path(url).stem for url in taken] == list(pictures.DIV2K.values())
    assert all(url.startswith("https://") for url in taken)
    assert sorted(path.name for path in (new / "div2k").iterdir()) == sorted(archives)
    assert load("div2k", new).image_shape == (3, *COMMON)
    assert download(["div2k"], new)["div2k"].startswith("present")
