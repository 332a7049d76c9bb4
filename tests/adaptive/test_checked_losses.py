"""The check of a loss before mini-batches are computed in parts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from repro.adaptive import DataParallel, LossCheckError, full_cost
from repro.adaptive.loss_check import Checks, few, loss_check
from repro.measure.batches import read_batch

CPU, WEIGHT = torch.device("cpu"), torch.linspace(0.25, 4.0, 10)


def labels(generator):
    return torch.randint(10, (32,), generator=generator)


def floats(generator):
    return torch.randn(32, 10, generator=generator)


LOSSES = {  # loss, targets, how many of 100 mini-batches show that it is no mean over samples
    "ignored label": (lambda o, t: F.cross_entropy(o, t, ignore_index=0), labels, 95),
    "class weights": (lambda o, t: F.cross_entropy(o, t, weight=WEIGHT), labels, 100),
    "positive": (lambda o, t: F.mse_loss(o[t > 0], t[t > 0]), floats, 93),
    "sum": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), labels, 100),
    "mean": (lambda o, t: F.cross_entropy(o, t, reduction="none").mean(), labels, 0),
    "torch's": (nn.CrossEntropyLoss(WEIGHT, ignore_index=0), labels, 0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_few_samples_show_a_wrong_loss(name):
    loss, make, least = LOSSES[name]
    generator, refused = torch.Generator().manual_seed(0), 0
    torch.manual_seed(0)
    check = loss_check(nn.Linear(8, 10), loss, CPU)
    for _ in range(100):
        batch = read_batch(torch.randn(32, 8, generator=generator), make(generator))
        try:
            assert check.loss_adds_up(few(loss, batch))
        except LossCheckError:
            refused += 1
    assert refused >= least and (refused == 0 or least > 0)


class Alone(nn.Linear):
    """Returns its loss alone; as its weights are zero, all samples cost the same."""

    def __init__(self, ignore_index=-100):
        super().__init__(8, 10)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.ignore_index = ignore_index

    def forward(self, x, y):
        return F.cross_entropy(super().forward(x), y, ignore_index=self.ignore_index)


def test_a_loss_alone_is_checked_by_the_gradient_by_parameters_that_no_hook_changes():
    generator = torch.Generator().manual_seed(0)
    batch = read_batch({"x": torch.randn(32, 8, generator=generator), "y": labels(generator)}, None)

    def adds_up(model):
        return loss_check(model, lambda loss: loss, CPU).loss_adds_up(few(None, batch))

    with pytest.raises(LossCheckError, match="another gradient by the parameters"):
        adds_up(Alone(ignore_index=0))
    model = Alone()
    model.weight.register_hook(lambda gradient: gradient / gradient.norm())
    assert adds_up(model)


def short_of_memory(number):
    """A mean that cannot be computed over `number` samples; and the numbers it was asked for."""
    asked = []

    def loss(outputs, targets):
        asked.append(len(outputs))
        if len(outputs) == number:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return F.mse_loss(outputs, targets)

    return loss, asked


def test_a_check_that_fails_is_made_three_times_for_each_loss():
    x, y = torch.randn(12, 8), torch.randn(12, 1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallel = DataParallel(model, None, optimizer, micro_batch=4)
    for _ in range(2):
        parallel.loss_fn, asked = short_of_memory(6)
        with pytest.warns(UserWarning, match="could not be checked whether") as told:
            for _ in range(6):
                parallel.step(x, y)
        assert asked.count(6) == 3 and [each.filename for each in told] == [__file__]


def test_the_cost_of_a_loss_whose_check_takes_too_much_memory():
    x, y = torch.randn(24, 8), torch.randn(24, 1)
    model, (loss, _) = nn.Linear(8, 1), short_of_memory(6)
    with pytest.warns(UserWarning, match="full_cost: it could not be checked") as told:
        cost = full_cost(model, (x, y), 12, loss_fn=loss)
    assert cost == pytest.approx(float(F.mse_loss(model(x), y).detach()))
    assert [each.filename for each in told] == [__file__]


class State(nn.Linear):
    """Keeps something of the samples it has seen, or of calls, outside BatchNorm."""

    def __init__(self, change):
        super().__init__(8, 1)
        self.change, self.norm, self.drop = change, nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("state", torch.zeros(8))

    def forward(self, x):
        x = self.norm(x)
        if self.training:
            self.change(self, x.detach())
        return super().forward(self.drop(x))


STATES = {
    "number": lambda model, x: model.state.add_(len(x)),
    "last": lambda model, x: model.state.copy_(x[-1]),
    "largest": lambda model, x: model.state.copy_(torch.maximum(model.state, x.amax(0))),
    "replaced": lambda model, x: setattr(model, "state", 0.9 * model.state + 0.1 * x.mean(0)),
    "data": lambda model, x: model.state.data.mul_(0.9).add_(x.mean(0)),
}


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_a_state_that_each_process_changes_by_its_samples_is_told(name, repeated):
    batch = read_batch(torch.randn(12, 8), torch.randn(12, 1))
    with pytest.warns(UserWarning, match="forward pass changes State.state"):
        Checks(State(STATES[name]), CPU, True, repeated).make(F.mse_loss, batch, None)
    count = State(lambda model, x: model.state.add_(1))
    Checks(count, CPU, True, False).make(F.mse_loss, batch, None)
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    model = nn.Sequential(nn.Unflatten(1, (2, 4)), norm, nn.Flatten(), nn.Linear(8, 1))
    with pytest.warns(UserWarning, match="forward pass changes 1.running_mean, 1.running_var"):
        Checks(model, CPU, True, repeated).make(F.mse_loss, batch, None)


@pytest.mark.parametrize("change", [STATES["replaced"], STATES["data"], None])
def test_a_model_that_micro_batches_change_is_named_once(change):
    class Compares(nn.Linear):
        def forward(self, x):
            return super().forward(x + self.training * x.mean(0))

    x, y = torch.randn(12, 8), torch.randn(12, 1)
    model = State(change) if change else Compares(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallel = DataParallel(model, F.mse_loss, optimizer, micro_batch=6)
    parallel.step(x[:6], y[:6])  # at once
    text = "changes State.state" if change else "depends on the other samples"
    with pytest.warns(UserWarning, match=text) as told:
        for number in (12, 7, 12):
            parallel.step(x[:number], y[:number])
    assert [each.filename for each in told] == [__file__]


def test_a_root_of_the_mean_of_two_or_one_sample_is_refused():
    def root(outputs, targets):
        return F.mse_loss(outputs, targets).sqrt()

    model, x, y = nn.Linear(8, 1), torch.randn(12, 8), torch.randn(12, 1)
    with pytest.raises(LossCheckError):
        optimizer = torch.optim.SGD(model.parameters())
        DataParallel(model, root, optimizer, micro_batch=1).step(x[:2], y[:2])
    with pytest.raises(LossCheckError):
        full_cost(model, (x, y), 1, loss_fn=root)
