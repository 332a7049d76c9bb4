"""What the runs of Micro-Batch Streaming compute and measure."""

import gc
import threading

import numpy as np
import pytest
import torch
from made_mbs import CHOSEN, INITIAL, PAPER

from repro import datasets
from repro.experiments.mbs import measuring, runs, training
from repro.experiments.mbs.training import Task
from repro.experiments.one_run import load


def small_training(micro, role="ResNet-50", **changes):
    config = runs.training("smoke", role, CHOSEN, 16, micro is not None).config
    return config | {"train_samples": 32} | changes


@pytest.mark.parametrize("highest", [1, 11])
def test_the_loss_against_numpy(highest):
    random = np.random.default_rng(highest)
    logits = random.normal(0, 2, (3, 1, 5, 7))
    masks = random.integers(0, highest + 1, (3, 5, 7), np.uint8)
    truth, p = (masks > 0).astype(np.float64), 1 / (1 + np.exp(-logits[:, 0]))
    bce = -np.mean(truth * np.log(p) + (1 - truth) * np.log(1 - p))
    expected = bce + 1 - 2 * np.sum(p * truth) / (np.sum(p) + np.sum(truth))
    loss = training.bce_dice_loss(torch.from_numpy(logits), torch.from_numpy(masks))
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    empty = training.bce_dice_loss(torch.full((1, 1, 2, 2), -200.0), torch.zeros(1, 2, 2))
    assert torch.isfinite(empty)


class TestTraining:
    @pytest.mark.parametrize("role", ["ResNet-50", "U-Net"])
    @pytest.mark.parametrize("micro", [8, None])
    def test_in_low_precision_weights_and_gradients_stay_float32(self, role, micro):
        config = small_training(micro, role, channels_last=True, autocast="bfloat16")
        task = Task(config, load(config, None), "cpu")
        model, kinds = task.model(), []
        model.register_forward_hook(lambda _, inputs, output: kinds.append(output.dtype))
        step = task.step(model, micro)
        losses = [float(step(*batch)) for _ in range(4) for batch in task.loader(16, 0, 32)]
        assert set(kinds) == {torch.bfloat16} and np.mean(losses[-2:]) < np.mean(losses[:2])
        for weight in model.parameters():
            assert weight.grad.dtype == weight.dtype == torch.float32
            assert weight.dim() < 4 or weight.is_contiguous(memory_format=torch.channels_last)
        assert all(np.isfinite(value) for value in task.evaluation(model)().values())

    def test_only_batchnorm_sets_paired_trainings_apart(self):
        found = {}
        for run in runs.paired_trainings("smoke", CHOSEN):
            metrics = training.paired_training(run.config, 0, load(run.config, None), "cpu").metrics
            found[run.config["norm"], run.config["dtype"]] = metrics["apart"]
        exact, grouped = found["group", "float64"], found["group", "float32"]
        assert max(exact) < 1e-12 < 1e-8 < max(grouped) < 1e-4 < 1e-2
        assert min(found["batch", "float32"]) > 1e-2

    def test_gradients_by_way_of_normalisation(self):
        (run, *_) = runs.normalisations("smoke", CHOSEN)
        rows = training.gradients(run.config, 0, load(run.config, None), "cpu").metrics["rows"]
        even = {r["way"]: r for r in rows if r["frozen"] and not r["mini_batch"] % r["micro_batch"]}
        for way, length in {"none": 4.0, "paper": 1.0, "exact": 1.0}.items():
            assert even[way]["length"] == pytest.approx(length, rel=1e-9)
            assert (even[way]["error"] < 1e-9) == (way != "none")


def watch_steps(monkeypatch, see):
    """Have `see` called with the micro-batch size and the mini-batch of every training step."""
    step_of = Task.step

    def watching(task, model, micro, *rest):
        step = step_of(task, model, micro, *rest)

        def watched(*batch):
            see(micro, batch)
            return step(*batch)

        return watched

    monkeypatch.setattr(Task, "step", watching)


class TestMeasuring:
    def test_a_step_fits_or_runs_out_of_memory(self):
        config = runs.base_config("smoke", "ResNet-50", CHOSEN) | {"limit_bytes": 2**20}
        data, whole = load(config, None), config | {"mini_batch": 64, "micro_batch": None}
        with pytest.raises(torch.OutOfMemoryError):
            measuring.step(whole, 0, data, "cpu")
        outcome = measuring.step(whole | {"micro_batch": 4}, 0, data, "cpu")
        assert 0 < outcome.peak_bytes <= 2**20 == outcome.metrics["limit_bytes"]

    def test_epochs_in_turns_are_whole_epochs_of_each_way(self, monkeypatch):
        made: dict[str, list[int]] = {}
        watch_steps(monkeypatch, lambda n, batch: made.setdefault(str(n), []).append(len(batch[0])))
        config = runs.base_config("smoke", "ResNet-50", CHOSEN)
        ways = {"all": [16, None], "some": [16, 8]}
        config |= {"train_samples": 24, "ways": ways, "repeats": 2}
        outcome = measuring.epochs(config, 0, load(config, None), "cpu")
        assert made == {name: 3 * [16, 8] for name in ("None", "8")}  # one warms up
        assert [len(timing.samples_s) for timing in outcome.timings.values()] == [2, 2]


class TestFiles:
    AUGMENT = {"padding": 2, "flip": True, "mean": [0.5] * 3, "std": [0.25] * 3}  # noqa: RUF012 (never changed)

    @pytest.fixture
    def written(self, tmp_path):
        images = torch.randint(0, 256, (24, 3, 16, 16), dtype=torch.uint8)
        paths = measuring.write_files(images, tmp_path)
        return paths, measuring.decode(paths, 16), torch.arange(24)

    def test_mini_batches_from_files_are_those_in_memory_when_asked_for(self, written, monkeypatch):
        paths, images, labels = written
        memory = datasets.TensorLoader(images, labels, 8, seed=3, **self.AUGMENT)
        files = measuring.FileLoader(paths, images, labels, 8, seed=3, **self.AUGMENT)
        for _ in range(2):  # epochs
            for (one, truth), (other, told) in zip(memory, files, strict=True):
                assert torch.equal(one, other) and torch.equal(truth, told)
        decode, threads = measuring.decode, []

        def watched(chosen, side):
            threads.append(threading.current_thread())
            return decode(chosen, side)

        monkeypatch.setattr(measuring, "decode", watched)
        for number, _ in enumerate(files):
            assert len(threads) == number + 1
        assert set(threads) == {threading.main_thread()}
        threads.clear()
        assert len(list(datasets.Ahead(files, "cpu", count=1, always=True))) == 3
        assert len(threads) == 3 and threading.main_thread() not in threads

    def test_an_epoch_of_every_way_trains_alike(self, monkeypatch):
        (run,), seen = PAPER.artefacts["files"].runs("smoke", CHOSEN), {}

        def fit(model, step, loader, *, epochs, device):
            own = [(inputs.double().sum().item(), len(targets)) for inputs, targets in loader]
            seen.setdefault(len(own), []).append(own)

        monkeypatch.setattr(measuring, "fit", fit)
        outcome = measuring.file_epochs(run.config, 0, load(run.config, None), "cpu")
        assert set(outcome.timings) == set(run.config["ways"]) and outcome.metrics["files"] == 64
        assert set(seen) == {1, 2}  # mini-batches of 64 and 32
        for epochs in seen.values():
            assert len(epochs) == 9  # three ways, each warmed up and timed twice
            assert all(sorted(epochs).count(own) == 3 for own in epochs)  # each epoch's own order


@pytest.mark.gpu
@pytest.mark.parametrize("micro", [8, None])
def test_what_the_profile_gpu_adds_runs_on_an_accelerator(device, micro, monkeypatch):
    options = {"channels_last": True, "autocast": "bfloat16", "benchmark": True}
    config = small_training(micro, **options, limit_fits=None, limit_bytes=2**28)
    data, pinned = load(config, None), []
    watch_steps(monkeypatch, lambda _, batch: pinned.extend(part.is_pinned() for part in batch))
    trained = training.train(config, 0, data, str(device))
    assert np.isfinite(trained.metrics["train_loss"]).all() and all(pinned)
    gc.collect()  # the parts of a streamer know each other, and hold its model until then
    stepped = measuring.step(config, 0, data, str(device))
    for outcome in (trained, stepped):
        assert 0 < outcome.peak_bytes <= 2**28 == outcome.metrics["limit_bytes"]
    assert INITIAL["ResNet-50"] == 16
