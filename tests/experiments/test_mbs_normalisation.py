"""Loss normalisation: what is computed, and its claims on worlds that are made up."""

import copy

import pytest
import torch
from made_mbs import CHOSEN, PAPER, gradient_rows, judge, plausible, results

from repro.datasets import load
from repro.experiments.mbs import foretelling, normalising, settings
from repro.experiments.mbs.building import build_model, loss_of, train_loader
from repro.experiments.mbs.normalisation import same_gradient


def rows_of(role):
    run = settings.gradient_errors("smoke", role, CHOSEN)
    dataset = dict(run.config["dataset"])
    data = load(dataset.pop("name"), **dataset)
    return run.config, data, normalising.gradients(run.config, 0, data, "cpu").metrics["rows"]


class TestGradients:
    def test_of_a_mean_loss(self):
        config, data, rows = rows_of("ResNet-50")
        assert config["divisions"] == [[16, 4], [17, 4]]
        frozen = {(r["mini_batch"], r["way"]): r for r in rows if r["frozen"]}
        for mini in (16, 17):
            assert frozen[mini, "exact"]["error"] < 1e-12
            assert frozen[mini, "none"]["length"] > 3
        assert frozen[16, "paper"]["error"] < 1e-12
        assert frozen[16, "none"]["length"] == pytest.approx(4)
        # By hand: a fifth of each micro-batch's mean gradient, the last one of a single image.
        torch.manual_seed(0)
        model = build_model(config, data, "cpu").double().eval()
        images, labels = next(iter(train_loader(config, data, 17, 0, 17)))
        loss = loss_of(config)

        def gradient(pieces):
            own = copy.deepcopy(model)
            for x, y, weight in pieces:
                (weight * loss(own(x.double()), y)).backward()
            return torch.cat([p.grad.flatten() for p in own.parameters()])

        fifths = [(x, y, 0.2) for x, y in zip(images.split(4), labels.split(4), strict=True)]
        whole, ours = gradient([(images, labels, 1.0)]), gradient(fifths)
        error = float((ours - whole).norm() / whole.norm())
        assert frozen[17, "paper"]["error"] == pytest.approx(error) and error > 0.01
        trained = {(r["mini_batch"], r["way"]): r for r in rows if not r["frozen"]}
        assert trained[16, "exact"]["error"] > 0.01  # BatchNorm sees micro-batches

    def test_of_a_loss_that_is_no_mean(self):
        _, _, rows = rows_of("U-Net")
        frozen = {(r["mini_batch"], r["way"]): r for r in rows if r["frozen"]}
        assert frozen[16, "exact"]["error"] < 1e-9 < 1e-4 < frozen[16, "paper"]["error"]


def test_losses_of_all_ways_are_means():
    """Before anything is learned they are alike, summed or not."""
    found = {}
    for way in (None, "none", "paper", "exact"):
        run = settings.normalised_training("smoke", CHOSEN, way)
        config = run.config | {"epochs": 1, "optimizer": run.config["optimizer"] | {"lr": 1e-9}}
        dataset = dict(config["dataset"])
        data = load(dataset.pop("name"), **dataset)
        found[way] = normalising.normalised(config, 0, data, "cpu").metrics["train_loss"]
    whole = found.pop(None)
    for way, losses in found.items():
        assert losses == pytest.approx(whole, rel=0.2), way


class TestClaims:
    def test_the_gradient(self):
        def row(make):
            return same_gradient.row(results("normalisation", make))

        found = row(plausible)
        assert found["holds"] == "NO" and "17 = 4×4 + 1: error 2.0e-01" in found["evidence"]

        def always(run, seed):
            told = plausible(run, seed)
            if run.experiment == "gradients":
                rows = gradient_rows(run.config["divisions"])
                exact = [row | {"error": 1e-16} for row in rows]
                return {"metrics": {"rows": exact}}
            return told

        assert row(always)["holds"] == "yes"

    def test_which_curve_is_closer(self):
        assert judge("normalisation/closer", plausible).word == "reproduced"

        def swapped(run, seed):
            told = plausible(run, seed)
            if run.experiment == "normalised" and run.config["normalization"] in ("none", "paper"):
                way = {"none": "paper", "paper": "none"}[run.config["normalization"]]
                other = settings.normalised_training("paper", CHOSEN, way)
                return plausible(other, seed)
            return told

        assert judge("normalisation/closer", swapped).word == "not reproduced"

    def test_checks_notice_a_wrong_gradient(self):
        def wrong(run, seed):
            if run.experiment != "gradients":
                return plausible(run, seed)
            rows = gradient_rows(run.config["divisions"])
            return {"metrics": {"rows": [row | {"error": 1e-3, "length": 1.0} for row in rows]}}

        artefact = PAPER.artefacts["normalisation"]
        for make, holds in ((plausible, True), (wrong, False)):
            found = results("normalisation", make)
            assert [check.test(found)[0] for check in artefact.checks] == [holds, holds, False]


@pytest.mark.slow
def test_the_largest_of_the_papers_card_is_predicted_by_shapes_alone():
    run = settings.foretold("U-Net")
    found = foretelling.foretell(run.config, 0, None, "cpu").metrics
    assert 16 <= found["largest"] < 32
    less = run.config | {"device_bytes": found["peaks"][0]}
    assert foretelling.foretell(less, 0, None, "cpu").metrics["largest"] == 8
