"""Factors and numbers of small-batch workers: what is read, drawn and judged."""

import made
import pytest
from invented import make_record
from made_dualbatch import (
    PAPER,
    World,
    figure,
    judge,
    legend_of,
    only,
    panel,
    panels,
    paper_accuracy,
    paper_loss,
    results,
    rows,
)

from repro.experiments.design import Results, Run
from repro.experiments.dualbatch import accuracy, hybrid
from repro.experiments.dualbatch.settings import K, section51
from repro.report import DASH


def assert_drawn(axis, paper, ours=None):
    """Assert that the paper's values are hollow, and ours solid on their intervals."""
    _, hollow, *solid = axis.get_lines()
    assert hollow.get_markerfacecolor() == "none" and hollow.get_label() == "paper"
    assert list(hollow.get_ydata()) == pytest.approx(paper)
    means = [line.get_ydata()[0] for line in solid]
    assert means == pytest.approx(paper if ours is None else ours, abs=1e-3)
    assert all(line.get_markerfacecolor() != "none" for line in solid)
    spans = [segment[:, 1] for bars in axis.collections for segment in bars.get_segments()]
    assert all(low < mean < high for mean, (low, high) in zip(means, spans, strict=True))


def mirrored(config):
    return 140 - paper_accuracy(config)


class TestFactors:
    key = "table3/factor_gains"

    def test_verdicts(self):
        assert judge(self.key, accuracy=mirrored)[0] == "not reproduced"
        assert judge(self.key, spread=2.0)[0] == "undecided"
        # The same accuracy is no gain, and of seeds that differ it is not known.
        assert judge(self.key, accuracy=lambda c: 70.0, spread=0.0)[0] == "not reproduced"
        assert judge(self.key, accuracy=lambda c: 70.0, spread=1.0)[0] == "undecided"

    def test_one_case_that_fails(self):
        def one_worse(config):
            worse = config["n_small"] == 2 and config["factor"] == "linear"
            return 60.0 if worse else paper_accuracy(config)

        word, evidence = judge(self.key, accuracy=one_worse)
        assert word == "partly" and "d_S/d_L, n_S = 2: -10.20" in evidence

    def test_the_papers_gains_stand_beside(self):
        _, evidence = judge(self.key)
        assert [part.split("paper ")[1].split(" (")[0] for part in evidence.split("; ")[:5]] == [
            "+0.50",
            "+0.30",
            "+0.90",
            "+0.70",
            "+0.60",
        ]

    def test_all_cases_are_needed(self):
        for n in (1, 3):
            lost = {"status": lambda run, n=n: None if run.config["n_small"] == n else {}}
            assert judge(self.key, **lost)[0] == "undecided"

    def test_table(self):
        found = rows("table3")
        assert [row["(n_S, n_L)"] for row in found] == ["(1, 3)"] * 3 + ["(2, 2)"] * 3 + (
            ["(3, 1)"] * 3
        )
        row, root, none = found[3:6]
        assert row["factor"] == "d_S/d_L"
        assert (row["value, paper"], row["value"]) == ("0.818", "0.818")
        assert row["loss, paper"] == "1.250" and row["loss"] == "1.250 ± 0.000"
        assert row["accuracy, paper (%)"] == "70.5" and row["accuracy (%)"] == "70.50 ± 0.02"
        assert row["n"] == 3 and row["over none, paper"] == "+0.3"
        assert row["over none"].startswith("+0.30 [")
        assert (root["value, paper"], root["value"]) == ("0.904", "0.905")
        assert none["over none"] == none["over none, paper"] == DASH
        assert none["value"] == "1.000"

    def test_figures_5_and_6(self):
        drawn = figure("table3")
        assert len(panels(drawn)) == 8
        assert legend_of(drawn) == [
            "paper: d_S/d_L",
            "paper: √(d_S/d_L)",
            "d_S/d_L",
            "√(d_S/d_L)",
            "no factor",
        ]
        axis = panel(drawn, "ours, 2 small, 2 large: accuracy")
        ends = [line.get_ydata()[-1] for line in axis.get_lines()]
        assert ends == pytest.approx([70.5, 70.9, 70.2])
        changed = panel(drawn, "paper and ours: accuracy over no factor").get_lines()
        paper = {li.get_label(): li for li in changed if li.get_label().startswith("paper")}
        assert list(paper["paper: d_S/d_L"].get_ydata()) == pytest.approx([0.5, 0.3, 0.9])
        assert list(paper["paper: √(d_S/d_L)"].get_ydata()) == pytest.approx([-0.2, 0.7, 0.6])
        assert all(line.get_markerfacecolor() == "none" for line in paper.values())
        ours = [li.get_ydata()[0] for li in changed if li.get_label() == "_ours"]
        assert ours == pytest.approx([0.5, 0.3, 0.9, -0.2, 0.7, 0.6])


class TestNumbers:
    def test_gain(self):
        def none(config):
            return paper_accuracy(config) if config["n_small"] == 0 else 60.0

        def mixed(config):
            return none(config) if config["k"] == 1.05 else paper_accuracy(config)

        assert judge("table5/gain", accuracy=none)[0] == "not reproduced"
        assert judge("table5/gain", accuracy=mixed)[0] == "partly"
        assert judge("table5/gain", spread=3.0)[0] == "undecided"
        # A baseline that is missing leaves nothing to compare with.
        assert (
            judge("table5/gain", status=lambda run: {} if run.config["n_small"] else None)[0]
            == "not run"
        )

    def test_a_small_gain_is_partly(self):
        def third(config):
            return 67.8 + (paper_accuracy(config) - 67.8) / 3

        assert judge("table5/gain", accuracy=third)[0] == "partly"

    def test_gain_says_six_cases(self):
        _, evidence = judge("table5/gain")
        assert [part.split("paper ")[1].split(" (")[0] for part in evidence.split("; ")[:6]] == [
            "+2.30",
            "+2.80",
            "+2.30",
            "+2.70",
            "+2.90",
            "+2.70",
        ]

    def test_evidence_says_what_was_trained_and_what_it_ends_with(self):
        _, evidence = judge("table5/gain", "long")
        assert "ResNet-8 (for ResNet-18), CIFAR-100, 28 epochs, momentum begun anew" in evidence
        assert evidence.endswith("large batches alone end at 67.8 %")

    def test_seeds_of_the_first_look_judge_only_where_there_are_no_others(self):
        """The first three were looked at before others were added."""

        def luck(metrics, config):
            if config["n_small"]:
                metrics["accuracy"][-1] += 50

        for seeds, word in (((0, 1, 2), "partly"), (range(8), "reproduced")):
            found = results("table5", World(), "long", seeds=seeds)
            for record in found.ok("train"):
                if record.seed in (0, 1, 2):
                    luck(record.metrics, record.config)
            assert made.verdict("dualbatch/table5/gain", found).word == word
            rows = PAPER.artefacts["table5"].exhibit.table(found)
            row = [row for row in rows if "kept" not in row["k"]][-1]
            assert row["gain"].startswith("+52.7" if word == "partly" else "+2.7")
            gap, _ = accuracy.gains(found, K[1])["4 small"]
            assert str(gap) == row["gain"]  # one number has one interval

    def test_seeds_are_compared_one_by_one(self):
        """What a seed gives to all cells alike drops out."""
        found = results("table5", World(spread=0.1))
        for record in found.ok("train"):
            record.metrics["accuracy"][-1] += 9.0 * record.seed
        assert made.verdict("dualbatch/table5/gain", found).word == "reproduced"

    def test_one_too_few(self):
        def falling(config):
            return 80.0 - config["n_small"]

        def mixed(config):
            return falling(config) if config["k"] == 1.1 else paper_accuracy(config)

        assert judge("table5/one_too_few", accuracy=falling)[0] == "not reproduced"
        assert judge("table5/one_too_few", accuracy=mixed)[0] == "partly"
        assert judge("table5/one_too_few", spread=5.0)[0] == "undecided"

    def test_three_best(self):
        def rising(config):
            return 60.0 + config["n_small"]

        assert judge("table5/three_best", accuracy=rising)[0] == "not reproduced"
        assert "n_S = 3 over 4" in judge("table5/three_best", accuracy=rising)[1]
        assert judge("table5/three_best", spread=1.0)[0] == "undecided"

    def test_lowest_loss(self):
        def falling(config):
            return 2.0 - config["n_small"] / 10

        def mixed(config):
            return falling(config) if config["k"] == 1.1 else paper_loss(config)

        assert judge("table5/lowest_loss", loss=falling)[0] == "not reproduced"
        assert judge("table5/lowest_loss", loss=mixed)[0] == "partly"
        assert judge("table5/lowest_loss", spread=9.0)[0] == "undecided"

    def test_the_best_of_some_is_not_the_best_of_all(self):
        for key, lost in (("three_best", 4), ("lowest_loss", 3)):
            status = {"status": lambda run, n=lost: {} if run.config["n_small"] != n else None}
            assert judge(f"table5/{key}", **status)[0] == "not run"

    def test_extra_time(self):
        def row(virtual):
            return made.check_row("dualbatch/table5", 0, results("table5", World(virtual=virtual)))

        holds = row(lambda c: 100.0 * c["k"])
        assert holds["holds"] == "yes" and "1.050, 1.050, 1.050, 1.050" in holds["evidence"]
        slower = row(lambda c: 100.0 * (c["k"] + (0.02 if c["n_small"] == 2 else 0)))
        assert slower["holds"] == "NO" and "1.070" in slower["evidence"]

    def test_table(self):
        found = rows("table5")
        assert len(found) == 9
        base, last = found[0], found[-1]
        assert (base["k"], base["(n_S, n_L)"], base["gain"]) == ("1.00", "(0, 4)", DASH)
        assert base["accuracy, paper (%)"] == "67.8" and base["B_S"] == DASH
        assert (last["B_S"], last["gain, paper"]) == ("160", "+2.7")
        assert last["gain"].startswith("+2.70 [")
        assert last["virtual time over baseline"] == "1.100"
        assert base["virtual time over baseline"] == "1.000"
        assert last["wall (s)"] == DASH

    def test_missing_trainings_are_gaps(self):
        for row in rows("table5", World(status=only(n_small=2))):
            has = row["(n_S, n_L)"] == "(2, 2)"
            assert row["n"] == (3 if has else 0)
            for name in ("B_S", "loss", "accuracy (%)"):
                assert (row[name] != DASH) == has
            # Without the baseline nothing stands over it.
            assert row["gain"] == row["virtual time over baseline"] == DASH

    def test_one_seed_has_no_interval(self):
        row = rows("table5", seeds=(0,))[1]
        assert "[" not in row["gain"] and "±" not in row["accuracy (%)"]
        assert judge("table5/gain", seeds=(0,))[0] == "undecided"

    def test_figures_7_to_10(self):
        drawn = figure("table5")
        assert len(panels(drawn)) == 8 and len(legend_of(drawn)) == 6
        lines = panel(drawn, "ours, k = 1.1: loss").get_lines()
        assert len(lines) == 5
        assert lines[0].get_ydata()[-1] == pytest.approx(1.429)  # the baseline
        assert_drawn(panel(drawn, "paper and ours, k = 1.1:\naccuracy"), [0.7, 2.7, 2.9, 2.7])
        assert_drawn(
            panel(drawn, "paper and ours, k = 1.05:\nloss"), [-0.183, -0.139, -0.057, -0.03]
        )

    def test_a_gain_that_is_not_ours_is_not_drawn(self):
        """Where nothing ran, the paper's values stand alone; ours follow our records."""
        lost = figure("table5", World(status=only(n_small=2)))
        _, paper, *ours = panel(lost, "paper and ours, k = 1.1:\naccuracy").get_lines()
        assert len(paper.get_ydata()) == 4 and not ours
        worse = figure("table5", World(accuracy=lambda config: 60.0 - config["n_small"]))
        gains = panel(worse, "paper and ours, k = 1.1:\naccuracy")
        assert_drawn(gains, [0.7, 2.7, 2.9, 2.7], [-1, -2, -3, -4])

    def test_the_picture_for_a_talk(self):
        drawn = hybrid.draw_gains(results("gains"))
        assert [axis.get_title() for axis in drawn.axes] == [
            "paper and ours:\n5 % more time (Table 5)",
            "paper and ours:\n10 % more time (Table 5)",
            "paper and ours:\nresolution cycled as well (Table 8)",
        ]
        assert_drawn(drawn.axes[1], [0.7, 2.7, 2.9, 2.7])
        assert_drawn(drawn.axes[2], [1.9, 3.0, 3.3, 3.2])

    def test_the_baseline_has_no_k(self):
        found = results("table5")
        for k in (1.0, *K):
            assert {r.config["n_small"] for r in section51(found, k, 0)} == {0}
        assert len(section51(found, 1.05, 2)) == 3
        assert section51(found, 1.05, 2, "sqrt") == []

    def test_on_a_cluster_there_is_no_virtual_time(self):
        local = results("table5", profile="quick")
        planned = [
            Run(run.experiment, run.config | {"engine": "ray"})
            for run in dict.fromkeys(run for run, _ in local.expected)
        ]
        records = [
            make_record("train", paper="dualbatch", config=run.config, **World()(run, 0))
            for run in planned
        ]
        found = Results(planned, (0,), records)
        assert made.check_row("dualbatch/table5", 0, found)["holds"] == "not run"
        assert made.verdict("dualbatch/table5/gain", found).word == "undecided"
