"""What the experiments of dual-batch learning run, on toys."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from repro.datasets import DatasetError, ImageData, Split
from repro.dualbatch import Commit, cluster, train_dual_batch
from repro.experiments.dualbatch import building, measuring, runs, training, workers
from repro.experiments.dualbatch.runs import CIFAR
from repro.experiments.one_run import load
from repro.measure import TimeModel

DIGITS = {CIFAR: "digits"}
MODEL = {"name": "resnet_cifar", "depth": 8, "width": 4}


def shorter(run: Any, samples: int = 40, **changes: Any) -> dict[str, Any]:
    """Return a training's configuration with fewer samples and epochs."""
    fewer = {"samples": samples}
    subs = [entry | {"plan": entry["plan"] | fewer} for entry in run.config["sub_stages"]]
    stages = [[len(subs), rate] for _, rate in run.config["stages"][:2]]
    small = {"model": MODEL, "sub_stages": subs, "stages": stages, "test_samples": 20}
    return run.config | small | changes


_DUAL = shorter(runs.section51("smoke", DIGITS, 1.1, 2))
_HYBRID = shorter(runs.section52("smoke", DIGITS, 2, "hybrid"))
_MEMORY = runs.memory("smoke", CIFAR).config | {"model": MODEL}
_OWN = shorter(runs.own_plan("smoke", DIGITS)[2])
_OWN["measured"] = {"resolution": 8, "batch_sizes": [4, 64], "repeats": 1}
(_PART,) = runs.wall("smoke").config["parts"]
_PART |= {"syncs": runs.wall("quick").config["parts"][0]["syncs"], "model": MODEL, "samples": 40}
_WALL = {"rounds": 2, "repeats": 1, "parts": [_PART]}


def timed_as(patch: pytest.MonkeyPatch, a: float, b: float) -> None:
    """Let steps take so long."""
    patch.setattr(workers, "fitted", lambda *arguments: (TimeModel(a, b, (1.0,)), {}))


def without_processes(patch: pytest.MonkeyPatch) -> None:
    """Let workers take turns on the virtual clock, as if each had a core."""

    def local(*arguments: Any, engine: str, address: str | None, **options: Any) -> Any:
        assert engine == "ray"
        return train_dual_batch(*arguments, **options)

    patch.setattr(cluster, "connected", lambda *arguments: nullcontext())
    patch.setattr(workers, "train_dual_batch", local)
    patch.setattr(workers, "cores", lambda: 2)
    timed_as(patch, 1e-3, 1e-2)  # steps cost something beside their samples


# Trainings.


def test_trainings_that_cannot_be():
    with pytest.raises(FloatingPointError, match="diverged"):
        training.train(_DUAL | {"stages": [[1, 1e30]]}, 0, load(_DUAL, None), "cpu")
    subs = [entry | {"resolution": 9} for entry in _HYBRID["sub_stages"]]
    with pytest.raises(ValueError, match="resolution 9, and the inputs are"):
        training.train(_HYBRID | {"sub_stages": subs}, 0, load(_HYBRID, None), "cpu")
    config = shorter(runs.section51("smoke", DIGITS, 1.1, 2), samples=10**6)
    with pytest.raises(ValueError, match="1000000 samples of"):
        training.train(config, 0, load(config, None), "cpu")


# Data and models.


def _data(count=20):
    images = torch.arange(count * 3 * 64, dtype=torch.int64).reshape(count, 3, 8, 8) % 251
    split = Split(images.to(torch.uint8), torch.arange(count) % 10)
    return ImageData("made", "made", "real", "Made up.", "0", tuple("0123456789"), split, split)


def test_what_is_held_out_is_not_trained_on_and_is_measured():
    config = shorter(next(iter(runs.RUNS["rates"]("smoke", DIGITS))), samples=16, test_samples=10)
    images = building.TrainingData(config, _data(), "cpu")
    trained = {tuple(image.flatten().tolist()) for image in images.images}
    held = {tuple(image.flatten().tolist()) for image in images.held_out[0]}
    assert len(images.images) == 16 and len(held) == 4 and not trained & held
    model = building.build_model(config, 10)
    assert set(images.evaluation(config, "cpu")(model)) == {"accuracy", "test_loss", "held_out"}
    with pytest.raises(DatasetError, match="20 samples of 20 leave none"):
        _data().train.parted(20)


def test_all_test_images_count_after_the_last_epoch_alone(monkeypatch):
    config = shorter(runs.section51("smoke", DIGITS, 1.1, 2), samples=16, watched_samples=5)
    config |= {"stages": [[1, 0.1], [2, 0.1]]}
    images, seen = building.TrainingData(config, _data(), "cpu"), []

    def measured(model, batches, device):
        seen.append(sum(len(labels) for _, labels in batches))
        return {}

    monkeypatch.setattr(building, "evaluate_classifier", measured)
    evaluate = images.evaluation(config, "cpu")
    for _ in range(3):
        evaluate(torch.nn.Identity())
    assert seen == [5, 5, 20]


@pytest.mark.parametrize("profile", ["gpu", "paper", "smoke", "quick", "long"])
def test_momentum_is_kept_where_no_older_record_is(profile):
    config = runs.section51(profile, DIGITS, 1.1, 2).config
    new = profile in ("gpu", "paper")
    assert building.compute_of(config)["optimizer_state"] == ("kept" if new else "restarted")
    assert building.clock_of(config) == {"jitter": 0.01 * new, "slowdowns": None}
    assert building.clock_of(config | {"engine": "ray"}) == {}


# Around the end of a training.


def test_variance_of_gradients_is_that_of_one_sample_over_the_batch_size():
    """Of a model without batch normalisation."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    images, labels = torch.randn(30, 3, 2, 2), torch.randint(3, (30,))
    pairs = zip(images.split(1), labels.split(1), strict=True)
    each = torch.stack([training._gradient(model, *pair) for pair in pairs]).double()
    sigma2 = float((each - each.mean(0)).square().sum(1).mean())
    for batch in (1, 4, 16):
        drawn = torch.Generator().manual_seed(batch)
        found = training.gradient_variance(model, (images, labels), batch, 600, drawn)
        assert found == pytest.approx(sigma2 / batch, rel=0.1)


def test_rises_of_a_known_bowl():
    """Of a loss whose gradient is known, the step up has its length; the model stays."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2, bias=False))
    batch = torch.randn(8, 1, 2, 2), torch.randint(2, (8,))
    before = [p.clone() for p in model.parameters()]
    due = 1e-3 * float(training._gradient(model, *batch).norm())
    assert training.worst_rise(model, batch, 1e-3) == pytest.approx(due, rel=1e-2)
    assert all(map(torch.equal, before, model.parameters()))


# Plans from times measured in the run.


def test_the_plan_follows_from_the_times_measured(monkeypatch):
    for b in (1e-2, 2e-2):
        timed_as(monkeypatch, 1e-3, b)
        metrics = workers.train_own_plan(_OWN, 0, load(_OWN, None), "cpu").metrics
        due = building.plan_of(_OWN["sub_stages"][0]["plan"] | {"a": 1e-3, "b": b})
        assert metrics["plan"]["small_batch"] == due.small_batch
        assert metrics["plans"][0]["small_batch"] == due.small_batch
        assert (metrics["a"], metrics["b"], metrics["error"]) == (1e-3, b, None)
        again = workers.planned_again(_OWN, metrics)
        assert again == {name: metrics[name] for name in again}


def test_without_a_plan_nothing_is_trained_and_the_reason_is_said(monkeypatch):
    for b, why in ((-1e-3, "without a fixed cost"), (1e-9, "feasible k")):
        timed_as(monkeypatch, 1e-3, b)
        metrics = workers.train_own_plan(_OWN, 0, load(_OWN, None), "cpu").metrics
        assert why in metrics["error"] and metrics["plan"] is None and "accuracy" not in metrics

    def flat(*arguments):
        raise ValueError("seconds per step do not increase with the batch size")

    without_processes(monkeypatch)
    monkeypatch.setattr(workers, "fitted", flat)
    metrics = workers.train_own_plan(_OWN, 0, load(_OWN, None), "cpu").metrics
    assert "do not increase" in metrics["error"] and metrics["a"] is None
    assert workers.planned_again(_OWN, metrics) == {}
    (part,) = workers.wall_times(_WALL, 0, None, "cpu").metrics["parts"]
    told = [solved["error"] is not None for solved in part["solved"]]
    assert told == [kind["a"] is None and kind["k"] > 1 for kind in _PART["epochs"]]
    assert {int(n) for n in part["shares_s"]} == {n for n, no in enumerate(told) if not no}


def logged(*entries: tuple[int, int, int, float]) -> list[Commit]:
    """Return a log of (worker, share, pulled version, second)."""
    return [
        Commit(number, worker, share, pulled, 0, 1.0, time_s, 1.0)
        for number, (worker, share, pulled, time_s) in enumerate(entries)
    ]


def test_seconds_of_shares_and_rounds():
    log = logged((0, 0, 0, 5.0), (1, 0, 0, 6.0), (1, 1, 2, 7.5), (0, 1, 2, 8.0))
    assert workers.share_seconds(log, 1) == [[[2.0], [1.5]]]  # shares begin with the pull
    log = logged((0, 0, 0, 1.0), (0, 1, 1, 2.0), (1, 0, 0, 4.0), (0, 2, 2, 3.5), (1, 1, 3, 8.5))
    assert workers.round_seconds(log, 1) == [4.5]  # without a barrier, the slower worker's


# Memory.


def test_an_error_that_is_no_lack_of_memory_is_seen(monkeypatch):
    assert measuring._fits(_MEMORY, 1, 1000, "cpu") is False  # below the parameters

    def broken(*arguments):
        raise RuntimeError("broken")

    monkeypatch.setattr(measuring, "step_of", broken)
    with pytest.raises(RuntimeError, match="broken"):
        measuring._fits(_MEMORY, 2, 2**30, "cpu")
