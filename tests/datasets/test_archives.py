import numpy as np
import pytest
import torch
from dataset_files import (
    class_files,
    encode,
    mask_files,
    random_image,
    write_archive,
    write_folder,
)
from PIL import Image

from repro.datasets import CorruptDatasetError, DatasetError, archives, available, load


def cache_files(tmp_path):
    return sorted((tmp_path / "cache").glob("*.pt"))


def test_archive_round_trip(tmp_path):
    write_archive(tmp_path / "data" / "flowers5.tar.xz", class_files("flowers5"))
    data = load("flowers5", tmp_path / "data")
    assert data.classes == ("ant", "bee")
    assert data.train.labels.tolist() == data.test.labels.tolist() == [0, 0, 0, 1, 1, 1]
    expected = np.stack([random_image(k * 10 + i) for k in range(2) for i in range(3)])
    assert torch.equal(data.train.images, torch.from_numpy(expected).permute(0, 3, 1, 2))
    assert (data.record_name, data.kind) == ("flowers5", "real")
    assert "stand-in for Flowers-102" in data.provenance
    assert str(tmp_path) not in data.provenance


def test_folder_equals_archive(tmp_path):
    files = class_files("flowers5")
    write_archive(tmp_path / "a" / "flowers5.tar.xz", files)
    write_folder(tmp_path / "b", files)
    packed, unpacked = load("flowers5", tmp_path / "a"), load("flowers5", tmp_path / "b")
    assert torch.equal(packed.train.images, unpacked.train.images)
    assert torch.equal(packed.test.labels, unpacked.test.labels)


@pytest.mark.parametrize("packed", [True, False])
def test_fingerprint_depends_on_content_and_size_alone(tmp_path, packed):
    def make(place, files):
        if packed:
            write_archive(tmp_path / place / "flowers5.tar.xz", files)
        else:
            write_folder(tmp_path / place, files)
        return tmp_path / place

    files = class_files("flowers5")
    first = load("flowers5", make("a", files))
    assert load("flowers5", make("b", files)).fingerprint == first.fingerprint
    assert load("flowers5", tmp_path / "a", image_size=4).fingerprint != first.fingerprint
    assert load("flowers5", tmp_path / "a", per_class=1).fingerprint != first.fingerprint
    files["flowers5/test/bee/0002.png"] = encode(random_image(999))
    assert load("flowers5", make("c", files)).fingerprint != first.fingerprint


def test_recompressed_set_has_its_own_record_name(tmp_path):
    write_archive(tmp_path / "cifar10.tar.xz", class_files("cifar10"))
    data = load("cifar10", tmp_path)
    assert data.record_name == "cifar10-jpeg"
    assert "recompressed" in data.provenance


def test_cache_is_used_and_follows_the_source(tmp_path, monkeypatch):
    path = write_archive(tmp_path / "flowers5.tar.xz", class_files("flowers5"))
    first = load("flowers5", tmp_path)
    with monkeypatch.context() as context:
        context.setattr("repro.datasets.sources.read_archive", None)  # a second read would fail
        second = load("flowers5", tmp_path)
    assert torch.equal(first.train.images, second.train.images)
    assert len(cache_files(tmp_path)) == 1

    files = class_files("flowers5")
    files["flowers5/train/ant/0000.png"] = encode(random_image(999))
    write_archive(path, files)
    changed = load("flowers5", tmp_path)
    assert not torch.equal(first.train.images, changed.train.images)
    assert len(cache_files(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_damaged_cache_is_rebuilt(tmp_path, damage):
    write_archive(tmp_path / "flowers5.tar.xz", class_files("flowers5"))
    expected = load("flowers5", tmp_path).train.images.clone()
    (cache,) = cache_files(tmp_path)
    content = cache.read_bytes()
    cache.unlink()  # a mapped file is replaced, not overwritten
    damaged = {"truncated": content[: len(content) // 2], "garbage": b"\x80" * 500, "empty": b""}
    cache.write_bytes(damaged[damage])
    assert torch.equal(load("flowers5", tmp_path).train.images, expected)


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_archive(tmp_path, kept):
    path = write_archive(tmp_path / "flowers5.tar.xz", class_files("flowers5", per_class=20))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CorruptDatasetError, match=r"flowers5\.tar\.xz is damaged.*delete it"):
        load("flowers5", tmp_path)
    assert cache_files(tmp_path) == []
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_undecodable_image(tmp_path):
    files = class_files("flowers5")
    files["flowers5/train/bee/0001.png"] = files["flowers5/train/bee/0001.png"][:60]
    write_archive(tmp_path / "flowers5.tar.xz", files)
    with pytest.raises(CorruptDatasetError, match=r"train/bee/0001\.png cannot be decoded"):
        load("flowers5", tmp_path)


def test_members_outside_the_layout_are_left_alone(tmp_path):
    files = class_files("flowers5")
    other = {"flowers5/train/README": b"x", "flowers5/train/ant/notes.txt": b"x", "LICENSE": b"x"}
    path = write_archive(tmp_path / "data" / "flowers5.tar.xz", {**files, **other})
    before = sorted(tmp_path.rglob("*"))
    assert len(archives.read_archive(path)) == len(files)
    assert sorted(tmp_path.rglob("*")) == before


def test_missing_test_split(tmp_path):
    files = {k: v for k, v in class_files("flowers5").items() if "/train/" in k}
    write_archive(tmp_path / "flowers5.tar.xz", files)
    with pytest.raises(CorruptDatasetError, match="no image of the test split"):
        load("flowers5", tmp_path)


def test_read_only_root(tmp_path):
    write_archive(tmp_path / "data" / "flowers5.tar.xz", class_files("flowers5"))
    (tmp_path / "data").chmod(0o555)
    try:
        before = list((tmp_path / "data").iterdir())
        assert len(load("flowers5", tmp_path / "data").train) == 6
        assert list((tmp_path / "data").iterdir()) == before
    finally:
        (tmp_path / "data").chmod(0o755)


def test_unwritable_cache_says_what_to_do(tmp_path, monkeypatch):
    write_archive(tmp_path / "flowers5.tar.xz", class_files("flowers5"))
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DatasetError, match=r"\$REPRO_CACHE"):
        load("flowers5", tmp_path)


def test_sizes(tmp_path):
    files = class_files("flowers5")
    wide = random_image(7, 12, 20)
    files["flowers5/train/ant/0001.png"] = encode(wide)
    write_archive(tmp_path / "flowers5.tar.xz", files)
    with pytest.raises(DatasetError, match="differ in size, give image_size="):
        load("flowers5", tmp_path)
    exact = load("flowers5", tmp_path, image_size=(6, 10)).train.images[1]
    expected = np.asarray(Image.fromarray(wide).resize((10, 6), Image.Resampling.BILINEAR))
    assert np.array_equal(exact.permute(1, 2, 0), expected)
    square = load("flowers5", tmp_path, image_size=6).train.images[1]
    assert np.array_equal(square.permute(1, 2, 0), expected[:, 2:8])


def test_per_class_keeps_the_first(tmp_path):
    write_archive(tmp_path / "flowers5.tar.xz", class_files("flowers5"))
    everything, two = load("flowers5", tmp_path), load("flowers5", tmp_path, per_class=2)
    assert two.train.labels.tolist() == two.test.labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(two.train.images, everything.train.images[[0, 1, 3, 4]])


def test_camvid_and_its_road_masks(tmp_path):
    write_archive(tmp_path / "camvid.tar.xz", mask_files("camvid"))
    data = load("camvid", tmp_path)
    assert data.train.masks.shape == (2, 12, 16)
    assert (len(data.val), data.num_classes, data.classes[3]) == (2, 12, "road")
    expected = np.random.default_rng(1).integers(0, 12, (12, 16), np.uint8)
    assert np.array_equal(data.train.masks[1], expected)
    road = load("camvid", tmp_path, binary=True)
    for split, all_classes in ((road.train, data.train), (road.val, data.val)):
        assert torch.equal(split.masks, (all_classes.masks == 3).to(torch.uint8))
    assert road.record_name == "camvid-road"
    assert "stand-in for Carvana" in road.provenance
    assert road.fingerprint != data.fingerprint


def test_masks_are_resized_by_nearest_neighbour(tmp_path):
    write_archive(tmp_path / "camvid.tar.xz", mask_files("camvid"))
    data, small = load("camvid", tmp_path), load("camvid", tmp_path, image_size=(6, 8))
    assert small.train.masks.shape == (2, 6, 8)
    blocks = data.train.masks.reshape(2, 6, 2, 8, 2).permute(0, 1, 3, 2, 4).flatten(3)
    assert (blocks == small.train.masks[..., None]).any(-1).all()


@pytest.mark.parametrize("fault", ["missing", "value", "size", "colour"])
def test_bad_masks(tmp_path, fault):
    files = mask_files("camvid")
    key = "camvid/test/masks/1.png"
    if fault == "missing":
        del files[key]
    else:
        shape = (5, 5) if fault == "size" else (12, 16, 3) if fault == "colour" else (12, 16)
        files[key] = encode(np.full(shape, 12 if fault == "value" else 0, np.uint8))
    write_archive(tmp_path / "camvid.tar.xz", files)
    with pytest.raises(CorruptDatasetError, match="mask"):
        load("camvid", tmp_path)


def test_available_names_what_lies_there(tmp_path):
    write_archive(tmp_path / "flowers5.tar.xz", class_files("flowers5"))
    always = {"digits", "photos", "phantom", "synthetic"}
    assert set(available(tmp_path)) == always | {"flowers5"}
    assert "flowers5.tar.xz" in available(tmp_path)["flowers5"]
