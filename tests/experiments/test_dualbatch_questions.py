"""All artefacts of dual-batch learning in the paper's world, and the solved tables."""

import made
import pytest
from made_dualbatch import (
    PAPER,
    REPORTED,
    World,
    judge,
    line,
    paper_accuracy,
    results,
    rows,
)

CLAIMS = [f"{name}/{key}" for name, a in PAPER.artefacts.items() for key in a.claims]
# ImageNet is trained under `paper`; engines are compared where a training is small. One process
# says too little of shares, and of the farthest of many batch sizes.
PROFILES = {"table10": "paper", "engines": "quick", "figure4": "long", "table4": "long"}


@pytest.mark.parametrize("target", CLAIMS)
def test_the_papers_own_numbers_reproduce_every_claim(target):
    word, evidence = judge(target, PROFILES.get(target.partition("/")[0], "gpu"))
    assert word == "reproduced", evidence


def mirrored(config):
    return 140 - paper_accuracy(config)


def slow_asp(metrics, config):
    metrics["parts"][0]["round_s"]["asp"] = [9.0, 9.1, 9.2]


def longer(metrics, config):
    """The small-batch worker takes longer: an epoch ends with the slower one."""
    for number, kind in enumerate(config["parts"][0]["epochs"]):
        if kind["in"] == "own" and kind["k"] > 1:
            shares = metrics["parts"][0]["shares_s"][str(number)]
            shares[0] = [1.2 * seconds for seconds in shares[0]]


def flat(metrics, config):
    if config["batches"] == "large":
        metrics["rises"] = [[value / 9 for value in row] for row in metrics["rises"]]
        metrics |= {"worst_rise": metrics["worst_rise"] / 9, "test_loss": 0.1}


def slow_shares(metrics, config):
    for row in metrics["shares"]:
        if "batch" in row:
            row["measured_s"] = 1.1 * row["predicted_s"]


FLAT = {"edit": {"flatness": flat}}
SLOW = {"cycled": lambda side, highest: 1.0 if side == highest else 1.2}
CONTRARY = {
    "figure3/line": {"step": lambda side, n: line(side, n) * (1 + 0.9 * (n / 600) ** 2)},
    "figure4/falls": {"step": lambda side, n: n**1.2},
    "figure4/equation2": {"epoch": lambda side, n: 1.1},
    "table3/factor_gains": {"accuracy": mirrored},
    "table4/shares_predicted": {"edit": {"times": slow_shares}},
    "table5/gain": {"accuracy": lambda config: 68.0 - config["n_small"]},
    "table5/one_too_few": {"accuracy": lambda config: 80.0 - config["n_small"]},
    "table5/three_best": {"accuracy": lambda config: 60.0 + config["n_small"]},
    "table5/lowest_loss": {"loss": lambda config: 2.0 - config["n_small"] / 10},
    "table8/accuracy": {"accuracy": mirrored},
    "table8/gain": {"accuracy": lambda config: 70.0},
    "table8/over_cyclic": {"accuracy": lambda config: 68.0},
    "table8/saving": SLOW,
    "table10/saving": SLOW,
    "table10/imagenet_accuracy": {"accuracy": lambda config: 65.0 - config["n_small"]},
    "table10/imagenet_loss": {"accuracy": lambda config: 65.0},
    "synchronisation/asp_faster": {"edit": {"wall": slow_asp}},
    "synchronisation/asp_converges_worse": {
        "edit": {"synchronise": lambda metrics, config: metrics.update(accuracy=[10.0, 69.0])}
    },
    "flatness/sharper": FLAT,
    "flatness/dual_flatter": FLAT,
    "flatness/test_loss": FLAT,
    "own_plan/extra_time": {"edit": {"wall": longer}},
    "own_plan/gain": {"accuracy": lambda config: 67.8},
}


@pytest.mark.parametrize("target", CLAIMS)
def test_numbers_that_contradict_a_claim_do_not_reproduce_it(target):
    profile = PROFILES.get(target.partition("/")[0], "gpu")
    assert judge(target, profile, **CONTRARY[target])[0] == "not reproduced"


@pytest.mark.parametrize("artefact", PAPER.artefacts)
def test_checks_hold_in_the_papers_world_and_none_without_records(artefact):
    found = results(artefact, profile=PROFILES.get(artefact, "gpu"))
    nothing = results(artefact, World(status=lambda run: None), "paper")
    for check in PAPER.artefacts[artefact].checks:
        assert check.row(found)["holds"] == "yes"
        assert check.row(nothing)["holds"] == "not run"
    for key in PAPER.artefacts[artefact].claims:
        verdict = made.verdict(f"dualbatch/{artefact}/{key}", nothing)
        assert verdict.word == "not run" and verdict.evidence


# Solved tables.


def checked(table, position=0, **world):
    return made.check_row(f"dualbatch/{table}", position, results(table, World(**world)))


def changed(name, by, first=None):
    def edit(metrics, config):
        for row in metrics["rows"][:first]:
            if row.get(name) is not None:
                row[name] += by

    return {"solve": edit}


def test_equations_that_give_other_sizes_are_found():
    row = checked("table2", edit=changed("small_batch", 1, 2))
    assert row["holds"] == "NO" and "B_S: 6 of 8" in row["evidence"]
    row = checked("table6", edit=changed("small_batch", 1))
    assert row["holds"] == "NO" and "CIFAR, B_S: 0 of 8" in row["evidence"]
    assert "CIFAR, d_L: 8 of 8" in row["evidence"]
    # A factor is compared as printed.
    row = checked("table2", edit=changed("factor", 2e-3))
    assert row["holds"] == "NO" and "d_S/d_L: 0 of 6" in row["evidence"]
    assert checked("table2", edit=changed("factor", 1e-5))["holds"] == "yes"


def test_the_raw_measurements_plan():
    def other(metrics, config):
        metrics["frameworks"]["TensorFlow"]["table2"][4] = 39

    row = checked("table2", 1, edit={"published": other})
    assert row["holds"] == "NO" and "39 for 38" in row["evidence"]


@pytest.mark.parametrize(("table", "count"), [("table7", 18), ("table9", 24)])
def test_schedules(table, count):
    def edit(metrics, config):
        metrics["rows"][0]["last"] += 1

    assert checked(table)["evidence"].startswith(f"{count} of {count}")
    wrong = checked(table, edit={"solve": edit})
    assert wrong["holds"] == "NO" and wrong["evidence"].startswith(f"{count - 1} of {count}")
    hybrid = [row["epochs"] for row in rows(table) if row["scheme"] == "hybrid"]
    assert hybrid == [f"{first}, {last}" for first, last in REPORTED[table]["epochs"]]
