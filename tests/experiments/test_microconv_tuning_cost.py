"""How long tuning takes."""

from functools import partial

import made_microconv as made
import pytest
from made_microconv import candidates, entry, judge, solved

from repro.experiments import load_paper
from repro.report import DASH

OPTIMISATION = load_paper("microconv").artefacts["optimisation"]


def tuned(every, two):
    """Return a world by the seconds that policies take."""
    by_policy = {"all": every, "powerOfTwo": two}

    def make(run):
        given = by_policy.get(run.config.get("policy"))
        if given is None:
            return None
        made_up = candidates(entry())
        made_up["metrics"] |= {"benchmark_s": 0.9 * given, "optimise_s": 0.1 * given}
        return made_up

    return make


class TestTuning:
    @pytest.mark.parametrize("every", [10.0, 1.0])
    def test_a_time_that_was_taken_once_does_not_decide(self, every):
        word, evidence = judge("optimisation/power_of_two_saves", tuned(every, 1.0))
        assert word == "undecided"
        assert f"×{1 / every:.2f} (no spread known), paper ×{3.82 / 34.16:.2f}" in evidence
        assert "34 for 34 times measured at a mini-batch of 8" in evidence

    def test_not_run(self):
        word, _ = judge("optimisation/power_of_two_saves", tuned(10.0, None))
        assert word == "not run"


class TestSolver:
    @pytest.mark.parametrize(
        ("samples", "small", "large"),
        [
            ((0.0050, 0.0051, 0.0049), "reproduced", "reproduced"),
            ((0.0050, 0.0061, 0.0055), "undecided", "reproduced"),
            ((0.050, 0.052, 0.049), "not reproduced", "reproduced"),
            ((0.69, 0.75, 0.72), "not reproduced", "undecided"),
            ((0.80, 0.85, 0.82), "not reproduced", "not reproduced"),
        ],
    )
    def test_samples_against_the_papers_times(self, samples, small, large):
        """5.46 ms for ResNet-50, 716 ms for ResNet-152."""

        def make(run):
            return solved(samples, samples) if run.experiment == "solver" else None

        for key, word in (("solver_resnet50", small), ("solver_resnet152", large)):
            of_resnet152 = partial(self.both, make)
            found, evidence = judge(f"optimisation/{key}", of_resnet152)
            assert found == word or (found, word) == ("partly", "not reproduced")
            assert f"{1e3 * sorted(samples)[1]:.1f} ms" in evidence

    def both(self, make, run):
        """Return the solver's times, and of ResNet-152's own programme some within the paper's."""
        return made.programme() if run.experiment == "programme" else make(run)

    @pytest.mark.parametrize(
        ("tight_s", "word"), [(0.2, "reproduced"), (0.9, "partly"), (0.71, "undecided")]
    )
    def test_resnet152s_own_kernels_with_both_totals(self, tight_s, word):
        def make(run):
            return made.programme(tight_s) if run.experiment == "programme" else solved()

        found, evidence = judge("optimisation/solver_resnet152", make)
        assert found == word, evidence
        assert "its own 1200 variables, 90.0 of 5,088.0 MiB taken (as in the paper)" in evidence


class TestTable:
    def test_the_cells(self):
        frame = OPTIMISATION.table(made.results("optimisation", made.plausible)).set_index("what")
        assert list(frame["paper"]) == [
            "3.82 s",
            "34.16 s",
            "5.46 ms",
            "716 ms",
            DASH,
            "716 ms",
            "716 ms",
        ]
        (name,) = [name for name in frame.index if "(binding)" in name]
        told = "WD, ResNet-152's own 464 kernels, 1200 variables, 100.0 MiB (binding)"
        assert name == told and frame.loc[name]["ours"] == "204.0 ms"
        row = frame.loc["AlexNet, policy all: measure and divide"]
        assert (row["ours"], row["of which dividing (ms)"]) == ("2.50 s", "500.0")
        assert row["times measured"] == 34
        row = frame.loc["WD, 562 variables (made-up fronts)"]
        assert (row["ours"], row["times measured"]) == ("100.0 ms", 3)  # a median

    def test_without_records_the_papers_numbers_stand(self):
        frame = OPTIMISATION.table(made.results("optimisation", lambda run: None))
        assert list(frame["paper"])[:2] == ["3.82 s", "34.16 s"]
        assert set(frame["ours"]) == {DASH}
