"""Tables, figures and captions: the paper's column beside ours, and what differs said aloud."""

from typing import ClassVar

import matplotlib.pyplot as plt
import numpy as np
import pytest
from invented import DIGITS
from made import (
    FAILED,
    INITIAL,
    ONE_UPDATE,
    OUT_OF_MEMORY,
    PAPER,
    made_results,
    overhead,
    trained,
)
from matplotlib.figure import Figure

from repro.experiments import sources
from repro.report import figure_png

NOISE = (-0.5, 0.0, 0.5)  # mean 0, sample standard deviation 0.5


def plausible(run, seed):
    """Return an outcome as the paper has it: trained where it fits or is streamed."""
    if run.experiment == "size":
        metrics = {
            "limit_bytes": 3 * 2**20,
            "largest_that_fits": run.config["limit_fits"] // 2,
            "predicted_largest": 17,
            "auto_micro_batch": 12,
            "auto_prediction_error": -0.0123,
        }
        return {"metrics": metrics}
    if run.experiment == "overhead":
        return overhead(1.5)
    if run.experiment == "timeline":
        spans = [["copy", 0, 0.0, 0.01], ["compute", 0, 0.01, 0.03]]
        return {
            "metrics": {
                "spans": spans, "update": [0.03, 0.035], "copied": "host to device", **ONE_UPDATE,
                "micro_batches": 1,
            }
        }  # fmt: skip
    role, size = run.config["role"], run.config["mini_batch"]
    if run.config["limit_fits"] and not run.config["micro_batch"] and size > INITIAL[role]:
        return OUT_OF_MEMORY
    name = "iou" if role == "U-Net" else "accuracy"
    return trained(60 + NOISE[seed], 70 + NOISE[seed], name=name, epoch_s=10.0 + NOISE[seed])


def table(artefact, make=plausible, profile="gpu"):
    return PAPER.artefacts[artefact].table(made_results(artefact, make, profile))


class TestEveryArtefact:
    MAKERS: ClassVar = {
        "plausible": plausible,
        "nothing": lambda run, seed: None,
        "all failed": lambda run, seed: FAILED,
        "all out of memory": lambda run, seed: OUT_OF_MEMORY,
        "one seed": lambda run, seed: plausible(run, seed) if seed == 0 else None,
    }

    @pytest.mark.parametrize("kind", MAKERS)
    @pytest.mark.parametrize("profile", ["smoke", "quick", "gpu"])
    def test_table_caption_and_figure_of_whatever_there_is(self, kind, profile):
        for artefact in PAPER.artefacts.values():
            results = made_results(artefact.name, self.MAKERS[kind], profile)
            frame = artefact.table(results)
            assert len(frame) and len(set(frame.columns)) == len(frame.columns)
            assert "nan" not in frame.to_string().lower()
            assert artefact.caption(results)
            if artefact.figure is not None and profile == "gpu":
                figure = artefact.figure(results)
                assert isinstance(figure, Figure)
                assert figure_png(figure, dpi=50)
        assert plt.get_fignums() == []

    def test_every_table_has_the_papers_column_n_and_difference(self):
        for artefact in PAPER.artefacts.values():
            columns = [str(column) for column in table(artefact.name).columns]
            assert "n" in columns
            if artefact.name != "figure2":  # a drawing, without numbers
                assert any("paper" in column for column in columns), artefact.name
                assert any("ours" in column or "fits" in column for column in columns)
                assert "difference" in columns

    def test_on_the_smoke_records(self, smoke):
        source = sources.Source("local", "smoke", smoke.store)
        for artefact in PAPER.artefacts.values():
            results = sources.results_of(PAPER, artefact, source)
            cells = artefact.table(results).astype(str).to_numpy().ravel()
            assert "error" not in cells and "nan" not in cells
            caption = artefact.caption(results)
            assert "missing" not in caption and "STALE" not in caption


class TestTable1:
    def test_the_cells(self):
        frame = table("table1")
        assert len(frame) == 8
        row = frame.iloc[3]  # ResNet-50, high resolution, large mini-batch
        assert (row["model"], row["image, paper"], row["image, ours"]) == (
            "ResNet-50", "224 px", "224 px",
        )  # fmt: skip
        assert (row["mini-batch, paper"], row["mini-batch, ours"]) == ("16", 16)
        assert (row["paper (%)"], row["ours (%)"]) == ("83.74", "70.00 ± 0.50")
        assert (row["n"], row["difference"]) == (3, "-13.74")
        assert list(frame["image, ours"][:2]) == ["32 px"] * 2

    def test_the_large_mini_batch_alone_is_not_taken_for_the_small_one(self):
        """An interrupted grid must not set a value beside the wrong one of the paper's."""

        def large_only(run, seed):
            return plausible(run, seed) if run.config["mini_batch"] == 16 else None

        for make in (large_only, lambda run, seed: None, plausible):
            assert len(table("table1", make)) == 8
        frame = table("table1", large_only)
        published = frame["mini-batch, paper"].astype(str)
        small, large = (frame[published.str.startswith(size)] for size in ("2", "16"))
        assert list(large["ours (%)"]) == ["70.00 ± 0.50"] * 4
        assert set(small["n"]) == {0}


class TestTable2:
    def test_the_cells(self):
        frame = table("table2")
        assert list(frame["model"]) == ["ResNet-50", "ResNet-101", "AmoebaNet-D", "U-Net"]
        assert list(frame["mini-batch, paper"]) == [16, 8, 32, 16]
        assert list(frame["μ-batch, paper"]) == [8, 4, 16, 8]
        assert list(frame["μ-batch, ours"]) == [4, 2, 8, 4]
        assert list(frame["difference"]) == ["-8", "-4", "-16", "-8"]
        assert set(frame["limit (MiB)"]) == {"3.0"}
        assert set(frame["prediction error"]) == {"-1.23 %"}


class TestTable3:
    def test_the_cells(self):
        frame = table("table3")
        assert list(frame["paper"]) == ["95.48 ± 0.13", "95.45 ± 0.26"]
        assert list(frame["ours"]) == ["70.00 ± 0.50"] * 2
        assert list(frame["difference"]) == ["-25.48", "-25.45"]
        assert list(frame["n"]) == [3, 3]


class TestTables4And5:
    def test_every_row_of_the_paper_twice(self):
        assert len(table("table4")) == 2 * (7 + 8 + 6)
        assert len(table("table5")) == 2 * 7

    def test_without_and_with(self):
        frame = table("table4")
        (row,) = frame[
            (frame["model"] == "ResNet-50") & (frame["mini-batch"] == 16)
            & (frame["MBS"] == "without")
        ].to_dict("records")  # fmt: skip
        assert row["paper (%)"] == "87.16 ± 0.33" and row["paper (s/epoch)"] == "226.80 ± 0.01"
        assert row["ours (%)"] == "70.00 ± 0.50" and row["difference"] == "-17.16"
        assert row["ours (s/epoch)"] == "10.00 ± 0.50" and row["n"] == 3
        (row,) = frame[
            (frame["model"] == "ResNet-50") & (frame["mini-batch"] == 128)
            & (frame["MBS"] == "with")
        ].to_dict("records")  # fmt: skip
        assert row["paper (%)"] == "89.61 ± 0.14" and row["μ-batch"] == 16

    @pytest.mark.parametrize("artefact", ["table4", "table5"])
    def test_failed_in_the_paper_is_out_of_memory_here(self, artefact):
        frame = table(artefact)
        failed = frame[frame["paper (%)"] == "Failed"]
        assert len(failed) == len(frame) // 2 - len(set(frame["model"]))
        assert set(failed["MBS"]) == {"without"}
        for column in ("ours (%)", "ours (s/epoch)"):
            assert set(failed[column]) == {"out of memory"}
        assert set(failed["paper (s/epoch)"]) == {"Failed"}
        assert set(failed["difference"]) == {"–"}
        assert set(failed["n"]) == {3}

    def test_what_failed_and_what_was_not_run(self):
        def make(run, seed):
            if run.config["mini_batch"] == 64:
                return FAILED
            return None if run.config["mini_batch"] == 128 else plausible(run, seed)

        frame = table("table5", make)
        assert set(frame[frame["mini-batch"] == 64]["ours (%)"]) == {"error"}
        assert set(frame[frame["mini-batch"] == 128]["ours (%)"]) == {"not run"}
        assert set(frame[frame["mini-batch"] == 128]["n"]) == {0}

    def test_one_seed_that_failed_does_not_hide_the_others(self):
        def make(run, seed):
            return FAILED if seed == 1 else plausible(run, seed)

        frame = table("table5", make)
        row = frame[(frame["mini-batch"] == 16)].iloc[0]
        assert (row["n"], row["ours (%)"]) == (2, "70.00 ± 0.71")


class TestFigures:
    def test_figure2_counts_stages(self):
        frame = table("figure2")
        assert list(frame["stage"])[:3] == [
            "host to device",
            "forward + backward",
            "optimizer step",
        ]
        assert list(frame["in all (ms)"])[:3] == ["10.00", "20.00", "5.00"]

    def test_figure3_shows_the_last_point(self):
        def make(run, seed):
            return trained(80.0 + NOISE[seed], 70.0 + NOISE[seed])

        frame = table("figure3", make)
        assert len(frame) == 6
        assert set(frame["ours, last accuracy (%)"]) == {"70.00 ± 0.50"}
        assert list(frame["paper, max. accuracy (%)"])[:2] == ["87.16 ± 0.33", "87.04 ± 1.04"]

    def test_figure3_has_a_legend_whichever_model_was_run(self):
        def make(run, seed):
            return plausible(run, seed) if run.config["role"] == "AmoebaNet-D" else None

        figure = PAPER.artefacts["figure3"].figure(made_results("figure3", make))
        labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        assert labels == ["without MBS", "with MBS"]


class TestCaptions:
    def caption(self, artefact="table5", make=plausible, profile="quick"):
        return PAPER.artefacts[artefact].caption(made_results(artefact, make, profile))

    def test_nothing_run(self):
        for artefact in PAPER.artefacts:
            assert "Not run yet." in self.caption(artefact, lambda run, seed: None)

    def test_the_device_and_the_models(self):
        caption = self.caption("table4")
        assert "Measured on a CPU." in caption
        for model in ("ResNet-50 is resnet_cifar (depth 8, width 8)", "AmoebaNet-D is amoebanet_d"):
            assert model in caption

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_synthetic_data_is_named(self, artefact):
        synthetic = DIGITS | {"name": "synthetic", "kind": "synthetic", "provenance": "Made up."}
        caption = self.caption(artefact, lambda run, seed: plausible(run, seed) | {
            "dataset": synthetic})  # fmt: skip
        assert "SYNTHETIC" in caption and "Made up." in caption
        assert "SYNTHETIC" not in self.caption(artefact)

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_a_stand_in_is_named(self, artefact):
        """Digits and photographs are not what the paper trained on, and the caption says so."""
        caption = self.caption(artefact)
        assert "digits" in caption and DIGITS["provenance"].rstrip(".") in caption
        assert "stand-in" in caption

    def test_the_papers_own_data_is_no_stand_in(self):
        own = DIGITS | {"name": "flowers102", "provenance": "Oxford Flowers-102."}
        caption = self.caption("table4", lambda run, seed: plausible(run, seed) | {"dataset": own})
        assert "stand-in" not in caption

    @pytest.mark.parametrize("artefact", ["table2", "table3", "table4", "table5", "figure3"])
    def test_a_simulated_limit_is_named_with_its_size(self, artefact):
        caption = self.caption(artefact)
        assert "SIMULATED" in caption and "3.0 MiB" in caption
        assert "MemoryBudget" in caption

    def test_a_simulated_limit_is_named_where_nothing_fitted(self):
        """The words "out of memory" in a table are then the limit's, all the more."""
        assert "SIMULATED" in self.caption("table4", lambda run, seed: OUT_OF_MEMORY)

    def test_what_has_no_limit_names_none(self):
        def unlimited(run, seed):
            changes = plausible(run, seed)
            metrics = changes.get("metrics", {}) | {"limit_bytes": None}
            config = run.config | {"limit_fits": None}
            return changes | {"metrics": metrics, "config": config}

        assert "SIMULATED" not in self.caption("table5", unlimited, "gpu")

    def test_failed_and_missing_runs_are_counted(self):
        def make(run, seed):
            return (None, FAILED, plausible(run, seed))[seed]

        results = made_results("table3", make)
        caption = PAPER.artefacts["table3"].caption(results)
        assert "2 runs FAILED" in caption and "2 of 6 runs are missing" in caption

    def test_stale_records_are_counted(self):
        results = made_results("table3", plausible)
        results.stale = results.records[:4]
        assert "4 records are STALE" in PAPER.artefacts["table3"].caption(results)

    def test_an_epoch_is_stated(self):
        assert "512 training samples, 4 epochs" in self.caption("table3").replace(";", ",")

    def test_mean_std_of_three(self):
        assert np.std(NOISE, ddof=1) == 0.5
