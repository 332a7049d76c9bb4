"""The command line: ``python -m repro list | run | show | verify | status | report | ...``."""

import json
import os
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from repro import console, terminal
from repro.experiments import PAPERS, arguments, find_targets, load_paper
from repro.experiments.design import COMPUTING_PROFILES, UsageError, claims_of
from repro.options import (
    Changes,
    Data,
    Datasets,
    Device,
    Hours,
    Processes,
    Profile,
    Reference,
    Seeds,
    StandIn,
    Targets,
    option,
)
from repro.report import printable  # names of files and texts of records may hold anything

# Threads that wait by spinning stop each other for seconds where cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
PROGRAM = "repro" if sys.argv[0].endswith(f"{os.sep}repro") else "python -m repro"
LOOK, RUN, MAINTAIN = "Look", "Run", "Maintain"

app = typer.Typer(
    help="Reproduce five papers on batch size, memory and speed in CNN training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.command(rich_help_panel=RUN)
def doctor(
    device: Device = None,
    data: Data = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe this machine, and try every method on it.

    Run it first, for two minutes at most: it says which runs fit. Exit code 1: a self-test failed.
    """
    from repro.experiments import doctor as physician

    chosen = arguments.check_device(device or arguments.default_device())
    findings = physician.examine(chosen, data, _tell)
    typer.echo(json.dumps(findings, indent=1) if as_json else printable(physician.text(findings)))
    raise typer.Exit(1 if physician.broken(findings) else 0)


@app.command(rich_help_panel=RUN)
def advise(
    model: Annotated[str, option(help="torchvision/NAME, or a network of repro.models.")],
    batch: Annotated[int, typer.Option(help="Samples of the mini-batch.")],
    memory: Annotated[str, option(help="Of the device, such as 16GiB or 800MiB.")],
    image: Annotated[str, option(help="Pixels: 224, or 512x1024.")] = "224",
    classes: Annotated[int | None, typer.Option(help="Number, if not the model's.")] = None,
    device: Annotated[
        str | None, option(help="cpu, cuda, ..., or a data sheet's: H100. It need not be here.")
    ] = None,
    optimizer: Annotated[str, option(help="sgd, adam or adamw.")] = "sgd",
    method: Annotated[str | None, option(help="Show its code, not the best method's.")] = None,
    probe: Annotated[
        float, typer.Option(help="Seconds of measured steps where the device is here, or 0.")
    ] = 6.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time some steps of each method that fits, here.")
    ] = False,
) -> None:
    """Say which methods train a batch within a memory.

    And how fast, and how to use them: from one training step, recorded without content, and a data
    sheet or some measured steps.
    """
    from repro import advise as advising
    from repro.advise.advising import parse_memory, parse_sides

    if method is not None and method not in advising.METHODS:
        known = ", ".join(advising.METHODS)
        raise UsageError(f"the method is {method!r}: choose {known}")
    if sys.stderr.isatty():  # no bar, which would take time from the steps that are measured
        steps = "steps of each method" if measure else f"for {probe:g} s"
        typer.echo(f"recording steps of {model}, then measuring {steps} ...", err=True)
    advice = advising.advise(
        model,
        batch,
        parse_memory(memory),
        image=parse_sides(image),
        options={} if classes is None else {"num_classes": classes},
        device=device or arguments.default_device(),
        optimizer=optimizer,
        probe_seconds=probe,
        measure=measure,
    )
    typer.echo(advice.text(method))
    if model in ("resnet18", "resnet50", "resnet101"):
        usual = f"torchvision/{model} is the usual one"
        typer.echo(f"\n{model} is that of repro.models, with stride 1 in its stem; {usual}.")


@app.command("list", rich_help_panel=LOOK)
def list_(
    papers: Annotated[list[str] | None, typer.Argument(help="PAPER, such as mbs.")] = None,
) -> None:
    """List papers and artefacts."""
    for key in dict.fromkeys(papers or PAPERS):
        paper = load_paper(key)
        written = [claim for rows in claims_of(key).values() for claim in rows.values()]
        own = sum(claim.own for claim in written)
        rows = [
            {"artefact": f"{key}/{a.name}", "in the paper": a.source, "what it shows": a.title}
            for a in paper.artefacts.values()
        ]
        title = f"{key}: {paper.title}, {len(rows)} artefacts, {len(written) - own} claims"
        title += f", {own} question{'s' * (own > 1)} of our own" if own else ""
        typer.echo(f"{terminal.table(rows, title)}\n")


@app.command(rich_help_panel=RUN)
def run(
    targets: Targets = None,
    profile: Profile = None,
    device: Device = None,
    data: Data = None,
    dataset: Datasets = None,
    seeds: Seeds = None,
    only: Annotated[
        list[str] | None,
        option(help="KEY=VALUE: only the runs with this, such as mini_batch=64."),
    ] = None,
    changes: Changes = None,
    stand_in: StandIn = False,
    retry_failed: Annotated[bool, typer.Option(help="Run again what failed.")] = False,
    address: Annotated[str | None, option(help="Of Ray's cluster; auto: this machine's.")] = None,
    tried: Annotated[
        bool, typer.Option("--dry-run", help="Compute nothing; try the first steps of every run.")
    ] = False,
    workers: Processes = None,
    hours: Hours = None,
) -> None:
    """Compute the records of artefacts that are missing.

    --dry-run needs neither data nor device: the first two steps of every run are taken on tensors
    without content, so that a recipe that cannot start fails there, and its memory is known.
    The exit code is 1 where one fails.
    """
    from repro.experiments import run as running

    kept, named = arguments.parse_choices(only), find_targets(targets)
    setting = running.Setting(
        profile=profile or arguments.default_profile(),
        device=device or arguments.default_device(),
        root=data,
        seeds=arguments.parse_seeds(seeds),
        retry_failed=retry_failed,
        changed=arguments.parse_choices(changes),
        until=arguments.ending(hours),
    )
    if tried:
        from repro.experiments import dry_run

        given: dict[str, Any] = {"device": device, "data": data, "dataset": dataset, "seeds": seeds}
        given |= {"data-stand-in": stand_in, "retry-failed": retry_failed, "address": address}
        _refuse("--dry-run computes nothing", **given, workers=workers, hours=hours)
        rows = dry_run.try_runs(named, setting, kept, _tell)
        typer.echo(terminal.table(rows, f"Dry run, profile {setting.profile}"))
        typer.echo(terminal.prose(dry_run.GROUNDS))
        raise typer.Exit(any(row["result"].startswith(dry_run.FAILS) for row in rows))
    setting = replace(setting, device=arguments.check_device(setting.device))
    if stand_in:
        arguments.allow_stand_in(setting.profile)
    failed = running.compute(named, setting, kept, dataset or (), address, workers, typer.echo)
    raise typer.Exit(1 if failed else 0)


@app.command(rich_help_panel=RUN)
def gpu(
    minutes: Annotated[float | None, typer.Option(help="Begin nothing that ends later.")] = None,
    out: Annotated[str | None, option(help="Folder for the archive and the log.")] = None,
    only: Annotated[list[str] | None, option(help="A paper, artefact or letter of --list.")] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Compute nothing; print the list and what is missing.")
    ] = False,
    pieces: Annotated[str | None, option(help="Another list than repro's own, in TOML.")] = None,
    profile: Annotated[str, option(help="The list's profile.")] = "gpu",
    device: Device = None,
    data: Data = None,
) -> None:
    """Make the most of a GPU for some minutes.

    The doctor comes first, then the runs that have no record, here or in results/reference, in the
    list's order. Every record is kept as soon as its run ends, and --out has an archive of all of
    them, written every ten seconds: unpack it into results/local, then `pack` folds them in. The
    same command goes on where it was ended. $REPRO_COMMIT names the commit where a copy has no git.
    """
    from repro.experiments import gpu as session
    from repro.experiments import run as running

    arguments.check_profile(profile)
    chosen = session.read(Path(pieces) if pieces else session.LIST, only or ())
    if listed:
        _refuse("--list computes nothing", minutes=minutes, out=out)
        here = arguments.check_device(device) if device else None
        rows = [one.row() for one in session.plan(chosen, profile, here, data)]
        typer.echo(terminal.table(rows, f"Profile {profile}, the most valuable first"))
        return
    if minutes is None or out is None:
        raise UsageError("give --minutes and --out FOLDER, or --list")
    if device is None and arguments.default_device() == "cpu":
        raise UsageError(
            "no accelerator is present; give --device cpu to compute on the CPU all the same"
        )
    here = arguments.check_device(device or arguments.default_device())
    setting = running.Setting(profile=profile, device=here, root=data)
    # A machine that is taken away says so by SIGTERM: the last records go into the archive.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    well = session.compute(
        chosen, setting, minutes, Path(out), lambda line: typer.echo(printable(line))
    )
    raise typer.Exit(0 if well else 1)


@app.command(rich_help_panel=MAINTAIN)
def verify(
    papers: Annotated[list[str] | None, typer.Argument(help="PAPER, such as mbs.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All records, not the cheapest of each experiment.")
    ] = False,
    profile: Profile = None,
    reference: Reference = None,
    data: Data = None,
) -> None:
    """Compute reference records again, and compare.

    All but times, to the bit on the kind of processor that made a record (the golden rerun). On
    another kind the first steps and the plan of a training are compared, and everything else
    completely, to 1e-5. Fails if a result has changed.
    """
    from repro.experiments import golden

    compared = changed = 0
    chosen = [load_paper(key) for key in dict.fromkeys(papers or PAPERS)]
    for line, agrees in golden.verify(chosen, everything, profile, reference, data):
        typer.echo(printable(line))
        compared += agrees is not None
        changed += agrees is False
    if not compared:
        raise UsageError("no record was compared; give other records, or their data")
    if changed:
        typer.echo(
            f"{changed} differ. Where a result was meant to change, raise the experiment's version "
            "and compute its records anew (CONTRIBUTING.md)",
            err=True,
        )
    raise typer.Exit(1 if changed else 0)


@app.command(rich_help_panel=MAINTAIN)
def pack(
    papers: Annotated[list[str] | None, typer.Argument(help="PAPER, such as mbs.")] = None,
    profile: Profile = None,
) -> None:
    """Fold this machine's records into the reference records.

    Each record goes to results/reference/DEVICE/PROFILE/PAPER.jsonl.gz of its own device.
    By default records of all profiles but smoke.
    """
    from repro.records import pack_reference

    keys = [load_paper(key).key for key in dict.fromkeys(papers or PAPERS)]
    profiles = [name for name in COMPUTING_PROFILES if name != "smoke"]
    packed = pack_reference(keys, profiles if profile is None else [profile])
    for path, added in packed:
        typer.echo(printable(f"{path}: {added} new or newer records"))
    if not packed:
        typer.echo("There are no new records to pack.")


@app.command(rich_help_panel=LOOK)
def show(
    target: Annotated[str, typer.Argument(help="PAPER/ARTEFACT, such as mbs/table4.")],
    profile: Profile = None,
    reference: Reference = None,
    changes: Changes = None,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="The whole table, and the numbers of each verdict.")
    ] = False,
    setup: Annotated[
        bool, typer.Option("--setup", help="Devices, data, stand-ins, and where records lie.")
    ] = False,
) -> None:
    """Print an artefact: verdicts, the paper's values and ours.

    A table that is wider than the terminal is folded, and where that is not enough it goes on
    below.
    """
    from repro.experiments import showing

    for shown in showing.found(target, profile, reference, arguments.parse_choices(changes)):
        typer.echo(f"{showing.text(*shown, evidence)}\n")
    if setup:
        typer.echo(f"{showing.setup(target, profile, reference)}\n")
        typer.echo(terminal.prose(showing.searched()))
    else:
        typer.echo("--evidence: all, and numbers of verdicts. --setup: devices, data, stand-ins.")


@app.command(rich_help_panel=LOOK)
def figure(
    target: Annotated[
        str, typer.Argument(help="PAPER/ARTEFACT, such as mbs/figure3; or overview.")
    ],
    out: Annotated[str, option(help="Path of the file.")],
    profile: Profile = None,
    reference: Reference = None,
    changes: Changes = None,
) -> None:
    """Write an artefact's figure to a file.

    From the records that show would take.
    """
    from repro.experiments import showing

    changed = arguments.parse_choices(changes)
    typer.echo(f"figure: {showing.write_figure(target, out, profile, reference, changed)}")


@app.command(rich_help_panel=LOOK)
def status(
    profile: Profile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which records of this machine are missing or failed."""
    from repro.experiments import showing

    rows = showing.status(profile)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        typer.echo(terminal.prose(showing.completeness(rows)))
        if left := [row for row in rows if not showing.complete(row)]:
            typer.echo(terminal.table(left, "\nThose that lack some"))
        typer.echo(terminal.prose(showing.searched()))


@app.command(rich_help_panel=LOOK)
def report(
    profile: Profile = None,
    reference: Reference = None,
    output: Annotated[str | None, option(help="Path of the Markdown file.")] = None,
) -> None:
    """Count verdicts; write claims, tables, figures as Markdown."""
    from repro.experiments import showing, view

    rows, path = showing.write_report(profile, reference, output)
    typer.echo(terminal.table(view.count_rows(rows), "Verdicts"))
    if promised := showing.promise_rows(rows, profile):
        title = f"\nThe papers' promises: the reference records, and this machine's ({profile})"
        typer.echo(terminal.table(promised, title))
    typer.echo(f"report: {path}")


@app.command(rich_help_panel=RUN)
def notebooks(
    names: Annotated[list[str] | None, typer.Argument(help="Names without .ipynb.")] = None,
    parameter: Annotated[
        list[str] | None, option("-p", "--parameter", help="NAME=VALUE of the notebook.")
    ] = None,
    profile: Annotated[
        str | None, option(help="view (the default), smoke, quick, long, gpu or paper.")
    ] = None,
    device: Device = None,
    data: Data = None,
    seeds: Seeds = None,
    stand_in: StandIn = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Instead, run them in place on reference records.")
    ] = False,
) -> None:
    """Execute notebooks into results/local/notebooks, and as HTML."""
    from repro import notebooks as runner

    given: dict[str, str] = {}
    pairs: list[tuple[str, str | None]] = [runner.parse_parameter(p) for p in parameter or ()]
    pairs += [("profile", profile), ("device", device), ("data", data), ("seeds", seeds)]
    for name, value in pairs:
        if value is not None and given.setdefault(name, value) != value:
            raise UsageError(
                f"{name} is given twice, as {given[name]!r} and {value!r}; give one of them"
            )
    if refresh:
        _refuse("--refresh runs notebooks as they are", **given, **{"data-stand-in": stand_in})
    elif stand_in:
        arguments.allow_stand_in(given.get("profile", "view"))
    chosen = runner.find(names or ())
    if not refresh:
        arguments.check_profile(given.setdefault("profile", "view"), computing=False)
        runner.check(chosen, given)
        if given["profile"] == "view":
            ignored = {name: given.get(name) for name in ("seeds", "device", "data")}
            _refuse("profile view computes nothing", **ignored)
    failures = 0
    for path in chosen:
        said, failed = runner.refresh(path) if refresh else runner.execute(path, given)
        typer.echo(said)
        failures += failed
    raise typer.Exit(1 if failures else 0)


@app.command("data", rich_help_panel=RUN)
def data_(
    names: Annotated[list[str] | None, typer.Argument(help="Datasets; all by default.")] = None,
    data: Data = None,
) -> None:
    """Download the datasets that the network allows."""
    from repro import datasets

    for name, outcome in datasets.download(names or datasets.catalogue.ON_DISK, data).items():
        typer.echo(printable(f"{name}: {' '.join(outcome.split())}"))


def _refuse(why: str, /, **given: Any) -> None:
    """Refuse the options, by name, that would be ignored."""
    for name in (name for name, value in given.items() if value):
        raise UsageError(f"{why}, and takes no --{name}; leave it out")


def _tell(line: str) -> None:
    """Announce a long step, if a terminal is attached."""
    if sys.stderr.isatty():
        typer.echo(f"{line} ...", err=True)


def main() -> NoReturn:
    """Run a command; bad input ends with one line and exit code 2, Ctrl-C with one and 130."""
    # Such as of a corrupt record: the text alone, not the line of code that found it.
    warnings.formatwarning = lambda message, *_, **__: (
        f"warning: {console.one_line(str(message))}\n"
    )
    raise SystemExit(console.carry_out(_command, PROGRAM))


def _command() -> int:
    # Not `app()`, which says nothing of an interruption, or an empty line, by its version.
    command = typer.main.get_command(app)
    try:
        with command.make_context(PROGRAM, sys.argv[1:]) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except Exception as error:
        if type(error).__name__ != "NoArgsIsHelpError":
            raise
        error.show()  # type: ignore[attr-defined]
        return 2
    return 0


if __name__ == "__main__":
    main()
