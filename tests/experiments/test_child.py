"""A function in a process of its own."""

import os

import pytest

from repro.experiments.processes import in_a_process


def test_arguments_and_variables_go_there_and_the_result_comes_back():
    assert in_a_process("os:getenv", ["REPRO_TOLD"], {"REPRO_TOLD": "ü"}) == "ü"
    assert in_a_process("builtins:sorted", [[3, 1, 2]]) == [1, 2, 3]
    assert in_a_process("os:getpid", []) != os.getpid()


def test_what_fails_there_is_told_without_frames(tmp_path, monkeypatch):
    crash = "import sys\n\ndef now():\n    sys.exit('CUDA error\\n' + 99 * 'frame #1: a.so\\n')\n"
    (tmp_path / "crashing.py").write_text(crash)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"^the process of crashing:now failed: CUDA error$"):
        in_a_process("crashing:now", [])
