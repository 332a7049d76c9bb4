import argparse
import math
import sys
import time
import types
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import trainings
from torch import nn
from torch.nn import functional
from trainings import SYNCS, Recorder, make_data, make_plan, resumed, same, train, without_wall_time

from repro.dualbatch import CheckpointError, CyclicProgressiveSchedule, Stage, SubStage
from repro.dualbatch import DualBatchPlan as Plan
from repro.measure import TimeModel, load_checkpoint, save_checkpoint

GTX_1080 = TimeModel(5.6607e-4, 0.0140412)
WHERE = ["on_epoch", "evaluate", "evaluate"]  # a training is interrupted
SGD, ADAM = torch.optim.SGD, torch.optim.Adam
EQUAL = Plan(trainings.TIMES, 1.0, 2, 2, 40, 10, 10, 10, 10, 0.5)  # factors differ, shares do not


def make_double():
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def test_bsp_of_equal_batches_averages_gradients():
    images, labels = (tensor[:40] for tensor in make_data())
    images = images.double()
    schedule = CyclicProgressiveSchedule([Stage(3, 0.3), Stage(2, 0.05)], warmup_epochs=2)
    options = {"data": (images, labels), "factor": "none", "optimizer_fn": SGD, "seed": 3}
    result = train(EQUAL, model_fn=make_double, schedule=schedule, sync="bsp", **options)
    # Four workers with a fourth of the data each: the mean of their gradients is the
    # gradient of all the data.
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make_double()
    losses, rates = [], [0.06, 0.18, 0.3, 0.05, 0.05]
    for lr in rates:
        loss = functional.cross_entropy(model(images), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= lr * gradient
    for name, tensor in model.state_dict().items():
        assert torch.allclose(result.state[name], tensor, rtol=1e-10, atol=1e-12)
    assert [entry.train_loss for entry in result.history] == pytest.approx(losses)
    assert [entry.lr for entry in result.history] == pytest.approx(rates)


@pytest.mark.parametrize(("workers", "samples"), [((1, 3), 480), ((2, 1), 61)])
def test_shares_of_a_pass_are_the_data(workers, samples):
    plan, data = make_plan(*workers, samples=samples), Recorder(samples)
    train(plan, data=data, sync="bsp", count=3)
    passes = [data.shares[i : i + plan.n] for i in range(0, len(data.shares), plan.n)]
    orders = []
    for shares in passes:
        indices = torch.cat([share.indices for share in shares])
        assert abs(len(indices) - samples) < plan.n
        counts = indices.bincount(minlength=samples)
        # Each once, but for what rounding adds or leaves.
        assert int((counts != 1).sum()) == abs(len(indices) - samples) and counts.max() <= 2
        assert all(len(share.indices.unique()) == len(share.indices) for share in shares)
        orders.append(indices.tolist())
        sizes = sorted((len(share.indices), share.batch_size) for share in shares)
        assert sizes == sorted((plan.share_of(k), plan.batch_of(k)) for k in plan.kinds)
    assert orders[0] != orders[1] != orders[2]  # shuffled anew
    assert orders[0] != sorted(orders[0])
    seeds = [share.seed for share in data.shares]
    assert len(set(seeds)) == len(seeds)


class TestClock:
    def test_small_and_large_workers_end_together(self):
        # A plan of the paper; nothing is trained but one weight.
        n_small = 3
        plan = Plan.solve(GTX_1080, 1.1, n_small, 4 - n_small, 500, 50_000, "floor")
        ones = lambda of: ((x, x) for x in torch.ones(len(of.indices), 1).split(of.batch_size))  # noqa: E731
        options = {"model_fn": lambda: nn.Linear(1, 1), "data": ones}
        result = train(plan, loss_fn=functional.mse_loss, count=3, **options)
        small, large = plan.time_of("small"), plan.time_of("large")
        assert small == pytest.approx(large, rel=0.01)
        for epoch, entry in enumerate(result.history, 1):
            commits = result.log[4 * (epoch - 1) : 4 * epoch]
            times = [commit.time_s for commit in commits]
            assert sorted(commit.worker for commit in commits) == [0, 1, 2, 3]
            assert entry.virtual_time_s == max(times)
            expected = [epoch * (small if c.worker < n_small else large) for c in commits]
            assert times == pytest.approx(expected)

    def test_time_models_by_resolution(self):
        plan = make_plan(0, 2)
        schedule = CyclicProgressiveSchedule([Stage(2, 0.1)], [SubStage(4), SubStage(6)])
        given = {4: TimeModel(1.0, 2.0), 6: TimeModel(3.0, 4.0)}
        result = train(plan, schedule=schedule, sync="bsp", time_models=given)
        batches = 30 / 10
        times = [30 + 2 * batches, 30 + 2 * batches + 90 + 4 * batches]
        assert [entry.virtual_time_s for entry in result.history] == pytest.approx(times)
        # Where none is given, the plan's own.
        result = train(plan, schedule=schedule, sync="bsp", time_models={6: given[6]})
        seconds = plan.time_of("large")
        assert [e.virtual_time_s for e in result.history] == pytest.approx([seconds, seconds + 102])


def test_with_jitter_each_seed_has_its_order_and_keeps_it(tmp_path):
    def order(**options):
        return [c.worker for c in train(make_plan(0, 3), **options).log]

    assert order() == order(seed=1) == [0, 1, 2] * 4
    one, other = order(jitter=0.01), order(jitter=0.01, seed=1)
    assert one == order(jitter=0.01) != other
    resumed(tmp_path / "training.pt", 2, jitter=0.3)


class TestStraggler:
    """One worker that takes three times as long as the plan knows."""

    @pytest.mark.parametrize("bound", [0, 2, math.inf])
    def test_the_bound_binds(self, bound):
        plan, count = make_plan(0, 3), 6
        options = {"sync": "asp"} if bound == math.inf else {"sync": "ssp", "staleness": bound}
        log = train(plan, count=count, slowdowns=[1, 1, 3], **options).log
        starts, ends = {}, {}
        for commit in log:  # each pulls as soon as it may
            share = commit.worker, commit.iteration
            starts[share] = log[commit.pulled - 1].time_s if commit.pulled else 0.0
            ends[share] = commit.time_s
        slow = plan.time_of("large") * 3
        assert ends[2, count - 1] == pytest.approx(count * slow)  # it never waits
        assert len(ends) == len(log) == 3 * count
        # A fast worker starts share t once the straggler has committed t - s shares.
        now = 0.0
        for share in range(count):
            assert starts[0, share] == pytest.approx(max(now, slow * (share - bound)))
            now = starts[0, share] + slow / 3


def weighted(outputs, targets, weight=None):
    weight = None if weight is None else torch.as_tensor(weight)
    return functional.cross_entropy(outputs, targets, weight)


class Focal:
    def __init__(self, power):
        self.power = power

    def __call__(self, outputs, targets):
        return functional.cross_entropy(outputs, targets) ** self.power


class Power:
    __slots__ = ("power",)
    of = 1.0
    __call__ = Focal.__call__


def power(of, power):
    made, Power.of = Power(), of
    made.power = power * of
    return made


SMOOTHING = {"now": 0.1}


def smoothed(value):
    SMOOTHING["now"] = value
    return lambda o, t: functional.cross_entropy(o, t, label_smoothing=SMOOTHING["now"])


settings = types.ModuleType("settings")  # a module of the user's
settings.__file__, sys.modules["settings"] = "settings.py", settings
ARGUMENTS = argparse.Namespace(smoothing=0.0, resume=0)


class Begun(nn.Linear):
    """A layer that knows when it was made, which is no setting."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self._began = time.perf_counter()


class Answering(dict):
    """Refuses names that it lacks by another error than usual."""

    __getattr__ = dict.__getitem__


def smoothed_by(value):
    settings.SMOOTHING = ARGUMENTS.smoothing = value
    settings.others = Answering()
    ARGUMENTS.resume += 1  # which no loss reads
    return lambda o, t: functional.cross_entropy(
        o,
        t,
        label_smoothing=(settings.SMOOTHING + ARGUMENTS.smoothing) / (2 + len(settings.others)),
    )


def scaled(share, factor):
    return ((IMAGES[i] * factor, LABELS[i]) for i in share.indices.split(share.batch_size))


IMAGES, LABELS = make_data()
EVEN, UNEVEN = (1.0, 1.0, 1.0), (1.0, 9.0, 1.0)
# What is given, how it is made of one thing or another, and what differs.
OTHER_FUNCTIONS = {
    "another optimizer": ("optimizer_fn", partial, SGD, ADAM, r"optimizer_fn"),
    "other code": ("optimizer_fn", lambda make: make, lambda p, lr: SGD(p, lr),
                   lambda p, lr: SGD(p, lr / 2), r"optimizer_fn.code"),
    "other weights": ("loss_fn", lambda w: nn.CrossEntropyLoss(torch.tensor(w)), EVEN, UNEVEN,
                      r"loss_fn.weight"),
    "a closure's list": ("loss_fn", lambda w: (lambda o, t: weighted(o, t, w)), list(EVEN),
                         list(UNEVEN), r"loss_fn.w\[1\]"),
    "a global": ("loss_fn", smoothed, 0.1, 0.2, r"loss_fn.SMOOTHING\['now'\]"),
    "a module's constant": ("loss_fn", smoothed_by, 0.1, 0.2,
                            r"loss_fn.ARGUMENTS.smoothing, loss_fn.settings.SMOOTHING"),
    "a number of numpy's": ("loss_fn", lambda by: partial(
                                functional.cross_entropy, label_smoothing=by
                            ), np.float32(0.1), np.float32(0.2), r"loss_fn\(label_smoothing\)"),
    "an object": ("loss_fn", Focal, 1.0, 2.0, r"loss_fn.power"),
    "another module": ("model_fn", lambda last: lambda: nn.Sequential(
                           nn.Flatten(), Begun(72, 3), last
                       ), nn.ReLU(), nn.GELU(), r"model.2.class"),
    "a class": ("loss_fn", lambda of: power(of, 1 / of), 1.0, 2.0, r"loss_fn.of"),
    "a slot": ("loss_fn", lambda power_: power(1.0, power_), 1.0, 2.0, r"loss_fn.power"),
    "by function": ("loss_fn", lambda w: (lambda o, t, by={(lambda: 0): w}: weighted(o, t)), 1.0,
                    2.0, r"loss_fn\(default 0\)\[<function \S+>\]"),
    "a generator": ("loss_fn", lambda g: (lambda o, t: weighted(o, t) if g else 0),
                    torch.Generator().manual_seed(1), torch.Generator().manual_seed(2),
                    r"loss_fn.g"),
    "other data": ("data", lambda f: partial(scaled, factor=f), 1.0, 2.0, r"data\(factor\)"),
}  # fmt: skip


class TestResume:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("options", "where", "at"), [*zip(SYNCS, WHERE, (2, 1, 3), strict=True)]
    )
    def test_equals_one_never_interrupted(self, options, at, where, tmp_path):
        # Commits of the worker with a slow machine's plan come late, so that states are stale.
        plan = replace(make_plan(), small_samples=12, large_samples=36)
        path = tmp_path / "folder" / "training.pt"
        options = options | {"plan": plan, "count": 4}

        def evaluate(model):
            return {"sum": float(sum(p.detach().sum() for p in model.parameters()))}

        whole, calls = train(evaluate=evaluate, **options), []

        def stop(argument):
            calls.append(argument)
            if len(calls) == at:
                raise trainings.Stop
            return evaluate(argument) if where == "evaluate" else None

        stopping = {"evaluate": evaluate} | {where: stop}
        with pytest.raises(trainings.Stop):
            train(checkpoint=path, **stopping, **options)
        # An epoch is told of once its checkpoint stands, and so never twice.
        done = at if where == "on_epoch" else at - 1
        assert path.exists() == (done > 0)
        ended = []
        resumed = train(checkpoint=path, evaluate=evaluate, on_epoch=ended.append, **options)
        assert same(resumed.state, whole.state) and resumed.log == whole.log
        assert without_wall_time(resumed) == without_wall_time(whole)
        assert [entry.epoch for entry in ended] == list(range(done + 1, 5))
        walls = [entry.wall_time_s for entry in resumed.history]
        assert walls == sorted(walls)
        assert list(path.parent.iterdir()) == [path]  # no temporary files
        # Once more: it has ended.
        again = train(checkpoint=str(path), on_epoch=ended.append, **options)
        assert again.history == resumed.history and same(again.state, whole.state)
        assert len(ended) == 4 - done

    def test_damaged_checkpoints(self, tmp_path):
        path = tmp_path / "training.pt"
        train(checkpoint=path, count=1)
        content = path.read_bytes()
        for damaged in (b"", b"nonsense", content[: len(content) // 2], content[:-100]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=r"training.pt cannot be read \(.*move this"):
                train(checkpoint=path, count=1)
            assert path.read_bytes() == damaged

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"seed": 1}, "seed"),
            ({"sync": "bsp"}, "sync, merge"),
            ({"count": 3}, "schedule"),
            ({"plan": make_plan(1, 2)}, "plan"),
            ({"data": (make_data()[0] + 1, make_data()[1])}, r"data\[0\]"),
            ({"jitter": 0.1, "slowdowns": [1, 1, 3]}, "jitter, slowdowns"),
            ({"channels_last": True}, "channels_last"),
        ],
    )
    def test_checkpoints_of_another_training(self, change, named, tmp_path):
        path = tmp_path / "training.pt"
        train(checkpoint=path, count=2)
        content = path.read_bytes()
        with pytest.raises(CheckpointError, match=rf"is of another training: {named} differ"):
            train(checkpoint=path, **({"count": 2} | change))
        assert path.read_bytes() == content

    def test_checkpoints_that_lack_a_clock(self, tmp_path):
        path, lacking = tmp_path / "training.pt", ("jitter", "slowdowns", "channels_last")
        whole = train(checkpoint=path, jitter=0.1, count=2)
        # A followed log has no clock, and slowdowns of 1 are none.
        for other in ({"follow": whole.log}, {"jitter": 0.1, "slowdowns": (1, 1, 1)}):
            assert same(train(checkpoint=path, count=2, **other).state, whole.state)
        content = load_checkpoint(path)  # as an earlier version wrote it
        known = content["fingerprint"]
        content["fingerprint"] = {n: part for n, part in known.items() if n not in lacking}
        assert len(known) - len(content["fingerprint"]) == len(lacking)
        save_checkpoint(path, content)
        other = {"jitter": 0.2, "channels_last": True}
        assert same(train(checkpoint=path, count=2, **other).state, whole.state)

    @pytest.mark.parametrize("name", OTHER_FUNCTIONS)
    def test_checkpoints_of_other_functions(self, name, tmp_path):
        what, make, one, other, named = OTHER_FUNCTIONS[name]
        path = tmp_path / "training.pt"
        whole = train(checkpoint=path, count=1, **{what: make(one)})
        assert same(train(checkpoint=path, count=1, **{what: make(one)}).state, whole.state)
        message = rf"is of another training: ({named})(, \S+)* differ; give the same"
        with pytest.raises(CheckpointError, match=message):
            train(checkpoint=path, count=1, **{what: make(other)})

    def test_checkpoints_of_a_loss_that_logs_to_a_list(self, tmp_path):
        seen = []

        def loss_fn(outputs, targets):
            seen.append(len(targets))
            return functional.cross_entropy(outputs, targets)

        options = {"loss_fn": loss_fn, "checkpoint": tmp_path / "training.pt"}
        whole = train(**options)
        assert same(train(**options).state, whole.state)
        seen.clear()
        assert same(train(**options).state, whole.state)


class Watched(nn.Sequential):
    """The small network, with notes of what it was run with."""

    seen: list = []  # noqa: RUF012

    def forward(self, images):
        Watched.seen.append((self.training, tuple(images.shape), self[5].p))
        return super().forward(images)


def noting_rates():
    """Return a list, and a function that makes an optimizer and notes its rate there."""
    rates = []
    return rates, lambda parameters, lr: rates.append(lr) or SGD(parameters, lr)


class TestSettings:
    def test_resolution_dropout_and_rate_reach_the_model(self):
        Watched.seen.clear()
        rates, optimizer_fn = noting_rates()
        small, large = make_plan(1, 1), replace(make_plan(1, 1), small_batch=2, large_batch=6)
        sub_stages = [SubStage(4, 0.3, large), SubStage(6, 0.5)]
        schedule = CyclicProgressiveSchedule([Stage(2, 0.1), Stage(2, 0.01)], sub_stages)
        options = {"schedule": schedule, "optimizer_fn": optimizer_fn}
        options["model_fn"] = lambda: Watched(*trainings.make_model())
        result = train(small, sync="bsp", **options)
        assert rates == [0.1] * 4 + [0.01] * 4
        assert {(shape[2], p) for _, shape, p in Watched.seen} == {(4, 0.3), (6, 0.5)}
        assert all(training for training, _, _ in Watched.seen)
        largest = {}
        for _, shape, _ in Watched.seen:
            largest.setdefault(shape[2], []).append(shape[0])
        assert max(largest[4]) == 6 and max(largest[6]) == 10
        found = [(e.resolution, e.lr) for e in result.history]
        assert found == [(4, 0.1), (6, 0.1), (4, 0.01), (6, 0.01)]

    def test_a_worker_that_is_ahead_takes_the_next_epochs_setting(self):
        plan = replace(make_plan(1, 1), small_samples=10, large_samples=50)
        rates, optimizer_fn = noting_rates()
        schedule = CyclicProgressiveSchedule([Stage(1, 0.4), Stage(1, 0.3), Stage(2, 0.2)])
        result = train(plan, schedule=schedule, optimizer_fn=optimizer_fn, sync="asp")
        by_version = {0: 0.4, 1: 0.3, 2: 0.3, 3: 0.2}
        assert rates == [by_version.get(c.pulled, 0.2) for c in result.log]
        assert [c.worker for c in result.log[:3]] == [0, 0, 0]

    @pytest.mark.parametrize("options", SYNCS[::2])
    def test_workers_apart_have_each_sample_of_a_pass_once_by_two_plans(self, options):
        low = replace(make_plan(), small_samples=14, large_samples=32, update_factor=14 / 32)
        high = replace(make_plan(), small_samples=19, large_samples=22, update_factor=19 / 22)
        plans = [low, replace(high, small_batch=2, large_batch=6)]
        sub_stages = [SubStage(plan=plan) for plan in plans]
        schedule = CyclicProgressiveSchedule([Stage(4, 0.1), Stage(4, 0.01)], sub_stages)
        data, passes = Recorder(), {number: [] for number in range(8)}
        log = train(low, data=data, schedule=schedule, slowdowns=[1, 1, 3], **options).log
        for commit, share in zip(log, data.shares, strict=True):
            passes[commit.iteration] += share.indices.tolist()
            kind = low.kinds[commit.worker]
            # Of the pass what follows from the samples, of the training's progress the rest.
            assert commit.factor == schedule[commit.iteration].plan.factor_of(kind)
            now = schedule.at_progress(commit.pulled / low.n).plan
            assert share.batch_size == now.batch_of(kind)
        assert all(sorted(found) == list(range(trainings.SAMPLES)) for found in passes.values())


class TestFollow:
    @pytest.mark.slow
    @pytest.mark.parametrize("options", SYNCS)
    def test_the_same_weights(self, options):
        # Two machines: one has a cost per sample alone, the other one per step alone.
        plan = replace(make_plan(), small_samples=14, large_samples=32, small_batch=2)
        options = options | {"count": 3}
        one = train(plan, time_models={None: TimeModel(1e-3, 0.0)}, **options)
        other = train(plan, time_models={None: TimeModel(1e-9, 1.0)}, **options)
        if options["sync"] != "bsp":
            assert [c.worker for c in one.log] != [c.worker for c in other.log]
            assert not same(one.state, other.state)
        for result in (one, other):
            followed = train(plan, follow=result.log, **options)
            assert same(followed.state, result.state) and followed.log == result.log
            assert without_wall_time(followed) == without_wall_time(result)

    @pytest.mark.parametrize(
        ("change", "sync", "message"),
        [
            (lambda log: log[1:], "asp", "log"),
            (lambda log: [replace(log[0], pulled=5), *log[1:]], "asp", "log"),
            (lambda log: [replace(log[0], worker=-1), *log[1:]], "asp", "log"),
            (lambda log: log, "bsp", r"commit 1 of the log, share 1 of worker 0 pulled"),
        ],
    )
    def test_a_log_of_nonsense_or_another_synchronisation(self, change, sync, message):
        plan = replace(make_plan(1, 1), small_samples=10, large_samples=50)
        log = train(plan).log
        with pytest.raises(ValueError, match=message):
            train(plan, sync=sync, follow=change(log))
