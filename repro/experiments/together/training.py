"""Trainings towards one accuracy: every strategy on the same images, in as many samples."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn import functional

from repro import adaptive, dualbatch
from repro.datasets import ImageData, Split, TensorLoader, channel_statistics
from repro.experiments.captured import CapturedPasses, low_precision, model_of
from repro.experiments.design import Config, Outcome
from repro.mbs import MicroBatchStreamer
from repro.measure import TimeModel, time_interleaved
from repro.measure.machine import machine
from repro.training import evaluate_classifier

Passes = Callable[[Tensor, Tensor], Tensor | float]

STREAMED = {"theta_mbs", "dual_mbs"}
CYCLED = {"hybrid", "cyclic_theta"}
DUAL = {"dual", "hybrid", "dual_mbs"}
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
NOISE_BATCHES = 4
AT_ONCE = 500  # images of a pass that makes no gradient


class Images:
    """The images of a training, on a device: to train, held out of these, and to test."""

    def __init__(self, config: Config, data: ImageData, device: str) -> None:
        count, held = config["train_samples"], config["held_out"]
        # Sets on disk are ordered by class; the same are held out of every training.
        order = torch.randperm(count + held, generator=torch.Generator().manual_seed(0))
        some = data.train.evenly(count + held).chosen(order)
        test = data.test.evenly(min(config["test_samples"], len(data.test)))
        (images, labels), self.test = (_placed(split, device) for split in (some, test))
        self.train, self.held_out = (images[held:], labels[held:]), (images[:held], labels[:held])
        mean, std = channel_statistics(self.train[0])
        self._statistics: dict[str, Any] = {"mean": mean, "std": std}
        self.side = int(images.shape[-1])
        self._options = self._statistics | {n: config[n] for n in ("padding", "flip")}

    def loader(self, batch: int, seed: int) -> TensorLoader:
        """Return the augmented training images."""
        return TensorLoader(*self.train, batch, seed=seed, **self._options)

    def share(self, share: dualbatch.Share) -> TensorLoader:
        """Return a share's augmented mini-batches."""
        chosen = share.indices.to(self.train[1].device)
        options = self._options | {"resolution": share.resolution, "seed": share.seed}
        images, labels = (part[chosen] for part in self.train)
        return TensorLoader(images, labels, share.batch_size, shuffle=False, **options)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the accuracy on held-out and on test images, in percent."""
        accuracies = {}
        for name, (images, labels) in {"held_out": self.held_out, "test": self.test}.items():
            batches = TensorLoader(images, labels, AT_ONCE, shuffle=False, **self._statistics)
            accuracies[name] = evaluate_classifier(model, batches, labels.device)["accuracy"]
        model.train()
        return accuracies


def _placed(split: Split, device: str) -> tuple[Tensor, Tensor]:
    assert split.labels is not None
    images = split.images.expand(-1, 3, -1, -1).contiguous()  # grey ones are taken three times
    return images.to(device), split.labels.to(device)


class Work:
    """The progress of a training: updates, and images and passes by resolution."""

    def __init__(self, config: Config, side: int) -> None:
        self._config, self._side = config, side
        self.updates = 0
        self.parallel = 0.0  # time on a machine of several devices, in images of the own side
        self.by_side: dict[int, list[int]] = {}
        names = ("held_out", "test", "updates", "work", "parallel", "batch")
        self.history: dict[str, list[Any]] = {name: [] for name in names}  # at each epoch's end

    def count(
        self, batch: int, side: int, micro: int | None, *, alone: bool = False, updates: bool = True
    ) -> None:
        """Count the passes of a mini-batch of images of a side, each of at most `micro` images.

        `alone`: one device computes it at its own pace (a parameter server's worker).
        """
        done = self.by_side.setdefault(side, [0, 0])
        done[0] += batch
        done[1] += math.ceil(batch / (micro or batch))
        self.updates += updates
        if not alone:
            share = math.ceil(batch / self._config["devices"])
            passes = math.ceil(share / (micro or share))
            self.parallel += share * self.cost_of(side) + passes * self._config["step_images"]

    def cost_of(self, side: int) -> float:
        """The cost of an image, in images of the own side: by its pixels."""
        return (side / self._side) ** 2

    def end_epoch(self, accuracies: Mapping[str, float], parallel: float, batch: int) -> None:
        """Write down the epoch that has ended: accuracies, and all that was done until then."""
        work = [[side, *done] for side, done in sorted(self.by_side.items())]
        row = {"updates": self.updates, "work": work, "parallel": parallel, "batch": batch}
        for name, value in (row | dict(accuracies)).items():
            self.history[name].append(value)


@dataclass(frozen=True)
class StreamedTime(TimeModel):
    """Seconds of a worker that streams: a pass for each micro-batch of at most `micro` images."""

    micro: int = 1

    def pass_time(self, batch_size: int, samples: int) -> float:
        """Seconds of a share, its last mini-batch as short as it is."""
        whole, rest = divmod(samples, batch_size)
        passes = whole * math.ceil(batch_size / self.micro) + math.ceil(rest / self.micro)
        return self.a * samples + self.b * passes


def train(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Train by one strategy at one rate; a training that diverges ends there, which is a result."""
    images = Images(config, data, device)
    work = Work(config, images.side)
    run = _dual if config["strategy"] in DUAL else _controlled
    try:
        run(config, seed, images, work, data.num_classes, device)
    except (adaptive.DivergedError, dualbatch.NonFiniteError):
        return Outcome(work.history | {"diverged": True})
    return Outcome(work.history | {"diverged": False})


def _built(
    config: Config, classes: int, device: str, rate: float
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of(config, device, num_classes=classes)
    options: dict[str, Any] = {"momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    if config.get("captured"):  # in one launch a step: many small ones cost more
        options["fused"] = True
    return model, torch.optim.SGD(model.parameters(), lr=rate, **options)


def passes_of(config: Config, model: nn.Module, loss_fn: Any, device: str) -> Passes:
    """A function that computes a mini-batch's gradients, streamed or at once, and returns its loss.

    Where steps are captured, only streamed ones of several micro-batches are not.
    """
    low, last = low_precision(config), config.get("channels_last", False)
    at_once = CapturedPasses(model, loss_fn, low, config.get("captured", False), last)
    if config.get("strategy") not in STREAMED:
        return at_once
    memory = config["memory"]
    streamer = MicroBatchStreamer(model, loss_fn, memory, device=device, check="off", autocast=low)

    def streamed(inputs: Tensor, targets: Tensor) -> Tensor | float:
        if at_once.captured and len(inputs) <= memory:
            return at_once(inputs, targets)
        layout = torch.channels_last if last else torch.contiguous_format
        return streamer.backward(inputs.contiguous(memory_format=layout), targets).loss

    return streamed


def _controller(
    config: Config, model: nn.Module, loader: TensorLoader, work: Work, seed: int
) -> adaptive.BatchController:
    small, large, rate = config["small"], config["large"], config["rate"]
    decay: dict[str, Any] = {"decay": config["decay"], "decay_at": (config["decay_at"],)}

    def measure() -> float:  # a single estimate, followed at once, as the records were made
        for _ in range(NOISE_BATCHES):  # it has its price, and trains nothing
            work.count(small, loader.resolution[0], None, updates=False)
        return float(adaptive.noise_scale(model, loader, small, batches=NOISE_BATCHES, seed=seed))

    match config["strategy"]:
        case "fixed":
            return adaptive.FixedBatch(small, rate, **decay)
        case "linear":
            return adaptive.LinearScaling(large, small, rate, warmup=config["warmup"], **decay)
        case "noise":
            return adaptive.NoiseScaleBatch(small, large, rate, measure, factors=math.inf, **decay)
        case _:
            return adaptive.ThetaController(small, large, rate, **decay)


def _controlled(
    config: Config, seed: int, images: Images, work: Work, classes: int, device: str
) -> None:
    """Train in one process, by a controller that sets batch and rate for each epoch."""
    torch.manual_seed(seed)
    model, optimizer = _built(config, classes, device, config["rate"])
    loader = images.loader(config["small"], seed)
    controller = _controller(config, model, loader, work, seed)
    passes = passes_of(config, model, functional.cross_entropy, device)
    micro = config["memory"] if config["strategy"] in STREAMED else None
    setting = controller.observe(adaptive.full_cost(model, loader, AT_ONCE), model.parameters())
    for number, entry in enumerate(_schedule(config)):
        side = entry.resolution or images.side
        loader.set_batch_size(setting.batch_size)
        loader.set_resolution(side)
        loader.set_epoch(number)
        total, steps = torch.zeros((), device=device), len(loader)
        for done, (inputs, targets) in enumerate(loader, 1):
            adaptive.set_lr(optimizer, setting.lr_at(done / steps))
            optimizer.zero_grad(set_to_none=True)
            total += passes(inputs, targets) * len(targets)
            optimizer.step()
            work.count(len(targets), side, micro)
        batch = setting.batch_size
        setting = controller.observe(float(total) / len(images.train[1]), model.parameters())
        work.end_epoch(images.evaluate(model), work.parallel, batch)


def _schedule(config: Config) -> dualbatch.CyclicProgressiveSchedule:
    """The epochs' rates and resolutions; None is the images' own side."""
    sides = config["sides"] if config["strategy"] in CYCLED else [None]
    early, rate = config["decay_at"], config["rate"]
    late = dualbatch.Stage(config["epochs"] - early, rate * config["decay"])
    return dualbatch.CyclicProgressiveSchedule(
        [dualbatch.Stage(early, rate), late], [dualbatch.SubStage(side) for side in sides]
    )


def _dual(config: Config, seed: int, images: Images, work: Work, classes: int, device: str) -> None:
    """Train on a parameter server with workers of two batch sizes, on a virtual clock."""
    memory, workers = config["memory"], config["devices"]
    micro = memory if config["strategy"] in STREAMED else None
    large = config["large"] if micro else memory
    schedule = _schedule(config)
    # An image of a large batch takes as long as at the size that fits, streamed or not.
    model, each = TimeModel(1.0, config["step_images"]), (workers // 2, workers - workers // 2)
    plan = dualbatch.DualBatchPlan.solve(model, config["k"], *each, memory, config["train_samples"])

    def counted(share: dualbatch.Share) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in images.share(share):
            work.count(len(targets), share.resolution or images.side, micro, alone=True)
            yield inputs, targets

    def time_of(side: int | None) -> StreamedTime:
        cost = work.cost_of(side or images.side)
        return StreamedTime(cost, config["step_images"], micro=micro or large)

    dualbatch.train_dual_batch(
        partial(model_of, config, "cpu", num_classes=classes),
        counted,
        replace(plan, large_batch=large),
        schedule,
        seed=seed,
        device=device,
        channels_last=config.get("channels_last", False),
        optimizer_state="restarted",  # as its records were computed
        passes_fn=lambda model, loss_fn: passes_of(config, model, loss_fn, device),
        time_models={side: time_of(side) for side in {entry.resolution for entry in schedule}},
        evaluate=images.evaluate,
        on_epoch=lambda epoch: work.end_epoch(epoch.metrics, epoch.virtual_time_s, large),
    )


def pace(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Time steps by size and resolution, in turns, and fit the cost of an image and of a pass."""
    sides, sizes = config["sides"], config["sizes"]
    with machine(config, device):
        steps = {f"{a}px, {b}": _step(config, a, b, device) for a in sides for b in sizes}
        warmup, repeats = config["warmup"], config["repeats"]
        timings = time_interleaved(steps, warmup=warmup, repeats=repeats, device=device)
    fits = []
    for side in sides:
        seconds = [timings[f"{side}px, {size}"].median_s for size in sizes]
        # Neither is below 0, though on small steps noise may outweigh the cost of images.
        (image_s, pass_s), _ = nnls(np.vander(sizes, 2), np.asarray(seconds))
        fits.append({"side": side, "image_s": float(image_s), "pass_s": float(pass_s)})
    return Outcome({"fits": fits}, timings)


def _step(config: Config, side: int, batch: int, device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model, optimizer = _built(config, 10, device, 1e-3)
    passes = passes_of(config, model, functional.cross_entropy, device)
    inputs = torch.randn(batch, 3, side, side, device=device)
    targets = torch.randint(10, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        passes(inputs, targets)
        optimizer.step()

    return step
