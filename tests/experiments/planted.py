"""Reference records with planted numbers: what becomes of a claim of an artefact."""

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from functools import cache

import pytest
from made import verdict

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
        assert results.records
    return results


def reference(target: str, edit: Edit = lambda record: None) -> Results:
    """Return the reference records of ``PAPER/ARTEFACT``, each changed by `edit`."""
    paper, artefact, *_ = target.split("/")
    results = copy(_reference(paper, artefact))
    changed = ("config", "metrics", "timings")
    results.records = [
        replace(record, **{name: deepcopy(getattr(record, name)) for name in changed})
        for record in results.records
    ]
    for record in results.records:
        if record.status == "ok":
            edit(record)
    return results


def judged(target: str, edit: Edit) -> Verdict:
    """Return the verdict on ``PAPER/ARTEFACT/KEY`` of the reference records, changed by `edit`."""
    return verdict(target, reference(target, edit))
