"""Paragraphs on claims that are not reproduced."""

import pytest

from repro import paths
from repro.experiments import PAPERS, load_paper, summary
from repro.experiments.sources import find_source


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
