"""What the notebook on θ-adaptive batch sizes tells: true of the records, whatever they say."""

import pytest
from made_adaptive import World, nothing, paper_final, results_of

from repro.experiments.adaptive import story
from repro.experiments.adaptive.settings import CIFAR, DIV2K
from repro.experiments.judge import NotRun


def look_in(world):
    return lambda artefact: results_of(artefact, world)


def ending(change):
    """A world in which θ-adaptive training ends by so much from the paper's value."""

    def final(config):
        return paper_final(config) + (change if config["strategy"] == "theta" else 0.0)

    return look_in(World(final=final, scatter=0.01))


class TestAccuracy:
    def test_the_papers_numbers(self):
        said = story.accuracy(look_in(World(scatter=0.001)))
        assert "ends at 90.8 beside 91.5 % (-0.72 [" in said
        assert "the paper: 90.79 beside 91.51 %)" in said and "11.3 times fewer" in said
        assert "5.3 times fewer" in said
        # A gap of exactly the margin is not certainly within it.
        assert "keeps up on cifar10 and phantom and may keep up on div2k." in said

    def test_what_failed_is_said(self):
        said = story.accuracy(ending(-5.0))
        assert "-5.72 [" in said and "training certainly ends lower on cifar10, div2k and" in said

    def test_what_cannot_tell_is_said(self):
        """Where the best fixed batch ends far below the paper's."""

        def final(config):
            return paper_final(config) - 20 * (config["task"] == "Phantom")

        look = look_in(World(final=final, scatter=0.01))
        said = story.accuracy(look)
        assert "On phantom nothing can be told: our best fixed batch ends at 32.5 dB" in said
        assert "phantom" not in story.rival(look)

    def test_a_stand_in_is_named(self):
        own = results_of("figure4", World(spread=0.01), "quick",
                         {CIFAR: "cifar10", DIV2K: "bsds500", "Phantom": "phantom"})  # fmt: skip
        look = {"figure4": own}
        assert story._called(look.__getitem__, DIV2K) == "bsds500 (for DIV2K)"
        assert story._called(look_in(World()), DIV2K) == "div2k"


@pytest.mark.parametrize(
    ("change", "word"), [(0.0, " beats starting"), (-20.0, " does not beat starting")]
)
def test_the_rival(change, word):
    said = story.rival(ending(change))
    assert word in said and "the paper: 33.49 beside 31.35 dB" in said


def test_a_rival_that_seeds_do_not_tell_apart_is_not_beaten_certainly():
    said = story.rival(look_in(World(scatter=20.0)))
    assert " does not certainly beat starting" in said


def test_the_speed_is_that_of_the_steps():
    said = story.speed(look_in(World()))

    def slow(metrics, config):
        for found in metrics["tasks"].values():
            for step in found["steps"]:
                if step["averaging"] == "all_to_all":
                    step["samples_s"] = [10 * seconds for seconds in step["samples_s"]]

    slower = story.speed(look_in(World(edit={"parallel": slow})))
    assert said != slower and "SIMULATED" in slower and "81.71" in slower
    assert "leave no core free to communicate" in said


@pytest.mark.parametrize("finding", story.STORY.findings)
def test_without_records_nothing_is_found(finding):
    with pytest.raises(NotRun):
        finding(look_in(World(status=nothing)))


def test_effects_are_the_papers_where_the_world_is():
    updates, accuracy = story.effects(look_in(World(scatter=0.01)))
    assert updates.paper == pytest.approx(54_740 / 4_840)
    assert updates.ours == pytest.approx(updates.paper)
    assert accuracy.ours == pytest.approx(accuracy.paper, abs=1e-3)
    low, high = accuracy.interval
    assert low < accuracy.ours < high
