"""The experiments of Micro-Batch Streaming: what is executed and measured."""

import copy
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from repro.datasets import Ahead, ImageData
from repro.experiments.mbs.building import (
    Batch,
    Config,
    build_model,
    build_optimizer,
    evaluation,
    is_segmentation,
    loss_of,
    train_loader,
    training_step,
)
from repro.experiments.outcome import Outcome
from repro.mbs import MicroBatchStreamer
from repro.measure import (
    LinearMemoryModel,
    MemoryBudget,
    MemoryMeter,
    Timing,
    comparable_peaks,
    is_out_of_memory,
    synchronize,
    time_interleaved,
)
from repro.training import Step, fit


def _two_steps(config: Config, model: nn.Module, batch: Batch, device: str) -> None:
    # The second step also holds the optimizer's state, which the first one makes.
    step = training_step(config, model, build_optimizer(config, model), device)
    for _ in range(2):
        step(*batch)


def _measured(config: Config, data: ImageData, batch: Batch, device: str) -> MemoryMeter:
    model = build_model(config, data, device).train()
    with MemoryMeter(device, resident=model) as meter:
        _two_steps(dict(config) | {"micro_batch": None}, model, batch, device)
    return meter


def _memory_model(
    config: Config, data: ImageData, device: str, sizes: Sequence[int] = (2, 4, 8)
) -> tuple[LinearMemoryModel, list[int]]:
    """Fit M(B) = p + B a to the peaks of undivided training steps."""
    batches = [_first_batch(config, data, size, device) for size in sizes]
    peaks = comparable_peaks([_measured(config, data, batch, device) for batch in batches])
    return LinearMemoryModel.fit(sizes, peaks), peaks


def _first_batch(config: Config, data: ImageData, size: int, device: str, seed: int = 0) -> Batch:
    """Return a mini-batch in host memory from which the device copies beside its computations."""
    loader = train_loader(config, data, size, seed, samples=max(size, 8))
    return next(iter(Ahead(loader, device, count=1)))


def _limit_bytes(config: Config, data: ImageData, device: str) -> int | None:
    """Return the simulated device's memory, None for the device as it is.

    Where the configuration names no bytes, it lies half way between the need of the paper's
    initial mini-batch and of twice that, so that
    the same mini-batches fit and fail as on the paper's card.
    """
    if config["limit_fits"] is None:
        return config.get("limit_bytes")
    # The same for every training of a model: measured once in a process.
    parts = [config[name] for name in ("model", "dataset", "augment", "optimizer", "limit_fits")]
    key = json.dumps([*parts, data.fingerprint, device], sort_keys=True)
    if key not in _limits:
        gc.collect()
        sizes = (config["limit_fits"], 2 * config["limit_fits"])
        batches = [_first_batch(config, data, size, device) for size in sizes]
        meters = [_measured(config, data, batch, device) for batch in batches]
        peaks = comparable_peaks(meters)
        _limits[key] = sum(peaks) // 2
    return _limits[key]


_limits: dict[str, int] = {}


def train(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Train with or without MBS under a memory limit (Tables 1, 3, 4, 5 and Figure 3).

    On a CPU the limit is simulated, and watching every storage costs time: two steps on a copy of
    the model are taken under it, and the training that is timed runs without. On an accelerator
    all of it runs under the limit. An out-of-memory error is the caller's to record.
    """
    assert data is not None
    limit = _limit_bytes(config, data, device)  # before this model occupies memory
    torch.manual_seed(seed)
    model = build_model(config, data, device)
    optimizer = build_optimizer(config, model)
    loader = train_loader(config, data, config["mini_batch"], seed, config["train_samples"])
    peak = None
    if limit is not None and device == "cpu":
        probe = copy.deepcopy(model).train()
        batch = next(iter(loader))  # drawn outside the budget: it lies in host memory
        loader.set_epoch(0)
        with MemoryBudget(limit, device, resident=probe) as budget:
            _two_steps(config, probe, batch, device)
        peak = budget.peak_reserved_bytes
    scheduler = None
    if config["optimizer"].get("schedule") == "linear":
        scheduler = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1.0, end_factor=1e-3, total_iters=config["epochs"]
        )
    limited = limit is not None and device != "cpu"
    with MemoryBudget(limit, device) if limited and limit else nullcontext() as budget_or_none:
        history = fit(
            model,
            training_step(config, model, optimizer, device),
            Ahead(loader, device),
            epochs=config["epochs"],
            device=device,
            evaluate=evaluation(config, data, model, device),
            scheduler=scheduler,
        )
    if budget_or_none is not None:
        peak = budget_or_none.peak_reserved_bytes
    if not all(math.isfinite(epoch.train_loss) for epoch in history):
        raise FloatingPointError(
            f"training diverged: the losses of the epochs are {[e.train_loss for e in history]}"
        )
    metric = "iou" if is_segmentation(config) else "accuracy"
    curves = {name: [e.metrics[name] for e in history] for name in history[0].metrics}
    return Outcome(
        metrics={
            "best": max(curves[metric]),
            "metric": metric,
            "train_loss": [e.train_loss for e in history],
            **curves,
            "limit_bytes": limit,
            "limit_simulated": limit is not None,
            "steps_per_epoch": len(loader),
        },
        timings={"epoch": Timing(tuple(e.time_s for e in history[1:]), warmup=1)},
        peak_bytes=peak,
    )


def size(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Find the largest mini-batch that fits, by trying and by the linear model (Table 2).

    Tries powers of two without streaming under the limit until one runs out of memory, lets the
    streamer choose by itself, and times undivided steps for the time model t(B) = c + B d.
    """
    assert data is not None
    torch.manual_seed(seed)
    memory, peaks = _memory_model(config, data, device)
    limit = _limit_bytes(config, data, device)
    fits, tried = None if limit is None else 0, 2
    while limit is not None and tried <= config["largest"]:
        if not _fits(config, data, tried, limit, device):
            break
        fits, tried = tried, 2 * tried

    batch = _first_batch(config, data, config["largest"], device)
    model = build_model(config, data, device).train()
    # Only the memory counts here, and Dice needs two passes to be exact.
    streamer = MicroBatchStreamer(model, loss_of(config), "auto", device=device, check="off")
    budget = MemoryBudget(limit, device, resident=model) if limit else nullcontext()
    with budget:
        streamer.backward(*batch)
    sizing = streamer.sizing
    assert sizing is not None

    sizes = [2, 4, 8, 16, 32]
    steps = {}
    for count in sizes:
        undivided = dict(config) | {"micro_batch": None}
        step = training_step(undivided, model, build_optimizer(config, model), device)
        steps[str(count)] = _bind(step, _first_batch(config, data, count, device))
    timings = time_interleaved(steps, warmup=2, repeats=config["repeats"], device=device)
    return Outcome(
        metrics={
            "limit_bytes": limit,
            "largest_that_fits": fits,
            "predicted_largest": None if limit is None else memory.largest_batch(limit),
            "fixed_bytes": memory.fixed_bytes,
            "bytes_per_sample": memory.bytes_per_sample,
            "probe_peaks": peaks,
            "auto_micro_batch": sizing.micro_batch_size,
            "auto_predicted_bytes": sizing.predicted_bytes,
            "auto_observed_bytes": sizing.observed_bytes,
            "auto_prediction_error": sizing.prediction_error,
        },
        timings=timings,
        peak_bytes=sizing.observed_bytes,
    )


def step(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Take two steps of one mini-batch, with or without MBS, under a memory limit (Tables 4, 5).

    An out-of-memory error is the caller's to record.
    """
    assert data is not None
    torch.manual_seed(seed)
    batch = _first_batch(config, data, config["mini_batch"], device, seed)
    model = build_model(config, data, device).train()
    with MemoryBudget(config["limit_bytes"], device, resident=model) as budget:
        _two_steps(config, model, batch, device)
    return Outcome({"limit_bytes": config["limit_bytes"]}, peak_bytes=budget.peak_reserved_bytes)


def _fits(config: Config, data: ImageData, count: int, limit: int, device: str) -> bool:
    batch = _first_batch(config, data, count, device)
    model = build_model(config, data, device).train()
    try:
        with MemoryBudget(limit, device, resident=model):
            _two_steps(dict(config) | {"micro_batch": None}, model, batch, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _bind(step: Step, batch: Batch) -> Callable[[], torch.Tensor]:
    return lambda: step(*batch)


def overhead(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Time steps with and without MBS, in turns (section 4.3.3).

    Against the undivided initial mini-batch stand, as in Tables 4 and 5, the same mini-batch in
    halves, and twice the mini-batch in micro-batches of the initial size.
    """
    assert data is not None
    torch.manual_seed(seed)
    initial = config["mini_batch"]
    ways = {
        "undivided": (initial, None),
        "halved": (initial, config["micro_batch"]),
        "doubled": (2 * initial, initial),
    }
    steps = {}
    for name, (count, micro) in ways.items():
        model = build_model(config, data, device).train()
        step = training_step(
            dict(config) | {"micro_batch": micro}, model, build_optimizer(config, model), device
        )
        steps[name] = _bind(step, _first_batch(config, data, count, device))
    timings = time_interleaved(steps, warmup=3, repeats=config["repeats"], device=device)
    per_sample = {name: timings[name].median_s / count for name, (count, _) in ways.items()}
    return Outcome(
        metrics={
            f"{name}_percent": 100 * (per_sample[name] / per_sample["undivided"] - 1)
            for name in ("halved", "doubled")
        },
        timings=timings,
    )


def timeline(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Trace one mini-batch: each micro-batch's copy and computation, then the update (Figure 2).

    On an accelerator the mini-batch waits in host memory and the copies are real. On a CPU there is
    nothing to copy: the mini-batch arrives piece by piece, and what is traced in the copy's place
    is the cropping and normalising of each piece.
    """
    assert data is not None
    torch.manual_seed(seed)
    model = build_model(config, data, device).train()
    optimizer = build_optimizer(config, model)
    micro = config["micro_batch"]
    streamer = MicroBatchStreamer(
        model, loss_of(config), micro, device=device, normalization="paper", trace=True
    )
    versions: list[int] = []  # of the first parameter, as each micro-batch finds it
    first = next(model.parameters())
    model.register_forward_pre_hook(lambda *_: versions.append(first._version))
    count = config["mini_batch"]
    pieces = train_loader(config, data, micro, seed, samples=count)
    batch = _first_batch(config, data, count, device, seed)
    for _ in range(3):  # the last one is kept, the others warm up
        optimizer.zero_grad(set_to_none=True)
        versions.clear()
        synchronize(device)
        start = time.perf_counter()
        prepared = _Stopwatch(iter(pieces))
        result = streamer.backward(prepared) if device == "cpu" else streamer.backward(*batch)
        computed = time.perf_counter()
        optimizer.step()
        synchronize(device)
        updated = time.perf_counter()
    spans = [[s.kind, s.micro_batch, s.start_s, s.end_s] for s in streamer.timeline()]
    if device == "cpu":
        spans = [span for span in spans if span[0] == "compute"] + prepared.spans
    return Outcome(
        metrics={
            "spans": spans,
            "update": [computed - start, updated - start],
            "copied": "pieces prepared on the CPU" if device == "cpu" else "host to device",
            "micro_batches": result.num_micro_batches,
            "updates_between_micro_batches": len(set(versions)) - 1,
            "updates_after": int(first._version != versions[-1]),
        }
    )


class _Stopwatch:
    """Passes items on and notes when each was made, in seconds from the call of `iter`."""

    def __init__(self, items: Iterator[Batch]) -> None:
        self._items = items
        self.spans: list[list[Any]] = []

    def __iter__(self) -> Iterator[Batch]:
        # At once, not with the first item: the streamer's clock starts here as well.
        return self._timed(time.perf_counter())

    def _timed(self, origin: float) -> Iterator[Batch]:
        while True:
            start = time.perf_counter() - origin
            item = next(self._items, None)
            if item is None:
                return
            self.spans.append(["copy", len(self.spans), start, time.perf_counter() - origin])
            yield item
