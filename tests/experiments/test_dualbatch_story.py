"""What the notebook on dual-batch learning tells: true of whatever records are shown."""

import pytest
from made_dualbatch import World, results

from repro.experiments import load_paper
from repro.experiments.dualbatch.story import STORY
from repro.experiments.intervals import NotRun


def told(number, **world):
    """Return a finding in a world."""
    return STORY.findings[number](lambda name: results(name, World(**world)))


def test_times_of_real_workers():
    assert "×0.65): reproduced" in told(1) and "×0.90): reproduced" in told(1)
    slower = told(1, cycled=lambda side, highest: 1.0 if side == highest else 1.2)
    assert slower.count("not reproduced") == 2 and "×1.13" in slower


def test_gains():
    said = told(0)
    assert "+2.3 to +2.9 points" in said and "6 of 6 intervals above 0: reproduced" in said
    assert "hybrid scheme with three gains +3.30" in said
    assert "At a rate tuned for each, three gain +2.90 " in said
    open_ = told(0, spread=4.0)
    assert open_.count("undecided") == 2 and "reproduced" not in open_
    none = told(0, accuracy=lambda config: 67.8)
    assert "0 of 6 intervals above 0: not reproduced" in none and "gains +0.00" in none


def test_equations():
    assert "up to 0.0 % off" in told(2) and "errs by up to 3.0 %" in told(2)

    def edit(metrics, config):
        metrics["frameworks"]["TensorFlow"]["table2"][0] = 166  # for 83

    assert "up to 100.0 % off" in told(2, edit={"published": edit})


def test_what_was_not_run_is_not_told():
    for number in range(3):
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
