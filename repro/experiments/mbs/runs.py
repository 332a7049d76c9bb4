"""The experiments of Micro-Batch Streaming: what is executed and measured."""

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from repro import models
from repro.datasets import ImageData, Split, TensorLoader, channel_statistics
from repro.experiments.design import Outcome
from repro.mbs import MicroBatchStreamer
from repro.measure import (
    LinearMemoryModel,
    MemoryBudget,
    MemoryMeter,
    Timing,
    is_out_of_memory,
    synchronize,
    time_interleaved,
)
from repro.training import Step, evaluate_binary_segmentation, evaluate_classifier, fit, plain_step

Config = Mapping[str, Any]
Batch = tuple[torch.Tensor, torch.Tensor]


def modules(config: Config) -> list[str]:
    """Name the modules of this package that an experiment's result depends on."""
    name = config["model"]["name"]
    own = {"unet": ["repro.models.unet"], "amoebanet_d": ["repro.models.amoebanet"]}
    used = [] if name.startswith("torchvision/") else own.get(name, ["repro.models.resnet"])
    return [
        "repro.experiments.mbs.runs",
        "repro.training",
        "repro.datasets.loader",
        "repro.mbs.streamer",
        "repro.mbs.batches",
        "repro.mbs.batchnorm",
        "repro.mbs.distributed",
        "repro.mbs.results",
        "repro.mbs.sizing",
        "repro.mbs.staging",
        "repro.mbs.transaction",
        "repro.measure.memory",
        "repro.measure.timing",
        *used,
    ]


def bce_dice_loss(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy plus 1 - Dice over the whole batch (equations 18 to 20).

    The Dice coefficient takes the predicted probabilities, which have a gradient, where equation
    18 speaks of a binary image.

    Args:
        logits: (B, 1, H, W).
        masks: (B, H, W), foreground above 0.
    """
    logits = logits.squeeze(1)
    truth = (masks > 0).to(logits.dtype)
    predicted = logits.sigmoid()
    overlap = 2 * (predicted * truth).sum()
    dice = overlap / (predicted.sum() + truth.sum()).clamp_min(1e-6)
    return nn.functional.binary_cross_entropy_with_logits(logits, truth) + 1 - dice


def _is_segmentation(config: Config) -> bool:
    return config["role"] == "U-Net"


def _loss_of(config: Config) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return bce_dice_loss if _is_segmentation(config) else nn.functional.cross_entropy


def _build_model(config: Config, data: ImageData, device: str) -> nn.Module:
    options = dict(config["model"])
    num_classes = 1 if _is_segmentation(config) else data.num_classes
    return models.build(options.pop("name"), num_classes=num_classes, **options).to(device)


def _build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    options = {k: v for k, v in config["optimizer"].items() if k not in ("name", "schedule")}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[config["optimizer"]["name"]]
    return kind(model.parameters(), **options)


def _images_and_targets(config: Config, split: Split, samples: int | None) -> Batch:
    """Return the split's images in three channels, and its labels or masks.

    With more `samples` than images, images come several times, each augmented by itself.
    """
    targets = split.masks if _is_segmentation(config) else split.labels
    if targets is None:
        wanted = "masks" if _is_segmentation(config) else "labels"
        raise ValueError(f"the dataset has no {wanted}, which {config['role']} is trained on")
    count = len(split) if samples is None else samples
    # Sets on disk are ordered by class: a smaller share is taken evenly.
    if count < len(split):
        chosen = torch.linspace(0, len(split) - 1, count).round().long()
    else:
        chosen = torch.arange(count) % len(split)
    images = split.images[chosen]
    return images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images, targets[chosen]


def _loader(
    config: Config, data: ImageData, batch_size: int, seed: int, samples: int | None
) -> TensorLoader:
    """Return the loader of augmented mini-batches, in host memory as in the paper."""
    images, targets = _images_and_targets(config, data.train, samples)
    return TensorLoader(images, targets, batch_size, seed=seed, device="cpu", **config["augment"])


def _evaluation(
    config: Config, data: ImageData, model: nn.Module, device: str
) -> Callable[[], dict[str, float]]:
    images, targets = _images_and_targets(config, data.test, config["test_samples"])
    mean, std = channel_statistics(_images_and_targets(config, data.train, None)[0])
    size = min(16 if device != "cpu" else 64, len(images))
    loader = TensorLoader(images, targets, size, shuffle=False, mean=mean, std=std, device="cpu")
    evaluate = evaluate_binary_segmentation if _is_segmentation(config) else evaluate_classifier
    return lambda: evaluate(model, loader, device)


def _step(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> Step:
    """Return a training step, streamed by Algorithm 1 where the configuration has micro-batches."""
    loss_fn = _loss_of(config)
    if config["micro_batch"] is None:
        return plain_step(model, loss_fn, optimizer, device)
    streamer = MicroBatchStreamer(
        model, loss_fn, config["micro_batch"], device=device, normalization="paper"
    )

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = streamer.backward(inputs, targets).loss
        optimizer.step()
        return loss

    return step


def _two_steps(config: Config, model: nn.Module, batch: Batch, device: str) -> None:
    # The second step also holds the optimizer's state, which the first one makes.
    step = _step(config, model, _build_optimizer(config, model), device)
    for _ in range(2):
        step(*batch)


def _measured_peak(config: Config, data: ImageData, batch: Batch, device: str) -> int:
    model = _build_model(config, data, device).train()
    with MemoryMeter(device, resident=model) as meter:
        _two_steps(dict(config) | {"micro_batch": None}, model, batch, device)
    return meter.peak_bytes


def _memory_model(
    config: Config, data: ImageData, device: str, sizes: Sequence[int] = (2, 4, 8)
) -> tuple[LinearMemoryModel, list[int]]:
    """Fit M(B) = p + B a to the peaks of undivided training steps."""
    batches = [_first_batch(config, data, size) for size in sizes]
    peaks = [_measured_peak(config, data, batch, device) for batch in batches]
    return LinearMemoryModel.fit(sizes, peaks), peaks


def _first_batch(config: Config, data: ImageData, size: int) -> Batch:
    return next(iter(_loader(config, data, size, seed=0, samples=max(size, 8))))


def _limit_bytes(config: Config, data: ImageData, device: str) -> int | None:
    """Return the simulated device's memory, None for the device as it is.

    It lies half way between the need of the paper's initial mini-batch and of twice that, so that
    the same mini-batches fit and fail as on the paper's card.
    """
    if config["limit_fits"] is None:
        return None
    # The same for every training of a model: measured once in a process.
    parts = [config[name] for name in ("model", "dataset", "augment", "optimizer", "limit_fits")]
    key = json.dumps([*parts, data.fingerprint, device], sort_keys=True)
    if key not in _limits:
        sizes = (config["limit_fits"], 2 * config["limit_fits"])
        peaks = [_measured_peak(config, data, _first_batch(config, data, n), device) for n in sizes]
        _limits[key] = sum(peaks) // 2
    return _limits[key]


_limits: dict[str, int] = {}


def train(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Train with or without MBS under a memory limit (Tables 1, 3, 4, 5 and Figure 3).

    On a CPU the limit is simulated, and watching every storage costs time: two steps on a copy of
    the model are taken under it, and the training that is timed runs without. On CUDA all of it
    runs under the limit. An out-of-memory error is the caller's to record.
    """
    assert data is not None
    torch.manual_seed(seed)
    model = _build_model(config, data, device)
    limit = _limit_bytes(config, data, device)
    optimizer = _build_optimizer(config, model)
    loader = _loader(config, data, config["mini_batch"], seed, config["train_samples"])
    peak = None
    if limit is not None and device == "cpu":
        probe = copy.deepcopy(model).train()
        batch = next(iter(loader))  # drawn outside the budget: it lies in host memory
        loader.set_epoch(0)
        with MemoryBudget(limit, device, resident=probe) as budget:
            _two_steps(config, probe, batch, device)
        peak = budget.peak_bytes
    scheduler = None
    if config["optimizer"].get("schedule") == "linear":
        scheduler = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1.0, end_factor=1e-3, total_iters=config["epochs"]
        )
    limited = limit is not None and device != "cpu"
    with MemoryBudget(limit, device) if limited and limit else nullcontext() as budget_or_none:
        history = fit(
            model,
            _step(config, model, optimizer, device),
            loader,
            epochs=config["epochs"],
            device=device,
            evaluate=_evaluation(config, data, model, device),
            scheduler=scheduler,
        )
    if budget_or_none is not None:
        peak = budget_or_none.peak_bytes
    metric = "iou" if _is_segmentation(config) else "accuracy"
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
    fits, tried = 0, 1
    while tried <= config["largest"] and limit is not None:
        tried *= 2
        if not _fits(config, data, tried, limit, device):
            break
        fits = tried

    batch = _first_batch(config, data, config["largest"])
    model = _build_model(config, data, device).train()
    streamer = MicroBatchStreamer(model, _loss_of(config), "auto", device=device)
    budget = MemoryBudget(limit, device, resident=model) if limit else nullcontext()
    with budget:
        streamer.backward(*batch)
    sizing = streamer.sizing
    assert sizing is not None

    sizes = [2, 4, 8, 16, 32]
    steps = {}
    for count in sizes:
        undivided = dict(config) | {"micro_batch": None}
        step = _step(undivided, model, _build_optimizer(config, model), device)
        steps[str(count)] = _bind(step, _first_batch(config, data, count))
    timings = time_interleaved(steps, warmup=2, repeats=7, device=device)
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


def _fits(config: Config, data: ImageData, count: int, limit: int, device: str) -> bool:
    batch = _first_batch(config, data, count)
    model = _build_model(config, data, device).train()
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
    """Time steps with and without MBS at the initial size, in turns (section 4.3.3)."""
    assert data is not None
    torch.manual_seed(seed)
    batch = _first_batch(config, data, config["mini_batch"])
    steps = {}
    for name, micro in (("undivided", None), ("streamed", config["micro_batch"])):
        model = _build_model(config, data, device).train()
        chosen = dict(config) | {"micro_batch": micro}
        steps[name] = _bind(_step(chosen, model, _build_optimizer(config, model), device), batch)
    timings = time_interleaved(steps, warmup=3, repeats=config["repeats"], device=device)
    ratio = timings["streamed"].median_s / timings["undivided"].median_s
    return Outcome(metrics={"overhead_percent": 100 * (ratio - 1)}, timings=timings)


def timeline(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Trace one mini-batch: each micro-batch's copy and computation, then the update (Figure 2).

    On CUDA the mini-batch waits in host memory and the copies are real. On a CPU there is nothing
    to copy: the mini-batch arrives piece by piece, and what is traced in the copy's place is the
    cropping and normalising of each piece.
    """
    assert data is not None
    torch.manual_seed(seed)
    model = _build_model(config, data, device).train()
    optimizer = _build_optimizer(config, model)
    micro = config["micro_batch"]
    streamer = MicroBatchStreamer(
        model, _loss_of(config), micro, device=device, normalization="paper", trace=True
    )
    count = config["mini_batch"]
    pieces = _loader(config, data, micro, seed, samples=count)
    batch = next(iter(_loader(config, data, count, seed, samples=count)))
    for _ in range(3):  # the last one is kept, the others warm up
        optimizer.zero_grad(set_to_none=True)
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
