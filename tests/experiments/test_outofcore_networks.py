"""Figure 4: how far the other networks train beyond the core, and at what speed."""

import pytest
from made import FAILED
from test_outofcore_settings import (
    PAPER,
    REACH,
    World,
    checked,
    curves,
    judged,
    panels,
    paper_name,
    table,
)

from repro.experiments.outofcore import networks, settings
from repro.experiments.outofcore.settings import (
    DEEPLAB,
    DENSENET,
    LABELS,
    MEASURED,
    MODES,
    PIX2PIXHD,
    PLACES,
    ROLES,
    SIMULATED,
)
from repro.report import DASH

# What makes each claim fail.
WRONG = {
    "alone_larger_here": {"reach": {("schedule",): "in_core"}},
    "chunks_larger_here": {"reach": {("schedule_va",): "schedule"}},
    "chunks_cost_here": {"relative": {("schedule_va",): 0.8}},
    "gains_speed": {"relative": {("schedule_va",): 0.9}},
}
SHOWN = [LABELS[mode] for mode in MODES]


def word(key: str, world: World) -> str:
    return judged(f"figure4/{key}", world).word


class TestClaims:
    def test_every_claim_is_tried(self):
        assert list(PAPER.artefacts["figure4"].exhibit.claims) == list(WRONG)

    @pytest.mark.parametrize("key", WRONG)
    def test_as_the_paper_has_it(self, key):
        assert word(key, World("paper")) == "reproduced"

    @pytest.mark.parametrize("key", WRONG)
    def test_otherwise(self, key):
        assert word(key, World("paper", **WRONG[key])) == "not reproduced"

    @pytest.mark.parametrize("key", ["alone_larger_here", "chunks_larger_here"])
    @pytest.mark.parametrize("role", ROLES[1:])
    def test_one_network_that_does_not_is_partly(self, key, role):
        rules = {(role, *cell): value for cell, value in WRONG[key]["reach"].items()}
        assert word(key, World("paper", reach=rules)) == "partly"

    @pytest.mark.parametrize(
        ("words", "wrong"),
        [
            ("Simulated allocators", {"reach": {(DENSENET, "schedule"): "in_core"}}),
            ("Simulated allocators", {"reach": {(DENSENET, "schedule_va"): "schedule"}}),
            ("chunks cost", {"relative": {("schedule_va",): 0.8}}),
        ],
    )
    def test_what_is_simulated_is_a_check(self, words, wrong):
        row = checked("figure4", World(), words)
        assert row["holds"] == "yes" and "DenseNet-121 (for DenseNet)" in row["evidence"]
        assert checked("figure4", World(**wrong), words)["holds"] == "NO"
        assert checked("figure4", World(places=(MEASURED,)), words)["holds"] == "not run"

    @pytest.mark.parametrize("key", ["chunks_cost_here", "gains_speed"])
    def test_rounds_that_scatter_decide_nothing(self, key):
        assert word(key, World("paper", noise=1.0)) == "undecided"

    def test_a_network_without_records_leaves_it_open(self):
        world = World("paper", status={(DENSENET,): None})
        verdict = judged("figure4/alone_larger_here", world)
        assert verdict.word == "undecided" and "DenseNet: no records" in verdict.evidence

    def test_the_largest_that_was_tried_leaves_it_open(self):
        reach = {(PIX2PIXHD, "schedule"): 48, (PIX2PIXHD, "schedule_va"): 48}
        verdict = judged("figure4/chunks_larger_here", World("paper", reach=reach))
        assert verdict.word == "undecided"
        assert "48 is the largest that was tried" in verdict.evidence

    @pytest.mark.parametrize(
        "key", ["alone_larger_here", "chunks_larger_here", "chunks_cost_here", "gains_speed"]
    )
    def test_allocators_are_measured_on_a_gpu_only(self, key):
        verdict = judged(f"figure4/{key}", World())
        assert verdict.word == "not run" and "needs a GPU" in verdict.evidence

    def test_the_largest_batch_sizes_are_named_with_the_papers(self):
        said = judged("figure4/chunks_larger_here", World("paper")).evidence
        paper = "32 schedule + VA over 16 schedule ×2.00, paper ×1.73 (1.3 of the paper's)"
        assert f"Pix2PixHD: {paper}" in said
        assert "DenseNet-121 (for DenseNet): 1024 schedule + VA over 512" in said

    def test_one_size_that_is_faster_is_a_gain_and_is_told_of_how_many(self):
        most = REACH["paper"][PIX2PIXHD][2]
        world = World("paper", relative={("schedule_va",): 0.9, ("schedule_va", most): 1.1})
        verdict = judged("figure4/gains_speed", world)
        assert verdict.word == "reproduced"
        assert f"image of {most}, the fastest of 4 sizes" in verdict.evidence

    @pytest.mark.parametrize(("noise", "expected"), [(0.035, "reproduced"), (0.045, "undecided")])
    def test_the_fastest_of_two_is_judged_by_a_wider_interval(self, noise, expected, monkeypatch):
        monkeypatch.setattr(networks, "on_cpu", lambda results, role: False)
        # One size alone would be clear of 1 up to a noise of 0.052.
        monkeypatch.setitem(settings.GROWING["quick"], PIX2PIXHD, (4, 16, 32))
        monkeypatch.setitem(REACH["quick"], PIX2PIXHD, (4, 16, 32))
        relative = {("schedule_va",): 0.9, ("schedule_va", 32): 1.1}
        assert word("gains_speed", World(relative=relative, noise=noise)) == expected

    def test_what_chunks_cost_in_core_does_not_count(self):
        in_core = {("schedule_va", size): 0.1 for size in (2, 3, 4, 6, 64, 128)}
        verdict = judged("figure4/chunks_cost_here", World("paper", relative=in_core))
        assert verdict.word == "reproduced"
        assert verdict.evidence.count("time of an image") == 6  # two of each network

    def test_sizes_in_core_are_no_gain(self, monkeypatch):
        monkeypatch.setattr(networks, "on_cpu", lambda results, role: False)
        world = World(relative={("schedule_va",): 0.9, ("schedule_va", 4): 9.0})
        assert word("gains_speed", world) == "not reproduced"
        assert word("gains_speed", World(reach={("schedule_va",): "in_core"})) == "not run"

    def test_without_records_nothing_is_run(self):
        for key in WRONG:
            assert word(key, World("paper", places=())) == "not run"


class TestTable:
    def rows(self, world: World) -> dict[tuple[str, str, int | str], list[str]]:
        found = table("figure4", world, world.profile)
        assert {row["network"] for row in found if row["where"] == "simulated, V100"} == {
            "DenseNet-121 (for DenseNet)",
            PIX2PIXHD,
            DEEPLAB,
        }
        cells = {
            (paper_name(row["network"]), row["where"], row["batch"]): [
                row["over in core"],
                *(row[label] for label in SHOWN),
            ]
            for row in found
        }
        assert len(cells) == len(found)
        return cells

    def test_throughput_by_size(self):
        rows = self.rows(World())
        assert rows[DEEPLAB, "simulated, V100", 144] == ["16×", "x", "x", "120"]
        assert rows[PIX2PIXHD, "simulated, V100", 5] == ["1×", "100", "120", "120"]
        assert rows[DENSENET, "measured here", 32] == ["4×", "x", "120", "120"]
        for place, sizes in zip(
            PLACES.values(), (settings.SIMULATED_BATCHES, settings.GROWING), strict=True
        ):
            shown = [batch for role, where, batch in rows if (role, where) == (DENSENET, place)]
            assert [b for b in shown if b != "largest"] == list(sizes["quick"][DENSENET])

    def test_the_largest_batch_sizes_beside_the_papers(self):
        rows = self.rows(World())
        for role in ROLES[1:]:
            ours = [DASH, *(f"N = {size}" for size in REACH[SIMULATED][role])]
            assert rows[role, "simulated, V100", "largest"] == ours
        paper = rows[DEEPLAB, "paper, V100", "largest"]
        assert paper == [DASH, "N = 6", "5.3× that", "1.5 to 2× that"]
        rows = self.rows(World(status={("looked for",): FAILED}))
        assert {where for _, where, batch in rows if batch == "largest"} == {"paper, V100"}

    def test_not_run_and_failed(self):
        rows = self.rows(
            World(
                status={
                    (DENSENET, "schedule", 32): None,
                    (DENSENET, "schedule_va", 32): FAILED,
                    (SIMULATED, DENSENET, 512): FAILED,
                    (MEASURED, PIX2PIXHD): None,
                }
            )
        )
        assert rows[DENSENET, "measured here", 32] == ["4×", "x", DASH, DASH]
        assert rows[DENSENET, "simulated, V100", 512] == ["4×", DASH, DASH, DASH]
        places = {(role, where) for role, where, _ in rows}
        assert (PIX2PIXHD, "measured here") not in places
        assert (PIX2PIXHD, "simulated, V100") in places


def test_the_figure_has_a_panel_for_each_network_and_place():
    shown = panels("figure4", World())
    assert list(shown) == [
        "ours: DenseNet-121 for DenseNet, SIMULATED V100",
        "ours: Pix2PixHD, SIMULATED V100",
        "ours: DeepLabv3+, SIMULATED V100",
        "ours: DenseNet-40 of growth 6 for DenseNet, measured, SIMULATED memory limit",
        "ours: Pix2PixHD of width 8 for Pix2PixHD, measured, SIMULATED memory limit",
        "ours: DeepLabv3+, measured",
    ]
    deeplab = shown["ours: DeepLabv3+, SIMULATED V100"]
    found = curves(deeplab)
    assert found["in core"][-1] == pytest.approx((9, 100))
    assert found["schedule"][-1] == pytest.approx((48, 120))
    assert [size for size, _ in found["schedule + VA"]] == [6, 9, 32, 48, 144]
    assert [tick.get_text() for tick in deeplab.get_xticklabels()] == ["6", "9", "32", "48", "144"]


def test_in_core_shows_around_a_schedule_that_need_not_swap():
    axis = panels("figure4", World())["ours: DeepLabv3+, SIMULATED V100"]
    sizes = {line.get_label(): line.get_markersize() for line in axis.get_lines()}
    assert sizes["in core"] > 1.5 * sizes["schedule"]
