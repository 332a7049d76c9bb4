"""Every artefact of every paper is shown and judged, whatever records there are; its caption."""

from copy import copy
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
from invented import make_record
from made import table_of

from repro.experiments import PAPERS, load_paper
from repro.experiments.design import Run
from repro.experiments.query import Results, find_source, results_of
from repro.experiments.story import recipe
from repro.experiments.view import stand_ins, verdicts
from repro.report import cell_text, figure_png

COLUMNS = ["item", "paper", "paper profile", "gpu", "long", "quick", "why they differ"]


CHANGES = {
    "nothing": lambda record: None,
    "failed": lambda r: replace(r, status="failed", error="ValueError: wrong", metrics={}),
    "out of memory": lambda r: replace(r, status="out_of_memory", error="no room", metrics={}),
    "one seed": lambda record: record if record.seed == 0 else None,
}


@pytest.fixture
def gathered(request, reference_records):
    """Give the artefacts of a paper with their reference records."""
    paper = load_paper(request.param)
    source = find_source(paper, local=False)
    return paper, {name: results_of(a, source) for name, a in paper.artefacts.items()}


def changed(results: Results, change) -> Results:
    part = copy(results)
    part.records = [*filter(None, map(change, results.records))]
    return part


@pytest.mark.slow
@pytest.mark.parametrize("gathered", PAPERS, indirect=True)
@pytest.mark.parametrize("change", CHANGES)
def test_an_artefact_is_shown_and_judged_with_whatever_records_there_are(gathered, change):
    paper, by_name = gathered
    for name, whole in by_name.items():
        artefact, results = paper.artefacts[name], changed(whole, CHANGES[change])
        results.gpu = None  # whose records are as they were
        assert [*results.frame.get("seed", ())] == [record.seed for record in results.records]
        frame = table_of(artefact, results)
        assert len(frame) or not any(r.status == "ok" for r in results.records), name
        assert len(set(frame.columns)) == len(frame.columns), name
        assert "nan" not in frame.map(cell_text).to_string().lower(), name
        assert artefact.caption(results)
        for check in artefact.checks:
            assert check.row(results)["holds"] in ("yes", "NO", "not run")
        for row in verdicts(paper, artefact, results):
            assert row["evidence"] and "nan" not in row["evidence"], row
            if change in ("nothing", "failed") and whole.records:
                assert row["verdict"] in ("not run", "not reproduced", "not seen here"), row
        if artefact.draw:
            assert figure_png(artefact.figure(results), dpi=50)
            plt.close("all")


@pytest.mark.slow
@pytest.mark.parametrize("key", PAPERS)
def test_every_profile_plans_runs_that_progress_tells_apart(key):
    paper = load_paper(key)
    for profile in paper.datasets:
        if profile == "view":
            continue
        for worst in (0, -1):  # the best and the worst data
            chosen = {t: (names or [""])[worst] for t, names in paper.datasets[profile].items()}
            for artefact in paper.artefacts.values():
                runs = artefact.runs(profile, chosen)
                assert len(set(runs)) == len(runs) and (runs or profile == "long"), artefact.name
                assert {run.experiment for run in runs} <= set(paper.experiments)
                assert len({str(run) for run in runs}) == len(runs), artefact.name


@pytest.mark.parametrize("key", PAPERS)
def test_a_recipe_explains_what_differs(key):
    rows = recipe(load_paper(key))
    assert len(rows) > 5 and len({row["item"] for row in rows}) == len(rows)
    for row in rows:
        assert list(row) == COLUMNS and all(row[name] for name in COLUMNS[:-1]), row
        if row["paper profile"] != row["quick"]:
            assert row["why they differ"], row


@pytest.mark.usefixtures("reference_records")
@pytest.mark.parametrize("key", PAPERS)
def test_an_image_says_whose_numbers_it_shows(key):
    paper = load_paper(key)
    source = find_source(paper, local=False)
    name = next(name for name, artefact in paper.artefacts.items() if artefact.draw)
    artefact = paper.artefacts[name]
    results = results_of(artefact, source)
    told = " ".join(artefact.figure(results).texts[-1].get_text().split())
    assert told == results.signature(artefact.caption(results))
    assert told.startswith("Ours: ") and f"profile {results.profile}" in told
    results.records = []
    texts = [text.get_text() for text in artefact.figure(results).texts]
    assert not any(text.startswith("Ours") for text in texts)


def test_another_dataset_whose_name_begins_alike_is_a_stand_in():
    pairs = [("cifar100", "CIFAR-10"), ("cifar10-jpeg", "CIFAR-10"), ("phantom", "Phantom")]
    assert list(stand_ins(pairs)) == ["STAND-IN: cifar100 for CIFAR-10."]


def test_the_signature_counts_repetitions_and_names_a_stop_as_the_most_epochs():
    run = Run("train", {"epochs": 1100, "stop": 5})
    once = Run("size", {}, seeds=(0,))
    records = [make_record("train", paper="mbs", config=run.config, seed=n) for n in range(3)]
    records.append(make_record("size", paper="mbs", config={}))
    results = Results([run, once], (0, 1, 2), records)
    assert results.signature("").endswith(" · at most 1,100 epochs · n = 3")
    own = Results([once], (0,), [replace(records[-1], metrics={"samples_s": [[1.0]] * 3})])
    assert own.signature("").endswith(" · n = 3")  # processes of its own


def test_a_memory_limit_is_named_where_an_experiment_keeps_to_it():
    config = {"role": "ResNet-50", "limit_fits": 16, "model": {"name": "resnet_cifar", "depth": 8}}
    for experiment, limited in (("size", True), ("timeline", False)):
        record = make_record(experiment, paper="mbs", config=config)
        results = Results([Run(experiment, config)], (0,), [record])
        caption = load_paper("mbs").artefacts["figure2"].caption(results)
        assert ("SIMULATED memory limit" in caption) == limited
