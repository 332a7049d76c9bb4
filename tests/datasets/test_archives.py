import struct
import zlib

import numpy as np
import pytest
import torch
from dataset_files import class_files, encode, mask_files, random_image, write, write_archive
from PIL import Image

from repro.datasets import CorruptDatasetError, DatasetError, archives, available, load


@pytest.mark.parametrize("packed", [True, False])
def test_round_trip(tmp_path, packed):
    """Every pixel comes back; the fingerprint depends on content and size alone."""
    files = class_files()
    first = write(tmp_path / "a", files, packed)
    data = load("flowers5", first)
    assert data.classes == ("ant", "bee")
    assert data.train.labels.tolist() == data.test.labels.tolist() == [0, 0, 0, 1, 1, 1]
    expected = np.stack([random_image(k * 10 + i) for k in range(2) for i in range(3)])
    assert torch.equal(data.train.images, torch.from_numpy(expected).permute(0, 3, 1, 2))
    assert (data.record_name, data.kind) == ("flowers5", "real")
    assert "stand-in for Flowers-102" in data.provenance
    assert str(tmp_path) not in data.provenance
    two = load("flowers5", first, per_class=2)
    assert two.train.labels.tolist() == two.test.labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(two.train.images, data.train.images[[0, 1, 3, 4]])
    assert load("flowers5", write(tmp_path / "b", files, packed)).fingerprint == data.fingerprint
    files["flowers5/test/bee/0002.png"] = encode(random_image(999))
    others = two, load("flowers5", first, image_size=4), load(
        "flowers5", write(tmp_path / "c", files, packed)
    )  # fmt: skip
    assert data.fingerprint not in {other.fingerprint for other in others}


def test_cache_is_used_and_follows_the_source(tmp_path, monkeypatch):
    files = class_files()
    first = load("flowers5", write(tmp_path, files))
    with monkeypatch.context() as context:
        context.setattr("repro.datasets.sources.read_archive", None)  # a second read would fail
        second = load("flowers5", tmp_path)
    assert torch.equal(first.train.images, second.train.images)
    assert len(list((tmp_path / "cache").glob("*.pt"))) == 1
    files["flowers5/train/ant/0000.png"] = encode(random_image(999))
    changed = load("flowers5", write(tmp_path, files))
    assert not torch.equal(first.train.images, changed.train.images)
    assert len(list((tmp_path / "cache").glob("*.pt"))) == 2


MASK = "camvid/test/masks/1.png"
JPEG_IN_TIFF = encode(np.zeros((12, 16), np.uint8), "TIFF", compression="jpeg")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (class_files() | {"flowers5/train/bee/0001.png": encode(random_image(0))[:60]},
         r"train/bee/0001\.png cannot be decoded"),
        ({k: v for k, v in class_files().items() if "/train/" in k}, "no image of the test split"),
        ({k: v for k, v in mask_files("camvid").items() if k != MASK}, "has no mask"),
        (mask_files("camvid") | {MASK.replace("png", "jpg"): b""}, "are masks of one image"),
        *((mask_files("camvid") | {MASK: encode(np.full(shape, value, np.uint8))}, "mask")
          for shape, value in (((12, 16), 12), ((5, 5), 0), ((12, 16, 3), 0))),
        (mask_files("camvid") | {MASK: encode(np.zeros((12, 16), np.uint8), "JPEG")}, "not exact"),
        (mask_files("camvid") | {MASK: JPEG_IN_TIFF}, "not exact"),
        (mask_files("camvid") | {MASK: b"P5\n16 12\n200\n" + bytes(192)}, "255 as its largest"),
        (mask_files("camvid") | {MASK: encode(np.ones((12, 16), np.uint8), "GIF")}, "black and w"),
    ],
)  # fmt: skip
def test_faulty_sets(tmp_path, files, message):
    with pytest.raises(CorruptDatasetError, match=message):
        load(next(iter(files)).partition("/")[0], write(tmp_path, files))


def grey_png(values: np.ndarray, bits: int) -> bytes:
    """A grey PNG of 1, 2, 4 or 8 bits; Pillow writes none of 2 or 4."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    height, width = values.shape
    each = np.unpackbits(values[..., None], axis=-1)[..., -bits:]
    rows = np.pad(np.packbits(each.reshape(height, -1), axis=1), ((0, 0), (1, 0)))  # filter 0
    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    content = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows.tobytes()))
    return b"\x89PNG\r\n\x1a\n" + content + chunk(b"IEND", b"")


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_grey_masks_of_few_bits_hold_indices(tmp_path, bits):
    indices = np.resize(np.arange(min(12, 2**bits), dtype=np.uint8), (12, 16))
    files = mask_files("camvid") | {MASK: grey_png(indices, bits)}
    found = load("camvid", write(tmp_path, files)).test.masks[1]
    assert np.array_equal(found, indices)


def test_only_the_layout_is_read_and_nothing_is_written(tmp_path, caplog):
    other = {"flowers5/train/README": b"x", "flowers5/train/ant/notes.txt": b"x", "LICENSE": b"x"}
    other["flowers5/train/.trash/0.png"] = encode(random_image(0))  # no class
    files = class_files() | {"flowers5/train/ant/0.WEBP": encode(random_image(0), "WEBP")}
    other["flowers5/train/cat/0.jfif"] = encode(random_image(0))  # the class has no image
    assert len(load("flowers5", write(tmp_path, files | other, False)).train) == 7
    assert "2 files or folders are left out, such as train/ant/notes.txt:" in caplog.text
    path = write_archive(tmp_path / "data" / "flowers5.tar.xz", files | other)
    path.parent.chmod(0o555)
    before = sorted(path.parent.rglob("*"))
    caplog.clear()
    read = {f"flowers5/{name}": bytes(got) for name, got in archives.read_archive(path).items()}
    assert "3 files or folders are left out, such as train/" in caplog.text  # README, too
    assert read == files and len(load("flowers5", path.parent).train) == 7
    assert sorted(path.parent.rglob("*")) == before
    assert set(available(path.parent)) == {"digits", "photos", "phantom"} | {"flowers5"}
    assert "flowers5.tar.xz" in available(path.parent)["flowers5"]


def test_sizes(tmp_path):
    wide = random_image(7, 12, 20)
    write(tmp_path, class_files() | {"flowers5/train/ant/0001.png": encode(wide)})
    with pytest.raises(DatasetError, match="differ in size, give image_size="):
        load("flowers5", tmp_path)
    exact = load("flowers5", tmp_path, image_size=(6, 10)).train.images[1]
    expected = np.asarray(Image.fromarray(wide).resize((10, 6), Image.Resampling.BILINEAR))
    assert np.array_equal(exact.permute(1, 2, 0), expected)
    square = load("flowers5", tmp_path, image_size=6).train.images[1]
    assert np.array_equal(square.permute(1, 2, 0), expected[:, 2:8])


def test_camvid_and_its_road_masks(tmp_path):
    data = load("camvid", write(tmp_path, mask_files("camvid")))
    assert data.train.masks.shape == (2, 12, 16)
    assert (len(data.val), data.num_classes, data.classes[3]) == (2, 12, "road")
    expected = np.random.default_rng(1).integers(0, 12, (12, 16), np.uint8)
    assert np.array_equal(data.train.masks[1], expected)
    road = load("camvid", tmp_path, binary=True)
    for split, all_classes in ((road.train, data.train), (road.val, data.val)):
        assert torch.equal(split.masks, (all_classes.masks == 3).to(torch.uint8))
    assert road.record_name == "camvid-road" and "stand-in for Carvana" in road.provenance
    assert road.fingerprint != data.fingerprint
    small = load("camvid", tmp_path, image_size=(6, 8)).train.masks  # by nearest neighbour
    blocks = data.train.masks.reshape(2, 6, 2, 8, 2).permute(0, 1, 3, 2, 4).flatten(3)
    assert small.shape == (2, 6, 8) and (blocks == small[..., None]).any(-1).all()
