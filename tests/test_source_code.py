"""Which code a record depends on: every kind of file counts, and what only moved is the same."""

import ast
import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest

from repro import paths, source_code
from repro.experiments import PAPERS, load_paper
from repro.source_code import Tree, canonical, present

FILES = {
    "repro/__init__.py": "",
    "repro/paths.py": "ROOT = 1\n",
    "repro/training.py": (
        '"""Train."""\n'
        "import time\n"
        "from repro.measure import clock\n\n\n"
        "def fit(x):\n"
        '    """Fit."""\n'
        "    return clock(x) + time.time()\n\n\n"
        "def unused():\n"
        "    return 0\n"
    ),
    "repro/measure/__init__.py": "from repro.measure.timing import clock\n",
    "repro/measure/timing.py": "def clock(x):\n    return x\n",
    "repro/measure/other.py": "OTHER = 1\n",
    "repro/mbs/__init__.py": "from repro.mbs.streamer import stream\n",
    "repro/mbs/streamer.py": "def stream(x):\n    return x\n",
    "repro/mbs/errors.py": "LIMIT = 3\n",
    "repro/mbs/csrc/copy.cpp": "int copy() { return 1; }\n",
    "repro/dualbatch/__init__.py": "",
    "repro/models/__init__.py": (
        "from repro.models._options import check\n"
        "from repro.models.resnet import resnet20\n"
        "from repro.models.unet import unet\n\n\n"
        "def build(name):\n"
        "    return check({'resnet20': resnet20, 'unet': unet}[name])\n"
    ),
    "repro/models/_options.py": "def check(model):\n    return model\n",
    "repro/models/resnet.py": "def resnet20():\n    return 20\n",
    "repro/models/unet.py": "def unet():\n    return 4\n",
    "repro/experiments/__init__.py": "",
    "repro/experiments/judging.py": "WORDS = 5\n",
    "repro/experiments/outcome.py": "def reported(paper):\n    return paper\n",
    "repro/experiments/reported/mbs.toml": "best = 1\n",
    "repro/experiments/reported/dualbatch.toml": "best = 2\n",
    "repro/experiments/mbs/__init__.py": "",
    "repro/experiments/mbs/sameness.py": "from repro.experiments.judging import WORDS\n",
    "repro/experiments/mbs/building.py": (
        "from repro import models\n\nWIDTH = 4\n\n\ndef build(config):\n"
        "    return models.build(config['model']['name']), WIDTH\n"
    ),
    "repro/experiments/mbs/experiments.py": (
        "from typing import TYPE_CHECKING\n\n"
        "from repro.experiments.mbs.building import build\n"
        "from repro.experiments.outcome import reported\n"
        "from repro.training import fit\n\n"
        "if TYPE_CHECKING:\n    from repro.experiments.judging import WORDS\n\n\n"
        "def train(config):\n"
        "    from repro.mbs import stream\n\n"
        "    return stream(fit(build(config))), reported('mbs')\n"
    ),
}
ENTRY = "repro.experiments.mbs.experiments:train"
RESNET = {"model": {"name": "resnet20"}}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package in a checkout of its own; call it with files to change."""

    def git(*arguments: str) -> str:
        settings = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
        command = ["git", "-C", str(tmp_path), *settings, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def change(files: dict[str, str | None]) -> str:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink() if content is None else path.write_text(content)
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", "change")
        return git("rev-parse", "HEAD")

    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "repro")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    git("init", "-q")
    change(FILES)
    return change


def edited(file: str, old: str, new: str) -> dict[str, str | None]:
    assert old in FILES[file]
    return {file: FILES[file].replace(old, new)}


class TestClosure:
    def test_what_runs_and_nothing_that_judges(self, package):
        closure = Tree().closure(ENTRY, RESNET)
        assert closure == {
            "repro/training.py", "repro/measure/timing.py", "repro/models/__init__.py",
            "repro/models/_options.py", "repro/models/resnet.py", "repro/mbs/__init__.py",
            "repro/mbs/streamer.py", "repro/mbs/errors.py", "repro/mbs/csrc/copy.cpp",
            "repro/experiments/mbs/experiments.py", "repro/experiments/mbs/building.py",
            "repro/experiments/outcome.py", "repro/experiments/reported/mbs.toml",
        }  # fmt: skip

    def test_architectures_that_the_configuration_names(self, package):
        tree = Tree()
        assert "repro/models/unet.py" in tree.closure(ENTRY, {"model": {"name": "unet"}})
        both = {"repro/models/unet.py", "repro/models/resnet.py"}
        assert both <= tree.closure(ENTRY, {})  # none is named: any may run
        assert not both & tree.closure(ENTRY, {"model": {"name": "torchvision/resnet50"}})

    def test_of_a_commit_and_of_none(self, package):
        commit = package({})
        package(edited("repro/training.py", "time.time()", "0"))
        then, now = Tree(commit), Tree()
        assert then.closure(ENTRY, RESNET) == now.closure(ENTRY, RESNET)
        assert then.hash_of(ENTRY, RESNET) != now.hash_of(ENTRY, RESNET)
        with pytest.raises(LookupError, match="no commit '1234'"):
            Tree("1234")
        with pytest.raises(LookupError, match="no module"):
            now.closure("repro.absent:train", {})

    @pytest.mark.slow
    @pytest.mark.parametrize("paper", PAPERS)
    def test_what_the_papers_run_knows_no_claim_and_no_presentation(self, paper):
        config = {"model": {"name": "resnet_cifar"}}
        for experiment in load_paper(paper).experiments.values():
            names = {Path(f).name for f in present().closure(experiment.entry, config)
                     if f.startswith("repro/experiments/") and f.count("/") == 2}  # fmt: skip
            assert names <= {"outcome.py", "captured.py"}
            files = present().closure(experiment.entry, config)
            assert not files & {"repro/report.py", "repro/plots.py", "repro/records.py"}
            methods = source_code.METHODS if paper == "together" else [paper]
            assert any(file.startswith(f"repro/{name}/") for file in files for name in methods)


class TestStyle:
    """Imports that the closure could not follow are not used in this package."""

    @pytest.mark.slow
    def test_imports_are_such_as_can_be_followed(self):
        for path in paths.PACKAGE.rglob("*.py"):
            self.check(path)

    def check(self, path):
        tree = ast.parse(path.read_text())
        lazy = path.name == "__init__.py" and path.parent.name in ("measure", "adaptive")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, "relative"
                of_repro = (node.module or "").split(".")[0] == "repro"
                assert not of_repro or all(alias.name != "*" for alias in node.names), "star"
                if path == paths.PACKAGE / "models" / "__init__.py" and of_repro:
                    assert all(alias.asname is None for alias in node.names)
            elif isinstance(node, ast.Import):
                assert not any(a.name.split(".")[0] == "repro" for a in node.names), (
                    "import repro.x"
                )
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                assert isinstance(node.test, ast.Name) and not node.orelse
            elif isinstance(node, ast.Try):
                blocks = [*node.body, *(part for h in node.handlers for part in h.body)]
                tried = [part for part in blocks if isinstance(part, ast.ImportFrom)]
                assert not any(
                    a.name == b.name
                    for part, other in itertools.combinations(tried, 2)
                    for a, b in itertools.product(part.names, other.names)
                ), "alternatives"
            elif isinstance(node, ast.Attribute) and node.attr == "import_module":
                known = (
                    "experiments/__init__.py",
                    "experiments/design.py",
                    "experiments/estimates.py",
                    "experiments/rehearsing.py",
                    "experiments/selftests.py",
                    "experiments/session.py",
                    "experiments/story.py",
                    "_torchvision.py",
                )
                assert lazy or path.relative_to(paths.PACKAGE).as_posix() in known


class TestHash:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("file", "old", "new"),
        [
            ("repro/experiments/mbs/experiments.py", "stream(fit", "fit(stream"),
            ("repro/experiments/mbs/building.py", "WIDTH = 4", "WIDTH = 5"),
            ("repro/training.py", "clock(x) + ", ""),
            ("repro/training.py", "import time\n", "import datetime as time\n"),
            ("repro/training.py", "    return 0\n", "    return 1\n"),
            ("repro/measure/timing.py", "return x", "return -x"),
            ("repro/models/resnet.py", "20", "21"),
            ("repro/models/_options.py", "return model", "return None"),
            ("repro/mbs/errors.py", "3", "4"),
            ("repro/mbs/csrc/copy.cpp", "1", "2"),
            ("repro/experiments/outcome.py", "return paper", "return ''"),
            ("repro/experiments/reported/mbs.toml", "1", "2"),
        ],
    )
    def test_a_change_in_any_kind_of_file_counts(self, package, file, old, new):
        before = Tree().hash_of(ENTRY, RESNET)
        package(edited(file, old, new))
        assert Tree().hash_of(ENTRY, RESNET) != before

    @pytest.mark.parametrize(
        ("file", "old", "new"),
        [
            ("repro/experiments/judging.py", "5", "6"),
            ("repro/experiments/mbs/sameness.py", "WORDS\n", "WORDS\nX = 1\n"),
            ("repro/models/unet.py", "4", "5"),
            ("repro/measure/other.py", "1", "2"),
            ("repro/experiments/reported/dualbatch.toml", "2", "3"),
            ("repro/training.py", '"""Train."""', '"""Train and\n\n# more.\n"""'),
            ("repro/training.py", '    """Fit."""\n', ""),
            ("repro/training.py", "    return 0", "    # why\n\n    return (\n        0\n    )"),
        ],
    )
    def test_what_does_not_count(self, package, file, old, new):
        before = Tree().hash_of(ENTRY, RESNET)
        package(edited(file, old, new))
        assert Tree().hash_of(ENTRY, RESNET) == before

    def test_a_new_file_of_the_method_counts(self, package):
        before = Tree().hash_of(ENTRY, RESNET)
        package({"repro/mbs/more.py": "MORE = 1\n"})
        assert Tree().hash_of(ENTRY, RESNET) != before

    def test_texts_count_to_the_letter(self):
        def text(source: str) -> str:
            return canonical(ast.parse(source))

        assert text("A = '''a\n # b\n'''") != text("A = '''a\n # c\n'''")
        assert text("def f(): 'Doc.'; return 1") == text("def f():\n    return 1")
        assert text("x = 1.0") != text("x = 1")
        assert text("f(a, b)") == text("f(\n    a,\n    b,\n)")


class TestMemory:
    """What was found in a file is kept, so that a status need not parse the package again."""

    @pytest.fixture(autouse=True)
    def own_memory(self, tmp_path_factory, monkeypatch):
        self.path = tmp_path_factory.mktemp("memory") / "source.json"
        monkeypatch.setattr(source_code, "_memory", lambda: self.path)

    def test_nothing_is_parsed_twice_and_the_hash_is_the_same(self, package, monkeypatch):
        first = Tree().hash_of(ENTRY, RESNET)
        monkeypatch.setattr(source_code.ast, "parse", lambda text: 1 / 0)
        assert Tree().hash_of(ENTRY, RESNET) == first
        monkeypatch.undo()
        assert Tree().closure(ENTRY, RESNET) == Tree().closure(ENTRY, RESNET)

    def test_a_change_of_the_same_size_is_seen(self, package):
        before = Tree().hash_of(ENTRY, RESNET)
        package(edited("repro/mbs/errors.py", "3", "4"))
        assert Tree().hash_of(ENTRY, RESNET) != before
        package({"repro/mbs/errors.py": FILES["repro/mbs/errors.py"]})
        assert Tree().hash_of(ENTRY, RESNET) == before

    @pytest.mark.parametrize("content", ["", "[]", '{"repro/training.py": 3}', "flipped"])
    def test_a_damaged_memory_is_no_obstacle(self, package, content):
        first = Tree().hash_of(ENTRY, RESNET)
        good = self.path.read_text()
        digest = next(facts["digest"] for facts in json.loads(good.partition("\n")[2]).values())
        flipped = good.replace(digest, f"{'0' if digest[0] != '0' else '1'}{digest[1:]}")
        self.path.write_text(flipped if content == "flipped" else content)
        assert Tree().hash_of(ENTRY, RESNET) == first
        self.path.unlink()
        os.mkfifo(self.path)  # which reading would wait for
        assert Tree().hash_of(ENTRY, RESNET) == first

    def test_a_commits_files_are_not_those_of_the_working_tree(self, package):
        commit = package({})
        before = Tree().hash_of(ENTRY, RESNET)
        package(MOVED)
        assert Tree(commit).hash_of(ENTRY, RESNET) == before != Tree().hash_of(ENTRY, RESNET)

    def test_without_a_place_to_write(self, package):
        first = Tree().hash_of(ENTRY, RESNET)
        self.path.unlink()
        self.path.parent.rmdir()
        self.path.parent.write_text("a file")
        assert Tree().hash_of(ENTRY, RESNET) == first


MOVED = {
    # `fit` moves to another file, `building` is renamed, names are imported otherwise.
    "repro/training.py": "def evaluate():\n    return 1\n",
    "repro/fitting.py": (
        "import time\n\nfrom repro.measure.timing import clock\n\n\n"
        "def fit(x):\n    return clock(x) + time.time()\n"
    ),
    "repro/experiments/mbs/building.py": None,
    "repro/experiments/mbs/parts.py": FILES["repro/experiments/mbs/building.py"],
    "repro/experiments/mbs/experiments.py": (
        "from repro.experiments.mbs.parts import build\n"
        "from repro.experiments.outcome import reported\n"
        "from repro.fitting import fit\n"
        "from repro.mbs.streamer import stream\n\n\n"
        "def train(config):\n"
        "    return stream(fit(build(config))), reported('mbs')\n"
    ),
}


class TestDefinitions:
    def test_what_moved_is_the_same(self, package):
        before, code = Tree().definitions(ENTRY, RESNET), Tree().hash_of(ENTRY, RESNET)
        package(MOVED)
        assert Tree().definitions(ENTRY, RESNET) == before
        assert Tree().hash_of(ENTRY, RESNET) != code

    @pytest.mark.parametrize(
        ("file", "old", "new"),
        [
            ("repro/experiments/mbs/experiments.py", "stream(fit", "fit(stream"),
            ("repro/experiments/mbs/building.py", "WIDTH = 4", "WIDTH = 5"),
            ("repro/training.py", "import time\n", "import datetime as time\n"),
            ("repro/training.py", '"""Train."""\n', '"""Train."""\nprint(1)\n'),
            ("repro/measure/timing.py", "return x", "return -x"),
            ("repro/models/resnet.py", "20", "21"),
            ("repro/mbs/streamer.py", "return x", "return 0"),
        ],
    )
    def test_what_changed_is_not(self, package, file, old, new):
        before = Tree().definitions(ENTRY, RESNET)
        package(edited(file, old, new))
        assert Tree().definitions(ENTRY, RESNET) != before

    SAME_TEXTS = (
        # Each of the two has the same definitions, which mean something else.
        (
            "from repro.paths import f as g\nfrom repro.training import f as h\n",
            "from repro.paths import f as h\nfrom repro.training import f as g\n",
        ),
        ("X = 1\nX = 2\n", "X = 2\nX = 1\n"),
        ("L = []\nL.append(1)\nL.append(2)\n", "L = []\nL.append(2)\nL.append(1)\n"),
        ("import decimal\ndecimal.FLAG = 1\n", "import decimal\ndecimal.FLAG = 2\n"),
        ("T = {}\nfor k in (1, 2):\n    T[k] = 1\n", "T = {}\nfor k in (1, 3):\n    T[k] = 1\n"),
        (
            "try:\n    import fast\nexcept ImportError:\n    def fast():\n        return 1\n",
            "try:\n    import fast\nexcept ImportError:\n    def fast():\n        return 2\n",
        ),
        ("if True:\n    X = 1\n", "if True:\n    X = 2\n"),
        ("from math import sqrt as f\n", "from math import exp as f\n"),
        (
            "def f():\n    return 1\n\n\ndef other():\n    from repro.paths import f\n",
            "def f():\n    return 2\n\n\ndef other():\n    from repro.paths import f\n",
        ),
        (
            "def main():\n    return 1\n\n\nif __name__ == '__main__':\n    main()\n",
            "def main():\n    return 2\n\n\nif __name__ == '__main__':\n    main()\n",
        ),
    )
    TRAIN = "\n\ndef train(config):\n    return g(), h(), X, L, T, fast, f()\n"

    @pytest.mark.slow
    @pytest.mark.parametrize(("one", "other"), SAME_TEXTS)
    def test_what_names_stand_for_and_what_a_module_does_counts(self, package, one, other):
        package({"repro/paths.py": "def f():\n    return 3\n",
                 "repro/training.py": "def f():\n    return 4\n"})  # fmt: skip
        file = "repro/experiments/mbs/experiments.py"
        definitions = []
        for text in (one, other):
            package({file: text + self.TRAIN})
            definitions.append(Tree().definitions(ENTRY, RESNET))
        assert definitions[0] != definitions[1]

    def test_a_program_that_a_record_starts_counts(self, package):
        program = "def main():\n    return {}\n\n\nif __name__ == '__main__':\n    main()\n"
        file = "repro/experiments/mbs/child.py"
        line = "    from repro.mbs import stream\n"
        started = "    from repro.experiments.mbs import child\n\n    run = child.__name__\n"
        caller = edited("repro/experiments/mbs/experiments.py", line, started + line)
        definitions = []
        for number in "12":
            package({file: program.format(number)} | caller)
            definitions.append(Tree().definitions(ENTRY, RESNET))
        assert definitions[0] != definitions[1]

    def test_an_entry_that_is_not_there(self, package):
        with pytest.raises(LookupError, match="is not defined there"):
            Tree().definitions("repro.experiments.mbs.experiments:absent", {})

    def test_what_is_not_used_does_not_matter(self, package):
        before = Tree().definitions(ENTRY, RESNET)
        package(edited("repro/training.py", "    return 0\n", "    return 1\n"))
        package(edited("repro/mbs/errors.py", "3", "4"))
        assert Tree().definitions(ENTRY, RESNET) == before
