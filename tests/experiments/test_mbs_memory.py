"""Table 2: the mini-batch that fits, and the check of the linear model of memory."""

import pytest
from made import OUT_OF_MEMORY, check_row
from made_mbs import plausible, results

from repro.experiments.mbs.memory import TABLE2


@pytest.mark.parametrize(
    ("fits", "predicted", "holds"),
    [
        (16, 16, "yes"),
        (16, 31, "yes"),
        (16, 32, "NO"),
        (16, 15, "NO"),
        (None, 16, "not run"),  # without a limit
        (16, None, "not run"),
    ],
)
def test_the_check(fits, predicted, holds):
    metrics = {"largest_that_fits": fits, "predicted_largest": predicted}
    row = check_row("mbs/table2", 0, results("table2", lambda run, seed: {"metrics": metrics}))
    assert row["holds"] == holds
    assert holds == "not run" or f"M(B) admits {predicted}" in row["evidence"]


def test_one_model_that_is_predicted_wrongly_fails_the_check():
    def make(run, seed):
        wrong = run.config["role"] == "AmoebaNet-D"
        return {"metrics": {"largest_that_fits": 8, "predicted_largest": 17 if wrong else 12}}

    assert check_row("mbs/table2", 0, results("table2", make))["holds"] == "NO"


@pytest.mark.parametrize("outcome", [None, OUT_OF_MEMORY])
@pytest.mark.parametrize("position", [0, 1])
def test_without_records_the_check_is_not_run(outcome, position):
    row = check_row("mbs/table2", position, results("table2", lambda run, seed: outcome))
    assert row["holds"] == "not run"


@pytest.mark.parametrize(("largest", "holds"), [(32, "yes"), (63, "yes"), (64, "NO"), (31, "NO")])
def test_the_sizes_that_the_papers_card_holds(largest, holds):
    def make(run, seed):
        if run.experiment == "foretell" and run.config["role"] == "AmoebaNet-D":
            return {"metrics": {"largest": largest}}
        return plausible(run, seed)

    row = check_row("mbs/table2", 1, results("table2", make))
    assert row["holds"] == holds and f"AmoebaNet-D: {largest}, paper 32" in row["evidence"]


def test_the_cells():
    rows = TABLE2.table(results("table2", plausible))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert columns["model"] == ["ResNet-50", "ResNet-101", "AmoebaNet-D", "U-Net"]
    assert columns["mini-batch, paper"] == [16, 8, 32, 16]
    assert columns["μ-batch, paper"] == [8, 4, 16, 8]
    assert columns["largest 2ᵏ that fits"] == [8, 4, 16, 8]
    assert columns["μ-batch, ours"] == [4, 2, 8, 4]
    assert set(columns["limit (MiB)"]) == {"3.0"}
    assert set(columns["prediction error"]) == {"-1.23 %"}
