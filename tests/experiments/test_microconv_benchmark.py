"""What dividing gains over DeepBench's layers: Figure 8."""

import math
import random

import made_microconv as made
import numpy as np
import pytest
from made_microconv import bench, judge
from matplotlib.backends.backend_agg import FigureCanvasAgg

from repro.experiments import load_paper
from repro.experiments.judge import NotRun
from repro.experiments.microconv import benchmark
from repro.experiments.microconv.benchmark import Gain
from repro.experiments.microconv.settings import Scatter
from repro.report import DASH

FIGURE8 = load_paper("microconv").artefacts["figure8"]


def of(*rows, scatter=0.001):
    """Return a world of these layers, all of one network type."""
    return lambda run: bench(*rows, scatter=scatter) if run.config["role"] == "OCR" else bench()


class TestGains:
    @pytest.mark.parametrize(
        ("divided", "scatter", "word"),
        [
            (0.5, 0.001, "reproduced"),
            (0.6, 0.001, "reproduced"),  # with the four of 9×9 at 1.00: a mean of 1.38
            (0.7, 0.001, "partly"),  # 1.27, half of the paper's 1.60 on a log scale
            (0.9, 0.001, "partly"),  # 1.07: the side alone
            (1.2, 0.001, "not reproduced"),
            (0.5, 1.0, "undecided"),
        ],
    )
    def test_over_all_layers(self, divided, scatter, word):
        rows = [("3×3", 1.0, divided)] * 6
        found, evidence = judge("figure8/layers_faster", of(*rows, scatter=scatter))
        mean = (6 / divided + 4) / 10
        assert found == word
        assert f"mean of 10 layers ×{mean:.2f} [" in evidence and "paper ×1.60" in evidence
        assert "of torch's own speed without a limit; best left undivided: 4 of them" in evidence

    def test_a_small_gain_is_not_the_papers(self):
        """1.05 where the paper has 1.60."""
        rows = [("3×3", 1.0, 1.0)] * 6 + [("3×3", 1.0, 1 / 1.5)] * 1
        word, evidence = judge("figure8/layers_faster", of(*rows))
        assert word == "partly" and "×1.05" in evidence

    def test_without_a_known_scatter_it_is_undecided(self):
        make = of(("3×3", 1.0, 0.5), scatter=None)
        word, evidence = judge("figure8/layers_faster", make)
        assert word == "undecided" and "no spread known" in evidence

    def test_by_kernel_size(self):
        def word(undivided, divided, scatter=0.001):
            rows = [("3×3", undivided, divided), ("7×7", 1.0, 0.1)]
            return judge("figure8/three_by_three", of(*rows, scatter=scatter))[0]

        assert word(1.0, 0.8) == "reproduced"
        assert word(1.0, 1.1) == "not reproduced"
        assert word(1.0, 0.9, 0.5) == "undecided"
        assert word(None, 0.8) == "not run"  # nothing undivided fits
        assert word(1.0, 1.0) == "not reproduced"  # the same division

    @pytest.mark.parametrize(("left", "word"), [(1, "reproduced"), (2, "not run")])
    def test_a_gain_over_our_own_fallback_is_told_and_not_judged(self, left, word):
        """Of three layers, those left to this package's own undivided."""

        def make(run):
            made_ = of(*[("3×3", 2.0, 1.0)] * 3)(run)
            for row in made_["metrics"]["layers"][:left] if run.config["role"] == "OCR" else ():
                row["undivided"]["parts"] = [[16, "torch:implicit"]]
            return made_

        found, evidence = judge("figure8/three_by_three", make)
        assert found == word
        fallback = f"undivided falls back to our own torch:implicit on {left} of 3 layers; "
        assert fallback + "divided is ×1.00 [" in evidence and "×2.00 [" in evidence
        row = FIGURE8.table(made.results("figure8", make)).set_index("kernel").loc["3×3"]
        assert row["undivided left to ours"] == left
        assert row["over undivided: mean"].startswith("×2.00 [")
        assert row["over torch's own: mean"].startswith("×1.00 [")

    def test_over_torch_of_today(self):
        def word(relative, scatter=0.001):
            return judge("figure8/over_torch", of(("3×3", None, relative), scatter=scatter))[0]

        assert word(0.5) == "reproduced"
        assert word(2.0) == "not reproduced"
        assert word(0.9, 0.5) == "undecided"

    def test_only_float32_is_judged(self):
        def make(run):
            fast = run.config["setting"] == "fp32"
            return bench(("3×3", 1.0, 0.5 if fast else 9.0), scatter=0.001)

        assert judge("figure8/three_by_three", make, "gpu")[0] == "reproduced"

    def test_not_run(self):
        for key in FIGURE8.exhibit.claims:
            word, told = judge(f"figure8/{key}", lambda run: None)
            assert word == "not run" and told.startswith("no ")


class TestHalf:
    @pytest.mark.parametrize(
        ("pseudo", "true", "word"),
        [(3, 1, "reproduced"), (1, 3, "not reproduced"), (0, 0, "not run")],
    )
    def test_the_share_of_layers_without_sums_in_half(self, pseudo, true, word):
        def make(run):
            made_ = made.bench(*[("3×3", 1.0, 0.5)] * (pseudo + true))
            for row in made_["metrics"]["layers"][pseudo:]:
                row["divided"]["parts"] = [[8, "cudnn:FFT"], [8, "cudnn_half:GEMM"]]
            return made_ if pseudo + true else None

        found, evidence = judge("figure8/pseudo_half_most", make, "gpu")
        assert found == word, evidence
        frame = (
            made.table("figure8", make, "gpu").set_index(["setting", "kernel"]) if pseudo else None
        )
        if frame is not None:
            told = f"{6 * pseudo} of {6 * (pseudo + true)}"  # of six network types
            assert frame.loc["fp16", "all"]["PSEUDO_HALF"] == told
            assert frame.loc["fp32", "all"]["PSEUDO_HALF"] == "–"


class TestMean:
    def test_the_error_is_what_repeats_scatter_by(self):
        generator, scatter = random.Random(3), 0.1
        true = (1.0, 1.3, 2.0)

        def measured():
            return [Gain(r * math.exp(generator.gauss(0, scatter * 2**0.5)), 2) for r in true]

        own = Scatter(scatter, 50)
        gaps = [benchmark.mean_gain([*measured(), Gain(1.0, 0)], own) for _ in range(2000)]
        deviation = float(np.std([gap.mean for gap in gaps]))
        assert np.mean([gap.error for gap in gaps]) == pytest.approx(deviation, rel=0.08)

    def test_layers_left_undivided_have_no_error(self):
        gap = benchmark.mean_gain([Gain(1.0, 0)] * 3, Scatter(0.1, 4))
        assert (gap.mean, gap.error) == (0.0, 0.0)
        with pytest.raises(NotRun, match="no layers that fit both ways"):
            benchmark.mean_gain([], Scatter(0.1, 4))


def table(make=made.plausible, profile="quick"):
    return FIGURE8.table(made.results("figure8", make, profile))


class TestFigure8:
    def test_ratios_are_of_ratios(self):
        """Torch's own beside each: undivided 1.2 of it, divided 0.6, at another speed."""
        results = made.results("figure8", lambda run: bench(("3×3", 1.2, 0.6), ("3×3", None, 0.8)))
        over_undivided = benchmark.layer_gains(results, "fp32", "undivided")
        assert over_undivided == {"3×3": [Gain(pytest.approx(2.0), 2)] * 6}
        over_torch = benchmark.layer_gains(results, "fp32", "torch")["3×3"]
        ratios = sorted(gain.ratio for gain in over_torch)
        assert ratios == pytest.approx([1 / 0.8] * 6 + [1 / 0.6] * 6)
        assert benchmark.layer_gains(results, "bf16", "torch") == {}

    def test_the_cells(self):
        rows = [("5×5", 1.0, 0.8), ("3×3", 1.0, 0.5), ("3×3", 1.0, 0.25), ("1×1", None, 2.0)]
        frame = table(of(*rows, scatter=None)).set_index("kernel")
        assert list(frame.index) == ["all", "1×1", "3×3", "5×5"]
        assert list(frame["n"]) == [3, 0, 2, 1]
        means = [f"×{(1.25 + 2 + 4) / 3:.2f}", DASH, "×3.00", "×1.25"]
        shown = [cell.removesuffix(" (no spread known)") for cell in frame["over undivided: mean"]]
        assert shown == means
        assert list(frame["least"]) == ["1.25×", DASH, "2.00×", "1.25×"]
        assert list(frame["largest"]) == ["4.00×", DASH, "4.00×", "1.25×"]
        assert list(frame["n, torch"]) == [4, 1, 2, 1]
        assert frame["largest, torch"]["1×1"] == "0.50×"
        assert frame["paper, V100 half"]["all"] == "1.60×, up to 4.54×"
        assert frame["paper, V100 half"]["3×3"] == "1.73×"

    def test_kernel_sizes_by_area(self):
        def make(run):
            sizes = ("20×5", "10×5", "7×7", "1×1", "3×3", "5×5")
            return bench(*((size, 1.0, 0.5) for size in sizes))

        expected = ["1×1", "3×3", "5×5", "7×7", "10×5", "20×5"]
        assert list(table(make)["kernel"]) == ["all", *expected]
        drawn = FIGURE8.figure(made.results("figure8", make))
        names = [label.get_text().split(" ")[0] for label in drawn.axes[0].get_yticklabels()]
        assert names == ["all", *expected]

    def test_a_gpus_two_settings(self):
        found = table(profile="gpu")["setting"]
        assert list(dict.fromkeys(found)) == ["fp32", "fp16"]

    def test_a_range_is_from_the_least_to_the_largest(self):
        rows = [("3×3", 6.0, 6.0 / r) for r in (1.0, 2.0, 6.0)]
        drawn = FIGURE8.figure(made.results("figure8", of(*rows, scatter=None)))
        FigureCanvasAgg(drawn).draw()
        axis = drawn.axes[0]
        names = [label.get_text() for label in axis.get_yticklabels()]
        assert [name.split(" ")[0] for name in names] == ["all", "3×3"]
        ends = [list(line.get_xdata()) for line in axis.get_lines() if "least" in line.get_label()]
        assert ends == [pytest.approx([1.0, 6.0])] * 2
        dots = [line.get_xdata()[0] for line in axis.get_lines() if line.get_label() == "ours"]
        assert dots == pytest.approx([3.0, 3.0])
        # The paper's, of all layers and of 3×3, all in half precision.
        assert sorted(made.hollow_of(drawn)) == [1.16, 1.60, 1.73]
        assert drawn.get_suptitle().startswith("ours: ")
