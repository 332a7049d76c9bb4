"""The five papers, and all of them together: what is run, what is shown, what is claimed."""

from functools import cache

from repro.experiments.design import Artefact, Paper, UsageError

PAPERS = ("mbs", "dualbatch", "adaptive", "outofcore", "microconv", "together")


@cache
def load_paper(key: str) -> Paper:
    """Return a paper by its key.

    Raises:
        UsageError: There is no such paper.
    """
    if key not in PAPERS:
        raise UsageError(f"unknown paper {key!r}; choose among {', '.join(PAPERS)}")
    return Paper.load(key)


def find_artefacts(target: str) -> tuple[Paper, list[Artefact]]:
    """Return what ``PAPER`` or ``PAPER/ARTEFACT`` names.

    Raises:
        UsageError: There is no such paper or artefact.
    """
    key, _, name = target.partition("/")
    paper = load_paper(key)
    if not name:
        return paper, list(paper.artefacts.values())
    if name not in paper.artefacts:
        choices = ", ".join(f"{key}/{known}" for known in paper.artefacts)
        raise UsageError(f"unknown artefact {target!r}; choose among {choices}")
    return paper, [paper.artefacts[name]]
