"""What a training of the paper is made of, and the trainings that records keep."""

import copy
import gc
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from repro import models
from repro.datasets import Ahead, ImageData, Split, TensorLoader, channel_statistics
from repro.experiments.captured import CapturedStep
from repro.experiments.design import Outcome
from repro.experiments.mbs.runs import AS_IN_PAPER
from repro.mbs import MicroBatchStreamer
from repro.measure import MemoryBudget, MemoryMeter, Timing, comparable_peaks
from repro.training import (
    Epoch,
    Step,
    evaluate_binary_segmentation,
    evaluate_classifier,
    fit,
    plain_step,
)

Config = Mapping[str, Any]
Batch = tuple[Tensor, Tensor]
GROUPS = 4  # of channels in GroupNorm; the smallest networks have so many in their first layer


def bce_dice_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Binary cross-entropy plus 1 - Dice over the whole batch (equations 18 to 20).

    Differs from the paper: the Dice coefficient takes probabilities, which have a gradient, where
    equation 18 has a binary image.

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


def is_segmentation(config: Config) -> bool:
    """Whether the configuration trains U-Net on masks."""
    return bool(config["role"] == "U-Net")


def loss_of(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of section 4.2.4."""
    return bce_dice_loss if is_segmentation(config) else nn.functional.cross_entropy


def build_model(config: Config, classes: int, device: str) -> nn.Module:
    """Build the model with fresh weights, on the device."""
    options = dict(config["model"])
    num_classes = 1 if is_segmentation(config) else classes
    model = models.build(options.pop("name"), num_classes=num_classes, **options).to(device)
    if config.get("channels_last"):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of section 4.2.4."""
    options = {k: v for k, v in config["optimizer"].items() if k not in ("name", "schedule")}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[config["optimizer"]["name"]]
    return kind(model.parameters(), **options)


def images_and_targets(config: Config, split: Split, samples: int | None) -> Batch:
    """Return the split's images in three channels, and its labels or masks.

    With more `samples` than images, images come several times, each augmented by itself.
    """
    targets = split.masks if is_segmentation(config) else split.labels
    if targets is None:
        wanted = "masks" if is_segmentation(config) else "labels"
        raise ValueError(f"the dataset has no {wanted}, which {config['role']} is trained on")
    count = len(split) if samples is None else samples
    # Sets on disk are ordered by class: a smaller share is taken evenly.
    if count < len(split):
        chosen = torch.linspace(0, len(split) - 1, count).round().long()
    else:
        chosen = torch.arange(count) % len(split)
    images = split.images[chosen]
    return images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images, targets[chosen]


def train_loader(
    config: Config, data: ImageData, batch_size: int, seed: int, samples: int | None
) -> TensorLoader:
    """Return the loader of augmented mini-batches, in host memory as in the paper."""
    batch = images_and_targets(config, data.train, samples)
    mean, std = _statistics(config, data)
    return TensorLoader(
        *batch, batch_size, seed=seed, mean=mean, std=std, device="cpu", **config["augment"]
    )


def first_batch(config: Config, data: ImageData, size: int, device: str, seed: int = 0) -> Batch:
    """Return a mini-batch in host memory from which the device copies beside its computations."""
    loader = train_loader(config, data, size, seed, samples=max(size, 8))
    return next(iter(Ahead(loader, device, count=1)))


_statistics_of: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {}


def _statistics(config: Config, data: ImageData) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of the training images' channels, measured once."""
    if data.fingerprint not in _statistics_of:
        # Where only memory and time count, some are enough, and all take half a minute.
        some = 256 if config.get("resolution") == AS_IN_PAPER else None
        images, _ = images_and_targets(config, data.train, some)
        _statistics_of[data.fingerprint] = channel_statistics(images)
    return _statistics_of[data.fingerprint]


def evaluation(
    config: Config, data: ImageData, model: nn.Module, device: str
) -> Callable[[], dict[str, float]]:
    """Return a function that measures the model on the test split."""
    samples = config["test_samples"]
    samples = None if samples is None else min(samples, len(data.test))  # none counts twice
    images, targets = images_and_targets(config, data.test, samples)
    mean, std = _statistics(config, data)
    low = low_precision(config)
    # Whole test images are larger than the crops trained on; the memory limit holds here too.
    size = 128 if low else 4 if is_segmentation(config) and device != "cpu" else 16
    size = min(size, len(images))
    loader = TensorLoader(images, targets, size, shuffle=False, mean=mean, std=std, device="cpu")
    evaluate = evaluate_binary_segmentation if is_segmentation(config) else evaluate_classifier

    def measure() -> dict[str, float]:
        with torch.autocast(torch.device(device).type, low) if low else nullcontext():
            return evaluate(model, loader, device)

    return measure


def training_step(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: str,
    normalization: str = "paper",
    check: str = "first",
) -> Step:
    """Return a training step, streamed by Algorithm 1 where the configuration has micro-batches."""
    loss_fn, low = loss_of(config), low_precision(config)
    if config["micro_batch"] is None:
        if low is not None:
            return CapturedStep(model, loss_fn, optimizer, low, captured=False)
        return plain_step(model, loss_fn, optimizer, device)
    streamer = streamer_of(config, model, device, normalization, autocast=low, check=check)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        result = streamer.backward(inputs, targets)
        optimizer.step()
        # Without normalisation it is a sum: the curves of all ways are of means.
        loss: Tensor = result.loss
        return loss / result.num_micro_batches if normalization == "none" else loss

    return step


def streamer_of(
    config: Config, model: nn.Module, device: str, normalization: str = "paper", **options: Any
) -> MicroBatchStreamer:
    """Return a streamer of the configuration's micro-batches."""
    return MicroBatchStreamer(
        model,
        loss_of(config),
        config["micro_batch"],
        device=device,
        normalization=normalization,
        # Dice is no mean over samples: only two passes weigh it exactly.
        two_pass=normalization == "exact" and is_segmentation(config),
        **options,
    )


def low_precision(config: Config) -> torch.dtype | None:
    """Return the type of forward passes under autocast, None for float32."""
    return getattr(torch, config["autocast"]) if config.get("autocast") else None


def two_steps(config: Config, model: nn.Module, batch: Batch, device: str) -> None:
    """Train on a mini-batch twice: the second step has the state that the first one makes."""
    step = training_step(config, model, build_optimizer(config, model), device)
    for _ in range(2):
        step(*batch)


def undivided_peaks(
    config: Config, data: ImageData, sizes: Sequence[int], device: str
) -> list[int]:
    """Measure the peak memory of undivided training steps in bytes, by mini-batch size."""
    meters = []
    for batch in [first_batch(config, data, size, device) for size in sizes]:
        model = build_model(config, data.num_classes, device).train()
        with MemoryMeter(device, resident=model) as meter:
            two_steps(dict(config) | {"micro_batch": None}, model, batch, device)
        meters.append(meter)
    return comparable_peaks(meters)


_limits: dict[str, int] = {}


def limit_of(config: Config, data: ImageData, device: str) -> int | None:
    """Return the simulated device's memory in bytes, None for the device as it is.

    Where the configuration names none, it lies half way between the need of the paper's initial
    mini-batch and of twice that, so that the same mini-batches fit and fail as on the paper's card.
    """
    fits: int | None = config["limit_fits"]
    if fits is None:
        return config.get("limit_bytes")
    # The same for every training of a model: measured once in a process.
    parts = [config[name] for name in ("model", "dataset", "augment", "optimizer", "limit_fits")]
    key = json.dumps([*parts, data.fingerprint, device], sort_keys=True)
    if key not in _limits:
        gc.collect()
        _limits[key] = sum(undivided_peaks(config, data, (fits, 2 * fits), device)) // 2
    return _limits[key]


def _loader(config: Config, data: ImageData, seed: int) -> TensorLoader:
    return train_loader(config, data, config["mini_batch"], seed, config["train_samples"])


def _history(
    config: Config,
    data: ImageData,
    loader: TensorLoader,
    model: nn.Module,
    step: Step,
    device: str,
    **options: Any,
) -> list[Epoch]:
    return fit(
        model,
        step,
        Ahead(loader, device),
        epochs=config["epochs"],
        device=device,
        evaluate=evaluation(config, data, model, device),
        **options,
    )


def _epoch_timing(history: Sequence[Epoch]) -> dict[str, Timing]:
    return {"epoch": Timing(tuple(epoch.time_s for epoch in history[1:]), warmup=1)}


def train(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Train with or without MBS under a memory limit (Tables 1, 3, 4, 5 and Figure 3).

    On a CPU the limit is simulated, and watching every storage costs time: two steps on a copy of
    the model are taken under it, and the training that is timed runs without. On an accelerator
    all of it runs under the limit. An out-of-memory error is the caller's to record.
    """
    limit = limit_of(config, data, device)  # before this model occupies memory
    torch.manual_seed(seed)
    model = build_model(config, data.num_classes, device)
    optimizer = build_optimizer(config, model)
    loader = _loader(config, data, seed)
    peak = None
    if limit is not None and device == "cpu":
        probe = copy.deepcopy(model).train()
        batch = next(iter(loader))  # drawn outside the budget: it lies in host memory
        loader.set_epoch(0)
        with MemoryBudget(limit, device, resident=probe) as budget:
            two_steps(config, probe, batch, device)
        peak = budget.peak_reserved_bytes
    scheduler = None
    if config["optimizer"].get("schedule") == "linear":
        scheduler = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1.0, end_factor=1e-3, total_iters=config["epochs"]
        )
    limited = limit is not None and device != "cpu"
    with MemoryBudget(limit, device) if limited and limit else nullcontext() as whole:
        step = training_step(config, model, optimizer, device)
        history = _history(config, data, loader, model, step, device, scheduler=scheduler)
    if whole is not None:
        peak = whole.peak_reserved_bytes
    losses = [epoch.train_loss for epoch in history]
    if not all(map(math.isfinite, losses)):
        raise FloatingPointError(f"training diverged: the losses of the epochs are {losses}")
    metric = "iou" if is_segmentation(config) else "accuracy"
    curves = {name: [e.metrics[name] for e in history] for name in history[0].metrics}
    metrics = {
        "best": max(curves[metric]),
        "metric": metric,
        "train_loss": losses,
        **curves,
        "limit_bytes": limit,
        "limit_simulated": limit is not None,
        "steps_per_epoch": len(loader),
    }
    return Outcome(metrics, _epoch_timing(history), peak)


def normalised(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Train with a way of normalisation; undivided where the configuration has none (section 3.4).

    A training that diverges is a result; its losses that are not finite are None.
    """
    torch.manual_seed(seed)
    model = build_model(config, data.num_classes, device)
    optimizer = build_optimizer(config, model)
    way = config["normalization"]
    if way is None:
        step = plain_step(model, loss_of(config), optimizer, device)
    else:
        step = training_step(config, model, optimizer, device, way, check="off")
    history = _history(config, data, _loader(config, data, seed), model, step, device)
    finite = [e.train_loss if math.isfinite(e.train_loss) else None for e in history]
    accuracy = [epoch.metrics["accuracy"] for epoch in history]
    metrics = {"train_loss": finite, "accuracy": accuracy}
    metrics |= {"best": max(accuracy), "diverged": None in finite}
    return Outcome(metrics, _epoch_timing(history))


def gradients(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Compare accumulated gradients with the whole mini-batch's, in float64 (section 3.4).

    Once as in training, where BatchNorm sees micro-batches, and once by its running statistics, so
    that normalisation alone is compared.
    """
    torch.manual_seed(seed)
    rows: list[dict[str, Any]] = []
    original = build_model(config, data.num_classes, device).double()

    def gradient(batch: Batch, frozen: bool, way: str | None, micro: int) -> Tensor:
        """Return the gradient of all parameters as one vector; undivided where `way` is None."""
        model = copy.deepcopy(original).train(not frozen)
        if way is None:
            inputs, targets = (part.to(device) for part in batch)
            loss_of(config)(model(inputs), targets).backward()
        else:
            own = {**config, "micro_batch": micro}
            streamer_of(own, model, device, way, check="off").backward(*batch)
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    for mini_batch, micro in config["divisions"]:
        loader = train_loader(config, data, mini_batch, seed, max(mini_batch, 8))
        inputs, targets = next(iter(loader))
        batch = inputs.double(), targets
        for frozen in (True, False):
            whole = gradient(batch, frozen, None, micro)
            for way in ("none", "paper", "exact"):
                ours, size = gradient(batch, frozen, way, micro), float(whole.norm())
                row = {"mini_batch": mini_batch, "micro_batch": micro, "frozen": frozen, "way": way}
                errors = {"error": float((ours - whole).norm()), "length": float(ours.norm())}
                rows.append(row | {name: value / size for name, value in errors.items()})
    return Outcome({"rows": rows})


def without_batchnorm(model: nn.Module) -> nn.Module:
    """Replace each BatchNorm of a model by a GroupNorm, which looks at one sample at a time."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            parent, _, own = name.rpartition(".")
            groups = math.gcd(GROUPS, module.num_features)
            norm = nn.GroupNorm(groups, module.num_features, module.eps).to(module.weight.device)
            setattr(model.get_submodule(parent), own, norm)
    return model


def paired_training(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Train without and with MBS from the same weights and compare the weights after each epoch.

    The metric ``apart`` is, by epoch, the distance of the two trainings' weights over the distance
    of the training without MBS from its start.
    """
    torch.manual_seed(seed)
    start = build_model(config, data.num_classes, device)
    if config["norm"] == "group":
        start = without_batchnorm(start)
    if config["dtype"] == "float64":
        start.double().register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    metrics: dict[str, Any] = {"train_loss": {}, "accuracy": {}, "best": {}}
    passed: dict[str, list[Tensor]] = {"without": [], "with": []}
    for way, micro_batch in (("without", None), ("with", config["micro_batch"])):
        model, own = copy.deepcopy(start), {**config, "micro_batch": micro_batch}
        step = training_step(own, model, build_optimizer(own, model), device)

        def keep(_: Epoch, model: nn.Module = model, way: str = way) -> None:
            passed[way].append(_weights(model))

        loader = _loader(config, data, seed)
        history = _history(own, data, loader, model, step, device, on_epoch=keep)
        metrics["train_loss"][way] = [epoch.train_loss for epoch in history]
        metrics["accuracy"][way] = [epoch.metrics["accuracy"] for epoch in history]
        metrics["best"][way] = max(metrics["accuracy"][way])
    first = _weights(start)
    apart = [
        float((streamed - without).norm() / (without - first).norm())
        for without, streamed in zip(passed["without"], passed["with"], strict=True)
    ]
    return Outcome({**metrics, "apart": apart})


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double().cpu() for p in model.parameters()])
