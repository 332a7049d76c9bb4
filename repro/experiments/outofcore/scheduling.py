"""The experiment that trains by one schedule after another, each by its name."""

import torch

from repro.datasets import ImageData
from repro.experiments.design import Outcome
from repro.experiments.outofcore.experiments import Config
from repro.experiments.outofcore.measuring import link_rate, train_within
from repro.experiments.outofcore.modelled import limit_bytes, trace_at
from repro.measure.machine import machine
from repro.measure.precision import without_tf32
from repro.outofcore import DoesNotFit, OutOfCore


def by_schedule(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Train within as many bytes of tensors as the limit has; no allocator is looked at.

    All schedules get the same budget and, where they have one, the same window.

    Raises:
        torch.OutOfMemoryError: The schedule does not know the budget, and holds more.
    """
    limit, trace = limit_bytes(config), trace_at(config, config["batch"])
    with machine(config, device), without_tf32():
        block = OutOfCore(
            limit,
            window_bytes=None,
            device=device,
            host_bytes=trace.host_bytes(limit) if device != "cpu" else None,
            schedule=config["schedule"],
            link_bytes_per_s=link_rate(config, device),
        )
        try:
            timings, metrics = train_within(config, device, block, trace)
        except DoesNotFit as error:
            raise torch.OutOfMemoryError(f"out of memory: {error}") from None
    metrics["limit_bytes"] = limit
    return Outcome(metrics, timings, metrics["held_bytes"])
