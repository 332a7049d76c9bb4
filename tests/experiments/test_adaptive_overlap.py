"""How much of the averaging hides, by processes whose layers sleep where they compute."""

import pytest
import torch
from made import made_results

from repro.experiments.adaptive import overlap

CONFIG = {"processes": 8, "layers": 8, "size": 2**15, "steps": 4, "repeats": 5}


def test_a_sleeping_layer_has_the_gradient_of_its_sum():
    layer, x = overlap.SleepingLayer(3), torch.ones(2, 1, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad.tolist() == [2.0, 2.0, 2.0] and x.grad.tolist() == [[1.0], [1.0]]


def test_what_hides_is_counted_over_what_can():
    row = {"computation_s": 4.0, "after_s": [6.0, 6.0, 6.0], "within_s": [5.0, 5.5, 4.5]}
    assert overlap.hidden(row).mean == pytest.approx(50.0)  # 1 s of the 2 s of communication
    longer = {**row, "after_s": [12.0] * 3, "within_s": [8.0, 9.0, 7.0]}
    assert overlap.hidden(longer).mean == pytest.approx(100.0)  # 4 s, all of the computation


def test_the_table_sets_the_model_beside():
    row = {"computation_s": 4.0, "after_s": [6.0, 6.0], "within_s": [5.0, 5.0]}
    ratios = {str(nodes): row for nodes in (256, 64, 128)}
    results = made_results(
        "adaptive/overlap", lambda run, seed: {"metrics": {"ratios": ratios}}, {}, "quick"
    )
    rows = overlap.table(results)
    assert [row["nodes modelled"] for row in rows] == [64, 128, 256]
    assert {row["blocked, measured (%)"] for row in rows} == {"20"}
    assert [row["blocked, model (%)"] for row in rows] == ["0", "0", "43"]


@pytest.mark.slow
def test_averaging_hides_under_computation():
    outcome = overlap.asleep(CONFIG | {"ratios": {"1": 1.0}}, 0, None, "cpu")
    # Of what can hide 65 to 75 % do, also beside other work on two cores. In one bucket after the
    # backward pass, where nothing can, it is below 20 %.
    assert overlap.hidden(outcome.metrics["ratios"]["1"]).mean > 40
