"""Execute the notebooks by papermill, rejecting what papermill lets pass."""

import ast
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro import paths
from repro.experiments.outcome import UsageError
from repro.measure.files import replacing
from repro.report import printable

FOLDER = paths.ROOT / "notebooks"
# A kernel warns at every start that its local sockets are not encrypted.
QUIET_KERNEL = ["--IPKernelApp.log_level=ERROR"]


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


def parse_parameter(text: str) -> tuple[str, Any]:
    """Read ``NAME=VALUE``; a value that is no Python literal is a string.

    Raises:
        UsageError: There is no equals sign.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"parameter {text!r} is not of the form NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def execute(path: Path, parameters: Mapping[str, Any]) -> Outcome:
    """Run a notebook with parameters and export it to HTML, unless nothing changed since.

    papermill only logs a parameter that the notebook does not have; here it is an error.

    Raises:
        UsageError: A parameter is unknown, or papermill is not installed.
    """
    try:
        import nbformat
        import papermill
        from nbconvert import HTMLExporter

        from repro._kernels import PatientManager
    except ImportError as error:
        raise UsageError(
            f"{error.name} is not installed; install the notebooks with pip install "
            f"'repro[notebooks]', or compute without them: python -m repro run"
        ) from error
    known = papermill.inspect_notebook(str(path))
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise UsageError(
            f"notebook {path.stem} has no parameter {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known))}"
        )
    target = paths.results_dir() / "local" / "notebooks" / path.name
    stamp = target.with_suffix(".stamp")
    state = _state(path, parameters)
    if stamp.exists() and stamp.read_bytes() == state.encode() and target.exists():
        return Outcome(f"{path.stem}: up to date, {target.with_suffix('.html')}")
    target.parent.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)  # what is written now need not be what it stands for
    failure = None
    with replacing(target) as temporary:
        try:
            papermill.execute_notebook(
                str(path),
                str(temporary),
                parameters=dict(parameters),
                kernel_name="python3",  # whatever kernel the notebook was last saved with
                progress_bar=False,
                extra_arguments=QUIET_KERNEL,
                cwd=str(FOLDER),
                kernel_manager_class=PatientManager,
            )
        except papermill.PapermillExecutionError as error:
            failure = f"{error.ename}: {error.evalue}"  # the notebook shows how far it came
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

    What differs from run to run without saying anything is left out: times, widget states, and
    what went to the error stream.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    from repro._kernels import PatientManager

    notebook = nbformat.read(path, as_version=4)
    context = {"metadata": {"path": str(FOLDER)}}
    try:
        NotebookClient(
            notebook,
            kernel_name="python3",
            resources=context,
            extra_arguments=QUIET_KERNEL,
            kernel_manager_class=PatientManager,
        ).execute()
    except CellExecutionError as error:
        failure = printable(f"{error.ename}: {error.evalue}")
        return Outcome(f"{path.stem}: FAILED, {failure}; left as it was", True)
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    with replacing(path) as temporary:
        nbformat.write(notebook, temporary)
    return Outcome(f"{path.stem}: outputs refreshed")


def _state(path: Path, parameters: Mapping[str, Any]) -> str:
    """Hash all that an executed notebook depends on: itself, the package, records, data root."""
    digest = hashlib.sha256(json.dumps(dict(parameters), sort_keys=True).encode())
    digest.update(os.environ.get("REPRO_DATA", "").encode())
    sources = [path, *sorted(paths.PACKAGE.rglob("*.py")), *sorted(paths.PACKAGE.rglob("*.toml"))]
    for source in sources:
        digest.update(source.read_bytes())
    for record in sorted(paths.results_dir().rglob("*.json")):
        digest.update(f"{record} {record.stat().st_mtime_ns}".encode())
    return digest.hexdigest()
