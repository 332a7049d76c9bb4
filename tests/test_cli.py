"""The command line: what it prints, and that bad input ends with one line and exit code 2."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import command_line

from repro import notebooks, paths, report
from repro.experiments import arguments, golden, load_paper, query, showing
from repro.experiments.processes import WorkerDied
from repro.records import CorruptRecordWarning, local_store

COUNT = len(load_paper("mbs").artefacts)
REFERENCE = paths.ROOT / "results" / "reference"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command in this process; return its exit code, stdout and stderr."""

    monkeypatch.setattr(paths, "ROOT", tmp_path / "checkout")  # the user's data is not searched
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_mbs.ipynb").write_text("{}")
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path / "notebooks")
    return command_line(monkeypatch, capsys)


@pytest.fixture
def reproduced(smoke, results_folder) -> Path:
    """A results folder of this test's own that holds the smoke reproduction."""
    shutil.copytree(smoke, results_folder)
    return results_folder


def snapshot(folder: Path) -> dict[Path, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


class TestCommands:
    def test_a_failed_run_is_told_by_the_exit_code(self, run, results_folder, monkeypatch):
        from repro.experiments.mbs import measuring

        def broken(config, seed, data, device):
            raise RuntimeError("it broke")

        monkeypatch.setattr(measuring, "timeline", broken)
        command = ("run", "mbs/figure2", "--profile", "smoke", "--device", "cpu")
        code, out, err = run(*command)
        assert code == 1 and "1 failed" in out
        assert "failed" in err and "RuntimeError: it broke" in err
        code, out, err = run(*command)  # it stands, and still failed, and says why
        (line,) = err.splitlines()
        assert code == 1 and "failed before" in line and "RuntimeError: it broke" in line
        assert "1 failed before, --retry-failed computes them again" in out
        monkeypatch.undo()
        monkeypatch.setenv("REPRO_RESULTS", str(results_folder))

    def test_without_ray_other_artefacts_are_computed(self, run, results_folder, monkeypatch):
        monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
        options = ("--set", "engine=ray", *SMOKE)
        code, out, err = run("run", "dualbatch/engines", "dualbatch/table2", *options)
        assert code == 1 and "left out (ray is not installed: pip install" in out
        assert len([line for line in err.splitlines() if "pip install" in line]) == 1
        assert [p.name for p in results_folder.rglob("*.json")] != [] and "0 computed" not in out
        code, out, err = run("run", "dualbatch/engines", *options)
        assert code == 1 and "left out (ray is not installed: pip install" in out

    @pytest.mark.slow
    def test_figure(self, run, reproduced, tmp_path):
        for form, begins in (("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")):
            path = tmp_path / "new" / f"my.{form}"
            command = ("figure", "mbs/figure3", "--out", str(path))
            assert run(*command) == (0, f"figure: {path}\n", "")
            content = path.read_bytes()
            assert content.startswith(begins) and (b"<svg" in content) == (form == "svg")

    @pytest.mark.parametrize("artefact", ["table2", "table5", "figure3"])
    def test_show(self, run, reproduced, artefact):
        code, out, err = run("show", f"mbs/{artefact}")
        assert (code, err) == (0, "")
        assert "this machine, profile smoke" in " ".join(out.split()) and "paper" in out
        assert "(smaller): " in out or artefact == "table2"  # which has checks alone
        whole = run("show", f"mbs/{artefact}", "--evidence", "--setup")[1]
        assert ("Checks" if artefact == "table2" else "Claims") in whole and "Setup" in whole
        assert "photos" in out or "digits" in out
        assert "out of memory" in out or artefact != "table5"

    def test_status(self, run, reproduced):
        code, out, err = run("status", "--json")
        assert (code, err) == (0, "")
        rows = {row["artefact"]: row for row in json.loads(out)}
        assert len(rows) == len(load_paper("mbs").artefacts)
        for row in rows.values():
            assert row["profile"] == "smoke"
            assert row["ok"] + row["out of memory"] == row["runs"] > 0
            assert row["failed"] == row["missing"] == 0
        assert rows["mbs/table5"]["out of memory"] > 0
        code, out, _ = run("status")
        assert f"{COUNT} of {COUNT} artefacts have all their records" in out
        assert code == 0 and "mbs/table5" not in out
        next(reproduced.rglob("timeline-*.json")).unlink()
        rows = {row["artefact"]: row for row in json.loads(run("status", "--json")[1])}
        assert rows["mbs/figure2"]["missing"] == 1
        code, out, _ = run("status")
        assert f"{COUNT - 1} of {COUNT} artefacts have all their records (profile smoke)." in out
        assert "mbs/figure2" in out and "mbs/table5" not in out

    @pytest.mark.slow
    def test_report(self, run, reproduced, tmp_path, monkeypatch):
        papers = ["mbs", "microconv"]  # one with records, one without
        monkeypatch.setattr(showing, "PAPERS", papers)
        path = tmp_path / "new" / "my.md"
        code, out, err = run("report", "--output", str(path))
        assert (code, err) == (0, "")
        assert f"report: {path}" in out.replace("\n", "") and "Verdicts" in out
        text = path.read_text()
        artefacts = [(key, a) for key in papers for a in load_paper(key).artefacts.values()]
        assert re.findall("^### (.*?): ", text, re.MULTILINE) == [a.source for _, a in artefacts]
        figures = re.findall(r"!\[.*\]\((.*)\)", text)
        assert figures == [f"my_files/{key}-{a.name}.png" for key, a in artefacts if a.draw]
        assert all((path.parent / figure).read_bytes()[1:4] == b"PNG" for figure in figures)

    def test_verify(self, run, results_folder, monkeypatch):
        monkeypatch.setattr(golden, "default_count", lambda profile, device: 1)
        assert run("run", "dualbatch/table2", *SMOKE)[0] == 0
        (path,) = results_folder.rglob("solve-*.json")
        record = json.loads(path.read_text())
        code, out, err = run("verify", "dualbatch", "--from", "local")
        assert (code, err) == (0, "")
        assert f"dualbatch solve {record['key']} seed 0 agrees to the bit: rows" in out
        record["metrics"]["rows"][1]["small_batch"] += 1
        path.write_text(json.dumps(record))
        code, out, err = run("verify", "dualbatch", "--from", "local")
        assert code == 1 and "1 differ" in err and "raise the experiment's version" in err
        assert f"solve {record['key']} seed 0 DIFFERS: rows[1].small_batch is " in out


SMOKE = ("--profile", "smoke", "--device", "cpu")


def test_a_corrupt_record_of_another_run_is_named_and_skipped(run, reproduced):
    path = next(reproduced.rglob("train-*.json"))
    path.write_text('{"accuracy": 3}')
    before = snapshot(reproduced)
    with pytest.warns(CorruptRecordWarning, match=rf"{path.name}.*move it away or delete it"):
        code, out, _ = run("run", "mbs/figure2", *SMOKE)
    assert code == 0 and out and snapshot(reproduced) == before


@pytest.mark.parametrize("command", [("show", "mbs/table3"), ("report",)])
def test_a_record_without_what_its_table_needs_is_named(run, reproduced, command):
    records_ = {path: json.loads(path.read_text()) for path in reproduced.rglob("train-*.json")}
    wanted = {"role": "U-Net", "mini_batch": 16, "resolution": "high"}
    chosen = [p for p, r in records_.items() if wanted.items() <= r["config"].items()]
    path = min(path for path in chosen if records_[path]["status"] == "ok")
    path.write_text(json.dumps(records_[path] | {"metrics": {}}))
    before = snapshot(reproduced)
    code, out, err = run(*command)
    (line,) = err.splitlines()
    assert (code, out) == (2, "") and str(path) in line and "move it away or delete it" in line
    assert snapshot(reproduced) == before


def test_a_record_that_fails_only_beside_others_is_named(run, results_folder):
    """Kernels are compared by layer: one without its layer can be shown alone."""
    (reference := results_folder / "reference").parent.mkdir()
    reference.symlink_to(REFERENCE)
    record = query.find_source(load_paper("microconv"), "quick").look("figure9").need("network")
    del record.metrics["kernels"][0]["layer"]
    path = local_store("quick").write(record)
    code, out, err = run("show", "microconv/figure9", "--profile", "quick")
    assert (code, out) == (2, "") and str(path) in err and "move it away or delete it" in err


LOCALES = r"""
import runpy, sys
wrong = "mbs/\udcff\udcc3\udca9\u03b8"
for command in (["list"], ["status"], ["show", "mbs/table3"], ["show", wrong]):
    sys.argv = ["repro", *command]
    try:
        runpy.run_module("repro", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(command, "ends", end.code, flush=True)
print(sys.getfilesystemencoding(), file=sys.stderr)
"""


@pytest.mark.slow
def test_output_is_utf8_and_hashes_are_the_same_whatever_the_locale(reproduced):
    folder = reproduced.with_name("résultats θ")
    reproduced.rename(folder)
    bad = os.fsencode(folder / "local" / "smoke" / "mbs") + b"/train-\xff-\xc3\xa9.json"
    Path(os.fsdecode(bad)).write_bytes(b"{")
    done = subprocess.run(
        [sys.executable, "-c", LOCALES],
        capture_output=True, timeout=60, check=True,
        env=os.environ | {"REPRO_RESULTS": str(folder), "LC_ALL": "C", "PYTHONUTF8": "0",
                          "PYTHONCOERCECLOCALE": "0"},
    )  # fmt: skip
    text, errors = done.stdout.decode(), done.stderr.decode()
    assert not text.isascii() and not errors.endswith("utf-8\n")  # as the locale would have it
    assert (text.count("] ends 0"), text.count("] ends 2")) == (3, 1)
    assert "train-\\udcff" in errors and "unknown artefact" in errors
    assert f"{COUNT} of {COUNT} artefacts have all their records" in text


def test_interrupted_while_it_computes(run, results_folder, monkeypatch):
    from repro.experiments.mbs import measuring

    def interrupted(config, seed, data, device):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    monkeypatch.setattr(measuring, "timeline", interrupted)
    command = ("run", "mbs/figure2", "--profile", "smoke", "--device", "cpu")
    assert run(*command) == (130, "", "interrupted: finished work is kept, run again to go on\n")
    assert not [path for path in results_folder.rglob("*") if path.is_file()]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_output_that_goes_nowhere(results_folder):
    """A reader that left is no error; a disk that is full is one, in one line."""
    command = [sys.executable, "-m", "repro", "list"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: No space left on device; free some space, then run again\n"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as left:
        left.stdout.close()
        assert left.stderr.read() == b""
    assert left.returncode == 128 + signal.SIGPIPE
    closed = subprocess.run([*command], stdout=None, stderr=subprocess.PIPE, timeout=60,
                            preexec_fn=lambda: os.close(1))  # fmt: skip
    assert (closed.returncode, closed.stderr) == (0, b"")


# What a terminal, a browser, Markdown, MathJax and matplotlib would each make something of.
EVIL = (
    "<script>alert(1)</script><img src=x onerror=y>&lt;[a](javascript:b) ![c](http://d) _e_ *f* "
    r"`g` $\frac{h$ $$i$$ \(j\) \[k\] [red]l[/red] "
    "\x1b]0;m\x07\x1b[2J\x9b31m\u202en\r\x00"
)


@pytest.fixture
def planted(reproduced) -> Path:
    """Records whose texts are hostile, in a folder whose name is."""
    for path in reproduced.rglob("*.json"):
        content = json.loads(path.read_text())
        content["command"] = content["commit"] = EVIL
        content["device"]["name"] = content["device"]["slug"] = EVIL
        content["versions"] = dict.fromkeys(content["versions"], EVIL)
        if content["dataset"] is not None:
            content["dataset"]["provenance"] = EVIL
        path.write_text(json.dumps(content))
    foreign = reproduced / "reference" / EVIL.replace("/", "|").replace("\0", "") / "smoke"
    shutil.copytree(reproduced / "local" / "smoke", foreign)
    return reproduced


class Tags(HTMLParser):
    """The tags of a page, their attributes, what they refer to, and its text but for styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.references: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self.references |= {value for name, value in attributes if name in ("href", "src")}

    def handle_data(self, data):
        if self.lasttag != "style":
            self.texts.append(data)


def check_page(page: str) -> str:
    """Return a page's text, after looking that nothing was made of what records say."""
    parsed = Tags(page)
    assert not parsed.tags & {"script", "em", "code"}
    local = ("#", "data:image/png;", "report_files/")
    assert all(reference.startswith(local) for reference in parsed.references)
    assert not parsed.attributes & {"onerror", "onclick"}
    for text in parsed.texts:
        assert "$" not in text or text == "$", text
        assert "\\" not in text or text == "\\", text
    text = "".join(parsed.texts)
    assert all(character.isprintable() or character == "\n" for character in text)
    return text


SEEN = "<script>alert(1)</script><img src=x onerror=y>&lt;[a](javascript:b) ![c](http://d) _e_ *f*"


class TestPlantedRecords:
    @pytest.mark.parametrize("command", [
        ("show", "mbs/table3", "--evidence", "--setup"), ("show", "mbs/table2"), ("status",),
        ("show", "mbs/figure2"), ("show", "mbs/table3", "--from", EVIL),
    ])  # fmt: skip
    def test_on_the_terminal(self, run, planted, command):
        code, out, err = run(*command)
        assert code == (2 if EVIL in command else 0), err
        for character in out + err:
            assert character.isprintable() or character in "\n", (character, out)
        if command[-1] == "--setup":
            assert "alert(1)" in out and r"\x1b]0;m\x07" in out

    @pytest.mark.slow
    def test_in_the_report(self, run, planted, monkeypatch):
        monkeypatch.setattr(showing, "PAPERS", ["mbs"])
        code, _, err = run("report", "--profile", "smoke")
        assert code == 0, err
        filters = pytest.importorskip("nbconvert.filters")
        page = filters.markdown2html((planted / "local" / "report.md").read_text())
        assert SEEN in check_page(page)

    def test_in_a_notebook(self, planted, monkeypatch):
        session_module = pytest.importorskip("repro.experiments.session")
        filters = pytest.importorskip("nbconvert.filters")
        shown: list = []
        monkeypatch.setattr(session_module, "display", shown.append)
        session = session_module.Session("mbs")
        session.appendix()
        for name in ("table3", "figure2"):
            session.show(name)
        texts = []
        for item in shown:
            if type(item).__name__ == "Markdown":
                texts.append(check_page(filters.markdown2html(item.data)))
            elif isinstance(item, report.Shown):
                texts.append(check_page(item.page.replace("&ensp;", " ")))
                assert all(c.isprintable() or c == "\n" for c in repr(item))
        assert sum(SEEN in text for text in texts) >= 2


def test_a_killed_process_of_a_report_is_one_line(run, monkeypatch):
    def killed(*_):
        raise WorkerDied("a process was killed")

    monkeypatch.setattr(showing.Workers, "map", killed)
    assert run("report") == (2, "", "error: a process was killed\n")


def test_a_defect_of_ours_keeps_its_traceback(run, monkeypatch):
    """Only what the user can mend is one line; all else must be findable."""
    monkeypatch.setattr(arguments, "check_profile", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("status", "--profile", "smoke")
