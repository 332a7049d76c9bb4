"""The notebooks as they stand, and the runner on tiny ones."""

import ast
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from repro import notebooks, paths
from repro.experiments import PAPERS, load_paper, story, summary
from repro.experiments.run import UsageError
from repro.report import LONG

FOLDER = paths.ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PARAMETER = re.compile(r"^[a-z_]+: (str|int|float|bool) = .+  # \S.*$")

# The only cells that nbval may leave uncompared, by their first line: widgets have fresh ids.
IGNORED = {
    "01_mbs": ["def explore(role, limit_share, mini_batch):"],
    "02_dualbatch": ["def explore(k, n_small, large_batch):"],
    "03_adaptive": ["def explore(task, peak, tolerance, largest):"],
    "04_outofcore": ["def explore(network, batch, budget, window):"],
    "05_microconv": ["def explore(kernel, share):", "def explore_total(share):"],
}

named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def tags(cell: dict[str, Any]) -> list[str]:
    return cell["metadata"].get("tags", [])


def test_every_paper_has_its_notebook_and_there_is_an_overview():
    names = {path.stem for path in NOTEBOOKS}
    assert names == {"00_overview"} | {load_paper(key).notebook for key in PAPERS}


class TestAsTheyStand:
    @named
    def test_exactly_one_parameters_cell_with_types_and_help(self, path):
        (cell,) = [cell for cell in cells(path, "code") if "parameters" in tags(cell)]
        lines = source(cell).splitlines()
        assert lines and all(PARAMETER.match(line) for line in lines), lines
        values = {}
        exec(source(cell), values)
        assert values["profile"] == "view"
        # Nothing comes before but text, and nothing is derived in it.
        first = next(c for c in read(path)["cells"] if c["cell_type"] == "code")
        assert tags(first) == ["parameters"]
        for node in ast.parse(source(cell)).body:
            assert isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant)

    @named
    def test_all_notebooks_have_the_same_parameters(self, path):
        """`python -m repro notebooks --profile quick` sets them for all."""
        (cell,) = [cell for cell in cells(path, "code") if "parameters" in tags(cell)]
        defined = [line.split(":")[0] for line in source(cell).splitlines()]
        assert defined == ["profile", "device", "data", "seeds", "reference"]

    @named
    def test_the_kernel_is_whatever_python3_is_here(self, path):
        metadata = read(path)["metadata"]
        assert metadata["kernelspec"]["name"] == "python3"
        assert set(metadata) <= {"kernelspec", "language_info"}
        assert read(path)["nbformat"] == 4

    @named
    def test_cells_were_executed_in_order(self, path):
        """nbval does not compare a cell without an execution count."""
        counts = [cell["execution_count"] for cell in cells(path, "code")]
        assert counts == list(range(1, len(counts) + 1))

    @named
    def test_no_output_is_an_error_or_a_warning(self, path):
        for cell in cells(path, "code"):
            for output in cell["outputs"]:
                assert output["output_type"] != "error"
                assert output.get("name") != "stderr", output.get("text")

    @named
    def test_no_path_of_a_machine(self, path):
        text = re.sub(r'"image/png": "[^"]*"', "", path.read_text())  # any letters are in there
        pattern = r"/(home|root|work|tmp|Users|opt|usr|var|mnt)/|[A-Z]:\\\\|ipykernel_\d"
        assert not re.search(pattern, text), re.search(pattern, text)

    @named
    def test_size_and_metadata(self, path):
        assert path.stat().st_size <= 2**20
        for cell in read(path)["cells"]:
            assert set(cell["metadata"]) <= {"tags"}, "papermill's or a widget's metadata is left"
            assert set(tags(cell)) <= {"parameters", "opening", "nbval-ignore-output"}

    @named
    def test_only_listed_cells_are_left_uncompared(self, path):
        ignored = [
            source(cell).splitlines()[0]
            for cell in cells(path, "code")
            if any(tag.startswith("nbval") for tag in tags(cell))
        ]
        assert ignored == IGNORED.get(path.stem, [])
        assert "NBVAL_" not in path.read_text()

    @named
    def test_no_algorithm(self, path):
        """Functions are small helpers, and there are no classes, and no training loops."""
        for cell in cells(path, "code"):
            tree = ast.parse(source(cell))
            for node in ast.walk(tree):
                assert not isinstance(node, ast.ClassDef | ast.While | ast.AsyncFunctionDef)
                if isinstance(node, ast.FunctionDef):
                    assert (node.end_lineno or 0) - node.lineno < 6, node.name
                if isinstance(node, ast.Attribute):
                    assert node.attr not in ("step", "zero_", "copy_"), "a training loop?"
            assert len(source(cell).splitlines()) <= 30

    @named
    def test_no_magic_and_only_this_package_and_its_libraries(self, path):
        known = {"repro", "torch", "numpy", "pandas", "ipywidgets", "IPython", "matplotlib"}
        for cell in cells(path, "code"):
            for node in ast.walk(ast.parse(source(cell))):  # `!` and `%` are no Python
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for name in names:
                    top = name.split(".")[0]
                    assert top in known or top in sys.stdlib_module_names

    @named
    def test_its_links_lead_somewhere(self, path):
        for cell in cells(path, "markdown"):
            for target in re.findall(r"\]\(([^)#]+)\)", source(cell)):
                name = target.removeprefix("attachment:")
                attached = name != target and name in cell.get("attachments", {})
                reachable = target.startswith("https://") or (FOLDER / target).exists()
                assert attached or reachable, target

    @pytest.mark.parametrize("key", PAPERS)
    def test_a_papers_notebook_shows_every_artefact_and_its_end(self, key):
        paper = load_paper(key)
        path = FOLDER / f"{paper.notebook}.ipynb"
        code = "\n".join(source(cell) for cell in cells(path, "code"))
        for artefact in paper.artefacts:
            assert f'session.show("{artefact}")' in code
        text = "\n".join(source(cell) for cell in cells(path, "markdown"))
        asks = story.story_of(paper).asks
        parts = (asks, "What we found", "All tables", "Verdicts", "Recipe",
                 "What differs from the paper", "Provenance")  # fmt: skip
        assert [text.find(part) for part in parts] == sorted(text.index(part) for part in parts)
        for end in ("setup", "tables", "verdicts", "recipe", "provenance"):
            assert f"session.{end}()" in code


def tiny(folder: Path, name: str = "01_tiny", code: str = "print(profile, count + 1)") -> Path:
    def cell(text: str, *tags: str) -> dict[str, Any]:
        return {
            "cell_type": "code", "execution_count": None, "id": str(abs(hash(text)))[:8],
            "metadata": {"tags": list(tags)}, "outputs": [], "source": text,
        }  # fmt: skip

    parameters = 'profile: str = "view"  # which\ncount: int = 1  # how many'
    notebook = {
        "cells": [cell(parameters, "parameters"), cell(code)],
        "metadata": {"kernelspec": {"name": "nowhere", "display_name": "x", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.ipynb").write_text(json.dumps(notebook))
    return folder / f"{name}.ipynb"


@pytest.fixture
def folder(tmp_path, monkeypatch, results_folder) -> Path:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setattr(notebooks, "FOLDER", folder)
    return folder


class TestRunner:
    def test_find(self, folder):
        first, second = tiny(folder, "01_one"), tiny(folder, "02_two")
        tiny(folder, "draft")
        assert notebooks.find([]) == [first, second]
        assert notebooks.find(["02_two", "01_one.ipynb"]) == [second, first]
        for name in ("03_three", "draft", "../01_one", ""):
            with pytest.raises(UsageError, match=r"unknown notebook .*choose among 01_one, 02_two"):
                notebooks.find(["01_one", name])

    @pytest.mark.parametrize(
        ("text", "parsed"),
        [("count=3", ("count", "3")), ("name=quick", ("name", "quick")), ("x=", ("x", "")),
         ("x='3'", ("x", "3")), ("x=a=b", ("x", "a=b")), ("x=0,5,7", ("x", "0,5,7"))],
    )  # fmt: skip
    def test_parameters(self, text, parsed):
        assert notebooks.parse_parameter(text) == parsed

    @pytest.mark.parametrize(
        ("given", "kind", "value"),
        [("3", "int", 3), ("3", "str", "3"), ("0,5,7", "str", "0,5,7"), ("3", "float", 3.0),
         ("1e-3", "float", 1e-3), ("True", "bool", True), (3, "int", 3), ("x", "None", "x"),
         ("3", "None", 3)],
    )  # fmt: skip
    def test_parameters_have_the_types_that_the_notebook_declares(self, given, kind, value):
        parsed = notebooks._value("x", given, kind)
        assert parsed == value and type(parsed) is type(value)

    @pytest.mark.parametrize(
        ("given", "kind"),
        [("many", "int"), ("1.5", "int"), ("True", "int"), ("1e400x", "float"), ("yes", "bool"),
         ("1", "bool"), (3, "str"), ("[1]", "float")],
    )  # fmt: skip
    def test_parameters_of_another_type(self, given, kind):
        with pytest.raises(UsageError, match=r"parameter x is .*; give "):
            notebooks._value("x", given, kind)

    @pytest.mark.parametrize("text", ["count", "=3", "a b=3", "3x=1", ""])
    def test_wrong_parameters(self, text):
        with pytest.raises(UsageError, match="is not of the form NAME=VALUE") as caught:
            notebooks.parse_parameter(text)
        assert repr(text) in str(caught.value)

    def test_unknown_parameters_are_rejected_before_anything_runs(self, folder, results_folder):
        pytest.importorskip("papermill")
        path = tiny(folder)
        with pytest.raises(UsageError, match=r"01_tiny has no parameter cuont, x; it has count, p"):
            notebooks.execute(path, {"cuont": 2, "x": 1, "count": "3"})
        assert not results_folder.exists()

    @pytest.mark.slow
    # jupyter's own warnings are not ours
    @pytest.mark.filterwarnings("ignore")
    def test_executed_once_until_something_changes(self, folder, results_folder, make_record):
        pytest.importorskip("papermill")
        from repro.records import local_store

        path = tiny(folder)
        given = path.read_bytes()
        outcome = notebooks.execute(path, {"count": 3})
        assert not outcome.failed and "done" in outcome.text
        target = results_folder / "local" / "notebooks" / "01_tiny.ipynb"
        assert "view 4" in json.dumps(read(target))  # on a foreign kernel's name, too
        assert "view 4" in target.with_suffix(".html").read_text()
        assert path.read_bytes() == given
        modified = target.stat().st_mtime_ns
        outcome = notebooks.execute(path, {"count": 3})
        assert "up to date" in outcome.text and target.stat().st_mtime_ns == modified

        # What counts: parameters, the notebook, records, the data folder.
        state = notebooks._state(path, {"count": 3})
        assert notebooks._state(path, {"count": 4}) != state
        local_store("smoke").write(make_record())
        after_record = notebooks._state(path, {"count": 3})
        assert after_record != state
        odd = results_folder / "local" / os.fsdecode(b"\xff.json")
        odd.symlink_to("nowhere")
        assert notebooks._state(path, {"count": 3}) not in (state, after_record)
        odd.unlink()

        # A failure is told, shown, and not taken for up to date once the cause is undone.
        tiny(folder, code="1 / 0")
        outcome = notebooks.execute(path, {"count": 3})
        assert outcome.failed and "FAILED, ZeroDivisionError" in outcome.text
        assert str(target) in outcome.text and "ZeroDivisionError" in target.read_text()
        path.write_bytes(given)
        next(results_folder.rglob("smoke/*/*.json")).unlink()
        assert notebooks._state(path, {"count": 3}) == state
        outcome = notebooks.execute(path, {"count": 3})
        assert "done" in outcome.text
        assert "view 4" in json.dumps(read(target))

    def test_without_papermill_it_says_how_to_go_on(self, folder, monkeypatch):
        path = tiny(folder)
        monkeypatch.setitem(sys.modules, "papermill", None)
        with pytest.raises(UsageError, match=r"pip install 'repro\[notebooks\]'.*python -m repro"):
            notebooks.execute(path, {})


class TestSession:
    """What the notebooks do, without a kernel."""

    @pytest.fixture
    def shown(self, monkeypatch) -> list[Any]:
        session = pytest.importorskip("repro.experiments.session")
        shown: list[Any] = []
        monkeypatch.setattr(session, "display", shown.append)
        return shown

    @pytest.mark.slow
    def test_view_shows_the_reference_and_computes_nothing(self, smoke, results_folder, shown):
        import shutil

        from repro.experiments.session import Session

        target = results_folder / "reference" / "cpu-2-cores" / "smoke"
        shutil.copytree(smoke.store.folder, target)
        before = sorted(results_folder.rglob("*"))
        session = Session("mbs")
        assert shown == []
        for name, artefact in session.paper.artefacts.items():
            shown.clear()
            session.show(name)
            kinds = [type(item).__name__ for item in shown]
            short = len(artefact.table(session.results(name))) <= LONG
            checked = summary.checks(artefact, session.results(name))
            failed = any(row["holds"] == "NO" for row in checked)
            assert kinds == [
                *["VerdictList"] * bool(artefact.exhibit.claims),
                *["Image"] * artefact.draws,
                "Markdown",
                *["TableView"] * short,
                *["TableView"] * failed,
            ]
        shown.clear()
        session.setup()
        session.tables()
        assert shown[0].data.startswith("> **Setup.** Ours: ")
        assert "reference records, cpu-2-cores, profile smoke" in shown[0].data
        assert "TableView" in [type(item).__name__ for item in shown]
        claims = summary.of_papers(summary.paper_verdicts(session.source))
        assert sum(session.counts().values()) == len(claims) < len(session.verdicts().frame)
        session.provenance()
        assert "33 records" in shown[-1].data or "records" in shown[-1].data
        assert sorted(results_folder.rglob("*")) == before

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [(("vgg",), "'vgg'"), (("mbs", "fast"), "'fast'"), (("mbs", "smoke", "", "", "x"), "'x'"),
         (("mbs", "view", "", "", "", "tpu"), "'tpu'"), (("mbs", "smoke", "tpu"), "tpu")],
    )  # fmt: skip
    def test_wrong_arguments(self, shown, results_folder, arguments, named):
        from repro.experiments.session import Session

        with pytest.raises(UsageError, match=named):
            Session(*arguments)
        assert not results_folder.exists()
