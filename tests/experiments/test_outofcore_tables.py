"""The tables, figures and captions of out-of-core training: values, gaps, what is said aloud."""

import itertools
from typing import ClassVar

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from test_outofcore_checks import (
    FAILED,
    GPU,
    OUT_OF_MEMORY,
    PAPER,
    PEERS,
    REACH,
    World,
    made_results,
)

from repro import report
from repro.experiments.design import Results
from repro.experiments.outofcore import drawings, grids, tables
from repro.experiments.outofcore.grids import DEEPLAB, DENSENET, PIX2PIXHD, RESNET, ROLES
from repro.experiments.outofcore.reading import LABELS, MEASURED, SIMULATED
from repro.experiments.outofcore.tables import PLACES

DASH = report.DASH
REPORTED = grids.PAPER
FULL = World()
# On a CPU, by network: in core, with scheduling alone, with chunks.
BASE, ALONE, WITH_VA = ({role: REACH["quick"][role][k] for role in ROLES} for k in range(3))
YLABELS = {"images/s", "memory (GiB)", "memory (MiB)", "images/s over the\nlargest in core"}


def nothing(run):
    return None


def table(artefact, make=FULL, profile="quick") -> pd.DataFrame:
    return PAPER.artefacts[artefact].table(made_results(artefact, make, profile))


def figure(artefact, make=FULL, profile="quick") -> Figure:
    return PAPER.artefacts[artefact].figure(made_results(artefact, make, profile))


def caption(artefact, make=FULL, profile="quick") -> str:
    return PAPER.artefacts[artefact].caption(made_results(artefact, make, profile))


def row_of(frame: pd.DataFrame, *cells) -> pd.Series:
    """Return the row that begins with these cells, without them."""
    (found,) = [row for _, row in frame.iterrows() if tuple(row.iloc[: len(cells)]) == cells]
    return found.iloc[len(cells) :]


def panels(drawn: Figure) -> dict:
    return {axis.get_title(): axis for axis in drawn.axes if axis.get_visible()}


def curves(axis) -> dict[str, list[tuple[float, float]]]:
    return {
        line.get_label(): list(zip(*line.get_data(), strict=True))
        for line in axis.get_lines()
        if line.get_label() != "memory limit"
    }


def limit_of(axis) -> float | None:
    lines = [line for line in axis.get_lines() if line.get_label() == "memory limit"]
    return lines[0].get_ydata()[0] if lines else None


def legend_of(drawn: Figure) -> list[str]:
    (legend,) = drawn.legends
    return [text.get_text() for text in legend.get_texts()]


class TestEveryArtefact:
    MAKERS: ClassVar = {
        "full": {},
        "simulated alone": {"places": (SIMULATED,)},
        "measured alone": {"places": (MEASURED,)},
        "nothing": {"places": ()},
        "all failed": {"status": {(): FAILED}},
        "all out of memory": {"status": {(): OUT_OF_MEMORY}},
        "nothing in core": {"reach": {("in_core",): 0}},
        "in core alone": {"reach": {("schedule",): 0, ("schedule_va",): 0, ("lms",): 0}},
        "chunks alone": {"status": {("in_core",): None, ("schedule",): FAILED, (SIMULATED,): None}},
    }

    @pytest.mark.parametrize("kind", MAKERS)
    @pytest.mark.parametrize("profile", ["smoke", "quick", "gpu", "paper"])
    def test_table_and_caption_of_whatever_there_is(self, kind, profile):
        for artefact in PAPER.artefacts.values():
            world = World(profile, **self.MAKERS[kind])
            results = made_results(artefact.name, world, profile)
            frame = artefact.table(results)
            assert len(set(frame.columns)) == len(frame.columns)
            text = frame.to_string()
            assert "nan" not in text.lower() and "None" not in text, artefact.name
            assert report.to_html(frame) and report.to_rich(frame, artefact.title)
            assert artefact.caption(results)

    @pytest.mark.parametrize("kind", MAKERS)
    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_figure_of_whatever_there_is(self, kind, artefact):
        drawn = figure(artefact, World(**self.MAKERS[kind]))
        assert isinstance(drawn, Figure)
        if kind in ("full", "nothing"):
            FigureCanvasAgg(drawn).draw()  # a missing glyph or a layout that does not fit warns
        assert plt.get_fignums() == []
        assert panels(drawn) and all(panels(drawn)), "a panel has no title"
        assert len(panels(drawn)) == sum(axis.get_visible() for axis in drawn.axes)
        assert len(drawn.legends) == 1 and all(a.get_legend() is None for a in drawn.axes)
        shown = {line.get_label() for axis in drawn.axes for line in axis.get_lines()}
        assert set(legend_of(drawn)) == shown and len(legend_of(drawn)) == len(shown)

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    @pytest.mark.parametrize("profile", ["quick", "gpu"])
    def test_axes_are_labelled_with_units(self, artefact, profile):
        drawn = figure(artefact, World(profile), profile)
        for axis in panels(drawn).values():
            assert axis.get_xlabel().startswith("batch size")
        first = [axis for axis in drawn.axes if axis.get_subplotspec().is_first_col()]
        assert first and {axis.get_ylabel() for axis in first} <= YLABELS
        assert all(axis.get_ylim()[0] == 0 for axis in drawn.axes)

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_a_gpus_figure_is_drawn(self, artefact):
        drawn = figure(artefact, World("gpu"), "gpu")
        FigureCanvasAgg(drawn).draw()
        assert all(panels(drawn))

    def test_every_curve_has_a_style(self):
        assert set(LABELS.values()) <= set(drawings.STYLES)


class TestTable1:
    HEADS: ClassVar = [
        "64 (0.34×)", "128 (0.67×)", "190 (1×)", "256 (1.3×)", "512 (2.7×)", "928 (4.9×)",
        "1120 (5.9×)", "1248 (6.6×)", "1440 (7.6×)",
    ]  # fmt: skip

    def rows(self, make=FULL, profile="quick") -> dict[tuple[str, str], list[str]]:
        frame = table("table1", make, profile)
        assert list(frame.columns) == ["where", "method", *self.HEADS]
        found = {(row[0], row[1]): list(row[2:]) for row in frame.to_numpy().tolist()}
        assert len(found) == len(frame)
        return found

    @pytest.mark.parametrize("profile", ["smoke", "quick", "gpu"])
    @pytest.mark.parametrize("make", [nothing, None])
    def test_the_papers_rows(self, profile, make):
        rows = self.rows(make or World(profile), profile)
        assert rows["paper, V100", "in core"] == ["336", "492", "581", *"xxxxxx"]
        assert rows["paper, V100", "schedule"] == [
            "320", "439", "533", "559", "457", "400", "x", "x", "x",
        ]  # fmt: skip
        assert rows["paper, V100", "schedule + VA"] == [
            "304", "389", "415", "424", "446", "409", "398", "347", "321",
        ]  # fmt: skip
        assert rows["paper", "LMS, P100 (Le et al.)"] == [
            "235", "255", "241", "236", "209", "137", "x", "x", "x",
        ]  # fmt: skip
        assert rows["paper", "in core, P100 (Le et al.)"] == ["235", "255", "258", *"xxxxxx"]
        assert (len(rows) == 5) == (make is nothing)

    def test_they_are_the_reported_ones(self):
        reported = REPORTED["table1"]
        rows = self.rows(nothing)
        assert [int(head.split()[0]) for head in self.HEADS] == reported["batches"]
        for (_, label), key in zip(
            rows, ("lms_in_core", "lms", "in_core", "schedule", "schedule_va"), strict=True
        ):
            texts = ["x" if value != value else str(value) for value in reported[key]]
            assert rows[("paper" if "P100" in label else "paper, V100", label)] == texts

    def test_simulated(self):
        rows = self.rows(World(status={(SIMULATED, 1120): None, (SIMULATED, 1248): FAILED}))
        place = "simulated, V100"
        assert rows[place, "in core"] == ["80", "80", "100", "x", "x", "x", DASH, DASH, "x"]
        assert rows[place, "schedule"] == [*["70"] * 6, DASH, DASH, "x"]
        assert rows[place, "schedule + VA"] == [*["75"] * 6, DASH, DASH, "75"]
        # LMS is planned at some of the sizes only.
        assert rows[place, "LMS"] == [*[DASH] * 3, *["60"] * 3, *[DASH] * 3]
        assert self.rows()[place, "LMS"][6] == "x"

    def test_measured_on_a_cpu_has_sizes_of_its_own(self):
        world = World(status={("schedule", 71): None, ("schedule", 79): FAILED})
        rows = self.rows(world)
        place = "measured here"
        sizes = (4, 8, 12, 16, 32, 59, 71, 79, 91)
        assert rows[place, "batch size"] == [f"N = {size}" for size in sizes]
        assert rows[place, "in core"] == ["80", "80", "100", *"xxxxxx"]
        assert rows[place, "schedule"] == [*["70"] * 6, DASH, DASH, "x"]
        assert rows[place, "schedule + VA"] == ["75"] * 9
        assert rows[place, "checkpointing"] == [*["60"] * 5, *"xxxx"]
        assert {method for where, method in rows if where == place} == {
            "batch size", "in core", "schedule", "schedule + VA", "checkpointing",
        }  # fmt: skip

    def test_each_size_stands_under_the_nearest_proportion(self):
        for size, head in zip(grids.BATCHES["quick"], self.HEADS, strict=True):
            ratio = float(head.split("(")[1].rstrip("×)"))
            assert size / BASE[RESNET] == pytest.approx(ratio, rel=0.04)

    def test_measured_on_a_gpu_has_the_papers(self):
        world = World("gpu", status={(MEASURED, 512): None, ("save_on_cpu", 64): None})
        rows = self.rows(world, "gpu")
        place = "measured here"
        batches = (64, 128, 190, 256, 512, 928, 1120, 1248, 1440)
        assert rows[place, "batch size"] == [f"N = {b}" if b != 512 else "" for b in batches]
        assert rows[place, "schedule"] == [*["70"] * 4, DASH, "70", "x", "x", "x"]
        assert rows[place, "save_on_cpu"] == [DASH, *["50"] * 3, DASH, *"xxxx"]
        expandable = rows[place, "in core, expandable segments"]
        assert expandable == ["80", "80", "100", "x", DASH, *"xxxx"]
        assert {LABELS[peer] for peer in PEERS} <= {method for _, method in rows}

    @pytest.mark.parametrize(
        ("relative", "text"),
        [(0.1234, "12.3"), (0.1999, "20.0"), (0.2001, "20"), (0.756, "76"), (12.345, "1,234")],
    )
    def test_digits(self, relative, text):
        rows = self.rows(World(relative={(MEASURED, "schedule_va", 91): relative}))
        assert rows["measured here", "schedule + VA"][-1] == text

    @pytest.mark.parametrize("missing", [4, 32])
    def test_a_missing_size_leaves_its_column_empty(self, missing):
        full, rows = self.rows(), self.rows(World(status={(MEASURED, missing): None}))
        column = grids.BATCHES["quick"].index(missing)
        expected = list(full["measured here", "schedule"])
        expected[column] = DASH
        assert rows["measured here", "schedule"] == expected

    def test_smokes_sizes_do_not_stand_under_other_proportions(self):
        rows = self.rows(World("smoke"), "smoke")
        sizes = rows["measured here", "batch size"]
        assert sizes.index("N = 4") == self.HEADS.index("190 (1×)")
        assert "N = 16" not in sizes[: self.HEADS.index("512 (2.7×)")]
        assert rows["measured here", "in core"].count("100") == 1

    def test_the_figure(self):
        drawn = figure("table1")
        titles = [
            "paper: V100, and P100 for LMS",
            "simulated, V100, in core up to 190",
            "measured here, in core up to 12",
        ]
        assert list(panels(drawn)) == titles
        paper, simulated, measured = map(curves, panels(drawn).values())
        assert paper["in core"][-1] == pytest.approx((1.0, 1.0))
        assert paper["schedule + VA"][-1] == pytest.approx((1440 / 190, 321 / 581))
        assert paper["LMS"][-1] == pytest.approx((928 / 190, 137 / 258))
        assert [len(paper[key]) for key in ("in core", "schedule", "schedule + VA", "LMS")] == [
            3, 6, 9, 6,
        ]  # fmt: skip
        assert simulated["schedule"][-1] == pytest.approx((928 / 190, 0.7))
        assert measured["schedule + VA"][-1] == pytest.approx((91 / 12, 0.75))
        assert measured["checkpointing"][-1] == pytest.approx((32 / 12, 0.6))
        assert "LMS" not in measured and "checkpointing" not in simulated
        for axis in panels(drawn).values():
            assert axis.get_xlabel() == "batch size over the largest in core"

    def test_the_figure_without_records_is_the_papers(self):
        assert list(panels(figure("table1", nothing))) == ["paper: V100, and P100 for LMS"]


class TestFigure3:
    def test_the_cells(self):
        frame = table("figure3")
        row = row_of(frame, "simulated, V100", 928)
        assert (row["limit"], row["paper: budget"]) == ("16.00 GiB", "8 GiB")
        assert (row["budget"], row["held"], row["actual"]) == (
            "8.00 GiB", "14.40 GiB", "14.40 GiB",
        )  # fmt: skip
        assert (row["budget, VA"], row["actual, VA"]) == ("13.60 GiB", "15.20 GiB")
        row = row_of(frame, "measured here", 59)
        assert (row["limit"], row["paper: budget"]) == ("64.0 MiB", DASH)
        assert (row["budget"], row["held"], row["actual"]) == ("32.0 MiB", "56.6 MiB", "57.6 MiB")
        assert (row["budget, VA"], row["held, VA"], row["actual, VA"]) == (
            "54.4 MiB", "59.8 MiB", "60.8 MiB",
        )  # fmt: skip
        assert len(frame) == 18
        assert sorted(set(frame["paper: budget"])) == ["8 GiB", DASH]

    def test_the_papers_budget_is_the_reported_one(self):
        frame = table("figure3", World("gpu"), "gpu")
        for place in PLACES.values():
            budget = f"{REPORTED['claims']['budget_gib_928']} GiB"
            assert row_of(frame, place, 928)["paper: budget"] == budget

    def test_out_of_memory_and_not_run(self):
        world = World(status={("schedule", 32): None, ("schedule", 16): FAILED})
        frame = table("figure3", world)
        for place, size in (("simulated, V100", 1440), ("measured here", 91)):
            row = row_of(frame, place, size)
            assert (row["budget"], row["held"], row["actual"]) == ("x", "x", "x")
            assert row["budget, VA"] not in ("x", DASH)
        for size in (16, 32):
            row = row_of(frame, "measured here", size)
            assert (row["budget"], row["held"], row["actual"]) == (DASH, DASH, DASH)
            assert row["budget, VA"] not in ("x", DASH)
        frame = table("figure3", World(status={(SIMULATED, 512): FAILED}))
        failed = frame[(frame["where"] == "simulated, V100") & (frame["batch"] == 512)]
        assert (failed[["budget", "budget, VA", "held", "actual"]] == DASH).all(axis=None)

    def test_a_reserve_that_is_unknown(self):
        def make(run):
            made = FULL(run)
            if made and made.get("metrics", {}).get("budget_bytes"):
                made["metrics"]["reserved_bytes"] = None
            return made

        frame = table("figure3", make)
        measured = frame[frame["where"] == "measured here"]
        assert set(measured["actual, VA"]) == {DASH}
        axis = panels(figure("figure3", make))["measured here: schedule + VA"]
        assert "actual" not in curves(axis)

    def test_no_peers(self):
        results = made_results("figure3", FULL)
        modes = {record.config.get("mode") for record in results.records}
        assert modes == {None, "in_core", "schedule", "schedule_va"}

    def test_the_figure(self):
        drawn = figure("figure3")
        shown = panels(drawn)
        assert list(shown) == [
            "simulated, V100: schedule", "simulated, V100: schedule + VA",
            "measured here: schedule", "measured here: schedule + VA",
        ]  # fmt: skip
        assert [limit_of(axis) for axis in shown.values()] == [16, 16, 64, 64]
        assert drawn.axes[0].get_ylabel() == "memory (GiB)"
        assert drawn.axes[2].get_ylabel() == "memory (MiB)"
        found = curves(shown["simulated, V100: schedule"])
        assert found["budget"][-1] == pytest.approx((928, 8.0))
        assert found["actual"][-1] == pytest.approx((928, 14.4))
        assert len(found["budget"]) == 6
        found = curves(shown["measured here: schedule + VA"])
        assert found["budget"][-1] == pytest.approx((91, 54.4))
        assert found["actual"][0] == pytest.approx((4, 60.8))
        assert legend_of(drawn) == ["budget", "actual", "memory limit"]

    def test_one_place_alone(self):
        drawn = figure("figure3", World("gpu", (MEASURED,)), "gpu")
        assert list(panels(drawn)) == ["measured here: schedule", "measured here: schedule + VA"]
        assert drawn.axes[0].get_ylabel() == "memory (GiB)"

    def test_without_records_it_says_so(self):
        assert list(panels(figure("figure3", nothing))) == ["no records"]


class TestGrowth:
    MODES: ClassVar = ["in core", "schedule", "schedule + VA"]

    def test_throughput(self):
        frame = table("figure4")
        for cells, over, shown in (
            ((DEEPLAB, "simulated, V100", 144), "16×", ["x", "x", "120"]),
            ((PIX2PIXHD, "simulated, V100", 5), "1×", ["100", "120", "120"]),
            ((PIX2PIXHD, "simulated, V100", 36), "7.2×", ["x", "x", "120"]),
        ):
            row = row_of(frame, *cells)
            assert (row["over in core"], list(row[self.MODES])) == (over, shown)
        for role in ROLES[1:]:
            row = row_of(frame, role, "measured here", WITH_VA[role])
            alone = "120" if WITH_VA[role] == ALONE[role] else "x"
            assert list(row[self.MODES]) == ["x", alone, "120"]
            assert row["over in core"] == f"{WITH_VA[role] / BASE[role]:.2g}×"
            row = row_of(frame, role, "measured here", ALONE[role])
            assert list(row[self.MODES]) == ["x", "120", "120"]
            for place, sizes in zip(PLACES.values(), (grids.SIMULATED, grids.GROWING), strict=True):
                rows = frame[(frame["network"] == role) & (frame["where"] == place)]
                shown = [batch for batch in rows["batch"] if batch != "largest"]
                assert shown == list(sizes["quick"][role])

    def test_the_largest_batch_sizes(self):
        frame = table("figure4")
        for role in ROLES[1:]:
            row = row_of(frame, role, "simulated, V100", "largest")
            assert list(row[self.MODES]) == [f"N = {size}" for size in REACH[SIMULATED][role]]
        assert list(frame["batch"]).count("largest") == 6  # the paper's and ours
        frame = table("figure4", World(status={("looked for",): FAILED, ("no mode", 9): None}))
        assert set(frame["where"][frame["batch"] == "largest"]) == {"paper, V100"}
        assert "largest" not in set(table("figure5")["batch"])

    def test_memory(self):
        frame = table("figure5")
        row = row_of(frame, DENSENET, "simulated, V100", 128)
        assert list(row) == ["1×", "14.40 GiB", "14.40 GiB", "15.20 GiB", "16.00 GiB"]
        row = row_of(frame, DENSENET, "measured here", BASE[DENSENET])
        # In core the limit is on tensors: what they hold, a MiB less in these records.
        assert list(row) == ["1×", "56.6 MiB", "57.6 MiB", "60.8 MiB", "64.0 MiB"]
        row = row_of(frame, DENSENET, "measured here", WITH_VA[DENSENET])
        assert list(row[self.MODES]) == ["x", "x", "60.8 MiB"]

    @pytest.mark.parametrize("artefact", ["figure4", "figure5"])
    def test_not_run_and_failed(self, artefact):
        size = ALONE[DENSENET]
        status = {
            (DENSENET, "schedule", size): None,
            (DENSENET, "schedule_va", size): FAILED,
            (SIMULATED, DENSENET, 512): FAILED,
            (SIMULATED, DENSENET, 1536): None,
            (MEASURED, PIX2PIXHD): None,
        }
        frame = table(artefact, World(status=status))
        row = row_of(frame, DENSENET, "measured here", size)
        assert list(row[self.MODES]) == ["x", DASH, DASH]
        row = row_of(frame, DENSENET, "simulated, V100", 512)
        assert list(row[self.MODES]) == [DASH] * 3
        places = set(zip(frame["network"], frame["where"], strict=True))
        assert (PIX2PIXHD, "measured here") not in places
        assert (PIX2PIXHD, "simulated, V100") in places
        assert (DENSENET, 1536) not in set(zip(frame["network"], frame["batch"], strict=True))

    def test_where_nothing_fits_in_core_there_is_no_proportion(self):
        frame = table("figure5", World(reach={("in_core",): 0}))
        assert set(frame["over in core"]) == {DASH} and set(frame["in core"]) == {"x"}

    @pytest.mark.parametrize("profile", ["quick", "gpu"])
    def test_a_gpus_sizes(self, profile):
        frame = table("figure5", World(profile), profile)
        measured = frame[frame["where"] == "measured here"]
        assert set(measured["limit"]) == {"16.00 GiB" if profile == "gpu" else "64.0 MiB"}
        assert len(measured) == sum(map(len, grids.GROWING[profile].values()))

    def test_the_papers_values_are_beside_ours(self):
        frame = table("figure4")
        paper = frame[frame["where"] == "paper, V100"].set_index("network")
        assert dict(paper["in core"]) == {
            "DenseNet": "N = 512", "Pix2PixHD": "N = 4", "DeepLabv3+": "N = 6",
        }  # fmt: skip
        assert list(paper["schedule"]) == ["1.5× that", "4× that", "5.3× that"]
        assert set(paper["schedule + VA"]) == {"1.5 to 2× that"}

    def test_the_figure_of_throughput(self):
        drawn = figure("figure4")
        assert list(panels(drawn)) == [
            f"{role}, {place}" for place, role in itertools.product(PLACES.values(), ROLES[1:])
        ]
        found = curves(panels(drawn)["DeepLabv3+, simulated, V100"])
        assert found["in core"][-1] == pytest.approx((9, 100))
        assert found["schedule"][-2:] == [pytest.approx((9, 120)), pytest.approx((48, 120))]
        assert [size for size, _ in found["schedule + VA"]][-3:] == [9, 48, 144]
        found = curves(panels(drawn)["DenseNet, measured here"])
        assert [size for size, _ in found["schedule"]] == list(REACH["quick"][DENSENET][:2])
        assert all(limit_of(axis) is None for axis in drawn.axes)
        assert drawn.axes[0].get_ylabel() == drawn.axes[3].get_ylabel() == "images/s"
        assert legend_of(drawn) == ["in core", "schedule", "schedule + VA"]

    def test_the_figure_of_memory(self):
        drawn = figure("figure5")
        shown = panels(drawn)
        assert [limit_of(axis) for axis in shown.values()] == [16] * 3 + [64] * 3
        assert drawn.axes[0].get_ylabel() == "memory (GiB)"
        assert drawn.axes[3].get_ylabel() == "memory (MiB)"
        found = curves(shown["Pix2PixHD, simulated, V100"])
        assert found["schedule + VA"][-1] == pytest.approx((36, 15.2))
        found = curves(shown["Pix2PixHD, measured here"])
        assert found["in core"] == [pytest.approx((BASE[PIX2PIXHD], 56.6))]
        assert found["schedule"][-1] == pytest.approx((ALONE[PIX2PIXHD], 57.6))
        assert legend_of(drawn) == ["in core", "schedule", "schedule + VA", "memory limit"]

    def test_curves_and_limit_have_the_same_unit_where_a_network_is_missing(self):
        drawn = figure("figure5", World(status={(DEEPLAB,): None}))
        row = [axis for title, axis in panels(drawn).items() if "measured" in title]
        scale = {"memory (GiB)": 1024.0, "memory (MiB)": 1.0}[row[0].get_ylabel()]
        assert limit_of(row[0]) * scale == pytest.approx(64)
        assert curves(row[0])["schedule"][-1][1] * scale == pytest.approx(57.6)


class TestUnits:
    def test_whole_gib_from_one_on(self):
        assert tables._unit(2**30) == (2**30, "GiB") and tables._unit(None) == (2**30, "GiB")
        assert tables._unit(2**30 - 1) == (2**20, "MiB")


class TestCaptions:
    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_nothing_run(self, artefact):
        said = caption(artefact, nothing)
        assert said.endswith("Not run yet.") and "Measured on" not in said

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_simulated(self, artefact):
        said = caption(artefact)
        assert "SIMULATED, V100: nothing ran." in said and "16 GiB" in said
        said = caption(artefact, World(places=(MEASURED,)))
        assert "SIMULATED, V100" not in said

    def test_the_largest_that_were_looked_for_are_simulated_too(self):
        said = caption("figure4", World(status={("no mode",): None, ("looked for",): {}}))
        assert "SIMULATED, V100" in said

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_inputs_are_synthetic_where_there_are_any(self, artefact):
        assert "Inputs are SYNTHETIC" in caption(artefact)
        said = caption(artefact, World(places=(SIMULATED,)))
        assert "Inputs are SYNTHETIC" not in said and "Measured on" not in said

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_a_cpus_limit_is_simulated_and_a_gpus_is_not(self, artefact):
        assert "On a CPU the memory limit is SIMULATED" in caption(artefact)
        assert "On a CPU the memory limit is SIMULATED" in caption(
            artefact, World("smoke", (MEASURED,)), "smoke"
        )
        said = caption(artefact, World("gpu"), "gpu")
        assert "On a CPU" not in said and "SIMULATED, V100" in said
        assert "SIMULATED" not in caption(artefact, World("gpu", (MEASURED,)), "gpu")

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_the_device_and_the_papers(self, artefact):
        paper = f"the paper's device is {REPORTED['device']}."
        assert f"Measured on a CPU with 1 thread; {paper}" in caption(artefact)
        assert f"Measured on NVIDIA X; {paper}" in caption(artefact, World("gpu"), "gpu")

    def test_two_devices(self):
        def make(run):
            made = FULL(run)
            return made | {"device": GPU} if run.config.get("batch") == 4 else made

        assert "Measured on NVIDIA X, a CPU with 1 thread; the paper's" in caption("table1", make)

    def test_the_networks_and_their_limits(self):
        said = caption("table1")
        network = (
            "ResNet-50 is resnet50 (width 16) on 20×20 pixels with a limit that 12 images need"
        )
        assert said.count("ResNet-50 is ") == 1
        assert network in said
        said = caption("figure4")
        assert [said.count(f"{role} is ") for role in ROLES] == [0, 1, 1, 1]
        assert "DenseNet is densenet40 (growth 12) on 16×16 pixels" in said
        said = caption("table1", World("gpu"), "gpu")
        network = "ResNet-50 is torchvision/resnet50 on 224×224 pixels with a limit of 16.00 GiB."
        assert network in said

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_missing_failed_and_stale(self, artefact):
        said = caption(artefact)
        assert not any(word in said for word in ("missing", "FAILED", "STALE"))
        status = {("schedule_va",): None, ("in_core",): FAILED}
        results = made_results(artefact, World(status=status))
        assert results.missing == len(results.failed) > 0
        said = PAPER.artefacts[artefact].caption(results)
        count = results.missing
        assert f"{count} runs FAILED." in said
        assert f"{count} of {len(results.expected)} runs are missing." in said

        runs = [run for run, _ in results.expected]
        old = Results(runs, (0,), results.records, lambda record: record.experiment == SIMULATED)
        measured = sum(record.experiment != SIMULATED for record in results.records)
        said = PAPER.artefacts[artefact].caption(old)
        assert f"{measured} records are STALE: their code has changed since." in said

    @pytest.mark.parametrize("artefact", PAPER.artefacts)
    def test_what_x_means(self, artefact):
        assert "x: out of memory, or no budget" in caption(artefact)

    def test_titles_and_sources(self):
        assert [a.source for a in PAPER.artefacts.values()] == [
            "Table 1", "Figure 3", "Figure 4", "Figure 5",
        ]  # fmt: skip
        assert all(a.title and a.figure for a in PAPER.artefacts.values())
