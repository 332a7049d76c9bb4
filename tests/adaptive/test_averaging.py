"""Two processes on this machine, connected by gloo; started once for all tests.

Others of which one dies or hangs, a pair for each way of averaging and each end, run meanwhile.
"""

import contextlib
import gc
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import joined
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairs import answers, assert_close, run_cases
from torch import nn

from repro.adaptive import (
    METHODS,
    DataParallel,
    PeerError,
    join_processes,
    leave_processes,
    set_lr,
    share,
)

# Ragged, growing, one with a single sample: a process has none of it.
SIZES = [6, 7, 1, 12, 5]
RATES = [0.1, 0.02, 0.1, 0.2, 0.05]
VARIANTS = {
    "small buckets": {"bucket_bytes": 200},
    "a bucket each": {"bucket_bytes": 0},
    "one bucket": {"bucket_bytes": 2**30},
    "micro-batches": {"micro_batch": 2, "bucket_bytes": 200},
    "no overlap": {"overlap": False, "bucket_bytes": 200},
    "float32": {"bucket_bytes": 200},
    "adam": {"bucket_bytes": 200},
    "adam, micro-batches": {"bucket_bytes": 2**30, "micro_batch": 1},
    "tensor rate": {"bucket_bytes": 200},
}
CASES = [(method, variant) for method in METHODS for variant in VARIANTS]
SPLIT = ("all_to_all", "reduce_scatter")
ENDS = ("exit", "kill", "hang")
ELSEWHERE = [(how, stage) for how in ("kill", "hang") for stage in ("construction", "leaving")]
TIMEOUT_S = 4.0


class Net(nn.Module):
    """A scale without dimensions, a layout that is not the usual one, a layer called twice."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.hidden = nn.Linear(12, 12)
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        x = self.conv(x.view(-1, 2, 3, 3)).tanh().flatten(1) * self.scale
        return self.out(self.hidden(self.hidden(x).tanh()).tanh())


class Unused(nn.Module):
    """A layer has no part in the loss."""

    def __init__(self):
        super().__init__()
        self.extra, self.out = nn.Linear(2, 2), nn.Linear(18, 3)

    def forward(self, x):
        return self.out(x)


class Failing(nn.Module):
    """Inputs of 17 values fail before the first layer, of 24 after it; `fail` in the backward."""

    fail = False

    def __init__(self):
        super().__init__()
        self.conv, self.hidden, self.out = nn.Conv2d(2, 3, 2), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x):
        x = self.hidden(self.conv(x.view(len(x), 2, 3, -1)).tanh().flatten(1)).tanh()
        if self.fail and x.requires_grad:
            x.register_hook(refuse)
        return self.out(x)


def refuse(gradient):
    raise ZeroDivisionError("on purpose")


class Lazy(nn.Module):
    """All layers are called; the one named by `skip` has no part in the loss."""

    skip = ""

    def __init__(self):
        super().__init__()
        self.first, self.extra, self.out = nn.Linear(18, 4), nn.Linear(18, 4), nn.Linear(4, 3)

    def forward(self, x):
        parts = {"first": self.first(x).tanh(), "extra": self.extra(x).tanh()}
        return self.out(sum(part for name, part in parts.items() if name != self.skip))


def make(kind, seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return kind().to(dtype)


def make_optimizer(model, variant="sgd"):
    first, *others = model.parameters()
    groups = [{"params": [first], "lr_scale": 0.5}, {"params": others}]
    rate = torch.tensor(RATES[0], dtype=torch.float64) if variant == "tensor rate" else RATES[0]
    if "adam" in variant:
        optimizer = torch.optim.Adam(groups, RATES[0], weight_decay=0.01)
    else:
        groups[0]["lr"] = rate if isinstance(rate, float) else rate.clone()
        optimizer = torch.optim.SGD(groups, rate, momentum=0.9, weight_decay=0.01, foreach=False)
    set_lr(optimizer, RATES[0])
    return optimizer


def batch(number, dtype=torch.float64):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(SIZES[number], 18, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(3, (SIZES[number],), generator=generator)


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def plainly(model, optimizer, steps=5, dtype=torch.float64):
    """Train in one process on whole mini-batches; return weights, losses, what a middle one saw."""
    losses, seen = [], None
    for number in range(steps):
        x, y = batch(number, dtype)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if number + 1 < steps:
            set_lr(optimizer, RATES[number + 1])
        if number == 1:
            with torch.no_grad():
                seen = model(batch(3, dtype)[0])
    return weights_of(model), losses, seen


def train(method, variant, rank):
    dtype = torch.float32 if variant == "float32" else torch.float64
    model = make(Net, rank, dtype)  # of other weights in the other process
    optimizer = make_optimizer(model, variant)
    parallel = DataParallel(
        model, F.cross_entropy, optimizer, method, timeout_s=30, **VARIANTS[variant]
    )
    losses, sums, seen = [], [], None
    for number in range(len(SIZES)):
        losses.append(parallel.step(*batch(number, dtype)))
        if number + 1 < len(SIZES):
            set_lr(optimizer, RATES[number + 1])  # updates under way are of the rate before
        sums.append(torch.tensor([rank + 1.0]))
        dist.all_reduce(sums[-1])  # a collective of the caller's
        if number == 1:
            model.eval()
            with torch.no_grad():
                seen = model(batch(3, dtype)[0])
            model.train()
    parallel.finish()
    report = {
        "weights": weights_of(model),
        "seen": seen,
        "sums": torch.stack(sums).tolist(),
        "losses": [parallel.mean(loss) for loss in losses],
        "timings": [
            (t.total_s, t.communication_s, t.summation_s, t.blocked_s, t.computation_s)
            for t in parallel.timings
        ],
        "rates": [float(group["lr"]) for group in optimizer.param_groups],
    }
    parallel.close()
    return report


def steps_of(method, kind, rank, steps=3, between=None, freeze="", **options):
    """Train and return the weights, or the error's type and text."""
    model = make(kind, 0)
    for name, p in model.named_parameters():
        p.requires_grad_(not freeze or not name.startswith(freeze))
    optimizer = make_optimizer(model, "adam" if between else "sgd")
    parallel = DataParallel(model, F.cross_entropy, optimizer, method, timeout_s=30, **options)
    try:
        for number in range(steps):
            parallel.step(*batch(number))
            set_lr(optimizer, RATES[number + 1])
            if between and number == 0:
                with between():
                    model(batch(3)[0])
        parallel.finish()
    except (RuntimeError, ValueError) as error:
        refusal = (type(error).__name__, str(error))
        if kind is Unused:
            try:
                parallel.close()
            except Exception as another:
                return (*refusal, repr(another), hooks_of(model))
            return (*refusal, "closed", hooks_of(model))
        return refusal
    parallel.close()
    return weights_of(model)


def hooks_of(model):
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    for module in model.modules():
        hooks += [len(module._forward_pre_hooks), len(module._forward_hooks)]
    return sum(hooks)


def bad(stage):
    """Return a mini-batch that fails at a stage of the step, and the error."""
    x, y = batch(3)
    if stage == "before":
        return x[:, :17], y, "RuntimeError"
    if stage == "within":
        return torch.cat((x, x[:, :6]), 1), y, "RuntimeError"
    if stage == "loss":
        return x, y + 7, "IndexError"
    return x, y, "ZeroDivisionError"


def failing(method, stage, **options):
    """Fail after a good step; note the weights then, and after two more good steps."""
    model = make(Failing, 0)
    optimizer = make_optimizer(model)
    parallel = DataParallel(model, F.cross_entropy, optimizer, method, timeout_s=30, **options)
    parallel.step(*batch(0))
    set_lr(optimizer, RATES[1])  # the update under way is of the rate before
    model.fail = stage == "backward"
    x, y, _ = bad(stage)
    report = {"error": "none"}
    try:
        parallel.step(x, y)
    except Exception as error:
        report["error"] = type(error).__name__
    model.fail = False
    parallel.finish()
    report["good"] = weights_of(model)
    for number in (1, 2):
        set_lr(optimizer, RATES[number])
        parallel.step(*batch(number))
    parallel.close()
    return report | {"end": weights_of(model), "timings": len(parallel.timings)}


def lacking(method, skip, **options):
    """Leave a layer out of the loss in the second mini-batch and in the fourth."""
    model = make(Lazy, 0)
    optimizer = make_optimizer(model)
    parallel = DataParallel(model, F.cross_entropy, optimizer, method, timeout_s=30, **options)
    texts, weights = [], []
    for number in range(3):
        set_lr(optimizer, RATES[number])
        parallel.step(*batch(number))
        model.skip = skip
        try:
            parallel.step(*batch(3))
        except ValueError as error:
            texts.append(str(error))
        model.skip = ""
        weights.append(weights_of(model))
    parallel.close()
    return {"texts": texts, "weights": weights, "end": weights_of(model)}


PLACES = ("before", "within", "loss", "backward")


def closing(method, rank):
    """Compute a gradient in one process alone after the end."""
    model = make(Net, 0)
    parallel = DataParallel(model, F.cross_entropy, make_optimizer(model), method, timeout_s=30)
    parallel.step(*batch(0))
    parallel.close()
    updated = weights_of(model)
    del parallel
    gc.collect()
    report = {"weights": updated, "hooks": hooks_of(model)}
    model.zero_grad()
    if rank == 0:
        F.cross_entropy(model(batch(1)[0]), batch(1)[1]).backward()
        report["gradients"] = [p.grad for p in model.parameters()]
    return report


def averages(method, rank):
    model = nn.Sequential(nn.Linear(18, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    parallel = DataParallel(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1),
                            method, timeout_s=30)  # fmt: skip
    x, y = batch(3, torch.float32)
    parallel.step(x, y)
    parallel.finish()
    of_share = model[1].running_mean.clone(), model[1].running_var.clone()
    parallel.average_buffers()
    report = {
        "of_share": of_share,
        "mean": (model[1].running_mean, model[1].running_var),
        "count": int(model[1].num_batches_tracked),
        "numbers": [
            parallel.mean(3.0 * rank + 1),
            parallel.mean(torch.tensor(rank + 0.5, requires_grad=True)),
            parallel.mean(rank),
        ],
    }
    parallel.close()
    return report


EXTRAS = {
    "frozen": lambda m, r: steps_of(m, Net, r, freeze="hidden", bucket_bytes=200),
    "unused": lambda m, r: steps_of(m, Unused, r, bucket_bytes=0),
    "no_grad between": lambda m, r: steps_of(m, Net, r, between=torch.no_grad),
    "inference between": lambda m, r: steps_of(m, Net, r, between=torch.inference_mode),
    **{f"failing {stage}": lambda m, r, p=stage: failing(m, p, bucket_bytes=0) for stage in PLACES},
    **{f"failing {stage}, one bucket": lambda m, r, p=stage: failing(m, p) for stage in PLACES},
    **{
        f"lacking {skip}": lambda m, r, s=skip: lacking(m, s, bucket_bytes=0)
        for skip in ("first", "extra")
    },
    "closing": closing,
    "averages": averages,
}


def todo(rank):
    for method, variant in CASES:
        yield (method, variant), lambda m=method, v=variant: train(m, v, rank)
    for method in METHODS:
        for name, function in EXTRAS.items():
            if method in SPLIT or name.split()[0] not in ("unused", "failing", "lacking"):
                yield (method, name), lambda m=method, f=function: f(m, rank)


def work(rank, port, folder):
    run_cases(rank, port, folder, todo)


def lost_by(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    time.sleep(120)


def lose(rank, folder, method, end):
    """Train two steps; then one process is lost, and the other notes how it learns of it."""
    torch.set_num_threads(1)
    folder = Path(folder)
    store = dist.FileStore(str(folder / "store"), 2)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    model = make(Net, 0)
    how, _, stage = end.partition(" at ")
    if stage == "construction" and rank == 1:
        lost_by(how)
    start = time.perf_counter()
    report, parallel = {"type": None, "text": "no error"}, None
    try:
        parallel = DataParallel(
            model, F.cross_entropy, make_optimizer(model), method, timeout_s=TIMEOUT_S
        )
        for number in range(2):
            parallel.step(*batch(number))
        parallel.finish()
        dist.barrier()
        if rank == 1:
            lost_by(how)
        start = time.perf_counter()
        if stage == "leaving":
            parallel.close()
            leave_processes()
        for _ in range(3):
            parallel.step(*batch(3))
        parallel.finish()
    except Exception as error:
        report = {"type": type(error).__name__, "text": str(error)}
    report["seconds"] = time.perf_counter() - start
    report["joined"] = dist.is_initialized()
    if not stage:
        with contextlib.suppress(PeerError):
            parallel.close()
    report["hooks"] = hooks_of(model)
    (folder / "part").write_text(json.dumps(report))
    (folder / "part").rename(folder / "report.json")
    os._exit(0)


@pytest.fixture(scope="module")
def context():
    return joined.forked()  # imports torch once for all


@pytest.fixture(scope="module")
def lost(context, tmp_path_factory):
    """What the survivor of each pair tells."""
    asked = [(method, end) for method in METHODS for end in ENDS]
    asked += [("all_to_all", f"{how} at {stage}") for how, stage in ELSEWHERE]
    pairs = {pair: tmp_path_factory.mktemp("pair") for pair in asked}
    processes = [
        context.Process(target=lose, args=(rank, str(folder), *pair), daemon=True)
        for pair, folder in pairs.items()
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    yield {pair: folder / "report.json" for pair, folder in pairs.items()}
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def both(context, lost, tmp_path_factory):
    return joined.both(context, work, tmp_path_factory.mktemp("both"))


@pytest.mark.slow
class TestTwoProcesses:
    @pytest.mark.parametrize(("method", "variant"), CASES)
    def test_training_is_that_of_one_process_on_the_whole_batch(self, both, method, variant):
        replies = answers(both, method, variant)
        dtype = torch.float32 if variant == "float32" else torch.float64
        model = make(Net, 0, dtype)
        optimizer = make_optimizer(model, variant)
        weights, losses, seen = plainly(model, optimizer, dtype=dtype)
        tolerance = 1e-6 if variant == "float32" else 1e-12
        for answer in replies:
            assert_close(answer["weights"], weights, tolerance)
            assert_close([answer["seen"]], [seen], tolerance)  # evaluated amid an update
            assert answer["losses"] == pytest.approx(losses, rel=tolerance)
            assert answer["sums"] == [[3.0]] * len(SIZES)
            assert answer["rates"] == [float(group["lr"]) for group in optimizer.param_groups]
        for a, b in zip(*(answer["weights"] for answer in replies), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize(("method", "variant"), CASES)
    def test_timings(self, both, method, variant):
        for answer in answers(both, method, variant):
            assert len(answer["timings"]) == len(SIZES)
            for total, communication, summation, blocked, computation in answer["timings"]:
                assert min(total, communication, summation, blocked) >= 0
                assert blocked <= total and computation == pytest.approx(total - blocked)
            assert sum(t[1] for t in answer["timings"]) > 0
            summed = sum(t[2] for t in answer["timings"])
            assert summed > 0 if method == "all_to_all" else summed < 0.1

    @pytest.mark.parametrize("method", METHODS)
    def test_frozen_parameters_stay_and_the_others_train(self, both, method):
        model = make(Net, 0)
        model.hidden.requires_grad_(False)
        weights = plainly(model, make_optimizer(model), 3)[0]
        assert torch.equal(weights[3], make(Net, 0).hidden.weight)
        for answer in answers(both, method, "frozen"):
            assert_close(answer, weights)

    @pytest.mark.parametrize("method", SPLIT)
    def test_unused_parameters_are_named(self, both, method):
        for kind, text, closed, hooks in answers(both, method, "unused"):
            assert kind == "ValueError" and (closed, hooks) == ("closed", 0)
            assert "extra.bias, extra.weight got no gradient in this mini-batch" in text
            assert "out." not in text and "set requires_grad to False" in text

    @pytest.mark.parametrize("method", SPLIT)
    @pytest.mark.parametrize("buckets", ["", ", one bucket"])
    @pytest.mark.parametrize("stage", PLACES)
    def test_a_failed_step_leaves_the_good_update_before_it(self, both, method, buckets, stage):
        good, end = (plainly(m, make_optimizer(m), n)[0] for n, m in
                     ((1, make(Failing, 0)), (3, make(Failing, 0))))  # fmt: skip
        for answer in answers(both, method, f"failing {stage}{buckets}"):
            assert answer["error"] == bad(stage)[2]
            assert_close(answer["good"], good)
            assert_close(answer["end"], end)
            assert answer["timings"] == 3  # of the good steps

    @pytest.mark.parametrize("method", SPLIT)
    @pytest.mark.parametrize("skip", ["first", "extra"])
    def test_good_steps_after_lacking_gradients(self, both, method, skip):
        for answer in answers(both, method, f"lacking {skip}"):
            start = f"{skip}.bias, {skip}.weight got no gradient in this mini-batch: "
            assert [text.startswith(start) for text in answer["texts"]] == [True] * 3
            for number, weights in enumerate(answer["weights"], 1):
                model = make(Lazy, 0)
                assert_close(weights, plainly(model, make_optimizer(model), number)[0])
            assert_close(answer["end"], answer["weights"][-1])

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("between", ["no_grad", "inference"])
    def test_evaluation_between_steps_changes_nothing(self, both, method, between):
        model = make(Net, 0)
        weights = plainly(model, make_optimizer(model, "adam"), 3)[0]
        for answer in answers(both, method, f"{between} between"):
            assert isinstance(answer, list), answer
            assert_close(answer, weights)

    @pytest.mark.parametrize("method", METHODS)
    def test_after_close_the_model_is_plain(self, both, method):
        replies = answers(both, method, "closing")
        model = make(Net, 0)
        weights = plainly(model, make_optimizer(model), 1)[0]
        model.zero_grad()
        F.cross_entropy(model(batch(1)[0]), batch(1)[1]).backward()
        for answer in replies:
            assert_close(answer["weights"], weights)
            assert answer["hooks"] == 0
        assert_close(replies[0]["gradients"], [p.grad for p in model.parameters()])

    @pytest.mark.parametrize("method", METHODS)
    def test_means(self, both, method):
        replies = answers(both, method, "averages")
        for answer in replies:
            assert answer["numbers"] == [2.5, 1.0, 0.5]
            assert answer["count"] == 1
            for number in range(2):
                one, other = (each["of_share"][number] for each in replies)
                assert not torch.equal(one, other)  # each saw its share
                torch.testing.assert_close(answer["mean"][number], (one + other) / 2)

    def test_joined(self, both):
        assert [answer["joined"] for answer in both] == [[(0, 2)] * 2, [(1, 2)] * 2]


def report_of(path):
    deadline = time.monotonic() + 40
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_lost_process_is_an_error_in_the_other(both, lost, method, end):
    report = report_of(lost[method, end])
    assert report["type"] == PeerError.__name__, report
    assert report["text"].startswith("rank 0 of 2: averaging the gradients of step ")
    assert "another process has ended or hangs, or a parameter that is used here" in report["text"]
    assert "torchrun's summary names the first that ended" in report["text"]
    assert "go on from the checkpoint" in report["text"]
    assert report["hooks"] == 0
    # The end of a process is seen at once, silence after the time given (and slow machines' rest).
    assert report["seconds"] < TIMEOUT_S + 6
    if end == "hang":
        assert report["seconds"] > TIMEOUT_S / 2


@pytest.mark.slow
@pytest.mark.parametrize(("how", "stage"), ELSEWHERE)
def test_a_lost_process_is_an_error_at_construction_and_at_parting_too(both, lost, how, stage):
    report = report_of(lost["all_to_all", f"{how} at {stage}"])
    done = "making a DataParallel" if stage == "construction" else "parting from the other proc"
    assert report["type"] == PeerError.__name__, report
    assert report["text"].startswith(f"rank 0 of 2: {done}")
    assert "torchrun --max-restarts=3, which does so by itself" in report["text"]
    assert report["seconds"] < TIMEOUT_S + 6
    assert report["joined"] == (stage == "construction")


class TestOneProcess:
    def test_joins_nothing(self, monkeypatch):
        monkeypatch.delenv("RANK", raising=False)
        assert join_processes() == (0, 1)
        assert not dist.is_initialized()

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("variant", ["sgd", "adam"])
    def test_is_plain_training_to_the_last_bit(self, method, variant):
        model, wanted = make(Net, 0), make(Net, 0)
        optimizer = make_optimizer(model, variant)
        weights, losses, _ = plainly(wanted, make_optimizer(wanted, variant))
        parallel = DataParallel(model, F.cross_entropy, optimizer, method)
        assert (parallel.rank, parallel.processes) == (0, 1)
        for number, rate in enumerate(RATES):
            set_lr(optimizer, rate)
            assert parallel.mean(parallel.step(*batch(number))) == pytest.approx(losses[number])
        parallel.average_buffers()
        parallel.finish()
        assert len(parallel.timings) == len(SIZES)
        for timing in parallel.timings:
            assert timing.total_s == timing.computation_s > 0
            assert timing.communication_s == timing.summation_s == timing.blocked_s == 0
        parallel.close()
        assert all(map(torch.equal, weights_of(model), weights))

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"averaging": "ring"}, r"averaging is 'ring'; choose allreduce, all_to_all, reduce_s"),
            ({"micro_batch": 0}, r"micro_batch is 0; give at least 1, or None"),
            ({"bucket_bytes": -1}, r"bucket_bytes is -1 and timeout_s 120"),
            ({"timeout_s": 0}, r"timeout_s 0; give at least 0 and more than 0"),
        ],
    )
    def test_arguments(self, given, message):
        model = make(Net, 0)
        with pytest.raises(ValueError, match=message):
            DataParallel(model, F.cross_entropy, make_optimizer(model), **given)


class TestShare:
    @pytest.mark.parametrize("processes", [1, 2, 3, 7])
    def test_shares_are_the_whole_in_order_and_differ_by_one(self, processes):
        for samples in range(20):
            parts = [list(range(samples))[share(samples, r, processes)] for r in range(processes)]
            assert [n for part in parts for n in part] == list(range(samples))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1

    @pytest.mark.parametrize("given", [(4, 2, 2), (4, -1, 2), (-1, 0, 2), (4, 0, 0)])
    def test_arguments(self, given):
        with pytest.raises(ValueError, match=rf"{given[0]} samples, rank {given[1]} of {given[2]}"):
            share(*given)
