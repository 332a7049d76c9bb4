"""Photographs for super-resolution in every layout: lying, cut to one size, or resized."""

import io
import lzma
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from dataset_files import encode, random_image, write_archive, write_folder
from PIL import Image

from repro.datasets import (
    CorruptDatasetError,
    DatasetError,
    DatasetNotFoundError,
    available,
    download,
    load,
    pictures,
)

# Height and width of the pictures, some standing; the largest cut that all have is 10 x 14.
TRAIN = [(12, 16), (18, 10), (10, 20)]
TEST = [(14, 11), (13, 15)]
COMMON = (10, 14)


def pixels(split, number):
    sizes = TRAIN if split == "train" else TEST
    return random_image(100 * (split == "test") + number, *sizes[number])


def files(name, form="PNG"):
    ending = form.lower()
    return {
        f"{name}/{split}/{number:04d}.{ending}": encode(pixels(split, number), form)
        for split, sizes in (("train", TRAIN), ("test", TEST))
        for number in range(len(sizes))
    }


def native():
    """DIV2K's own folders."""
    return {
        f"{pictures.DIV2K[split]}/{number:04d}.png": encode(pixels(split, number))
        for split, sizes in (("train", TRAIN), ("test", TEST))
        for number in range(len(sizes))
    }


def make(layout, root, name="div2k"):
    root.mkdir(parents=True, exist_ok=True)
    if layout == "archive":
        write_archive(root / f"{name}.tar.xz", files(name))
    elif layout == "folder":
        write_folder(root, files(name))
    elif layout == "native":
        write_folder(root, native())
    else:
        write_folder(root / "div2k", native())
    return root


def lying(image):
    """A standing picture is turned by a quarter, against the clock."""
    return np.rot90(image) if image.shape[0] > image.shape[1] else image


def cut(image, size=COMMON):
    top, left = ((have - want) // 2 for have, want in zip(image.shape, size, strict=False))
    return image[top : top + size[0], left : left + size[1]]


LAYOUTS = ("native", "native in div2k", "archive", "folder")


@pytest.mark.parametrize(
    ("layout", "name"),
    [*((layout, "div2k") for layout in LAYOUTS), ("archive", "bsds500"), ("folder", "bsds500")],
)
def test_every_layout(tmp_path, layout, name):
    data = load(name, make(layout, tmp_path / "data", name))
    assert data.image_shape == (3, *COMMON) and data.train.images.dtype == torch.uint8
    assert (len(data.train), len(data.test), data.val, data.classes) == (3, 2, None, ())
    for split, images in (("train", data.train.images), ("test", data.test.images)):
        for number, image in enumerate(images):
            assert np.array_equal(image.permute(1, 2, 0), cut(lying(pixels(split, number))))
    assert data.train.labels is data.train.masks is None
    assert (data.name, data.kind) == (name, "real")
    assert ("stand-in for DIV2K" in data.provenance) == (name == "bsds500")
    assert str(tmp_path) not in data.provenance
    assert name in available(tmp_path / "data")


def test_the_order_of_the_search(tmp_path):
    """Own folders before an archive, an archive before a folder of splits."""
    for layout, said in (("folder", "folder div2k"), ("archive", "archive div2k.tar.xz"),
                         ("native", "folders DIV2K_train_HR")):  # fmt: skip
        make(layout, tmp_path)
        assert available(tmp_path)["div2k"].startswith(said)
    assert "DIV2K_train_HR/" in pictures.looked_for("div2k")
    assert pictures.looked_for("bsds500") == ["bsds500.tar.xz", "bsds500/{train,test}/"]
    write_folder(tmp_path / "b", native())
    assert "bsds500" not in available(tmp_path / "b")


def test_a_validation_split_is_kept(tmp_path):
    more = files("div2k") | {"div2k/val/1.png": encode(random_image(9, 30, 30))}
    write_archive(tmp_path / "div2k.tar.xz", more)
    assert load("div2k", tmp_path).val.images.shape == (1, 3, *COMMON)


@pytest.mark.parametrize("size", [8, (6, 9)])
def test_image_size(tmp_path, size):
    data = load("div2k", make("native", tmp_path), image_size=size)
    height, width = (size, size) if isinstance(size, int) else size
    assert data.image_shape == (3, height, width)
    for number, image in enumerate(data.train.images):
        whole = Image.fromarray(np.ascontiguousarray(lying(pixels("train", number))))
        if isinstance(size, int):
            scale = size / whole.height
            whole = whole.resize((round(whole.width * scale), size), Image.Resampling.BILINEAR)
            wanted = cut(np.asarray(whole), (size, size))
        else:
            wanted = np.asarray(whole.resize((width, height), Image.Resampling.BILINEAR))
        assert np.array_equal(image.permute(1, 2, 0), wanted)


def test_grey_and_jpeg_become_colour(tmp_path):
    grey = np.arange(120, dtype=np.uint8).reshape(10, 12)
    write_folder(tmp_path, {"bsds500/train/a.png": encode(grey),
                            "bsds500/train/b.jpg": encode(random_image(1, 10, 12), "JPEG"),
                            "bsds500/test/c.png": encode(grey)})  # fmt: skip
    data = load("bsds500", tmp_path)
    assert data.train.images.shape == (2, 3, 10, 12)
    assert torch.equal(data.train.images[0], torch.from_numpy(grey).expand(3, -1, -1))


def test_the_fingerprint_is_of_content_and_size(tmp_path):
    first = load("div2k", make("archive", tmp_path / "a"))
    assert load("div2k", make("archive", tmp_path / "b")).fingerprint == first.fingerprint
    assert load("div2k", tmp_path / "a", image_size=8).fingerprint != first.fingerprint
    other = files("div2k") | {"div2k/test/0001.png": encode(random_image(5, 13, 15))}
    write_archive(tmp_path / "c" / "div2k.tar.xz", other)
    assert load("div2k", tmp_path / "c").fingerprint != first.fingerprint


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("damage", [b"no picture", b"", "half"])
@pytest.mark.parametrize("layout", ["native", "archive", "folder"])
def test_damaged_pictures(tmp_path, layout, damage, size):
    good = encode(pixels("train", 1))
    bad = good[: len(good) // 2] if damage == "half" else damage
    if layout == "archive":
        write_archive(tmp_path / "div2k.tar.xz", files("div2k") | {"div2k/train/0001.png": bad})
    else:
        make(layout, tmp_path)
        place = "DIV2K_train_HR" if layout == "native" else "div2k/train"
        (tmp_path / place / "0001.png").write_bytes(bad)
    with pytest.raises(CorruptDatasetError, match=r"0001\.png cannot be decoded"):
        load("div2k", tmp_path, image_size=size)
    assert not list((tmp_path / "cache").glob("*.pt"))


def test_a_damaged_archive(tmp_path):
    path = write_archive(tmp_path / "bsds500.tar.xz", files("bsds500"))
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(CorruptDatasetError, match=r"bsds500\.tar\.xz is damaged or incomplete"):
        load("bsds500", tmp_path)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("layout", ["native", "archive", "folder"])
def test_a_missing_split(tmp_path, layout, split):
    if layout == "archive":
        left = {name: content for name, content in files("div2k").items() if split not in name}
        write_archive(tmp_path / "div2k.tar.xz", left)
    else:
        make(layout, tmp_path)
        folder = pictures.DIV2K[split] if layout == "native" else f"div2k/{split}"
        for file in (tmp_path / folder).iterdir():
            file.unlink()
    with pytest.raises(CorruptDatasetError, match="no picture for training or for testing"):
        load("div2k", tmp_path)


def test_not_found(tmp_path, monkeypatch):
    asked = []

    def refuse(request, timeout):
        asked.append(request.full_url)
        raise TimeoutError("timed out")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(DatasetNotFoundError) as caught:
        load("div2k", tmp_path)
    for text in (*pictures.looked_for("div2k"), str(tmp_path), "cannot be reached", "root=FOLDER"):
        assert text in str(caught.value)
    assert asked == [pictures.download_url("div2k")] and asked[0].endswith("DIV2K_train_HR.zip")
    with pytest.raises(DatasetNotFoundError, match="no public address is known"):
        load("bsds500", tmp_path)
    with pytest.raises(DatasetNotFoundError, match="download=False"):
        load("div2k", tmp_path, download=False)
    assert len(asked) == 1


def test_a_download(tmp_path, monkeypatch):
    """What the network would give is put in its place by hand."""

    class Answer:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    taken, archives = [], {}
    for part in pictures.DIV2K.values():
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for name, content in native().items():
                if name.startswith(part):
                    archive.writestr(name, content)
        archives[part] = packed.getvalue()

    def give(url, root):
        part = url.rsplit("/", 1)[1].removesuffix(".zip")
        taken.append((url, part))
        (Path(root) / f"{part}.zip").write_bytes(archives[part])

    from repro._torchvision import torchvision

    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **kwargs: Answer())
    monkeypatch.setattr(torchvision.datasets.utils, "download_url", give)
    # What comes is not DIV2K, though a zip of the same layout: nothing of it stays.
    said = download("div2k", tmp_path / "new")["div2k"]
    assert "SHA-256" in said and pictures._ARCHIVES["DIV2K_train_HR"][1] in said
    assert list((tmp_path / "new").iterdir()) == []
    expected = {part: (0, sha256(content).hexdigest()) for part, content in archives.items()}
    monkeypatch.setattr(pictures, "_ARCHIVES", expected)
    taken.clear()
    assert download("div2k", tmp_path / "new")["div2k"].startswith("downloaded: folders DIV2K")
    assert [part for _, part in taken] == list(pictures.DIV2K.values())
    assert all(url.startswith("https://") for url, _ in taken)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(archives)
    assert load("div2k", tmp_path / "new").image_shape == (3, *COMMON)
    assert download("div2k", tmp_path / "new")["div2k"].startswith("present")


def test_labels_are_not_there(tmp_path):
    root = make("native", tmp_path)
    with pytest.raises(DatasetError, match="per_class=2: not for 'div2k', only for labelled sets"):
        load("div2k", root, per_class=2)
    with pytest.raises(DatasetError, match="only for 'camvid'"):
        load("div2k", root, binary=True)
    with pytest.raises(DatasetError, match="takes no option train"):
        load("div2k", root, train=2)


def test_an_archive_of_something_else(tmp_path):
    with (
        lzma.open(tmp_path / "div2k.tar.xz", "wb") as stream,
        tarfile.open(fileobj=stream, mode="w|"),
    ):
        pass
    with pytest.raises(CorruptDatasetError, match=r"expected .*div2k\.tar\.xz"):
        load("div2k", tmp_path)
