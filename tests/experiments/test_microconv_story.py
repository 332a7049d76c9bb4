"""What the notebook on μ-cuDNN tells: computed from records, and true of any."""

import made_microconv as made
import pytest
from made_microconv import FAILED, bench, iterations, plausible

from repro.experiments.judge import NotRun
from repro.experiments.microconv import story


def look_at(make):
    return lambda name: made.results(name, make)


def forms(divided=1.0, undivided=1.5, left=True):
    """Return a maker of iterations: times over torch's own, and whether tune changed nothing."""

    def make(run):
        if run.experiment != "iterations":
            return plausible(run)
        outcome = iterations(run, WR_undivided=undivided, WR_powerOfTwo=divided)
        if left:
            outcome["metrics"]["forms"]["tuned, no limit"]["divided"] = 0
        else:
            outcome["metrics"]["forms"]["tuned, no limit"]["divided"] = 3
        return outcome

    return make


class TestWithinLimits:
    def test_faster(self):
        told = story.within_limits(look_at(forms()))
        assert "Faster: AlexNet, 5.5 MiB: ×1.50" in told and "paper ×1.23" in told
        assert "(×1.00 of torch's own speed without a limit)" in told
        assert "ResNet-18 of width 16 (for ResNet-18), 1.5 MiB: ×1.50" in told
        assert "certainly" not in told and "lower" not in told

    def test_what_failed_is_said(self):
        told = story.within_limits(look_at(forms(2.0, 1.0)))
        assert "Slower: AlexNet, 5.5 MiB: ×0.50" in told and "aster" not in told
        scattered = forms((1.0, 2.0, 0.5), 1.0)
        assert "Not certainly faster: AlexNet" in story.within_limits(look_at(scattered))

    def test_a_limit_that_does_not_bind_says_nothing(self):
        def make(run):
            outcome = forms()(run)
            if run.experiment == "iterations":
                for told in outcome["metrics"]["forms"].values():
                    told["needed"] = 0
            return outcome

        with pytest.raises(NotRun, match="no network was held"):
            story.within_limits(look_at(make))


class TestWithoutALimit:
    def make(self, relative, left=True):
        def make(run):
            if run.experiment == "deepbench":
                return bench(("3×3", 1.0, relative), scatter=0.01)
            return forms(left=left)(run)

        return make

    def test_it_counts_what_tune_left_and_advises_only_then(self):
        told = story.without_a_limit(look_at(self.make(1.25)))
        assert "in 4 of 4 networks" in told and "×0.96" in told
        assert told.endswith("divide for a limit, not for speed.")
        told = story.without_a_limit(look_at(self.make(0.5)))
        assert "not for speed" not in told
        told = story.without_a_limit(look_at(self.make(1.25, left=False)))
        assert "in 0 of 4 networks" in told and "not for speed" not in told


class TestOneWorkspace:
    @pytest.mark.parametrize(
        ("wd", "word"),
        [(0.5, "is faster"), (2.0, "is slower"), ((0.9, 1.1, 1.0), "is not certainly faster")],
    )
    def test_words(self, wd, word):
        def make(run):
            if run.experiment != "iterations":
                return plausible(run)
            return iterations(run, **{"WD_82.5_MiB_powerOfTwo": wd})

        told = story.one_workspace(look_at(make))
        assert f"(WD) {word} than a limit for each (WR): AlexNet, 82.5 MiB in all" in told
        assert told.endswith("of torch's own speed without a limit.")


def test_effects_are_what_is_told():
    gives, costs = story.effects(look_at(TestWithoutALimit().make(1.25)))
    assert gives.ours == pytest.approx(1.5) and gives.paper == pytest.approx(229 / 186)
    assert costs.ours == pytest.approx(1 / 0.96, abs=0.01) and costs.paper is None
    low, high = costs.interval
    assert low < costs.ours < high


def test_nothing_is_told_of_runs_that_failed():
    for finding in story.STORY.findings:
        with pytest.raises(NotRun):
            finding(look_at(lambda run: FAILED))


def test_the_promise_has_the_papers_numbers():
    for number in ("1.63", "1.21", "1.60", "4.54"):
        assert number in story.STORY.says
