"""Gradients and minima by batch size: what is read, drawn and judged."""

import made
import pytest
from made_dualbatch import World, figure, judge, panel, results, rows


def edited(**changes):
    """Return an edit of the kinds that are named, by a function of their metrics."""

    def edit(metrics, config):
        if config["batches"] in changes:
            changes[config["batches"]](metrics)

    return {"flatness": edit}


def flat(metrics):
    metrics["rises"] = [[value / 9 for value in row] for row in metrics["rises"]]
    metrics["worst_rise"] /= 9


def flat_at_random(metrics):
    worst = metrics["worst_rise"]
    flat(metrics)
    metrics["worst_rise"] = worst


def steeper(metrics):
    metrics["variances"] = [value / 2**n for n, value in enumerate(metrics["variances"])]


def test_sharper():
    assert judge("flatness/sharper", edit=edited(large=flat))[0] == "not reproduced"
    # One measure of two.
    assert judge("flatness/sharper", edit=edited(large=flat_at_random))[0] == "partly"
    assert judge("flatness/sharper", noise=0.9)[0] == "undecided"


def test_dual_batches():
    word, evidence = judge("flatness/dual_flatter", edit=edited(large=flat))
    assert word == "not reproduced" and "dual over large" in evidence
    assert judge("flatness/dual_flatter", edit=edited(small=flat))[0] == "reproduced"


def test_variance():
    holds = made.check_row("dualbatch/flatness", 0, results("flatness"))
    assert holds["holds"] == "yes" and "small batches ×0.50" in holds["evidence"]
    wrong = results("flatness", World(edit=edited(small=steeper)))
    assert made.check_row("dualbatch/flatness", 0, wrong)["holds"] == "NO"


def test_loss():
    def low(metrics):
        metrics["test_loss"] = 0.1

    assert judge("flatness/test_loss", edit=edited(large=low))[0] == "not reproduced"


def test_table():
    small, large, dual = rows("flatness", World(noise=0.0, spread=0.0))
    assert [row["batch sizes"] for row in (small, large, dual)] == ["87", "500", "87, 500"]
    assert large["rise by random 0.5"].startswith("0.750")
    assert float(dual["σ² of a sample"].split()[0]) == pytest.approx(5.0)
    assert small["variance ∝ N to the"].startswith("-1.00")


def test_lines_of_figure_1():
    drawn = figure("figure1")
    large, small = (panel(drawn, f"{size} batches").get_lines() for size in ("large", "small"))
    train, test = large
    assert train.get_ydata()[5] == pytest.approx(0.5) == min(train.get_ydata())
    assert test.get_ydata()[5] > train.get_ydata()[5]
    assert max(train.get_ydata()) > max(small[0].get_ydata())
