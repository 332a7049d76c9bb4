"""What loss normalisation does to gradients and trainings (section 3.4): what is executed."""

import copy
import math
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
)
from repro.experiments.outcome import Outcome
from repro.mbs import MicroBatchStreamer
from repro.measure import Timing
from repro.training import Step, fit, plain_step

WAYS = ("none", "paper", "exact")


def _streamer(config: Config, model: nn.Module, way: str, micro: int, device: str) -> Any:
    return MicroBatchStreamer(
        model,
        loss_of(config),
        micro,
        device=device,
        normalization=way,
        # Dice is no mean over samples: only two passes weigh it exactly.
        two_pass=way == "exact" and is_segmentation(config),
        check="off",
    )


def gradients(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Compare accumulated gradients with the whole mini-batch's, in float64.

    Once as in training, where BatchNorm sees micro-batches, and once by its running statistics, so
    that normalisation alone is compared.
    """
    assert data is not None
    torch.manual_seed(seed)
    rows: list[dict[str, Any]] = []
    original = build_model(config, data, device).double()
    for mini_batch, micro in config["divisions"]:
        loader = train_loader(config, data, mini_batch, seed, max(mini_batch, 8))
        inputs, targets = next(iter(loader))
        batch = inputs.double(), targets
        for frozen in (True, False):
            whole = _gradient(config, original, batch, frozen, None, micro, device)
            for way in WAYS:
                ours = _gradient(config, original, batch, frozen, way, micro, device)
                size = float(whole.norm())
                rows.append(
                    {
                        "mini_batch": mini_batch,
                        "micro_batch": micro,
                        "frozen": frozen,
                        "way": way,
                        "error": float((ours - whole).norm()) / size,
                        "length": float(ours.norm()) / size,
                    }
                )
    return Outcome({"rows": rows})


def _gradient(
    config: Config,
    original: nn.Module,
    batch: Batch,
    frozen: bool,
    way: str | None,
    micro: int,
    device: str,
) -> torch.Tensor:
    """Return the gradient of all parameters as one vector; of the undivided batch for no way."""
    model = copy.deepcopy(original).train(not frozen)
    if way is None:
        inputs, targets = (part.to(device) for part in batch)
        loss_of(config)(model(inputs), targets).backward()
    else:
        _streamer(config, model, way, micro, device).backward(*batch)
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(parts)


def normalised(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Train with a way of normalisation; undivided where the configuration has none.

    A training that diverges is a result, and ends its curves with what it came to.
    """
    assert data is not None
    torch.manual_seed(seed)
    model = build_model(config, data, device)
    optimizer = build_optimizer(config, model)
    loader = train_loader(config, data, config["mini_batch"], seed, config["train_samples"])
    history = fit(
        model,
        _step(config, model, optimizer, device),
        Ahead(loader, device),
        epochs=config["epochs"],
        device=device,
        evaluate=evaluation(config, data, model, device),
    )
    losses = [epoch.train_loss for epoch in history]
    finite = [loss if math.isfinite(loss) else None for loss in losses]
    accuracy = [epoch.metrics["accuracy"] for epoch in history]
    return Outcome(
        metrics={
            "train_loss": finite,
            "accuracy": accuracy,
            "best": max(accuracy),
            "diverged": None in finite,
        },
        timings={"epoch": Timing(tuple(e.time_s for e in history[1:]), warmup=1)},
    )


def _step(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> Step:
    way = config["normalization"]
    if way is None:
        return plain_step(model, loss_of(config), optimizer, device)
    streamer = _streamer(config, model, way, config["micro_batch"], device)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        result = streamer.backward(inputs, targets)
        optimizer.step()
        # What is not normalised is a sum: the curves of all ways are of means.
        loss: torch.Tensor = result.loss
        return loss / result.num_micro_batches if way == "none" else loss

    return step
