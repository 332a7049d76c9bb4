"""Paragraphs on claims that are not reproduced."""

from copy import copy

import pytest

from repro import paths
from repro.experiments import PAPERS, load_paper, summary
from repro.experiments.sources import find_source, results_of


@pytest.mark.parametrize("key", PAPERS)
def test_each_claim_that_the_records_do_not_reproduce_has_its_paragraph(key, monkeypatch):
    monkeypatch.setenv("REPRO_RESULTS", str(paths.ROOT / "results"))
    paper, told = load_paper(key), summary.unheld(key)
    claims = {f"{name}/{c.key}" for name, a in paper.artefacts.items() for c in a.claims}
    assert {f"{name}/{claim}" for name, rows in told.items() for claim in rows} <= claims
    rows = summary.paper_verdicts(find_source(paper, local=False))
    for row in rows:
        assert ("unheld" in row) == (row["verdict"] == "not reproduced")
        if "unheld" in row:
            assert 5 < len(row["unheld"].split()) < 130, row["claim"]
            assert row["unheld"] != summary.NOTHING_YET, (row["artefact"], row["claim"])


def test_a_paragraph_beside_other_records_says_whose_it_is(monkeypatch):
    """Beside another profile's numbers, or this machine's own, it would describe neither."""
    monkeypatch.setenv("REPRO_RESULTS", str(paths.ROOT / "results"))
    paper = load_paper("together")
    artefact, told = paper.artefacts["limit"], summary.unheld("together")["limit"]
    shown = results_of(artefact, find_source(paper, local=False))
    claim = next(c for c in artefact.claims if c.key == "streaming_over_swapping")

    def beside(results):
        rows = summary.verdicts(paper, artefact, results)
        (row,) = (row for row in rows if row["claim"] == claim.text)
        return row["unheld"]

    assert beside(shown) == told[claim.key]
    for change in ({"profile": "gpu"}, {"places": ["this machine, profile quick"]}):
        other = copy(shown)
        vars(other).update(change)
        assert beside(other) == f"Of the reference records, profile quick: {told[claim.key]}"
