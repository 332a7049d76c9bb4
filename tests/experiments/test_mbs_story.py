"""What the notebook says first: every number from the records, the paper's from its text."""

import re

import pytest
from made import OUT_OF_MEMORY
from made_mbs import NOISE, beyond, overhead, plausible, results, streamed, trained

from repro.experiments.design import reported
from repro.experiments.mbs.story import STORY


def told(make, number, profile="paper"):
    """Return a finding in a world where `make` says what comes out."""
    return STORY.findings[number](lambda name: results(name, make, profile))


def test_the_papers_sentence_has_the_papers_numbers():
    stated = " ".join(reported("mbs")["contents"]["claims"])
    numbers = re.findall(r"\d+(?:\.\d+)?", STORY.says)
    assert len(numbers) == 6
    assert all(re.search(rf"(?<![\d.]){re.escape(n)}(?![\d.])", stated) for n in numbers), numbers


def test_how_far_mini_batches_reach():
    assert "64 (ResNet-50), 128 (ResNet-101), 32 (AmoebaNet-D) and 64 (U-Net) times" in told(
        plausible, 0
    )

    def none_above_64(run, seed):
        above = run.experiment == "train" and run.config["mini_batch"] > 64
        return OUT_OF_MEMORY if above and streamed(run) else plausible(run, seed)

    said = told(none_above_64, 0)
    assert "4 (ResNet-50), 8 (ResNet-101), 2 (AmoebaNet-D) and 4 (U-Net) times" in said
    trained_, tried = map(int, re.search(r"MBS in (\d+) of (\d+) runs", said).groups())
    assert trained_ == 3 * (2 + 3 + 1 + 2) < tried == 3 * (6 + 7 + 5 + 6)


def test_without_a_limit_nothing_is_said_to_run_out_of_memory():
    def fits(run, seed):
        return trained(50.0) if run.experiment == "train" and beyond(run) else plausible(run, seed)

    assert "without MBS 0 of 72 ran out of memory" in told(fits, 0)


def test_what_dividing_costs():
    def make(run, seed):
        return overhead(40.0, -10.0) if run.experiment == "overhead" else plausible(run, seed)

    said = told(make, 1)
    assert said.count("×1.40 [") == 2 and "full size ×0.90 to 0.90 of its time" in said


@pytest.mark.parametrize(
    ("shift", "gain", "words"),
    [
        (0.0, 5.0, ("reproduced", "reproduced")),
        (-9.0, 0.0, ("not reproduced", "not reproduced")),
        (0.0, -9.0, ("reproduced", "not reproduced")),
    ],
)
def test_accuracy_is_judged_as_the_claims_judge_it(shift, gain, words):
    def make(run, seed):
        if run.experiment != "train" or (beyond(run) and not streamed(run)):
            return plausible(run, seed)
        changed = gain if beyond(run) else shift * streamed(run)
        return trained(70.0 + changed + NOISE[seed] / 5)

    said = told(make, 2)
    assert f"stays the same is {words[0]}, that larger ones gain {words[1]}." in said
    assert said.count(f"{shift:+.1f} [") >= 1 and said.count(f"{gain:+.1f} [") >= 2
    assert "at the largest (paper -9.5)" in said  # 77.63 - 87.16 at 1024
