"""The Makefile: every target in a path with spaces, and which Python it accepts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repro import paths

pytestmark = [
    pytest.mark.skipif(shutil.which("make") is None, reason="there is no make"),
    pytest.mark.skipif(paths.INSTALLED, reason="not a checkout"),
]

# Stands in for the environment's Python: notes the data folder and each argument as it came.
PYTHON = """#!/bin/sh
line=$(printf '<%s>' "$REPRO_DATA" "$@")
printf '%s\\n' "$line" >>python.log  # in one piece: two may write at once
case "$*" in *default_profile*) echo quick;; esac
exit "${FAILS_WITH:-0}"
"""
TARGETS = (
    *("help", "setup", "doctor", "lab", "data", "test", "nbval", "smoke", "reproduce-all"),
    *("reproduce-mbs", "reproduce-microconv", "reproduce-together"),
    *("report", "status", "lint", "typecheck", "test-fast", "test-thorough", "coverage"),
)


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "REPRO_"))}
    return subprocess.run(["make", *arguments], cwd=folder, env=kept | environment,
                          capture_output=True, text=True, timeout=60)  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    """A checkout in a path with spaces, with an environment that only takes notes."""
    folder = tmp_path / "a check out"
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("repro", "tests", "benchmarks"):
        (folder / name / "__pycache__").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(paths.ROOT / name, folder)
    (folder / ".venv" / "bin" / "python").write_text(PYTHON)
    (folder / ".venv" / "bin" / "python").chmod(0o755)
    (folder / ".venv" / ".installed").touch()
    return folder


def noted(folder: Path) -> list[str]:
    lines = (folder / "python.log").read_text().splitlines()
    (folder / "python.log").unlink()
    return lines


def test_every_target_with_spaces_in_all_paths(checkout, tmp_path):
    data = str(tmp_path / "my data $HOME 'x'")
    (tmp_path / "tmp dir").mkdir()
    for target in TARGETS:
        done = make(checkout, target, f"DATA={data}", "SEEDS=0, 5", TMPDIR=f"{tmp_path}/tmp dir")
        assert (done.returncode, done.stderr) == (0, ""), target
        if target not in ("help", "setup"):
            lines = noted(checkout)
            assert lines and all(line.startswith(f"<{data}><-") for line in lines), (target, lines)
            if target.startswith("reproduce"):
                assert "<run>" in lines[0] and lines[0].endswith("<--seeds><0, 5>")
                assert any("<notebooks>" in line for line in lines)
    assert not list((tmp_path / "tmp dir").iterdir())
    # The ways to name the folder: a variable of make, of the environment, or none.
    for arguments, environment, expected in (
        (["DATA=rel data"], {}, "rel data"),
        ([], {"DATA": "~/rel"}, "~/rel"),
        ([], {"REPRO_DATA": data}, data),
        (["REPRO_DATA=/a b"], {}, "/a b"),
        ([], {}, ""),
    ):
        make(checkout, "status", *arguments, **environment)
        assert noted(checkout) == [f"<{expected}><-m><repro><status>"]
    assert make(checkout, "clean").returncode == 0
    assert not (checkout / ".venv").exists() and not list(checkout.rglob("__pycache__"))


def test_a_usage_error_ends_a_reproduction_at_once(checkout):
    for status, calls in (("2", 1), ("1", 4)):
        done = make(checkout, "reproduce-all", FAILS_WITH=status)
        assert done.returncode == 2  # make's own
        assert len(noted(checkout)) >= calls and ("make status" in done.stdout) is (status == "1")


def test_lab_listens_on_loopback_and_for_root_too(checkout):
    make(checkout, "lab")
    root = "<--allow-root>" * (os.getuid() == 0)
    assert noted(checkout) == [f"<><-m><jupyterlab><notebooks><--ip=127.0.0.1>{root}"]


class TestPython:
    """`make setup` refuses a Python that is too old or too new in one line, and makes nothing."""

    @pytest.mark.parametrize("version", ["2.7.18", "3.6.15", "3.10.13", "3.14.0", "absent"])
    def test_out_of_range(self, checkout, tmp_path, version):
        shutil.rmtree(checkout / ".venv")
        python = tmp_path / "a python"
        if version != "absent":
            major, minor, micro = version.split(".")
            claimed = f"import sys; sys.version_info = ({major}, {minor}, {micro}); "
            claimed += f"sys.version = '{version} (main)'; "
            python.write_text(f'#!/bin/sh\nshift; s=$1; shift\nexec "{sys.executable}" -c '
                              f'"{claimed}$s" "$@"\n')  # fmt: skip
            python.chmod(0o755)
        for target in ("setup", "lab", "reproduce-all"):
            done = make(checkout, target, f"PYTHON={python}")
            (line,) = done.stderr.splitlines()
            assert (done.returncode, done.stdout) == (2, "")
            why = "it does not run" if version == "absent" else f"it is {version}"
            assert f"needs Python >=3.11,<3.14, and not {python}, as {why}: run make setup" in line
            assert not (checkout / ".venv").exists()
