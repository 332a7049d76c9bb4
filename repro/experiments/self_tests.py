"""A tiny computation by each method, compared with plain torch on the CPU; `doctor` runs them."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from repro.measure import accelerator
from repro.measure.precision import without_tf32

_LR = 0.05


class NotHere(Exception):
    """A self-test needs a tool that this machine lacks; the text names it."""


def relative_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference over all tensors, relative to each one's largest value.

    Another number of tensors, another shape or a NaN is infinitely different.
    """
    ours, theirs = ([t.detach().cpu().double() for t in some] for some in (actual, expected))
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return math.inf
    differences = [
        float((one - other).abs().max()) / (float(other.abs().max()) or 1.0)
        for one, other in zip(ours, theirs, strict=True)
    ]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _model() -> nn.Module:
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 10))


def _batch(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 3, 16, 16), torch.randint(10, (samples,))


def _plain_sgd(batches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), _LR)
    for images, labels in batches:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return list(model.parameters())


def _streamed(device: str) -> float:
    from repro.mbs import MicroBatchStreamer

    images, labels = _batch(11)
    whole, model = _model(), _model().to(device)
    cross_entropy(whole(images), labels).backward()
    MicroBatchStreamer(model, nn.CrossEntropyLoss(), 3, device=device).backward(images, labels)
    gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, whole)]
    return relative_difference(*gradients)


def _two_workers(device: str) -> float:
    """Parallel SGD at a barrier (Lu et al., section 2.3): a mean of weights by the factors."""
    from repro.dualbatch import CyclicProgressiveSchedule as Schedule
    from repro.dualbatch import DualBatchPlan, Share, Stage, train_dual_batch
    from repro.measure import TimeModel

    images, labels = _batch(24)
    plan = DualBatchPlan.solve(TimeModel(a=1e-3, b=1e-2), 1.1, 1, 1, 8, len(images))
    shares = []

    def batches(share: Share, where: str = device) -> list[tuple[Tensor, Tensor]]:
        chosen = share.indices.cpu().split(share.batch_size)
        return [(images[some].to(where), labels[some].to(where)) for some in chosen]

    def given(share: Share) -> list[tuple[Tensor, Tensor]]:
        shares.append(share)
        return batches(share)

    train = partial(train_dual_batch, sync="bsp", optimizer_fn=torch.optim.SGD, device=device)
    trained = train(_model, given, plan, Schedule([Stage(1, _LR)]))
    factors = [commit.factor for commit in trained.log]
    workers = [_plain_sgd(batches(share, "cpu")) for share in shares]
    means = [
        sum(f * w for f, w in zip(factors, weights, strict=True)) / sum(factors)
        for weights in zip(*workers, strict=True)
    ]
    return relative_difference(list(trained.state.values()), means)


def _averagings(device: str) -> float:
    from repro.adaptive import METHODS, DataParallel

    images, labels = _batch(10)
    expected, differences = _plain_sgd(3 * [(images, labels)]), []
    for averaging in METHODS:
        model = _model().to(device)
        optimizer = torch.optim.SGD(model.parameters(), _LR)
        training = DataParallel(
            model, nn.CrossEntropyLoss(), optimizer, averaging, micro_batch=4, bucket_bytes=2**10
        )
        for _ in range(3):
            training.step(images.to(device), labels.to(device))
        training.finish()
        differences.append(relative_difference(list(model.parameters()), expected))
    return max(differences)


def _swapped(device: str) -> float:
    from repro.outofcore import OutOfCore

    def trained(budget: int) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(6)]
        model = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), _LR, momentum=0.9)
        images = torch.randn(4, 8, 16, 16).to(device)
        with OutOfCore(budget, window_bytes=None, device=device) as block:
            for _ in range(4):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(images), images).backward()
                optimizer.step()
            done = block.statistics
        return list(model.parameters()), done

    whole, watched = trained(2**40)  # which swaps nothing
    swapped, done = trained(int(0.6 * watched.peak_bytes))
    if not (done.bytes_out and done.replayed):
        raise ValueError(f"nothing was swapped by a plan: {done.bytes_out} bytes out")
    return relative_difference(swapped, whole)


def _chunks(device: str) -> float:
    from repro.outofcore.native import ChunkedMemory, NoCompilerError

    kind, _, number = device.partition(":")
    mib, backend = 2**20, "cuda" if kind == "cuda" else "posix"
    try:
        allocator = ChunkedMemory(backend, 2 * mib, 8 * mib, int(number or 0))
    except NoCompilerError as error:
        raise NotHere(str(error)) from error
    with allocator as memory:
        for address in [memory.malloc(4 * mib) for _ in range(2)]:
            memory.free(address)
        memory.free(memory.malloc(8 * mib))
        return 0.0 if memory.counters().peak_reserved_bytes == 8 * mib else math.inf


def _tuned(device: str) -> float:
    from repro.microconv import tune

    torch.manual_seed(0)
    plain, images = nn.Conv2d(4, 8, 3, padding=1), torch.randn(8, 4, 12, 12)
    outcomes: list[list[Any]] = [[], []]
    # In parts by one algorithm, then by the fastest ones.
    for limit_bytes, algorithms, parts in ((2**16, ["torch:im2col"], 2), (2**20, None, 1)):
        tuned = nn.Sequential(copy.deepcopy(plain)).to(device)
        options: dict[str, Any] = {"algorithms": algorithms, "min_gain": -math.inf, "cache": None}
        report = tune(tuned, images.to(device), limit_bytes, **options)
        chosen = [len(k.division.parts) if k.division else 1 for k in report.kernels]
        if not chosen or min(chosen) < parts:
            raise ValueError(f"kernels run in {chosen} parts, expected {parts}; {report.skipped}")
        for found, model, inputs in zip(
            outcomes, (tuned, plain), (images.to(device), images), strict=True
        ):
            inputs = inputs.clone().requires_grad_()
            model.zero_grad()
            outputs = model(inputs)
            outputs.square().mean().backward()
            found += [outputs, inputs.grad, *(p.grad for p in model.parameters())]
    return relative_difference(*outcomes)


class SelfTest(NamedTuple):
    """One comparison: its text, the largest difference that passes (0: to the bit), the function.

    The function takes the device, and returns the `relative_difference`.
    """

    paper: str
    text: str
    tolerance: float
    compare: Callable[[str], float]


TESTS = (
    SelfTest("mbs", "gradients in micro-batches = undivided pass on the CPU", 1e-4, _streamed),
    SelfTest("dualbatch", "weights of two workers = plain SGD on the CPU", 1e-4, _two_workers),
    SelfTest("adaptive", "weights by all averagings = plain SGD on the CPU", 1e-4, _averagings),
    SelfTest("outofcore", "weights while swapping = in core, bit for bit", 0.0, _swapped),
    SelfTest("outofcore", "the chunked allocator builds, and reuses its chunks", 0.0, _chunks),
    SelfTest(
        "microconv",
        "convolutions in parts and by the fastest algorithms = torch's on the CPU",
        1e-3,
        _tuned,
    ),
)


def run(test: SelfTest, device: str) -> dict[str, Any]:
    """Run a self-test, whose error is a result, in JSON values."""
    difference, status = math.nan, "failed"
    try:
        with (
            without_tf32(),  # which differs from a CPU's float32 by 1e-3
            accelerator.forked_rng(device),
            accelerator.on(device),
            warnings.catch_warnings(action="ignore"),
        ):
            difference = test.compare(device)
            accelerator.synchronize(device)
        why = f"differs by {difference:.2g}, allowed is {test.tolerance:.2g}"
        if difference <= test.tolerance:  # not so for NaN
            status, why = "ok", ""
    except NotHere as lacking:
        status, why = "not run", str(lacking)
    except Exception as error:
        why = first_line(error)
    with suppress(Exception):  # after an error of the device this may fail again
        accelerator.empty_cache(device)
    return {
        "paper": test.paper,
        "text": test.text,
        "status": status,
        "tolerance": test.tolerance,
        "difference": float(f"{difference:.2g}") if math.isfinite(difference) else None,
        "why": why,
    }


def first_line(error: Exception) -> str:
    """Return an error's kind and the first line of its text."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
