"""Accuracies by mix of batch sizes, factor, scheme, updates and rate: read, drawn and judged."""

import math

import made
import pytest
from made_dualbatch import (
    PAPER,
    World,
    figure,
    judge,
    only,
    panel,
    paper_accuracy,
    results,
    rows,
)

from repro.experiments.dualbatch import accuracy, cells
from repro.experiments.dualbatch.runs import KEPT, RATES, K
from repro.report import DASH


def drawn_gains(drawn, title):
    """Return the paper's gains and ours of a panel."""
    (axis,) = (a for a in drawn.axes if a.get_title().replace("\n", " ").startswith(title))
    lines = axis.get_lines()
    paper = next(line for line in lines if line.get_label() == "paper")
    assert paper.get_markerfacecolor() == "none"
    ours = [line.get_ydata()[0] for line in lines if line.get_label() == "_ours"]
    return list(paper.get_ydata()), ours


def test_the_best_of_some_is_not_the_best_of_all():
    for key, lost in (("three_best", 4), ("lowest_loss", 3), ("gain", 0)):
        status = {"status": lambda run, n=lost: {} if run.config["n_small"] != n else None}
        assert judge(f"table5/{key}", **status)[0] == "not run"


def test_factors():
    _, evidence = judge("table3/factor_gains")
    assert "√(d_S/d_L), n_S = 3" in evidence and "√(d_S/d_L), n_S = 1" not in evidence
    assert judge("table3/factor_gains", spread=3.0)[0] == "undecided"
    linear, sqrt, none = rows("table3")[3:6]
    assert (linear["workers"], linear["factor"]) == ("2 small, 2 large", "d_S/d_L")
    assert (sqrt["gain, paper"], sqrt["loss, paper"]) == ("+0.7", "1.270")
    assert sqrt["gain"].startswith("+0.70 [") and "gain" not in none


@pytest.mark.parametrize(
    ("artefact", "title", "gains", "ends"),
    [
        ("table5", "k = 1.1", [0.7, 2.7, 2.9, 2.7], [67.8, 68.5, 70.5, 70.7, 70.5]),
        ("table8", "hybrid", [0, 1.9, 3, 3.3, 3.2], [68, 69.9, 71, 71.3, 71.2]),
    ],
)
def test_figures_of_gains_and_curves(artefact, title, gains, ends):
    drawn = figure(artefact, World(spread=0.0))
    paper, ours = drawn_gains(drawn, f"paper and ours, {title}")
    assert paper == pytest.approx(gains) and ours == pytest.approx(gains, abs=1e-9)
    columns = len(drawn.axes) // 3
    lines = drawn.axes[columns : 2 * columns][1].get_lines()  # accuracies by epoch
    assert [line.get_ydata()[-1] for line in lines] == pytest.approx(ends)
    # Where nothing ran the paper's gains are drawn alone.
    none = figure(artefact, World(status=only(n_small=9)))
    assert drawn_gains(none, f"paper and ours, {title}") == (pytest.approx(gains), [])


def test_seeds_of_the_first_look_judge_only_where_there_are_no_others():
    """The first three were looked at before others were added."""
    for seeds, word in (((0, 1, 2), "partly"), (range(8), "reproduced")):
        found = results("table5", World(), "long", seeds=seeds)
        for record in found.ok("train"):
            if record.seed in (0, 1, 2) and record.config["n_small"]:
                record.metrics["accuracy"][-1] += 50
        assert made.verdict("dualbatch/table5/gain", found).word == word
        row = PAPER.artefacts["table5"].rows(found)[-1]
        assert row["gain"].startswith("+52.7" if word == "partly" else "+2.7")
        gain, _ = cells.gains(found, accuracy.by_mix(found, K[1]))["4 small"]
        assert str(gain) == row["gain"]  # one number has one interval


def test_table_5():
    found = rows("table5")
    assert len(found) == 10
    base, last = found[0], found[-1]
    assert (base["k"], base["workers"], last["k"]) == ("k = 1.05", "4 large", "k = 1.1")
    assert base["accuracy, paper (%)"] == "67.8" and "gain" not in base
    assert (last["gain, paper"], last["n"]) == ("+2.7", 3) and last["gain"].startswith("+2.70 [")
    for row in rows("table5", World(status=only(n_small=2))):
        has = row["workers"] == "2 small, 2 large"
        assert row["n"] == (3 if has else 0) and (row["accuracy (%)"] != DASH) == has
        assert row.get("gain", DASH) == DASH  # without the baseline
    assert "[" not in rows("table5", seeds=(0,))[1]["gain"]


def test_the_hybrid_scheme():
    *found, saving = rows("table8")
    assert [row["scheme"] for row in found[:10]] == ["dual-batch"] * 5 + ["hybrid"] * 5
    assert found[8]["gain, paper"] == "+3.3" and found[8]["gain"].startswith("+3.30 [")
    assert "gain" not in found[0] and "gain" in found[5]
    assert saving["paper"] == "×0.90" and saving["real workers"].startswith("×0.7")


def test_imagenet():
    # It is trained under the profile paper alone.
    word, evidence = judge("table10/imagenet_accuracy", "gpu")
    assert word == "not run" and "ImageNet" in evidence
    trained = rows("table10")[:10]
    assert [row["accuracy, paper (%)"] for row in trained[:3]] == ["65.9", "62.1", "64.5"]
    assert {row["n"] for row in trained} == {0} and trained[6]["gain, paper"] == "-2.3"
    found = rows("table10", World(noise=0.0), "paper")
    assert found[9]["accuracy (%)"] == "65.50 ± 0.02"


# Equal updates, and momentum kept.


def test_what_mixing_gains_is_over_four_small_workers():
    (row,) = (
        row
        for row in rows("updates")
        if (row["trained with"], row["workers"]) == ("k = 1.1, over 4 small", "3 small, 1 large")
    )
    assert row["gain (points)"].startswith(row["gain, paper (points)"])
    paper, ours = drawn_gains(figure("updates"), "paper and ours, k = 1.1, over 4 small")
    assert paper == pytest.approx([-2.0, 0.0, 0.2]) and ours == pytest.approx(paper, abs=0.05)


def test_all_seeds_with_momentum_kept_judge():
    """They were planned at once; of others, which were looked at, the first look counts."""
    found = rows("updates", profile="quick")
    again = {row["workers"] for row in found if "momentum kept" in row["trained with"] and row["n"]}
    assert again == {"2 small, 2 large", "3 small, 1 large", "4 small"}
    several = results("updates", profile="long", seeds=range(5))
    kept, base = (several.ok("train", setting=KEPT, n_small=n) for n in (4, 0))
    assert cells.change(several, kept, base).n == 4
    assert cells.change(several, kept, cells.section51(several, K[1], 4)).n == 1


# Rates.


def tuned(best_of_large):
    """Return accuracies that are best at twice the rate, of large batches alone at another."""

    def by_rate(config):
        best = best_of_large if config["n_small"] == 0 else 2
        return paper_accuracy(config) - abs(math.log2(config["rate"] / best))

    return World(accuracy=by_rate)


def test_the_best_rate_is_that_of_images_held_out_and_untuned_at_an_end_of_the_grid():
    found = rows("rates", tuned(RATES[0]), "long")
    best = {row["workers"]: row["rate over the paper's"] for row in found if "best" in str(row)}
    assert best == {
        "4 large": f"{RATES[0]:g} (best; {accuracy.UNTUNED})",
        "3 small, 1 large": "2 (best)",
        "4 small": "2 (best)",
    }
    axis = panel(figure("rates", World(spread=0.0), "long"), "accuracy on test images")
    assert "4 large" in axis.get_legend_handles_labels()[1]


def test_nothing_is_chosen_before_all_rates_were_run():
    lacking = World(status=lambda run: None if run.config["rate"] == 4 else {})
    assert "best" not in str(rows("rates", lacking, "long"))
