"""Trainings on one plan that differ in synchronisation and merge rule: what is executed."""

import itertools
import os
from functools import partial
from typing import Any

from repro.datasets import ImageData
from repro.dualbatch import train_dual_batch
from repro.experiments.dualbatch.building import (
    Config,
    TrainingData,
    build_model,
    clock_of,
    compute_of,
    plan_of,
    schedule_of,
    state_of,
)
from repro.experiments.outcome import RAY_ADDRESS, Outcome, no_record
from repro.measure import Timing


def synchronise(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Train with ``sync``, ``staleness`` and ``merge`` of the configuration, and keep the log."""
    assert data is not None
    images = TrainingData(config, data, device)
    on_ray = config["engine"] == "ray"
    cluster: dict[str, Any] = {"address": os.environ.get(RAY_ADDRESS) or None} if on_ray else {}
    try:
        result = train_dual_batch(
            partial(build_model, config, data.num_classes),
            images,
            plan_of(config["sub_stages"][-1]["plan"]),
            schedule_of(config),
            sync=config["sync"],
            staleness=config["staleness"],
            merge=config["merge"],
            factor=config["factor"],
            engine=config["engine"],
            seed=seed,
            device=device,
            optimizer_state=state_of(config),
            **compute_of(config),
            **clock_of(config),
            evaluate=images.evaluation(config, device),
            **cluster,
        )
    except RuntimeError as error:
        if type(error).__name__ != "ClusterError":  # whose module needs Ray
            raise
        raise no_record(error) from error
    history = result.history
    walls = [0.0, *(epoch.wall_time_s for epoch in history)]
    return Outcome(
        metrics={
            "accuracy": [epoch.metrics["accuracy"] for epoch in history],
            "test_loss": [epoch.metrics["test_loss"] for epoch in history],
            "train_loss": [epoch.train_loss for epoch in history],
            "virtual_time_s": None if on_ray else [e.virtual_time_s for e in history],
            "wall_time_s": walls[1:],
            "worker": [commit.worker for commit in result.log],
            "pulled": [commit.pulled for commit in result.log],
            "staleness": [commit.staleness for commit in result.log],
            "commit_s": [commit.time_s for commit in result.log],
        },
        timings={"epoch": Timing(tuple(b - a for a, b in itertools.pairwise(walls)), warmup=0)},
    )
