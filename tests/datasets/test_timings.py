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
    np.save(folder / TIMES / NAMES[0], np.array([9, 5, 3], dtype=np.int32))  # no empty entry
    whole = load_times(folder).seconds["PyTorch"]
    assert whole.tolist() == [9.0, 5.0, 3.0] and whole.dtype == np.float64


def test_both_files_are_needed(folder, tmp_path, monkeypatch):
    (folder / TIMES / NAMES[1]).unlink()
    assert find_times(folder) is None
    monkeypatch.setenv("REPRO_DATA", str(tmp_path / "a"))
    with pytest.raises(DatasetNotFoundError) as caught:
        load_times(folder)
    places = [str(folder), *(str(tmp_path / place) for place in ("a", "checkout/data"))]
    for text in (TIMES, *NAMES, *places, "copy the folder", "$REPRO_DATA"):
        assert text in str(caught.value)


OBJECTS = np.array([{"a": 1}], dtype=object)  # which only a pickle holds
NO_TIMES = (b"seconds: 3", b"", "cut", OBJECTS, [1.0], [0.0, 0.0], [3.0, -1.0, 2.0],
            [3.0, np.nan, 2.0], [3.0, np.inf, 2.0], np.ones((2, 3)), 1.0)  # fmt: skip


@pytest.mark.parametrize("content", NO_TIMES)
def test_what_is_no_times(folder, content):
    path = folder / TIMES / NAMES[0]
    if isinstance(content, bytes | str):
        path.write_bytes(path.read_bytes()[:-12] if content == "cut" else content)
    else:
        np.save(path, np.asarray(content), allow_pickle=content is OBJECTS)
    with pytest.raises(CorruptDatasetError, match=f"{NAMES[0]} cannot be read"):
        load_times(folder)
