"""The command line: ``python -m repro list | run | show | verify | status | report | ...``."""

import os

# Threads that wait by spinning stop each other for seconds where cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import json
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    help="Reproduce five papers on batch size, memory and speed in CNN training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Targets = Annotated[
    list[str] | None, typer.Argument(help="PAPER or PAPER/ARTEFACT, such as mbs/table4.")
]
Profile = Annotated[str | None, typer.Option(help="smoke, quick, gpu or paper.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.")]
Data = Annotated[str | None, typer.Option(help="Folder searched first for datasets.")]
Datasets = Annotated[list[str] | None, typer.Option("--dataset", help="Use this dataset.")]
Seeds = Annotated[str | None, typer.Option(help="A number of seeds (3), or a list (0,5,7).")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY=VALUE: another value of a configuration, such as engine=ray."),
]
Reference = Annotated[
    str | None, typer.Option("--from", help="'local', or a device under results/reference.")
]


@app.command("list")
def list_() -> None:
    """List papers and artefacts."""
    from rich.console import Console
    from rich.table import Table

    from repro.experiments import PAPERS, load_paper

    table = Table("artefact", "in the paper", "what it shows", box=None, pad_edge=False)
    for key in PAPERS:
        paper = load_paper(key)
        for artefact in paper.artefacts.values():
            table.add_row(f"{key}/{artefact.name}", artefact.source, artefact.title)
    _console(Console).print(table)


@app.command()
def run(
    targets: Targets = None,
    profile: Profile = None,
    device: Device = None,
    data: Data = None,
    dataset: Datasets = None,
    seeds: Seeds = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE: only the runs with this, such as mini_batch=64."),
    ] = None,
    changes: Changes = None,
    retry_failed: Annotated[bool, typer.Option(help="Run again what failed.")] = False,
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster (auto finds this machine's).")
    ] = None,
) -> None:
    """Compute the records of artefacts; a record that stands is not computed again."""
    from repro.experiments import running
    from repro.experiments.outcome import RAY_ADDRESS

    if address is not None:
        os.environ[RAY_ADDRESS] = address
    profile = running.check_profile(profile or running.default_profile())
    kept = [running.parse_choice(text) for text in only or ()]
    changed = [running.parse_choice(text) for text in changes or ()]
    setting = running.Setting(
        profile=profile,
        device=running.check_device(device or running.default_device()),
        root=data,
        seeds=running.parse_seeds(seeds),
        retry_failed=retry_failed,
        choices=" ".join(f"--set {key}={value}" for key, value in changed),
    )
    plans = []
    for paper, artefacts in _by_paper(targets):  # everything is checked before anything runs
        chosen = running.choose_datasets(paper, profile, dataset or (), data)
        runs = running.plan(paper, artefacts, profile, chosen)
        runs = running.with_changes(paper, runs, changed)
        runs = running.only(runs, kept)
        running.load_data(runs, data)
        plans.append((paper, runs, ", ".join(chosen.values()) or "none"))
    failed = 0
    for paper, runs, used in plans:
        tally = running.execute(paper, runs, setting)
        typer.echo(f"{paper.key}, profile {profile}: {tally}; data: {used}")
        failed += tally.failed
    raise typer.Exit(1 if failed else 0)


@app.command()
def verify(
    targets: Targets = None,
    profile: Profile = None,
    reference: Reference = None,
    data: Data = None,
) -> None:
    """Ask whether stale records stand under the present code, without training them again.

    A record stands where the code that ran is the same but has moved, or where the first steps of
    its training, run again, are the same. It then says so, and what was compared.
    """
    from repro import paths
    from repro.experiments import running, standing

    if profile is not None:
        running.check_profile(profile)
    if data is not None and not paths.data_roots(data)[0].is_dir():
        raise running.UsageError(
            f"data folder {data!r} does not exist; leave it out, or give another"
        )
    found = 0
    for paper, artefacts in _by_paper(targets):
        for line, agrees in standing.verify(paper, artefacts, profile, reference, data):
            typer.echo(_printable(line))
            found += not agrees
    raise typer.Exit(1 if found else 0)


@app.command()
def parallel(
    task: Annotated[str, typer.Option(help="CIFAR, DIV2K or Phantom.")] = "CIFAR",
    strategy: Annotated[
        str, typer.Option(help="best, linear, scheduled, theta or noise.")
    ] = "theta",
    averaging: Annotated[
        str, typer.Option(help="allreduce, all_to_all or reduce_scatter.")
    ] = "all_to_all",
    profile: Profile = None,
    device: Device = None,
    data: Data = None,
    dataset: Datasets = None,
    seed: Annotated[int, typer.Option(help="Of the training.")] = 0,
    epochs: Annotated[int | None, typer.Option(help="Instead of the profile's.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="File written after each epoch, and gone on from.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Most samples that a process computes at a time.")
    ] = None,
) -> None:
    """Train by a strategy of adaptive in all processes of torchrun (see its --nproc-per-node)."""
    from repro.experiments import running
    from repro.experiments.adaptive.parallel import run_parallel

    profile = running.check_profile(profile or running.default_profile())
    device = running.check_device(device or running.default_device())
    run_parallel(
        task,
        strategy,
        averaging,
        profile,
        device,
        data,
        dataset or (),
        seed,
        epochs,
        checkpoint,
        micro_batch,
    )


@app.command()
def show(
    target: Annotated[str, typer.Argument(help="PAPER/ARTEFACT, such as mbs/table4.")],
    profile: Profile = None,
    reference: Reference = None,
    changes: Changes = None,
) -> None:
    """Print an artefact: the paper's values beside the measured ones, and the verdicts."""
    from rich.console import Console

    from repro import report
    from repro.experiments import find_artefacts, running, sources, summary

    if profile is not None:
        running.check_profile(profile)
    paper, artefacts = find_artefacts(target)
    changed = [running.parse_choice(text) for text in changes or ()]
    console = _console(Console)
    source = sources.find_source(paper, profile, reference)
    gathered = [sources.results_of(artefact, source, changes=changed) for artefact in artefacts]
    runs = [run for results in gathered for run, _ in results.expected]
    running.with_changes(paper, runs, changed)  # refuses what none of them has
    for artefact, results in zip(artefacts, gathered, strict=True):
        title = f"{paper.key}/{artefact.name}: {artefact.title}"
        console.print(report.to_rich(artefact.exhibit.table(results), title))
        console.print(summary.caption(artefact, results), soft_wrap=False, markup=False)
        if checked := summary.checks(artefact, results):
            console.print(report.to_rich(checked, "\nHolds by construction"))
        if judged := summary.verdicts(paper, artefact, results):
            rows = [{k: v for k, v in row.items() if k != "artefact"} for row in judged]
            console.print(report.to_rich(rows, "\nClaims"))
            console.print(summary.whereabouts(paper, artefact), markup=False, highlight=False)


@app.command()
def status(
    profile: Profile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say for each artefact which records stand, are missing, stale or failed."""
    from rich.console import Console

    from repro import report
    from repro.experiments import running, summary

    if profile is not None:
        running.check_profile(profile)
    rows = summary.status(profile)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        _console(Console).print(report.to_rich(rows, "Records on this machine"))
        if not rows:
            typer.echo("none yet: python -m repro run; show and report use the reference records")


@app.command()
def report(
    profile: Profile = None,
    reference: Reference = None,
    output: Annotated[str | None, typer.Option(help="Path of the HTML file.")] = None,
) -> None:
    """Print every verdict, and write the HTML report."""
    from rich.console import Console

    from repro.experiments import running, summary
    from repro.report import to_rich

    if profile is not None:
        running.check_profile(profile)
    rows, path = summary.write_report(profile, reference, output)
    console = _console(Console)
    console.print(to_rich(rows, "Verdicts"))
    counts = summary.counts(rows)
    typer.echo(", ".join(f"{count} {word}" for word, count in counts.items() if count))
    typer.echo(f"HTML report: {path}")


@app.command()
def notebooks(
    names: Annotated[list[str] | None, typer.Argument(help="Names without .ipynb.")] = None,
    parameter: Annotated[
        list[str] | None, typer.Option("-p", "--parameter", help="NAME=VALUE of the notebook.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="view (the default), smoke, quick, gpu or paper.")
    ] = None,
    device: Device = None,
    data: Data = None,
    seeds: Seeds = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Instead, run them in place on reference records.")
    ] = False,
) -> None:
    """Execute notebooks by papermill into results/local/notebooks, with an HTML copy of each."""
    from repro import notebooks as runner
    from repro.experiments import running

    given = dict(runner.parse_parameter(text) for text in parameter or ())
    options = {"profile": profile, "device": device, "data": data, "seeds": seeds}
    for name, value in options.items():
        if value is not None and given.setdefault(name, value) != value:
            raise running.UsageError(
                f"{name} is given twice, as {given[name]!r} and {value!r}; give one of them"
            )
    running.check_profile(str(given.setdefault("profile", "view")), computing=False)
    failures = 0
    for path in runner.find(names or ()):
        outcome = runner.refresh(path) if refresh else runner.execute(path, given)
        typer.echo(outcome.text)
        failures += outcome.failed
    raise typer.Exit(1 if failures else 0)


@app.command("data")
def data_(
    names: Annotated[list[str] | None, typer.Argument(help="Datasets; all by default.")] = None,
    data: Data = None,
) -> None:
    """Download the datasets that the network allows, and say what became of each."""
    from repro import datasets

    for name, outcome in datasets.download(names or datasets.catalogue.ON_DISK, data).items():
        typer.echo(_printable(f"{name}: {' '.join(outcome.split())}"))


def _by_paper(targets: list[str] | None) -> list[Any]:
    from repro.experiments import PAPERS, find_artefacts

    grouped: dict[str, Any] = {}
    for target in targets or PAPERS:
        paper, artefacts = find_artefacts(target)
        grouped.setdefault(paper.key, (paper, []))[1].extend(artefacts)
    return list(grouped.values())


def _console(console_class: Any) -> Any:
    # A pipe has no width of its own; tables should not be cut there.
    return console_class() if sys.stdout.isatty() else console_class(width=180)


def _printable(text: str) -> str:
    from repro.report import printable  # names of files and texts of records may hold anything

    return printable(text)


def main() -> NoReturn:
    """Run a command; bad input ends with one line and exit code 2."""
    # Such as of a corrupt record: the text alone, not the line of code that found it.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {_printable(str(message))}\n"
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        print("interrupted: what was computed stands, run again to go on", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        from repro.datasets import DatasetError
        from repro.experiments import UsageError
        from repro.records import RecordError

        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            raise SystemExit(2) from None
        own = isinstance(error, UsageError | RecordError | DatasetError)
        folder = isinstance(error, OSError) and error.filename  # such as one without permission
        # Not by class: typer brings its own click, or uses the one installed.
        complaint = getattr(error, "format_message", None)
        if not (own or folder or complaint):
            raise
        text = complaint() if complaint else str(error)
        print(f"error: {_printable(' '.join(text.split()))}", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(code or 0)


if __name__ == "__main__":
    main()
