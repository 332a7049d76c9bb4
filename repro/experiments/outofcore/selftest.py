"""What `doctor` runs of out-of-core training, and the memory that its runs will take."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from repro.experiments.design import LONG
from repro.experiments.outofcore import runs
from repro.experiments.outofcore.building import training_step
from repro.experiments.selftests import NotHere, SelfTest, relative_difference
from repro.outofcore import OutOfCore
from repro.outofcore.native import AllocatorBuildError, ChunkedMemory
from repro.records import Record, reference_stores

_ITERATIONS = 4
MIB, GIB = 2**20, 2**30


def bits(device: str) -> float:
    """Compare weights trained within 60 % of the memory with those in core on the same device."""
    whole, peak = _trained(device, None)
    swapped, _ = _trained(device, int(0.6 * peak))
    return relative_difference(swapped, whole)


def _trained(device: str, budget: int | None) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images = torch.randn(4, 8, 16, 16).to(device)
    # Without a budget the block only watches how much there is.
    block = OutOfCore(budget or 2**40, window_bytes=None, device=device)
    with block:
        for _ in range(_ITERATIONS):
            optimizer.zero_grad()
            functional.mse_loss(model(images), images).backward()
            optimizer.step()
        done = block.statistics
    if budget is not None and not (done.bytes_out and done.replayed):
        raise ValueError(
            f"nothing was swapped by a plan: {done.bytes_out} bytes out, "
            f"{done.replayed} of {done.iterations} iterations replayed"
        )
    return [parameter.detach().cpu() for parameter in model.parameters()], done.peak_bytes


def allocator(device: str) -> float:
    """Build the chunked allocator, and see that chunks of freed ranges serve a larger one."""
    kind, _, number = device.partition(":")
    backend = "cuda" if kind == "cuda" else "posix"
    try:
        with ChunkedMemory(backend, 2 * MIB, 8 * MIB, int(number or 0)) as memory:
            taken = [memory.malloc(4 * MIB) for _ in range(2)]
            for address in taken:
                memory.free(address)
            memory.free(memory.malloc(8 * MIB))
            reserved = memory.counters().peak_reserved_bytes
    except AllocatorBuildError as error:
        if "no C++ compiler" not in str(error):
            raise
        raise NotHere(str(error)) from error
    return 0.0 if reserved == 8 * MIB else math.inf


def measured_step(
    records: Iterable[Record], device: str
) -> tuple[Record, float, Callable[[], object]] | None:
    """Return a record of a training step in core, its seconds, and that step to be timed here.

    It is that of the smallest mini-batch; None where no record is such.
    """
    candidates = [
        record
        for record in records
        if record.experiment == runs.MEASURED
        and record.config["mode"] == "in_core"
        and record.config["role"] == runs.RESNET
        and "iteration" in record.timings
    ]
    record = min(candidates, key=lambda record: record.config["batch"], default=None)
    if record is None:
        return None
    step = training_step(record.config, device)
    return record, median(record.timings["iteration"]["samples_s"]), step


def needs(profile: str) -> tuple[int | None, int | None]:
    """Return the bytes that measured runs take of a GPU, and swap to the host at most.

    On the GPU that is their limit. To the host goes what an iteration holds beyond it: the peaks of
    the simulated traces in the reference records, which are linear in the batch size. Under `long`
    a small network alone is measured, and nothing is known.
    """
    if profile == LONG:
        return None, None
    peaks: dict[str, dict[int, int]] = defaultdict(dict)
    for store in reference_stores().values():
        for record in store.load("outofcore"):
            if record.experiment == "simulated" and record.status == "ok":
                network = json.dumps([record.config["model"], record.config["image"]])
                peaks[network][record.config["batch"]] = record.metrics["peak_bytes"]
    limits, swapped = [], []
    for run in (*runs.resnet(profile), *runs.others(profile)):
        config = run.config
        if run.experiment != runs.MEASURED or "limit_gib" not in config:
            continue
        limits.append(int(config["limit_gib"] * GIB))
        known = peaks[json.dumps([config["model"], config["image"]])]
        if len(known) > 1:
            few, more = min(known), max(known)
            each = (known[more] - known[few]) / (more - few)
            swapped.append(int(known[few] + each * (config["batch"] - few) - limits[-1]))
    return max(limits, default=None), max((0, *swapped)) if swapped else None


TESTS: Sequence[SelfTest] = (
    SelfTest("weights while swapping = in core, bit for bit", 0.0, bits),
    SelfTest("the chunked allocator builds, and reuses its chunks", 0.0, allocator),
)
