"""Schedules, accuracies and savings of the hybrid scheme: what is read, drawn and judged."""

import copy
import dataclasses
import itertools
import math

import made
import numpy as np
import pytest
from made_dualbatch import (
    CHOSEN,
    PAPER,
    REPORTED,
    World,
    figure,
    judge,
    only,
    panel,
    panels,
    paper_accuracy,
    results,
    rows,
)

from repro.experiments.dualbatch import hybrid
from repro.experiments.dualbatch.settings import CIFAR, SCHEMES, final, section52
from repro.report import DASH


class TestSchedules:
    @pytest.mark.parametrize("table", ["table7", "table9"])
    def test_check(self, table):
        def edit(metrics, config):
            metrics["rows"][0]["last"] += 1

        holds = made.check_row(f"dualbatch/{table}", 0, results(table))
        count = {"table7": 18, "table9": 24}[table]
        assert holds["holds"] == "yes" and holds["evidence"].startswith(f"{count} of {count}")
        wrong = made.check_row(f"dualbatch/{table}", 0, results(table, World(edit={"solve": edit})))
        assert wrong["holds"] == "NO" and wrong["evidence"].startswith(f"{count - 1} of {count}")

    @pytest.mark.parametrize("table", ["table7", "table9"])
    def test_ours_stand_beside_the_papers(self, table):
        found = rows(table)
        for row in found:
            for name in ("epochs", "rate", "B_S, B_L", "resolution", "dropout"):
                assert row[name] == row[f"{name}, paper"]
        assert [row["epochs"] for row in found if row["scheme"] == "hybrid"] == [
            f"{first}-{last}" for first, last in REPORTED[table]["epochs"]
        ]
        assert found[0]["sub-stage"] == DASH


class TestAccuracy:
    def test_verdicts(self):
        def mirrored(config):
            return 140 - paper_accuracy(config)

        def one_worse(config):
            worse = config["scheme"] == "hybrid" and config["n_small"] == 2
            return 50.0 if worse else paper_accuracy(config)

        assert judge("table8/accuracy", accuracy=mirrored)[0] == "not reproduced"
        word, evidence = judge("table8/accuracy", accuracy=one_worse)
        assert word == "partly" and "n_S = 2: -20.00" in evidence
        assert judge("table8/accuracy", spread=4.0)[0] == "undecided"

    def test_gain(self):
        assert judge("table8/gain", accuracy=lambda c: 70.0)[0] == "not reproduced"
        word, evidence = judge("table8/gain", spread=20.0)
        assert word == "undecided" and "paper +3.30" in evidence

        def third(config):
            return 68 + (paper_accuracy(config) - 68) / 3

        assert judge("table8/gain", accuracy=third)[0] == "partly"
        assert judge("table8/gain", seeds=(0,))[0] == "undecided"

    def test_table(self):
        found = rows("table8")
        assert [row["scheme"] for row in found[:10]] == ["dual-batch"] * 5 + ["hybrid"] * 5
        assert [row["time, paper (s)"] for row in found[10:]] == ["1,541", "1,385"]
        assert [row["virtual (s)"] for row in found[10:]] == ["1,541", "1,385"]
        dual, hybrid = found[1], found[8]
        assert (dual["B_S"], dual["B_L"]) == ("102", "560")
        assert (hybrid["B_S"], hybrid["B_L"]) == ("294, 243", "600, 560")
        assert (hybrid["gain, paper"], hybrid["virtual (s)"]) == ("+3.3", "1,385")
        assert hybrid["gain"].startswith("+3.30 [") and hybrid["wall (s)"] == DASH
        assert found[0]["gain"] == DASH and found[5]["gain"] != DASH

    def test_schemes_are_kept_apart(self):
        found = results("table8")
        for n, scheme in itertools.product(range(5), SCHEMES):
            records = section52(found, n, scheme)
            assert [r.seed for r in records] == [0, 1, 2]
            assert {len(r.config["sub_stages"]) for r in records} == {1 + (scheme == "hybrid")}
            expected = REPORTED["table8"][SCHEMES[scheme]][n]["accuracy"]
            assert np.mean(final(found, records, "accuracy")) == pytest.approx(expected)

    def test_figures_11_and_12(self):
        drawn = figure("table8")
        assert len(panels(drawn)) == 8
        lines = panel(drawn, "ours, hybrid: accuracy").get_lines()
        ends = [line.get_ydata()[-1] for line in lines]
        assert ends == pytest.approx([68.0, 69.9, 71.0, 71.3, 71.2])
        for scheme, gained in (
            ("dual-batch", [1.1, 2.0, 2.0, 1.8]),
            ("hybrid", [0.0, 1.9, 3.0, 3.3, 3.2]),
        ):
            _, paper, *ours = panel(drawn, f"paper and ours, {scheme}:\naccuracy").get_lines()
            assert list(paper.get_ydata()) == pytest.approx(gained)
            assert [dot.get_ydata()[0] for dot in ours] == pytest.approx(gained, abs=1e-9)

    def test_figure_and_table_see_the_same_records(self):
        lost = World(status=lambda run: made.FAILED if run.config.get("n_small") == 3 else {})
        assert [row["n"] for row in rows("table8", lost) if row["n_S"] == 3] == [0, 0]
        axis = panel(figure("table8", lost), "ours, hybrid: accuracy")
        assert "3 small, 1 large" not in {line.get_label() for line in axis.get_lines()}


class TestOverCyclic:
    def test_verdicts(self):
        def none_gain(config):
            return 68.0 if config["scheme"] == "hybrid" else paper_accuracy(config)

        assert judge("table8/over_cyclic")[0] == "reproduced"
        assert judge("table8/over_cyclic", accuracy=none_gain)[0] == "not reproduced"
        word, evidence = judge("table8/over_cyclic", spread=9.0)
        assert word == "undecided" and "paper +3.30" in evidence


class TestSaving:
    @pytest.mark.parametrize("artefact", ["table8", "table10"])
    def test_whole_schedules(self, artefact):
        def cycled(share):
            return {"cycled": lambda side, highest: 1.0 if side == highest else share}

        slower = judge(f"{artefact}/saving", **cycled(1.2))
        assert slower[0] == "not reproduced"
        less = judge(f"{artefact}/saving", **cycled(0.92))
        # 4 % of the paper's 10, 5 % of its 35: certainly less time, but not so much less.
        assert less[0] == "partly"
        assert judge(f"{artefact}/saving", noise=1.0)[0] == "undecided"
        assert judge(f"{artefact}/saving", status=only(experiment="none"))[0] == "not run"

    def test_saving_is_the_mean_over_resolutions(self):
        seconds = {160: 1.0, 224: 2.5, 288: 4.0}
        _, evidence = judge("table10/saving", cycled=lambda side, _: seconds.get(side, 1), noise=0)
        assert f"×{7.5 / 3 / 4:.2f}, paper ×0.65" in evidence
        assert "35 at 160 px + 35 at 224 px + 35 at 288 px for 105 epochs" in evidence

    def test_a_slow_small_batch_worker_counts(self):
        """The saving is of the whole plan: an epoch ends with its slower worker."""

        def slow(metrics, config):
            for part in metrics["parts"]:
                for number, kind in enumerate(config["parts"][0]["epochs"]):
                    if kind["in"] == "CIFAR" and kind["resolution"] == 24:
                        part["shares_s"][str(number)][0] = [3.0] * config["rounds"]

        assert judge("table8/saving")[0] == "reproduced"
        assert judge("table8/saving", edit={"wall": slow})[0] == "not reproduced"

    def test_no_process_is_dropped_and_those_after_the_first_look_judge(self):
        """Whatever processor most were measured on; the first five set how many are needed."""
        found = results("table8", profile="long")
        (run,) = {run for run, _ in found.expected if run.experiment == "wall"}
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
        assert len(found.processes("wall")) == 16 and run.by_processes
        ratio = hybrid.cycled(found, CIFAR)
        assert ratio.n == 11 and ratio.trials == "processes"
        assert math.exp(ratio.mean) == pytest.approx(0.905, abs=0.01)
        drawn = [line.get_xdata()[0] for line in hybrid.figure10(found).axes[0].get_lines()]
        assert any(
            value == pytest.approx(math.exp(ratio.mean)) for value in drawn
        )  # one number everywhere

    def test_workers_that_share_a_core_say_nothing(self):
        def alone(metrics, config):
            metrics |= {"devices": 1, "parts": []}

        word, evidence = judge("table8/saving", edit={"wall": alone})
        assert word == "not run" and "1 core or accelerator for two workers" in evidence


class TestTimes:
    def test_table_10_draws_both_ratios(self):
        drawn = figure("table10", World(noise=0.0))
        values = [line.get_xdata()[0] for line in drawn.axes[0].get_lines()]
        assert {round(22_161 / 33_975, 6), round(1385 / 1541, 6)} <= {round(v, 6) for v in values}

    def test_own_plan_draws_what_k_promises(self):
        drawn = figure("own_plan", World(noise=0.0))
        hollow = [li for li in drawn.axes[0].get_lines() if li.get_label() == "paper"]
        solid = [li for li in drawn.axes[0].get_lines() if li.get_label() == "ours"]
        assert [line.get_xdata()[0] for line in hollow] == [1.05, 1.1]
        assert [line.get_xdata()[0] for line in solid] == pytest.approx([1.05, 1.1])


class TestImageNet:
    def judged(self, worse=(), **world):
        def accuracy(config):
            return 60.0 if config["n_small"] in worse else paper_accuracy(config)

        return judge("table10/imagenet_accuracy", "paper", accuracy=accuracy, **world)

    def test_verdicts(self):
        assert self.judged((3, 4))[0] == "not reproduced"
        assert self.judged((4,))[0] == "partly"
        assert self.judged((1, 2))[0] == "reproduced"  # which the claim leaves out
        assert self.judged(spread=1.0)[0] == "undecided"

    def test_the_margin_is_what_the_paper_calls_lower(self):
        assert "margin -0.5 points" in self.judged()[1]

    def test_outside_the_profile_paper(self):
        tasks = {task: CHOSEN[task] for task in PAPER.datasets["gpu"]}
        found = results("table10", chosen=tasks)
        verdict = made.verdict("dualbatch/table10/imagenet_accuracy", found)
        assert verdict.word == "not run" and "ImageNet" in verdict.evidence
        assert made.verdict("dualbatch/table10/imagenet_loss", found).word == "not run"

    def test_the_papers_numbers_stand_where_nothing_was_trained(self):
        tasks = {task: CHOSEN[task] for task in PAPER.datasets["gpu"]}
        for world in (World(), World(status=lambda run: None)):
            trained = rows("table10", world, chosen=tasks)
            assert [row["loss, paper"] for row in trained[:10]] == [
                f"{row['loss']:.3f}"
                for key in ("dual_batch", "hybrid")
                for row in REPORTED["table10"][key]
            ]
            assert [row["accuracy, paper (%)"] for row in trained[:5]] == [
                "65.9", "62.1", "64.5", "65.7", "65.5",
            ]  # fmt: skip
            assert {row["accuracy (%)"] for row in trained[:10]} == {"not run"}
            assert trained[6]["gain, paper"] == "-2.3" and trained[5]["gain, paper"] == DASH
            assert [row["time, paper (s)"] for row in trained[10:12]] == ["33,975", "22,161"]
            assert [row["wall (s)"] for row in trained[10:12]] == ["not run"] * 2

    def test_too_few_small_batches_lose(self):
        def same(config):
            return 65.0

        def one_gains(config):
            gains = (config["scheme"], config["n_small"]) == ("hybrid", 2)
            return 67.0 if gains else paper_accuracy(config)

        def loss(**world):
            return judge("table10/imagenet_loss", "paper", **world)[0]

        assert loss() == "reproduced"
        assert loss(accuracy=same) == "not reproduced"
        assert loss(accuracy=one_gains) == "partly"

    def test_table(self):
        found = rows("table10", World(noise=0.0), "paper")
        assert [row["scheme"] for row in found[12:]] == [
            f"an epoch at {side} px (the paper's {side})" for side in (160, 224, 288)
        ]
        assert [row["over the highest"] for row in found[12:]] == [
            f"{(side / 288) ** 2:.2f}" for side in (160, 224, 288)
        ]
        trained = found[:10]
        assert [row["scheme"] for row in trained] == ["dual-batch"] * 5 + ["hybrid"] * 5
        assert [row["accuracy, paper (%)"] for row in trained[:3]] == ["65.9", "62.1", "64.5"]
        assert trained[9]["accuracy (%)"] == "65.50 ± 0.02" and trained[6]["loss, paper"] == "2.138"
