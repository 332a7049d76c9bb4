"""Real workers, synchronisation, and flatness: what is read, drawn and judged."""

import copy
import dataclasses
import math
import statistics

import made
import pytest
from made_dualbatch import World, judge, results, rows

from repro.experiments.dualbatch import real_workers
from repro.experiments.dualbatch.runs import CIFAR, OWN

# Whole schedules.


def test_no_process_is_dropped_and_those_after_the_first_look_judge():
    """Whatever processor most were measured on; the first five set how many are needed."""
    found = results("table8", profile="long")
    first = found.ok("wall")[0]
    found.records = [record for record in found.records if record.experiment != "wall"]
    for seed in range(16):
        metrics = copy.deepcopy(first.metrics)
        (part,) = metrics["parts"]
        slow = 1.0 if seed < 5 else 0.8 + seed / 1000  # of the lower resolution
        part["shares_s"]["0"] = [[slow * s for s in share] for share in part["shares_s"]["1"]]
        device = first.device | {"name": "another" if seed < 5 else "the most"}
        changed = {"seed": seed, "metrics": metrics, "device": device}
        found.records.append(dataclasses.replace(first, **changed))
    ratio = real_workers.cycled(found, CIFAR)
    assert ratio.n == 11 and ratio.trials == "processes"
    assert math.exp(ratio.mean) == pytest.approx(0.905, abs=0.01)
    lines = real_workers.draw_saving(found).axes[0].get_lines()
    drawn = [line.get_xdata()[0] for line in lines]
    assert any(value == pytest.approx(math.exp(ratio.mean)) for value in drawn)


def test_workers_that_share_a_core_say_nothing():
    def alone(metrics, config):
        metrics |= {"devices": 1, "parts": []}

    world = World(edit={"wall": alone})
    word, evidence = judge("table8/saving", edit={"wall": alone})
    assert word == "not run" and "1 core or accelerator for two workers" in evidence
    assert "1 core" in rows("table8", world)[-1]["real workers"]
    assert len(rows("own_plan", world)) == 2


# A plan for times measured here.


# Synchronisation.


def test_each_process_compares_its_own_rounds():
    found = results("synchronisation", World(), "long")
    records = found.ok("wall")
    assert len(real_workers.rounds(found)["bsp"]) == len(records) == 5
    for number, record in enumerate(records):  # machines that differ by far, ASP's 5 % ahead
        factor, (part,) = 2.0**number, record.metrics["parts"]
        kinds = real_workers._kinds_of(record, OWN)
        bsp = [sum(each) for each in zip(*(kind["seconds"] for kind in kinds), strict=True)]
        part["shares_s"] = {
            kind: [[factor * s for s in worker] for worker in workers]
            for kind, workers in part["shares_s"].items()
        }
        part["round_s"] = {"asp": [0.95 * factor * s * (1 + 0.001 * number) for s in bsp]}
        medians = real_workers.rounds(found)["bsp"]
        assert medians[number] == pytest.approx(factor * statistics.median(bsp))
    verdict = made.verdict("dualbatch/synchronisation/asp_faster", found)
    assert verdict.word == "reproduced"
    assert "ASP over BSP: ×0.95 [×0.95, ×0.95]" in verdict.evidence


def test_convergence_by_the_same_rule():
    key = "synchronisation/asp_converges_worse"

    def judged(change):
        return judge(key, edit={"synchronise": change})

    def idle(metrics, config):
        if config["merge"] == "delta":
            metrics["accuracy"] = [10.0, 10.0]

    def diverge(metrics, config):
        """As trainings do that add up the changes of all workers: chance, after an epoch."""
        if config["merge"] == "delta":
            metrics |= {"accuracy": [15.6, 10.0], "test_loss": [2.4, math.nan]}

    def all_at(*accuracy):
        return judged(lambda metrics, config: metrics.update(accuracy=list(accuracy)))[0]

    assert all_at(10.0, 69.0) == "not reproduced" and all_at(10.0, 10.0) == "not run"
    for change in (idle, diverge):
        word, evidence = judged(change)
        assert word == "reproduced"
        assert "left out, since neither learned anything: delta" in evidence


def test_engines():
    def differ(metrics, config):
        metrics["same_weights"] = False

    def checked(profile="quick", **world):
        return made.check_row("dualbatch/engines", 0, results("engines", World(**world), profile))

    assert checked(edit={"train": differ})["holds"] == "NO"
    assert "too large" in checked("gpu")["evidence"]
    ray_failed = {"status": lambda run: made.FAILED if run.config["engine"] == "ray" else {}}
    assert checked(**ray_failed)["holds"] == "not run"  # the local engine alone proves nothing
    found = rows("engines", profile="quick")
    assert [row["engine"] for row in found] == ["local", "ray"]
    assert {row["same weights in the same order"] for row in found} == {"yes"}
    assert [row["staleness, mean"] for row in found] == ["2.00", "2.00"]
    assert rows("engines", World(**ray_failed), "quick")[1]["accuracy (%)"] == "failed"


# Flatness.
