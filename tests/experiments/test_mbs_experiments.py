"""The experiments themselves: the loss, what is recorded, what is measured."""

import gc

import numpy as np
import pytest
import torch
from made_mbs import CHOSEN, PAPER

from repro import datasets
from repro.experiments import arguments
from repro.experiments import run as running
from repro.experiments.mbs import building, experiments, settings, turns
from repro.experiments.query import Source, results_of
from repro.records import RecordStore


def numpy_bce_dice(logits: np.ndarray, masks: np.ndarray) -> float:
    truth = (masks > 0).astype(np.float64)
    p = 1 / (1 + np.exp(-logits[:, 0]))
    bce = -np.mean(truth * np.log(p) + (1 - truth) * np.log(1 - p))
    dice = 2 * np.sum(p * truth) / (np.sum(p) + np.sum(truth))
    return float(bce + 1 - dice)


class TestLoss:
    @pytest.mark.parametrize("highest", [1, 11])
    def test_against_numpy(self, highest):
        random = np.random.default_rng(highest)
        logits = random.normal(0, 2, (3, 1, 5, 7))
        masks = random.integers(0, highest + 1, (3, 5, 7), np.uint8)
        loss = building.bce_dice_loss(torch.from_numpy(logits), torch.from_numpy(masks))
        assert float(loss) == pytest.approx(numpy_bce_dice(logits, masks), rel=1e-12)

    def test_it_is_of_the_whole_batch_not_a_mean_over_samples(self):
        random = np.random.default_rng(0)
        logits = torch.from_numpy(random.normal(0, 2, (2, 1, 4, 4)))
        masks = torch.zeros(2, 4, 4, dtype=torch.uint8)
        masks[0, :3] = 1
        parts = [float(building.bce_dice_loss(logits[i : i + 1], masks[i : i + 1])) for i in (0, 1)]
        whole = float(building.bce_dice_loss(logits, masks))
        assert whole != pytest.approx(np.mean(parts), abs=1e-3)

    def test_a_certain_right_answer_costs_nothing_and_has_a_gradient(self):
        masks = torch.tensor([[[0, 1], [1, 0]]], dtype=torch.uint8)
        logits = ((masks.double() * 2 - 1) * 50)[:, None].requires_grad_()
        loss = building.bce_dice_loss(logits, masks)
        assert loss.item() == pytest.approx(0, abs=1e-9)
        loss.backward()
        assert torch.isfinite(logits.grad).all()

    def test_without_foreground_it_is_finite(self):
        loss = building.bce_dice_loss(torch.full((1, 1, 2, 2), -200.0), torch.zeros(1, 2, 2).byte())
        assert torch.isfinite(loss)


class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize("role", ["ResNet-50", "U-Net"])
    def test_a_result_is_a_function_of_the_seed_alone(self, role, monkeypatch):
        """Whatever ran before in the process, such as the measurement of the limit."""
        config = settings.training("smoke", role, CHOSEN, 16, 8).config | {"train_samples": 32}
        options = dict(config["dataset"])
        data = datasets.load(options.pop("name"), **options)
        monkeypatch.setattr(experiments, "_limits", {})
        first = experiments.train(config, 3, data, "cpu").metrics  # measures the limit
        second = experiments.train(config, 3, data, "cpu").metrics  # knows it
        other = experiments.train(config, 4, data, "cpu").metrics
        assert first == second
        assert other["train_loss"] != first["train_loss"]

    def test_smoke_records_are_complete(self, smoke):
        records = smoke.store.load("mbs")
        assert {record.status for record in records} == {"ok", "out_of_memory"}
        for record in records:
            if record.experiment != "foretell":  # without data
                assert record.dataset["name"] == record.config["dataset"]["name"]
            assert (record.error is None) == (record.status == "ok")
            if record.experiment != "train" or record.status != "ok":
                continue
            metrics = record.metrics
            assert len(metrics[metrics["metric"]]) == record.config["epochs"]
            assert metrics["best"] == max(metrics[metrics["metric"]])
            assert 0 <= metrics["best"] <= 100
            samples = record.config["train_samples"]
            assert metrics["steps_per_epoch"] == -(-samples // record.config["mini_batch"])
            epoch = record.timings["epoch"]
            assert len(epoch["samples_s"]) + epoch["warmup"] == record.config["epochs"]

    def test_the_limit_divides_as_on_the_papers_card(self, smoke):
        for record in smoke.store.load("mbs"):
            config = record.config
            if record.experiment != "train":
                continue
            if config["limit_fits"] is None:
                assert record.peak_bytes is None and record.metrics["limit_bytes"] is None
                continue
            held = config["micro_batch"] or config["mini_batch"]
            assert (record.status == "ok") == (held <= config["limit_fits"])
            if record.status == "ok":
                assert 0 < record.peak_bytes <= record.metrics["limit_bytes"]

    def test_out_of_memory_names_the_limit(self, smoke):
        errors = [r.error for r in smoke.store.load("mbs") if r.status == "out_of_memory"]
        assert errors
        assert all(error.startswith("BudgetExceededError: ") for error in errors)

    def test_data_that_does_not_serve_the_task(self):
        data = datasets.load("digits", image_size=48)
        config = settings.training("smoke", "U-Net", CHOSEN, 16, None).config
        with pytest.raises(ValueError, match="no masks"):
            experiments.train(config, 0, data, "cpu")


class TestMeasurements:
    def of(self, smoke, experiment):
        return [r for r in smoke.store.load("mbs") if r.experiment == experiment]

    def test_sizes(self, smoke):
        records = self.of(smoke, "size")
        assert {record.config["role"] for record in records} == set(settings.ROLES)
        for record in records:
            metrics = record.metrics
            initial = record.config["limit_fits"]
            assert metrics["largest_that_fits"] == initial
            assert initial <= metrics["predicted_largest"] < 2 * initial
            assert 0 < metrics["auto_micro_batch"] < 2 * initial
            assert metrics["auto_observed_bytes"] <= metrics["limit_bytes"]
            assert metrics["bytes_per_sample"] > 0 and metrics["fixed_bytes"] > 0
            assert metrics["auto_prediction_error"] == pytest.approx(
                metrics["auto_predicted_bytes"] / metrics["auto_observed_bytes"] - 1, abs=0.2
            )
            assert set(record.timings) == {"2", "4", "8", "16", "32"}

    def test_without_a_limit_no_size_is_made_up(self):
        """Under the profile `paper` the card is taken as it is: nothing was tried under a limit."""
        config = settings.sizing("smoke", "ResNet-101", CHOSEN).config
        data = datasets.load("digits", image_size=config["dataset"]["image_size"])
        outcome = experiments.size(config | {"limit_fits": None, "largest": 8}, 0, data, "cpu")
        assert outcome.metrics["limit_bytes"] is None
        assert outcome.metrics["largest_that_fits"] is None
        assert outcome.metrics["predicted_largest"] is None

    def test_overhead_is_the_ratio_of_the_medians(self, smoke):
        for record in self.of(smoke, "overhead"):
            initial = record.config["mini_batch"]
            per_sample = {
                way: np.median(record.timings[way]["samples_s"]) / count
                for way, count in (("undivided", initial), ("halved", initial),
                                   ("doubled", 2 * initial))
            }  # fmt: skip
            for way in ("halved", "doubled"):
                expected = 100 * (per_sample[way] / per_sample["undivided"] - 1)
                assert record.metrics[f"{way}_percent"] == pytest.approx(expected)
                assert len(record.timings[way]["samples_s"]) == record.config["repeats"]

    def test_epochs_in_turns_are_whole_epochs_of_each_way(self, monkeypatch):
        made: dict[str, list[int]] = {}

        def training_step(config, model, optimizer, place):
            step = building.training_step(config, model, optimizer, place)
            name = f"{config['mini_batch']}, {config['micro_batch']}"

            def watched(inputs, targets):
                made.setdefault(name, []).append(len(inputs))
                return step(inputs, targets)

            return watched

        monkeypatch.setattr(turns, "training_step", training_step)
        config = settings.base_config("smoke", "ResNet-50", CHOSEN) | {
            "train_samples": 24,
            "ways": {"all": [16, None], "some": [16, 8]},
            "repeats": 2,
        }
        options = dict(config["dataset"])
        data = datasets.load(options.pop("name"), **options)
        outcome = turns.epochs(config, 0, data, "cpu")
        assert made == {name: 3 * [16, 8] for name in ("16, None", "16, 8")}  # one warms up
        assert {name: len(t.samples_s) for name, t in outcome.timings.items()} == {
            "all": 2, "some": 2}  # fmt: skip

    @pytest.mark.parametrize("role", ["ResNet-50", "U-Net"])
    @pytest.mark.parametrize("micro", [8, None])
    def test_a_training_in_low_precision(self, role, micro):
        """Weights, gradients and the optimizer stay float32; layouts are channels last."""
        config = settings.training("smoke", role, CHOSEN, 16, micro).config | {
            "channels_last": True,
            "autocast": "bfloat16",
            "train_samples": 32,
        }
        options = dict(config["dataset"])
        data = datasets.load(options.pop("name"), **options)
        model = building.build_model(config, data, "cpu")
        kinds = []
        model.register_forward_hook(lambda _, inputs, output: kinds.append(output.dtype))
        step = building.training_step(config, model, building.build_optimizer(config, model), "cpu")
        loader = building.train_loader(config, data, 16, 0, 32)
        losses = [float(step(*batch)) for _ in range(4) for batch in loader]
        assert set(kinds) == {torch.bfloat16}
        assert np.mean(losses[-2:]) < np.mean(losses[:2])
        for weight in model.parameters():
            assert weight.grad.dtype == weight.dtype == torch.float32
            if weight.dim() == 4:
                assert weight.is_contiguous(memory_format=torch.channels_last)
        metrics = building.evaluation(config, data, model, "cpu")()
        assert all(np.isfinite(value) for value in metrics.values())

    def test_a_step_fits_or_runs_out_of_memory(self):
        config = settings.base_config("smoke", "ResNet-50", CHOSEN) | {"limit_bytes": 2**20}
        options = dict(config["dataset"])
        data = datasets.load(options.pop("name"), **options)
        whole = config | {"mini_batch": 64, "micro_batch": None}
        with pytest.raises(torch.OutOfMemoryError):
            experiments.step(whole, 0, data, "cpu")
        outcome = experiments.step(whole | {"micro_batch": 4}, 0, data, "cpu")
        assert 0 < outcome.peak_bytes <= 2**20 == outcome.metrics["limit_bytes"]

    def test_cudnn_times_its_algorithms_where_told(self):
        for before in (False, True):
            torch.backends.cudnn.benchmark = before
            for config, during in [({"benchmark": True}, True), ({}, before)]:
                with running.algorithms_timed(config):
                    assert torch.backends.cudnn.benchmark is during
                assert torch.backends.cudnn.benchmark is before
        torch.backends.cudnn.benchmark = False

    def test_the_timeline_is_in_order(self, smoke):
        (record,) = self.of(smoke, "timeline")
        count = record.config["mini_batch"] // record.config["micro_batch"]
        assert record.metrics["micro_batches"] == count
        assert record.metrics["updates_between_micro_batches"] == 0
        assert record.metrics["updates_after"] == 1
        for kind in ("copy", "compute"):
            spans = [span for span in record.metrics["spans"] if span[0] == kind]
            assert [number for _, number, _, _ in spans] == list(range(count))
            times = [time for _, _, start, end in spans for time in (start, end)]
            assert times == sorted(times) and times[0] >= 0
        start, end = record.metrics["update"]
        assert start < end
        # On a CPU a micro-batch is prepared before it is computed.
        copies, computations = (
            [span for span in record.metrics["spans"] if span[0] == kind]
            for kind in ("copy", "compute")
        )
        for copied, computed in zip(copies, computations, strict=True):
            assert copied[3] <= computed[2] + 1e-3


@pytest.mark.gpu
@pytest.mark.cuda_only("tests/simulated_device/test_smoke.py is its like")
@pytest.mark.slow
def test_the_smoke_profile_on_a_gpu(tmp_path):
    store = RecordStore(tmp_path)
    planned = arguments.plan(PAPER, PAPER.artefacts.values(), "smoke", CHOSEN)
    setting = running.Setting("smoke", "cuda")
    tally = running.execute(PAPER, planned, setting, store, lambda line: None)
    errors = [record.error for record in store.load("mbs") if record.status == "failed"]
    assert not errors
    assert tally.done == len(planned)
    source = Source(PAPER, {("local", "smoke"): store})
    results = results_of(PAPER.artefacts["figure2"], source)
    assert results.records[0].device["type"] == "cuda"
    for artefact in PAPER.artefacts.values():
        found = results_of(artefact, source)
        assert found.missing == 0
        assert len(artefact.table(found)) and artefact.caption(found)


@pytest.mark.gpu
@pytest.mark.parametrize("micro", [8, None])
def test_what_the_profile_gpu_adds_runs_on_an_accelerator(device, micro):
    config = settings.training("smoke", "ResNet-50", CHOSEN, 16, micro).config | {
        "channels_last": True,
        "autocast": "bfloat16",
        "benchmark": True,
        "train_samples": 32,
        "limit_fits": None,
        "limit_bytes": 2**28,
    }
    options = dict(config["dataset"])
    data = datasets.load(options.pop("name"), **options)
    trained = experiments.train(config, 0, data, str(device))
    assert np.isfinite(trained.metrics["train_loss"]).all()
    stepped = experiments.step(config, 0, data, str(device))
    for outcome in (trained, stepped):
        assert 0 < outcome.peak_bytes <= 2**28 == outcome.metrics["limit_bytes"]


@pytest.mark.gpu
def test_undivided_and_streamed_steps_copy_from_pinned_memory(device, monkeypatch):
    config = settings.training("smoke", "ResNet-50", CHOSEN, 16, 8).config | {"train_samples": 32}
    options = dict(config["dataset"])
    data = datasets.load(options.pop("name"), **options)
    pinned = []

    def training_step(config, model, optimizer, place):
        step = building.training_step(config, model, optimizer, place)

        def watched(inputs, targets):
            pinned.append((config["micro_batch"], inputs.is_pinned() and targets.is_pinned()))
            return step(inputs, targets)

        return watched

    monkeypatch.setattr(experiments, "training_step", training_step)
    for micro in (8, None):
        gc.collect()  # the parts of a streamer know each other, and hold its model until then
        experiments.train(config | {"micro_batch": micro}, 0, data, str(device))
    assert {(8, True), (None, True)} == set(pinned)
