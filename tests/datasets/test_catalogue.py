import hashlib
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from dataset_files import class_files, encode, mask_files, random_image, write, write_folder
from PIL import Image
from scipy.io import savemat

from repro import datasets, paths
from repro._torchvision import torchvision
from repro.datasets import CorruptDatasetError, DatasetError, DatasetNotFoundError, download, load
from repro.measure.files import cache_folder


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_cifar10_in_torchvision_layout(tmp_path, monkeypatch):
    """Twenty images, with checksums to match."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    for seed, name in enumerate(names):
        pixels = np.random.default_rng(seed).integers(0, 256, (4, 3072), np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [3, 1, 1, 0]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    cifar = torchvision.datasets.CIFAR10
    monkeypatch.setattr(cifar, "train_list", [[n, md5(folder / n)] for n in names[:5]])
    monkeypatch.setattr(cifar, "test_list", [[names[5], md5(folder / names[5])]])
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": md5(folder / "batches.meta")})
    write(tmp_path, class_files("cifar10"))  # an archive, which comes after it
    data = load("cifar10", tmp_path)
    assert data.record_name == "cifar10" and data.classes == tuple("abcdefghij")
    assert data.train.images.shape == (20, 3, 32, 32)
    assert data.train.labels.tolist() == [3, 1, 1, 0] * 5
    path = folder / "data_batch_1"
    assert np.array_equal(data.train.images[:4].flatten(1), pickle.loads(path.read_bytes())["data"])
    assert load("cifar10", tmp_path, per_class=1).train.labels.tolist() == [3, 1, 0]
    assert load("cifar10", tmp_path, image_size=16).test.images.shape == (4, 3, 16, 16)
    kept = list(cache_folder().glob("*.pt"))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CorruptDatasetError, match="cifar-10-batches-py is damaged"):
        load("cifar10", tmp_path)
    assert list(cache_folder().glob("*.pt")) == kept


def test_flowers102_in_torchvision_layout(tmp_path, monkeypatch):
    folder = tmp_path / "flowers-102"
    images = {i: encode(random_image(i, 8 + i, 12), "JPEG") for i in range(1, 7)}
    write_folder(folder / "jpg", {f"image_{i:05d}.jpg": image for i, image in images.items()})
    savemat(folder / "imagelabels.mat", {"labels": np.array([[1, 2, 3, 102, 5, 6]])})
    savemat(folder / "setid.mat", {"trnid": [[4, 1]], "valid": [[2, 3]], "tstid": [[6, 5]]})
    flowers = torchvision.datasets.Flowers102
    files = {
        key: (name, md5(folder / name) if (folder / name).is_file() else sum_)
        for key, (name, sum_) in flowers._file_dict.items()
    }
    monkeypatch.setattr(flowers, "_file_dict", files)
    data = load("flowers102", tmp_path, image_size=8)
    assert [split.labels.tolist() for split in (data.train, data.val, data.test)] == [
        [101, 0], [1, 2], [5, 4]
    ]  # fmt: skip
    assert data.num_classes == 102 and data.train.images.shape == (2, 3, 8, 8)
    whole, again = (load("flowers102", tmp_path, image_size=8, split="random") for _ in range(2))
    assert whole.val is None and (len(whole.train), len(whole.test)) == (5, 1)
    assert whole.train.labels.equal(again.train.labels) and whole.fingerprint == again.fingerprint
    shown = {}
    for split in (data.train, data.val, data.test):
        shown |= dict(zip(split.labels.tolist(), split.images, strict=True))
    pieces = [pair for split in (whole.train, whole.test)
              for pair in zip(split.labels.tolist(), split.images, strict=True)]  # fmt: skip
    assert sorted(label for label, _ in pieces) == [0, 1, 2, 4, 5, 101]
    assert all(image.equal(shown[label]) for label, image in pieces)  # each keeps its label
    assert whole.fingerprint != data.fingerprint
    assert "6 images divided at random, 80 % to train on" in whole.provenance
    with pytest.raises(DatasetError, match="expected 'official' or 'random'"):
        load("flowers102", tmp_path, split="mine")


def test_carvana_in_kaggle_layout_and_as_an_archive(tmp_path):
    folder = tmp_path / "carvana"
    (folder / "train_masks").mkdir(parents=True)
    for stem in (f"car{car}_{view:02d}" for car in range(5) for view in (1, 2)):
        write_folder(folder, {f"train/{stem}.jpg": encode(random_image(int(stem[3])), "JPEG")})
        mask = Image.fromarray(np.eye(8, dtype=np.uint8) * 255).convert("1")
        mask.save(folder / "train_masks" / f"{stem}_mask.gif")
    data = load("carvana", tmp_path)
    assert (len(data.train), len(data.test)) == (8, 2)  # whole cars, not views
    assert torch.equal(data.train.masks[0], torch.eye(8, dtype=torch.uint8))
    assert data.classes == ("background", "car") and data.record_name == "carvana"
    for hidden in (".DS_Store", "._car0_01.jpg", ".cache/0.jpg"):
        write_folder(folder, {f"train/{hidden}": b"x"})
    assert load("carvana", tmp_path).fingerprint == data.fingerprint
    (folder / "train_masks" / "car3_02_mask.gif").unlink()
    with pytest.raises(CorruptDatasetError, match=r"car3_02\.jpg has no mask"):
        load("carvana", tmp_path)
    packed = load("carvana", write(tmp_path / "a", mask_files("carvana", ("train", "test"), 2)))
    assert packed.record_name == "carvana-jpeg" and int(packed.train.masks.max()) == 1


def test_search_order(tmp_path, monkeypatch):
    places = [tmp_path / "explicit", tmp_path / "environment", paths.ROOT / "data"]
    monkeypatch.setenv("REPRO_DATA", str(places[1]))
    for count, place in zip((1, 2, 3), places, strict=True):
        write(place, class_files(per_class=count))
    assert len(load("flowers5", places[0]).train) == 2 and len(load("flowers5").train) == 4
    monkeypatch.delenv("REPRO_DATA")
    assert len(load("flowers5").train) == 6


@pytest.mark.parametrize(
    ("name", "wanted", "address"),
    [
        ("cifar10", ["cifar-10-batches-py", "'phantom'", "'digits'"], "cifar-10-python.tar.gz"),
        ("div2k", ["div2k/{train,test}/"], "DIV2K_train_HR.zip"),
        ("bsds500", ["bsds500/{train,test}/", "no public address is known"], None),
    ],
)
def test_not_found_says_what_where_and_the_ways_out(tmp_path, monkeypatch, name, wanted, address):
    calls = []

    def refuse(request, timeout):
        calls.append((request.full_url, timeout))
        raise TimeoutError("timed out")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setenv("REPRO_DATA", str(tmp_path / "environment"))
    places = [tmp_path / "explicit", tmp_path / "environment", paths.ROOT / "data"]
    with pytest.raises(DatasetNotFoundError) as caught:
        load(name, places[0])
    wanted = [*wanted, f"{name}.tar.xz", *map(str, places), "--data FOLDER", "root=FOLDER"]
    wanted += ["$REPRO_DATA"]
    wanted += ["cannot be reached", "timed out"] if address else []
    assert [part for part in wanted if part not in str(caught.value)] == []
    assert len(calls) == bool(address)  # once, and not for long
    assert all(url.endswith(address) and timeout <= 10 for url, timeout in calls)
    with pytest.raises(DatasetNotFoundError, match="download=False"):
        load(name, tmp_path, download=False)
    assert len(calls) == bool(address)


def test_download_writes_to_the_root_given_and_reports(tmp_path, monkeypatch):
    write(tmp_path, class_files())
    report = download(root=tmp_path)
    assert report["flowers5"].startswith("present") and "network is closed" in report["cifar10"]
    assert "Kaggle" in report["carvana"] and "image-net.org" in report["imagenet"]
    assert list(download(["digits"])) == ["digits"]
    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **kwargs: nullcontext())
    fetch = lambda name, root: write(root, class_files(name))  # noqa: E731
    monkeypatch.setattr("repro.datasets.sources.fetch", fetch)
    data = load("cifar10", tmp_path / "new")
    assert (tmp_path / "new" / "cifar10.tar.xz").is_file() and len(data.train) == 6
    assert data.record_name == "cifar10-jpeg" and "recompressed" in data.provenance


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar", {}, "unknown dataset 'cifar': expected one of digits, photos, cifar10"),
        ("digits", {"per_class": 3}, "per_class= is not for 'digits', only for cifar10"),
        ("digits", {"split": "random"}, "split= is not for 'digits'"),
        ("flowers5", {"per_class": 0}, "per_class=0"),
        ("flowers5", {"binary": True}, "only for camvid"),
        ("flowers5", {"seed": 1}, "takes no option seed"),
        ("photos", {"image_size": 500}, "at most"),
        ("phantom", {"train": 0}, "train=0: expected an int, at least 1"),
    ],
)
def test_wrong_requests(name, options, message):
    with pytest.raises(DatasetError, match=message):
        load(name, **options)


def test_digits():
    data = load("digits")
    assert data.train.images.shape[1:] == (1, 8, 8) and len(data.train) + len(data.test) == 1797
    for split, share in ((data.train, 0.8), (data.test, 0.2)):
        assert ((torch.bincount(split.labels) / 1797 - share / 10).abs() < 0.003).all()
    assert load("digits").fingerprint == data.fingerprint
    assert load("digits", image_size=16).train.images.shape[1:] == (1, 16, 16)


@pytest.mark.parametrize(("count", "of"), [(9992, 10_000), (9999, 10_000), (199_990, 200_000)])
def test_nearly_all_samples_at_even_distances(count, of):
    kept, left = datasets.Split(torch.zeros(of, 1, 1, 1), torch.arange(of)).parted(count)
    assert kept.labels.unique().numel() == len(kept) == count and len(left) == of - count


def test_photos_masks_labels_and_disjoint_regions():
    options = {"image_size": (32, 48), "train_per_class": 4, "test_per_class": 2}
    data, again = load("photos", **options), load("photos", **options)
    assert data.train.images.shape == (32, 3, 32, 48) and data.test.masks.shape == (16, 32, 48)
    assert set(data.train.masks.unique().tolist()) == {0, 1}
    assert data.test.labels.tolist() == [k for k in range(8) for _ in range(2)]
    assert torch.equal(again.train.images, data.train.images)
    assert again.fingerprint == data.fingerprint and "Otsu" in data.provenance
