"""Two processes on this machine, connected by gloo; started once for all tests."""

import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import joined
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_randomness import over_the_batch
from test_streamer import make_batch, weighted_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from repro.mbs import MicroBatchStreamer, NonFiniteLossError
from repro.measure import MemoryBudget

pytestmark = pytest.mark.slow
SHARDS = [(0, 11), (11, 16)]  # 11 and 5 samples
# Of the mini-batches. DDP settles its buckets in the second, after which gradients can be views
# of them; the first is forgotten, and the third accumulates into the second.
SCALES = (1.0, 2.0, 3.0)
CASES = ["plain", "views", "two_pass", "weights", "pieces", "auto", "auto two_pass", "auto short",
         "ignored", "ignored unused", "weights of one", "hooks", "no_sync", "no_sync views", "nan",
         "other", "scaled"]  # fmt: skip
# Losses with parameters of the model: a temperature in the loss alone, and one that decays.
WITH_PARAMETERS = ["temperature", "temperature two_pass", "decay", "decay two_pass", "experts",
                   "constant", "sparse"]  # fmt: skip
SHARDED = ["fully_shard", "fully_shard two_pass", "fully_shard evaluated", "fully_shard bfloat16",
           "fully_shard weights", "fully_shard weights within", "Fully",
           "Fully, original parameters", "fully_shard auto", "fully_shard two_pass auto",
           "Fully auto"]  # fmt: skip
REFUSED = ["one fails", "one refuses", "sharded pieces", "sharded few", "static graph",
           "mixed precision", "compiled", "unwrapped"]  # fmt: skip


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def weights_of(case):
    weights = 1.0 + torch.arange(16, dtype=torch.float64)
    return weights * (torch.arange(16) < 11) if case == "weights of one" else weights


def run_case(case, rank):
    """Return gradients, gradient all-reduces and calls of DDP's forward in one process."""
    start, stop = SHARDS[rank]
    inputs, y = (part[start:stop] for part in make_batch(16))
    options = {"gradient_as_bucket_view": "views" in case}
    options["find_unused_parameters"] = "unused" in case
    plain = make_model()
    plain.register_buffer("rank", torch.zeros(()))
    model = DistributedDataParallel(plain, **options)
    plain.rank.fill_(rank)
    counts = {"reductions": 0, "forwards": 0}

    def hook(state, bucket):
        counts["reductions"] += 1
        future = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    model.register_forward_pre_hook(lambda *_: counts.update(forwards=counts["forwards"] + 1))
    options = {"two_pass": "two_pass" in case}
    if case == "scaled":
        options["scaler"] = torch.amp.GradScaler("cpu")
    if case == "hooks":
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    if ("ignored" in case and rank == 1) or (case == "scaled" and rank == 0):
        y = torch.full_like(y, -100)  # nothing counts in this process
    size = "auto" if "auto" in case else 2
    loss_fn = weighted_loss if "weights" in case else F.cross_entropy
    streamer, sizes = MicroBatchStreamer(model, loss_fn, size, **options), []
    for index, scale in enumerate(SCALES):
        if case == "scaled" and rank == 1:
            scale = float("nan")
        if "short" in case and index == 1:
            model.module.register_forward_hook(partial(run_out, rank, [0]))
        if index == 1:
            model.zero_grad()
        x = scale * inputs
        if "weights" in case:
            w = weights_of(case)[start:stop]
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
            with model.no_sync() if "no_sync" in case and index == 1 else nullcontext():
                result = streamer.backward(x, y)
        sizes.append((result.micro_batch_size, result.retries))
    assert result.num_samples == len(x) and plain.rank == 0  # the first process's, as in torch
    counts["sizes"] = sizes
    return [p.grad.clone() for p in model.parameters()], counts


class Scaled(nn.Module):
    """Has a parameter that only the loss uses, as CLIP's temperature."""

    def __init__(self):
        super().__init__()
        self.layers, self.scale = make_model(), nn.Parameter(torch.tensor(0.5).double())

    def forward(self, x):
        return self.layers(x)


class Looking(Scaled):
    """Looks samples up in a table with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Embedding(6, 4, sparse=True, dtype=torch.float64)

    def forward(self, x):
        return self.layers(x.argmax(1))


class Experts(nn.Module):
    """Sends samples to one of two layers, and the last micro-batch to the first alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 4) for _ in range(2)).double()
        self.scale = nn.Parameter(torch.tensor(0.5).double())

    def forward(self, x):
        first, second = self.layers[0](x), x[:, 0] > 0
        return first + second[:, None] * self.layers[1](x) if second.any() else first


MODELS = {"experts": Experts, "sparse": Looking}


def loss_with_parameters(model, case, outputs, targets):
    if case == "constant":  # without a sample that counts
        kept = (outputs * model.scale)[targets > 0]
        return kept.square().sum() / len(targets) if len(kept) else torch.tensor(0.0)
    if "decay" in case:
        decay = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(outputs, targets) + 0.1 * decay
    return F.cross_entropy(outputs * model.scale.exp(), targets)


def routed(case):
    x, y = make_batch(16)
    if case == "experts":
        x[[6, 7, 14, 15], 0] = -1.0  # the last micro-batch of each process
    if case == "constant":
        y[8:] = 0  # all of the second process
    return x, y


def run_with_parameters(case, rank):
    """Return the gradients after two mini-batches of eight samples in each process."""
    x, y = (part[8 * rank : 8 * rank + 8] for part in routed(case))
    model = MODELS.get(case, Scaled)()
    wrapped = DistributedDataParallel(model)
    idle = nn.Linear(1, 1)  # of the loss, which does not use it

    def loss_fn(outputs, targets):
        return idle if outputs is None else loss_with_parameters(model, case, outputs, targets)

    streamer = MicroBatchStreamer(wrapped, loss_fn, 2, two_pass="two_pass" in case)
    for _ in range(2):
        streamer.backward(x, y)
    assert idle.weight.grad is None
    return [p.grad for p in model.parameters()], {}


def run_out(rank, calls, module, inputs, outputs):
    """Have rank 1 run out of memory in a backward pass: once, of its first micro-batch."""
    calls[0] += outputs.requires_grad
    if rank == 1 and calls[0] == 1 and outputs.requires_grad:

        def fail(gradient):
            raise torch.OutOfMemoryError("injected")

        outputs.register_hook(fail)


def sharded(case, model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if case.startswith("Fully"):
        options = {"device_id": torch.device("cpu"), "use_orig_params": "original" in case}
        return FullyShardedDataParallel(model, **options)
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model,) if "evaluated" in case else (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


class Headless(nn.Sequential):
    """Leaves its last layer to the loss."""

    def forward(self, x):
        return self[1](self[0](x))


def run_sharded(case, rank):
    """Return full gradients, of a share of 11 samples in each process but for "few"."""
    x, y = make_batch(16)
    stop = 11 if rank == 0 else 14  # 11 and 9 samples
    x, y = (x[:stop], y[:stop]) if rank == 0 else (x[5:stop], y[5:stop])
    if case == "sharded few":
        x, y = (x, y) if rank == 0 else (x[:2], y[:2])
    dtype, options = (torch.float32 if "bfloat16" in case else torch.float64), {}
    loss_fn, x = F.cross_entropy, x.to(dtype)
    if "weights" in case:
        # The first micro-batch has none, in one process or in both.
        w = 1.0 * (torch.arange(len(x)) > (-1 if "within" in case and rank else 2))
        loss_fn, options = weighted_loss, {"weights": w}
    layers, calls = make_model().to(dtype), []
    if "within" in case:
        model, y = sharded(case, Headless(*layers)), y.masked_fill(w == 0, -100)
        loss_fn = lambda outputs, targets: F.cross_entropy(model[2](outputs), targets)  # noqa: E731
    else:
        model, y = sharded(case, layers), (y, w) if options else y
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(calls.append)
    size = "auto" if "auto" in case else 2
    streamer = MicroBatchStreamer(model, loss_fn, size, two_pass="two_pass" in case)
    # A limit on the memory of each process, the lower one in the second, which has fewer samples.
    limit = (4700 if case.startswith("Fully") else 6000) - 500 * rank
    with MemoryBudget(limit, resident=model) if size == "auto" else nullcontext():
        for _ in range(2):  # adds to the first
            if "pieces" in case:
                streamer.backward(iter([(x, y)]))
            if "evaluated" in case:  # after which the parameters stay gathered
                with torch.no_grad():
                    model(x)
            with torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in case):
                result = streamer.backward(x, y, **options)
    assert case.startswith("Fully") or len(calls) == 8  # once a mini-batch
    if case.startswith("Fully"):  # in each process a part of one vector of all
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        everyones = [None, None]
        dist.all_gather_object(everyones, torch.cat(parts))
        gradients = [torch.cat(everyones)[:92]]  # without padding
    else:
        gradients = [p.grad.full_tensor() for p in model.parameters()]
    sizing = streamer.sizing and (streamer.sizing.probes, streamer.sizing.limit_bytes)
    return gradients, {"micro_batches": result.num_micro_batches, "sizing": sizing}


def run_refused(case, rank):
    """Return the error or warning of a use that is refused."""
    if case == "unwrapped":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            MicroBatchStreamer(make_model(), F.cross_entropy, 2)
        return [], [(str(w.message), Path(w.filename).name) for w in caught]
    model = DistributedDataParallel(make_model(), static_graph=case == "static graph")
    model.mixed_precision = object() if case == "mixed precision" else None
    model = torch.compile(model) if case == "compiled" else model
    size, loss_fn = (2 if case == "one refuses" else "auto"), F.cross_entropy
    if rank == 1 and case == "one refuses":
        loss_fn = over_the_batch
    elif rank == 1 and case == "one fails":
        model.module.register_forward_hook(lambda *_: 1 / 0)
    try:
        if case.startswith("sharded"):
            run_sharded(case, rank)
        MicroBatchStreamer(model, loss_fn, size).backward(*make_batch(16))
    except Exception as error:
        return [p.grad for p in model.parameters()], f"{type(error).__name__}: {error}"


def work(rank, port, folder):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    runs = ((CASES, run_case), (WITH_PARAMETERS, run_with_parameters), (SHARDED, run_sharded),
            (REFUSED, run_refused))  # fmt: skip
    reports = {case: run(case, rank) for cases, run in runs for case in cases}
    torch.save(reports, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return joined.both(joined.forked(), work, tmp_path_factory.mktemp("both"))


def reference(case):
    """Return the sum of the gradients of all mini-batches but the first."""
    each = [reference_at(case, scale) for scale in SCALES[1:]]
    return [sum(parts) for parts in zip(*each, strict=True)]


def reference_at(case, scale):
    model, (x, y) = make_model(), make_batch(16)
    x = scale * x
    if "two_pass" in case:  # a loss of its own for each process's share, and their mean
        loss = sum(F.cross_entropy(model(x[a:b]), y[a:b]) for a, b in SHARDS) / 2
    elif "weights" in case:
        loss = weighted_loss(model(x), (y, weights_of(case)))
    elif "ignored" in case:
        loss = F.cross_entropy(model(x)[:11], y[:11])
    elif case == "hooks":  # each process clamps the gradient of what it adds to the mean
        parts = [
            torch.autograd.grad(F.cross_entropy(model(x[a:b]), y[a:b]) * (b - a) / 8,
                                list(model.parameters()))
            for a, b in SHARDS
        ]  # fmt: skip
        return [sum(p.clamp(-0.05, 0.05) for p in each) / 2 for each in zip(*parts, strict=True)]
    else:
        loss = F.cross_entropy(model(x), y)
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("case", CASES[:-3])
def test_gradient_is_that_of_all_samples(reports, case):
    for rank in range(2):
        gradients, counts = reports[rank][case]
        for got, want in zip(gradients, reference(case), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)
        # One bucket, once per mini-batch.
        assert counts["reductions"] == len(SCALES) - ("no_sync" in case)
        assert counts["forwards"] == len(SCALES)  # which averages


@pytest.mark.parametrize("case", WITH_PARAMETERS)
def test_parameters_that_the_loss_uses_are_synchronised(reports, case):
    model, (x, y) = MODELS.get(case, Scaled)(), routed(case)
    # Two mini-batches, of each of which the mean over the processes counts.
    shares = (slice(0, 8), slice(8, 16))
    loss = sum(loss_with_parameters(model, case, model(x[part]), y[part]) for part in shares)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for rank in range(2):
        for got, want in zip(reports[rank][case][0], expected, strict=True):
            torch.testing.assert_close(got.to_dense(), want.to_dense(), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("case", ["nan", "other"])
def test_a_non_finite_loss_in_one_process_is_an_error_in_all(reports, case):
    for rank in range(2):
        gradients, message = reports[rank][case]
        assert all(g is None for g in gradients)
        assert ("of another process is nan" in message) == (case == "other" and rank == 0)


def test_a_scaler_skips_the_step_in_all_processes(reports):
    for rank in range(2):  # nothing counts in the first
        assert not any(g.isfinite().all() for g in reports[rank]["scaled"][0])


@pytest.mark.parametrize("case", ["auto", "auto two_pass", "auto short"])
def test_auto_agrees_on_one_size_and_tries_again_together(reports, case):
    sizes = [reports[rank][case][1]["sizes"] for rank in range(2)]
    if case == "auto short":
        # The 5 samples that one of them could not take are halved in both.
        assert sizes[0][1] == sizes[1][1] == (2, 1), sizes
    else:
        assert [retries for each in sizes for _, retries in each] == [0] * 6


@pytest.mark.parametrize(
    ("case", "error"), [("one fails", "ZeroDivisionError"), ("one refuses", "LossCheckError")]
)
def test_what_fails_in_one_process_fails_in_all(reports, case, error):
    messages = [reports[rank][case][1] for rank in range(2)]
    assert messages[0].startswith("DistributedModelError: another process failed")
    assert messages[1].startswith(error)
    assert all(g is None for rank in range(2) for g in reports[rank][case][0])


@pytest.mark.parametrize("case", SHARDED)
def test_fully_sharded_models(reports, case):
    model, (x, y) = make_model(), make_batch(16)
    shares = (slice(0, 11), slice(5, 14))
    if "two_pass" in case:
        loss = sum(F.cross_entropy(model(x[s]), y[s]) for s in shares) / 2
    else:
        if "weights" in case:
            shares = (slice(3, 11), slice(5 if "within" in case else 8, 14))
        loss = F.cross_entropy(torch.cat([model(x[s]) for s in shares]),
                               torch.cat([y[s] for s in shares]))  # fmt: skip
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for rank in range(2):
        gradients, facts = reports[rank][case]
        if "auto" not in case:
            assert facts["micro_batches"] == 6  # 11 in twos; and 9 in as many
        flat = torch.cat([g.flatten() for g in gradients])
        want = torch.cat([2 * g.flatten() for g in expected])
        assert (flat.double() - want).norm() / want.norm() < (2e-2 if "bfloat16" in case else 1e-11)


@pytest.mark.parametrize("case", [case for case in SHARDED if "auto" in case])
def test_sharded_models_agree_on_a_size_that_fits_in_each_process(reports, case):
    first, second = (reports[rank][case][1] for rank in range(2))
    assert first == second
    probes, limit = first["sizing"]
    assert first["micro_batches"] > 1 and len(probes) > 1 and limit <= 5500


def test_what_sharded_models_cannot_do_is_refused_in_all_processes(reports):
    for rank in range(2):
        for case, message in (
            ("static graph", "DistributedModelError: DistributedDataParallel(static_graph=True)"),
            ("mixed precision", "DistributedModelError: DistributedDataParallel(mixed_precision=)"),
            ("compiled", "DistributedModelError: torch.compile around DistributedDataParallel"),
            ("sharded pieces", "BatchError: a mini-batch in pieces needs"),
            ("sharded few", "DistributedModelError: a process can make 2 micro-batches of its"),
        ):
            assert reports[rank][case][1].startswith(message)


def test_a_model_that_is_not_wrapped_is_named_once(reports):
    for rank in range(2):
        ((message, file),) = reports[rank]["unwrapped"][1]
        assert message.startswith("2 processes are joined") and file == "test_distributed.py"
