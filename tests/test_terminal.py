"""The terminal: nothing of a number or a name is cut, whatever the width."""

import io
import re
import sys

import pytest
from commands import command_line

from repro import __main__ as cli
from repro import paths, terminal
from repro.experiments import PAPERS, load_paper, showing, view
from repro.experiments.design import claims_of
from repro.experiments.judge import Estimate
from repro.report import cells_of

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
        assert "nan" not in text and "None" not in text
        assert "one; long" in text

    def test_columns_beyond_the_width_follow_below(self, columns):
        names = ("first", "second", "third", "fourth")
        wide = [dict.fromkeys(names, f"{n}" * 19) for n in range(3)]
        columns(82)
        assert terminal.table(wide).count("first") == 1
        for width in (61, 40):
            columns(width)
            text = terminal.table(wide)
            assert max(map(len, text.splitlines())) <= width
            heads = [line.split() for line in text.splitlines() if line.startswith("first")]
            assert len(heads) == (2 if width == 61 else 3)
            assert [name for head in heads for name in head if name != "first"] == [*names[1:]]

    def test_further_tables_begin_with_what_tells_the_rows_apart(self, columns):
        columns(60)
        long = {"x": "x" * 29, "y": "y" * 29}
        rows = [{"model": "ab"[n % 2], "batch": n // 2} | long for n in range(9)]
        text = terminal.table(rows)
        assert text.count("model  batch") == 2 and "more rows" not in text
        text = terminal.table(rows, most=8)
        assert text.count("x" * 29) == text.count("y" * 29) == 4
        assert text.endswith("5 more rows: --evidence")

    def test_further_tables_leave_no_two_rows_alike(self, columns):
        """Whatever tells rows apart is repeated, folded if need be; what tells nothing is not."""
        columns(80)
        rows = [
            {"where": "measured, " + "x" * 9, "same": "fp32", "method": f"in core, {way} {n} each",
             "a": "1 " * 12, "b": "2 " * 12, "c": "3 " * 12}
            for way in ("schedule and chunks", "expandable segments") for n in (8, 64)
        ]  # fmt: skip
        text = terminal.table(rows)
        tables = text.split("\n\n")
        assert len(tables) > 1 and max(map(len, text.splitlines())) <= 80
        assert text.count("same") == 1
        for table in tables:
            assert [table.count(word) for word in ("method", "expandable", "64")] == [1, 2, 2]

    def test_headings_are_folded_before_cells(self, columns):
        columns(60)
        headings = ("a heading that is long", "another such heading", "and a further heading")
        rows = [{"model": "U-Net of width 4 (for U-Net)", **dict.fromkeys(headings, "1")}]
        assert "U-Net of width 4 (for U-Net)" in terminal.table(rows)

    def test_prose_breaks_no_path(self, columns):
        columns(40)
        path = "/a-folder" * 20
        assert path in terminal.prose(f"Some words before it, and then {path}.").splitlines()[-1]


@pytest.fixture
def reference(results_folder):
    """The reference records, and none of this machine's."""
    results_folder.mkdir()
    (results_folder / "reference").symlink_to(paths.ROOT / "results" / "reference")


@pytest.fixture
def run(monkeypatch, capsys, columns, reference):
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
        assert len(shown) == len(load_paper(paper).artefacts) and "Shown: reference records" in out
        assert "…" not in out and "\x1b" not in out
        assert [line for line in out.splitlines() if len(line) > 100] == []

    @pytest.mark.slow
    @pytest.mark.parametrize("paper", PAPERS)
    def test_show_has_all_columns_and_whole_numbers(self, columns, reference, paper):
        """Of every artefact, with its reference records."""
        for source, artefact, results in showing.found(paper, None, None):
            for width in (80, 100):
                columns(width)
                text = showing.text(source, artefact, results)
                assert max(map(len, text.splitlines())) <= width and "…" not in text
            flat = " ".join(text.split())
            for name in cells_of(list(artefact.rows(results))):
                assert all(word in flat for word in name.split()), (artefact.name, name)
            for row in view.verdicts(source.paper, artefact, results):
                written = claims_of(paper)[artefact.name][row["key"].rpartition(".")[2]]
                _, verdict, used = view.judged(artefact, written, results)
                after = flat.partition(f": {' '.join(row['claim'].split())} ")[2]
                if verdict.word == "not run":
                    reason = re.split(r";| \[", verdict.evidence)[0]
                    assert after.startswith(" ".join(reason.split()))
                    continue
                cases = artefact.claims[written.key](used).values()
                numbers = [
                    f"{case.shown(case.mean)} {case.unit}".strip()
                    for case in cases if isinstance(case, Estimate)
                ]  # fmt: skip
                assert not numbers or after.startswith(tuple(numbers)), (row["key"], after[:80])
                if used is not results:
                    assert f"{used.records[0].device['name']}): {row['claim']}"[:50] in flat

    @pytest.mark.slow
    def test_show_fits_a_screen_and_leads_to_other_devices(self, run):
        out = run("show", "mbs/table4")[1]
        assert len(out.splitlines()) <= 60 and "(another machine, NVIDIA H200): Dividing" in out
        assert "The rows of NVIDIA H200: --profile gpu" in out
        assert "The rows of NVIDIA H200: --profile gpu" in run("show", "microconv/figure9")[1]
        assert "The rows of" not in run("show", "mbs/table4", "--profile", "gpu")[1]
        out = run("show", "mbs/table4", "--profile", "gpu", "--evidence")[1]
        assert re.search(r"ResNet-50 +1024 +μ=16 .* 1 step fits", out)

    @pytest.mark.parametrize("width", [100, 140])
    def test_help_sums_up_each_command_in_a_line(self, run, columns, width):
        columns(width)
        out = run("--help")[1]
        assert [*re.findall(r"─ (\w+) ─", out)] == ["Options", "Run", "Look", "Maintain"]
        assert "..." not in out.partition("─")[2]
        lines = dict(re.findall(r"^│ ([a-z]+) +(\S.*?) *│$", out, re.MULTILINE))
        assert len(lines) == len(cli.app.registered_commands)
        assert all(20 < len(line) <= 60 and line.endswith(".") for line in lines.values())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_beside_a_bar_are_whole_and_the_cursor_comes_back(columns, monkeypatch):
    columns(60)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    line = f"run [red] failed :smile: {'long ' * 40}"
    with pytest.raises(KeyboardInterrupt), terminal.Bar("mbs", 2, shown=True) as bar:
        bar.say("run [bold]")
        bar.step()
        bar.write(line)
        raise KeyboardInterrupt
    shown = stream.getvalue()
    assert line in shown and "run [bold]" in shown and "1/2" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
