"""Ways to synchronise, and real processes against the simulation: what is read and judged."""

import math
import statistics

import made
import pytest
from made_dualbatch import World, figure, judge, panel, results, rows

from repro.experiments.dualbatch import measured_plan, synchronisation
from repro.report import DASH

COLUMN = "same weights in the same order"


def differ(metrics, config):
    metrics["same_weights"] = False


def checked(profile="quick", **world):
    return made.check_row("dualbatch/engines", 0, results("engines", World(**world), profile))


def test_check():
    assert checked()["holds"] == "yes"
    assert checked(edit={"train": differ})["holds"] == "NO"
    row = checked("gpu")
    assert row["holds"] == "not run" and "too large" in row["evidence"]


def test_the_local_engine_alone_proves_nothing():
    def status(run):
        return None if run.config["engine"] == "ray" else {}

    assert checked(status=status)["holds"] == "not run"


def test_table():
    found = rows("engines", profile="quick")
    assert [row["engine"] for row in found] == ["local", "ray"]
    assert {row[COLUMN] for row in found} == {"yes"}
    assert [row["staleness, mean"] for row in found] == ["2.00", "2.00"]
    assert [row["staleness, most"] for row in found] == [3, 3]
    wrong = rows("engines", World(edit={"train": differ}), "quick")
    assert {row[COLUMN] for row in wrong} == {"NO"}
    assert {row[COLUMN] for row in rows("engines")} == {DASH}


def test_an_engine_that_failed_says_so():
    def status(run):
        return made.FAILED if run.config["engine"] == "ray" else {}

    assert rows("engines", World(status=status), "quick")[1]["accuracy (%)"] == "failed"


def slower(metrics, config):
    metrics["parts"][0]["round_s"]["asp"] = [9.0, 9.1, 9.2]


class TestSynchronisation:
    def test_real_workers_decide_which_is_faster(self):
        assert judge("synchronisation/asp_faster")[0] == "reproduced"
        assert judge("synchronisation/asp_faster", edit={"wall": slower})[0] == "not reproduced"
        assert judge("synchronisation/asp_faster", noise=0.8)[0] == "undecided"

    def test_each_process_compares_its_own_rounds(self):
        """What slows one kind of epoch in a round slows that round, as it does without barrier."""
        found = results("synchronisation", World(), "long")
        by_process = measured_plan.rounds(found)
        records = found.ok("wall")
        assert len(by_process["bsp"]) == len(by_process["asp"]) == len(records) == 5
        one = measured_plan._rounds_of(records[0])
        assert by_process["bsp"][0] == statistics.median(one["bsp"])
        kinds = measured_plan._kinds_of(records[0], measured_plan.OWN)
        planned = [measured_plan.epoch_seconds(kind) for kind in kinds if not kind["error"]]
        assert one["bsp"] == pytest.approx([sum(each_) for each_ in zip(*planned, strict=True)])

        for number, record in enumerate(records):  # machines that differ by far, ASP's 5 % ahead
            factor = 2.0**number
            (part,) = record.metrics["parts"]
            rounds = [factor * seconds for seconds in measured_plan._rounds_of(record)["bsp"]]
            part["shares_s"] = {
                kind: [[factor * s for s in worker] for worker in workers]
                for kind, workers in part["shares_s"].items()
            }
            part["round_s"] = {"asp": [0.95 * s * (1 + 0.001 * number) for s in rounds]}
        verdict = made.verdict("dualbatch/synchronisation/asp_faster", found)
        assert verdict.word == "reproduced"
        assert "ASP over BSP: ×0.95 [×0.95, ×0.95]" in verdict.evidence

    def test_convergence_by_the_same_rule(self):
        def alike(metrics, config):
            metrics["accuracy"] = [10.0, 69.0]

        def rule(metrics, config):
            if (config["sync"], config["merge"]) == ("asp", "delta"):
                metrics["accuracy"] = [10.0, 75.0]

        key = "synchronisation/asp_converges_worse"
        assert judge(key)[0] == "reproduced"
        assert judge(key, edit={"synchronise": alike})[0] == "not reproduced"
        word, evidence = judge(key, edit={"synchronise": rule})
        assert word == "partly" and "delta: +5.00" in evidence

        def idle(metrics, config):
            if config["merge"] == "delta":
                metrics["accuracy"] = [10.0, 10.0]

        def diverge(metrics, config):
            """As trainings do that add up the changes of all workers: chance, after an epoch."""
            if config["merge"] == "delta":
                metrics |= {"accuracy": [15.6, 10.0], "test_loss": [2.4, math.nan]}

        def lost(metrics, config):
            metrics["accuracy"] = [10.0, 10.0]

        assert judge(key, edit={"synchronise": lost})[0] == "not run"

        for edit in (idle, diverge):
            word, evidence = judge(key, edit={"synchronise": edit})
            assert word == "reproduced" and "delta: neither learned anything" in evidence

    def test_check(self):
        def late(metrics, config):
            if config["sync"] == "asp":
                metrics["virtual_time_s"] = [4.0, 8.4]

        target = "dualbatch/synchronisation"
        assert made.check_row(target, 0, results("synchronisation"))["holds"] == "yes"
        found = results("synchronisation", World(edit={"synchronise": late}))
        assert made.check_row(target, 0, found)["holds"] == "NO"

    def test_table(self):
        found = rows("synchronisation")
        assert [(row["synchronisation"], row["merge"]) for row in found[:10]] == [
            (synchronisation.NAMES[sync], merge) for sync, merge in synchronisation.WAYS
        ]
        assert [row["staleness, most"] for row in found[:10]] == [0] * 4 + [3] * 3 + [1] * 3
        assert [row["shares ahead, most"] for row in found[:10]] == [0] * 4 + [1] * 6
        # At the barrier the workers that end after 1, 2 and 3 seconds wait for the last one.
        waited = [row["all waiting, virtual (s)"] for row in found[:10]]
        assert waited == ["6.00"] * 4 + ["0.00"] * 6
        assert {row["virtual (s)"] for row in found[:10]} == {"8.00"}
        # Of large batches alone, k = 1.05 and k = 1.1: 3.15 s in turns at a barrier, 2.5 without.
        bsp, asp = (float(row["wall (s)"].split()[0]) for row in found[14:])
        assert (round(bsp, 2), round(asp, 2)) == (3.15, 2.5)

    def test_a_straggler_has_rows_of_its_own(self):
        for profile in ("quick", "long", "gpu"):
            found = rows("synchronisation", profile=profile)[10:14]
            assert [row["synchronisation"].split(", one")[0] for row in found] == [
                *(f"SSP, s = {bound}" for bound in range(3)),
                "ASP",
            ]
        assert len(rows("synchronisation", profile="paper")) == 12

        def faster(metrics, config):
            if config.get("straggler"):
                metrics["accuracy"] = [10.0, 99.0]

        key = "synchronisation/asp_converges_worse"
        assert judge(key, edit={"synchronise": faster}) == judge(key)

    def test_figure(self):
        drawn = figure("synchronisation", World(noise=0.0))
        accuracy, duration = drawn.axes
        means = [li.get_xdata()[0] for li in accuracy.get_lines() if "mean" in li.get_label()]
        assert means == pytest.approx([70.0] * 4 + [67.0] * 3 + [69.0] * 3)
        seconds = [li.get_xdata()[0] for li in duration.get_lines() if "mean" in li.get_label()]
        assert seconds == pytest.approx([3.15, 2.5])


class TestFigure2:
    def test_shares_begin_with_their_pull(self):
        found = results("figure2")
        (asp, *_), (bsp, *_) = (found.ok("synchronise", sync=sync) for sync in ("asp", "bsp"))
        assert [span["pull_s"] for span in synchronisation.spans(asp)] == [0] * 4 + [1, 2, 3, 4]
        assert [span["pull_s"] for span in synchronisation.spans(bsp)] == [0] * 4 + [4] * 4
        bars = panel(figure("figure2"), "ASP").patches
        assert [bar.get_x() for bar in bars[4:]] == [1, 2, 3, 4]
        assert [bar.get_width() for bar in bars[4:]] == [4] * 4
