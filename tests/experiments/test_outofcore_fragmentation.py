"""Figures 3 and 5: what chunks do for fragmentation."""

import pytest
from made import FAILED
from test_outofcore_settings import (
    HERE,
    LARGEST,
    PAPER,
    REACH,
    V100,
    World,
    checked,
    curves,
    is_hollow,
    judged,
    limit_of,
    nothing,
    panels,
    paper_name,
    results,
    table,
)

from repro.experiments.outofcore import fragmentation, settings
from repro.experiments.outofcore.settings import (
    DENSENET,
    GIB,
    LABELS,
    MEASURED,
    MIB,
    MODES,
    PIX2PIXHD,
    ROLES,
    SIMULATED,
)
from repro.report import DASH

# What makes each claim fail.
WRONG = {
    "figure3/budget_halved_here": {"budget": {("schedule",): 1.0}},
    "figure3/close_here": {"budget": {("schedule_va",): 0.4}},
    "figure5/fragmented_here": {"budget": {("schedule_va",): 0.4}},
}
# What makes each check of the simulation fail, by its artefact and words of it.
SIMULATED_WRONG = {
    ("figure3", "for its budget"): {"budget": {("schedule",): 0.51}},
    ("figure3", "with chunks less"): {"budget": {("schedule_va",): 0.4}},
    ("figure3", "shrinks"): {"internal": {(1440,): 1900}},
    ("figure5", "loses more"): {"budget": {("schedule_va", PIX2PIXHD, 16): 0.4}},
}


class TestClaims:
    def test_every_claim_is_tried(self):
        keys = [
            f"{a}/{key}"
            for a in ("figure3", "figure5")
            for key in PAPER.artefacts[a].exhibit.claims
        ]
        assert keys == list(WRONG)

    @pytest.mark.parametrize("key", WRONG)
    def test_right_wrong_and_without_records(self, key):
        assert judged(key, World("paper")).word == "reproduced"
        assert judged(key, World("paper", **WRONG[key])).word == "not reproduced"
        assert judged(key, World("paper", places=())).word == "not run"

    @pytest.mark.parametrize("key", WRONG)
    def test_a_cpu_has_no_allocator_to_measure(self, key):
        verdict = judged(key, World())
        assert verdict.word == "not run" and "needs a GPU" in verdict.evidence

    @pytest.mark.parametrize(
        ("share", "word"), [(0.7, "reproduced"), (0.71, "partly"), (1.0, "not reproduced")]
    )
    def test_the_share_of_the_budget_is_judged_on_a_log_scale(self, share, word):
        # 0.5 halves it: its root is half of that.
        world = World("paper", budget={("schedule",): share})
        assert judged("figure3/budget_halved_here", world).word == word

    def test_no_budget_at_all_says_nothing_of_its_share(self):
        world = World("paper", reach={("schedule",): "in_core"})
        verdict = judged("figure3/budget_halved_here", world)
        assert verdict.word == "not run" and "928 images cannot be given any" in verdict.evidence

    def test_use_is_compared_at_the_largest_size_that_trains_both_ways(self):
        world = World("paper", reach={("schedule",): 512})
        evidence = judged("figure3/close_here", world).evidence
        assert "ResNet-50, at 512: 10 % of the memory for 40 %, -30 points" in evidence

    def test_less_than_the_budget_is_nothing_lost(self):
        rules = {"budget": {("schedule_va",): 0.95}, "taken": {("schedule_va",): 0.9}}
        evidence = judged("figure3/close_here", World("paper", **rules)).evidence
        assert "at 928: 0 % of the memory for 40 %" in evidence

    def test_a_network_that_trains_one_way_only_leaves_it_open(self):
        world = World("paper", reach={(PIX2PIXHD, "schedule"): 0})
        verdict = judged("figure5/fragmented_here", world)
        assert verdict.word == "undecided" and "no batch size trains both" in verdict.evidence


class TestSimulated:
    @pytest.mark.parametrize(("artefact", "words"), SIMULATED_WRONG)
    def test_right_wrong_and_without_records(self, artefact, words):
        assert checked(artefact, World(), words)["holds"] == "yes"
        wrong = World(**SIMULATED_WRONG[artefact, words])
        assert checked(artefact, wrong, words)["holds"] == "NO"
        assert checked(artefact, World(places=()), words)["holds"] == "not run"

    def test_a_cpus_allocators_count_with_the_simulated(self):
        evidence = checked("figure5", World(), "loses more")["evidence"]
        assert "DenseNet-121 (for DenseNet), at 512" in evidence
        assert "DenseNet-40 of growth 6 (for DenseNet), at 32" in evidence
        world = World("paper", budget={(MEASURED, "schedule_va"): 0.4})
        assert checked("figure5", world, "loses more")["holds"] == "yes"  # a GPU's are real

    def test_a_network_that_trains_one_way_only_is_no_case(self):
        world = World(reach={(MEASURED, PIX2PIXHD, "schedule"): 0})
        row = checked("figure5", world, "loses more")
        assert row["holds"] == "yes" and "Pix2PixHD of width" not in row["evidence"]

    def test_what_is_lost_inside_is_told_of_every_size_beyond_the_core(self):
        row = checked("figure3", World(), "shrinks")
        assert row["evidence"].startswith("1.70 GiB at 256; 1.45 GiB at 512;")
        world = World(reach={("schedule_va",): 256})
        assert checked("figure3", world, "shrinks")["holds"] == "not run"


class TestFlat:
    @pytest.mark.parametrize(("spread", "holds"), [(0.049, "yes"), (0.051, "NO")])
    def test_the_spread_beyond_the_core(self, spread, holds):
        world = World("paper", taken={("schedule_va", LARGEST): 0.95 - spread})
        row = checked("figure5", world)
        assert row["holds"] == holds
        assert row["evidence"].count(f"within {spread:.1%} of the limit") == 6

    def test_in_core_does_not_count(self):
        taken = {
            (where, role, "schedule_va", REACH[key][role][0]): 0.2
            for where, key in ((SIMULATED, SIMULATED), (MEASURED, "quick"))
            for role in ROLES[1:]
        }
        assert checked("figure5", World(taken=taken))["holds"] == "yes"

    def test_one_size_is_not_enough(self):
        status = {(role, "schedule_va", REACH["quick"][role][1]): None for role in ROLES[1:]}
        row = checked("figure5", World(places=(MEASURED,), status=status))
        assert row["holds"] == "not run"


class TestFigure3:
    def row(self, world: World, where: str, batch: int) -> dict[str, str]:
        found = table("figure3", world, world.profile)
        (row,) = [dict(r) for r in found if (r["where"], r["batch"]) == (where, batch)]
        return row

    def test_the_cells(self):
        row = self.row(World(), "simulated, V100", 928)
        assert (row["limit"], row["paper: budget"]) == ("16.00 GiB", "8 GiB")
        assert (row["budget"], row["held"], row["actual"]) == ("8.00 GiB", "14.40 GiB", "14.40 GiB")
        assert (row["budget, VA"], row["actual, VA"]) == ("13.60 GiB", "15.20 GiB")
        row = self.row(World(), "measured here", 59)
        assert (row["limit"], row["paper: budget"]) == ("64.0 MiB", DASH)
        assert (row["budget"], row["held"], row["actual"]) == ("32.0 MiB", "56.6 MiB", "57.6 MiB")
        assert row["host"] == "30.0 MiB (predicted 32.0 MiB)"
        assert len(table("figure3", World())) == 9 + 4

    def test_out_of_memory_and_not_run(self):
        world = World(status={("schedule", 32): None, ("schedule", 12): FAILED})
        for size, shown in ((91, "x"), (12, DASH), (32, DASH)):
            row = self.row(world, "measured here", size)
            assert {row[name] for name in ("budget", "held", "actual", "host")} == {shown}
            assert row["budget, VA"] not in ("x", DASH)

    def test_the_hosts_memory_is_checked(self):
        assert checked("figure3", World())["holds"] == "yes"
        more = World(foretold={("schedule", 59): 29})
        assert checked("figure3", more)["holds"] != "yes"

    def test_it_has_no_peers(self):
        runs = PAPER.artefacts["figure3"].runs("gpu", {})
        assert {run.config.get("mode") for run in runs} == {None, *MODES}

    def test_the_figure(self):
        shown = panels("figure3", World())
        assert list(shown) == [
            f"schedule {V100}",
            f"schedule + VA {V100}",
            f"schedule {HERE}",
            f"schedule + VA {HERE}",
        ]
        assert [limit_of(axis) for axis in shown.values()] == [16, 16, 64, 64]
        first, *_, last = shown.values()
        assert first.get_ylabel() == "memory (GiB)"
        assert curves(first)["schedule: budget"][-1] == pytest.approx((928, 8.0))
        assert curves(first)["schedule: taken"][-1] == pytest.approx((928, 14.4))
        assert curves(first)["paper"] == [(928, 8)] and is_hollow(first, "paper")
        assert curves(last)["schedule + VA: taken"][0] == pytest.approx((12, 60.8))
        assert list(panels("figure3", nothing)) == ["no records"]


class TestFigure5:
    def rows(self, world: World) -> dict[tuple[str, str, int], list[str]]:
        shown = ["over in core", *(LABELS[mode] for mode in MODES), "limit"]
        return {
            (paper_name(row["network"]), row["where"], row["batch"]): [row[name] for name in shown]
            for row in table("figure5", world, world.profile)
        }

    def test_the_cells(self):
        rows = self.rows(World())
        memory = ["1×", "14.40 GiB", "14.40 GiB", "15.20 GiB", "16.00 GiB"]
        assert rows[DENSENET, "simulated, V100", 128] == memory
        # In core the limit is on tensors: what they hold, a MiB less in these records.
        memory = ["1×", "56.6 MiB", "57.6 MiB", "60.8 MiB", "64.0 MiB"]
        assert rows[DENSENET, "measured here", 8] == memory
        assert rows[DENSENET, "measured here", 32][1:4] == ["x", "57.6 MiB", "60.8 MiB"]
        assert not any(batch == "largest" for *_, batch in rows)

    def test_where_nothing_fits_in_core_there_is_no_proportion(self):
        rows = self.rows(World(reach={("in_core",): 0}))
        assert {tuple(row[:2]) for row in rows.values()} == {(DASH, "x")}

    def test_a_gpus_sizes(self):
        rows = self.rows(World("paper"))
        measured = [row for (_, where, _), row in rows.items() if where == "measured here"]
        assert {row[-1] for row in measured} == {"16.00 GiB"}
        assert len(measured) == sum(map(len, settings.GROWING["paper"].values()))

    def test_the_figure(self):
        shown = panels("figure5", World())
        # No DeepLabv3+ is measured on a CPU.
        limits = [limit_of(axis) for axis in shown.values()]
        assert limits == [16] * 3 + [64] * 2 + [None] * 4
        *_, pix2pixhd, deeplab = list(shown.values())[:6]
        found = curves(pix2pixhd)
        assert found["in core"] == [pytest.approx((4, 56.6))]
        assert found["schedule: taken"][-1] == pytest.approx((16, 57.6))
        assert [text.get_text() for text in deeplab.texts] == ["not run"]

    def test_what_is_taken_over_what_is_used(self):
        world = World(taken={(settings.PHYSICAL, "chunks", "schedule"): 1.25})
        found = fragmentation.physical_over_used(results("figure5", world), DENSENET)
        sizes = settings.SIMULATED_BATCHES["quick"][DENSENET]
        assert found == dict.fromkeys(sizes, (2.0, pytest.approx(1.25)))
        alone = fragmentation.physical_over_used(results("figure5", world), DENSENET, "in_core")
        assert alone == dict.fromkeys(sizes, (2.0, pytest.approx(1.1)))
        rows = [row for row in table("figure5", world) if DENSENET in row["network"]]
        told = [row["over use, schedule"] for row in rows]
        assert told == ["1.25× (torch's 2.00×)"] * len(sizes) + [DASH] * 2
        axis = list(panels("figure5", world).values())[6]
        assert axis.get_ylabel() == "taken over used, no limit"
        drawn = curves(axis)
        assert drawn["torch's, no limit: swapped"] == [(size, 2.0) for size in sizes]
        assert drawn["chunks, no limit: swapped"][0] == (sizes[0], pytest.approx(1.25))
        assert drawn["chunks, no limit: nothing swapped"][0] == (sizes[0], pytest.approx(1.1))

    def test_without_what_was_mapped_the_rest_is_shown(self):
        world = World(status={(settings.PHYSICAL,): None})
        assert fragmentation.physical_over_used(results("figure5", world), DENSENET) == {}
        assert {row["over use, schedule"] for row in table("figure5", world)} == {DASH}

    def test_no_curve_lies_on_the_frame(self):
        for axis in panels("figure5", World()).values():
            for curve in curves(axis).values():
                assert max(height for _, height in curve) < 0.95 * axis.get_ylim()[1]

    def test_curves_and_limit_have_the_same_unit_where_a_network_is_missing(self):
        shown = panels("figure5", World(status={(PIX2PIXHD,): None}))
        axis = list(shown.values())[3]
        assert "for DenseNet, measured" in " ".join(axis.get_title().split())
        assert axis.get_ylabel() == "memory (MiB)"
        assert limit_of(axis) == pytest.approx(64)
        assert curves(axis)["schedule: taken"][-1][1] == pytest.approx(57.6)

    def test_units(self):
        assert fragmentation._unit(GIB) == fragmentation._unit(None) == (GIB, "GiB")
        assert fragmentation._unit(GIB - 1) == (MIB, "MiB")
