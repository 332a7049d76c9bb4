"""The recipe's table: every value is that of the settings, or of the paper's numbers."""

import re

import pytest
from made_adaptive import CHOSEN

from repro.experiments.adaptive import recipe as module
from repro.experiments.adaptive import settings
from repro.experiments.adaptive.settings import CIFAR, DIV2K, GIVEN, PAPER, PHANTOM, SCALE, TASKS
from repro.experiments.design import SEEDS
from repro.experiments.recipes import NOT_STATED

ROWS = {row["item"]: row for row in module.recipe()}
COLUMNS = {"paper profile": "paper", "gpu": "gpu", "long": "long", "quick": "quick"}


def test_columns_are_the_same_everywhere_and_items_differ():
    rows = module.recipe()
    assert all(set(row) == {"item", "paper", *COLUMNS, "why they differ"} for row in rows)
    assert len(ROWS) == len(rows)
    assert all(isinstance(value, str) for row in rows for value in row.values())


def test_what_the_paper_does_not_state_has_its_ground():
    silent = [row for row in ROWS.values() if NOT_STATED in row["paper"]]
    assert len(silent) > 20 and all(row["why they differ"] for row in silent)
    for row in ROWS.values():  # and so has what differs
        ours = {row[column] for column in COLUMNS}
        assert len(ours) == 1 or row["why they differ"], row["item"]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("task", TASKS)
def test_values_are_the_settings(task, column):
    profile = COLUMNS[column]

    def controller(strategy):
        return settings.training(profile, task, CHOSEN, strategy).config["controller"]

    def said(item):
        return ROWS[f"{task}: {item}"][column]

    for strategy in ("best", "linear", "scheduled", "theta"):
        own = controller(strategy)
        numbers = [
            int(n) for n in re.findall(r"\d+", said(f"batch size, {settings.NAMES[strategy]}"))
        ]
        assert numbers == [own["batch"], *([own["max_batch"]] if "max_batch" in own else [])]
    rates = said(f"rate, {settings.NAMES['theta']}").split(" ~ ")
    theta = controller("theta")
    grown = theta["lr"] * theta["max_batch"] / theta["batch"]
    assert [float(rate) for rate in rates] == pytest.approx([theta["lr"], grown])
    assert said(f"K, {settings.NAMES[GIVEN]}") == str(controller(GIVEN)["interval"])
    every = said(f"growth, {settings.NAMES['scheduled']}")
    assert every == f"every {controller('scheduled')['every']} epochs"
    assert said("epochs").endswith(f"{SCALE[profile][task]['epochs']:,}")
    assert said("seeds") == str(len(SEEDS[profile]))
    config = settings.training(profile, task, CHOSEN, "theta").config
    assert said("model").startswith(config["model"]["name"])
    assert said("training images").startswith(f"{config['train_samples']:,} of ")
    assert said("precision") == (config["autocast"] or "float32")


def test_the_papers_values():
    def paper(item):
        return ROWS[item]["paper"]

    assert paper("CIFAR: batch size, θ-adaptive") == "256 ~ 2048"
    assert paper("DIV2K: rate, θ-adaptive") == "0.0004 ~ 0.0016"
    assert [paper(f"{task}: K, θ-adaptive, paper's K") for task in TASKS] == ["5", "10", "60"]
    assert paper("Phantom: rate, linear scaling") == f"{PAPER[PHANTOM]['linear']['lr']:g}"
    assert paper("DIV2K: stop rule") == "PSNR not up by 0.1 dB in 50 epochs"
    assert paper("CIFAR: decay of the rate") == "×0.1 after 80 and 120 epochs"


def test_it_follows_the_settings(monkeypatch):
    monkeypatch.setitem(SCALE["gpu"][DIV2K], "epochs", 77)
    monkeypatch.setitem(settings._OPTIMIZERS[CIFAR], "momentum", 0.5)
    rows = {row["item"]: row for row in module.recipe()}
    assert rows["DIV2K: epochs"]["gpu"] == "at most 77"
    assert "momentum 0.5" in rows["CIFAR: optimizer"]["quick"]
