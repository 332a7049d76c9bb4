"""What a training of the paper is made of, and the trainings that records keep."""

import copy
import gc
import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from repro import training as plain
from repro.datasets import Ahead, ImageData, Split, TensorLoader, channel_statistics
from repro.experiments.captured import CapturedPasses, captured_step, low_precision, lower, model_of
from repro.experiments.design import Config, Outcome
from repro.experiments.mbs.runs import AS_IN_PAPER
from repro.mbs import MicroBatchStreamer
from repro.measure import MemoryBudget, MemoryMeter, Timing, comparable_peaks
from repro.training import Epoch, Step, fit

Batch = tuple[Tensor, Tensor]
GROUPS = 4  # of channels in GroupNorm; the smallest networks have so many in their first layer
_limits: dict[str, int] = {}
_statistics: dict[str, dict[str, tuple[float, ...]]] = {}


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


class Task:
    """A configuration with its data, on a device; see sections 4.2.3 and 4.2.4."""

    def __init__(self, config: Config, data: ImageData, device: str) -> None:
        self.config, self.data, self.device = config, data, device
        self.segments = config["role"] == "U-Net"  # it is trained on masks
        self.loss = bce_dice_loss if self.segments else nn.functional.cross_entropy
        self.low = low_precision(config)  # of forward passes under autocast; None: float32

    def model(self) -> nn.Module:
        """Build the model with fresh weights, on the device."""
        # Without data, where the memory of the published network is predicted, it names them.
        classes = 1 if self.segments else self.config.get("classes") or self.data.num_classes
        return model_of(self.config, self.device, num_classes=classes)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer."""
        options = {k: v for k, v in self.config["optimizer"].items() if k != "schedule"}
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[options.pop("name")]
        return kind(model.parameters(), **options)

    def samples(self, split: Split, count: int | None) -> Batch:
        """Return images in three channels, and labels or masks; None takes all.

        With a larger `count` than there are, images come several times, each augmented by itself.
        """
        targets = split.masks if self.segments else split.labels
        assert targets is not None, f"{self.config['role']} needs another dataset"
        count, some = count or len(split), Split(split.images, targets)
        fewer = count < len(split)
        some = some.evenly(count) if fewer else some.chosen(torch.arange(count) % len(split))
        assert some.labels is not None
        return some.images.expand(-1, 3, -1, -1), some.labels

    def loader(self, size: int, seed: int, count: int | None) -> TensorLoader:
        """Return the loader of augmented mini-batches, in host memory as in the paper."""
        options = {"seed": seed, "device": "cpu", **self._normalised(), **self.config["augment"]}
        return TensorLoader(*self.samples(self.data.train, count), size, **options)

    def epoch_loader(self, seed: int) -> TensorLoader:
        """Return the loader of the configuration's mini-batches and samples."""
        return self.loader(self.config["mini_batch"], seed, self.config["train_samples"])

    def first_batch(self, size: int, seed: int = 0) -> Batch:
        """Return a mini-batch in host memory, from which the device copies while it computes."""
        return next(iter(Ahead(self.loader(size, seed, max(size, 8)), self.device, count=1)))

    def _normalised(self) -> dict[str, Any]:
        """Return mean and standard deviation of the training images' channels, measured once."""
        key = self.data.fingerprint
        if key not in _statistics:
            # Where only memory and time count, some are enough, and all take half a minute.
            some = 256 if self.config.get("resolution") == AS_IN_PAPER else None
            mean, std = channel_statistics(self.samples(self.data.train, some)[0])
            _statistics[key] = {"mean": mean, "std": std}
        return _statistics[key]

    def evaluation(self, model: nn.Module) -> Callable[[], dict[str, float]]:
        """Return a function that measures the model on the test split."""
        every = len(self.data.test)
        count = min(self.config["test_samples"] or every, every)  # none counts twice
        # Whole test images are larger than the crops trained on; the memory limit holds here too.
        size = 128 if self.low else 4 if self.segments and self.device != "cpu" else 16
        options = {"shuffle": False, "device": "cpu", **self._normalised()}
        loader = TensorLoader(*self.samples(self.data.test, count), min(size, count), **options)
        evaluate = plain.evaluate_classifier
        if self.segments:
            evaluate = plain.evaluate_binary_segmentation
        return partial(lower(self.config, self.device)(evaluate), model, loader, self.device)

    def streamer(
        self, model: nn.Module, micro: int, normalization: str = "paper", **options: Any
    ) -> MicroBatchStreamer:
        """Return a streamer of micro-batches."""
        # Dice is no mean over samples: only two passes weigh it exactly.
        options["two_pass"] = normalization == "exact" and self.segments
        options |= {"device": self.device, "normalization": normalization}
        return MicroBatchStreamer(model, self.loss, micro, **options)

    def step(
        self,
        model: nn.Module,
        micro: int | None,
        optimizer: torch.optim.Optimizer | None = None,
        normalization: str = "paper",
        **options: Any,
    ) -> Step:
        """Return a training step: streamed by Algorithm 1, or undivided where `micro` is None."""
        updates = optimizer or self.optimizer(model)
        if micro is None:
            passes = CapturedPasses(model, self.loss, self.low, captured=False)
            return captured_step(passes, updates)
        streamer = self.streamer(model, micro, normalization, autocast=self.low, **options)
        summed = normalization == "none"  # all curves are of means

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            updates.zero_grad(set_to_none=True)
            result = streamer.backward(inputs, targets)
            updates.step()
            loss: Tensor = result.loss
            return loss / result.num_micro_batches if summed else loss

        return step

    def two_steps(self, model: nn.Module, batch: Batch, micro: int | None) -> None:
        """Train on a mini-batch twice: the second step has the state that the first one makes."""
        step = self.step(model, micro)
        for _ in range(2):
            step(*batch)

    def undivided_peaks(self, sizes: Sequence[int]) -> list[int]:
        """Measure the peak memory of undivided training steps in bytes, by mini-batch size."""
        meters = []
        for batch in [self.first_batch(size) for size in sizes]:
            model = self.model()
            with MemoryMeter(self.device, resident=model) as meter:
                self.two_steps(model, batch, None)
            meters.append(meter)
        return comparable_peaks(meters)

    def limit(self) -> int | None:
        """Return the simulated device's memory in bytes, None for the device as it is.

        Half way between the needs of `limit_fits` samples and of twice as many, where that is set.
        """
        config, fits = self.config, self.config["limit_fits"]
        if fits is None:
            return config.get("limit_bytes")
        # The same for every training of a model: measured once in a process.
        names = ("model", "dataset", "augment", "optimizer", "limit_fits")
        parts = [*(config[name] for name in names), self.data.fingerprint, self.device]
        key = json.dumps(parts, sort_keys=True)
        if key not in _limits:
            gc.collect()
            _limits[key] = sum(self.undivided_peaks((fits, 2 * fits))) // 2
        return _limits[key]

    def history(
        self, loader: TensorLoader, model: nn.Module, step: Step, **options: Any
    ) -> list[Epoch]:
        """Train for the configuration's epochs, with an evaluation after each."""
        options |= {"epochs": self.config["epochs"], "evaluate": self.evaluation(model)}
        return fit(model, step, Ahead(loader, self.device), device=self.device, **options)


def _outcome(metrics: dict[str, Any], history: Sequence[Epoch], peak: int | None = None) -> Outcome:
    timing = Timing(tuple(epoch.time_s for epoch in history[1:]), warmup=1)
    return Outcome(metrics, {"epoch": timing}, peak)


def train(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Train with or without MBS under a memory limit (Tables 1, 3, 4, 5 and Figure 3).

    On a CPU, where watching every storage costs time, two steps on a copy are taken under it.
    """
    task, micro = Task(config, data, device), config["micro_batch"]
    limit = task.limit()  # before this model occupies memory
    torch.manual_seed(seed)
    model = task.model()
    optimizer, loader = task.optimizer(model), task.epoch_loader(seed)
    watched = None
    if limit is not None and device == "cpu":
        probe = copy.deepcopy(model)
        batch = next(iter(loader))  # drawn outside the budget: it lies in host memory
        loader.set_epoch(0)
        with MemoryBudget(limit, device, resident=probe) as watched:
            task.two_steps(probe, batch, micro)
    scheduler = None
    if config["optimizer"].get("schedule") == "linear":
        scheduler = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1.0, end_factor=1e-3, total_iters=config["epochs"]
        )
    whole = MemoryBudget(limit, device) if limit and device != "cpu" else nullcontext(watched)
    with whole as watched:
        step = task.step(model, micro, optimizer)
        history = task.history(loader, model, step, scheduler=scheduler)
    losses = [epoch.train_loss for epoch in history]
    if not all(map(math.isfinite, losses)):
        raise FloatingPointError(f"training diverged: the losses of the epochs are {losses}")
    metric = "iou" if task.segments else "accuracy"
    curves = {name: [e.metrics[name] for e in history] for name in history[0].metrics}
    metrics = {"best": max(curves[metric]), "metric": metric, "train_loss": losses, **curves}
    metrics |= {"limit_bytes": limit, "limit_simulated": limit is not None}
    metrics["steps_per_epoch"] = len(loader)
    return _outcome(metrics, history, watched.peak_reserved_bytes if watched else None)


def normalised(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Train with a normalisation, or undivided (section 3.4); a divergence is a result."""
    torch.manual_seed(seed)
    task, way = Task(config, data, device), config["normalization"]
    model = task.model()
    micro = config["micro_batch"] if way else None
    step = task.step(model, micro, normalization=way or "paper", check="off")
    history = task.history(task.epoch_loader(seed), model, step)
    finite = [e.train_loss if math.isfinite(e.train_loss) else None for e in history]
    accuracy = [epoch.metrics["accuracy"] for epoch in history]
    metrics = {"train_loss": finite, "accuracy": accuracy, "best": max(accuracy)}
    metrics["diverged"] = None in finite
    return _outcome(metrics, history)


def gradients(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Compare accumulated gradients with the whole mini-batch's, in float64 (section 3.4).

    BatchNorm sees micro-batches as in training, or takes its running statistics (``frozen``).
    """
    torch.manual_seed(seed)
    task = Task(config, data, device)
    rows: list[dict[str, Any]] = []
    original = task.model().double()

    def gradient(batch: Batch, frozen: bool, way: str | None, micro: int) -> Tensor:
        """Return the gradient of all parameters as one vector; undivided where `way` is None."""
        model = copy.deepcopy(original).train(not frozen)
        if way is None:
            inputs, targets = (part.to(device) for part in batch)
            task.loss(model(inputs), targets).backward()
        else:
            task.streamer(model, micro, normalization=way, check="off").backward(*batch)
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    for mini_batch, micro in config["divisions"]:
        inputs, targets = next(iter(task.loader(mini_batch, seed, max(mini_batch, 8))))
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

    ``apart``: the distance of both trainings' weights over the undivided one's from its start.
    """
    torch.manual_seed(seed)
    task = Task(config, data, device)
    start = task.model()
    if config["norm"] == "group":
        start = without_batchnorm(start)
    if config["dtype"] == "float64":
        start.double().register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    metrics: dict[str, Any] = {"train_loss": {}, "accuracy": {}, "best": {}}
    passed: dict[str, list[Tensor]] = {"without": [], "with": []}
    for way, weights in passed.items():
        model = copy.deepcopy(start)
        step = task.step(model, config["micro_batch"] if way == "with" else None)
        options = {"on_epoch": lambda _, m=model, kept=weights: kept.append(_weights(m))}
        history = task.history(task.epoch_loader(seed), model, step, **options)
        metrics["train_loss"][way] = [epoch.train_loss for epoch in history]
        metrics["accuracy"][way] = [epoch.metrics["accuracy"] for epoch in history]
        metrics["best"][way] = max(metrics["accuracy"][way])
    first, pairs = _weights(start), zip(*passed.values(), strict=True)
    metrics["apart"] = [float((other - own).norm() / (own - first).norm()) for own, other in pairs]
    return Outcome(metrics)


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double().cpu() for p in model.parameters()])
