"""The recipe's table agrees with what is planned and with the paper's numbers."""

import pytest

from repro.experiments.design import SEEDS
from repro.experiments.dualbatch import settings
from repro.experiments.dualbatch.recipe import recipe
from repro.experiments.recipes import NOT_STATED, PROFILES

COLUMNS = ["item", "paper", "paper profile", "gpu", "long", "quick", "why they differ"]


@pytest.fixture(scope="module")
def rows():
    return {row["item"]: row for row in recipe()}


def test_every_difference_has_its_reason(rows):
    for item, row in rows.items():
        assert list(row) == COLUMNS and all(isinstance(cell, str) for cell in row.values())
        differs = any(row[column] != row["paper"] for column in PROFILES)
        assert bool(row["why they differ"]) == differs, item


def test_the_paper_profile_is_the_papers_to_the_letter(rows):
    """But for what it does not state, and for its cluster and framework."""
    other = {
        item
        for item, row in rows.items()
        if row["paper"] != row["paper profile"] and row["paper"] != NOT_STATED
    }
    assert other - {"data"} == {
        "a and b",
        "workers",
        "framework",
        "ImageNet: precision",
        "Figure 13: limit of memory",
    }


def test_values_copied_by_hand(rows):
    quick = {item: row["quick"] for item, row in rows.items()}
    assert rows["epochs and rates, section 5.1"]["gpu"] == (
        "80 epochs at 0.1, 40 epochs at 0.02, 20 epochs at 0.004"
    )
    assert rows["B_S at k = 1.1, n_S = 1 to 4"]["paper"] == "38, 87, 127, 160"
    assert rows["warm-up of the baseline, section 5.1"]["paper"] == "5 epochs from 0.02"
    assert rows["optimizer"]["quick"] == "SGD, momentum 0.9, weight decay 0.0005"
    assert rows["ImageNet: B_L"]["paper profile"] == "2,330, 1,110, 740"
    assert rows["Figure 13: limit of memory"]["gpu"] == "24 GiB"
    assert quick["model"] == "resnet_cifar (depth 8, width 8)"
    assert quick["ImageNet: epochs and rates"] == "not trained"
    assert quick["seeds"] == ", ".join(map(str, SEEDS["quick"]))


def test_it_follows_the_settings(monkeypatch, rows):
    changed = settings.SCALE["quick"] | {"stages": (5, 3, 1), "train_samples": 700}
    monkeypatch.setitem(settings.SCALE, "quick", changed)
    monkeypatch.setitem(settings.PAPER["training"], "warmup_epochs", 70)
    again = {row["item"]: row for row in recipe()}
    assert again["epochs and rates, section 5.2"]["quick"].startswith("5 epochs at 0.2")
    assert again["samples of an epoch"]["quick"] == "700"
    assert again["warm-up of the baseline, section 5.1"]["paper"] == "70 epochs from 0.02"
    same = {"model", "dropout, section 5.2", "merge rule"}
    assert all(again[item] == rows[item] for item in same)
