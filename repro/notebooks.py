"""Execute the notebooks by papermill, rejecting what papermill lets pass."""

import ast
import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro import paths
from repro.experiments import arguments
from repro.experiments.design import UsageError
from repro.measure.files import replacing
from repro.records import check_writable, reference_stores
from repro.report import printable

FOLDER = paths.notebooks_dir()
# A kernel warns at every start that its local sockets are not encrypted, and shows a traceback of
# its own where it is interrupted. What a cell raises comes as a message.
QUIET_KERNEL = ["--IPKernelApp.log_level=CRITICAL"]
WIDGET = "application/vnd.jupyter.widget-view+json"
UNRUN = "Run all cells (Run > Run All Cells) for the sliders; they need a running kernel."


@dataclass(frozen=True)
class Outcome:
    """What became of one notebook."""

    text: str
    failed: bool = False


def find(names: Sequence[str]) -> list[Path]:
    """Return the paths of notebooks by name, of all of them for no name.

    Raises:
        UsageError: There is no notebook of that name.
    """
    known = {path.stem: path for path in sorted(FOLDER.glob("[0-9]*.ipynb"))}
    for name in names:
        if name.removesuffix(".ipynb") not in known:
            raise UsageError(f"unknown notebook {name!r}; choose among {', '.join(known)}")
    return [known[name.removesuffix(".ipynb")] for name in names or known]


def parse_parameter(text: str) -> tuple[str, str]:
    """Read ``NAME=VALUE``; the value may be quoted, as in Python.

    Raises:
        UsageError: There is no equals sign.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"parameter {text!r} is not of the form NAME=VALUE, such as seeds=0,5,7")
    literal = _literal(value)
    return name, literal if isinstance(literal, str) else value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


def check(chosen: Sequence[Path], parameters: Mapping[str, Any]) -> None:
    """Refuse parameters that a notebook does not have or cannot use, before any of them runs.

    Raises:
        UsageError: One is unknown, of another type, or not one of its choices; or papermill is not
            installed.
        RecordError: The executed notebooks cannot be written.
    """
    values: dict[str, Any] = {}
    for path in chosen:
        values |= _typed(path, parameters)
    if values.get("device"):
        arguments.check_device(values["device"])
    arguments.parse_seeds(values.get("seeds"))
    arguments.check_data(values.get("data"))
    devices = [device for device, _ in reference_stores()]
    if values.get("reference") and values["reference"] not in devices:
        raise UsageError(
            f"no reference records of device {values['reference']!r}; choose among "
            f"{', '.join(dict.fromkeys(devices)) or 'none, there are no reference records'}"
        )
    check_writable(
        _target_folder(),
        "executed notebooks",
        "free some space, make the folder writable, or name another one in $REPRO_RESULTS",
    )


def _target_folder() -> Path:
    return paths.results_dir() / "local" / "notebooks"


def _typed(path: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with the types that a notebook declares for them."""
    papermill = _papermill()
    try:
        known = papermill.inspect_notebook(str(path))
    except Exception as error:  # of many kinds, by what the file lacks
        raise UsageError(
            f"notebook {path} cannot be read ({type(error).__name__}: {error}); bring it back as "
            f"it was: git checkout {path.name}"
        ) from error
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise UsageError(
            f"notebook {path.stem} has no parameter {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known))}"
        )
    return {
        name: _value(name, value, known[name]["inferred_type_name"])
        for name, value in parameters.items()
    }


def _value(name: str, value: Any, kind: str) -> Any:
    wanted = _TYPES.get(kind)
    if isinstance(value, str) and wanted is not str:
        value = _literal(value)
    if wanted is float and type(value) is int:
        value = float(value)
    if wanted is not None and type(value) is not wanted:
        examples = {"str": "a text", "int": "a whole number", "float": "a number"}
        raise UsageError(
            f"parameter {name} is {value!r}; give {examples.get(kind, 'True or False')}"
        )
    return value


def _papermill() -> Any:
    try:
        import nbconvert  # noqa: F401 (what is needed later is asked for now)
        import papermill

        return papermill
    except ImportError as error:
        raise UsageError(
            f"{error.name} is not installed; install the notebooks with pip install "
            f"'repro[notebooks]', or compute without them: python -m repro run"
        ) from error


def execute(path: Path, parameters: Mapping[str, Any]) -> Outcome:
    """Run a notebook with parameters and export it to HTML, unless nothing changed since.

    papermill only logs a parameter that the notebook does not have; here it is an error.

    Raises:
        UsageError: A parameter is unknown or of another type, or papermill is not installed.
    """
    papermill = _papermill()
    import nbformat
    from nbconvert import HTMLExporter

    from repro._kernels import PatientManager

    parameters = _typed(path, parameters)
    if isinstance(data := parameters.get("data"), str) and data:
        parameters["data"] = str(paths.data_roots(data)[0])
    target = _target_folder() / path.name
    stamp = target.with_suffix(".stamp")
    state = _state(path, parameters)
    if stamp.exists() and stamp.read_bytes() == state.encode() and target.exists():
        return Outcome(f"{path.stem}: up to date, {target.with_suffix('.html')}")
    target.parent.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)  # what is written now need not be what it stands for
    failure = None
    with replacing(target) as temporary:
        try:
            with _same_folders():
                papermill.execute_notebook(
                    str(path),
                    str(temporary),
                    parameters=parameters,
                    kernel_name="python3",  # whatever kernel the notebook was last saved with
                    progress_bar=False,
                    extra_arguments=QUIET_KERNEL,
                    cwd=str(paths.home() if paths.INSTALLED else FOLDER),
                    kernel_manager_class=PatientManager,
                )
        except papermill.PapermillExecutionError as error:
            failure = f"{error.ename}: {error.evalue}"  # the notebook shows how far it came
        except RuntimeError as error:  # of the kernel, such as one that memory ran out for
            failure = str(error)
        executed = nbformat.read(temporary, as_version=4)
        executed.metadata.get("papermill", {})["output_path"] = str(target)
        nbformat.write(executed, temporary)
    page, _ = HTMLExporter().from_filename(str(target))
    with replacing(target.with_suffix(".html")) as temporary:
        temporary.write_text(page, encoding="utf-8")
    if failure is not None:
        return Outcome(f"{path.stem}: FAILED, {printable(failure)}; see {target}", True)
    # A notebook that computes adds records: what it saw is what stands after it.
    with replacing(stamp) as temporary:
        temporary.write_text(_state(path, parameters), encoding="utf-8")
    return Outcome(f"{path.stem}: done, {target.with_suffix('.html')}")


def refresh(path: Path) -> Outcome:
    """Run a notebook as it is, on the reference records, and keep its outputs in place.

    Its cell tagged ``opening`` is written anew from these records. What differs from run to run
    without saying anything is left out: times, widgets, which live only in a kernel, and what went
    to the error stream.

    Raises:
        UsageError: The notebooks are those of an installed package.
    """
    if paths.INSTALLED:
        raise UsageError(
            "the notebooks of an installed package stay as they are; refresh those of a checkout, "
            "or execute them: leave --refresh out"
        )
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    from repro._kernels import PatientManager

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if "opening" in cell.metadata.get("tags", ()):
            cell.source, pictures = opening(path.stem)
            cell.attachments = {
                name: {"image/png": base64.b64encode(png).decode()}
                for name, png in pictures.items()
            }
    context = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        resources=context,
        extra_arguments=QUIET_KERNEL,
        kernel_manager_class=PatientManager,
    )
    client.reset_execution_trackers()
    try:
        # Not `client.execute()`, which takes Ctrl-C for the end of the kernel alone.
        with _same_folders(), client.setup_kernel():
            for number, cell in enumerate(notebook.cells):
                client.execute_cell(cell, number, execution_count=client.code_cells_executed + 1)
    except CellExecutionError as error:
        failure = printable(f"{error.ename}: {error.evalue}")
        return Outcome(f"{path.stem}: FAILED, {failure}; left as it was", True)
    except RuntimeError as error:  # of the kernel
        return Outcome(f"{path.stem}: FAILED, {printable(str(error))}; left as it was", True)
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
            for output in cell.outputs:
                if (data := output.get("data", {})) and data.pop(WIDGET, None):
                    data["text/plain"] = UNRUN
    with replacing(path) as temporary:
        nbformat.write(notebook, temporary)
    return Outcome(f"{path.stem}: outputs refreshed")


def opening(name: str) -> tuple[str, dict[str, bytes]]:
    """Return what stands under a notebook's title, told of the reference records.

    Args:
        name: The notebook's, without ending.

    Returns:
        Markdown, and the pictures that it shows as attachments: PNG by name.
    """
    from repro.experiments import PAPERS, load_paper, story
    from repro.experiments.query import find_source

    sources = {key: find_source(load_paper(key), local=False) for key in PAPERS}
    for source in sources.values():
        if source.paper.notebook == name:
            text = story.opening(source, "attachment:opening.png")
            return text, {"opening.png": story.opening_figure(source)}
    return story.overview(sources, "attachment:"), story.overview_figures(sources)


@contextmanager
def _same_folders() -> Iterator[None]:
    """Let kernels, which run in another folder, find those that relative paths mean here."""
    folders = {
        "REPRO_CACHE": paths.cache_dir,
        "REPRO_DATA": lambda: paths.data_roots()[0],
        "REPRO_RESULTS": paths.results_dir,
    }
    before = {name: os.environ[name] for name in folders if os.environ.get(name)}
    os.environ.update({name: str(folders[name]()) for name in before})
    try:
        yield
    finally:
        os.environ.update(before)


def _state(path: Path, parameters: Mapping[str, Any]) -> str:
    """Hash all that an executed notebook depends on: itself, the package, records, data root."""
    digest = hashlib.sha256(json.dumps(dict(parameters), sort_keys=True).encode())
    digest.update(os.environ.get("REPRO_DATA", "").encode())
    sources = [path, *sorted(paths.PACKAGE.rglob("*.py")), *sorted(paths.PACKAGE.rglob("*.toml"))]
    for source in sources:
        digest.update(source.read_bytes())
    for folder in (paths.results_dir(), paths.SHIPPED):
        for record in sorted([*folder.rglob("*.json"), *folder.rglob("*.jsonl.gz")]):
            # Of a link itself, which may lead nowhere; and a name need not be text.
            digest.update(os.fsencode(record) + f" {record.lstat().st_mtime_ns}".encode())
    return digest.hexdigest()
