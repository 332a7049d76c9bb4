"""What the notebook says first: every number from the records, the paper's from its text."""

import pytest
from made_mbs import NOISE, beyond, overhead, plausible, results, streamed, trained

from repro.experiments.mbs.story import STORY


def told(make, number, profile="paper"):
    """Return a finding in a world where `make` says what comes out."""
    return STORY.findings[number](lambda name: results(name, make, profile))


def test_what_dividing_costs():
    def make(run, seed):
        return overhead(40.0, -10.0) if run.experiment == "overhead" else plausible(run, seed)

    said = told(make, 1)
    assert said.count("×1.40 [") == 2  # the least and the most of the networks
    assert "full size take ×0.90 to 0.90 of it" in said


@pytest.mark.parametrize(
    ("shift", "gain", "words"),
    [
        (0.0, 5.0, ("reproduced", "reproduced")),
        (-9.0, -4.0, ("not seen here", "not seen here")),
        (0.0, -9.0, ("reproduced", "not seen here")),
    ],
)
def test_accuracy_is_judged_as_the_claims_judge_it(shift, gain, words):
    def make(run, seed):
        if run.experiment != "train" or (beyond(run) and not streamed(run)):
            return plausible(run, seed)
        changed = gain if beyond(run) else shift * streamed(run)
        return trained(70.0 + changed + NOISE[seed] / 5 * streamed(run))

    said = told(make, 0)
    assert f"stays the same: {words[0]}." in said and f"is best: {words[1]}." in said
    assert f"{shift:+.1f} [" in said and f"{gain:+.1f} [" in said
    # Absolute accuracies, ours beside the paper's.
    assert "70.0 % undivided" in said and "(paper 87.2 and 87.0 %)" in said
    assert f"reaches {70 + gain:.1f} % (paper 89.6 % at 128)" in said
    assert f"the largest, 1024, {70 + gain:.1f} % (paper 77.6 %)" in said


def test_a_stand_in_has_its_own_name():
    assert told(plausible, 0, "quick").startswith("ResNet-8 (for ResNet-50) reaches 70.0 %")
    assert told(plausible, 2, "quick").startswith("U-Net of width 4 (for U-Net) reaches an IoU")


def test_what_larger_mini_batches_gain_in_segmentation():
    def make(run, seed):
        if run.experiment != "train" or (beyond(run) and not streamed(run)):
            return plausible(run, seed)
        return trained(70.0 + 3 * beyond(run) + NOISE[seed] / 5 * streamed(run), name="iou")

    said = told(make, 2)
    assert "IoU of 70.0 % undivided (paper 95.5 %)" in said
    assert "reaches 73.0 % (paper 97.5 % at 128), +3.0 [" in said
    assert said.endswith("is best: reproduced.")


def test_effects_are_the_papers_beside_ours():
    gives, costs = STORY.effects(lambda name: results(name, plausible, "paper"))
    assert gives.paper == pytest.approx(97.51 / 95.48) and gives.ours == pytest.approx(1.0)
    assert costs.paper == pytest.approx(233.0 / 226.8) and costs.ours == pytest.approx(1.015)
