"""What `doctor` runs of dual-batch learning."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from repro.dualbatch import CyclicProgressiveSchedule, DualBatchPlan, Share, Stage, train_dual_batch
from repro.experiments.selftests import SelfTest, relative_difference, small_batch, small_model
from repro.measure import TimeModel

_EPOCHS, _LR = 2, 0.05


def training(device: str) -> float:
    """Compare the weights of a small-batch and a large-batch worker with those of plain loops.

    The loops train each worker's share with SGD from the same weights, and average by the factors,
    as Parallel SGD at a barrier does (Lu et al., section 2.3).
    """
    images, labels = small_batch(24)
    plan = DualBatchPlan.solve(TimeModel(a=1e-3, b=1e-2), 1.1, 1, 1, 8, len(images))
    shares: list[Share] = []

    def batches(share: Share) -> Iterator[tuple[Tensor, Tensor]]:
        shares.append(share)
        return _batches(share, images.to(device), labels.to(device))

    trained = train_dual_batch(
        small_model,
        batches,
        plan,
        CyclicProgressiveSchedule([Stage(_EPOCHS, _LR)]),
        sync="bsp",
        optimizer_fn=lambda parameters, lr: torch.optim.SGD(parameters, lr),
        device=device,
    )
    model = small_model()
    model.load_state_dict(_plain(shares, [c.factor for c in trained.log], images, labels))
    return relative_difference(
        [trained.state[name] for name, _ in model.named_parameters()], model.parameters()
    )


def _plain(
    shares: list[Share], factors: list[float], images: Tensor, labels: Tensor
) -> dict[str, Tensor]:
    state = small_model().state_dict()
    for first in range(0, len(shares), 2):  # a round of two workers
        ends, weights = [], factors[first : first + 2]
        for share in shares[first : first + 2]:
            model = small_model()
            model.load_state_dict(state)
            _train(model, share, images, labels)
            ends.append(model.state_dict())
        state = {
            name: sum(f * end[name] for f, end in zip(weights, ends, strict=True)) / sum(weights)
            for name in state
        }
    return state


def _train(model: nn.Module, share: Share, images: Tensor, labels: Tensor) -> None:
    for inputs, targets in _batches(share, images, labels):
        gradients = torch.autograd.grad(
            functional.cross_entropy(model(inputs), targets), list(model.parameters())
        )
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(_LR * gradient)


def _batches(share: Share, images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for chosen in share.indices.cpu().split(share.batch_size):
        where = chosen.to(images.device)
        yield images[where], labels[where]


TESTS = (SelfTest("weights of two workers = plain loops on the CPU", 1e-4, training),)
