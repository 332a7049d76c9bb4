"""What was written of claims: a row a claim, older than its records, and why where it fails."""

import re
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from made_mbs import CHOSEN
from made_mbs import PAPER as MBS

from repro.experiments import PAPERS, design, load_paper, view
from repro.experiments.design import LONG, claims_of, paper_toml
from repro.experiments.judge import NOT_REPRODUCED, NOT_SEEN, WORDS, Verdict
from repro.experiments.query import Source, find_source, results_of
from repro.records import RecordStore, reference_stores

pytestmark = pytest.mark.usefixtures("reference_records")
every = pytest.mark.parametrize("paper", PAPERS)


def rows_of(paper):
    """Return every row of a paper by its name."""
    named = claims_of(paper).items()
    return {f"{artefact}.{key}": row for artefact, rows in named for key, row in rows.items()}


@every
class TestRows:
    def test_every_row_has_its_function_and_every_function_its_row(self, paper):
        artefacts = load_paper(paper).artefacts.items()
        functions = {f"{name}.{key}" for name, a in artefacts for key in a.claims}
        assert functions == set(rows_of(paper)) and functions

    def test_rows_say_what_they_must(self, paper):
        for name, row in rows_of(paper).items():
            assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", row.key), name
            assert row.text and row.source and row.why, name
            for said in (row, row.under(LONG)):
                assert said.kind in design.KINDS and said.over in ("all", "any"), name
                assert said.expect in WORDS and said.written.tzinfo is not None, name
            needed = row.rule in ("same", "at_most", "at_least")
            assert needed or row.rule in ("higher", "lower", "exact"), name
            assert needed == (row.margin is not None) == bool(row.margin_source), name
            margins = row.margin.values() if isinstance(row.margin, dict) else [row.margin or 1]
            assert all(margin > 0 for margin in margins), name
            assert row.own or paper != "together", name  # there is no paper
        texts = [(name.partition(".")[0], row.text) for name, row in rows_of(paper).items()]
        assert len(set(texts)) == len(texts)

    def test_promises_are_claims(self, paper):
        rows = rows_of(paper)
        promised = [promise["claim"] for promise in paper_toml(paper)["promises"]]
        assert len(set(promised)) == len(promised) in ((3, 4) if paper == "together" else (4, 5))
        assert set(promised) <= set(rows)
        assert paper == "together" or not [name for name in promised if rows[name].own]

    def test_a_claim_that_certainly_fails_says_why_and_no_other(self, paper):
        rows = rows_of(paper)
        for judged in view.paper_verdicts(find_source(load_paper(paper), local=False)):
            name = judged["key"].partition("/")[2]
            words = len(rows[name].why_not.split())
            if judged["verdict"] in (NOT_REPRODUCED, NOT_SEEN):
                assert 5 <= words <= 120, f"{name}: {words} words"
            else:
                assert not words, f"{name} is {judged['verdict']}"


# Rows are older than the records that they judge.


def too_early(paper, seen, rows, stores):
    """Return the artefacts, keys and times of records that a row may have been written after."""
    found = []
    for (device, profile), store in stores.items():
        if f"{device}/{profile}" in seen:
            continue
        source = Source(paper, {(device, profile): store})
        for name, own in rows.items():
            records = results_of(paper.artefacts[name], source).records
            for key, row in own.items():
                said = row.under(profile)
                started = [r.started for r in records if r.experiment not in said.seen]
                late = [when for when in started if datetime.fromisoformat(when) <= said.written]
                found += [(name, key, when) for when in late]
    return found


@every
def test_rows_are_older_than_the_records_they_judge(paper):
    seen = paper_toml(paper)["claims"]["seen"]
    stores = {place: store for place, store in reference_stores().items() if store.holds(paper)}
    assert set(seen) <= {"/".join(place) for place in stores}
    assert too_early(load_paper(paper), seen, claims_of(paper), stores) == []
    for name, row in rows_of(paper).items():
        assert max(row.written, row.under(LONG).written) <= datetime.now(UTC), name


def test_a_row_written_after_its_records_is_found(tmp_path, make_record):
    store = RecordStore(tmp_path / "gpu" / "quick")
    run, *_ = MBS.artefacts["figure2"].runs("quick", CHOSEN)
    written = datetime(2026, 11, 22, 5, tzinfo=UTC)
    row = replace(next(iter(rows_of("mbs").values())), written=written, seen=())
    rows, stores = {"figure2": {"a": row}, "table2": {}}, {("gpu", "quick"): store}
    for seconds, found in [(1, 0), (0, 1), (-1, 1)]:
        started = (written + timedelta(seconds=seconds)).isoformat()
        store.write(make_record(run.experiment, key="k" * 24, config=run.config, started=started))
        assert len(too_early(MBS, [], rows, stores)) == found
        assert too_early(MBS, ["gpu/quick"], rows, stores) == []


@pytest.mark.parametrize(
    ("on_a_gpu", "by"),
    [("reproduced", "gpu"), ("not seen here", "gpu"), ("undecided", "quick"), ("not run", "quick")],
)
def test_a_gpus_records_judge_what_they_decide(on_a_gpu, by):
    gpu = SimpleNamespace(profile="gpu", gpu=None, word=on_a_gpu)
    shown = SimpleNamespace(profile="quick", gpu=gpu, word="partly")
    artefact = SimpleNamespace(judge=lambda claim, results: Verdict(results.word, ""))
    written = rows_of("together")["accuracy.growth_keeps_accuracy"]
    _, verdict, used = view.judged(artefact, written, shown)
    assert used.profile == by and verdict.word == (on_a_gpu if by == "gpu" else "partly")


def test_why_beside_other_records_says_whose_it_is():
    """Beside another profile's numbers, or this machine's own, it would describe neither."""
    paper, told = load_paper("together"), rows_of("together")["advice.time"].why_not.strip()
    shown = results_of(paper.artefacts["advice"], find_source(paper, local=False))
    for change in ({}, {"profile": "gpu"}, {"places": ["this machine, profile quick"]}):
        results = copy(shown)
        vars(results).update(change)
        rows = view.verdicts(paper, paper.artefacts["advice"], results)
        (said,) = (row["why_not"] for row in rows if row["key"] == "together/advice.time")
        assert said == ("Of the reference records, profile quick: " if change else "") + told
