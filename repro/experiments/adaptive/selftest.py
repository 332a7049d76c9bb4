"""What `doctor` runs of θ-adaptive batch sizes."""

import torch
from torch import nn
from torch.nn import functional

from repro.adaptive import METHODS, DataParallel, ThetaController
from repro.experiments.selftests import SelfTest, relative_difference, small_batch, small_model

_STEPS, _LR = 3, 0.05


def steps(device: str) -> float:
    """Compare the weights after steps by every way of averaging with those of plain SGD."""
    images, labels = small_batch(10)
    plain = small_model()
    for _ in range(_STEPS):
        _step(plain, images, labels)
    worst = 0.0
    for averaging in METHODS:
        model = small_model().to(device)
        optimizer = torch.optim.SGD(model.parameters(), _LR)
        training = DataParallel(
            model, nn.CrossEntropyLoss(), optimizer, averaging, micro_batch=4, bucket_bytes=2**10
        )
        for _ in range(_STEPS):
            training.step(images.to(device), labels.to(device))
        training.finish()
        worst = max(worst, relative_difference(model.parameters(), plain.parameters()))
    return worst


def theta(device: str) -> float:
    """Compare θ (equation 4) and the batches that follow with a CPU's, in float64."""
    start, model = small_model(), small_model().to(device)
    controller = ThetaController(8, 32, _LR, tolerance=10.0, interval=1)
    controller.observe(4.0, model.parameters())
    thetas, expected, batches = [], [], []
    for epoch in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 / (1 + epoch))
        cost = 4.0 - 0.5 * (1 + epoch)
        step = controller.observe(cost, model.parameters())
        moved = sum(
            float((w.detach().cpu().double() - w0.double()).square().sum())
            for w, w0 in zip(model.parameters(), start.parameters(), strict=True)
        )
        thetas.append(float("nan") if step.theta is None else step.theta)
        expected.append((4.0 - cost) / moved**0.5)
        batches.append(step.batch_size)
    if not batches[-1] == 32 == max(batches) or batches != sorted(batches):
        raise ValueError(f"costs fall, K is 1, and the batch sizes are {batches} up to 32")
    compared = [torch.tensor(values, dtype=torch.float64) for values in (thetas, expected)]
    return relative_difference(compared[:1], compared[1:])


def _step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    loss = functional.cross_entropy(model(images), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(_LR * gradient)


TESTS = (
    SelfTest("weights by all three averagings = plain SGD on the CPU", 1e-4, steps),
    SelfTest("θ and the growth of the batch = equation 4 on the CPU", 1e-5, theta),
)
