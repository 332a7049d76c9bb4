"""The plan of θ-adaptive training, and every artefact with whatever records there are."""

import pytest
from made_adaptive import World, lost_some, nothing, results_of

from repro.experiments import load_paper
from repro.experiments.adaptive import read, runs
from repro.experiments.adaptive.runs import CIFAR, DIV2K, PAPER, PHANTOM, TASKS
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


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("profile", PROFILES)
def test_batches_and_rates_keep_the_papers_ratios(profile, task):
    """So do fixed batches, whose rates are in proportion."""
    own = {
        name: runs.training(profile, task, chosen(profile), name).config["controller"]
        for name in ("best", "linear", "theta")
    }
    paper = PAPER[task]
    for name, key in (("linear", "batch"), ("theta", "batch"), ("theta", "max_batch")):
        ratio = paper[name][key] / paper["best"]["batch"]
        assert own[name][key] / own["best"]["batch"] == ratio
    assert own["theta"]["lr"] / own["best"]["lr"] == pytest.approx(
        paper["theta"]["lr"] / paper["best"]["lr"]
    )
    size = paper["theta"]["batch"]
    fixed = runs.fixed(profile, task, chosen(profile), size).config
    assert fixed["stands_for"] == size and fixed["strategy"] == "fixed"
    rate = own["best"]["lr"] * fixed["controller"]["batch"] / own["best"]["batch"]
    assert fixed["controller"]["lr"] == pytest.approx(rate)


def test_the_papers_settings_by_hand():
    config = runs.training("paper", CIFAR, chosen("paper"), "theta").config
    wanted = {"batch": 256, "max_batch": 2048, "lr": 0.2, "tolerance": 0.1, "decay": 0.1}
    assert config["controller"] == {"kind": "theta", "decay_at": [80, 120], **wanted}
    assert config["epochs"] == 140 and config["model"] == {"name": "resnet20"}
    given = runs.training("paper", DIV2K, chosen("paper"), "given").config["controller"]
    assert given["interval"] == 10
    large = runs.training("paper", CIFAR, chosen("paper"), "large").config["controller"]
    assert (large["batch"], large["lr"]) == (2048, 0.1)
    config = runs.training("paper", PHANTOM, chosen("paper"), "decay").config
    assert config["controller"]["saturation"] == {"patience": 10, "threshold": 0.01}
    assert config["stop"] == {"least": 0.1, "patience": 50} and config["sigma"] == 0.1


@pytest.mark.parametrize("profile", PROFILES)
def test_open_choices_are_in_the_runs_that_they_change(profile):
    """Under gpu and paper, so that ``--set`` may change them."""
    trainings = runs.strategies(profile, chosen(profile), DIV2K)
    has = {key: all(key in run.config for run in trainings) for key in DESIGN.options}
    assert set(has.values()) == {profile in ("gpu", "paper")}


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
    assert ("are missing" in said) == (kind == "some" and trains)
    for claim in artefact.claims:
        assert artefact.claims[claim] and paper_toml("adaptive")["claims"][name][claim]
    assert artefact.figure(results).axes


def test_stand_ins_and_synthetic_data_are_named():
    said = DESIGN.artefacts["figure6"].caption(results_of("figure6", None, "quick"))
    assert "STAND-IN: EDSR 2×16 for EDSR." in said and "SYNTHETIC: phantom." in said
    given = results_of("figure4", None, "quick", {**chosen("quick"), DIV2K: "bsds500"})
    assert "bsds500 for DIV2K" in DESIGN.artefacts["figure4"].caption(given)
    assert "STAND-IN" not in DESIGN.artefacts["figure10"].caption(results_of("figure10"))
    assert read.network({"model": {"name": "resnet20"}}) == "ResNet-20"
