"""One training twice, without and with MBS, from the same weights on the same batches."""

import copy
import math

import torch
from torch import nn

from repro.datasets import Ahead, ImageData
from repro.experiments.mbs.building import (
    Config,
    build_model,
    build_optimizer,
    evaluation,
    train_loader,
    training_step,
)
from repro.experiments.outcome import Outcome
from repro.training import Epoch, fit

GROUPS = 4  # of channels; the smallest networks have so many in their first layer


def without_batchnorm(model: nn.Module) -> nn.Module:
    """Replace each BatchNorm of a model by a GroupNorm, which looks at one sample at a time."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            parent, _, own = name.rpartition(".")
            groups = math.gcd(GROUPS, module.num_features)
            setattr(
                model.get_submodule(parent),
                own,
                nn.GroupNorm(groups, module.num_features, module.eps).to(module.weight.device),
            )
    return model


def twins(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Train without and with MBS and compare the weights after each epoch.

    The metric ``apart`` is, by epoch, the distance of the two trainings' weights over the way that
    the training without MBS has come from its start.
    """
    assert data is not None
    torch.manual_seed(seed)
    start = build_model(config, data, device)
    if config["norm"] == "group":
        start = without_batchnorm(start)
    if config["dtype"] == "float64":
        start.double().register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    metrics: dict[str, dict[str, object]] = {"train_loss": {}, "accuracy": {}, "best": {}}
    passed: dict[str, list[torch.Tensor]] = {}
    for way, micro_batch in (("without", None), ("with", config["micro_batch"])):
        model = copy.deepcopy(start)
        own = {**config, "micro_batch": micro_batch}
        optimizer = build_optimizer(own, model)
        loader = train_loader(own, data, config["mini_batch"], seed, config["train_samples"])
        weights = passed[way] = []

        def keep(_: Epoch, model: nn.Module = model, weights: list[torch.Tensor] = weights) -> None:
            weights.append(_flat(model))

        history = fit(
            model,
            training_step(own, model, optimizer, device),
            Ahead(loader, device),
            epochs=config["epochs"],
            device=device,
            evaluate=evaluation(own, data, model, device),
            on_epoch=keep,
        )
        accuracy = [epoch.metrics["accuracy"] for epoch in history]
        metrics["train_loss"][way] = [epoch.train_loss for epoch in history]
        metrics["accuracy"][way] = accuracy
        metrics["best"][way] = max(accuracy)
    first = _flat(start)
    apart = [
        float((streamed - without).norm() / (without - first).norm())
        for without, streamed in zip(passed["without"], passed["with"], strict=True)
    ]
    return Outcome(metrics={**metrics, "apart": apart})


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double().cpu() for p in model.parameters()])
