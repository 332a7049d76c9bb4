"""The plain loop equals one written by hand; metrics equal scikit-learn's, or their formula."""

import copy
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, jaccard_score, log_loss
from torch import nn

from repro import training
from repro.training import evaluate_binary_segmentation, evaluate_classifier, fit, plain_step


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = (8, 8, 3)  # the last one is smaller: means must weigh it less
    drawn = {"generator": generator}
    return [(torch.randn(n, 5, **drawn), torch.randint(0, 4, (n,), **drawn)) for n in sizes]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def test_fit_equals_a_loop_written_by_hand(model, batches):
    reference, loss_fn = copy.deepcopy(model), nn.CrossEntropyLoss()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = plain_step(model, loss_fn, optimizer, "cpu")
    history = fit(model, step, batches, epochs=3, scheduler=scheduler)

    optimizer, expected = sgd(reference), []
    for epoch in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5**epoch
        reference.train()
        losses = []
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = loss_fn(reference(inputs), targets)
            loss.backward()
            optimizer.step()
            losses += [loss.item()] * len(inputs)
        expected.append(np.mean(losses))
    pairs = zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs)
    assert [epoch.train_loss for epoch in history] == pytest.approx(expected, rel=1e-6)
    assert [epoch.number for epoch in history] == [1, 2, 3]
    assert all(epoch.time_s > 0 and epoch.metrics == {} for epoch in history)


@pytest.mark.parametrize(
    ("epochs", "loader", "named"),
    [(0, [1], "epochs is 0"), (2.5, [1], "epochs is 2.5"), (True, [1], "epochs is True"),
     (1, [], "yields no mini-batch")],
)  # fmt: skip
def test_nothing_to_train(model, epochs, loader, named):
    with pytest.raises(ValueError, match=named):
        fit(model, lambda a, b: torch.zeros(()), loader, epochs=epochs)


@pytest.mark.parametrize("kind", ["classifier", "binary_segmentation", "psnr"])
def test_nothing_to_evaluate_on(kind):
    with pytest.raises(ValueError, match="no batch to evaluate on"):
        getattr(training, f"evaluate_{kind}")(nn.Identity(), iter(()))


def test_classification_against_scikit_learn(model, batches):
    fit(model, plain_step(model, nn.CrossEntropyLoss(), sgd(model), "cpu"), batches, epochs=2)
    metrics = evaluate_classifier(model, batches)
    assert not model.training
    with torch.no_grad():
        probabilities = torch.cat([model(inputs) for inputs, _ in batches]).double().softmax(1)
    labels = torch.cat([targets for _, targets in batches]).numpy()
    assert set(metrics) == {"test_loss", "accuracy"}
    accuracy = accuracy_score(labels, probabilities.argmax(1).numpy())
    assert metrics["accuracy"] == pytest.approx(100 * accuracy)
    expected = log_loss(labels, probabilities.numpy(), labels=range(4))
    assert metrics["test_loss"] == pytest.approx(expected, rel=1e-5)


def test_segmentation_against_scikit_learn():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 1, 3, padding=1)
    batches = [(torch.randn(n, 3, 6, 5), torch.randint(0, 3, (n, 6, 5)).byte()) for n in (4, 1)]
    metrics = evaluate_binary_segmentation(model, batches)
    with torch.no_grad():
        predicted = torch.cat([model(inputs)[:, 0] > 0 for inputs, _ in batches])
    truth = torch.cat([targets > 0 for _, targets in batches])
    expected = 100 * jaccard_score(truth.numpy().ravel(), predicted.numpy().ravel())
    assert metrics == {"iou": pytest.approx(expected)} and not model.training


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 4, 4)])
def test_images_that_do_not_match_have_no_psnr(shape):
    with pytest.raises(ValueError, match="differ"):
        training.psnr(torch.zeros(2, 3, 4, 4), torch.zeros(shape))


class Stretched(nn.Module):
    """Leaves [0, 1] on both sides; knows whether it evaluates."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.modes = []

    def forward(self, x):
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.scale * (x - 0.5) + 0.5


@pytest.mark.parametrize("sizes", [[7], [3, 3, 1], [1] * 7])
def test_restoration_by_brute_force(sizes):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.rand(2, 7, 2, 4, 5, generator=generator)
    model = Stretched()
    batches = zip(inputs.split(sizes), targets.split(sizes), strict=True)
    metrics = training.evaluate_psnr(model, batches)
    values, errors = [], []
    for x, y in zip(inputs.double().numpy(), targets.double().numpy(), strict=True):
        restored = 2 * (x - 0.5) + 0.5
        values.append(-10 * math.log10(np.mean((restored.clip(0, 1) - y) ** 2)))
        errors.append(np.abs(restored - y).mean())
    assert set(metrics) == {"psnr", "test_l1"}
    assert metrics["psnr"] == pytest.approx(np.mean(values), rel=1e-6)
    assert metrics["test_l1"] == pytest.approx(np.mean(errors), rel=1e-6)
    assert set(model.modes) == {(False, False)}
