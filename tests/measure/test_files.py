"""A file is written whole or not at all."""

import os
from pathlib import Path

import pytest

from repro.measure.files import replacing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_is_made_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with replacing(path) as temporary:
        temporary.write_text("first")
        assert temporary.name == f".file.txt.{os.getpid()}.tmp" and not path.exists()
    assert path.read_text() == "first" and names(path.parent) == ["file.txt"]


@pytest.mark.parametrize("moment", ["writing", "fsync", "replace"])
def test_what_stops_it_leaves_the_old_file(tmp_path, monkeypatch, moment):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def crash(*arguments):
        raise KeyboardInterrupt

    if moment == "fsync":
        monkeypatch.setattr(os, "fsync", crash)
    elif moment == "replace":
        monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("new")
        if moment == "writing":
            crash()
    monkeypatch.undo()
    assert path.read_text() == "old" and names(tmp_path) == ["file.txt"]
