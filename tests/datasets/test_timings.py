"""The authors' raw times: where they are found, what is refused and in which words."""

import numpy as np
import pytest

from repro import datasets, paths
from repro.datasets import CorruptDatasetError, DatasetNotFoundError, find_times, load_times
from repro.datasets.timings import TIMES

NAMES = ("gtx1080_pytorch.npy", "gtx1080_tensorflow.npy")


@pytest.fixture(autouse=True)
def nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path / "checkout")


@pytest.fixture
def folder(tmp_path):
    """A data folder with times of 6 batch sizes, the last entry empty as in the authors' files."""
    place = tmp_path / "data" / TIMES
    place.mkdir(parents=True)
    for number, name in enumerate(NAMES):
        np.save(place / name, np.append(600 / np.arange(1, 7) + number, 0.0))
    return tmp_path / "data"


class TestLoad:
    def test_by_framework(self, folder):
        found = load_times(folder)
        assert list(found.seconds) == ["PyTorch", "TensorFlow"]
        assert found.seconds["PyTorch"] == pytest.approx(600 / np.arange(1, 7))
        assert found.seconds["TensorFlow"] == pytest.approx(600 / np.arange(1, 7) + 1)
        assert found.samples == 50_000
        assert (found.name, found.record_name, found.kind) == (TIMES, TIMES, "real")
        assert "authors" in found.provenance and "GTX 1080" in found.provenance
        assert all(values.dtype == np.float64 for values in found.seconds.values())

    def test_the_fingerprint_is_of_the_numbers(self, folder):
        first = load_times(folder).fingerprint
        assert len(first) == 16 and int(first, 16) >= 0
        assert load_times(folder).fingerprint == first
        path = folder / TIMES / NAMES[0]
        np.save(path, np.load(path).astype(np.float64))
        assert load_times(folder).fingerprint == first
        np.save(path, np.load(path) * 1.01)
        assert load_times(folder).fingerprint != first

    def test_swapped_files_are_other_data(self, folder):
        first = load_times(folder).fingerprint
        one, other = (folder / TIMES / name for name in NAMES)
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
        assert load_times(folder).fingerprint != first

    def test_whole_numbers_and_no_empty_entry(self, folder):
        for name in NAMES:
            np.save(folder / TIMES / name, np.array([9, 5, 3], dtype=np.int32))
        assert load_times(folder).seconds["PyTorch"].tolist() == [9.0, 5.0, 3.0]


class TestFind:
    def test_the_order_of_folders(self, folder, tmp_path, monkeypatch):
        assert find_times() is None
        monkeypatch.setenv("REPRO_DATA", str(folder))
        assert find_times() == folder.resolve() / TIMES
        assert find_times(tmp_path / "elsewhere") == folder.resolve() / TIMES
        other = tmp_path / "other"
        (other / TIMES).mkdir(parents=True)
        for name in NAMES:
            (other / TIMES / name).write_bytes((folder / TIMES / name).read_bytes())
        assert find_times(other) == other.resolve() / TIMES

    @pytest.mark.parametrize("name", NAMES)
    def test_both_files_are_needed(self, folder, name):
        (folder / TIMES / name).unlink()
        assert find_times(folder) is None
        with pytest.raises(DatasetNotFoundError, match=name):
            load_times(folder)

    def test_missing(self, tmp_path, monkeypatch):
        monkeypatch.setenv("REPRO_DATA", str(tmp_path / "a"))
        with pytest.raises(DatasetNotFoundError) as caught:
            load_times(tmp_path / "b")
        places = [str(tmp_path / name) for name in ("a", "b", "checkout/data")]
        for text in (TIMES, *NAMES, *places, "copy the folder", "$REPRO_DATA"):
            assert text in str(caught.value)

    def test_it_is_no_image_set(self):
        assert TIMES not in datasets.NAMES and datasets.TIMES == TIMES


DAMAGED = {
    "text": b"seconds: 3",
    "empty": b"",
    "truncated header": b"\x93NUMPY\x01\x00v\x00{'descr': '<f8'",
}


class TestDamaged:
    @pytest.mark.parametrize("kind", DAMAGED)
    @pytest.mark.parametrize("name", NAMES)
    def test_bytes(self, folder, kind, name):
        (folder / TIMES / name).write_bytes(DAMAGED[kind])
        with pytest.raises(CorruptDatasetError, match=f"{name} cannot be read"):
            load_times(folder)

    def test_cut_short(self, folder):
        path = folder / TIMES / NAMES[1]
        path.write_bytes(path.read_bytes()[:-12])
        with pytest.raises(CorruptDatasetError, match="cannot be read"):
            load_times(folder)

    def test_objects_are_not_unpickled(self, folder):
        np.save(folder / TIMES / NAMES[0], np.array([{"a": 1}], dtype=object), allow_pickle=True)
        with pytest.raises(CorruptDatasetError, match="cannot be read"):
            load_times(folder)

    @pytest.mark.parametrize(
        "values",
        [[], [1.0], [0.0, 0.0], [3.0, -1.0, 2.0], [3.0, 0.0, 2.0], [3.0, float("nan"), 2.0]],
    )
    def test_numbers_that_are_no_times(self, folder, values):
        np.save(folder / TIMES / NAMES[0], np.array(values))
        with pytest.raises(CorruptDatasetError, match=r"expected seconds above 0 .* sizes 1, 2"):
            load_times(folder)

    @pytest.mark.parametrize("shape", [(2, 3), (1, 4), ()])
    def test_shapes(self, folder, shape):
        np.save(folder / TIMES / NAMES[0], np.ones(shape))
        with pytest.raises(CorruptDatasetError, match=NAMES[0]):
            load_times(folder)

    def test_an_endless_time(self, folder):
        np.save(folder / TIMES / NAMES[0], np.array([3.0, float("inf"), 2.0]))
        with pytest.raises(CorruptDatasetError):
            load_times(folder)
