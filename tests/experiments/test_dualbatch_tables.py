"""The tables, figures and captions of dual-batch learning: values, gaps, what is said aloud."""

from dataclasses import replace
from typing import ClassVar

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from invented import make_record
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from test_dualbatch_checks import (
    CHOSEN,
    FAILED,
    OUT_OF_MEMORY,
    PAPER,
    REPORTED,
    World,
    made_results,
    nothing,
)

from repro import report
from repro.experiments.design import COMPUTING_PROFILES, Results, Run
from repro.experiments.dualbatch import drawings, tables
from repro.experiments.dualbatch.grids import CIFAR, IMAGENET

DASH = report.DASH
FIGURES = [name for name, artefact in PAPER.artefacts.items() if artefact.figure is not None]
GPU = {"type": "cuda", "name": "NVIDIA X", "slug": "x", "memory_bytes": 2**36}


def table(artefact, world=None, profile="gpu", **options) -> pd.DataFrame:
    return PAPER.artefacts[artefact].table(made_results(artefact, world, profile, **options))


def figure(artefact, world=None, profile="gpu") -> Figure:
    return PAPER.artefacts[artefact].figure(made_results(artefact, world, profile))


def caption(artefact, world=None, profile="gpu", **options) -> str:
    return PAPER.artefacts[artefact].caption(made_results(artefact, world, profile, **options))


def shown(frame: pd.DataFrame) -> str:
    return repr(report.TableView(frame))


def panels(drawn: Figure) -> dict:
    return {axis.get_title(): axis for axis in drawn.axes if axis.get_visible()}


def legend_of(drawn: Figure) -> list[str]:
    (legend,) = drawn.legends
    return [text.get_text() for text in legend.get_texts()]


def only(**config):
    """Return the status of a world that has records of these runs alone."""
    return lambda run: {} if all(run.config.get(k) == v for k, v in config.items()) else None


def on_ray(artefact: str) -> Results:
    planned = PAPER.artefacts[artefact].runs("quick", CHOSEN)
    planned = [
        Run(run.experiment, run.config | {"engine": "ray"}, run.seeds)
        if "engine" in run.config
        else run
        for run in planned
    ]
    world = World()
    records = [make_record(r.experiment, config=r.config, **world(r, 0)) for r in planned]
    return Results(planned, (0,), records)


class TestEveryArtefact:
    WORLDS: ClassVar = {
        "full": World(),
        "nothing": World(status=nothing),
        "all failed": World(status=lambda run: FAILED),
        "all out of memory": World(status=lambda run: OUT_OF_MEMORY),
        "one in two": World(
            status=lambda run: FAILED if len(str(run.config)) % 2 else {}
        ),
        "trainings alone": World(status=lambda run: {} if run.experiment == "train" else None),
        "measurements alone": World(status=lambda run: None if run.experiment == "train" else {}),
        "one seed, three workers": World(status=only(n_small=3)),
    }  # fmt: skip

    @pytest.mark.parametrize("kind", WORLDS)
    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_table_and_caption_of_whatever_there_is(self, kind, profile):
        for artefact in PAPER.artefacts.values():
            results = made_results(artefact.name, self.WORLDS[kind], profile)
            frame = artefact.table(results)
            assert len(set(frame.columns)) == len(frame.columns)
            text = shown(frame)
            assert "nan" not in text.lower() and "None" not in text, artefact.name
            assert report.to_html(frame) and report.to_rich(frame, artefact.title)
            assert artefact.caption(results)

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_the_papers_values_stand_without_records(self, artefact):
        frame = table(artefact, World(status=nothing))
        if artefact in ("engines", "table7", "table9"):
            assert frame.empty  # not in the paper; and what the schedule yields, beside it
            return
        numbers = {
            "figure3": "0.5661", "figure4": "0.5661", "table2": "0.936", "table3": "1.383",
            "table4": "8.222", "table5": "1.372", "table6": "314,954", "table8": "1.729",
            "table10": "2330", "figure13": "11,147",
        }  # fmt: skip
        assert numbers[artefact] in shown(frame)

    @pytest.mark.parametrize("artefact", FIGURES)
    @pytest.mark.parametrize("kind", ["full", "nothing", "all failed", "one in two"])
    def test_figure_of_whatever_there_is(self, kind, artefact):
        plt.close("all")  # of a test that failed
        drawn = figure(artefact, self.WORLDS[kind])
        assert isinstance(drawn, Figure)
        FigureCanvasAgg(drawn).draw()  # a missing glyph or a layout that does not fit warns
        assert plt.get_fignums() == []

    @pytest.mark.parametrize("artefact", FIGURES)
    def test_panels_are_labelled(self, artefact):
        drawn = figure(artefact)
        assert panels(drawn) and all(panels(drawn))
        assert all(axis.get_xlabel() for axis in drawn.axes)
        first = [axis for axis in drawn.axes if axis.get_subplotspec().is_first_col()]
        assert first and all(axis.get_ylabel() for axis in first)
        assert len(drawn.legends) == 1
        lines = {line.get_label() for axis in drawn.axes for line in axis.get_lines()}
        assert set(legend_of(drawn)) == lines

    @pytest.mark.parametrize("artefact", ["table3", "table5", "table8"])
    def test_trainings_on_a_cluster(self, artefact):
        frame = PAPER.artefacts[artefact].table(on_ray(artefact))
        assert len(frame) == {"table3": 9, "table5": 9, "table8": 10}[artefact]
        assert "SIMULATED" not in PAPER.artefacts[artefact].caption(on_ray(artefact))


class TestSolvedTables:
    @pytest.mark.parametrize("artefact", ["table2", "table6", "table7", "table9"])
    def test_ours_equal_the_papers(self, artefact):
        frame = table(artefact)
        pairs = [name for name in frame.columns if f"{name}, paper" in frame.columns]
        assert len(pairs) >= 2
        for name in pairs:
            for ours, paper in zip(frame[name], frame[f"{name}, paper"], strict=True):
                if artefact == "table2" and name == "d_S/d_L" and ours is not None:
                    assert float(ours) == pytest.approx(float(paper), abs=1e-3)
                else:
                    assert str(ours) == str(paper), name

    def test_rows(self):
        assert len(table("table2")) == 8 and len(table("table6")) == 10
        assert table("table7")["epochs"].tolist() == [
            "1-80", "81-120", "121-140",
            "1-40", "41-80", "81-100", "101-120", "121-130", "131-140",
        ]  # fmt: skip
        assert len(table("table9")) == 12
        assert table("table6")["B_S"].tolist()[1] == "130, 102"

    def test_a_wrong_value_is_seen(self):
        def edit(metrics, config):
            metrics["rows"][0]["small_batch"] = 84

        frame = table("table2", World(edit={"solve": edit}))
        assert (frame["B_S"][0], frame["B_S, paper"][0]) == (84, 83)


class TestTrainingTables:
    def test_table3(self):
        frame = table("table3")
        assert frame["(n_S, n_L)"].tolist() == ["(1, 3)"] * 3 + ["(2, 2)"] * 3 + ["(3, 1)"] * 3
        row = frame.iloc[3]
        assert row["factor"] == "d_S/d_L"
        assert (row["value, paper"], row["value"]) == ("0.818", "0.818")
        assert row["loss, paper"] == "1.250" and row["loss"] == "1.250 ± 0.000"
        assert row["accuracy, paper (%)"] == "70.5" and row["accuracy (%)"] == "70.50 ± 0.02"
        assert row["n"] == 3 and row["over none, paper"] == "+0.3"
        assert row["over none"].startswith("+0.30 [")
        root = frame.iloc[4]
        assert (root["value, paper"], root["value"]) == ("0.904", "0.905")
        assert frame.iloc[5]["over none"] == frame.iloc[5]["over none, paper"] == DASH
        assert frame.iloc[5]["value"] == "1.000"

    def test_table5(self):
        frame = table("table5")
        assert len(frame) == 9
        base, last = frame.iloc[0], frame.iloc[-1]
        assert (base["k"], base["(n_S, n_L)"], base["gain"]) == ("1.00", "(0, 4)", DASH)
        assert base["accuracy, paper (%)"] == "67.8" and base["B_S"] == DASH
        assert (last["B_S"], last["gain, paper"]) == ("160", "+2.7")
        assert last["gain"].startswith("+2.70 [")
        assert last["virtual time over baseline"] == "1.100"
        assert base["virtual time over baseline"] == "1.000"
        assert last["wall (s)"] == "100.00 ± 0.00"

    def test_table8(self):
        frame = table("table8")
        assert frame["scheme"].tolist() == ["dual-batch"] * 5 + ["hybrid"] * 5
        dual, hybrid = frame.iloc[1], frame.iloc[8]
        assert (dual["B_S"], dual["B_L"]) == ("102", "560")
        assert (hybrid["B_S"], hybrid["B_L"]) == ("294, 243", "600, 560")
        assert (hybrid["gain, paper"], hybrid["virtual (s)"]) == ("+3.3", "1,385")
        assert hybrid["gain"].startswith("+3.30 [") and hybrid["wall (s)"] == "85.00 ± 0.00"
        assert frame.iloc[0]["gain"] == DASH and frame.iloc[5]["gain"] != DASH

    def test_missing_trainings_are_gaps(self):
        frame = table("table5", World(status=only(n_small=2)))
        ours = ["B_S", "loss", "accuracy (%)", "gain", "virtual time over baseline", "wall (s)"]
        for _, row in frame.iterrows():
            has = row["(n_S, n_L)"] == "(2, 2)"
            assert row["n"] == (3 if has else 0)
            for name in ours[:3]:
                assert (row[name] != DASH) == has
            # Without the baseline nothing stands over it.
            assert row["gain"] == row["virtual time over baseline"] == DASH

    def test_one_seed_has_no_interval(self):
        frame = table("table5", seeds=(0,))
        assert frame.iloc[1]["gain"] == "+0.10" and "±" not in frame.iloc[1]["accuracy (%)"]


class TestMeasuredTables:
    def test_table4(self):
        frame = table("table4")
        paper = frame[frame["where"] == "paper, GTX 1080"]
        assert len(paper) == 10
        assert paper["error"].tolist()[:3] == ["+3.5 %", "+0.1 %", "-2.6 %"]
        ours = frame[frame["where"] != "paper, GTX 1080"]
        assert set(ours["where"]) == {"here, small", "here, large", "here, (4, 0): no plan"}
        assert set(ours["error"].dropna()) == {"+2.0 %"} and set(ours["k"]) == {"1.05", "1.10"}

    def test_a_share_that_two_plans_have_is_shown_once(self):
        def edit(metrics, config):
            metrics["shares"] += [dict(row) for row in metrics["shares"]]

        assert len(table("table4", World(edit={"times": edit}))) == len(table("table4"))

    def test_plans_without_a_solution_are_said(self):
        """A device may have no small batch for these k; the reader is told which are left out."""
        said = shown(table("table4")) + caption("table4")
        assert "(4, 0)" in said or "no plan" in said or "infeasible" in said.lower()

    def test_times(self):
        frame = table("figure3")
        assert frame["where"].tolist() == [
            "here, 24 px", "here, 32 px", "authors' raw data, PyTorch, GTX 1080, 32 px",
            "authors' raw data, TensorFlow, GTX 1080, 32 px", "gives the paper's Table 2",
        ]  # fmt: skip
        here, raw, inferred = frame.iloc[1], frame.iloc[3], frame.iloc[4]
        assert here["largest error"] == here["median error"] == "1.0 %"
        assert here["b / a (samples)"] == f"{3.2e-3 / (1e-6 * 32**2):.1f}"
        assert (raw["largest error"], raw["median error"]) == ("1.0 %", "1.0 % (of all 500)")
        assert inferred["a (ms per sample)"] == "0.5661" and inferred["largest error"] == DASH
        without = table("figure3", World(status=only(role=CIFAR)))
        assert len(without) == 3

    def test_figure13(self):
        def edit(metrics, config):
            metrics |= {"predicted_max": 1030, "measured_max": 1000}

        frame = table("figure13", World(edit={"memory": edit}))
        assert frame["data"].tolist() == ["CIFAR-100", "ImageNet"]
        assert frame["largest, paper's prediction"].tolist() == ["11,147", "1,345"]
        assert frame["error, paper"].tolist() == ["3.5 %", "3.7 %"]
        assert frame["error"].tolist() == ["+3.0 %"] * 2
        assert frame["limit (MiB)"].tolist() == [f"{24e9 / 2**20:,.0f}"] * 2
        assert frame["parameters etc. (MiB)"].tolist() == ["1.0"] * 2

    def test_table10(self):
        frame = table("table10", chosen={CIFAR: "cifar100"})
        assert frame["resolution, paper"].tolist() == [160, 224, 288]
        assert frame["B_S, paper (n_S = 1 to 4)"].tolist()[2] == "67, 135, 190, 236"
        assert frame["an epoch over the highest"].tolist() == [
            f"{(side / 288) ** 2:.2f}" for side in (160, 224, 288)
        ]
        assert len(frame) == 3

    def test_table10s_trainings(self):
        frame = table("table10", profile="paper")
        assert len(frame) == 13
        trained = frame.iloc[3:]
        assert trained["scheme"].tolist() == ["dual-batch"] * 5 + ["hybrid"] * 5
        assert trained["accuracy, paper (%)"].tolist()[:3] == ["65.9", "62.1", "64.5"]
        assert trained["accuracy (%)"].tolist()[9] == "65.50 ± 0.02"
        assert trained["loss, paper"].tolist()[6] == "2.138"

    def test_engines(self):
        frame = table("engines", profile="quick")
        assert frame["engine"].tolist() == ["local", "ray"]
        assert set(frame["same weights in the same order"]) == {"yes"}
        assert frame["staleness, mean"].tolist() == ["2.00", "2.00"]
        assert frame["staleness, most"].tolist() == [3, 3]

        def differ(metrics, config):
            metrics["same_weights"] = False

        wrong = table("engines", World(edit={"train": differ}), "quick")
        assert set(wrong["same weights in the same order"]) == {"NO"}
        large = table("engines", profile="gpu")
        assert set(large["same weights in the same order"]) == {DASH}

    def test_an_engine_that_failed_says_so(self):
        def status(run):
            return FAILED if run.config["engine"] == "ray" else {}

        frame = table("engines", World(status=status), "quick")
        assert frame["accuracy (%)"].tolist()[1] == "failed"


class TestFigures:
    @pytest.mark.parametrize(("artefact", "count"), [("table3", 6), ("table5", 4), ("table8", 4)])
    def test_a_pair_of_panels_for_every_group(self, artefact, count):
        drawn = figure(artefact)
        assert len(panels(drawn)) == count
        labels = {axis.get_ylabel() for axis in drawn.axes}
        assert labels == {"test loss", "test accuracy (%)"}

    def test_figures_5_and_6(self):
        drawn = figure("table3")
        assert list(panels(drawn)) == [
            f"(n_S, n_L) = ({n}, {4 - n}): test {what}"
            for n in (1, 2, 3)
            for what in ("loss", "accuracy")
        ]
        assert legend_of(drawn) == ["factor d_S/d_L", "factor √(d_S/d_L)", "factor none"]
        axis = panels(drawn)["(n_S, n_L) = (2, 2): test accuracy"]
        lines = {line.get_label(): line.get_ydata()[-1] for line in axis.get_lines()}
        assert lines == pytest.approx({
            "factor d_S/d_L": 70.5, "factor √(d_S/d_L)": 70.9, "factor none": 70.2
        })  # fmt: skip

    def test_figures_7_to_10(self):
        drawn = figure("table5")
        assert list(panels(drawn))[:2] == ["k = 1.05: test loss", "k = 1.05: test accuracy"]
        assert len(legend_of(drawn)) == 5
        axis = panels(drawn)["k = 1.1: test loss"]
        assert len(axis.get_lines()) == 5
        assert axis.get_lines()[0].get_ydata()[-1] == pytest.approx(1.429)  # the baseline

    def test_figures_11_and_12(self):
        drawn = figure("table8")
        axis = panels(drawn)["hybrid: test accuracy"]
        ends = [line.get_ydata()[-1] for line in axis.get_lines()]
        assert ends == pytest.approx([68.0, 69.9, 71.0, 71.3, 71.2])

    def test_figure_3(self):
        drawn = figure("figure3")
        assert list(panels(drawn)) == [
            "here, 24 px", "here, 32 px", "GTX 1080, PyTorch", "GTX 1080, TensorFlow"
        ]  # fmt: skip
        axis = panels(drawn)["here, 32 px"]
        assert drawn.axes[0].get_ylabel() == "time of a batch (ms)"
        for line in axis.get_lines():
            sizes, times = line.get_data()
            assert times == pytest.approx(1e3 * (1e-6 * 32**2 * sizes + 3.2e-3))

    def test_figure_4(self):
        drawn = figure("figure4")
        assert len(panels(drawn)) == 4
        assert legend_of(drawn) == ["measured", "predicted by equation 2"]
        measured, predicted = panels(drawn)["here, 24 px"].get_lines()
        assert measured.get_ydata() == pytest.approx(1.01 * predicted.get_ydata())

    @pytest.mark.parametrize("artefact", ["figure3", "figure4"])
    def test_without_the_raw_data_half_of_the_panels(self, artefact):
        drawn = figure(artefact, World(status=only(role=CIFAR)))
        assert list(panels(drawn)) == ["here, 24 px", "here, 32 px"]

    def test_figure_13(self):
        drawn = figure("figure13")
        assert list(panels(drawn)) == ["CIFAR, 32 px", "ImageNet, 224 px"]
        points, _ = panels(drawn)["CIFAR, 32 px"].get_lines()
        sizes, peaks = points.get_data()
        assert len(sizes) == 9  # eight probes, and one beyond
        assert peaks[0] == pytest.approx((2**20 + 2**14 * 64) / 2**20)

    def test_one_seed_has_no_band(self):
        artefact = PAPER.artefacts["table8"]
        drawn = artefact.figure(made_results("table8", seeds=(0,)))
        assert all(len(axis.collections) == 0 for axis in drawn.axes)
        drawn = artefact.figure(made_results("table8"))
        assert all(len(axis.collections) == 5 for axis in drawn.axes)

    def test_workers(self):
        spans = [{"kind": "small", "steps": [(0.0, 1.0)]}, {"kind": "large", "steps": [(0, 2.0)]}]
        drawn = drawings.workers(spans, ["a", "b"], 1.5)
        assert len(legend_of(drawn)) == 3


class TestCaptions:
    @pytest.mark.parametrize("artefact", ["table3", "table5", "table8", "engines"])
    def test_the_simulated_server_is_named(self, artefact):
        assert "SIMULATED" in caption(artefact)
        assert "virtual clock" in caption(artefact)

    def test_measured_and_solved_are_not_simulated(self):
        for artefact in ("figure3", "table2", "table4", "table6", "table7"):
            assert "SIMULATED" not in caption(artefact)
        for artefact in ("table2", "table6", "table7", "table9"):
            assert "Solved, not measured" in caption(artefact)
            assert "Measured on" not in caption(artefact)

    @pytest.mark.parametrize(
        ("name", "stand_in", "synthetic"),
        [("cifar100", False, False), ("cifar10", True, False), ("digits", True, False),
         ("synthetic", True, True)],
    )  # fmt: skip
    @pytest.mark.parametrize("artefact", ["table3", "table5", "table8", "engines"])
    def test_stand_in_and_synthetic_data(self, artefact, name, stand_in, synthetic):
        said = caption(artefact, profile="quick", chosen={CIFAR: name})
        assert f"Data: {'SYNTHETIC data, ' if synthetic else ''}{name}" in said
        assert ("STAND-IN" in said) == stand_in
        assert ("SYNTHETIC data" in said) == synthetic

    @pytest.mark.parametrize("artefact", ["figure3", "figure4", "table4", "table8", "table10"])
    def test_times_are_of_random_images(self, artefact):
        assert "SYNTHETIC images (random numbers)" in caption(artefact)

    def test_memory_is_of_random_images(self):
        assert "SYNTHETIC" in caption("figure13")

    def test_the_simulated_limit(self):
        assert "SIMULATED" in caption("figure13")  # on a CPU
        assert f"{24e9 / 2**20:,.0f} MiB" in caption("figure13")

    def test_the_simulated_limit_on_a_gpu(self):
        assert "SIMULATED" in caption("figure13", World(device=GPU))

    def test_the_papers_device_is_not_this_one(self):
        for artefact in ("figure3", "table3", "table4", "table8", "figure13"):
            assert "Measured on a CPU (1 thread)." in caption(artefact)
            assert "Measured on NVIDIA X." in caption(artefact, World(device=GPU))

    @pytest.mark.parametrize("profile", ["quick", "gpu"])
    def test_model_and_extent(self, profile):
        said = caption("table5", profile=profile)
        if profile == "gpu":
            assert "Model: resnet18, bfloat16, channels last." in said
            assert "50,000 samples; stages of 6/2/2 epochs" in said
            assert "b is scaled" not in said
        else:
            assert "resnet_cifar (depth 8, width 8)" in said
            assert "An epoch is 1,000 samples; stages of 4/2/2 epochs" in said
            assert "b is scaled like the batch sizes" in said

    def test_the_raw_datas_origin(self):
        assert "authors published" in caption("figure3")
        assert "authors" not in caption("figure3", World(status=only(role=CIFAR)))

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_gaps_are_said(self, artefact):
        assert caption(artefact, World(status=nothing)).endswith("Not run yet.")
        failed = made_results(artefact, World(status=lambda run: FAILED))
        count = len(failed.records)
        assert f"{count} runs FAILED." in PAPER.artefacts[artefact].caption(failed)

    def test_missing_runs_are_counted(self):
        said = caption("table5", World(status=only(n_small=2)))
        assert "21 of 27 runs are missing." in said

    @pytest.mark.parametrize("artefact", ["table4", "table5", "figure13"])
    def test_out_of_memory_is_said(self, artefact):
        results = made_results(artefact, World(status=lambda run: OUT_OF_MEMORY))
        paper = PAPER.artefacts[artefact]
        said = f"{shown(paper.table(results))} {paper.caption(results)}".lower()
        assert "out of memory" in said or "out_of_memory" in said

    def test_stale_records_are_said(self):
        full = made_results("table5")
        stale = Results([run for run, _ in full.expected], (0, 1, 2), full.records, lambda r: False)
        assert "STALE records, whose code has changed since: 27" in PAPER.artefacts[
            "table5"
        ].caption(stale)

    def test_two_workers_are_not_called_four(self):
        assert "four workers" not in caption("engines", profile="quick")

    def test_tested_on_no_more_images_than_there_are(self):
        """Digits have 355 test images, under `quick`, which asks for 1,000."""
        said = caption("table5", profile="quick", chosen={CIFAR: "digits"})
        assert "tested on 1,000" not in said

    def test_a_stand_in_for_imagenet_is_called_that(self):
        chosen = CHOSEN | {IMAGENET: "synthetic"}
        said = caption("table10", profile="paper", chosen=chosen)
        assert "STAND-IN for the paper's CIFAR-100" not in said


def test_the_reported_table_is_not_changed_by_showing_it():
    before = str(REPORTED)
    for artefact in PAPER.artefacts:
        table(artefact)
    assert str(REPORTED) == before


def test_figure_and_table_see_the_same_records():
    lost = World(status=lambda run: FAILED if run.config.get("n_small") == 3 else {})
    frame = table("table8", lost)
    assert frame[frame["n_S"] == 3]["n"].tolist() == [0, 0]
    assert "n_S = 3" not in legend_of(figure("table8", lost))
    assert "n_S = 3" in legend_of(figure("table8", replace(lost, status=lambda run: {})))
    assert tables.FACTORS.keys() == {"linear", "sqrt", "none"}
