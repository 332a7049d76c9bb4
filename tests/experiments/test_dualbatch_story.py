"""What the notebook on dual-batch learning tells: true of whatever records are shown."""

import pytest
from made_dualbatch import World, paper_accuracy, results

from repro.experiments import load_paper
from repro.experiments.dualbatch.story import STORY
from repro.experiments.judge import NotRun


def told(number, **world):
    """Return a finding in a world."""
    return STORY.findings[number](lambda name: results(name, World(**world)))


GAIN, HYBRID, SETTINGS, SAVING = range(4)


def test_times_of_real_workers():
    assert "×0.65): reproduced" in told(SAVING) and "×0.90): reproduced" in told(SAVING)
    slower = told(SAVING, cycled=lambda side, highest: 1.0 if side == highest else 1.2)
    assert slower.count("not seen here") == 2 and "×1.13" in slower


def test_gains():
    said = told(GAIN)
    assert "+2.3 to +2.9 points" in said and said.count("reproduced") == 1
    open_ = told(GAIN, spread=9.0)
    assert "undecided" in open_ and "reproduced" not in open_
    assert "not seen here" in told(GAIN, accuracy=lambda config: 67.8)


def test_accuracies_stand_beside_the_papers_and_say_of_what():
    said = told(GAIN, accuracy=lambda config: 40.0 + config["n_small"])
    assert "40.0 % with large batches alone (paper 67.8 %)" in said
    assert "43.0 % with three small-batch workers (paper 70.7 %)" in said
    assert "ResNet-18, CIFAR-100, 140 epochs, momentum kept" in said
    assert "end at 71.3 % (paper 71.3 %), +3.30 " in told(HYBRID)


def test_momentum_and_rates():
    def better(config):
        return paper_accuracy(config) + 2 * ("momentum kept" in config["setting"])

    def at_the_edge(config):
        rate = config.get("rate", 1)
        by_rate = rate if config["n_small"] == 0 else -abs(rate - 2)
        return better(config) + by_rate * ("rate" in config)

    def look(name):
        return results(name, World(accuracy=at_the_edge), "long", seeds=range(6))

    said = STORY.findings[SETTINGS](look)
    assert "large batches alone end at 71.8 % (×4, untuned (edge of the grid))" in said
    assert "not known (4 large: untuned (edge of the grid))" in said
    assert said.count("gain +2.70 ") == 1 and "and +2.70 [" in said  # both cells have 2 more


def test_what_was_not_run_is_not_told():
    for number in range(len(STORY.findings)):
        with pytest.raises(NotRun):
            told(number, status=lambda run: None)
    with pytest.raises(NotRun):
        list(STORY.effects(lambda name: results(name, World(status=lambda run: None))))


def test_effects_are_ratios_beside_the_papers():
    saved, cost = STORY.effects(lambda name: results(name, World(noise=0.0)))
    assert saved.paper == pytest.approx(22_161 / 33_975) and saved.ours < 1
    assert (cost.paper, cost.ours) == (1.1, pytest.approx(1.1))


def test_the_figure_is_one_of_the_papers():
    assert load_paper("dualbatch").artefacts[STORY.figure].draws
