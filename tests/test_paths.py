"""Where things are looked for and kept, and that a data folder that was given is one."""

from pathlib import Path

import pytest

from repro import datasets, paths
from repro.datasets import CorruptDatasetError, DatasetError
from repro.experiments import UsageError
from repro.measure.files import cache_folder

# What a data folder may be that is none.
NO_FOLDERS = (
    *("missing", "file", "file/below", "broken", "circle", "n" * 300),
    "~nobody-of-that-name/data",
)


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """A working directory with all kinds of folders that are none."""
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "with spaces").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestDataFolders:
    def test_in_a_notebook_and_as_a_library(self, cwd, monkeypatch):
        Session = pytest.importorskip("repro.experiments.session").Session

        def asked(root):
            return [
                (UsageError, lambda: Session("mbs", data=root)),
                (UsageError, lambda: Session("mbs", "smoke", data=root)),
                (DatasetError, lambda: datasets.available(root or None)),
                (DatasetError, lambda: datasets.load("flowers5", root or None)),
            ]

        # It would be found here, in the place of what was given.
        monkeypatch.setattr(paths, "ROOT", cwd)
        (cwd / "data").mkdir()
        (cwd / "data" / "flowers5.tar.xz").write_text("")

        for error, call in asked("missing"):
            with pytest.raises(error, match=r"data folder 'missing' cannot be read .*; make it"):
                call()
        monkeypatch.setenv("REPRO_DATA", str(cwd / "broken"))
        for error, call in asked(""):
            with pytest.raises(error, match=r"broken' of \$REPRO_DATA cannot be read"):
                call()
        assert len(datasets.load("digits").train) > 0  # which no folder holds
        with pytest.raises(CorruptDatasetError):  # what is read is in the folder that was given
            datasets.load("flowers5", "data")
        for given in NO_FOLDERS:
            with pytest.raises((DatasetError, OSError), match=r"older|too long"):
                datasets.load("flowers5", given)

    def test_folders_that_are_there(self, cwd, monkeypatch):
        (cwd / "link").symlink_to("with spaces")
        monkeypatch.setenv("HOME", str(cwd))
        for given in ("with spaces", "link", "~/with spaces", str(cwd / "with spaces"), "."):
            assert paths.data_problem(given) is None
            assert paths.data_roots(given)[0] == (cwd / given.replace("~", ".")).resolve()
            assert given == "link" or datasets.available(given)
        # A kernel's working directory is another: a path from the checkout is found as well.
        assert paths.data_problem("data") is None
        assert paths.data_roots("data")[0] == paths.ROOT / "data"
        monkeypatch.setenv("REPRO_DATA", "")
        assert paths.data_problem() is None and paths.data_roots() == [paths.ROOT / "data"]


def test_caches_have_one_place(tmp_path, monkeypatch):
    from repro.microconv.cache import default_path

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    rules = {
        ("own", ""): tmp_path / "own",
        ("~/own", "/xdg"): tmp_path / "own",
        ("", "/xdg"): Path("/xdg/repro"),
        ("", "relative"): tmp_path / ".cache" / "repro",  # as XDG's specification asks
        ("", ""): tmp_path / ".cache" / "repro",
    }
    for (given, xdg), expected in rules.items():
        monkeypatch.setenv("REPRO_CACHE", given)
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert cache_folder() == default_path().parent == expected
    monkeypatch.setenv("REPRO_CACHE", "~nobody-of-that-name/cache")
    with pytest.raises(OSError, match=r"name a folder as \$REPRO_CACHE"):
        cache_folder()
