"""Dual-batch learning on Ray: a small-batch and a large-batch worker, each a process of its own.

python examples/with_ray.py    (pip install ray)

Ray starts on this machine, for the time of the training; address="auto" joins a running cluster of
several machines. The local engine then follows the log of commits and ends with the same weights.
"""

from typing import Any

import torch
from torch import nn

from repro.dualbatch import (
    CyclicProgressiveSchedule,
    DualBatchPlan,
    DualBatchResult,
    Stage,
    SubStage,
    train_dual_batch,
)
from repro.measure import TimeModel


def make_model() -> nn.Module:
    """Return a small CNN for images (B, 3, H, W) of four classes."""
    convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    head = nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 4)
    return nn.Sequential(convolution, nn.ReLU(), *head)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (512, 3, 16, 16), patterns under noise, and their classes (512,)."""
    torch.manual_seed(1)
    patterns, classes = torch.randn(4, 3, 16, 16), torch.randint(4, (512,))
    return patterns[classes] + torch.randn(512, 3, 16, 16), classes


def train(**options: Any) -> DualBatchResult:
    """Train six epochs at 8 and 16 pixels in turns."""
    times = TimeModel(a=1e-3, b=0.02)  # seconds per image and per step: see repro.measure.probe
    # One worker of each kind, planned to take 1.05 times as long as large batches alone.
    plan = DualBatchPlan.solve(times, 1.05, 1, 1, large_batch=64, samples=512)
    stages, sizes = [Stage(4, 0.05), Stage(2, 0.01)], [SubStage(8), SubStage(16)]
    schedule = CyclicProgressiveSchedule(stages, sizes)
    return train_dual_batch(make_model, make_data(), plan, schedule, **options)


if __name__ == "__main__":
    on_ray = train(engine="ray", on_epoch=lambda e: print(f"epoch {e.epoch}: {e.train_loss:.4f}"))
    torch.set_num_threads(1)  # as a worker on Ray
    local = train(engine="local", follow=on_ray.log)
    pairs = zip(on_ray.state.values(), local.state.values(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    print(f"largest difference from the local engine's weights: {difference:.1e}")
