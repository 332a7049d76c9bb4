"""In which setting a claim is judged, and what word that allows."""

from dataclasses import replace

import pytest
from invented import make_record

from repro.experiments import design, load_paper
from repro.experiments.judge import Exact
from repro.experiments.query import Results

RUN = design.Run("train", {"x": 1}, seeds=(0,))


def results(profile, data="cifar100"):
    facts = {"name": data, "fingerprint": data, "kind": "real", "provenance": "an archive"}
    record = make_record("train", paper="dualbatch", config=RUN.config, dataset=facts)
    return Results([RUN], (0,), [record], profile)


def claiming(key, holds):
    numbers = {key: lambda results: {"": Exact(holds, "")}}
    return design.Artefact("a", "Table 0", "", "", lambda *_: [], list, claims=numbers)


@pytest.mark.parametrize(
    ("kind", "profile", "data", "setting"),
    [
        ("training", "paper", "cifar100", design.OWN),
        ("training", "paper", "cifar10", design.SMALLER),  # for CIFAR-100
        ("training", "paper", "digits", design.SMALLER),
        ("training", "gpu", "cifar100", design.SMALLER),  # fewer epochs
        ("training", "long", "cifar100", design.SMALLER),
        ("time", "gpu", "cifar100", design.ELSEWHERE),
        ("memory", "paper", "cifar100", design.ELSEWHERE),
        ("time", "long", "cifar100", design.SMALLER),
        ("simulated", "paper", "cifar100", design.SIMULATED),
    ],
)
def test_settings(kind, profile, data, setting):
    assert design.setting_of(kind, results(profile, data)) == setting


@pytest.mark.parametrize("key", ["mbs", "dualbatch", "adaptive", "together"])
def test_the_papers_own_data_is_what_its_profile_takes_first(key):
    tasks = load_paper(key).datasets["paper"].values()
    assert sorted(design.paper_toml(key)["own_data"]) == sorted(names[0] for names in tasks)


def test_a_certain_failure_is_not_reproduced_in_the_papers_own_setting_alone():
    claim = replace(design.claims_of("mbs")["table4"]["same_result"], kind="training")
    artefact = claiming(claim.key, False)
    words = {p: artefact.judge(claim, results(p)).word for p in ("paper", "gpu", "long")}
    assert words == {"paper": "not reproduced", "gpu": "not seen here", "long": "not seen here"}


@pytest.mark.parametrize("profile", ["smoke", "quick"])
def test_smoke_and_quick_beside_long_decide_nothing_but_what_is_exact(profile):
    """A short training can be certain, and end the other way round than a longer one."""
    claim = design.claims_of("mbs")["table4"]["same_result"]
    artefact, short = replace(claiming(claim.key, True), long=True), results(profile)
    verdict = artefact.judge(claim, short)
    assert verdict.word == "undecided"
    assert f"the profile {profile} trains and repeats too little" in verdict.evidence
    assert artefact.judge(replace(claim, rule="exact", margin=None), short).word == "reproduced"
    alone = replace(artefact, long=False).judge(claim, short)
    assert alone.word == ("reproduced" if profile == "quick" else "undecided")
