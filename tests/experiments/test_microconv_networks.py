"""Questions asked of networks, benchmarks and devices: Figures 8, 9, 11 and 13, the tables."""

import math
from typing import Any

import made_microconv as made
import pytest
from invented import make_record
from made_microconv import FAST, at, bench, judge, network, table, world

from repro.experiments import load_paper
from repro.experiments.microconv import benchmark, measured
from repro.experiments.microconv.measured import IMPLICIT, NATIVE
from repro.report import DASH

PAPER = load_paper("microconv")


def test_deepbenchs_layers_are_those_of_table_4():
    counts = {name: benchmark.counted(name) for name in benchmark.PAPER["table4"]}
    assert counts == benchmark.PAPER["table4"]
    assert sum(each["layers"] for each in counts.values()) == 94


def two(undivided: Any, divided: Any, limit: int = 64, **options: Any):
    """A world of undivided and all at one limit."""
    return world({at(limit, "undivided"): undivided, at(limit, "all"): divided}, **options)


class TestFigure9:
    @pytest.mark.parametrize(
        ("divided", "scatter", "word"),
        [
            (0.5, 0.01, "reproduced"),  # ×2 for the paper's 1.63
            (1.1, 0.01, "not reproduced"),
            (1 / 1.2, 0.3, "undecided"),
            (0.5, None, "undecided"),  # without a known scatter
        ],
    )
    def test_moderate_limit(self, divided, scatter, word):
        found, evidence = judge("figure9/moderate_faster", two(1.0, divided, scatter=scatter))
        assert found == word
        assert f"×{1 / divided:.2f}" in evidence and "paper ×1.63" in evidence
        assert f"divided is ×{1 / divided:.2f}" in evidence and "of torch's own" in evidence

    @pytest.mark.parametrize(("left", "word"), [(12, "reproduced"), (13, "not run")])
    def test_a_gain_over_our_own_fallback_is_told_and_not_judged(self, left, word):
        """Of 24 kernels, those that undivided leaves to this package's algorithm."""

        def make(run):
            made_ = two(2.0, 1.0)(run)
            if made_ and run.config["policy"] == "undivided":
                for row in made_["metrics"]["kernels"][:left]:
                    row["parts"] = [[8, IMPLICIT]]
            return made_

        found, evidence = judge("figure9/moderate_faster", make)
        assert found == word and "×2.00 [" in evidence
        told = f"undivided falls back to our own torch:implicit on {left} of 24 kernels; "
        assert told + "divided is ×1.00 [" in evidence
        assert (measured.FALLBACK in evidence) == (word == "not run")


def test_the_error_is_known_where_no_kernel_is_left_to_torch():
    row = {"batch": 8, "parts": [[8, NATIVE]], "native_s": 1.0}
    own = [row | {"time_s": 1.1**sign} for sign in (1, -1, 1)]  # one twice: it counts once

    def gap(**metrics):
        records = [network(relative, scatter=None, **metrics) for relative in (1.0, 0.5)]
        return measured.gained(*(make_record("network", **one) for one in records))

    assert math.isnan(gap().error)
    # Four kernels that take equal shares, on both sides.
    assert gap(own=own).error == pytest.approx(math.log(1.1) * math.sqrt(2 * 4 / 16))
    assert gap(own=own).dof == 2


class TestFigure11:
    WR, WD = at(8, "undivided"), at(120, "all", mode="WD")
    RESNET_WR = at(32, "undivided", "ResNet-50")
    RESNET_WD = at(2544, "powerOfTwo", "ResNet-50", "WD")

    def cells(self, wd, roomy, resnet, options=FAST):
        """Times over torch's own: of WD, of undivided with more room, of ResNet-50's WD."""
        cells = {self.WR: 1.0, self.WD: (wd, options), at(64, "undivided"): roomy}
        return cells | {self.RESNET_WR: 1.0, self.RESNET_WD: (resnet, options)}

    @pytest.mark.parametrize(
        ("wd", "roomy", "resnet", "scatter", "word"),
        [
            (0.5, 0.7, 0.9, 0.01, "reproduced"),
            (1.1, 0.9, 1.1, 0.01, "not reproduced"),
            (0.5, 0.4, 0.9, 0.01, "partly"),  # not over undivided with eight times as much
            (0.5, 0.7, 0.9, 0.5, "undecided"),
        ],
    )
    def test_as_much_and_less_workspace(self, wd, roomy, resnet, scatter, word):
        found, evidence = judge("figure11/wd_faster", world(self.cells(wd, roomy, resnet), scatter))
        assert found == word, evidence
        name = "torchvision's AlexNet (for Caffe's AlexNet), 120 MiB in all over"
        assert f"{name} 8 MiB for each: ×{1 / wd:.2f}" in evidence
        assert f"{name} 64 MiB for each: ×{roomy / wd:.2f}" in evidence
        assert f"ResNet-50, 2,544 MiB in all over 32 MiB for each: ×{1 / resnet:.2f}" in evidence


def of(*rows, scatter: float | None = 0.001):
    """A world of these layers, all of one network type."""

    def make(run):
        return bench(*rows, scatter=scatter) if run.config["role"] == "OCR" else bench(scatter=None)

    return make


class TestFigure8:
    @pytest.mark.parametrize(
        ("divided", "scatter", "word"),
        [
            (0.6, 0.001, "reproduced"),  # with the four of 9×9 at 1.00: a mean of 1.40
            (0.9, 0.001, "partly"),  # 1.07: the side alone
            (1.2, 0.001, "not reproduced"),
            (0.5, 1.0, "undecided"),
        ],
    )
    def test_over_all_layers(self, divided, scatter, word):
        rows = [("3×3", 1.0, divided)] * 6
        found, evidence = judge("figure8/layers_faster", of(*rows, scatter=scatter))
        assert found == word
        assert f"mean of 10 layers ×{(6 / divided + 4) / 10:.2f} [" in evidence
        assert "of torch's own speed without a limit" in evidence

    def test_half_precision_judges_where_it_ran(self):
        def make(run):
            return of(*[("3×3", 1.0, 0.6 if run.config["setting"] == "fp16" else 1.2)] * 6)(run)

        for profile, word in (("gpu", "reproduced"), ("quick", "not reproduced")):
            assert judge("figure8/layers_faster", make, profile)[0] == word

    @pytest.mark.parametrize(
        ("pseudo", "true", "word"), [(3, 1, "reproduced"), (1, 3, "not reproduced")]
    )
    def test_the_share_of_layers_without_sums_in_half(self, pseudo, true, word):
        def make(run):
            made_ = bench(*[("3×3", 1.0, 0.5)] * (pseudo + true), scatter=None)
            for row in made_["metrics"]["layers"][pseudo:]:
                row["divided"]["parts"] = [[8, "cudnn:FFT"], [8, "cudnn_half:GEMM"]]
            return made_

        assert judge("figure8/pseudo_half_most", make, "gpu")[0] == word
        frame = table("figure8", make, "gpu").set_index(["setting", "kernel"])
        told = f"{6 * pseudo} of {6 * (pseudo + true)}"  # of six network types
        assert frame.loc["fp16", "all"]["PSEUDO_HALF"] == f"{told} (paper: 65 of 94)"
        assert frame.loc["fp32", "all"]["PSEUDO_HALF"].startswith(DASH)
        assert judge("figure8/pseudo_half_most", make, "quick")[0] == "not run"

    def test_the_error_is_that_of_the_comparisons(self):
        """Each ratio has two, each with the scatter of torch's own; the same division has none."""
        rows = [("3×3", 1.0, 0.5), ("3×3", 1.0, 0.25), ("3×3", 1.0, 1.0)]
        results = made.results("figure8", of(*rows, scatter=0.1))
        gain = benchmark.measured_gain(results, measured.UNDIVIDED, "3×3")
        share = math.sqrt(2 * 2**2 + 2 * 4**2) / (2 + 4 + 1)
        assert gain.mean == pytest.approx(math.log(7 / 3))
        assert gain.error == pytest.approx(share * math.log(1.1))
