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
from repro.datasets import available, download, load, pictures

# Height and width of the pictures, some standing; the largest cut that all have is 10 x 14.
SIZES = {"train": [(12, 16), (18, 10), (10, 20)], "test": [(14, 11), (13, 15)]}
COMMON = (10, 14)


def pixels(split, number):
    return random_image(100 * (split == "test") + number, *SIZES[split][number])


def files(name="div2k"):
    return {
        f"{name}/{split}/{k:04d}.png": encode(pixels(split, k))
        for split, sizes in SIZES.items()
        for k in range(len(sizes))
    }


def lying(image):
    """A standing picture is turned by a quarter, against the clock."""
    return np.rot90(image) if image.shape[0] > image.shape[1] else image


def cut(image, size=COMMON):
    top, left = ((have - want) // 2 for have, want in zip(image.shape, size, strict=False))
    return image[top : top + size[0], left : left + size[1]]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["div2k", "bsds500"])
def test_every_layout(tmp_path, packed, name):
    root = write(tmp_path / "data", files(name), packed)
    data = load(name, root)
    assert data.train.images.shape[1:] == (3, *COMMON) and data.train.images.dtype == torch.uint8
    assert (len(data.train), len(data.test), data.val, data.classes) == (3, 2, None, ())
    for split, images in (("train", data.train.images), ("test", data.test.images)):
        for number, image in enumerate(images):
            assert np.array_equal(image.permute(1, 2, 0), cut(lying(pixels(split, number))))
    assert data.train.labels is data.train.masks is None
    assert ("stand-in for DIV2K" in data.provenance) == (name == "bsds500")
    assert [other for other in ("div2k", "bsds500") if other in available(root)] == [name]


def test_an_archive_comes_before_a_folder_and_may_have_a_validation_split(tmp_path):
    write(tmp_path, files(), False)
    assert load("div2k", tmp_path).val is None
    write(tmp_path, files() | {"div2k/val/1.png": encode(random_image(9, 30, 30))})
    assert available(tmp_path)["div2k"].startswith("archive div2k.tar.xz")
    assert load("div2k", tmp_path).val.images.shape == (1, 3, *COMMON)


@pytest.mark.parametrize("size", [8, (6, 9)])
def test_image_size(tmp_path, size):
    data = load("div2k", write(tmp_path, files(), False), image_size=size)
    height, width = (size, size) if isinstance(size, int) else size
    assert data.train.images.shape[1:] == (3, height, width)
    for number, image in enumerate(data.train.images):
        whole = Image.fromarray(np.ascontiguousarray(lying(pixels("train", number))))
        scaled = round(whole.width * size / whole.height) if size == 8 else width
        wanted = np.asarray(whole.resize((scaled, height), Image.Resampling.BILINEAR))
        assert np.array_equal(image.permute(1, 2, 0), cut(wanted, (height, width)))


def test_a_download(tmp_path, monkeypatch):
    """What the network would give is put in its place by hand."""
    taken, archives, new = [], {}, tmp_path / "new"
    for split, (part, _) in pictures.DIV2K.items():
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for name, content in files().items():
                if name.startswith(f"div2k/{split}/"):
                    archive.writestr(name.replace(f"div2k/{split}", part), content)
        archives[part] = packed.getvalue()

    def give(url, root):
        taken.append(url)
        (Path(root) / Path(url).name).write_bytes(archives[Path(url).stem])

    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(torchvision.datasets.utils, "download_url", give)
    # What comes is not DIV2K, though a zip of the same layout: nothing of it stays.
    said = download(["div2k"], new)["div2k"]
    assert "SHA-256" in said and pictures.DIV2K["train"][1] in said
    assert list((new / "div2k").iterdir()) == []
    parts = {split: part for split, (part, _) in pictures.DIV2K.items()}
    expected = {split: (part, sha256(archives[part]).hexdigest()) for split, part in parts.items()}
    monkeypatch.setattr(pictures, "DIV2K", expected)
    taken.clear()
    assert download(["div2k"], new)["div2k"].startswith("downloaded: folder div2k")
    assert [Path(url).stem for url in taken] == [*archives]
    assert all(url.startswith("https://") for url in taken)
    assert sorted(path.name for path in (new / "div2k").iterdir()) == ["test", "train"]
    assert load("div2k", new).train.images.shape[1:] == (3, *COMMON)
    assert download(["div2k"], new)["div2k"].startswith("present")
