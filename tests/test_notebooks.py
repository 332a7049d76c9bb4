"""The notebooks as they stand, and the runner on tiny ones."""

import ast
import asyncio
import base64
import json
import re
import struct
import sys
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

from repro import notebooks, paths
from repro.experiments import PAPERS, UsageError, load_paper, story, view
from repro.report import Shown, cells_of

FOLDER = paths.ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PARAMETER = re.compile(r"^[a-z_]+: (str|int|float|bool) = .+  # \S.*$")

# The only cells that nbval may leave uncompared, by their first line: widgets have fresh ids.
IGNORED = {
    "01_mbs": ["session.explore()"],
    "02_dualbatch": ["session.explore()"],
    "03_adaptive": ["session.explore()"],
    "04_outofcore": ["session.explore()"],
    "05_microconv": ["session.explore()", "session.explore(1)"],
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
    def test_parameters_come_first_with_types_and_help_the_same_in_all(self, path):
        """`python -m repro notebooks --profile quick` sets them for all."""
        first = cells(path, "code")[0]
        assert [cell for cell in cells(path, "code") if "parameters" in tags(cell)] == [first]
        lines = source(first).splitlines()
        assert all(PARAMETER.match(line) for line in lines), lines
        defined = [line.split(":")[0] for line in lines]
        assert defined == ["profile", "device", "data", "seeds", "reference"]
        assert lines[0].startswith('profile: str = "view"')

    @named
    def test_metadata_kernel_and_size(self, path):
        metadata = read(path)["metadata"]
        assert metadata["kernelspec"]["name"] == "python3" and read(path)["nbformat"] == 4
        assert set(metadata) <= {"kernelspec", "language_info"}
        for cell in read(path)["cells"]:
            known = {"tags", "jupyter"}
            assert set(cell["metadata"]) <= known, "papermill's or a widget's metadata is left"
            hidden = "hide-input" in tags(cell)
            assert cell["metadata"].get("jupyter") == ({"source_hidden": True} if hidden else None)
            known = {"parameters", "opening", "hide-input", "nbval-ignore-output"}
            assert set(tags(cell)) <= known
        assert path.stat().st_size <= 2**20

    @named
    def test_cells_were_executed_in_order_and_told_of_no_error_or_warning(self, path):
        """nbval does not compare a cell without an execution count."""
        for number, cell in enumerate(cells(path, "code"), 1):
            assert cell["execution_count"] == number
            kinds = [(out["output_type"], out.get("name")) for out in cell["outputs"]]
            assert not any("error" in kind or "stderr" in kind for kind in kinds), kinds

    @named
    def test_no_path_of_a_machine(self, path):
        text = re.sub(r'"image/png": "[^"]*"', "", path.read_text())  # any letters are in there
        pattern = r"/(home|root|work|tmp|Users|opt|usr|var|mnt)/|[A-Z]:\\\\|ipykernel_\d"
        assert not re.search(pattern, text), re.search(pattern, text)

    @named
    def test_only_listed_cells_are_left_uncompared(self, path):
        chosen = [c for c in cells(path, "code") if any(t.startswith("nbval") for t in tags(c))]
        ignored = [source(cell).splitlines()[0] for cell in chosen]
        assert ignored == IGNORED.get(path.stem, []) and "NBVAL_" not in path.read_text()

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

    @named
    def test_a_block_after_a_files_name_quotes_that_file(self, path):
        """Line by line; `...` leaves something out, and comments may differ."""
        for cell in cells(path, "markdown"):
            for above, block in re.findall(r"(.*)\n\n```python\n(.*?)```", source(cell), re.DOTALL):
                for name in re.findall(r"`(repro/\S+\.py)`", above.rpartition("\n")[2]):
                    text = (paths.ROOT / name).read_text(encoding="utf-8")
                    for line in block.splitlines():
                        code = line.partition("  # ")[0].strip()
                        if not code.startswith("#"):
                            assert re.search(re.escape(code).replace(r"\.\.\.", ".*"), text), line

    @named
    def test_a_methods_diagram_is_that_of_its_page(self, path):
        for cell in cells(path, "markdown"):
            for kind, text in cell.get("attachments", {}).get("method.png", {}).items():
                drawn = FOLDER.parent / "docs" / "diagrams" / f"{path.stem.partition('_')[2]}.png"
                assert base64.b64decode("".join(text)) == drawn.read_bytes()
                assert kind == "image/png"  # JupyterLab shows no attached SVG
                across, up = struct.unpack(">II", drawn.read_bytes()[16:24])
                text = drawn.with_suffix(".svg").read_text()
                size = re.search(r'width="(\d+)" height="(\d+)"', text)
                assert [across, up] == [1.5 * float(side) for side in size.groups()]

    @pytest.mark.parametrize("key", PAPERS)
    def test_a_papers_notebook_shows_every_artefact_and_its_end(self, key):
        paper = load_paper(key)
        path = FOLDER / f"{paper.notebook}.ipynb"
        code = "\n".join(source(cell) for cell in cells(path, "code"))
        shown = re.findall(r"session\.(?:show|fold)\(([^)]*)\)", code)
        assert sorted(re.findall(r'"(\w+)"', ",".join(shown))) == sorted(paper.artefacts)
        text = "\n".join(source(cell) for cell in cells(path, "markdown"))
        asks = story.story_of(paper).asks
        parts = (asks, "What we found", "What differs from the paper", "Appendix")
        assert [text.find(part) for part in parts] == sorted(text.index(part) for part in parts)
        assert code.endswith("session.appendix()")

    @named
    def test_it_is_read_in_ten_minutes(self, path):
        """What is folded does not count."""
        texts = [source(cell) for cell in cells(path, "markdown")]
        for cell in cells(path, "code"):
            for output in cell["outputs"]:
                data = output.get("data", {"text/plain": output.get("text", "")})
                kinds = ("text/html", "text/markdown", "text/plain")
                texts.append("".join(next((data[kind] for kind in kinds if kind in data), "")))
        unfolded = [re.sub(r"<details>.*?</details>|<[^>]+>", " ", t, flags=re.S) for t in texts]
        words = sum(len(text.split()) for text in unfolded)
        assert words <= (1500 if path.stem == "00_overview" else 2500), words


def tiny(
    folder: Path, name: str = "01_tiny", code: str = "print(profile)", opening: str = ""
) -> Path:
    """Write a notebook of two code cells, on a kernel that is nowhere."""
    format_ = pytest.importorskip("nbformat").v4
    parameters = 'profile: str = "view"  # which\ncount: int = 1  # how many'
    tagged = {"metadata": {"tags": ["parameters"]}}
    notebook = format_.new_notebook(
        cells=[
            *[format_.new_markdown_cell(opening, metadata={"tags": ["opening"]})][: len(opening)],
            format_.new_code_cell(parameters, **tagged),
            format_.new_code_cell(code),
        ],
        metadata={"kernelspec": {"name": "nowhere", "display_name": "x", "language": "python"}},
    )
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
        with pytest.raises(UsageError, match=r"unknown notebook .*choose among 01_one, 02_two$"):
            notebooks.find(["01_one", "draft"])

    @pytest.mark.parametrize("text", ["", "{", "{}", "[]", "\xe9", '{"nbformat": 9}', 9**6 * "["])
    def test_a_damaged_one_is_named_and_none_runs(self, folder, text):
        tiny(folder, "01_one")
        (folder / "02_two.ipynb").write_text(text, encoding="latin-1")
        assert notebooks.find(["01_one"])
        with pytest.raises(UsageError, match=r"02_two\.ipynb cannot be read \(.*restore it"):
            notebooks.find([])

    def test_a_parameter_has_a_name_and_a_value(self):
        assert notebooks.parse_parameter("seeds=a=0,5") == ("seeds", "a=0,5")

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # jupyter's own
    def test_execute(self, folder, results_folder, tmp_path, monkeypatch):
        pytest.importorskip("papermill")
        monkeypatch.chdir(tmp_path)
        code = "import os; print(profile, count, os.getcwd())"  # a relative $REPRO_DATA holds
        path = tiny(folder, code=code)
        given = path.read_bytes()
        said, failed = notebooks.execute(path, {"count": "3"})
        assert not failed and "done" in said
        target = results_folder / "local" / "notebooks" / "01_tiny.ipynb"
        shown = f"view 3 {tmp_path}"
        assert shown in target.read_text() and shown in target.with_suffix(".html").read_text()
        assert path.read_bytes() == given
        tiny(folder, code="1 / 0")
        said, failed = notebooks.execute(path, {})
        assert failed and "FAILED, ZeroDivisionError" in said
        assert str(target) in said and "ZeroDivisionError" in target.read_text()
        assert list(folder.iterdir()) == [path]

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")
    def test_refresh(self, folder, monkeypatch):
        pytest.importorskip("papermill")
        monkeypatch.setattr(notebooks, "opening", lambda name: (f"# {name}", {"x.png": b"png"}))
        code = "import sys; from ipywidgets import IntSlider; print(count, file=sys.stderr)"
        path = tiny(folder, code=f"{code}; print(profile); display(IntSlider())", opening="old")
        assert not notebooks.refresh(path)[1]
        head, parameters, cell = read(path)["cells"]
        assert "".join(head["source"]) == "# 01_tiny" and "x.png" in head["attachments"]
        assert [c["metadata"] for c in (head, parameters)] == [{"tags": ["opening"]},
                                                              {"tags": ["parameters"]}]  # fmt: skip
        texts = [out.get("text") or out["data"]["text/plain"] for out in cell["outputs"]]
        assert texts[0] == ["view\n"] and "IntSlider" in "".join(texts[1])
        assert notebooks.WIDGET not in path.read_text() and cell["metadata"] == {}
        before = tiny(folder, code="1 / 0").read_bytes()
        said, failed = notebooks.refresh(path)
        assert failed and "left as it was" in said and path.read_bytes() == before

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
        shutil.copytree(smoke / "local" / "smoke", target)
        before, session = sorted(results_folder.rglob("*")), Session("mbs")
        assert shown == []
        for name, artefact in session.paper.artefacts.items():
            shown.clear()
            session.show(name)
            kinds = [
                item.page[1:8].partition(" ")[0].partition(">")[0]
                if isinstance(item, Shown)
                else type(item).__name__
                for item in shown
            ]
            checked = view.checks(artefact, session.results(name))
            failed = any(row["holds"] == "NO" for row in checked)
            rows = list(artefact.rows(session.results(name)))
            is_open = not artefact.draw and len(rows) <= 9 and len(cells_of(rows)) <= 6
            folded = bool((rows and not is_open) or checked or len(artefact.claims) > 3)
            assert kinds == [
                *["div"] * bool(artefact.claims),
                *["Image"] * (bool(artefact.draw) and name != "table4"),  # shown at the top
                "Markdown",
                *["table"] * is_open,
                *["details"] * folded,
                *["table"] * failed,
            ]
        shown.clear()
        session.appendix()
        setup, claims, *_, records = map(str, shown)
        where = "reference records, cpu-2-cores, profile smoke"
        assert setup.startswith("Setup") and where in setup
        papers = len(view.of_papers(view.paper_verdicts(session.source)))
        assert claims.startswith(f"{papers} claims, 2 questions of our own")
        assert f" records: {where}" in records
        shown.clear()
        session.fold("figure2", "table2")
        assert [item.said.partition(":")[0] for item in shown] == ["Figure 2", "Table 2"]
        assert all("<details><summary>" in item.page for item in shown)
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


def test_a_message_of_a_kernel_that_woke_nobody_is_found_by_asking_again(monkeypatch):
    kernels, waits = pytest.importorskip("repro._kernels"), []

    async def get_msg(self, timeout=None):
        waits.append(timeout)
        if len(waits) < 3:
            raise Empty
        return {"found": len(waits)}

    monkeypatch.setattr(kernels.AsyncZMQSocketChannel, "get_msg", get_msg)
    channel = kernels.PatientChannel.__new__(kernels.PatientChannel)
    assert asyncio.run(channel.get_msg()) == {"found": 3} and waits == [kernels.POLL_S] * 3
    waits.clear()
    with pytest.raises(Empty):
        asyncio.run(channel.get_msg(timeout=0))
    assert len(waits) == 1
