"""The study of all five: what it measures on toys, what it makes of records, and its page."""

import math
from functools import partial

import pytest
import torch
from made import made_results, verdict
from torch import nn

from repro.datasets import ImageData, Split
from repro.experiments import load_paper
from repro.experiments.design import LONG, SEEDS, paper_toml
from repro.experiments.query import Results, find_source, results_of
from repro.experiments.together import accuracy, limit, measuring, methods, runs, training
from repro.experiments.together.runs import CIFAR

pytestmark = pytest.mark.usefixtures("memory_is_not_kept")
PAPER, CHOSEN = load_paper("together"), {CIFAR: "cifar10"}
_TOY = {"fits": 4, "multiples": [1, 4], "warmup": 0, "repeats": 2, "threads": 1}
RESNET = _TOY | {
    "network": "ResNet-18", "model": {"name": "resnet_cifar", "depth": 8, "width": 4},
    "image": [12, 12],
}  # fmt: skip
WORDS = {"name": "transformer", "vocabulary": 16, "length": 8, "width": 8, "heads": 2, "layers": 3}
TRANSFORMER = _TOY | {"network": "Transformer", "model": WORDS}


def measured(config, mode):
    """Return the points of a way at what fits and at four times that."""
    found = measuring.limit(config | {"mode": mode}, 0, None, "cpu").metrics
    assert all(p.get("peak_bytes", 0) <= found["limit_bytes"] for p in found["points"])
    return found["points"]


class TestUnderALimit:
    def test_undivided_training_ends_at_what_fits_and_save_on_cpu_holds_less(self):
        first, last = measured(RESNET, "undivided")
        assert first["fits"] and not last["fits"] and "simulated limit" in last["why"]
        saved, _ = measured(RESNET, "save_on_cpu")
        assert saved["peak_bytes"] < first["peak_bytes"] and saved["host_bytes"] > 0
        assert saved["gradient_error"] == 0

    @pytest.mark.parametrize("mode", ["accumulation", "mbs"])
    def test_dividing_fits_and_is_exact_without_batchnorm(self, mode):
        for point in measured(TRANSFORMER, mode):
            assert point["fits"] and 1 <= point["micro"] <= 4
            assert point["gradient_error"] < 1e-5 and point["batchnorm_error"] is None

    @pytest.mark.slow
    def test_with_batchnorm(self):
        for point in measured(RESNET, "outofcore_file"):  # which swaps the whole
            assert point["fits"] and point["gradient_error"] == point["batchnorm_error"] == 0
        plain, deferred, alone, both, inside = (
            measured(RESNET, mode)
            for mode in ("mbs", "mbs_deferred", "checkpointing", "checkpointing_mbs",
                         "mbs_in_outofcore")
        )  # fmt: skip
        # Deferred statistics mend themselves, and not gradients.
        assert plain[1]["gradient_error"] > 0.01 and deferred[1]["gradient_error"] > 0.01
        assert deferred[1]["batchnorm_error"] < plain[1]["batchnorm_error"] / 2
        # Recomputing counts statistics twice, and makes room; so does swapping.
        assert alone[0]["gradient_error"] < 1e-5 and alone[0]["batchnorm_error"] > 0.01
        assert both[1]["micro"] > plain[1]["micro"] and inside[1]["micro"] == 8

    def test_a_wrong_gradient_would_be_seen(self, monkeypatch):
        wrong = partial(methods.MicroBatchStreamer, normalization="none")
        monkeypatch.setattr(methods, "MicroBatchStreamer", wrong)
        assert measured(TRANSFORMER, "mbs")[1]["gradient_error"] > 0.5
        assert measuring.relative([torch.ones(3)], [torch.full((3,), 2.0)]) == 0.5
        assert measuring.relative([], []) is None

    @pytest.mark.parametrize(
        "model",
        [RESNET["model"], WORDS, {"name": "densenet", "depth": 10, "growth": 2},
         {"name": "unet", "width": 2, "depth": 2}],
    )  # fmt: skip
    def test_recomputed_networks_have_the_same_gradients_in_the_same_order(self, model):
        config = {"model": model, "image": [8, 8]}
        problem, gradients = methods.build_problem(config, 2), []
        for recomputed in (False, True):
            built = methods.build_model(config, "cpu")
            if recomputed:
                methods.recompute(built)
                assert sum(type(m).__name__ == "CheckpointWrapper" for m in built.modules()) >= 2
            problem.loss(built(problem.inputs), problem.targets).backward()
            gradients.append([p.grad for p in built.parameters()])
        torch.testing.assert_close(*gradients)


FAILING = {"undivided", "checkpointing", "save_on_cpu", "outofcore"}


def limited(run, seed, fits=(), fails=(), slow=None, **changes):
    """Make the record of a way: all fit but undivided beyond, each image takes as long."""
    config = run.config
    if run.experiment != runs.LIMIT:
        return None
    mode, points, timings = config["mode"], [], {}
    for multiple in config["multiples"]:
        held = multiple == 1 or mode not in (FAILING | {*fails}) - {*fits}
        point = {"multiple": multiple, "batch": multiple * config["fits"], "fits": held, "why": ""}
        if held:
            micro = 4 if mode in ("accumulation", "mbs", "mbs_deferred") else None
            point |= {"micro": micro, "peak_bytes": 100, "host_bytes": 0, "gradient_error": 1e-7,
                      "batchnorm_error": 0.1, **changes.get(mode, {})}  # fmt: skip
            seconds = [(slow or {}).get(mode, 1.0) * multiple * t for t in (0.99, 1.0, 1.01)]
            timings[f"step ×{multiple}"] = {"samples_s": seconds, "warmup": 0}
            timings[f"reference ×{multiple}"] = {"samples_s": [1.0, 1.0, 1.0], "warmup": 0}
        points.append(point)
    metrics = {"limit_bytes": 100, "points": points}
    return {"metrics": metrics, "timings": timings, "peak_bytes": 100}


LARGER = {"mbs": {"gradient_error": 1.0}, "checkpointing_mbs": {"micro": 8}}


def limits(**changes):
    return made_results("together/limit", partial(limited, **changes), CHOSEN, "quick")


class TestClaimsUnderALimit:
    @pytest.mark.parametrize(
        ("key", "changes", "word"),
        [
            ("swapping_always_fits", {}, "not reproduced"),
            ("recomputing_ends", {"fits": ("save_on_cpu",)}, "partly"),
            ("larger_micro_batches", LARGER | {"mbs_in_outofcore": {"micro": 8}}, "reproduced"),
            ("larger_micro_batches", LARGER, "partly"),
            ("streaming_keeps_speed", {"slow": {"mbs": 1.5}}, "not reproduced"),
            ("recomputing_costs", {"slow": {"checkpointing": 4 / 3}}, "reproduced"),
            ("streaming_over_swapping", {}, "not run"),  # nothing swaps beyond what fits
            ("streaming_over_swapping", {"fits": ("outofcore",), "slow": {"outofcore": 1.4}},
             "reproduced"),
        ],
    )  # fmt: skip
    def test_verdicts_follow_the_records(self, key, changes, word):
        found = verdict(f"together/limit/{key}", limits(**changes))
        assert found.word == word, found.evidence

    def test_the_speed_kept_is_of_an_image(self):
        found = limits(slow={"mbs": 1.25})
        tried = limit.points(found, "U-Net", "mbs")
        assert tried[16]["slowdowns"] == pytest.approx([1.2375, 1.25, 1.2625])
        speeds = [math.exp(limit.speed(tried[multiple]).mean) for multiple in (1, 16)]
        assert speeds == pytest.approx([0.8, 0.8], rel=1e-3)
        slow = limit.swapped_time(limits(slow={"mbs_in_outofcore": 1.5}))
        assert math.exp(slow.mean) == pytest.approx(1.5, rel=0.01)
        told = verdict("together/limit/streaming_keeps_speed", found).evidence
        assert "U-Net, mini-batch 128 ×0.80 [×0.7" in told


class TestAdvice:
    @pytest.mark.slow
    def test_a_toy_is_predicted_as_it_is_measured(self):
        config = RESNET | {"modes": ["undivided", "mbs", "outofcore"], "probe_s": 0.2}
        found = measuring.predict_limit(config, 0, None, "cpu")
        cells = {(c["mode"], c["multiple"]): c for c in found.metrics["cells"]}
        for mode in config["modes"]:
            for point in measured(RESNET, mode):
                cell = cells[mode, point["multiple"]]
                assert cell["fits"] == point["fits"]
                if point["fits"]:
                    assert cell["peak_bytes"] == pytest.approx(point["peak_bytes"], rel=0.05)
        assert cells["undivided", 1]["slowdown"] == 1.0
        assert found.timings["advice"].samples_s[0] > 0

    def results(self, off=1.0, wrong=()):
        """Make records in which advice is as measured, but for what is given."""
        points = {
            (r.config["network"], r.config["mode"]): limited(r, 0)["metrics"]["points"]
            for r in runs.under_limit("quick")
        }

        def made(run, seed):
            if run.experiment != runs.FORETELL:
                return limited(run, seed)
            cells = []
            for mode in run.config["modes"]:
                for point in points[run.config["network"], mode]:
                    fits = point["fits"] != (mode in wrong)
                    told = {"fits": fits, "slowdown": off if fits else None, "peak_bytes": 100}
                    cells.append({"mode": mode, "multiple": point["multiple"], **told})
            return {"metrics": {"limit_bytes": 100, "cells": cells}}

        return made_results("together/advice", made, CHOSEN, "quick")

    def test_predictions_are_compared_with_what_was_measured(self):
        for key, changes, word in (
            ("fits", {}, "reproduced"),
            ("fits", {"wrong": ("mbs",)}, "not reproduced"),
            ("time", {"off": 1.1}, "reproduced"),
            ("time", {"off": 0.8}, "not reproduced"),
        ):
            found = verdict(f"together/advice/{key}", self.results(**changes))
            assert found.word == word, found.evidence
        found = self.results(off=1.2)
        cell = limit.cells(found).dropna(subset="time").iloc[0]
        assert cell["time"] == pytest.approx(0.2, rel=1e-3) and cell["peak"] == 0 and cell["right"]


LOWEST, BEST, HIGHEST = (0.02, 0.08, 0.32)
CHOOSE, JUDGE = (0, 1, 2), (3, 4, 5)


def history(run, seed, accuracies=None, diverged=(), held=None, judge=JUDGE, lucky=None):
    """Make a training's record: accuracy by strategy and rate, and updates by strategy.

    Seeds beyond those that choose train at the best rate alone. Those that choose are `lucky`.
    """
    config = run.config
    if run.experiment == runs.PACE:
        fits = [{"side": side, "image_s": 0.001, "pass_s": 0.01} for side in config["sides"]]
        return {"metrics": {"fits": fits}}
    if run.experiment != runs.TRAIN:
        return limited(run, seed)
    name, rate, epochs = config["strategy"], config["rate"], config["epochs"]
    if seed not in CHOOSE and (rate != BEST or seed not in judge):
        return None
    final = (accuracies or {}).get(name, 30.0) + (seed - 4) * 0.1
    shown = final + (held or {}).get((name, rate), 10.0 if rate == BEST else 0.0)
    final += (lucky or {}).get(name, 0.0) * (seed in CHOOSE) + (rate == LOWEST) * 50
    images, updates = config["train_samples"], {"fixed": 40, "theta_mbs": 20}.get(name, 30)
    cost = 50.0 if name == "cyclic_theta" else 100.0
    numbers = range(1, epochs + 1)
    metrics = {
        "held_out": [shown] * epochs, "test": [final] * epochs,
        "updates": [updates * n for n in numbers],
        "work": [[[16, images * n, updates * n]] for n in numbers],
        "parallel": [cost * n for n in numbers], "batch": [config["small"]] * epochs,
        "diverged": (name, rate) in diverged,
    }  # fmt: skip
    dataset = {"name": "cifar10", "fingerprint": "f", "provenance": "all", "kind": "real"}
    return {"metrics": metrics, "dataset": dataset}


def trainings(target="accuracy", **changes):
    make = partial(history, **changes)
    found = made_results(f"together/{target}", make, CHOSEN, "quick", CHOOSE + JUDGE)
    found.profile = LONG  # quick decides none of its claims
    return found


class TestTowardsOneAccuracy:
    def test_the_rate_is_that_of_held_out_images_which_did_not_diverge(self):
        found = trainings()
        assert {r.config["rate"] for r in accuracy.tuned(found, "fixed").shown} == {BEST}
        cell = accuracy.cell(found, "fixed", "test")
        assert cell == pytest.approx([29.9, 30.0, 30.1]) and cell.seeds == JUDGE
        (record, *_) = accuracy.tuned(found, "fixed").shown
        assert accuracy.seconds(found, record) == pytest.approx(640 * 10 * 0.001 + 400 * 0.01)
        diverged = trainings(diverged={("fixed", BEST)})
        assert {r.config["rate"] for r in accuracy.tuned(diverged, "fixed").shown} == {LOWEST}
        # A search over fewer rates is none.
        found.records = [r for r in found.records if (r.config.get("strategy"),
                         r.config.get("rate")) != ("theta", LOWEST)]  # fmt: skip
        assert {"theta", "fixed"}.intersection(accuracy.found(found)) == {"fixed"}
        assert verdict("together/accuracy/streamed_as_undivided", found).word == "not run"

    @pytest.mark.parametrize("rate", [LOWEST, HIGHEST])
    def test_a_rate_at_the_edge_of_the_grid_is_untuned_and_not_compared(self, rate):
        found = trainings(held={("linear", rate): 50.0})
        rows = {row["strategy"]: row for row in accuracy.table(found)}
        row = rows.pop("linear scaling")
        assert row["rate found"] == f"{rate:g}, at the edge of the grid: untuned"
        assert row["less fixed (points)"] == "–"
        assert {row["rate found"] for row in rows.values()} == {f"{BEST:g}"}
        told = verdict("together/accuracy/linear_loses", found)
        assert told.word == "not run" and "edge of the grid: untuned" in told.evidence
        labels = accuracy.figure(found).axes[0].get_legend_handles_labels()[1]
        assert [name for name in labels if "untuned" in name] == ["linear scaling (untuned)"]

    def test_no_seed_that_chose_a_rate_judges_it(self):
        """Those that chose are 20 points too good, and nobody sees it."""
        key = "together/accuracy/streamed_as_undivided"
        found, chosen = trainings(lucky={"theta": 20.0}), trainings(judge=())
        assert verdict(key, found).word == "reproduced"
        assert {r.seed for r in accuracy.tuned(found, "theta").shown} == set(JUDGE)
        alone = verdict(key, chosen)
        assert alone.word == "not run" and "none that chose judges it" in alone.evidence
        assert {r.seed for r in accuracy.tuned(chosen, "theta").shown} == set(CHOOSE)
        assert paper_toml("together")["first_look"] == {"train": list(SEEDS[LONG])}

    @pytest.mark.parametrize(
        ("key", "accuracies", "word"),
        [
            ("streamed_as_undivided", {"theta": 40.0}, "not reproduced"),
            ("fewer_updates", {}, "reproduced"),
            ("growth_keeps_accuracy", {"theta_mbs": 25.0}, "not reproduced"),
            ("linear_loses", {"linear": 27.0}, "reproduced"),
            ("larger_workers", {"dual_mbs": 25.0}, "not reproduced"),
            ("cycling_saves", {}, "reproduced"),
            ("together_wins", {"dual_mbs": 35.0}, "reproduced"),
            ("together_wins", {"dual_mbs": 35.0, "hybrid": 36.0}, "not reproduced"),
        ],
    )
    def test_verdicts_follow_the_records(self, key, accuracies, word):
        found = verdict(f"together/accuracy/{key}", trainings(accuracies=accuracies))
        assert found.word == word, found.evidence


class TestLearning:
    def test_work_by_hand(self):
        work = training.Work({"devices": 4, "memory": 32, "step_images": 10.0}, 16)
        work.count(128, 16, None)
        assert (work.updates, work.by_side, work.parallel) == (1, {16: [128, 1]}, 32 + 10)
        work.count(128, 8, 16)  # a quarter of the pixels, two passes on each device
        assert work.by_side[8] == [128, 8] and work.parallel == 42 + 32 / 4 + 2 * 10
        work.count(16, 16, None, updates=False)
        assert work.updates == 2

    def test_a_worker_that_streams_takes_a_pass_for_each_micro_batch(self):
        clock = training.StreamedTime(1.0, 10.0, micro=4)
        assert clock.pass_time(10, 27) == 27 + 10 * (3 + 3 + 2)
        assert clock.pass_time(4, 27) == training.TimeModel(1.0, 10.0).pass_time(4, 27)

    def test_streamed_passes_leave_the_gradient_of_the_batch(self, monkeypatch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
        inputs, targets = torch.randn(10, 3, 2, 2), torch.arange(10)
        gradients, seen = [], []
        for strategy in ("theta", "theta_mbs"):
            model.zero_grad()
            config = {"strategy": strategy, "memory": 4}
            passes = training.passes_of(config, model, nn.functional.cross_entropy, "cpu")
            passes(inputs, targets)
            gradients.append(model[1].weight.grad.clone())
        torch.testing.assert_close(*gradients)

        class Captured:  # a mini-batch of one micro-batch is
            captured = True

            def __init__(self, *options):
                pass

            def __call__(self, inputs, targets):
                seen.append(len(inputs))
                return torch.zeros(())

        monkeypatch.setattr(training, "CapturedPasses", Captured)
        passes = training.passes_of(config, model, nn.functional.cross_entropy, "cpu")
        for count in (4, 10):
            passes(inputs[:count], targets[:count])
        assert seen == [4]

    @pytest.fixture
    def images(self):
        torch.manual_seed(0)
        pixels = torch.randint(256, (128, 3, 8, 8), dtype=torch.uint8)
        splits = [Split(own, torch.arange(len(own)) % 10) for own in (pixels[:96], pixels[96:])]
        classes = tuple("0123456789")
        return ImageData("toy", "toy", "synthetic", "random", "0" * 16, classes, *splits)

    def config(self, strategy):
        planned = runs.trainings("smoke", {CIFAR: "digits"})
        return next(run.config for run in planned if run.config.get("strategy") == strategy)

    @pytest.mark.parametrize("strategy", ["noise", "theta_mbs", "dual_mbs", "cyclic_theta"])
    def test_every_kind_trains_its_samples_at_its_resolutions(self, images, strategy):
        config = self.config(strategy)
        found = training.train(config, 0, images, "cpu").metrics
        assert not found["diverged"] and len(found["test"]) == config["epochs"]
        work = {side: count for side, count, _ in found["work"][-1]}
        wanted = config["epochs"] * config["train_samples"]
        assert set(work) == ({6, 8} if strategy == "cyclic_theta" else {8})
        extra = 4 * 8 * config["epochs"] if strategy == "noise" else 0
        assert sum(work.values()) == pytest.approx(wanted + extra, rel=0.02)
        if strategy in training.STREAMED:  # as a GPU computes
            assert {r.config.get("captured") for r in runs.trainings("gpu", CHOSEN)} == {True}
            fast = {"autocast": "bfloat16", "channels_last": True, "captured": True}
            other = training.train(config | fast, 0, images, "cpu").metrics
            assert not other["diverged"] and other["work"] == found["work"]
            paced = runs.trainings("smoke", {CIFAR: "digits"})[-1].config
            assert len(training.pace(paced | fast, 0, None, "cpu").metrics["fits"]) == 2

    def test_a_training_that_diverges_ends_there(self, images):
        config = self.config("dual") | {"rate": 1e30}
        found = training.train(config, 0, images, "cpu").metrics
        assert found["diverged"] and len(found["test"]) < config["epochs"]


class TestThePage:
    def rows(self, found):
        return {row["tool"]: row["what it gives and costs"] for row in accuracy.page(found)}

    def test_its_numbers_are_those_of_the_records(self):
        rows = self.rows(limits(slow={"mbs": 2.0, "tuned_mbs": 1.25}))
        told = "of undivided speed, at 4 times its largest batch"
        assert rows["μ-cuDNN's convolutions"] == f"0.80 {told}"
        assert rows["Micro-Batch Streaming"].startswith("0.50 of")
        rows = self.rows(trainings("decision", accuracies={"theta_mbs": 25.0}))
        told = rows["θ-adaptive + MBS"]
        assert told == "-5.00 points for 0.50 of the updates of a fixed small batch"
        assert rows["Micro-Batch Streaming"].startswith("1.00 of")

    @pytest.mark.usefixtures("reference_records")
    def test_it_shows_each_part_as_it_is_shown_by_itself(self):
        source = find_source(PAPER, local=False)
        page = results_of(PAPER.artefacts["decision"], source)
        parts = [results_of(PAPER.artefacts[name], source) for name in ("limit", "accuracy")]
        assert [part.profile for part in parts] == ["quick", LONG]
        assert page.records == [record for part in parts for record in part.records]
        assert [place.partition(" from ")[0] for place in page.places] == ["Part 1", "Part 2"]
        told = self.rows(page)
        assert "of undivided speed" in told["Micro-Batch Streaming"]
        assert "points for" in told["θ-adaptive + MBS"]

    def test_without_records_it_says_so_and_no_number(self):
        assert set(self.rows(Results([], (0,), [])).values()) == {accuracy.NOT_RUN}
