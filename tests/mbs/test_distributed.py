"""Two processes on this machine, connected by gloo; started once for all tests."""

import traceback

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from repro.mbs import MicroBatchStreamer, NonFiniteLossError

SHARDS = [(0, 11), (11, 16)]  # 11 and 5 samples
# Of the mini-batches. DDP settles its buckets in the second, after which gradients can be views
# of them; the first is forgotten, and the third accumulates into the second.
SCALES = (1.0, 2.0, 3.0)
CASES = ["plain", "views", "two_pass", "weights", "pieces", "pieces auto", "auto", "nan", "other"]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def make_batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (16,), generator=generator)


def weighted_loss(outputs, targets):
    labels, weights = targets
    return (F.cross_entropy(outputs, labels, reduction="none") * weights).sum() / weights.sum()


def run_case(case, rank):
    """Return gradients, gradient all-reduces and calls of DDP's forward in one process."""
    start, stop = SHARDS[rank]
    inputs, y = (part[start:stop] for part in make_batch())
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=case == "views")
    counts = {"reductions": 0, "forwards": 0}

    def hook(state, bucket):
        counts["reductions"] += 1
        future = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    model.register_forward_pre_hook(
        lambda m, inputs: counts.update(forwards=counts["forwards"] + 1)
    )
    options = {"two_pass": case == "two_pass"}
    size = "auto" if "auto" in case else 2
    loss_fn = weighted_loss if case == "weights" else F.cross_entropy
    streamer = MicroBatchStreamer(model, loss_fn, size, **options)
    for index, scale in enumerate(SCALES):
        if index == 1:
            model.zero_grad()
        x = scale * inputs
        if case == "weights":
            w = 1.0 + torch.arange(start, stop, dtype=torch.float64)
            result = streamer.backward(x, (y, w), weights=w)
        elif "pieces" in case:
            result = streamer.backward((x[i : i + 3], y[i : i + 3]) for i in range(0, len(x), 3))
        elif case in ("nan", "other"):
            if case == "other" and rank == 1:
                x = x * float("nan")
            elif case == "nan":
                x[-1] = float("nan")
            try:
                streamer.backward(x, y)
            except NonFiniteLossError as error:
                return [p.grad for p in model.parameters()], str(error)
        else:
            result = streamer.backward(x, y)
    assert result.num_samples == len(x)
    return [p.grad.clone() for p in model.parameters()], counts


def work(rank, port, queue):
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        found = {}
        for case in CASES:
            gradients, facts = run_case(case, rank)
            found[case] = ([None if g is None else g.tolist() for g in gradients], facts)
        queue.put((rank, found))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        queue.put((rank, traceback.format_exc()))


@pytest.fixture(scope="module")
def found():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=work, args=(rank, port, queue), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        answers = dict(queue.get(timeout=30) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    for answer in answers.values():
        assert isinstance(answer, dict), answer
    return answers


def reference(case):
    """Return the sum of the gradients of all mini-batches but the first."""
    each = [reference_at(case, scale) for scale in SCALES[1:]]
    return [sum(parts) for parts in zip(*each, strict=True)]


def reference_at(case, scale):
    model, (x, y) = make_model(), make_batch()
    x = scale * x
    if case == "two_pass":  # a loss of its own for each process's share, and their mean
        loss = sum(F.cross_entropy(model(x[a:b]), y[a:b]) for a, b in SHARDS) / 2
    elif case == "weights":
        loss = weighted_loss(model(x), (y, 1.0 + torch.arange(16, dtype=torch.float64)))
    else:
        loss = F.cross_entropy(model(x), y)
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:-2])
def test_gradient_is_that_of_all_samples(found, case):
    for rank in range(2):
        gradients, counts = found[rank][case]
        for got, want in zip(gradients, reference(case), strict=True):
            got = torch.tensor(got, dtype=torch.float64)
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)
        assert counts["reductions"] == len(SCALES)  # one bucket, once per mini-batch
        if size_of(case):
            forwards = -(-len(range(*SHARDS[rank])) // size_of(case))
            assert counts["forwards"] == len(SCALES) * forwards  # none in two_pass's first pass


def size_of(case):
    return 2 if case in ("plain", "views", "two_pass", "weights") else None


@pytest.mark.slow
@pytest.mark.parametrize("case", ["nan", "other"])
def test_a_non_finite_loss_in_one_process_is_an_error_in_all(found, case):
    for rank in range(2):
        gradients, message = found[rank][case]
        assert all(g is None for g in gradients)
        another = case == "other" and rank == 0
        assert ("of another process is nan" in message) == another
