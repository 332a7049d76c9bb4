"""The profile `long`: what it runs, and that it hides nothing that it does not run."""

import pytest

from repro.experiments import arguments, load_paper
from repro.experiments.design import LONG
from repro.experiments.query import find_source, results_of
from repro.records import RecordStore


def plan(key):
    paper = load_paper(key)
    chosen = {task: names[0] for task, names in paper.datasets[LONG].items()}
    return paper, chosen, arguments.plan(paper, paper.artefacts.values(), LONG, chosen)


@pytest.mark.parametrize(("seeds", "shown"), [(6, LONG), (2, LONG), (1, "quick")])
def test_it_is_shown_from_two_seeds_on(seeds, shown, monkeypatch, tmp_path, make_record):
    monkeypatch.setenv("REPRO_RESULTS", str(tmp_path))
    paper, chosen, _ = plan("adaptive")
    stores = {name: RecordStore(tmp_path / "local" / name) for name in ("quick", LONG)}
    for name, store in stores.items():
        for run in paper.artefacts["figure1"].runs(name, chosen):
            for seed in range(seeds if name == LONG else 3):
                key = f"{len(list(store.folder.rglob('*.json'))):024d}"
                named = {"paper": "adaptive", "key": key, "config": run.config, "seed": seed}
                store.write(make_record(run.experiment, **named))
    found = results_of(paper.artefacts["figure1"], find_source(paper))
    assert found.profile == shown
    assert results_of(paper.artefacts["figure1"], find_source(paper, "quick")).profile == "quick"


@pytest.mark.usefixtures("reference_records")
def test_a_page_that_sums_up_shows_each_part_as_it_is_shown_by_itself():
    paper = load_paper("together")
    source = find_source(paper, local=False)
    page = results_of(paper.artefacts["decision"], source)
    parts = [results_of(paper.artefacts[name], source) for name in ("limit", "accuracy")]
    assert [part.profile for part in parts] == ["quick", LONG]
    assert page.records == [record for part in parts for record in part.records]
    assert [place.partition(" from ")[0] for place in page.places] == ["Part 1", "Part 2"]

    rows = paper.artefacts["decision"].rows(page)
    told = {row["tool"]: row["what it gives and costs"] for row in rows}
    assert "of undivided speed" in told["Micro-Batch Streaming"]
    assert "points for" in told["θ-adaptive + MBS"]
