"""The package as others get it: built to a wheel, installed, used from somebody's repository."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from repro import __version__, paths
from repro.experiments import PAPERS, load_paper, query

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(paths.INSTALLED, reason="not a checkout"),
    pytest.mark.skipif(shutil.which("git") is None, reason="there is no git"),
]

# Builds what a packager builds, the wheel of the source distribution among it.
BUILD = """
    import os, sys, tarfile
    from setuptools import build_meta

    out = sys.argv[1]
    os.chdir(sys.argv[2])
    sdist = build_meta.build_sdist(out)
    build_meta.build_wheel(f"{out}/from checkout")
    with tarfile.open(f"{out}/{sdist}") as archive:
        archive.extractall(f"{out}/unpacked", filter="data")
    os.chdir(f"{out}/unpacked/{sdist.removesuffix('.tar.gz')}")
    build_meta.build_wheel(f"{out}/from sdist")
"""

# Uses the installed package in one process: the commands, then what they rest on.
USE = """
    import json, runpy, sys
    from pathlib import Path

    def command(*arguments):
        sys.argv = ["repro", *arguments]
        try:
            runpy.run_module("repro", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code

    ends = [command(*line) for line in (
        ["list"], ["show", "mbs/table1", "--setup"], ["status"], ["notebooks", "none"],
        ["notebooks", "00_overview", "--refresh"],
        ["run", "dualbatch/table2", "--profile", "smoke", "--device", "cpu"],
    )]

    from repro import notebooks, paths, records
    from repro.experiments import PAPERS, load_paper, query

    keys = [record.key for paper in map(load_paper, PAPERS)
            for results in query.find_source(paper, local=False).records.values()
            for record in results]
    tiny = {
        "cells": [{"cell_type": "code", "execution_count": None, "id": "a", "outputs": [],
                   "metadata": {"tags": ["parameters"]},
                   "source": "import os\\nfrom repro import paths\\n"
                             "print(paths.INSTALLED, paths.results_dir(), os.getcwd())"}],
        "metadata": {"kernelspec": {"display_name": "a", "language": "python", "name": "python3"}},
        "nbformat": 4, "nbformat_minor": 5,
    }
    Path("tiny.ipynb").write_text(json.dumps(tiny))
    said, _ = notebooks.execute(Path("tiny.ipynb"), {})
    printed = json.loads(Path("results/local/notebooks/tiny.ipynb").read_text())["cells"][0]
    print("FACTS" + json.dumps({
        "ends": ends, "keys": keys, "commit": records.commit_state(),
        "package": str(paths.PACKAGE), "notebooks": [str(p) for p in notebooks.find([])],
        "executed": said, "printed": printed["outputs"][0]["text"],
        "records": [str(p) for p in Path().rglob("*.json")],
        "made from": [r.commit for r in records.local_store("smoke").load("dualbatch")],
    }))
"""


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    command = ["git", "-C", str(folder), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def python(*arguments: Any, **options: Any) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True,
                          timeout=120, **options)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@dataclass(frozen=True)
class Built:
    """What was built, and of what."""

    project: Path
    commit: str
    sdist: Path
    wheel: Path
    again: Path  # the wheel of the source distribution


def files(*options: str) -> list[str]:
    """Return what git lists of the checkout and is there."""
    listed = paths.git("ls-files", "-z", *options)
    if listed is None:
        pytest.skip("git does not know this checkout")
    return [name for name in os.fsdecode(listed).split("\0") if (paths.ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    pytest.importorskip("setuptools", minversion="77")
    out = tmp_path_factory.mktemp("built")
    project = out / "a check out"
    for name in files("--cached", "--others", "--exclude-standard"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(paths.ROOT / name, project / name)
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "all")
    # What a build long ago left, what a killed writer left, what a user made.
    for left in ("build/lib/repro/mbs/gone.py", "build/lib/repro/shipped/notebooks/gone.ipynb",
                 "results/reference/cpu-2-cores/quick/.mbs.jsonl.gz.tmp", "results/local/x.json",
                 "notebooks/Untitled.ipynb", "data/flowers5.tar.xz"):  # fmt: skip
        (project / left).parent.mkdir(parents=True, exist_ok=True)
        (project / left).write_text("")
    python("-c", textwrap.dedent(BUILD), out, project, env=os.environ | {"GIT_DIR": str(out)})
    (sdist,) = out.glob("*.tar.gz")
    (wheel,), (again,) = ((out / name).glob("*.whl") for name in ("from checkout", "from sdist"))
    return Built(project, git(project, "rev-parse", "HEAD"), sdist, wheel, again)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_wheel_carries_records_and_notebooks_and_the_sdist_makes_the_same(built):
    files = contents(built.wheel)
    assert files == contents(built.again)
    shipped = {name: text for name, text in files.items() if name.startswith("repro/shipped/")}
    reference, books = built.project / "results" / "reference", built.project / "notebooks"
    expected = {
        f"repro/shipped/reference/{f.relative_to(reference).as_posix()}": f.read_bytes()
        for f in reference.rglob("*.jsonl.gz")
    } | {f"repro/shipped/notebooks/{f.name}": f.read_bytes() for f in books.glob("[0-9]*.ipynb")}
    assert shipped == expected and len(expected) > 2 * len(PAPERS)
    assert json.loads(files["repro/build.json"]) == {"commit": built.commit, "dirty": False}
    tracked = set(git(built.project, "ls-files", "repro").splitlines())
    others = {n for n in files if n.startswith("repro/")} - shipped.keys() - {"repro/build.json"}
    assert others == tracked
    facts = f"repro-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in files} == {"repro", facts}
    assert "repro = repro.__main__:main" in files[f"{facts}/entry_points.txt"].decode()


@pytest.fixture(scope="module")
def site(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed within somebody's repository."""
    theirs = tmp_path_factory.mktemp("theirs")
    git(theirs, "init", "-q")
    git(theirs, "commit", "-q", "--allow-empty", "-m", "theirs")
    options = ("--no-deps", "--no-compile", "--no-index", "--quiet", "--target")
    python("-m", "pip", "install", "--disable-pip-version-check", "--root-user-action", "ignore",
           *options, theirs / "site", built.wheel)  # fmt: skip
    (theirs / "work").mkdir()
    return theirs / "site"


def test_used_from_somebodys_repository(built, site, tmp_path):
    dropped = ("REPRO_RESULTS", "REPRO_CACHE", "REPRO_DATA", "XDG_CACHE_HOME")
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    environment |= {"PYTHONPATH": str(site), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    work = site.parent / "work"
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*") if path.suffix != ".pyc"}
    done = python("-B", "-c", textwrap.dedent(USE), cwd=work, env=environment)
    text, _, raw = done.stdout.partition("FACTS")
    facts = json.loads(raw)
    assert facts["package"] == str(site / "repro")
    assert facts["ends"] == [0, 0, 0, 2, 2, 0], done.stderr
    # The reference records are found, and the folders are named.
    assert "mbs/table4" in text and "reference records, cpu-2-cores" in " ".join(text.split())
    looked = f"of this machine in {work}/results/local, for reference records in "
    looked += f"{work}/results/reference and {site}/repro/shipped/reference."
    assert " ".join(text.split()).count(looked) == 2 and "Not run yet" not in text
    # They are all read, as they are in the checkout.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_RESULTS", str(paths.ROOT / "results"))
        sources = [query.find_source(load_paper(paper), local=False) for paper in PAPERS]
        keys = [r.key for source in sources for own in source.records.values() for r in own]
    assert facts["keys"] == keys and len(keys) > 100
    # A record's commit is the one that was built, whosever repository this is.
    assert facts["commit"] == [built.commit, False]
    assert facts["made from"] and set(facts["made from"]) == {built.commit}
    # The notebooks are found; kernels mean the same folders.
    shipped = site / "repro" / "shipped" / "notebooks"
    assert facts["notebooks"] == sorted(str(path) for path in shipped.glob("*.ipynb"))
    assert "done, " in facts["executed"]
    assert facts["printed"] == [f"True {work}/results {work}\n"]
    assert "choose among 00_overview, " in done.stderr and "installed package" in done.stderr
    # What is made lies where it is used, nothing in the package.
    assert facts["records"] and all(name.startswith("results/local/") for name in facts["records"])
    after = {path: path.stat().st_mtime_ns for path in site.rglob("*") if path.suffix != ".pyc"}
    assert after == before
