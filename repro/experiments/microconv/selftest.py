"""What `doctor` runs of μ-cuDNN."""

import copy
import math

import torch
from torch import nn

from repro.experiments.selftests import SelfTest, relative_difference
from repro.microconv import tune


def divided(device: str) -> float:
    """Compare a convolution that its workspace limit makes run in parts."""
    return _compared(device, 2**16, ["torch:im2col"], parts=2)


def fastest(device: str) -> float:
    """Compare one by whichever algorithms of all backends are the fastest."""
    return _compared(device, 2**20, None, parts=1)


def _compared(device: str, limit_bytes: int, algorithms: list[str] | None, parts: int) -> float:
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 8, 3, padding=1)
    tuned = copy.deepcopy(nn.Sequential(plain)).to(device)
    images = torch.randn(8, 4, 12, 12)
    # The best division, even where torch's own convolution is as fast.
    report = tune(
        tuned,
        images.to(device),
        limit_bytes,
        algorithms=algorithms,
        min_gain=-math.inf,
        cache=None,
    )
    chosen = [len(k.division.parts) if k.division else 1 for k in report.kernels]
    if not chosen or min(chosen) < parts:
        raise ValueError(f"kernels run in {chosen} parts, expected {parts}; {report.skipped}")
    outcomes = []
    for model, inputs in ((tuned, images.to(device)), (plain, images.clone())):
        inputs.requires_grad_()
        outputs = model(inputs)
        outputs.square().mean().backward()
        outcomes.append([outputs, inputs.grad, *(p.grad for p in model.parameters())])
    return relative_difference(*outcomes)


TESTS = (
    SelfTest("a convolution in parts = torch's whole one on the CPU", 1e-3, divided),
    SelfTest("one by the fastest algorithms = torch's on the CPU", 1e-3, fastest),
)
