"""Trainings: by one of the schemes, by synchronisation and merge rule, and around their ends."""

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import vector_to_parameters

from repro import dualbatch
from repro.datasets import ImageData
from repro.dualbatch import DualBatchPlan, DualBatchResult
from repro.dualbatch.checks import ClusterError
from repro.experiments.design import RAY_ADDRESS, Config, Outcome, cluster_error
from repro.experiments.dualbatch import building
from repro.experiments.dualbatch.building import TrainingData, build_model, plan_of
from repro.measure import Timing

Batch = tuple[Tensor, Tensor]
_AT_ONCE = 500  # images in a forward pass that keeps nothing


def train(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Train (Tables 3, 5, 8, 10); with ``verify`` again locally, in the same order of commits."""
    result, _, again = _trained(config, seed, data, device)
    outcome, same = _outcome(config, result), None
    if config.get("verify"):
        followed = again(follow=result.log).state
        same = all(torch.equal(followed[name], result.state[name]) for name in followed)
    outcome.metrics.update(
        resolution=[epoch.resolution for epoch in result.history],
        plans=[plan_row(plan_of(e["plan"]), e["resolution"]) for e in config["sub_stages"]],
        commits=len(result.log),
        same_weights=same,
    )
    if config.get("held_out"):
        outcome.metrics["held_out"] = [epoch.metrics["held_out"] for epoch in result.history]
    return outcome


def synchronise(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Train with ``sync``, ``staleness`` and ``merge`` of the configuration, and keep the log."""
    result, _, _ = _trained(config, seed, data, device)
    outcome = _outcome(config, result)
    outcome.metrics.update(
        worker=[commit.worker for commit in result.log],
        pulled=[commit.pulled for commit in result.log],
        commit_s=[commit.time_s for commit in result.log],
    )
    return outcome


def _trained(
    config: Config, seed: int, data: ImageData, device: str
) -> tuple[DualBatchResult, TrainingData, Callable[..., DualBatchResult]]:
    """Train; the function trains the same again, locally and without tests."""
    images = TrainingData(config, data, device)
    stages = [dualbatch.Stage(int(epochs), lr) for epochs, lr in config["stages"]]
    subs = [
        dualbatch.SubStage(entry["resolution"], entry["dropout"], plan_of(entry["plan"]))
        for entry in config["sub_stages"]
    ]
    run = partial(
        dualbatch.train_dual_batch,
        partial(build_model, config, data.num_classes),
        images,
        plan_of(config["sub_stages"][-1]["plan"]),
        dualbatch.CyclicProgressiveSchedule(stages, subs, config["warmup_epochs"]),
        sync=config["sync"],
        staleness=config.get("staleness"),
        merge=config.get("merge"),
        factor=config["factor"],
        seed=seed,
        device=device,
        **building.compute_of(config),
    )
    options: dict[str, Any] = {"engine": config.get("engine", "local"), **building.clock_of(config)}
    if options["engine"] == "ray":
        options["address"] = os.environ.get(RAY_ADDRESS) or None
    try:
        return run(evaluate=images.evaluation(config, device), **options), images, run
    except ClusterError as error:
        raise cluster_error(error) from error


def _outcome(config: Config, result: DualBatchResult) -> Outcome:
    """The curves of a training, and the seconds of its epochs."""
    history, on_ray = result.history, config["engine"] == "ray"
    walls = [0.0, *(epoch.wall_time_s for epoch in history)]
    metrics = {
        "accuracy": [epoch.metrics["accuracy"] for epoch in history],
        "test_loss": [epoch.metrics["test_loss"] for epoch in history],
        "train_loss": [epoch.train_loss for epoch in history],
        "virtual_time_s": None if on_ray else [epoch.virtual_time_s for epoch in history],
        "wall_time_s": walls[1:],
        "staleness": [commit.staleness for commit in result.log],
    }
    seconds = tuple(after - before for before, after in itertools.pairwise(walls))
    return Outcome(metrics, timings={"epoch": Timing(seconds, warmup=0)})


def plan_row(plan: DualBatchPlan, resolution: int | None) -> dict[str, Any]:
    """A plan's batch sizes, shares and factor, for a record."""
    names = ("k", "n_small", "small_batch", "large_batch", "small_samples", "large_samples")
    sizes = {name: getattr(plan, name) for name in names}
    return {"resolution": resolution, **sizes, "factor": plan.update_factor}


def flatness(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Train on the local engine; then measure gradients and losses around the last weights.

    Gradients are of mini-batches drawn with replacement, without augmentation, normalised by their
    own statistics as in training. Losses are of the model as it is tested, in single precision.
    """
    result, images, _ = _trained(config, seed, data, device)
    model = build_model(config, data.num_classes, device)
    model.load_state_dict(result.state)
    model.eval()
    shown: dict[str, Batch] = {}
    for name, of in (("train", (images.images, images.labels)), ("test", images.test)):
        order = torch.randperm(len(of[1]), generator=torch.Generator().manual_seed(0))
        few = order[: config["loss_samples"]]  # the same for every seed
        (shown[name],) = images.loader(*of, few, len(few))
    train = shown["train"]
    drawn = torch.Generator().manual_seed(seed)
    directions = [filter_normalised(model, drawn) for _ in range(config["directions"])]
    at_rest, last = loss_of(model, train), result.history[-1]
    metrics = {
        "accuracy": last.metrics["accuracy"],
        "test_loss": last.metrics["test_loss"],
        "train_loss": at_rest,
        "wall_time_s": last.wall_time_s,
        "variances": [
            gradient_variance(model, train, n, config["draws"], drawn)
            for n in config["variance_batches"]
        ],
        "rises": [  # by size, then by direction
            [loss_at(model, direction, size, train) - at_rest for direction in directions]
            for size in config["sizes"]
        ],
        "worst_rise": worst_rise(model, train, config["worst_size"]),
        "line": {
            name: [loss_at(model, directions[0], point, batch) for point in config["places"]]
            for name, batch in shown.items()
        },
    }
    return Outcome(metrics)


# How gradients scatter and how the loss rises around a model's weights (section 2).


def gradient_variance(
    model: nn.Module, pool: Batch, batch: int, draws: int, generator: torch.Generator
) -> float:
    """The variance of a mini-batch's gradient, summed over all weights (section 2.2).

    Mini-batches are drawn from images (N, C, H, W) and labels (N,) with replacement.
    """
    copied = copy.deepcopy(model).train()
    inputs, labels = pool
    total, squares = torch.zeros((), dtype=torch.double, device=labels.device), 0.0
    for _ in range(draws):
        chosen = torch.randint(len(labels), (batch,), generator=generator).to(labels.device)
        gradient = _gradient(copied, inputs[chosen], labels[chosen]).double()
        total = total + gradient
        squares += float(gradient.square().sum())
    return (squares - float(total.square().sum()) / draws) / (draws - 1)


def _gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(inputs), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def filter_normalised(model: nn.Module, generator: torch.Generator) -> list[Tensor]:
    """A random direction whose filters are as long as the model's.

    Biases and normalisation layers stay. Source: Li et al., "Visualizing the Loss Landscape of
    Neural Nets", 2018.
    """
    direction = []
    for weight in model.parameters():
        drawn = torch.zeros_like(weight)
        if weight.dim() > 1:
            drawn = torch.randn(weight.shape, generator=generator).to(weight.device)
            length, drawn_length = (
                t.detach().flatten(1).norm(dim=1).view(-1, *[1] * (t.dim() - 1))
                for t in (weight, drawn)
            )
            drawn = drawn * length / drawn_length
        direction.append(drawn)
    return direction


def loss_at(model: nn.Module, direction: list[Tensor], size: float, batch: Batch) -> float:
    """The mean loss at a distance along a direction from the model's weights, which stay."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for weight, part in zip(moved.parameters(), direction, strict=True):
            weight.add_(part, alpha=size)
    return loss_of(moved, batch)


def loss_of(model: nn.Module, batch: Batch) -> float:
    """The mean loss over a set of images."""
    total = 0.0
    with torch.no_grad():
        for inputs, labels in _pieces(batch):
            total += float(functional.cross_entropy(model(inputs), labels, reduction="sum"))
    return total / len(batch[1])


def worst_rise(model: nn.Module, batch: Batch, size: float) -> float:
    """The rise of the loss one step of length `size` up its gradient.

    Source: Foret et al., "Sharpness-Aware Minimization", 2021, with their first-order step.
    """
    total: Any = sum(_gradient(model, *piece) * len(piece[1]) for piece in _pieces(batch))
    direction = [torch.empty_like(p) for p in model.parameters()]
    vector_to_parameters(total / total.norm(), direction)
    return loss_at(model, direction, size, batch) - loss_of(model, batch)


def _pieces(batch: Batch) -> Iterator[Batch]:
    yield from zip(*(part.split(_AT_ONCE) for part in batch), strict=True)
