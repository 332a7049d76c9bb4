"""What images and captions say of their records."""

import re

import pytest
from invented import make_record
from made_dualbatch import World
from made_dualbatch import results as dualbatch
from made_microconv import plausible
from made_microconv import results as microconv

from repro import paths
from repro.experiments import PAPERS, load_paper, query
from repro.experiments.captions import signature
from repro.experiments.design import Results


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    monkeypatch.setenv("REPRO_RESULTS", str(paths.ROOT / "results"))


@pytest.mark.parametrize("key", PAPERS)
def test_an_image_says_whose_numbers_it_shows(key):
    paper = load_paper(key)
    source = query.find_source(paper, None, None, local=False)
    name = next(name for name, artefact in paper.artefacts.items() if artefact.draws)
    artefact = paper.artefacts[name]
    results = query.results_of(artefact, source)
    told = " ".join(artefact.figure(results).texts[-1].get_text().split())
    assert told == signature(results, artefact.caption(results))
    assert told.startswith("Ours: ") and f"profile {results.profile}" in told
    results.records = []
    texts = [text.get_text() for text in artefact.figure(results).texts]
    assert not any(text.startswith("Ours") for text in texts)


def test_the_signature_counts_what_is_drawn_of_trainings_and_of_measured_processes():
    source = query.find_source(load_paper("dualbatch"), None, None, local=False)
    results = query.results_of(load_paper("dualbatch").artefacts["synchronisation"], source)
    assert re.search(r" · (\d+ to )?\d+ seeds, \d+ processes", signature(results, ""))
    results.records = [r for r in results.records if r.experiment == "wall"]
    assert re.search(r" · \d+ processes$", signature(results, ""))
    assert "seed" not in signature(results, "")


def test_what_a_caption_warns_of_is_in_the_image():
    paper = load_paper("outofcore")
    source = query.find_source(paper, None, None, local=False)
    artefact = paper.artefacts["table1"]
    results = query.results_of(artefact, source)
    assert "SIMULATED" in signature(results, artefact.caption(results))
    assert "STAND-IN" not in signature(results, "Measured.")


def test_the_signature_tells_processes_from_seeds_and_a_stop_from_an_extent():
    measured = dualbatch("table4", World(), "long")
    assert " · 5 processes" in signature(measured, "")
    own = microconv("iterations", plausible, "long")  # each record starts its own
    assert " · 3 processes" in signature(own, "")
    own.records[0].metrics["samples_s"].append(own.records[0].metrics["samples_s"][0])
    assert " · 3 to 4 processes" in signature(own, "")
    # Processes that share the work of one training step are something else.
    adaptive = load_paper("adaptive").artefacts["figure7"]
    (run,) = adaptive.runs("quick", {})
    assert run.config["processes"] == 2
    record = make_record(run.experiment, paper="adaptive", config=run.config)
    assert signature(Results([run], (0,), [record]), "").endswith(" · 1 seed")
    trained = dualbatch("table8", World(), "long")
    assert " · 3 seeds" in signature(trained, "")
    trained.records.remove(next(r for r in trained.records if r.experiment == "train"))
    assert " · 2 to 3 seeds" in signature(trained, "")
    paper = load_paper("adaptive")
    run, *_ = paper.artefacts["figure4"].runs(
        "long", {task: names[0] for task, names in paper.datasets["long"].items()}
    )
    record = make_record(run.experiment, paper="adaptive", config=run.config)
    assert " · at most 1,100 epochs · 1 seed" in signature(Results([run], (0,), [record]), "")
