"""The authors' raw times: where they are found, what is refused and in which words."""

import numpy as np
import pytest

from repro import datasets
from repro.datasets import CorruptDatasetError, DatasetNotFoundError, find_times, load_times
from repro.datasets.timings import TIMES

NAMES = ("gtx1080_pytorch.npy", "gtx1080_tensorflow.npy")
SECONDS = 600 / np.arange(1, 7)


@pytest.fixture
def folder(tmp_path):
    """A data folder with times of 6 batch sizes, the last entry empty as in the authors' files."""
    place = tmp_path / "data" / TIMES
    place.mkdir(parents=True)
    for number, name in enumerate(NAMES):
        np.save(place / name, np.append(SECONDS + number, 0.0))
    return tmp_path / "data"


def test_by_framework(folder):
    found = load_times(folder)
    assert list(found.seconds) == ["PyTorch", "TensorFlow"]
    assert found.seconds["PyTorch"] == pytest.approx(SECONDS)
    assert found.seconds["TensorFlow"] == pytest.approx(SECONDS + 1)
    assert found.samples == 50_000 and TIMES not in datasets.NAMES
    assert (found.name, found.record_name, found.kind) == (TIMES, TIMES, "real")
    assert "authors" in found.provenance and "GTX 1080" in found.provenance
    for name in NAMES:  # whole numbers, no empty entry
        np.save(folder / TIMES / name, np.array([9, 5, 3], dtype=np.int32))
    assert load_times(folder).seconds["PyTorch"].tolist() == [9.0, 5.0, 3.0]
    assert load_times(folder).seconds["PyTorch"].dtype == np.float64


def test_the_fingerprint_is_of_the_numbers_and_of_whose_they_are(folder):
    first = load_times(folder).fingerprint
    assert len(first) == 16 and int(first, 16) >= 0
    one, other = (folder / TIMES / name for name in NAMES)
    np.save(one, np.load(one)[:-1])
    assert load_times(folder).fingerprint == first
    moved = one.rename(one.with_name("moved"))
    other.rename(one)
    moved.rename(other)
    assert load_times(folder).fingerprint != first


def test_the_order_of_folders(folder, tmp_path, monkeypatch):
    assert find_times() is None
    monkeypatch.setenv("REPRO_DATA", str(folder))
    assert find_times() == find_times(tmp_path / "elsewhere") == folder.resolve() / TIMES
    other = tmp_path / "other" / TIMES
    other.mkdir(parents=True)
    for name in NAMES:
        np.save(other / name, SECONDS)
    assert find_times(other.parent) == other.resolve()


@pytest.mark.parametrize("name", NAMES)
def test_both_files_are_needed(folder, name, tmp_path, monkeypatch):
    (folder / TIMES / name).unlink()
    assert find_times(folder) is None
    monkeypatch.setenv("REPRO_DATA", str(tmp_path / "a"))
    with pytest.raises(DatasetNotFoundError) as caught:
        load_times(folder)
    places = [str(folder), *(str(tmp_path / place) for place in ("a", "checkout/data"))]
    for text in (TIMES, *NAMES, *places, "copy the folder", "$REPRO_DATA"):
        assert text in str(caught.value)


@pytest.mark.parametrize("content", [b"seconds: 3", b"", b"\x93NUMPY\x01\x00v\x00{'de", "cut"])
@pytest.mark.parametrize("name", NAMES)
def test_damaged_bytes(folder, content, name):
    path = folder / TIMES / name
    path.write_bytes(path.read_bytes()[:-12] if content == "cut" else content)
    with pytest.raises(CorruptDatasetError, match=f"{name} cannot be read"):
        load_times(folder)


OBJECTS = np.array([{"a": 1}], dtype=object)  # which only a pickle holds


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (OBJECTS, "cannot be read"),
        (np.array(["3", "2"]), "cannot be read"),
        *((np.array(v), r"expected seconds above 0 .* sizes 1, 2") for v in (
            [], [1.0], [0.0, 0.0], [3.0, -1.0, 2.0], [3.0, 0.0, 2.0], [3.0, np.nan, 2.0],
            [3.0, np.inf, 2.0])),
        *((np.ones(shape), "gtx1080_pytorch") for shape in ((2, 3), (1, 4), ())),
    ],
)  # fmt: skip
def test_what_is_no_times(folder, values, said):
    np.save(folder / TIMES / NAMES[0], values, allow_pickle=values is OBJECTS)
    with pytest.raises(CorruptDatasetError, match=said):
        load_times(folder)
