"""The plan of θ-adaptive training, and every artefact with whatever records there are."""

import pytest
from made_adaptive import World, lost_some, nothing, results_of

from repro.experiments import load_paper
from repro.experiments.adaptive import read, runs
from repro.experiments.adaptive.runs import DIV2K
from repro.experiments.design import paper_toml

DESIGN = load_paper("adaptive")
PROFILES = ("smoke", "quick", "gpu", "paper")
WORLDS = {
    "all": World(),
    "none": World(status=nothing),
    "some": World(status=lost_some),
    "diverged": World(length=lambda config, seed: 2 if seed else 0),
}


def chosen(profile):
    return {task: names[0] for task, names in DESIGN.datasets[profile].items()}


@pytest.mark.parametrize("name", DESIGN.artefacts)
@pytest.mark.parametrize("kind", WORLDS)
def test_whatever_records_there_are(name, kind):
    """Tables, captions, verdicts and figures of all of them, some, none and diverged ones."""
    artefact = DESIGN.artefacts[name]
    results = results_of(name, WORLDS[kind], "quick", chosen("quick"))
    rows = artefact.table(results)
    assert len(rows) or kind != "all"
    said = artefact.caption(results)
    trains = any(run.experiment in runs.TRAININGS for run, _ in results.expected)
    assert ("DIVERGED" in said) == (kind == "diverged" and trains)
    assert ("Not run: " in said) == (kind == "some" and trains)
    for claim in artefact.claims:
        assert artefact.claims[claim] and paper_toml("adaptive")["claims"][name][claim]
    if artefact.draw is not None:
        assert artefact.figure(results).axes


def test_stand_ins_and_synthetic_data_are_named():
    said = DESIGN.artefacts["figure6"].caption(results_of("figure6", None, "quick"))
    assert "STAND-IN: EDSR 2×16 for EDSR." in said and "SYNTHETIC: phantom." in said
    given = results_of("figure4", None, "quick", {**chosen("quick"), DIV2K: "bsds500"})
    assert "bsds500 for DIV2K" in DESIGN.artefacts["figure4"].caption(given)
    assert "STAND-IN" not in DESIGN.artefacts["figure10"].caption(results_of("figure10"))
    assert read.network({"model": {"name": "resnet20"}}) == "ResNet-20"
