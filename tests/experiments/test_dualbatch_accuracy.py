"""Accuracies by mix of batch sizes, factor, scheme, updates and rate: read, drawn and judged."""

import math

import pytest
from made_dualbatch import (
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


# Equal updates, and momentum kept.


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
