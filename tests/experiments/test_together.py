"""The study of all five: what it measures on toys, what it makes of records, and its page."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from made import check_row, made_results, verdict
from torch import nn

from repro.datasets import ImageData, Split
from repro.experiments import load_paper
from repro.experiments.design import LONG, SEEDS, claims_of, paper_toml
from repro.experiments.judge import NotRun
from repro.experiments.query import Results
from repro.experiments.story import filled
from repro.experiments.together import (
    accuracy,
    advice,
    decision,
    limit,
    measuring,
    networks,
    runs,
    training,
)
from repro.experiments.together.methods import micro_batches
from repro.experiments.together.runs import CIFAR, LABELS, NETWORKS, STRATEGIES
from repro.measure import machine

CHOSEN = {CIFAR: "cifar10"}
_TOY = {"fits": 4, "multiples": [1, 4], "warmup": 0, "repeats": 2, "threads": 1}
RESNET = _TOY | {
    "network": "ResNet-18",
    "model": {"name": "resnet_cifar", "depth": 8, "width": 4},
    "image": [12, 12],
}
WORDS = {"name": "transformer", "vocabulary": 16, "length": 8, "width": 8, "heads": 2, "layers": 3}
TRANSFORMER = _TOY | {"network": "Transformer", "model": WORDS}


@pytest.fixture(scope="module", autouse=True)
def memory_is_not_kept():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "keep_freed_memory", lambda: None)
        yield


def measured(config, mode):
    """Return the points of a way at what fits and at four times that."""
    found = measuring.limit(config | {"mode": mode}, 0, None, "cpu")
    assert all(point.get("peak_bytes", 0) <= found.metrics["limit_bytes"]
               for point in found.metrics["points"])  # fmt: skip
    return found.metrics["points"]


class TestUnderALimit:
    def test_undivided_training_ends_at_what_fits(self):
        first, last = measured(RESNET, "undivided")
        assert first["fits"] and not last["fits"]
        assert "simulated limit" in last["why"]

    @pytest.mark.parametrize("mode", ["accumulation", "mbs"])
    def test_dividing_fits_and_is_exact_without_batchnorm(self, mode):
        for point in measured(TRANSFORMER, mode):
            assert point["fits"] and 1 <= point["micro"] <= 4
            assert point["gradient_error"] < 1e-5 and point["batchnorm_error"] is None

    def test_deferred_batchnorm_mends_statistics_and_not_gradients(self):
        plain, deferred = (measured(RESNET, mode)[1] for mode in ("mbs", "mbs_deferred"))
        assert plain["gradient_error"] > 0.01 and deferred["gradient_error"] > 0.01
        assert deferred["batchnorm_error"] < plain["batchnorm_error"] / 2

    @pytest.mark.parametrize("mode", ["outofcore", "outofcore_file"])
    def test_swapping_has_the_gradient_of_the_whole(self, mode):
        for point in measured(RESNET, mode):
            assert point["fits"] and point["gradient_error"] == point["batchnorm_error"] == 0

    def test_save_on_cpu_holds_less_within_the_limit(self):
        saved, whole = (measured(RESNET, mode)[0] for mode in ("save_on_cpu", "undivided"))
        assert saved["peak_bytes"] < whole["peak_bytes"] and saved["host_bytes"] > 0
        assert saved["gradient_error"] == 0

    def test_recomputing_makes_room_and_counts_statistics_twice(self):
        alone, with_mbs, mbs = (
            measured(RESNET, mode) for mode in ("checkpointing", "checkpointing_mbs", "mbs")
        )
        assert alone[0]["gradient_error"] < 1e-5 and alone[0]["batchnorm_error"] > 0.01
        assert with_mbs[1]["micro"] > mbs[1]["micro"]

    def test_mbs_inside_out_of_core_takes_larger_micro_batches(self):
        assert measured(RESNET, "mbs_in_outofcore")[1]["micro"] == 8

    def test_a_wrong_gradient_would_be_seen(self, monkeypatch):
        streamer = partial(measuring.make_way.__globals__["MicroBatchStreamer"])
        wrong = partial(streamer, normalization="none")
        monkeypatch.setitem(measuring.make_way.__globals__, "MicroBatchStreamer", wrong)
        assert measured(TRANSFORMER, "mbs")[1]["gradient_error"] > 0.5

    def test_errors_are_of_as_many_tensors(self):
        one = [torch.ones(3)]
        assert measuring.relative(one, [torch.full((3,), 2.0)]) == 0.5
        assert measuring.relative([], []) is None
        with pytest.raises(ValueError, match="0 tensors for 1"):
            measuring.relative([], one)

    @pytest.mark.parametrize(
        "model",
        [RESNET["model"], WORDS, {"name": "densenet", "depth": 10, "growth": 2},
         {"name": "unet", "width": 2, "depth": 2}],
    )  # fmt: skip
    def test_recomputed_networks_have_the_same_gradients_in_the_same_order(self, model):
        config = {"model": model, "image": [8, 8]}
        problem, gradients = networks.build_problem(config, 2), []
        for recomputed in (False, True):
            built = networks.build_model(config, "cpu")
            if recomputed:
                networks.recompute(built)
                assert any(isinstance(m, networks.Recomputed) for m in built.modules())
            problem.loss(built(problem.inputs), problem.targets).backward()
            gradients.append([p.grad for p in built.parameters()])
        torch.testing.assert_close(*gradients)

    def test_sizes_that_are_tried(self):
        assert micro_batches("outofcore", 8, 128) == [None]
        assert micro_batches("mbs", 8, 128) == [8, 6, 4, 2, 1]
        assert micro_batches("checkpointing_mbs", 8, 32)[:3] == [32, 16, 8]
        assert micro_batches("mbs_in_outofcore", 8, 128)[0] == 16


def limited(run, seed, **changes):
    """Make the record of a way: all fit but undivided beyond, each image takes as long."""
    config = run.config
    if run.experiment != runs.LIMIT:
        return None
    points, timings = [], {}
    divided = config["mode"] in ("accumulation", "mbs", "mbs_deferred")
    for multiple in config["multiples"]:
        fits = multiple == 1 or config["mode"] not in (
            {"undivided", "checkpointing", "save_on_cpu", "outofcore", *changes.get("fails", ())}
            - {*changes.get("fits", ())}
        )
        point = {"multiple": multiple, "batch": multiple * config["fits"], "fits": fits, "why": ""}
        if fits:
            point |= {
                "micro": 4 if divided else None, "peak_bytes": 100, "host_bytes": 0,
                "gradient_error": 1e-7, "batchnorm_error": 0.1,
            } | changes.get(config["mode"], {})  # fmt: skip
            slow = changes.get("slow", {}).get(config["mode"], 1.0)
            rounds = [0.99, 1.0, 1.01]
            timings[f"step ×{multiple}"] = {
                "samples_s": [slow * multiple * t for t in rounds], "warmup": 0
            }  # fmt: skip
            timings[f"reference ×{multiple}"] = {"samples_s": [1.0, 1.0, 1.0], "warmup": 0}
        points.append(point)
    return {
        "metrics": {"limit_bytes": 100, "points": points}, "timings": timings, "peak_bytes": 100,
    }  # fmt: skip


LARGER = {
    "mbs": {"gradient_error": 1.0},
    "checkpointing_mbs": {"micro": 8},
    "mbs_in_outofcore": {"micro": 8},
}
SWAPS = {"fits": ("outofcore",)}


def limits(**changes):
    return made_results("together/limit", partial(limited, **changes), CHOSEN, "quick")


class TestClaimsUnderALimit:
    def test_the_speed_kept_is_of_an_image(self):
        found = limit.points(limits(slow={"mbs": 1.25}), "U-Net", "mbs")
        speeds = [math.exp(found[multiple].speed.mean) for multiple in (1, 16)]
        assert speeds == pytest.approx([0.8, 0.8], rel=1e-3)
        assert found[16].slowdowns == pytest.approx([1.2375, 1.25, 1.2625])

    @pytest.mark.parametrize(
        ("key", "changes", "word"),
        [
            ("swapping_always_fits", {}, "not reproduced"),
            ("recomputing_ends", {}, "reproduced"),
            ("recomputing_ends", {"fits": ("save_on_cpu",)}, "partly"),
            ("larger_micro_batches", LARGER, "reproduced"),
            ("larger_micro_batches", LARGER | {"mbs": {"gradient_error": 1e-9}}, "not reproduced"),
            ("larger_micro_batches", {"mbs": {"gradient_error": 1.0}}, "not reproduced"),
            ("larger_micro_batches", LARGER | {"mbs_in_outofcore": {"micro": 4}}, "partly"),
            ("streaming_keeps_speed", {}, "reproduced"),
            ("streaming_keeps_speed", {"slow": {"mbs": 1.5}}, "not reproduced"),
            ("recomputing_costs", {"slow": {"checkpointing": 4 / 3}}, "reproduced"),
            ("recomputing_costs", {}, "not reproduced"),
            ("recomputing_costs", {"slow": {"checkpointing": 1.07}}, "partly"),
            ("streaming_over_swapping", {}, "not run"),  # nothing swaps beyond what fits
            ("streaming_over_swapping", SWAPS | {"slow": {"outofcore": 1.4}}, "reproduced"),
            ("streaming_over_swapping", SWAPS | {"slow": {"outofcore": 1.1}}, "partly"),
            ("streaming_over_swapping", SWAPS | {"slow": {"mbs": 1.4}}, "not reproduced"),
        ],
    )
    def test_verdicts_follow_the_records(self, key, changes, word):
        found = verdict(f"together/limit/{key}", limits(**changes))
        assert found.word == word, found.evidence

    @pytest.mark.parametrize(
        ("position", "changes"),
        [
            (1, {"fails": ("mbs",)}),
            (2, {"mbs": {"gradient_error": 0.01}}),
            (3, {"checkpointing": {"gradient_error": 0.01}}),
            (4, {"mbs_deferred": {"batchnorm_error": 0.2}}),
        ],
    )
    def test_checks_hold_and_a_planted_fault_breaks_each(self, position, changes):
        sound = limits(mbs_deferred={"batchnorm_error": 0.01})
        assert check_row("together/limit", position, sound)["holds"] == "yes"
        assert check_row("together/limit", position, limits(**changes))["holds"] == "NO"

    def test_the_table_and_the_claim_show_one_interval(self):
        found = limits(slow={"mbs": 1.25})
        told = verdict("together/limit/streaming_keeps_speed", found).evidence
        (row,) = (r for r in limit.table(found) if (r["network"], r["method"]) == ("U-Net", "MBS"))
        cell = row["images/s over undivided, ×16"]
        assert cell.startswith("×0.80 [×0.7") and f"U-Net, mini-batch 128 {cell}" in told

    def test_without_records_nothing_is_judged(self):
        nothing = Results(runs.under_limit("quick"), (0,), [])
        artefact = load_paper("together").artefacts["limit"]
        for key in artefact.claims:
            assert verdict(f"together/limit/{key}", nothing).word == "not run"
        assert {check.row(nothing)["holds"] for check in artefact.checks} == {"not run"}
        assert not len(artefact.table(nothing)) and "Not run yet" in artefact.caption(nothing)
        artefact.figure(nothing)

    def test_what_is_simulated_is_said_where_the_numbers_stand(self):
        artefact, found = load_paper("together").artefacts["limit"], limits()
        assert "SIMULATED" in artefact.caption(found)
        drawn = artefact.draw(found)
        assert "SIMULATED" in drawn.get_suptitle()
        told = [f"ours: {network}, SYNTHETIC" for network in NETWORKS]
        assert [axis.get_title() for axis in drawn.axes] == told
        rows = [text.get_text() for text in drawn.axes[0].get_yticklabels()]
        assert rows == list(LABELS.values())

    def test_a_mark_is_where_the_speed_is_and_a_cross_where_nothing_fits(self):
        drawn = load_paper("together").artefacts["limit"].draw(limits(slow={"mbs": 1.25}))
        marks = {line.get_label(): line for line in drawn.axes[0].lines}
        row = list(LABELS).index("mbs")
        speeds = {round(y): x for x, y in marks["16× the largest that fits"].get_xydata()}
        assert speeds[row] == pytest.approx(0.8, rel=1e-3)
        failed = {round(y) for y in marks["does not fit"].get_ydata()}
        assert list(LABELS).index("undivided") in failed and row not in failed
        assert not failed & set(speeds)


class TestAdvice:
    @pytest.mark.slow
    @pytest.mark.thorough
    def test_a_toy_is_foretold_as_it_is_measured(self):
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

        def made(run, seed):
            if run.experiment != runs.FORETELL:
                return limited(run, seed)
            config, told = run.config, []
            for mode in config["modes"]:
                as_measured = next(
                    limited(r, 0)["metrics"]["points"] for r in runs.under_limit("quick")
                    if r.config["network"] == config["network"] and r.config["mode"] == mode
                )  # fmt: skip
                for point in as_measured:
                    fits = point["fits"] != (mode in wrong)
                    told.append({
                        "mode": mode, "multiple": point["multiple"], "fits": fits,
                        "slowdown": off if fits else None, "peak_bytes": 100,
                    })  # fmt: skip
            return {"metrics": {"limit_bytes": 100, "cells": told}}

        return made_results("together/advice", made, CHOSEN, "quick")

    @pytest.mark.parametrize(
        ("key", "changes", "word"),
        [
            ("fits", {}, "reproduced"),
            ("fits", {"wrong": ("mbs",)}, "not reproduced"),
            ("time", {"off": 1.1}, "reproduced"),
            ("time", {"off": 0.8}, "not reproduced"),
        ],
    )
    def test_verdicts_follow_the_records(self, key, changes, word):
        found = verdict(f"together/advice/{key}", self.results(**changes))
        assert found.word == word, found.evidence

    def test_errors_are_of_what_was_foretold_over_what_was_measured(self):
        cell = advice.cells(self.results(off=1.2)).dropna(subset="time").iloc[0]
        assert cell["time"] == pytest.approx(0.2, rel=1e-3) and cell["peak"] == 0 and cell["right"]
        drawn = load_paper("together").artefacts["advice"].draw(self.results())
        assert "SIMULATED" in drawn.axes[0].get_title()

    def test_without_records(self):
        nothing = Results(runs.predictions("quick"), (0,), [])
        artefact = load_paper("together").artefacts["advice"]
        for key in artefact.claims:
            assert verdict(f"together/advice/{key}", nothing).word == "not run"
        assert not len(artefact.table(nothing))
        artefact.figure(nothing)


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
    final += (lucky or {}).get(name, 0.0) * (seed in CHOOSE)
    images = config["train_samples"]
    updates = {"fixed": 40, "theta_mbs": 20}.get(name, 30)
    return {
        "metrics": {
            "held_out": [shown] * epochs, "test": [final + (rate == LOWEST) * 50] * epochs,
            "updates": [updates * (n + 1) for n in range(epochs)],
            "work": [[[16, images * (n + 1), updates * (n + 1)]] for n in range(epochs)],
            "parallel": [100.0 * (n + 1) * (0.5 if name == "cyclic_theta" else 1)
                         for n in range(epochs)],
            "batch": [config["small"]] * epochs, "diverged": (name, rate) in diverged,
        },
        "dataset": {"name": "cifar10", "fingerprint": "f", "provenance": "all", "kind": "real"},
    }  # fmt: skip


def trainings(target="accuracy", **changes):
    made_ = made_results(
        f"together/{target}", partial(history, **changes), CHOSEN, "quick", CHOOSE + JUDGE
    )
    made_.profile = LONG  # quick decides none of its claims
    return made_


class TestTowardsOneAccuracy:
    def test_the_rate_is_that_of_held_out_images_not_of_the_test(self):
        found = trainings()
        assert {r.config["rate"] for r in accuracy.trained(found, "fixed")} == {BEST}
        cell = accuracy.cell(found, "fixed", "test")
        assert cell == pytest.approx([29.9, 30.0, 30.1]) and cell.seeds == JUDGE

    def test_a_rate_that_diverged_is_not_chosen(self):
        found = trainings(diverged={("fixed", BEST)})
        assert {r.config["rate"] for r in accuracy.trained(found, "fixed")} == {LOWEST}

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
        drawn = load_paper("together").artefacts["accuracy"].draw(found)
        labels = drawn.axes[0].get_legend_handles_labels()[1]
        assert [name for name in labels if "untuned" in name] == ["linear scaling (untuned)"]

    def test_no_seed_that_chose_a_rate_judges_it(self):
        """Those that chose are 20 points too good, and nobody sees it."""
        key = "together/accuracy/streamed_as_undivided"
        found = trainings(lucky={"theta": 20.0})
        assert verdict(key, found).word == "reproduced"
        assert {r.seed for r in accuracy.trained(found, "theta")} == set(JUDGE)
        alone = verdict(key, trainings(judge=()))
        assert alone.word == "not run" and "none that chose judges it" in alone.evidence
        assert {r.seed for r in accuracy.trained(trainings(judge=()), "theta")} == set(CHOOSE)

    def test_the_first_look_at_the_records_is_the_search(self):
        look = paper_toml("together")["first_look"]
        assert look == {"train": list(SEEDS[LONG])}

    def test_a_search_over_fewer_rates_is_none(self):
        found = trainings()
        found.records = [
            r for r in found.records
            if (r.config.get("strategy"), r.config.get("rate")) != ("theta", LOWEST)
        ]  # fmt: skip
        assert accuracy.trained(found, "theta") == [] and accuracy.trained(found, "fixed")
        judged = verdict("together/accuracy/streamed_as_undivided", found)
        assert judged.word == "not run"

    def test_seconds_are_of_images_and_passes(self):
        found = trainings()
        (record, *_) = accuracy.trained(found, "fixed")
        assert accuracy.seconds(found, record) == pytest.approx(640 * 10 * 0.001 + 400 * 0.01)

    @pytest.mark.parametrize(
        ("key", "accuracies", "word"),
        [
            ("streamed_as_undivided", {}, "reproduced"),
            ("streamed_as_undivided", {"theta": 40.0}, "not reproduced"),
            ("fewer_updates", {}, "reproduced"),
            ("growth_keeps_accuracy", {"theta_mbs": 35.0}, "reproduced"),
            ("growth_keeps_accuracy", {"theta_mbs": 25.0}, "not reproduced"),
            ("linear_loses", {"linear": 27.0}, "reproduced"),
            ("linear_loses", {"linear": 29.0}, "partly"),
            ("linear_loses", {"linear": 31.0}, "not reproduced"),
            ("larger_workers", {"dual_mbs": 25.0}, "not reproduced"),
            ("cycling_saves", {}, "reproduced"),
            ("together_wins", {"dual_mbs": 35.0}, "reproduced"),
            ("together_wins", {"dual_mbs": 35.0, "hybrid": 36.0}, "not reproduced"),
        ],
    )
    def test_verdicts_follow_the_records(self, key, accuracies, word):
        found = verdict(f"together/accuracy/{key}", trainings(accuracies=accuracies))
        assert found.word == word, found.evidence

    def test_the_best_method_alone_is_chosen_by_held_out_images_of_the_seeds_that_chose(self):
        found = trainings(accuracies={"noise": 33.0}, lucky={"hybrid": 20.0})
        assert accuracy.best_alone(found) == "noise"
        told = verdict("together/accuracy/together_wins", found)
        assert told.word == "not reproduced" and "less noise scale -3.00" in told.evidence

    def test_the_table_and_the_claim_show_one_interval(self):
        found = trainings(accuracies={"theta_mbs": 29.0})
        told = verdict("together/accuracy/growth_keeps_accuracy", found).evidence
        rows = {row["strategy"]: row["less fixed (points)"] for row in accuracy.table(found)}
        assert f"growth less fixed {rows[STRATEGIES['theta_mbs']]}" in told

    def test_simulated_time_is_named(self):
        assert claims_of("together")["accuracy"]["cycling_saves"].kind == "simulated"
        artefact, found = load_paper("together").artefacts["accuracy"], trainings()
        assert "SIMULATED" in artefact.caption(found)
        drawn = artefact.draw(found)
        assert "SIMULATED" in drawn.axes[3].get_xlabel()
        assert drawn.get_suptitle() == "ours: ResNet-8, cifar10"
        assert [row["strategy"] for row in accuracy.table(found)] == list(STRATEGIES.values())


def _pieces(start, end):
    batch = range(start, min(start + 10, end))
    return [batch[n : n + 4] for n in range(0, len(batch), 4)]


class TestLearning:
    CONFIG = {"devices": 4, "memory": 32, "step_images": 10.0}  # noqa: RUF012

    def test_work_by_hand(self):
        work = training.Work(self.CONFIG, 16)
        work.count(128, 16, None)
        assert (work.updates, work.by_side, work.parallel) == (1, {16: [128, 1]}, 32 + 10)
        work.count(128, 8, 16)  # a quarter of the pixels, two passes on each device
        assert work.by_side[8] == [128, 8]
        assert work.parallel == 42 + 32 / 4 + 2 * 10
        work.count(16, 16, None, updates=False)
        assert work.updates == 2

    def test_a_worker_that_streams_takes_a_pass_for_each_micro_batch(self):
        clock = training.StreamedTime(1.0, 10.0, micro=4)
        passes = [len(piece) for batch in range(0, 27, 10) for piece in _pieces(batch, 27)]
        assert clock.pass_time(10, 27) == sum(passes) + 10 * len(passes)
        assert clock.pass_time(4, 27) == training.TimeModel(1.0, 10.0).pass_time(4, 27)

    def test_streamed_passes_leave_the_gradient_of_the_batch(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
        inputs, targets = torch.randn(10, 3, 2, 2), torch.arange(10)
        gradients = []
        for strategy in ("theta", "theta_mbs"):
            model.zero_grad()
            config = {"strategy": strategy, "memory": 4}
            passes = training.passes_of(config, model, nn.functional.cross_entropy, "cpu")
            passes(inputs, targets)
            gradients.append(model[1].weight.grad.clone())
        torch.testing.assert_close(*gradients)

    def test_a_pace_that_noise_turns_over_is_not_below_zero(self):
        assert training.line([1, 2], [3.0, 5.0]) == pytest.approx((2.0, 1.0))
        assert training.line([1, 2], [5.0, 3.0]) == pytest.approx((0.0, 4.0), abs=1.5)
        assert min(training.line([1, 2], [5.0, 3.0])) >= 0

    @pytest.fixture
    def images(self):
        made = torch.Generator().manual_seed(0)
        shapes = {"train": 96, "test": 32}
        splits = {
            name: Split(
                torch.randint(256, (count, 3, 8, 8), generator=made, dtype=torch.uint8),
                torch.arange(count) % 10,
            )
            for name, count in shapes.items()
        }
        classes = tuple(map(str, range(10)))
        return ImageData("toy", "toy", "synthetic", "random", "0" * 16, classes, **splits)

    @pytest.mark.parametrize("strategy", ["noise", "theta_mbs", "dual_mbs", "cyclic_theta"])
    def test_every_kind_trains_its_samples_at_its_resolutions(self, images, strategy):
        planned = runs.trainings("smoke", {CIFAR: "digits"})
        (run,) = [run for run in planned if run.config.get("strategy") == strategy]
        found = training.train(run.config, 0, images, "cpu").metrics
        assert not found["diverged"] and len(found["test"]) == run.config["epochs"]
        work = {side: count for side, count, _ in found["work"][-1]}
        wanted = run.config["epochs"] * run.config["train_samples"]
        assert set(work) == ({6, 8} if strategy == "cyclic_theta" else {8})
        extra = 4 * 8 * run.config["epochs"] if strategy == "noise" else 0
        assert sum(work.values()) == pytest.approx(wanted + extra, rel=0.02)

    @pytest.mark.parametrize("strategy", ["fixed", "theta_mbs", "dual_mbs"])
    def test_as_a_gpu_computes(self, images, strategy):
        planned = runs.trainings("smoke", {CIFAR: "digits"})
        (run,) = [run for run in planned if run.config.get("strategy") == strategy]
        fast = {"autocast": "bfloat16", "channels_last": True, "captured": True}
        gpu = {r.config.get("captured") for r in runs.trainings("gpu", CHOSEN)}
        found = training.train(run.config | fast, 0, images, "cpu").metrics
        assert gpu == {True} and not found["diverged"]
        plain = training.train(run.config, 0, images, "cpu").metrics
        assert found["work"] == plain["work"] and found["updates"] == plain["updates"]
        paced = runs.trainings("smoke", {CIFAR: "digits"})[-1].config
        assert len(training.pace(paced | fast, 0, None, "cpu").metrics["fits"]) == 2

    def test_a_mini_batch_of_one_micro_batch_is_captured_where_others_stream(self, monkeypatch):
        seen = []

        class Captured:
            captured = True

            def __init__(self, *options):
                pass

            def __call__(self, inputs, targets):
                seen.append(len(inputs))
                return torch.zeros(())

        monkeypatch.setattr(training, "CapturedPasses", Captured)
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
        config = {"strategy": "theta_mbs", "memory": 4}
        passes = training.passes_of(config, model, nn.functional.cross_entropy, "cpu")
        for count in (4, 10):
            passes(torch.randn(count, 3, 2, 2), torch.arange(count) % 10)
        assert seen == [4] and model[1].weight.grad is not None

    def test_a_training_that_diverges_ends_there(self, images):
        (run,) = [r for r in runs.trainings("smoke", {CIFAR: "digits"})
                  if r.config.get("strategy") == "dual"]  # fmt: skip
        found = training.train(run.config | {"rate": 1e30}, 0, images, "cpu").metrics
        assert found["diverged"] and len(found["test"]) < run.config["epochs"]


class TestThePage:
    def test_tuned_convolutions_are_compared_where_they_ran(self):
        ours = limits(slow={"mbs": 2.0, "tuned_mbs": 1.25})
        (row,) = (r for r in decision.table(ours) if r["tool"].startswith("μ-cuDNN"))
        assert row["what it gives and costs"] == "of undivided images/s: ResNet-18 0.80 at 4×"
        assert row["the wrong tool"].endswith("of undivided images/s: ResNet-18 0.50 at 4×")

    def test_its_numbers_are_those_of_the_records(self):
        rows = {row["tool"]: row for row in decision.table(trainings("decision"))}
        assert "U-Net 1.00 at 16×" in rows["Micro-Batch Streaming"]["what it gives and costs"]
        assert "updates over fixed: ×0.50;" in rows["θ-adaptive + MBS"]["what it gives and costs"]
        same, _, keeps = rows["θ-adaptive + MBS"]["claims"].partition("; ")
        assert same == "streamed_as_undivided: reproduced" and keeps.endswith(": reproduced")
        changed = trainings("decision", accuracies={"theta_mbs": 25.0})
        rows = {row["tool"]: row for row in decision.table(changed)}
        assert "-5.00 [" in rows["θ-adaptive + MBS"]["what it gives and costs"]
        told = "growth_keeps_accuracy: not seen here"
        assert told in rows["θ-adaptive + MBS"]["claims"]

    def test_where_a_way_ends_is_the_first_that_does_not_fit(self):
        rows = {row["tool"]: row for row in decision.table(limits())}
        told = rows["Checkpointing (torch's)"]["the wrong tool"]
        assert "does not fit on ResNet-18 at 4×" in told

    def test_every_row_points_at_a_figure_that_there_is(self):
        artefacts = load_paper("together").artefacts
        for row in decision.table(trainings("decision")):
            name = row["figure"].partition("together/")[2].rstrip(")")
            assert artefacts[name].draw

    def test_without_records_it_says_so_and_no_number(self):
        nothing = Results([], (0,), [])
        for row in decision.table(nothing):
            told = row["what it gives and costs"] + row["the wrong tool"]
            assert decision.NOT_RUN in told and not any(c.isdigit() for c in told)


class TestStory:
    """The numbers that are told first are those of records."""

    def test_what_a_combination_learns_follows_the_records(self):
        def look(name):
            return trainings(accuracies={"theta_mbs": 35.0})

        (sentence,) = (s for s in paper_toml("together")["story"]["findings"] if "ends higher" in s)
        said = filled(sentence, load_paper("together"), look)
        assert all(part in said for part in (": reproduced", "+5.00", "×0.50", "predicted ×0.60"))

    def test_what_is_not_there_is_not_said(self):
        (sentence,) = (s for s in paper_toml("together")["story"]["findings"] if "as many" in s)
        with pytest.raises(NotRun):  # nothing swaps beyond what fits
            filled(sentence, load_paper("together"), lambda name: limits())

    def test_effects_are_of_the_records(self):
        assert math.exp(accuracy.growth_over_fixed(trainings()).mean) == pytest.approx(0.5)
        costs = limit.swapped_time(limits(slow={"mbs_in_outofcore": 1.5}))
        assert math.exp(costs.mean) == pytest.approx(1.5, rel=0.01)


def test_a_file_is_refused_where_an_accelerator_swaps():
    from repro.experiments.together.methods import Refused, Way

    config = TRANSFORMER | {"mode": "outofcore_file"}
    problem, model = networks.build_problem(config, 4), networks.build_model(config, "cpu")
    way = replace(Way("outofcore_file", problem, model, "cpu", None, 10**6), device="meta")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(Refused, match="an accelerator swaps to the host"),
    ):
        patch.setattr("repro.measure.accelerator.is_accelerator", lambda device: True)
        with way.within():
            pass
