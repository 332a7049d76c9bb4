"""What dividing one convolution admits: Figures 1, 6 and 10."""

from typing import ClassVar

import made_microconv as made
import pytest
from made import check_row
from made_microconv import FAILED, alexnet, candidates, conv2, entry, figure, judge, table

from repro.experiments.microconv import layers
from repro.report import DASH


class TestSmallLimit:
    # The fast one needs 16 MiB undivided; at 0.5 MiB a sample 4, at 100 MiB a sample 800.
    EXCLUDED = entry()
    FITS = entry(fast_mib=0.5)
    NOTHING_FITS_8 = entry(slow_mib=3.0, fast_mib=4.0)
    NOTHING_FITS = entry(slow_mib=100.0, fast_mib=200.0)

    @pytest.mark.parametrize(
        ("entries", "word", "counts"),
        [
            (
                [EXCLUDED, NOTHING_FITS_8],
                "reproduced",
                "conv3 F needs more (nothing fits)",
            ),
            ([EXCLUDED, FITS, FITS], "partly", "conv3 F needs no more"),
            ([FITS, FITS], "not reproduced", "conv2 F needs no more"),
            ([NOTHING_FITS, EXCLUDED], "reproduced", "conv3 F needs more"),
            ([NOTHING_FITS], "not run", "no kernel fits into 512"),
        ],
    )
    def test_words(self, entries, word, counts):
        kernels = [one | {"layer": f"conv{n}"} for n, one in enumerate(entries, 2)]
        found, evidence = judge("figure1/fast_needs_more", lambda run: candidates(*kernels))
        assert found == word and counts in evidence

    def test_the_evidence(self):
        _, evidence = judge("figure1/fast_needs_more", lambda run: candidates(self.EXCLUDED))
        # Undivided, 8 samples: 8 ms against 4 ms and a microsecond.
        assert evidence == f"conv2 F needs more (slow fits and takes ×{8 / 4.001:.2f})"

    def test_limits_of_long(self):
        # 0.5 MiB a sample need 4 MiB: more than 2, which stand for the paper's 8, and less than 8.
        for profile, told in (("quick", "conv2 F needs no more"), ("long", "conv2 F needs more")):
            _, evidence = judge(
                "figure1/fast_needs_more", lambda run: candidates(self.FITS), profile
            )
            assert evidence.startswith(told)

    def test_not_run(self):
        assert judge("figure1/fast_needs_more", lambda run: None) == ("not run", "no records")


class TestFigure1:
    def test_the_cells(self):
        # 8 samples: slow 8 ms without workspace, fast 4.001 ms with 16 MiB; three kernels a layer.
        frame = table("figure1")
        assert list(frame["layer"]) == [f"conv{n}" for n in range(1, 6)]
        assert list(frame["kernels"]) == [2, 3, 3, 3, 3]
        second = frame.iloc[1]
        assert (second["8 MiB: workspace"], second["8 MiB: ms"]) == ("0.0", "24.0")
        assert (second["64 MiB: workspace"], second["64 MiB: ms"]) == ("48.0", "12.0")
        assert (second["torch's own: MiB"], second["torch's own: ms"]) == ("9.0", "12.0")
        assert frame.iloc[0]["torch's own: ms"] == "8.0"

    def make(self, run):
        return alexnet(conv3={"slow_mib": 4.0, "fast_mib": 10.0})

    def test_one_kernel_that_does_not_fit_is_said_of_its_layer(self):
        frame = table("figure1", self.make)
        unfit = list(frame["8 MiB: workspace"] == "does not fit")
        assert unfit == [False, False, True, False, False]
        assert frame["8 MiB: ms"][2] == DASH
        assert (frame["64 MiB: workspace"][2], frame["512 MiB: workspace"][2]) == ("96.0", "240.0")

    def test_the_figure(self):
        drawn = figure("figure1", self.make)
        memory, time = drawn.axes
        assert (memory.get_ylabel(), time.get_ylabel()) == ("MiB", "ms")
        (unfit,) = [text.get_text() for axis in drawn.axes for text in axis.texts]
        assert unfit.strip() == "does not fit"
        shown = {
            label: bars for bars, label in zip(*memory.get_legend_handles_labels(), strict=True)
        }
        assert list(dict.fromkeys(shown)) == [
            "data", "filters", *(f"best within {n} MiB" for n in (8, 64, 512))
        ]  # fmt: skip
        # Of each limit 5 layers' data and filters; then workspaces, without conv3's at 8 MiB.
        heights = [round(patch.get_height(), 3) for patch in memory.patches]
        assert heights.count(4.0) >= 15 and heights.count(0.25) == 15
        assert sorted(heights)[-2:] == [96.0, 240.0]
        (tallest,) = [patch for patch in memory.patches if patch.get_height() == 240.0]
        assert tallest.get_y() == pytest.approx(4.25)
        times = sorted(patch.get_height() for patch in time.patches)
        assert len(times) == 14 and times[-1] == pytest.approx(24.0)
        assert drawn.get_suptitle() == (
            "ours: torchvision's AlexNet, mini-batch 8, for Caffe's AlexNet, SYNTHETIC inputs"
        )

    def test_limits_shrink_with_the_mini_batch(self):
        # Planted between the two smallest limits of `long`, 2 and 16 MiB: slow 8, fast 12 MiB.
        def make(run):
            return alexnet(conv3={"slow_mib": 1.0, "fast_mib": 1.5})

        third = table("figure1", make, "long").iloc[2]
        assert third["2 MiB (paper 8): workspace"] == "does not fit"
        assert third["16 MiB (paper 64): workspace"] == "36.0"
        memory = figure("figure1", make, "long").axes[0]
        told = [text.partition("within ")[2] for text in memory.get_legend_handles_labels()[1]]
        limits = {"2 MiB (paper 8)": 2, "16 MiB (paper 64)": 16, "128 MiB (paper 512)": 128}
        assert {text for text in told if text} == set(limits)
        assert layers.limits_of(made.results("figure1", make, "long")) == limits
        for profile in ("quick", "gpu", "paper"):
            found = layers.limits_of(made.results("figure1", make, profile))
            assert found == {"8 MiB": 8, "64 MiB": 64, "512 MiB": 512}

    @pytest.mark.parametrize("fast_mib", [0.1, 0.5])
    def test_columns_that_are_all_the_same_are_said_to_be(self, fast_mib):
        # Of the 8 samples the fast one needs 0.8 MiB, or 4: more than the smallest limit of `long`.
        of = {f"conv{n}": {"fast_mib": fast_mib} for n in range(1, 6)}
        said = layers.FIGURE1.caption(made.results("figure1", lambda run: alexnet(**of), "long"))
        told = "of no kernel the fastest algorithm needs more than 2 MiB (paper 8)"
        assert (told in said) == (fast_mib == 0.1)


class TestWorkspaceAsLarge:
    @pytest.mark.parametrize(
        ("fast_mib", "word"), [(0.02, "not reproduced"), (4.0, "reproduced"), (100.0, "not run")]
    )
    def test_words(self, fast_mib, word):
        # Of 14 kernels 8 × `fast_mib` each, beside 21.25 MiB of data and filters.
        own = {"fast_mib": fast_mib} | ({"slow_mib": 1e4} if fast_mib == 100 else {})
        layers = {f"conv{n}": own for n in range(1, 6)}
        found, evidence = judge("figure1/workspace_as_large", lambda run: alexnet(**layers))
        assert found == word, evidence
        assert word == "not run" or "within 512 MiB, for 21.2 of data and filters" in evidence

    def test_records_without_the_layers_memory(self):
        def make(run):
            made_ = alexnet()
            for own in made_["metrics"]["kernels"]:
                del own["data_bytes"]
            return made_

        assert judge("figure1/workspace_as_large", make)[0] == "not run"
        assert (table("figure1", make)["data (MiB)"] == "–").all()


class TestFront:
    def row(self, of_conv2):
        def make(run):
            return candidates(of_conv2) if run.config.get("layer") else None

        return check_row("microconv/figure6", 1, made.results("figure6", make))

    def test_divided_configurations(self):
        # By hand: slow alone, then up to 1, ..., 7 fast samples at once: 8, 4, 3, 2, 2, 2, 2 calls
        # at best, of which those with as many calls as a smaller workspace has drop out; then 1.
        row = self.row(entry())
        assert row["holds"] == "yes" and row["evidence"].startswith("4 of 6 desirable divisions")
        row = self.row(entry(gain=0.5))
        assert row["holds"] == "NO" and row["evidence"].startswith("0 of 1 desirable divisions")

    def test_only_up_to_the_figures_workspace(self):
        # 100 MiB a sample: one fast sample at a time still fits into 120 MiB, two do not.
        assert self.row(entry(fast_mib=100.0))["evidence"].startswith("1 of 2")

    def test_not_run(self):
        row = check_row("microconv/figure6", 1, made.results("figure6", lambda run: None))
        assert row["holds"] == "not run"

    @pytest.mark.parametrize(("count", "holds"), [(68, "yes"), (69, "NO")])
    @pytest.mark.parametrize("place", ["conv2", "whole"])
    def test_the_size_of_fronts(self, count, holds, place):
        ways = [[f"a{k}", 1.0 / (k + 1), k * made.MIB] for k in range(count)]
        large = entry(batch=1) | {"candidates": {"1": ways}}

        def make(run):
            is_conv2 = run.config.get("layer") == "conv2"
            return candidates(large if is_conv2 == (place == "conv2") else entry())

        row = check_row("microconv/figure6", 0, made.results("figure6", make))
        assert row["holds"] == holds and f"has {count} points" in row["evidence"]


def test_fft_takes_the_papers_workspace_in_caffes_groups():
    row = check_row("microconv/figure10", 0, made.results("figure10", lambda run: None))
    assert row["holds"] == "yes"
    assert "212.5 MiB for 213 at 256" in row["evidence"] and "323" in row["evidence"]


class TestFigure6:
    def test_the_cells(self):
        # Fast samples one by one, by two, three, four, and all eight at once; each costs 2 MiB.
        frame = table("figure6", lambda run: candidates(entry()))
        assert list(frame["workspace (MiB)"]) == ["0.00", "2.00", "4.00", "6.00", "8.00", "16.00"]
        assert list(frame["time (ms)"]) == ["8.0", *["4.0"] * 5]
        divisions = ["8×1 fast", "4×2 fast", "2×3 fast + 2 fast", "2×4 fast", "8 fast"]
        assert list(frame["division"])[1:] == divisions
        assert list(frame["point"]) == [1, 2, 3, 4, 5, 6]

    def test_the_figure_marks_torchs_own(self):
        drawn = figure("figure6", lambda run: candidates(entry(native=(4e-3, 3.0))))
        labels = [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
        assert len(labels) == len(set(labels))
        assert "torch's own" in labels and "fast" in labels
        curve, bars = drawn.axes
        (own,) = [line for line in curve.get_lines() if "torch's" in line.get_label()]
        assert (own.get_xdata()[0], own.get_ydata()[0]) == pytest.approx((3.0, 4.0))
        assert (curve.get_xlabel(), curve.get_ylabel()) == ("workspace (MiB)", "time (ms)")
        assert sum(patch.get_width() for patch in bars.patches) == 6 * 8
        divided = [text.get_text().strip() for text in bars.texts]
        assert divided == ["8", "8×1", "4×2", "2×3 + 2", "2×4", "8"]
        assert drawn.get_suptitle().startswith("ours: conv2 of torchvision's AlexNet")


class TestConv2:
    """The fast algorithm needs 96 MiB undivided, by default; the slow one none."""

    BOTH: ClassVar = {"undivided_8": 1.0, "all_8": 0.9, "undivided_64": 1.0, "all_64": 0.5}

    def judge(self, key, fast_mib=3.0, **relative):
        return judge(f"figure10/{key}", lambda run: conv2(fast_mib, **relative))

    def test_an_algorithm_that_undivided_has_no_room_for(self):
        word, evidence = self.judge("admits_algorithm", **self.BOTH)
        assert word == "reproduced"
        assert evidence.endswith("takes fast; excluded undivided: fast (96.0 MiB)")

    def test_the_largest_limit_that_binds_is_judged(self):
        # 32 MiB: excluded by 8 MiB alone.
        assert self.judge("admits_algorithm", 1.0, **self.BOTH)[1].startswith("conv2 8 MiB, all:")
        assert self.judge("conv2_faster", 1.0, **self.BOTH)[1].startswith(
            "conv2, 8 MiB, all: ×1.11"
        )

    def test_the_same_algorithm_in_pieces(self):
        rows = [made.checked(64, policy, 1.0, name="slow") for policy in ("undivided", "all")]
        kernel = entry(batch=32, fast_mib=3.0)
        make = candidates(kernel, checked=rows)
        word, evidence = judge("figure10/admits_algorithm", lambda run: make)
        assert word == "not reproduced" and evidence.endswith("excluded undivided: none of them")

    def test_single_times_do_not_decide(self):
        word, evidence = self.judge("conv2_faster", **self.BOTH)
        assert word == "undecided"
        assert "×2.00 (no spread known), paper ×2.33" in evidence

    def test_the_same_division_gains_nothing_for_certain(self):
        rows = [made.checked(64, policy, 1.0) for policy in ("undivided", "all")]
        rows[1]["parts"] = rows[0]["parts"]
        make = candidates(entry(batch=32, fast_mib=3.0), checked=rows)
        assert judge("figure10/conv2_faster", lambda run: make)[0] == "not reproduced"

    @pytest.mark.parametrize(
        ("relative", "told"),
        [({"all_64": 0.5}, "nothing undivided fits"), ({"undivided_8": 1.0}, "nothing fits")],
    )
    def test_nothing_to_compare_with(self, relative, told):
        word, evidence = self.judge("conv2_faster", **relative)
        assert word == "not run" and told in evidence

    def test_where_no_limit_binds_neither_is_judged(self):
        for key in ("admits_algorithm", "conv2_faster"):
            word, evidence = self.judge(key, 0.1, **self.BOTH)
            assert word == "not run"
            assert evidence.startswith("no limit binds: the fastest undivided, 32 fast needs 3.2")


class TestFigure10:
    def test_the_cells(self):
        def make(run):
            return conv2(undivided_64=1.0, powerOfTwo_64=0.8, all_64=0.5, all_8=0.9)

        frame = table("figure10", make).set_index(["limit (MiB)", "policy"])
        assert len(frame) == 6
        row = frame.loc[64, "all"]
        assert row["division"] == "2×16 fast" and row["workspace (MiB)"] == "3.0"
        assert (row["time (ms)"], row["sum of parts (ms)"]) == ("15.0", "13.5")
        assert row["torch's own (ms)"] == "30.0"
        assert row["over undivided"] == "×2.00 (no spread known)" and row["paper"] == "2.33×"
        assert frame.loc[64, "powerOfTwo"]["over undivided"] == "×1.25 (no spread known)"
        assert frame.loc[64, "powerOfTwo"]["paper"] == "48.9 MiB, 32s"
        assert frame.loc[64, "undivided"]["paper"] == "GEMM, 4.3 KiB; FFT, 213 MiB"
        # In the quick plan `all` is not tried.
        assert frame.loc[8, "undivided"]["division"] == "does not fit"
        assert frame.loc[8, "undivided"]["time (ms)"] == DASH
        assert frame.loc[8, "all"]["over undivided"] == DASH
        assert set(frame.loc[8]["paper"]) == {DASH}

    @pytest.mark.parametrize("outcome", [None, FAILED])
    def test_what_was_not_run_is_not_said_not_to_fit(self, outcome):
        assert "does not fit" not in table("figure10", lambda run: outcome).to_string()

    def ends(self, axis):
        ends: dict[int, float] = {}
        for patch in axis.patches:
            row = round(patch.get_y() + patch.get_height() / 2)
            ends[row] = max(ends.get(row, 0.0), patch.get_x() + patch.get_width())
        return list(ends.values())

    def test_bars_are_as_long_as_the_parts(self):
        # In the plan of `smoke` all sizes are measured.
        axis = figure("figure10", lambda run: candidates(entry()), "smoke").axes[0]
        rows = [label.get_text() for label in axis.get_yticklabels()]
        policies = ("undivided", "powerOfTwo", "all")
        assert rows == [f"{limit} MiB, {policy}" for limit in (8, 64) for policy in policies]
        # Slow undivided, two calls of four, one of eight.
        expected = [8.0, 4.002, 4.002, 4.001, 4.001, 4.001]
        assert self.ends(axis) == pytest.approx(expected)
        assert "(ms)" in axis.get_xlabel()

    def test_nothing_is_drawn_of_a_policy_that_the_record_does_not_have(self):
        """Planted: a size that powerOfTwo never measures, and a run of `all`, both flattering."""
        kernel = entry()
        for ways in (kernel["candidates"]["3"], kernel["candidates"]["5"]):
            ways.append(["planted", 1e-6, 0])
        planted = made.checked(8, "all", 1e-6, name="planted")
        honest = made.checked(8, "powerOfTwo", 1.0)

        def make(run):
            assert run.config["policy"] == "powerOfTwo"
            return candidates(kernel, checked=[honest, planted])

        drawn = figure("figure10", make)
        (axis,) = drawn.axes
        rows = [label.get_text() for label in axis.get_yticklabels()]
        policies = ("undivided", "powerOfTwo")
        assert rows == [f"{limit} MiB, {policy}" for limit in (8, 64) for policy in policies]
        assert self.ends(axis) == pytest.approx([8.0, 4.002, 4.001, 4.001])
        marks = [float(line.get_xdata()[0]) for line in axis.get_lines()]
        assert marks == pytest.approx([20.0, 20.0])  # the honest run and torch's own beside it
        labels = [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
        assert "planted" not in labels
