"""Execute the notebooks by papermill."""

import base64
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from repro import paths
from repro.experiments import arguments
from repro.experiments.design import UsageError
from repro.measure.files import regular, replacing
from repro.records import MAKE_ROOM, check_writable, reference_stores
from repro.report import printable

FOLDER = (paths.SHIPPED if paths.INSTALLED else paths.ROOT) / "notebooks"
# A kernel warns at every start that its local sockets are not encrypted, and prints its own
# traceback if it is interrupted. A cell's error arrives as a message.
QUIET_KERNEL = ["--IPKernelApp.log_level=CRITICAL"]
WIDGET = "application/vnd.jupyter.widget-view+json"


def find(names: Sequence[str]) -> list[Path]:
    """Return the paths of notebooks by name; without a name, of all notebooks.

    `UsageError` where there is no notebook of that name, or one is damaged.
    """
    known = {path.stem: path for path in sorted(FOLDER.glob("[0-9]*.ipynb"))}
    for name in names:
        if name.removesuffix(".ipynb") not in known:
            raise UsageError(f"unknown notebook {name!r}; choose among {', '.join(known)}")
    chosen = [known[name.removesuffix(".ipynb")] for name in names or known]
    _papermill()
    import nbformat

    for path in chosen:
        try:
            nbformat.validate(nbformat.read(regular(path), as_version=4))
        except Exception as error:  # nbformat has many kinds for one file
            why = str(error).partition("\n")[0]
            raise UsageError(f"notebook {path} cannot be read ({why}); restore it") from error
    return chosen


def parse_parameter(text: str) -> tuple[str, str]:
    """Read ``NAME=VALUE``; `UsageError` where it is not of this form."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"parameter {text!r} is not of the form NAME=VALUE, such as seeds=0,5,7")
    return name, value


def check(chosen: Sequence[Path], parameters: Mapping[str, str]) -> None:
    """Refuse parameters that a notebook does not have or cannot use, before any of them runs.

    `UsageError` where one is unknown or not one of its choices, or papermill is not installed;
    `RecordError` where the executed notebooks cannot be written.
    """
    papermill = _papermill()
    for path, name in itertools.product(chosen, parameters):
        known = papermill.inspect_notebook(str(path))
        if name not in known:
            names = ", ".join(sorted(known))
            raise UsageError(f"notebook {path.stem} has no parameter {name}; it has {names}")
    if parameters.get("device"):
        arguments.check_device(parameters["device"])
    arguments.parse_seeds(parameters.get("seeds"))
    arguments.check_data(parameters.get("data"))
    devices = dict.fromkeys(["", *(device for device, _ in reference_stores())])
    if parameters.get("reference") and parameters.get("profile", "view") != "view":
        raise UsageError("reference is for the profile view, which computes nothing; leave it out")
    if parameters.get("reference", "") not in devices:
        raise UsageError(
            f"no reference records of device {parameters['reference']!r}; choose among "
            f"{', '.join(filter(None, devices)) or 'none'}"
        )
    check_writable(_target_folder(), "executed notebooks", MAKE_ROOM)


def _target_folder() -> Path:
    return paths.results_dir() / "local" / "notebooks"


def _papermill() -> Any:
    try:
        import nbconvert  # noqa: F401 (needed later; a missing package should fail now)
        import papermill

        return papermill
    except ImportError as error:
        raise UsageError(
            f"{error.name} is not installed; install the notebooks with pip install "
            f"'repro[notebooks]', or compute without them: python -m repro run"
        ) from error


def _run(path: Path, parameters: Mapping[str, str]) -> tuple[Any, str | None]:
    """Return a notebook after papermill executed it, and the reason of a failure."""
    papermill = _papermill()
    import nbformat

    from repro._kernels import PatientManager

    with tempfile.TemporaryDirectory() as folder:
        target, failure = Path(folder, path.name), None
        try:
            papermill.execute_notebook(
                str(path),
                str(target),
                parameters=parameters,
                kernel_name="python3",  # not the kernel of the last save
                progress_bar=False,
                extra_arguments=QUIET_KERNEL,
                kernel_manager_class=PatientManager,
            )
        except papermill.PapermillExecutionError as error:
            failure = f"{error.ename}: {error.evalue}"  # the notebook shows its progress
        except RuntimeError as error:  # the kernel died, for example without memory
            failure = str(error)
        return nbformat.read(target, as_version=4), failure and printable(failure)


def _write(notebook: Any, path: Path) -> None:
    import nbformat

    with replacing(path) as temporary:
        nbformat.write(notebook, temporary)


def execute(path: Path, parameters: Mapping[str, str]) -> tuple[str, bool]:
    """Run a notebook with parameters (see `check`), and save it and an HTML copy as results.

    Returns a line on it, and whether it failed.
    """
    if parameters.get("data"):
        parameters = {**parameters, "data": str(paths.data_roots(parameters["data"])[0])}
    executed, failure = _run(path, parameters)
    target = _target_folder() / path.name
    executed.metadata.get("papermill", {})["output_path"] = str(target)
    _write(executed, target)
    from nbconvert import HTMLExporter

    with replacing(target.with_suffix(".html")) as temporary:
        temporary.write_text(HTMLExporter().from_notebook_node(executed)[0], encoding="utf-8")
    if failure is not None:
        return f"{path.stem}: FAILED, {failure}; see {target}", True
    return f"{path.stem}: done, {target.with_suffix('.html')}", False


def refresh(path: Path) -> tuple[str, bool]:
    """Run a notebook unchanged, on the reference records, and save its outputs in place.

    Its cell tagged ``opening`` is written anew from these records, and the method's diagram from
    ``docs/diagrams``. Outputs that differ between runs without meaning are left out: times,
    widgets, which exist only in a kernel, and the error stream. Returns as `execute` does.
    `UsageError` where the notebooks belong to an installed package.
    """
    if paths.INSTALLED:
        raise UsageError("the notebooks of an installed package stay as they are: no --refresh")
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if "opening" in cell.metadata.get("tags", ()):
            cell.source, pictures = opening(path.stem)
            encoded = {name: base64.b64encode(png).decode() for name, png in pictures.items()}
            cell.attachments = {name: {"image/png": text} for name, text in encoded.items()}
        if "(attachment:method.png)" in cell.source:  # JupyterLab shows no attached SVG
            drawn = paths.ROOT / "docs" / "diagrams" / f"{path.stem.partition('_')[2]}.png"
            png = base64.b64encode(drawn.read_bytes()).decode()
            cell.attachments = {"method.png": {"image/png": png}}
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, path.name)
        nbformat.write(notebook, given)
        executed, failure = _run(given, {})
    if failure is not None:
        return f"{path.stem}: FAILED, {failure}; left as it was", True
    executed.metadata = {"kernelspec": executed.metadata["kernelspec"]}
    for cell in executed.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        if "hide-input" in (tags or ()):  # the site reads the tag, JupyterLab this setting
            cell.metadata["jupyter"] = {"source_hidden": True}
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET, None)
    _write(executed, path)
    return f"{path.stem}: outputs refreshed", False


def opening(name: str) -> tuple[str, dict[str, bytes]]:
    """Return the Markdown under a notebook's title, from the reference records, and its pictures.

    `name` is the notebook's, without ending.
    """
    from repro.experiments import PAPERS, load_paper, story
    from repro.experiments.query import find_source

    sources = {key: find_source(load_paper(key), local=False) for key in PAPERS}
    for source in sources.values():
        if source.paper.notebook == name:
            text = story.opening(source, "attachment:opening.png")
            return text, {"opening.png": story.opening_figure(source)}
    return story.overview(sources, "attachment:"), story.overview_figures(sources)
