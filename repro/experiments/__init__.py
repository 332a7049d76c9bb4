"""The five papers, and all of them together: what is run, what is shown, what is claimed."""

import difflib
from collections.abc import Iterable, Sequence
from functools import cache

from repro.experiments.design import Artefact, Paper, UsageError

PAPERS = ("mbs", "dualbatch", "adaptive", "outofcore", "microconv", "together")


@cache
def load_paper(key: str) -> Paper:
    """Return a paper by its key; `UsageError` where there is none."""
    if key not in PAPERS:
        named = [f"{paper}/{key}" for paper in PAPERS if key in Paper.load(paper).artefacts]
        meant = f"did you mean {' or '.join(named)}? " if named else _meant(key, PAPERS)
        if "/" in key:
            meant = "give a paper, such as mbs (show prints an artefact); "
        raise UsageError(f"unknown paper {key!r}; {meant}choose among {', '.join(PAPERS)}")
    return Paper.load(key)


def _meant(given: str, known: Iterable[str]) -> str:
    """Ask whether the most similar name was meant, if one is similar."""
    near = difflib.get_close_matches(given, list(known), 1)
    return f"did you mean {near[0]}? " if near else ""


def find_artefacts(target: str) -> tuple[Paper, list[Artefact]]:
    """Return what ``PAPER`` or ``PAPER/ARTEFACT`` names; `UsageError` where there is none."""
    key, _, name = target.partition("/")
    paper = load_paper(key)
    if not name:
        return paper, list(paper.artefacts.values())
    if name not in paper.artefacts:
        choices = [f"{key}/{known}" for known in paper.artefacts]
        raise UsageError(
            f"unknown artefact {target!r}; {_meant(target, choices)}choose among "
            f"{', '.join(choices)}"
        )
    return paper, [paper.artefacts[name]]


def find_targets(targets: Sequence[str] | None) -> list[tuple[Paper, list[Artefact]]]:
    """Return the papers of several targets, each with its artefacts that are named.

    `UsageError` where there is no target, or one is unknown.
    """
    if not targets:
        raise UsageError(
            "name what to run: PAPER, PAPER/ARTEFACT (python -m repro list names them), or all: "
            f"{', '.join(PAPERS)}"
        )
    grouped: dict[str, tuple[Paper, list[Artefact]]] = {}
    for target in (key for one in targets for key in (PAPERS if one == "all" else [one])):
        paper, artefacts = find_artefacts(target)
        grouped.setdefault(paper.key, (paper, []))[1].extend(artefacts)
    return list(grouped.values())
