"""Options of several commands."""

from typing import Annotated, Any

import typer

from repro.experiments import arguments


def option(*names: str, **settings: Any) -> Any:
    """Return an option of typer that refuses an empty value, such as a script's unset variable."""
    return typer.Option(*names, callback=_not_empty, **settings)


def _not_empty(value: Any) -> Any:
    values = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(one, str) and not one.strip() for one in values):
        raise typer.BadParameter("it is empty; leave it out, or give a value")
    return value


def _known_profile(value: str | None) -> str | None:
    if _not_empty(value) is not None:
        arguments.check_profile(str(value))
    return value


def _readable(folder: str | None) -> str | None:
    return arguments.check_data(_not_empty(folder))  # or $REPRO_DATA, which is looked at, too


Targets = Annotated[
    list[str] | None, typer.Argument(help="PAPER or PAPER/ARTEFACT, such as mbs/table4; or all.")
]
Profile = Annotated[
    str | None, typer.Option(callback=_known_profile, help="smoke, quick, long, gpu or paper.")
]
Device = Annotated[str | None, option(help="cpu, or an accelerator: cuda (cuda:0, cuda:1, ...).")]
Data = Annotated[
    str | None, typer.Option(callback=_readable, help="Folder searched first for datasets.")
]
Datasets = Annotated[list[str] | None, option("--dataset", help="Use this dataset.")]
Seeds = Annotated[str | None, option(help="A number of seeds (3), or a list (0,5,7).")]
StandIn = Annotated[
    bool,
    typer.Option("--data-stand-in", help="Profile paper: other data where its own are missing."),
]
Changes = Annotated[
    list[str] | None,
    option("--set", help="KEY=VALUE: another value of a configuration, such as engine=ray."),
]
Reference = Annotated[
    str | None, option("--from", help="'local', or a device under results/reference.")
]
Processes = Annotated[
    int | None,
    option(min=1, help="Processes for runs that measure nothing, on a CPU (quick, long: 2)."),
]
Hours = Annotated[float | None, typer.Option(help="Begin no further run after so many hours.")]
