"""The tables, figures and captions of θ-adaptive batch sizes: values, gaps, what is said aloud."""

import math
import re
from typing import ClassVar

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from test_adaptive_checks import (
    CHOSEN,
    DESIGN,
    FAILED,
    MODEL,
    OUT_OF_MEMORY,
    World,
    made_results,
    nothing,
    only_strategies,
)

from repro import report
from repro.experiments.adaptive import projection, tables
from repro.experiments.adaptive.grids import CIFAR, DIV2K, PAPER, PHANTOM, TASKS
from repro.experiments.design import COMPUTING_PROFILES, Results

DASH = report.DASH
GPU = {"type": "cuda", "name": "NVIDIA X", "slug": "x", "memory_bytes": 2**36}
SCALING = {"figure7": DIV2K, "figure8": PHANTOM, "figure11": CIFAR}
CURVES = ("figure1", "figure2", "figure3", "figure4", "figure5", "figure6", "figure10")


def table(artefact, world=None, profile="gpu", **options) -> pd.DataFrame:
    return DESIGN.artefacts[artefact].table(made_results(artefact, world, profile, **options))


def figure(artefact, world=None, profile="gpu", **options) -> Figure:
    return DESIGN.artefacts[artefact].figure(made_results(artefact, world, profile, **options))


def caption(artefact, world=None, profile="gpu", **options) -> str:
    return DESIGN.artefacts[artefact].caption(made_results(artefact, world, profile, **options))


def shown(frame: pd.DataFrame) -> str:
    return repr(report.TableView(frame))


def panels(drawn: Figure) -> dict:
    return {axis.get_title(): axis for axis in drawn.axes if axis.get_visible()}


def legend_of(drawn: Figure) -> list[str]:
    return [text.get_text() for legend in drawn.legends for text in legend.get_texts()]


def one_seed_diverges(config, seed):
    return 3 if seed == 1 else None


WORLDS = {
    "full": World(spread=0.1),
    "nothing": World(status=nothing),
    "all failed": World(status=lambda run: FAILED),
    "all out of memory": World(status=lambda run: OUT_OF_MEMORY),
    "one in two": World(status=lambda run: FAILED if len(str(run.config)) % 2 else {}),
    "one diverges": World(length=one_seed_diverges),
    "all diverge": World(length=lambda config, seed: 2),
    "all diverge at once": World(length=lambda config, seed: 0),
    "K not found": World(interval=lambda config: None),
    "trainings alone": World(status=lambda run: {} if run.experiment == "train" else None),
    "measurements alone": World(status=lambda run: None if run.experiment == "train" else {}),
    "θ alone": World(status=only_strategies("theta", "norms")),
}


class TestEveryArtefact:
    @pytest.mark.parametrize(
        ("profile", "seeds"),
        [("smoke", (0,)), ("quick", (0,)), ("quick", (0, 1, 2)), ("gpu", (0, 1, 2))],
    )
    @pytest.mark.parametrize("kind", WORLDS)
    def test_table_and_caption_of_whatever_there_is(self, kind, profile, seeds):
        for artefact in DESIGN.artefacts.values():
            results = made_results(artefact.name, WORLDS[kind], profile, seeds=seeds)
            frame = artefact.table(results)
            assert len(set(frame.columns)) == len(frame.columns)
            text = shown(frame)
            assert "nan" not in text.lower() and "None" not in text, artefact.name
            assert "inf" not in text, artefact.name
            assert report.to_html(frame) and report.to_rich(frame, artefact.title)
            assert artefact.caption(results)
            for claim in artefact.claims:
                assert claim.check(results).evidence

    @pytest.mark.parametrize("artefact", DESIGN.artefacts)
    @pytest.mark.parametrize(
        "kind", ["full", "nothing", "one in two", "one diverges", "all diverge at once",
                 "measurements alone"]
    )  # fmt: skip
    def test_figure_of_whatever_there_is(self, kind, artefact):
        plt.close("all")  # of a test that failed
        drawn = figure(artefact, WORLDS[kind], "quick")
        assert isinstance(drawn, Figure)
        FigureCanvasAgg(drawn).draw()  # a missing glyph or a layout that does not fit warns
        assert plt.get_fignums() == []

    @pytest.mark.parametrize("artefact", DESIGN.artefacts)
    def test_panels_are_labelled(self, artefact):
        drawn = figure(artefact)
        assert panels(drawn) and all(panels(drawn))
        assert all(axis.get_xlabel() for axis in drawn.axes)
        first = [axis for axis in drawn.axes if axis.get_subplotspec().is_first_col()]
        assert all(axis.get_ylabel() or axis.get_yticklabels() for axis in first)
        labels = legend_of(drawn)
        assert labels and len(set(labels)) == len(labels)

    @pytest.mark.parametrize(
        ("artefact", "number"),
        [("figure4", "33.59"), ("figure5", "52.51"), ("figure10", "91.51 ± 0.3"),
         ("figure7", "81.71"), ("figure8", "42.96"), ("figure11", "64.64"),
         ("figure6", "55 to 65")],
    )  # fmt: skip
    def test_the_papers_values_stand_without_records(self, artefact, number):
        assert number in shown(table(artefact, World(status=nothing)))

    def test_the_reported_numbers_are_not_changed_by_showing_them(self):
        before = str(PAPER)
        for artefact in DESIGN.artefacts:
            table(artefact)
        assert str(PAPER) == before


class TestStrategies:
    CASES: ClassVar = {"figure4": DIV2K, "figure5": PHANTOM, "figure10": CIFAR}

    @pytest.mark.parametrize("artefact", CASES)
    def test_ours_beside_the_papers(self, artefact):
        task = self.CASES[artefact]
        unit = "accuracy (%)" if task == CIFAR else "PSNR (dB)"
        frame = table(artefact, World(spread=0.1))
        assert len(frame) == (6 if task == CIFAR else 4)
        best, ours = frame.iloc[0], frame.iloc[3]
        assert (best["strategy"], ours["strategy"]) == ("best fixed batch", "θ-adaptive")
        own, theta = PAPER[task]["best"], PAPER[task]["theta"]
        assert best["b, paper"] == str(own["batch"])
        assert ours["b, paper"] == f"{theta['batch']} ~ {theta['max_batch']}"
        assert best[unit] == f"{own['value']:.2f} ± 0.10" and best["n"] == 3
        assert best["over best"] == best["over best, paper"] == DASH
        assert ours["over best, paper"] == f"{theta['value'] - own['value']:+.2f}"
        assert ours["over best"].startswith(f"{theta['value'] - own['value']:+.2f} [")
        epochs = 140 if task == CIFAR else 120
        samples = PAPER[task]["samples"]
        count = epochs * math.ceil(samples / own["batch"])
        assert best["updates"] == f"{count:,}" and best["best's over these"] == "1.00"
        assert float(ours["best's over these"]) > 2
        if task != CIFAR:
            assert (ours["epochs, paper"], ours["epochs"]) == (theta["epochs"], "120")

    def test_rates(self):
        frame = table("figure10")
        assert frame["μ, paper"].tolist() == [
            "0.1", "1.6, 5 warm-up epochs", "0.2 ~ 1.6", "0.2 ~ 1.6", "0.1", DASH
        ]  # fmt: skip
        assert frame["μ, ours"].tolist()[0] == "0.1" and frame["μ, ours"].tolist()[3] == "0.2 ~ 1.6"
        assert frame["μ, ours"].tolist()[1] == "1.6, 5 warm-up epochs"
        assert table("figure10", profile="smoke")["μ, ours"].tolist()[1].endswith("1 warm-up epoch")

    def test_the_large_batch_of_section_3e(self):
        row = table("figure10").iloc[4]
        assert (row["strategy"], row["b, paper"]) == ("SGD, large batch", "2048")
        assert row["accuracy (%), paper"] == "46.29" and row["accuracy (%)"] == "46.29 ± 0.00"
        assert row["over best, paper"] == "-45.22"  # of 91.51
        assert "large" not in shown(table("figure4"))

    def test_diverged_trainings_are_counted(self):
        frame = table("figure4", World(length=one_seed_diverges))
        assert set(frame["n"]) == {"3, 1 diverged"}
        assert set(table("figure4")["n"]) == {3}

    def test_a_training_that_diverged_in_its_first_epoch_is_told(self):
        """It has no curve, and is neither missing nor failed; the reader is told all the same."""

        def first(config, seed):
            return 0 if seed == 1 else None

        for artefact in ("figure4", "figure10"):
            said = shown(table(artefact, World(length=first))) + caption(
                artefact, World(length=first)
            )
            assert "diverged" in said

    def test_a_rule_that_was_not_met_is_told(self):
        def edit(metrics, config):
            metrics["stopped"] = False

        frame = table("figure4", World(edit={"train": edit}))
        assert set(frame["epochs"]) == {"120 (rule not met)"}

    def test_gaps(self):
        frame = table("figure4", World(status=only_strategies("theta")))
        ours, linear = frame.iloc[3], frame.iloc[1]
        assert ours["n"] == 3 and ours["over best"] == ours["best's over these"] == DASH
        assert linear["n"] == 0 and linear["PSNR (dB)"] == linear["updates"] == DASH

    def test_one_seed_has_no_interval(self):
        frame = table("figure4", seeds=(0,))
        assert frame.iloc[3]["over best"] == "-0.10" and "±" not in frame.iloc[3]["PSNR (dB)"]


class TestOtherTables:
    def test_fixed_batches(self):
        frame = table("figure1")
        assert frame["B, paper"].tolist() == frame["B"].tolist() == [16, 32, 64, 128, 256]
        assert frame["warm-up"].tolist() == ["no"] * 4 + ["yes"]
        rates = [f"{1e-4 * n / 16:g}" for n in (16, 32, 64, 128, 256)]
        assert frame["μ"].tolist() == rates
        assert frame["PSNR (dB), paper"].tolist() == ["33.59", DASH, DASH, DASH, "31.35"]
        assert frame["θ peaks in epoch"].tolist() == ["8", "9", "10", "11", "12"]
        quick = table("figure1", profile="quick")
        assert quick["B"].tolist() == [4, 8, 16, 32, 64]
        assert quick["B, paper"].tolist() == [16, 32, 64, 128, 256]

    def test_where_theta_peaks(self):
        frame = table("figure6")
        assert frame["task"].tolist() == [DIV2K] * 4 + [PHANTOM] * 4
        assert frame["B"].tolist() == [16, 64, 256, "θ-adaptive", 16, 32, 128, "θ-adaptive"]
        assert frame["θ peaks in epoch, paper"].tolist() == [
            DASH, "9 to 10", DASH, "9 to 10", DASH, "55 to 65", DASH, "55 to 65"
        ]  # fmt: skip
        assert frame["K"].tolist()[3] == "10 (paper 10)"
        assert frame["θ peaks in epoch"].tolist()[7] == "59"
        none = table("figure6", World(interval=lambda config: None))
        assert none["K"].tolist()[3] == f"{DASH} (paper 10)"

    def test_after_the_decay(self):
        frame = table("figure3")
        assert frame["rises by the factor"].tolist() == [
            "1.500 ± 0.000"] * 3 + ["1.000 ± 0.000"] + ["1.500 ± 0.000"] * 2  # fmt: skip
        height = 0.01 * 128**0.3
        assert frame["θ before the decay"].tolist()[0] == f"{0.8 * height:.4f} ± 0.0000"
        assert frame["θ at the end"].tolist()[0] == f"{1.2 * height:.4f} ± 0.0000"

    def test_stable_batches(self):
        frame = table("stable")
        assert list(dict.fromkeys(frame["task"])) == list(TASKS)
        assert set(frame["n"]) == {3} and frame["after epochs"].tolist()[0] == 0
        for _, row in frame.iterrows():
            assert row["B_s"] == str(row["B_s, paper"]) == str(row["B_s, paper, at scale"])
        quick = table("stable", profile="quick")
        assert quick["B_s, paper, at scale"].tolist()[0] == 16
        assert frame.iloc[0]["‖∇w‖ by batch size"].startswith(f"128: {1 / 3:.3g}, ")

    @pytest.mark.parametrize("artefact", SCALING)
    def test_scaling(self, artefact):
        task = SCALING[artefact]
        frame = table(artefact)
        assert len(frame) == 3
        for (_, row), strategy in zip(frame.iterrows(), projection.SCALED, strict=True):
            nodes, value = PAPER[task]["speedups"][strategy]
            assert row["paper"] == f"{value:.2f}"
            assert row["nodes"] == (nodes or "best of 1 to 128")
            low, high = map(float, row["modelled from the other two"].split(" to "))
            assert 1 <= low <= high
            assert row["two processes, projected"] == row["two processes, measured"]
            assert 0 < float(row["two processes, measured"]) < 2
        without = table(artefact, World(status=nothing))
        assert set(without["two processes, measured"]) == {DASH}
        assert without["fitted to all three"].tolist() == frame["fitted to all three"].tolist()

    def test_where_the_time_goes_on_many_nodes(self):
        frame = table("breakdown")
        assert frame.equals(table("breakdown", World(status=nothing)))
        nodes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
        assert frame["nodes"].tolist() == nodes * 2
        fitted, whole = (projection.fitted_to_paper(DIV2K, None, cost)
                         for cost in (None, projection.overhead()))  # fmt: skip
        labels = list(dict.fromkeys(frame["cost of small batches"]))
        assert labels == [
            f"fitted: {fitted.overhead_s:.2f} samples", "section VI-B's: 1.17 samples"
        ]  # fmt: skip
        for place, model in ((7, fitted), (16, whole)):
            row, shares = frame.iloc[place], projection.breakdown(model, 128)
            assert [row[f"{name} (%)"] for name in shares] == [
                f"{100 * value:.2f}" for value in shares.values()
            ]
        one = frame.iloc[0]
        assert (one["computation (%)"], one["blocked (%)"]) == ("100.00", "0.00")

    def test_where_the_time_goes(self):
        frame = table("figure9")
        assert set(frame["averaging"]) == {
            "one process", "allreduce", "all_to_all", "reduce_scatter"
        }  # fmt: skip
        row = frame[(frame["task"] == CIFAR) & (frame["averaging"] == "all_to_all")].iloc[0]
        cost = MODEL.step(8, 2)
        assert (row["batch size"], row["processes"]) == (8, 2)
        for name, value in (("computation", cost.computation_s), ("blocked", cost.blocked_s),
                            ("communication", cost.communication_s)):  # fmt: skip
            assert row[f"{name} (ms)"] == f"{1e3 * value:.2f}"
        assert table("figure9", World(status=nothing)).empty


class TestFigures:
    def test_curves_end_at_the_means(self):
        drawn = figure("figure4", World(spread=0.5))
        (axis,) = drawn.axes
        ends = {line.get_label(): line.get_ydata()[-1] for line in axis.get_lines()}
        assert ends["θ-adaptive"] == pytest.approx(33.49)
        assert ends["linear scaling"] == pytest.approx(31.35)
        assert len(axis.collections) == 4  # a bar at every end

    def test_batches_and_panels(self):
        assert legend_of(figure("figure1")) == [f"B = {n}" for n in (16, 32, 64, 128, 256)]
        assert list(panels(figure("figure2"))) == ["training cost", "θ by batch size"]
        assert list(panels(figure("figure6"))) == ["θ, DIV2K", "θ, Phantom"]
        assert list(panels(figure("figure10"))) == ["training loss", "validation accuracy"]
        assert legend_of(figure("figure3"))[-1] == "noise scale"
        assert list(panels(figure("stable"))) == list(TASKS)

    @pytest.mark.parametrize("artefact", SCALING)
    def test_speedups(self, artefact):
        task = SCALING[artefact]
        drawn = figure(artefact)
        assert list(panels(drawn)) == [
            "time, paper's cluster", "speed-up, paper's cluster",
            "speed-up, nodes like our processes",
        ]  # fmt: skip
        _, speed, here = drawn.axes
        stars = [(x, y) for line in speed.get_lines() if line.get_marker() == "*"
                 for x, y in zip(*line.get_data(), strict=True)]  # fmt: skip
        wanted = [tuple(v) for v in PAPER[task]["speedups"].values() if v[0]]
        assert sorted(stars) == sorted(wanted)
        lines = [line for line in speed.get_lines() if "modelled" in str(line.get_label())]
        for line, strategy in zip(lines, projection.SCALED, strict=True):
            nodes, values = line.get_data()
            assert list(nodes) == projection.nodes_of(task, strategy)
            assert values[0] == pytest.approx(1.0)
        measured = [line for line in here.get_lines() if line.get_marker() == "*"]
        assert sum(len(line.get_xdata()) for line in measured) == 3
        assert len(figure(artefact, World(status=nothing)).axes) == 2

    def test_bars(self):
        drawn = figure("figure9")
        assert len(drawn.axes) == 3
        first = drawn.axes[0]
        assert [t.get_text() for t in first.get_yticklabels()] == [
            "1 process", "2, allreduce", "2, all-to-all", "2, reduce-scatter"
        ]  # fmt: skip
        widths = sorted(patch.get_width() for patch in first.patches)
        largest = max(table("figure9").query("task == 'CIFAR'")["batch size"])
        cost = MODEL.step(largest, 2)
        assert any(w == pytest.approx(1e3 * cost.blocked_s) for w in widths)
        assert len(figure("figure9", World(status=nothing)).axes) == 1

    def test_shares(self):
        drawn = figure("breakdown")
        for axis, cost in zip(drawn.axes, (None, projection.overhead()), strict=True):
            model = projection.fitted_to_paper(DIV2K, None, cost)
            lines = {line.get_label(): dict(zip(*line.get_data(), strict=True))
                     for line in axis.get_lines()}  # fmt: skip
            assert set(lines) == {"computation", "computation at B_m", "communication", "blocked",
                                  "before B_m, share of all time"}  # fmt: skip
            shares = projection.breakdown(model, 256)
            for name, points in lines.items():
                assert points[256] == shares[name.split(",")[0]]
            assert min(lines["computation"]) == 1
        assert "blocked" in legend_of(drawn)


class TestCaptions:
    @pytest.mark.parametrize("artefact", [*SCALING, "breakdown"])
    def test_what_is_simulated_and_assumed(self, artefact):
        for world in (World(), World(status=nothing)):
            said = caption(artefact, world)
            assert "SIMULATED" in said and "ASSUMED" in said
        assert "SYNTHETIC images (random numbers)" in caption(artefact)
        assert "Processes on a CPU." in caption(artefact)
        assert "SYNTHETIC" not in caption(artefact, World(status=nothing))

    def test_measured_steps_are_of_two_processes_on_synthetic_images(self):
        said = caption("figure9")
        assert "SYNTHETIC images (random numbers)" in said and "Processes on a CPU." in said
        assert "The paper's cluster is a model" not in said  # it is in `breakdown`
        assert caption("figure9", World(status=nothing)).endswith("Not run yet.")

    @pytest.mark.parametrize("artefact", [*CURVES, "stable"])
    def test_trainings_are_not_simulated(self, artefact):
        assert "SIMULATED" not in caption(artefact)

    @pytest.mark.parametrize(
        ("artefact", "task", "name", "stand_in", "synthetic"),
        [("figure10", CIFAR, "cifar10", False, False), ("figure10", CIFAR, "digits", True, False),
         ("figure2", CIFAR, "synthetic", True, True), ("figure4", DIV2K, "div2k", False, False),
         ("figure1", DIV2K, "bsds500", True, False), ("figure4", DIV2K, "photos", True, False),
         ("figure4", DIV2K, "synthetic", True, True),
         ("figure5", PHANTOM, "synthetic", True, True)],
    )  # fmt: skip
    def test_the_data(self, artefact, task, name, stand_in, synthetic):
        said = caption(artefact, profile="quick", chosen=CHOSEN | {task: name})
        assert name in said
        assert (f"STAND-IN for the paper's {'CIFAR-10' if task == CIFAR else task}" in said) == (
            stand_in
        )
        assert ("SYNTHETIC data" in said) == synthetic
        assert ("bicubic" in said) == (task == DIV2K)

    @pytest.mark.parametrize("artefact", ["figure5", "figure6", "stable"])
    def test_the_phantoms_noise_is_ours(self, artefact):
        said = caption(artefact)
        assert "noise of 0.1 of the full range was added (our choice, SYNTHETIC)" in said

    @pytest.mark.parametrize("artefact", CURVES)
    @pytest.mark.parametrize("profile", COMPUTING_PROFILES)
    def test_extent(self, artefact, profile):
        said = caption(artefact, profile=profile, seeds=(0,))
        scaled = profile in ("smoke", "quick")
        assert bool(re.search(r"batch sizes [\d.]+ of the paper's", said)) == scaled
        assert "F is the mean of the mini-batches' losses" in said
        assert said.count("Model: ") >= 1 and "epochs (paper" in said
        assert ("bfloat16" in said) == (profile == "gpu")
        resnet = artefact in ("figure2", "figure3", "figure10")
        whole = profile == "paper" or (profile == "gpu" and resnet)
        assert ("in the place of the paper's" not in said) == whole

    @pytest.mark.parametrize("profile", ["quick", "paper"])
    def test_restoration_is_told_in_full(self, profile):
        said = caption("figure4", profile=profile, seeds=(0,))
        factor = {"quick": 5, "paper": 1}[profile]
        assert f"rates {factor} times the paper's" in said
        assert "0.1 dB for 50 epochs" in said and "one crop of each to validate" in said
        if profile == "quick":
            assert "batch sizes 0.25 of the paper's" in said
        # All four strategies are at one scale: it is said once.
        assert said.count("training and") == 1

    def test_the_device(self):
        assert "Trained on a CPU (1 thread)." in caption("figure4")
        assert "Trained on NVIDIA X." in caption("figure4", World(device=GPU))

    @pytest.mark.parametrize("artefact", DESIGN.artefacts)
    def test_gaps_are_said(self, artefact):
        assert "Not run yet." in caption(artefact, World(status=nothing))
        count = len(made_results(artefact).records)
        assert f"{count} runs FAILED." in caption(artefact, World(status=lambda run: FAILED))
        lost = caption(artefact, World(status=lambda run: OUT_OF_MEMORY))
        assert f"{count} runs ran out of memory." in lost

    def test_missing_and_stale_runs_are_counted(self):
        assert "9 of 12 runs are missing." in caption(
            "figure4", World(status=only_strategies("theta"))
        )
        full = made_results("figure4")
        stale = Results([r for r, _ in full.expected], (0, 1, 2), full.records, lambda r: False)
        assert "STALE records, whose code has changed since: 12." in DESIGN.artefacts[
            "figure4"
        ].caption(stale)

    def test_the_third_methods_rate_is_told(self):
        for artefact in ("figure4", "figure10"):
            assert "rates that grow for the third method" in caption(artefact)


def test_communications_are_paired_by_seed():
    def world(run, seed):
        lost = run.config["strategy"] == "theta" and seed == 0
        return None if lost else World(length=lambda c, s: 30 * (s + 1))(run, seed)

    pairs = tables.communications(made_results("figure4", world), DIV2K)
    found = [(a.config["strategy"], a.seed, b.config["strategy"], b.seed) for a, b in pairs]
    assert found == [("best", n, "theta", n) for n in (1, 2)]
    assert [sum(best.metrics["updates"]) for best, _ in pairs] == [50 * 60, 50 * 90]
