"""Section V: θ-adaptive training with LARS and LAMB."""

import pytest
from made_adaptive import World, judge, nothing, only_strategies, paper_final, results_of

from repro.experiments import load_paper
from repro.experiments.adaptive import layers

DESIGN = load_paper("adaptive")
ABOVE = {"lars/theta_above_lars": "LARS", "lars/theta_above_lamb": "LAMB"}
CLAIMS = [*ABOVE, "lars/lars_keeps_up"]


def ending(values, scatter=0.1, **options):
    return World(
        final=lambda c: values.get(c["strategy"], paper_final(c)), scatter=scatter, **options
    )


def lost(*strategies):
    return lambda config, seed: 0 if config["strategy"] in strategies else None


class TestClaims:
    @pytest.mark.parametrize("target", CLAIMS)
    def test_as_the_paper_expects(self, target):
        assert judge(target).word == "reproduced"

    @pytest.mark.parametrize("target", CLAIMS)
    def test_without_trainings(self, target):
        assert judge(target, World(status=nothing)).word == "not run"
        assert judge(target, World(status=only_strategies("theta", "linear"))).word == "not run"

    @pytest.mark.parametrize(("target", "optimizer"), ABOVE.items())
    def test_above_the_large_batch(self, target, optimizer):
        def world(gap, scatter=0.1):
            return ending({f"theta_{optimizer}": 80 + gap, f"linear_{optimizer}": 80}, scatter)

        assert judge(target, world(1)).word == "reproduced"
        assert judge(target, world(-1)).word == "not reproduced"
        assert judge(target, world(1, 5.0)).word == "undecided"

    @pytest.mark.parametrize(("target", "optimizer"), ABOVE.items())
    def test_who_diverges_has_lost(self, target, optimizer):
        large, grown = f"linear_{optimizer}", f"theta_{optimizer}"
        assert judge(target, World(length=lost(large))).word == "reproduced"
        assert judge(target, World(length=lost(grown))).word == "not reproduced"
        assert judge(target, World(length=lost(large, grown))).word == "not reproduced"
        gone = World(length=lost(large), status=only_strategies(large))
        assert judge(target, gone).word == "not run"

    def test_lars_keeps_up_with_sgd(self):
        for gap, word in ((-0.5, "reproduced"), (3, "reproduced"), (-2, "not reproduced")):
            found = judge("lars/lars_keeps_up", ending({"theta_LARS": 90.79 + gap}, 0.02))
            assert found.word == word and "margin -1 points" in found.evidence
        assert judge("lars/lars_keeps_up", World(length=lost("theta_LARS"))).word == (
            "not reproduced"
        )
        assert judge("lars/lars_keeps_up", World(length=lost("theta"))).word == "not run"


def test_the_table():
    rows = layers.table(results_of("lars", World(spread=0.1, scatter=0.01)))
    told = [(row["optimizer"], row["strategy"]) for row in rows]
    assert told == [
        (o, s) for o in ("SGD", "LARS", "LAMB") for s in ("linear scaling", "θ-adaptive")
    ]
    assert rows[3]["over linear scaling"].startswith("+3.00 [")
    assert rows[3]["K"] == "5" and rows[5]["μ"] == "0.002 ~ 0.016"
    assert rows[2]["accuracy (%)"] == "88.00 ± 0.11"
    # LAMB has no time under quick, and no row then.
    assert len(layers.table(results_of("lars", profile="quick"))) == 4
    lame = layers.table(results_of("lars", World(length=lost("theta_LARS"))))
    assert lame[3]["n"] == "0, 3 diverged"


def test_curves_and_caption():
    results = results_of("lars")
    drawn = DESIGN.artefacts["lars"].exhibit.figure(results)
    assert [len(axis.get_lines()) for axis in drawn.axes] == [7, 7]  # and the decay
    said = DESIGN.artefacts["lars"].caption(results)
    assert "our choice" in said and "shows no such training" in said
