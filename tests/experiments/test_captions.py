"""What images and captions say of their records."""

from dataclasses import replace

import pytest
from invented import make_record

from repro.experiments import PAPERS, load_paper, query
from repro.experiments.design import Run
from repro.experiments.query import Results

pytestmark = pytest.mark.usefixtures("reference_records")


@pytest.mark.parametrize("key", PAPERS)
def test_an_image_says_whose_numbers_it_shows(key):
    paper = load_paper(key)
    source = query.find_source(paper, None, None, local=False)
    name = next(name for name, artefact in paper.artefacts.items() if artefact.draw)
    artefact = paper.artefacts[name]
    results = query.results_of(artefact, source)
    told = " ".join(artefact.figure(results).texts[-1].get_text().split())
    assert told == results.signature(artefact.caption(results))
    assert told.startswith("Ours: ") and f"profile {results.profile}" in told
    results.records = []
    texts = [text.get_text() for text in artefact.figure(results).texts]
    assert not any(text.startswith("Ours") for text in texts)


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
