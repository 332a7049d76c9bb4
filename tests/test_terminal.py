"""The terminal: nothing of a number or a name is cut, whatever the width."""

import io
import sys

import pytest
from commands import command_line

from repro import terminal
from repro.experiments import PAPERS, load_paper

ROWS = [
    {"model": "ResNet-50", "ours (%)": "87.16 ± 0.33", "evidence": "one; " + "long " * 30, "n": 3},
    {"model": "<b>[red]U-Net", "ours (%)": None, "evidence": "μ \x1b[2J", "n": float("nan")},
]


@pytest.fixture
def columns(monkeypatch):
    def use(number: int) -> None:
        monkeypatch.setenv("COLUMNS", str(number))

    return use


class TestTable:
    def test_cells_are_folded_between_words(self, columns):
        columns(60)
        text = terminal.table(ROWS, "Title")
        lines = text.splitlines()
        assert lines[0] == "Title" and max(map(len, lines)) <= 60
        assert "87.16 ± 0.33" in text and text.split().count("long") == 30
        assert "<b>[red]U-Net" in text and "\\x1b[2J" in text  # neither markup nor a command
        assert "nan" not in text and "None" not in text and "Left out" not in text
        assert any(line.split()[-2:] == ["one;", "3"] for line in lines)  # a line for each part

    def test_columns_are_left_out_from_the_right_and_named(self, columns):
        wide = [dict.fromkeys(("first", "second", "third", "fourth"), "x" * 19)]
        columns(82)
        assert "Left out" not in terminal.table(wide)
        columns(61)
        text = " ".join(terminal.table(wide).split())
        assert "Left out at 61 columns: fourth. 82 columns show all" in text
        columns(40)
        assert "Left out at 40 columns: third; fourth." in terminal.table(wide)

    def test_prose_breaks_no_path(self, columns):
        columns(40)
        path = "/a-folder" * 20
        assert path in terminal.prose(f"Some words before it, and then {path}.").splitlines()[-1]


@pytest.fixture
def run(monkeypatch, capsys, columns, results_folder):
    columns(100)
    return command_line(monkeypatch, capsys)


class TestAt100Columns:
    @pytest.mark.slow
    @pytest.mark.parametrize("paper", PAPERS)
    def test_show_cuts_nothing(self, run, paper):
        """Of every artefact, with its reference records."""
        code, out, err = run("show", paper, "--evidence", "--setup")
        assert (code, err) == (0, "")
        shown = [line for line in out.splitlines() if line.startswith(f"{paper}/")]
        assert len(shown) == len(load_paper(paper).artefacts) and "reference records" in out
        assert "…" not in out and "\x1b" not in out
        assert [line for line in out.splitlines() if len(line) > 100] == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestBar:
    def test_lines_are_whole_and_the_cursor_comes_back(self, columns, monkeypatch):
        columns(60)
        monkeypatch.setattr(sys, "stderr", stream := Terminal())
        monkeypatch.setenv("TERM", "xterm")
        line = f"run [red] failed :smile: {'long ' * 40}"
        with pytest.raises(KeyboardInterrupt), terminal.Bar("mbs", 2, shown=True) as bar:
            bar.say("run [bold]")
            bar.advance()
            bar.write(line)
            raise KeyboardInterrupt
        shown = stream.getvalue()
        assert line in shown and "run [bold]" in shown and "1/2" in shown
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
