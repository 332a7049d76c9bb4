"""Reference records with planted numbers: what becomes of a claim or a check of an artefact."""

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from functools import cache

import pytest
from made import check_row, verdict

from repro import paths
from repro.experiments import load_paper
from repro.experiments.judge import Verdict
from repro.experiments.query import Results, find_source, results_of
from repro.records import Record

Edit = Callable[[Record], None]  # changes a record in place


@cache
def _reference(paper: str, artefact: str) -> Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_RESULTS", str(paths.ROOT / "results"))
        source = find_source(load_paper(paper), local=False)
        results = results_of(source.paper.artefacts[artefact], source)
        assert results.records and (results.gpu is None or results.gpu.records)
    return results


def reference(target: str, edit: Edit = lambda record: None, gpu: bool = False) -> Results:
    """Return the reference records of ``PAPER/ARTEFACT``, or a GPU's, each changed by `edit`."""
    paper, artefact, *_ = target.split("/")
    whole = _reference(paper, artefact)
    results = copy(whole.gpu if gpu else whole)
    changed = ("config", "metrics", "timings")
    results.records = [
        replace(record, **{name: deepcopy(getattr(record, name)) for name in changed})
        for record in results.records
    ]
    for record in results.records:
        if record.status == "ok":
            edit(record)
    return results


def judged(target: str, edit: Edit = lambda record: None, gpu: bool = False) -> Verdict:
    """Return the verdict on ``PAPER/ARTEFACT/KEY`` of the reference records, changed by `edit`."""
    return verdict(target, reference(target, edit, gpu))


def check(target: str, position: int = 0, edit: Edit = lambda record: None) -> dict[str, str]:
    """Return a check of ``PAPER/ARTEFACT``, by its place, as a row."""
    return check_row(target, position, reference(target, edit))
