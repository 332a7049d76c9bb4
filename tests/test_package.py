"""The house: what may import what, what `import repro` costs, size and docstrings of modules."""

import ast
import graphlib
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from repro import paths

MODULES = sorted(paths.PACKAGE.rglob("*.py"))
ROOMS = sorted({path.parent.relative_to(paths.PACKAGE.parent).as_posix() for path in MODULES})
NAMES = ("mbs", "dualbatch", "adaptive", "outofcore", "microconv")
METHODS = sorted(name for name in NAMES if (paths.PACKAGE / name).is_dir())
NOTEBOOK_PACKAGES = ("IPython", "ipywidgets", "papermill", "nbformat", "nbconvert", "nbclient",
                     "jupyter_client", "ipykernel")  # fmt: skip
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "scipy"}


ONLY_CUDA = {
    "repro.microconv.cudnn": "cuDNN",
    "repro.microconv.torch_backend": "cuDNN's version",
    "repro.microconv.kernels": "TF32",
    "repro.microconv.backends": "TF32",
    "repro.experiments.captured": "CUDA graphs",
    "repro.experiments.one_run": "CUDA graphs",
    "repro.outofcore.native": "the driver's virtual memory",
    "repro.experiments.outofcore.measuring": "the driver's virtual memory",
    "repro.experiments.outofcore.points": "the driver's virtual memory",
    "repro.measure.loss_parts": "TF32",
    "repro.measure.memory": "cuBLAS' workspaces",
    "repro.measure.precision": "TF32",
    "repro.measure.timing": "NVML",
    "repro.experiments.doctor": "versions of CUDA and ROCm, the driver's virtual memory",
}


def _names_cuda(path: Path) -> bool:
    """Whether code says torch.cuda, ``"cuda"``, `is_cuda` or `.cuda()`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"):
            return True
        if isinstance(node, ast.Constant) and node.value == "cuda":
            return True
    return False


def module_name(path: Path) -> str:
    parts = path.relative_to(paths.PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Return the modules that a file imports, in functions too; relative ones as they are."""
    tree, modules = ast.parse(path.read_text(encoding="utf-8")), set()
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            # `from repro import plots` imports repro.plots.
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules.update(names if node.module == "repro" else {node.module or ""})
    return modules


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield modules and names that code imports, in functions too, but for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from imported_names(node)


def circle(folder: Path, package: str) -> list[str]:
    """Return modules of a folder that import each other in a circle, in functions too; or none.

    Imports for types alone do not count.
    """
    files = {path.stem: path for path in folder.glob("*.py")}
    arrows: dict[str, set[str]] = {}
    for stem, path in files.items():
        arrows[stem] = set()
        for module, name in imported_names(ast.parse(path.read_bytes())):
            # `from repro.mbs import errors` imports a module; most others, a name of one.
            both = [n.removeprefix(f"{package}.") for n in (module, f"{module}.{name}")]
            within = {"__init__" if stem_ == package else stem_ for stem_ in both}
            found = within & files.keys()
            arrows[stem] |= (found if len(found) == 1 else found - {"__init__"}) - {stem}
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def python(script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True, text=True, timeout=60, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


OF_METHODS = [f"repro.{method}" for method in METHODS]
ABOVE = ["repro.experiments", "repro.records", "repro.report"]
# What the modules of a folder never import.
NEVER = {
    "repro.measure": [*OF_METHODS, *ABOVE, "repro.models", "repro.datasets", "repro.paths"],
    "repro.models": [*OF_METHODS, *ABOVE],
    "repro.datasets": [*OF_METHODS, *ABOVE],
    "repro.records": [*OF_METHODS, *ABOVE[:1], "repro.models", "repro.datasets", "repro.report"],
    "repro.advise": ["repro.experiments"],
} | {
    f"repro.experiments.{method}": [
        f"repro.{package}{other}"
        for other in METHODS
        for package in ("", "experiments.")
        if other != method
    ]
    for method in METHODS
}


class TestArrows:
    @pytest.mark.parametrize("method", METHODS)
    def test_a_method_can_be_lifted_out(self, method):
        for path in (paths.PACKAGE / method).rglob("*.py"):
            for name in imports(path):
                of_method = under(name, f"repro.{method}", "repro.measure")
                library = name.split(".")[0] in LIBRARIES
                # The engine on a cluster is an extra, and imported when it is asked for.
                on_ray = method == "dualbatch" and path.name == "cluster.py"
                extra = under(name, "ray") and on_ray
                assert of_method or library or extra, f"{path.name} imports {name}"

    @pytest.mark.parametrize("room", ROOMS)
    def test_modules_of_a_folder_import_each_other_in_no_circle(self, room):
        assert circle(paths.PACKAGE.parent / room, room.replace("/", ".")) == []

    def test_a_planted_circle_is_seen(self, tmp_path):
        (tmp_path / "a.py").write_text("def f():\n    from repro.b import g\n")
        (tmp_path / "b.py").write_text("from repro import c\n")
        (tmp_path / "c.py").write_text("from repro.a import f\n")
        assert set(circle(tmp_path, "repro")) == {"a", "b", "c"}
        (tmp_path / "a.py").write_text("if TYPE_CHECKING:\n    from repro.b import g\n")
        assert circle(tmp_path, "repro") == []

    @pytest.mark.parametrize("room", NEVER)
    def test_a_folder_does_not_import_what_stands_above_or_beside_it(self, room):
        inside = [path for path in MODULES if under(module_name(path), room)]
        assert inside
        for path in inside:
            assert not [n for n in imports(path) if under(n, *NEVER[room])], path.name

    def test_methods_are_used_by_experiments_and_advice_only(self):
        for path in MODULES:
            if not under(module_name(path), *OF_METHODS, "repro.experiments", "repro.advise"):
                assert not [n for n in imports(path) if under(n, *OF_METHODS)], path.name

    @pytest.mark.slow
    def test_notebook_packages_are_for_notebooks(self):
        allowed = {"repro.notebooks", "repro._kernels"}
        allowed |= {"repro.experiments.session", "repro.experiments.explorer"}
        for path in MODULES:
            imported = [name for name in imports(path) if under(name, *NOTEBOOK_PACKAGES)]
            assert not imported or module_name(path) in allowed, path.name
        # The runner is imported by the command line, and so must not need them at once.
        at_once = imports(paths.PACKAGE / "notebooks.py", top_level_only=True)
        assert not [name for name in at_once if under(name, *NOTEBOOK_PACKAGES)]

    @pytest.mark.slow
    def test_torchvision_is_imported_in_one_place(self):
        for path in MODULES:
            if any(under(name, "torchvision") for name in imports(path)):
                assert module_name(path) == "repro._torchvision"

    @pytest.mark.slow
    def test_cuda_is_named_where_only_cuda_will_do(self):
        assert {module_name(path) for path in MODULES if _names_cuda(path)} == ONLY_CUDA.keys()


def test_import_repro_is_fast_and_light():
    done = python(
        """
        import sys, time
        start = time.perf_counter()
        import repro
        elapsed = time.perf_counter() - start
        heavy = [n for n in ("torch", "numpy", "pandas", "matplotlib", "IPython", "ipywidgets",
                             "papermill", "sklearn", "torchvision") if n in sys.modules]
        loaded = [n for n in sys.modules if n.startswith("repro.")]
        print(elapsed, heavy, loaded)
        assert elapsed < 0.5 and not heavy and not loaded and repro.__version__
        import repro.datasets, repro.models
        later = ("torchvision", "sklearn", "skimage", "scipy")
        assert not [n for n in later if n in sys.modules]
        # Matplotlib comes with the first figure.
        from repro.experiments import PAPERS, load_paper
        assert [[*paper.artefacts.values()] for paper in map(load_paper, PAPERS)]
        assert "matplotlib" not in sys.modules
        """
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(paths.INSTALLED, reason="not a checkout")
def test_nothing_is_installed_that_no_code_uses():
    """But for tools, and for what the recipes of the documents are tried with."""
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = list(project["dependencies"])
    for extra, distributions in project["optional-dependencies"].items():
        declared += [] if extra in ("dev", "docs", "notebooks", "recipes") else distributions
    modules = {"scikit-learn": "sklearn", "scikit-image": "skimage", "nvidia-ml-py": "pynvml"}
    code = "\n".join(file.read_text(encoding="utf-8") for file in MODULES)
    for entry in declared:
        name = re.split(r"[<>=~!\[ ]", entry)[0]
        module = modules.get(name, name.replace("-", "_"))
        assert re.search(rf"\b(import|from) {module}\b|\b{module}\.", code), name
