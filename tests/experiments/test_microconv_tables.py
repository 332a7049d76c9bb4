"""μ-cuDNN's tables, figures and captions: the values, what is missing, what is said aloud."""

import inspect
import itertools
from typing import ClassVar

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from invented import make_record
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from test_microconv_checks import (
    FAILED,
    MIB,
    OUT_OF_MEMORY,
    PAPER,
    alexnet,
    bench,
    candidates,
    cluster,
    conv2,
    entry,
    fastest_split,
    made_results,
    network,
    plausible,
)

from repro import report
from repro.experiments.design import Results
from repro.experiments.microconv import drawings, layers, networks, reading

DASH = report.DASH
FIGURES = [name for name, artefact in PAPER.artefacts.items() if artefact.figure is not None]


def table(artefact, make=plausible, profile="quick") -> pd.DataFrame:
    return PAPER.artefacts[artefact].table(made_results(artefact, make, profile))


def figure(artefact, make=plausible, profile="quick") -> Figure:
    return PAPER.artefacts[artefact].figure(made_results(artefact, make, profile))


def caption(artefact, make=plausible, profile="quick") -> str:
    return PAPER.artefacts[artefact].caption(made_results(artefact, make, profile))


def texts_of(drawn: Figure) -> list[str]:
    return [text.get_text() for axis in drawn.axes for text in axis.texts]


def nowhere(run):
    """Return outcomes of kernels of which none fits."""
    if run.experiment == "network":
        return network(None)
    if run.experiment == "deepbench":
        return bench(("3×3", None, None))
    if run.experiment == "candidates":
        huge = {"slow_mib": 1e4, "fast_mib": 2e4}
        if run.config.get("layer"):
            return candidates(entry(**huge))
        return alexnet(**{f"conv{n}": huge for n in range(1, 6)})
    return plausible(run)


class TestEveryArtefact:
    MAKERS: ClassVar = {
        "plausible": plausible,
        "nothing": lambda run: None,
        "all failed": lambda run: FAILED,
        "all out of memory": lambda run: OUT_OF_MEMORY,
        "nothing fits": nowhere,
        "divided alone": lambda run: (
            None if run.config.get("policy") == "undivided" else plausible(run)
        ),
        "undivided alone": lambda run: (
            plausible(run) if run.config.get("policy") == "undivided" else None
        ),
    }

    @pytest.mark.parametrize("kind", MAKERS)
    @pytest.mark.parametrize("profile", ["smoke", "quick", "gpu", "paper"])
    def test_table_and_caption_of_whatever_there_is(self, kind, profile):
        for artefact in PAPER.artefacts.values():
            results = made_results(artefact.name, self.MAKERS[kind], profile)
            frame = artefact.table(results)
            assert len(set(frame.columns)) == len(frame.columns)
            assert "nan" not in frame.to_string().lower(), artefact.name
            assert "None" not in frame.to_string(), artefact.name
            assert report.to_html(frame) and report.to_rich(frame, artefact.title)
            assert artefact.caption(results)

    @pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "all out of memory"])
    @pytest.mark.parametrize("artefact", FIGURES)
    def test_figures_of_whatever_there_is(self, kind, artefact):
        drawn = figure(artefact, self.MAKERS[kind])
        assert isinstance(drawn, Figure)
        if kind in ("plausible", "nothing fits"):
            FigureCanvasAgg(drawn).draw()  # a missing glyph or a layout that does not fit warns
        assert plt.get_fignums() == []

    @pytest.mark.parametrize("artefact", ["figure8", "figure9", "figure11"])
    def test_figures_of_a_gpus_settings(self, artefact):
        assert isinstance(figure(artefact, profile="gpu"), Figure)

    def test_every_comparison_has_the_papers_column(self):
        drawn_only = {"figure1", "figure6", "figure12"}  # whose bars have no numbers
        for name in PAPER.artefacts:
            columns = [str(column) for column in table(name).columns]
            assert any("paper" in column for column in columns) == (name not in drawn_only), name

    def test_numbers_of_times_and_memory_have_units(self):
        for name in PAPER.artefacts:
            for column in map(str, table(name).columns):
                if any(word in column for word in ("time (", "slowest", "even split", "tune()")):
                    assert "(ms)" in column, column


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

    def test_one_kernel_that_does_not_fit_is_said_of_its_layer(self):
        frame = table("figure1", lambda run: alexnet(conv3={"slow_mib": 4.0, "fast_mib": 10.0}))
        assert list(frame["8 MiB: workspace"] == "does not fit") == [
            False,
            False,
            True,
            False,
            False,
        ]
        assert frame["8 MiB: ms"][2] == DASH
        assert (frame["64 MiB: workspace"][2], frame["512 MiB: workspace"][2]) == ("96.0", "240.0")

    def test_the_figure(self):
        drawn = figure("figure1", lambda run: alexnet(conv3={"slow_mib": 4.0, "fast_mib": 10.0}))
        panels = [axis for axis in drawn.axes if axis.get_title()]
        assert [axis.get_title() for axis in panels] == [f"limit {n} MiB" for n in (8, 64, 512)]
        assert [len(axis.texts) for axis in panels] == [1, 0, 0]
        assert "fit" in panels[0].texts[0].get_text()
        heights = [patch.get_height() for patch in panels[1].patches]
        assert heights == pytest.approx([32.0, 48.0, 96.0, 48.0, 48.0])
        labels = {axis.get_ylabel() for axis in drawn.axes}
        assert labels == {"workspace (MiB)", "time (ms)", ""}


class TestFigure6:
    def test_the_cells(self):
        # Fast samples one by one, by two, three, four, and all eight at once; each costs 2 MiB.
        kernel = entry()
        frame = table("figure6", lambda run: candidates(kernel))
        assert list(frame["workspace (MiB)"]) == ["0.00", "2.00", "4.00", "6.00", "8.00", "16.00"]
        assert list(frame["time (ms)"]) == ["8.0", *["4.0"] * 5]
        assert list(frame["division"])[1:] == [
            "8×1 fast", "4×2 fast", "2×3 fast + 2 fast", "2×4 fast", "8 fast",
        ]  # fmt: skip
        assert list(frame["point"]) == [1, 2, 3, 4, 5, 6]

    def test_the_figure_marks_torchs_own(self):
        drawn = figure("figure6", lambda run: candidates(entry(native=(4e-3, 3.0))))
        labels = [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
        assert "torch's own convolution" in labels and "fast" in labels
        curve = drawn.axes[0]
        (own,) = [line for line in curve.get_lines() if "torch's" in line.get_label()]
        assert (own.get_xdata()[0], own.get_ydata()[0]) == pytest.approx((3.0, 4.0))
        assert (curve.get_xlabel(), curve.get_ylabel()) == ("workspace (MiB)", "time (ms)")


class TestFigure8:
    def test_ratios_are_of_ratios(self):
        """Torch's own beside each: undivided 1.2 of it, divided 0.6, at another speed."""
        results = made_results("figure8", lambda run: bench(("3×3", 1.2, 0.6), ("3×3", None, 0.8)))
        assert layers.layer_ratios(results, "fp32", "undivided") == {
            "3×3": pytest.approx([2.0] * 6)
        }
        ratios = layers.layer_ratios(results, "fp32", "torch")["3×3"]
        assert sorted(ratios) == pytest.approx([1 / 0.8] * 6 + [1 / 0.6] * 6)
        assert layers.layer_ratios(results, "bf16", "torch") == {}

    def test_the_cells(self):
        def make(run):
            rows = [("5×5", 1.0, 0.8), ("3×3", 1.0, 0.5), ("3×3", 1.0, 0.25), ("1×1", None, 2.0)]
            return bench(*rows) if run.config["role"] == "OCR" else None

        frame = table("figure8", make).set_index("kernel")
        assert list(frame.index) == ["all", "1×1", "3×3", "5×5"]
        assert list(frame["n"]) == [3, 0, 2, 1]
        means = [(1.25 + 2 + 4) / 3, None, 3.0, 1.25]
        assert list(frame["over undivided: mean"]) == [
            DASH if value is None else f"{value:.2f}×" for value in means
        ]
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
        assert list(table("figure8", make)["kernel"]) == ["all", *expected]
        drawn = figure("figure8", make)
        names = [label.get_text().split("\n")[0] for label in drawn.axes[0].get_xticklabels()]
        assert names == expected

    def test_a_gpus_three_settings(self):
        assert list(dict.fromkeys(table("figure8", profile="gpu")["setting"])) == [
            "fp32",
            "tf32",
            "bf16",
        ]


class TestFigure9:
    def make(self, run):
        cell = run.config["limit_mib"], run.config["policy"]
        if cell == (64, "powerOfTwo"):
            return None
        if cell == (8, "undivided"):
            return network(1.0, unfit=["conv2 F", "conv2 BF"])
        divided = run.config["policy"] != "undivided"
        # Slower spells of the machine while divided: only the ratio to torch's own counts.
        return network(0.5 if divided else 1.25, 2.0, 0.03 if divided else 0.01)

    def test_the_cells(self):
        frame = table("figure9", self.make).set_index(["limit (MiB)", "policy"])
        assert len(frame) == 9
        row = frame.loc[64, "all"]
        assert row["convolutions within the limit (ms)"] == "60.0"  # 4 kernels of 15 ms
        assert row["torch's own (ms)"] == "120.0"
        assert row["over undivided"] == "2.50×"
        assert row["workspace in all (MiB)"] == "8.0"
        assert row["tune(): iteration (ms)"] == "500.0" and row["untuned (ms)"] == "600.0"
        assert row["faster"] == "1.20×" and row["n"] == "3"
        assert row["paper, P100"] == "1.63×"
        assert set(frame["paper, P100"]) == {DASH, "1.63×"}
        assert set(frame.loc[64, "powerOfTwo"][4:]) == {DASH}
        unfit = frame.loc[8, "undivided"]
        assert unfit["convolutions within the limit (ms)"] == "does not fit: 2 kernels"
        assert unfit["torch's own (ms)"] == unfit["over undivided"] == DASH
        assert unfit["tune(): iteration (ms)"] == "500.0"  # which does not hold torch to the limit
        assert frame.loc[8, "all"]["over undivided"] == DASH
        assert frame.loc[64, "undivided"]["over undivided"] == "1.00×"

    def test_layers_are_sums_over_kernels(self):
        drawn = figure("figure9", self.make)
        assert [axis.get_title()[:10] for axis in drawn.axes] == [
            "limit 8 Mi",
            "limit 64 M",
            "limit 512 ",
        ]
        heights = [patch.get_height() for patch in drawn.axes[2].patches]
        # Undivided, powerOfTwo, all: conv1 and conv2, two kernels each.
        assert heights == pytest.approx([25.0, 25.0, 30.0, 30.0, 30.0, 30.0])
        assert drawn.axes[0].get_ylabel() == "convolutions (ms)"
        assert "does\nnot fit" in texts_of(drawn)

    def test_a_run_that_is_missing_is_not_one_that_does_not_fit(self):
        def make(run):
            return network() if run.config["limit_mib"] != 64 else None

        assert not any("fit" in text for text in texts_of(figure("figure9", make)))


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
        assert row["over undivided"] == "2.00×" and row["paper"] == "2.33×"
        assert frame.loc[64, "powerOfTwo"]["over undivided"] == "1.25×"
        assert frame.loc[64, "powerOfTwo"]["paper"] == "48.9 MiB, 32s"
        assert frame.loc[64, "undivided"]["paper"] == "4.3 KiB"
        assert frame.loc[8, "undivided"]["division"] == "does not fit"
        assert frame.loc[8, "undivided"]["time (ms)"] == DASH
        assert frame.loc[8, "all"]["over undivided"] == DASH
        assert set(frame.loc[8]["paper"]) == {DASH}

    @pytest.mark.parametrize("outcome", [None, FAILED])
    def test_what_was_not_run_is_not_said_not_to_fit(self, outcome):
        frame = table("figure10", lambda run: outcome)
        assert "does not fit" not in frame.to_string()

    def test_bars_are_as_long_as_the_parts(self):
        kernel = entry()
        drawn = figure("figure10", lambda run: candidates(kernel))
        axis = drawn.axes[0]
        rows = [label.get_text() for label in axis.get_yticklabels()]
        assert rows == [
            f"{policy}, {limit} MiB"
            for limit in (8, 64)
            for policy in ("undivided", "powerOfTwo", "all")
        ]
        ends = dict.fromkeys(range(len(rows)), 0.0)
        for patch in axis.patches:
            row = round(patch.get_y() + patch.get_height() / 2)
            ends[row] = max(ends[row], patch.get_x() + patch.get_width())
        # Slow undivided, two calls of four, one of eight.
        expected = [8.0, 4.002, 4.002, 4.001, 4.001, 4.001]
        assert list(ends.values()) == pytest.approx(expected)
        assert "(ms)" in axis.get_xlabel()


class TestFigure11:
    def test_the_cells(self):
        def make(run):
            c = run.config
            relative = {"undivided": 1.0, "powerOfTwo": 0.8, "all": 0.5}[c["policy"]]
            if c["mode"] == "WD":
                return network(relative * 0.9, variables=31)
            return network(relative)

        frame = table("figure11", make)
        assert len(frame) == len(PAPER.artefacts["figure11"].runs("quick", {}))
        cells = frame.set_index(["network", "limit (MiB)", "policy"])
        assert list(cells["paper, P100"]).count("1.38×") == 1
        row = cells.loc["AlexNet", "120 in all", "all"]
        assert row["paper, P100"] == "1.38×" and row["mode"] == "WD"
        assert row["over undivided"] == f"{1 / 0.45:.2f}×"
        assert (row["variables"], row["solved (ms)"]) == (31, "2.0")
        assert cells.loc["AlexNet", "8 each", "undivided"]["variables"] == DASH
        limits = set(frame[frame["mode"] == "WD"]["limit (MiB)"])
        totals = ("120", "960", "1,272", "2,544")
        assert limits == {f"{total} in all" for total in totals}
        assert cells.loc["ResNet-50", "1,272 in all", "powerOfTwo"]["over undivided"] == (
            f"{1 / 0.72:.2f}×"
        )

    def test_adjoined_rows_have_the_same_workspace(self):
        frame = table("figure11")
        for role, kernels in (("AlexNet", 15), ("ResNet-50", 159)):
            rows = frame[frame["network"] == role]
            for wr, wd in itertools.pairwise(rows.to_dict("records")):
                if (wr["mode"], wd["mode"]) == ("WR", "WD") and wr["policy"] == wd["policy"]:
                    each, whole = (
                        int(r["limit (MiB)"].split()[0].replace(",", "")) for r in (wr, wd)
                    )
                    assert whole == kernels * each

    def test_undivided_at_another_limit_is_no_baseline(self):
        def make(run):
            cell = run.config["role"], run.config["limit_mib"], run.config["policy"]
            if cell in (("AlexNet", 64, "undivided"), ("AlexNet", 960, "undivided")):
                return None
            return network(1.0 if run.config["limit_mib"] == 8 else 0.5)

        frame = table("figure11", make)
        rows = frame[frame["limit (MiB)"].isin(["64 each", "960 in all"])]
        assert len(rows) >= 3
        assert set(rows["over undivided"]) == {DASH}

    def test_2544_mib_are_not_compared_with_8_mib_each(self):
        """The paper's comparison is with 32 MiB each; nothing was run with 16 each."""

        def make(run):
            return network({8: 3.0, 32: 1.0}.get(run.config["limit_mib"], 0.8))

        frame = table("figure11", make)
        (row,) = frame[frame["limit (MiB)"] == "2,544 in all"].to_dict("records")
        assert row["over undivided"] in (DASH, "1.25×")

    def test_the_figure_has_alexnets_bars(self):
        drawn = figure("figure11")
        assert [axis.get_title() for axis in drawn.axes] == [
            "8 MiB each, 120 MiB in all",
            "64 MiB each, 960 MiB in all",
            "512 MiB each, 7,680 MiB in all",
        ]
        names = [label.get_text() for label in drawn.axes[0].get_xticklabels()]
        assert names == ["WR undivided", "WD undivided", "WR powerOfTwo", "WR all", "WD all"]

    def test_wd_total(self):
        assert [networks.wd_total("AlexNet", limit) for limit in (8, 64)] == [120, 960]
        assert [networks.wd_total("ResNet-50", limit) for limit in (16, 32)] == [2544, 5088]


class TestFigure12:
    def test_the_cells(self):
        frame = table("figure12").set_index("kernel")
        assert len(frame) == 14 and "conv1 BD" not in frame.index
        row = frame.loc["conv2 BF"]
        assert row["workspace (MiB)"] == "16.0" and row["share of the limit"] == "13.3 %"
        assert (row["time (ms)"], row["torch's own (ms)"]) == ("4.0", "4.0")
        assert row["division"] == "8 fast" and row["torch's own (MiB)"] == "3.0"
        assert frame.loc["conv5 F"]["workspace (MiB)"] == "0.0"

    def test_the_figure_stacks_what_wr_and_wd_take(self):
        drawn = figure("figure12")
        axis = drawn.axes[0]
        names = [label.get_text() for label in axis.get_xticklabels()]
        assert names == ["WR, 8 MiB each", "WD, 120 MiB in all"]
        # Of conv2 and conv3 only: two calls of four samples within 8 MiB; all eight at once.
        assert texts_of(drawn) == ["48", "96"]
        (line,) = axis.get_lines()
        assert set(line.get_ydata()) == {120}

    @pytest.mark.parametrize("outcome", [None, FAILED])
    def test_what_was_not_run_is_not_said_not_to_fit(self, outcome):
        drawn = figure("figure12", lambda run: outcome)
        assert not any("fit" in text for text in texts_of(drawn))


class TestFigure13:
    def fast(self, b):
        return 0.010 + 1e-3 * b

    def slow(self, b):
        return 0.005 + 3e-3 * b

    def test_every_split_is_the_best_by_trying_all(self):
        frame = table("figure13", lambda run: cluster(self.fast, self.slow))
        sizes = (1, 2, *range(4, 33, 4))
        fast, slow = ({b: device(b) for b in sizes} for device in (self.fast, self.slow))
        base = fast[32]
        for row, devices in zip(
            frame.to_dict("records"),
            ([fast], [slow], [fast, slow], [fast, fast, slow]),
            strict=False,
        ):
            best = fastest_split(32, devices)
            assert row["slowest (ms)"] == f"{1e3 * best:,.1f}"
            assert row["over the best one"] == f"{base / best:.2f}×"
            shares = [int(part.split(": ")[1]) for part in row["batch sizes"].split(", ")]
            assert sum(shares) == 32
        together, three = frame.iloc[2], frame.iloc[3]
        assert together["even split (ms)"] == f"{1e3 * slow[16]:.1f}"
        ratio = slow[16] / fastest_split(32, [fast, slow])
        assert together["even is slower by"] == f"{ratio:.2f}×"
        assert three["even split (ms)"] == three["even is slower by"] == DASH  # 32 / 3 is no size
        assert three["paper"] == "2.12×" and together["paper"] == DASH
        assert "CPU, 2 threads" in three["devices"] and "CPU, 1 thread" in together["devices"]

    def test_the_papers_own_row_is_there_without_records(self):
        (row,) = table("figure13", lambda run: None).to_dict("records")
        assert "750Ti" in row["devices"] and row["even split (ms)"] == "168.4"
        best = fastest_split(
            32, [{b: t * b / 16 for b in range(4, 33, 4)} for t in (168.43, 83.03)]
        )
        assert row["slowest (ms)"] == f"{best:.1f}"

    def test_the_figure_marks_the_slowest(self):
        drawn = figure("figure13", lambda run: cluster(self.fast, self.slow))
        axis = drawn.axes[0]
        slowest = [line.get_ydata()[0] for line in axis.get_lines()]
        assert slowest[0] == pytest.approx(1e3 * self.fast(32))
        assert slowest[1] == pytest.approx(1e3 * self.slow(32))
        assert axis.get_ylabel().endswith("(ms)") and "batch sizes" in axis.get_xlabel()
        labels = [label.get_text() for label in axis.get_xticklabels()]
        assert labels[2:5] == ["fast + slow", "fast + slow,\neven", "2 fast + slow"]


class TestTable5:
    def test_the_cells(self):
        frame = table("table5").set_index(["network", "policy"])
        assert len(frame) == 9
        assert frame.loc["AlexNet", "powerOfTwo"]["paper (ms)"] == "186.0 (1.23×)"
        assert frame.loc["ResNet-50", "all"]["paper (ms)"] == "302.0 (1.05×)"
        assert frame.loc["DenseNet-40", "undivided"]["paper (ms)"] == "639.0 (1.00×)"
        assert frame.loc["AlexNet", "all"]["over undivided"] == "2.00×"
        assert set(frame.loc["ResNet-50", "all"][2:]) == {DASH}  # not in the quick plan

    def test_a_gpus_settings_each_have_their_own_baseline(self):
        def make(run):
            undivided = run.config["policy"] == "undivided"
            slow = {"fp32": 2.0, "tf32": 3.0, "bf16": 4.0}[run.config["setting"]]
            return network(slow if undivided else 1.0)

        frame = table("table5", make, "gpu")
        assert len(frame) == 27
        rows = frame[frame["policy"] == "powerOfTwo"]
        assert list(rows["over undivided"]) == ["2.00×", "3.00×", "4.00×"] * 3


class TestOptimisation:
    def test_the_cells(self):
        frame = table("optimisation").set_index("what")
        assert list(frame["paper"]) == ["3.82 s", "34.16 s", "5.46 ms", "716 ms", DASH]
        row = frame.loc["AlexNet, policy all: measure and divide"]
        assert (row["ours"], row["of which dividing (ms)"]) == ("2.50 s", "500.0")
        assert row["times measured"] == 34
        row = frame.loc["WD, 562 variables (made-up fronts)"]
        assert (row["ours"], row["times measured"]) == ("100.0 ms", 3)  # a median

    def test_without_records_the_papers_numbers_stand(self):
        frame = table("optimisation", lambda run: None)
        assert list(frame["paper"])[:2] == ["3.82 s", "34.16 s"]
        assert set(frame["ours"]) == {DASH}


class TestReading:
    def test_speedup(self):
        def record(**options):
            return make_record("network", **network(**options))

        slower, faster = record(relative=1.5, native_s=0.3), record(relative=0.5, native_s=0.01)
        assert reading.speedup(slower, faster) == pytest.approx(3.0)
        assert reading.speedup(None, faster) is None and reading.speedup(slower, None) is None
        unfit = record(unfit=["conv2 F"])
        assert reading.speedup(unfit, faster) is None and reading.held_s(unfit) is None
        assert reading.unfit(unfit) == ["conv2 F"] and reading.unfit(slower) == []
        assert reading.held_s(slower) == pytest.approx(4 * 0.45)
        assert reading.held_native_s(slower) == pytest.approx(1.2)
        assert reading.workspace_bytes(slower) == 4 * MIB

    def test_the_whole_network_with_the_most_sizes(self):
        results = made_results("figure6", plausible)
        found = reading.best_candidates(results, "AlexNet")
        assert "layer" not in found.config and found.config["policy"] == "all"
        results = made_results("optimisation", lambda run: (
            plausible(run) if run.config.get("policy") == "powerOfTwo" else FAILED
        ))  # fmt: skip
        assert reading.best_candidates(results, "AlexNet").config["policy"] == "powerOfTwo"
        assert reading.best_candidates(results, "ResNet-50") is None
        assert reading.best_candidates(results, "AlexNet", "bf16") is None

    @pytest.mark.parametrize(("policy", "sizes"), [
        ("all", range(1, 13)), ("powerOfTwo", (1, 2, 4, 8, 12)), ("undivided", (12,)),
    ])  # fmt: skip
    def test_candidates_of_a_policy(self, policy, sizes):
        assert list(reading.candidates(entry(batch=12), policy)) == list(sizes)

    def test_where_nothing_fits(self):
        kernel = entry(slow_mib=1.0)
        assert reading.divide(kernel, 0.5) is None and reading.front(kernel, 0.5) == []
        assert reading.divide(kernel, 1.0).parts == [(1, "slow")] * 8
        assert reading.share_out([kernel, kernel], 1.9) is None
        assert len(reading.share_out([kernel, kernel], 2.0)) == 2

    def test_words(self):
        assert reading.ms(1.23456) == "1,234.6" and reading.ms(None) == DASH
        assert reading.mib(3 * MIB / 2) == "1.5" and reading.mib(None) == DASH
        assert reading.times(2.345) in ("2.34×", "2.35×") and reading.times(None) == DASH
        assert reading.parts_text([[8, "a"], [8, "a"], [3, "b"]]) == "2×8 a + 3 b"
        assert [reading.label({"layer": "conv2", "kind": kind}) for kind in reading.KINDS] == [
            "conv2 F", "conv2 BD", "conv2 BF",
        ]  # fmt: skip


class TestCaptions:
    def test_nothing_run(self):
        for name in PAPER.artefacts:
            said = caption(name, lambda run: None)
            assert said.endswith("Not run yet.") and "Measured on" not in said

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_the_device_and_the_papers(self, artefact):
        assert "Measured on a CPU" in caption(artefact)
        assert "the paper's on P100-SXM2" in caption(artefact)

    def test_threads_are_part_of_the_device(self):
        assert "Measured on a CPU with 2 threads, the paper's" in caption("figure9")
        assert "Measured on a CPU with 1 thread, the paper's" in caption("figure9", profile="smoke")
        gpu = {"type": "cuda", "name": "NVIDIA X", "slug": "x", "memory_bytes": 1}
        said = caption("figure9", lambda run: plausible(run) | {"device": gpu}, "gpu")
        assert "Measured on NVIDIA X, the paper's" in said and "Freed memory" not in said

    @pytest.mark.parametrize("outcome", [FAILED, OUT_OF_MEMORY])
    def test_where_nothing_worked_no_device_is_made_up(self, outcome):
        for name in PAPER.artefacts:
            assert "Measured on ," not in caption(name, lambda run: outcome)

    def test_synthetic_and_simulated(self):
        for name in ("figure1", "figure6", "figure8", "figure9", "figure10", "figure11",
                     "figure12", "table5"):  # fmt: skip
            assert "Inputs and weights are SYNTHETIC" in caption(name), name
        assert "programmes are SYNTHETIC" in caption("optimisation")
        assert "SIMULATED" in caption("figure13")
        for name in PAPER.artefacts:
            assert ("SIMULATED" in caption(name)) == (name == "figure13")

    def test_synthetic_is_said_of_simulated_and_solved_ones_without_records_too(self):
        assert "SIMULATED" in caption("figure13", lambda run: None)
        assert "SYNTHETIC" in caption("optimisation", lambda run: None)

    def test_the_models_beside_the_papers(self):
        said = caption("table5", profile="smoke")
        assert "AlexNet is resnet_cifar (depth 8, width 4) with 16×16 pixels" in said
        assert "DenseNet-40 is densenet40 (growth 2) with 8×8 pixels at a mini-batch of 2" in said
        said = caption("table5")
        assert "AlexNet is torchvision/alexnet with 224×224 pixels at a mini-batch of 16" in said
        assert said.count("AlexNet is ") == 1

    def test_layers_that_are_left_out(self):
        said = caption("figure8")  # three layers of each network type, and three left out
        assert "18 layers at 4 times their batch size; 18 others are left out" in said
        assert "at 1 times" in caption("figure8", profile="smoke")

    def test_layers_are_counted_once_whatever_the_settings(self):
        assert " 18 layers at 4 times" in caption("figure8", profile="gpu")

    def test_missing_failed_and_stale(self):
        def make(run):
            return {8: None, 64: FAILED}.get(run.config["limit_mib"], plausible(run))

        said = caption("figure9", make)
        assert "3 of 9 runs are missing." in said and "3 runs FAILED." in said
        for word in ("missing", "FAILED", "STALE"):
            assert word not in caption("figure9")
        fresh = made_results("figure9", plausible)
        runs = PAPER.artefacts["figure9"].runs("quick", {})
        stale = Results(runs, (0,), fresh.records, is_current=lambda record: False)
        assert "9 records are STALE" in PAPER.artefacts["figure9"].caption(stale)

    def test_what_is_held_to_the_limit_and_what_is_not(self):
        for name in ("figure9", "figure11", "table5"):
            assert "does not hold torch to the limit" in caption(name)
        for name in ("figure13", "optimisation"):
            assert "Held to the limit" not in caption(name)

    def test_algorithms(self):
        assert "Divisions are made of torch:native, nnpack." in caption("figure9")
        assert "Divisions are made of torch, cudnn." in caption("figure8", profile="gpu")


PARTS = [(8, "fast"), (4, "fast"), (4, "slow")]
NAN = float("nan")

# A figure of each function, an empty one, and how many labels its legend has.
DRAWINGS = {
    "workspace_and_time": (
        lambda: drawings.workspace_and_time(
            ["conv1", "conv2"], {"8 MiB": ([1.0, NAN], [2.0, NAN]), "64 MiB": ([3, 4], [1, 1])}
        ),
        lambda: drawings.workspace_and_time([], {"8 MiB": ([], [])}),
        2,
    ),
    "front": (
        lambda: drawings.front([(0.0, 9.0, [(16, "slow")]), (4.0, 5.0, PARTS)], (2.0, 6.0), 5.0, 1),
        lambda: drawings.front([]),
        6,
    ),
    "timeline": (
        lambda: drawings.timeline(
            [("all", [(8, "fast", 2.0), (8, "slow", 3.0)]), ("undivided", [(16, "slow", 6.0)])]
        ),
        lambda: drawings.timeline([]),
        2,
    ),
    "stacked": (
        lambda: drawings.stacked(
            {"8 MiB": {"u": {}, "a": {"conv1": 1.0, "conv2": 2.0}}, "64": {"u": {"conv1": 2.0}}},
            "time (ms)",
            {"8 MiB": {"limit": 2.5}},
        ),
        lambda: drawings.stacked({"8 MiB": {}}, "time (ms)"),
        3,
    ),
    "ranges": (
        lambda: drawings.ranges({"over undivided": {"1×1": [], "3×3": [1.0, 2.0]}}, "speed-up (×)"),
        lambda: drawings.ranges({"over undivided": {}}, "speed-up (×)"),
        2,
    ),
    "cluster": (
        lambda: drawings.cluster(
            [("fast", {"fast": (32, 9.0)}), ("both", {"fast": (24, 7.0), "slow": (8, 6.0)})]
        ),
        lambda: drawings.cluster([]),
        3,
    ),
}  # fmt: skip


class TestDrawings:
    def test_every_function_is_tested_here(self):
        public = {
            name
            for name, function in inspect.getmembers(drawings, inspect.isfunction)
            if function.__module__ == drawings.__name__ and not name.startswith("_")
        }
        assert public == set(DRAWINGS)

    @pytest.mark.parametrize("name", DRAWINGS)
    @pytest.mark.parametrize("which", [0, 1])
    def test_drawn_without_a_warning_and_none_left_open(self, name, which):
        drawn = DRAWINGS[name][which]()
        assert isinstance(drawn, Figure)
        FigureCanvasAgg(drawn).draw()
        assert plt.get_fignums() == []

    @pytest.mark.parametrize("name", DRAWINGS)
    def test_axes_are_labelled_with_units(self, name):
        drawn = DRAWINGS[name][0]()
        first = drawn.axes[0]
        words = [t.get_text().strip("−-0123456789.,") for t in first.get_xticklabels()]
        assert first.get_xlabel() or any(words)
        words = [t.get_text().strip("−-0123456789.,") for t in first.get_yticklabels()]
        assert first.get_ylabel() or any(words)
        for axis in drawn.axes:
            for label in (axis.get_xlabel(), axis.get_ylabel()):
                if any(word in label for word in ("time", "pass", "workspace", "speed")):
                    assert "(" in label, label

    @pytest.mark.parametrize("name", DRAWINGS)
    def test_the_legend_names_everything_once(self, name):
        drawn = DRAWINGS[name][0]()
        assert all(axis.get_legend() is None for axis in drawn.axes)
        texts = [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
        assert len(texts) == len(set(texts)) == DRAWINGS[name][2]

    def test_the_style_of_others_is_left_alone(self):
        before = dict(plt.rcParams)
        for make, empty, _ in DRAWINGS.values():
            make(), empty()
        assert dict(plt.rcParams) == before

    def test_a_front_shows_the_limit_and_the_choice(self):
        drawn = DRAWINGS["front"][0]()
        curve, bars = drawn.axes
        (limit,) = [line for line in curve.get_lines() if line.get_label() == "limit"]
        assert set(limit.get_xdata()) == {5.0}
        (chosen,) = [line for line in curve.get_lines() if line.get_label() == "chosen"]
        assert (chosen.get_xdata()[0], chosen.get_ydata()[0]) == (4.0, 5.0)
        weights = [label.get_fontweight() for label in bars.get_yticklabels()]
        assert weights[1] == "bold" != weights[0]
        widths = [patch.get_width() for patch in bars.patches]
        assert widths == [16, 8, 4, 4]
        assert {text.get_text() for text in bars.texts} == {"16", "8", "4"}

    def test_stacked_bars_add_up(self):
        drawn = DRAWINGS["stacked"][0]()
        tops = [patch.get_y() + patch.get_height() for patch in drawn.axes[0].patches]
        assert max(tops) == 3.0
        texts = [[text.get_text() for text in axis.texts] for axis in drawn.axes]
        assert texts == [["does\nnot fit", "3"], ["2"]]
        (line,) = drawn.axes[0].get_lines()
        assert set(line.get_ydata()) == {2.5}

    def test_a_range_is_from_the_least_to_the_largest(self):
        drawn = drawings.ranges({"x": {"3×3": [1.0, 2.0, 6.0]}}, "speed-up (×)")
        axis = drawn.axes[0]
        assert [text.get_text() for text in axis.texts] == ["3.00"]
        assert [label.get_text() for label in axis.get_xticklabels()] == ["3×3\nn = 3"]
        (bars,) = axis.collections
        ends = np.concatenate(bars.get_segments())[:, 1]
        assert (ends.min(), ends.max()) == (1.0, 6.0)

    def test_what_does_not_fit_is_said(self):
        drawn = DRAWINGS["workspace_and_time"][0]()
        assert [t for t in texts_of(drawn) if "fit" in t] == ["does not\nfit"]
