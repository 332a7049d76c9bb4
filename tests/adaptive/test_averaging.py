"""Two processes on this machine, connected by gloo; started once for all tests.

Others of which one dies or hangs, a pair for each way of averaging and each end, run meanwhile.
"""

import contextlib
import json
import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import joined
import pairs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairs import answers, assert_close, parallel_of, weights_of
from torch import nn

from repro import adaptive
from repro.adaptive import METHODS, DataParallel, PeerError, StepTiming, join_processes, set_lr

# Ragged, growing, one with a single sample: a process has none of it.
SIZES = [6, 7, 1, 12, 5]
RATES = [0.1, 0.02, 0.1, 0.2, 0.05]
VARIANTS = {
    "small buckets": {},
    "a bucket each": {"bucket_bytes": 0},
    "one bucket": {"bucket_bytes": 2**30},
    "micro-batches": {"micro_batch": 2},
    "adam, micro-batches": {"bucket_bytes": 2**30, "micro_batch": 1},
    "tensor rate": {},
}
CASES = [(method, variant) for method in METHODS for variant in VARIANTS]
SPLIT = ("all_to_all", "reduce_scatter")
ENDS = [(method, end) for method in METHODS for end in ("kill", "hang")]
STAGES = {
    "": "averaging the gradients of step ",
    "construction": "making a DataParallel",
    "leaving": "parting from the other processes",
}
ENDS += [("all_to_all", f"{how} at {at}") for how in ("kill", "hang") for at in [*STAGES][1:]]
ENDS.append(("all_to_all", "exit"))
TIMEOUT_S = 6.0


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


class Failing(nn.Module):
    """Fails where `fail` says, or leaves the layer of that name out of the loss."""

    fail = ""

    def __init__(self):
        super().__init__()
        self.first, self.extra, self.out = nn.Linear(18, 4), nn.Linear(18, 4), nn.Linear(4, 3)

    def forward(self, x):
        if self.fail == "before":
            raise ZeroDivisionError
        parts = {"first": self.first(x).tanh(), "extra": self.extra(x).tanh()}
        if self.fail == "within":
            raise ZeroDivisionError
        if self.fail == "backward":
            parts["first"].register_hook(lambda gradient: 1 / 0)
        return self.out(sum(part for name, part in parts.items() if name != self.fail))


def make(kind, seed=0):
    torch.manual_seed(seed)
    return kind().double()


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


def batch(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(SIZES[number], 18, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (SIZES[number],), generator=generator)


def trained(method, variant="sgd", kind=Net, steps=5):
    """Train with a rate that changes, and evaluate amid an update; with None by torch alone."""
    rank = dist.get_rank() if method else 0
    model = make(kind, rank)  # of other weights in the other process
    optimizer, seen, sums = make_optimizer(model, variant), [], []

    def between(number):
        if number + 1 < steps:
            set_lr(optimizer, RATES[number + 1])  # updates under way are of the rate before
        if method:
            sums.append(torch.tensor([rank + 1.0]))
            dist.all_reduce(sums[-1])  # a collective of the caller's
        if number == 1:
            model.eval()
            with torch.no_grad():
                seen.append(model(batch(3)[0]).clone())
            model.train()

    batches = [batch(number) for number in range(steps)]
    options = VARIANTS.get(variant, {}) if method else {}
    found = pairs.train(method, model, optimizer, batches, between=between, **options)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return found | {"seen": seen, "sums": sums, "rates": rates}


def failing(method, stage, **options):
    """Fail after a good step; note the weights then, and after two more good steps."""
    model = make(Failing)
    optimizer = make_optimizer(model)
    parallel = parallel_of(model, optimizer, method, **options)
    parallel.step(*batch(0))
    set_lr(optimizer, RATES[1])  # the update under way is of the rate before
    model.fail = stage
    error = pairs.error_of(parallel.step, *batch(3))
    model.fail = ""
    parallel.finish()
    good = weights_of(model)
    for number in (1, 2):
        set_lr(optimizer, RATES[number])
        parallel.step(*batch(number))
    parallel.close()
    return error, good, weights_of(model), len(parallel.timings)


PLACES = ("before", "within", "backward", "first", "extra")


def todo(rank):
    for method, variant in CASES:
        yield (method, variant), partial(trained, method, variant)
    for method in SPLIT:
        for stage in PLACES:
            for size in (0, None):
                failed = partial(failing, method, stage, bucket_bytes=size)
                yield (method, "failing", stage, size), failed


def work(rank, port, folder):
    pairs.run_cases(rank, port, folder, todo)


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
    model = make(Net)
    optimizer = make_optimizer(model)
    how, _, stage = end.partition(" at ")
    if stage == "construction" and rank == 1:
        lost_by(how)
    start = time.perf_counter()
    report, parallel = {"type": None, "text": "no error"}, None
    try:
        parallel = DataParallel(model, F.cross_entropy, optimizer, method, timeout_s=TIMEOUT_S)
        for number in range(2):
            parallel.step(*batch(number))
        parallel.finish()
        dist.barrier()
        if rank == 1:
            lost_by(how)
        start = time.perf_counter()
        if stage == "leaving":
            parallel.close()
            adaptive.leave_processes()
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
    report["hooks"] = pairs.hooks_of(model, optimizer)
    (folder / "part").write_text(json.dumps(report))
    (folder / "part").rename(folder / "report.json")
    os._exit(0)


@pytest.fixture(scope="module")
def context():
    return joined.forked()  # imports torch once for all


@pytest.fixture(scope="module")
def lost(context, tmp_path_factory):
    """What the survivor of each pair tells."""
    folders = {pair: tmp_path_factory.mktemp("pair") for pair in ENDS}
    lost = [(rank, str(folder), *pair) for pair, folder in folders.items() for rank in range(2)]
    processes = [context.Process(target=lose, args=args, daemon=True) for args in lost]
    for process in processes:
        process.start()
    yield {pair: folder / "report.json" for pair, folder in folders.items()}
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def both(context, lost, tmp_path_factory):
    return joined.both(context, work, tmp_path_factory.mktemp("both"))


def plainly(steps):
    """The weights after some steps of torch alone."""
    return trained(None, kind=Failing, steps=steps)["weights"]


@pytest.mark.slow
class TestTwoProcesses:
    @pytest.mark.parametrize(("method", "variant"), CASES)
    def test_training_is_that_of_one_process_on_the_whole_batch(self, both, method, variant):
        replies, wanted = answers(both, method, variant), trained(None, variant)
        for answer in replies:
            pairs.assert_trained_alike(answer, wanted)
            assert_close(answer["seen"], wanted["seen"])  # evaluated amid an update
            assert answer["sums"] == [3.0] * len(SIZES) and answer["rates"] == wanted["rates"]
        assert all(map(torch.equal, *(answer["weights"] for answer in replies)))

    @pytest.mark.parametrize("method", METHODS)
    def test_timings(self, both, method):
        for answer in answers(both, method, "small buckets"):
            timings = [StepTiming(**seconds) for seconds in answer["timings"]]
            assert len(timings) == len(SIZES)
            for timing in timings:
                assert min(vars(timing).values()) >= 0 and timing.blocked_s <= timing.total_s
                assert timing.computation_s == pytest.approx(timing.total_s - timing.blocked_s)
            assert sum(timing.communication_s for timing in timings) > 0
            summed = sum(timing.summation_s for timing in timings)
            assert summed > 0 if method == "all_to_all" else summed < 0.1

    @pytest.mark.parametrize("method", SPLIT)
    @pytest.mark.parametrize("size", [0, None])
    @pytest.mark.parametrize("stage", PLACES)
    def test_a_failed_step_leaves_the_good_update_before_it(self, both, method, size, stage):
        for (kind, text), good, end, timings in answers(both, method, "failing", stage, size):
            assert timings == 3  # of the good steps
            if stage in ("first", "extra"):
                assert kind == "ValueError"
                assert text.startswith(f"{stage}.bias, {stage}.weight got no gradient in this mini")
            else:
                assert kind == "ZeroDivisionError"
            assert_close(good, plainly(1))
            assert_close(end, plainly(3))

    def test_joined(self, both):
        assert [answer["joined"] for answer in both] == [[(0, 2)] * 2, [(1, 2)] * 2]


def report_of(path):
    deadline = time.monotonic() + 40
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "end"), ENDS)
def test_a_lost_process_is_an_error_in_the_other(both, lost, method, end):
    """In a step, at construction and at parting."""
    report, stage = report_of(lost[method, end]), end.partition(" at ")[2]
    assert report["type"] == PeerError.__name__, report
    assert report["text"].startswith(f"rank 0 of 2: {STAGES[stage]}")
    assert "go on from the checkpoint" in report["text"]
    assert stage or report["hooks"] == 0
    assert report["joined"] == (stage != "leaving")
    # The end of a process is seen at once, silence after the time given (and slow machines' rest).
    assert report["seconds"] < TIMEOUT_S + 6
    if end == "hang":
        assert report["seconds"] > TIMEOUT_S / 2


class TestOneProcess:
    def test_joins_nothing(self, monkeypatch):
        monkeypatch.delenv("RANK", raising=False)
        assert join_processes() == (0, 1) and not dist.is_initialized()

    @pytest.mark.parametrize("method", METHODS)
    def test_is_plain_training_to_the_last_bit(self, method):
        model = make(Net)
        optimizer = make_optimizer(model)
        parallel = parallel_of(model, optimizer, method)
        assert (parallel.rank, parallel.processes) == (0, 1)
        losses = []
        for number, rate in enumerate(RATES):
            set_lr(optimizer, rate)
            losses.append(parallel.mean(parallel.step(*batch(number))))
        parallel.average_buffers()
        for timing in parallel.timings:
            assert timing.total_s == timing.computation_s > 0
            assert timing.communication_s == timing.summation_s == timing.blocked_s == 0
        parallel.close()
        wanted = trained(None)
        assert all(map(torch.equal, weights_of(model), wanted["weights"]))
        assert losses == pytest.approx(wanted["losses"])


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_shares_are_the_whole_in_order_and_differ_by_one(processes):
    for samples in range(20):
        whole = list(range(samples))
        parts = [whole[adaptive.share(samples, r, processes)] for r in range(processes)]
        assert [n for part in parts for n in part] == whole
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
