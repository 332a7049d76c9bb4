"""The command line in this process, for tests of what it says."""

import sys
from collections.abc import Callable

import pytest

from repro import __main__ as cli


def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable:
    """Return what runs a command without a network: its exit code, stdout and stderr."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("the network is closed")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["python -m repro", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    return run
