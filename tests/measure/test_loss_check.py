"""Losses that chance or memory decides are not refused."""

import itertools
import math
import random
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from repro.measure.batches import Sample, read_batch
from repro.measure.loss_check import LossCheck
from repro.measure.loss_parts import LossCheckError, MixedSamplesError
from repro.measure.untouched import untouched

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")


def sample(first=3, x=X):
    groups = list(range(first)), list(range(first, 8))
    return Sample.of(read_batch(x, x[:, :1]), groups, [float(len(g)) for g in groups], True)


def check_of(loss):
    model = nn.Linear(3, 1)
    return LossCheck(model, [model], loss, CPU, nullcontext)


DRAWS = {"torch": lambda: torch.rand(()), "python": random.random, "none": lambda: None}
DRAWS["numpy"] = lambda: np.random.get_bit_generator().random_raw()


@pytest.mark.parametrize("draw", DRAWS)
def test_a_random_term_that_comes_rarely_is_no_fault(draw):
    calls = []

    def loss(outputs, targets):
        calls.append(DRAWS[draw]())
        return (outputs - targets).square().mean() + (len(calls) == 4)  # in one part alone

    with pytest.raises(LossCheckError) if draw == "none" else nullcontext():
        check_of(loss).loss_adds_up(sample())


def kl(outputs, targets):
    return F.kl_div(outputs.log_softmax(1), targets.softmax(1), reduction="sum") / len(outputs)


def rms(outputs, targets):
    return (outputs - targets).square().mean().sqrt()


def scaled(outputs, targets):
    return kl(outputs, targets) * (1 + outputs[:, 0].sum())


@pytest.mark.parametrize("loss", [kl, rms, scaled])
def test_a_gradient_of_rounding_errors_alone_is_no_fault_and_hides_none(loss):
    """As of a student that begins as its teacher's copy."""
    model, x = nn.Linear(3, 10), torch.randn(48, 3)
    groups = list(range(16)), list(range(16, 48))
    given = Sample.of(read_batch(x, model(x).detach()), groups, [16.0, 32.0], True)
    check = LossCheck(model, [model], loss, CPU, nullcontext)
    with nullcontext() if loss is kl else pytest.raises(LossCheckError):
        assert check.loss_adds_up(given)


class Similarity(torch.autograd.Function):
    """A kernel of one's own, for operands of one dtype."""

    @staticmethod
    def forward(ctx, outputs, prototypes):
        ctx.save_for_backward(prototypes)
        return torch.ops.aten.mm(outputs, prototypes.t())

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0], None


@torch.autocast("cpu", torch.bfloat16)
def projected(outputs):
    return F.linear(outputs, torch.eye(3)).float()


PROTOTYPES, WEIGHTS = X[:4].bfloat16(), torch.tensor([1, 1.1, 1]).bfloat16()
LOG = torch.zeros(3).bfloat16()
RNN = nn.RNN(3, 2, batch_first=True).bfloat16()


def logged(outputs, targets):
    LOG.mul_(0.9).add_(outputs.detach()[0], alpha=0.1)
    return F.cross_entropy(outputs, targets.argmax(1), weight=WEIGHTS.to(outputs.dtype))


ROUNDING = {  # also where the model and its outputs are of float32
    "in place": lambda y, t: torch.zeros_like(t).bfloat16().copy_(t).mul_(y).float().mean(),
    "autocast": lambda y, t: F.mse_loss(projected(y), t.float()),
    "value": lambda y, t: F.mse_loss(y, t).bfloat16(),
    "wrong: rounded": lambda y, t: F.cross_entropy(y.half().float(), t.argmax(1), WEIGHTS.float()),
}
HALVES = ROUNDING | {
    "operand": lambda y, t: F.cross_entropy(y @ PROTOTYPES.t(), t.argmax(1)),
    "function": lambda y, t: F.cross_entropy(Similarity.apply(y, PROTOTYPES), t.argmax(1)),
    "rnn": lambda y, t: RNN(y.bfloat16()[:, None])[0].mean(),
    "targets": lambda y, t: F.huber_loss(y, t.bfloat16()),
    "wrong: logged": logged,
    "wrong: weights": lambda y, t: F.cross_entropy(y, t.argmax(1), weight=WEIGHTS),
    "wrong: pairs": lambda y, t: F.cross_entropy(y @ t.bfloat16().t(), torch.arange(len(t))),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [*itertools.product(["bfloat16", "autocast"], HALVES), *(("float32", n) for n in ROUNDING)],
)
def test_half_precision_within_a_loss_is_no_fault_and_hides_none(kind, name):
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    context = partial(torch.autocast, "cpu", torch.bfloat16) if kind == "autocast" else nullcontext
    model, x = nn.Linear(3, 3).to(dtype), X.to(dtype)
    check = LossCheck(model, [model], HALVES[name], CPU, nullcontext, context)
    given = Sample.of(read_batch(x, x), (range(3), range(3, 8)), [3.0, 5.0], True)
    with pytest.raises(LossCheckError, match="no mean") if "wrong" in name else nullcontext():
        assert check.outputs_add_up(given, math.inf)


class Half(nn.Module):
    """Computes in half precision and returns float32."""

    def __init__(self, inside):
        super().__init__()
        self.rnn = nn.GRU(3, 16, batch_first=True).to(torch.float32 if inside else torch.bfloat16)
        self.inside = inside

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16) if self.inside else nullcontext():
            return self.rnn(x if self.inside else x.bfloat16())[0][:, -1].float()


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_within_a_model_hides_no_mixing(autocast):
    class Mixing(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = super().forward(x).float()
            self.log = y.detach().bfloat16()
            return y - 0.05 * y.mean(0)

    model = Mixing(3, 3)
    check = LossCheck(model, [model], F.mse_loss, CPU, partial(untouched, model))
    with pytest.raises(MixedSamplesError):
        check.samples_stay_apart(sample())


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_in_half_precision_mixes_no_samples_and_hides_no_loss(inside):
    model, x = Half(inside), torch.randn(30, 9, 3)
    weights = 1 + torch.arange(16) / 80
    loss = lambda y, t: F.cross_entropy(y, t, weight=weights)  # noqa: E731
    check = LossCheck(model, [model], loss, CPU, partial(untouched, model))
    for n in range(29):
        batch = read_batch(x, torch.arange(30) // 6)
        assert check.samples_stay_apart(Sample.of(batch, ([n], [n + 1]), [1.0, 1.0], True))
    given = Sample.of(batch, (range(10), range(10, 30)), [10.0, 20.0], True)
    with pytest.raises(LossCheckError, match="no mean"):
        check.outputs_add_up(given, math.inf)


@pytest.mark.parametrize("used", [False, True])
def test_random_numbers_that_a_loss_does_not_use_hide_no_fault(used):
    def loss(outputs, targets):
        term = used * torch.rand(())
        return (outputs - targets).square().mean().sqrt() + term

    torch.manual_seed(0)
    with nullcontext() if used else pytest.raises(LossCheckError):
        assert not check_of(loss).loss_adds_up(sample())


def test_a_lack_of_memory_is_the_callers():
    def loss(outputs, targets):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        check_of(loss).loss_adds_up(sample())


@pytest.mark.parametrize("coin", ["0010010010", "0000100100100100"])
def test_chance_that_no_generator_tells_of_is_no_mixing(coin):
    """As of `random.SystemRandom`, which by chance decides twice alike."""
    tosses = itertools.cycle(map(int, coin))

    class Skipping(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1 + next(tosses))

    model = Skipping(3, 1)
    assert LossCheck(model, [model], F.mse_loss, CPU, nullcontext).samples_stay_apart(sample())


def test_outputs_that_cannot_be_detached_are_not_judged():
    check = check_of(lambda outputs, targets: -outputs.log_prob(targets).mean())
    check.model.register_forward_hook(lambda *given: torch.distributions.Normal(given[-1], 1.0))
    assert not check.loss_reads_outputs(sample())


class Outputs(nn.Linear):
    """A layer with a function of its inputs and outputs."""

    def __init__(self, function):
        super().__init__(3, 3)
        self.function, self.generator = function, np.random.default_rng(0)

    def forward(self, x):
        return self.function(self, x, super().forward(x))


def noise(module, x, y):
    return y * torch.as_tensor(module.generator.random((len(x), 1)), dtype=torch.float32)


MASK = torch.tensor([True, False, False])
MIXING = {
    "mean": lambda m, x, y: y - y.mean(0),
    "later": lambda m, x, y: y.flip(0).cumsum(0).flip(0),
    "next": lambda m, x, y: y - torch.cat([y[1:], 0 * y[:1]]),
    "last": lambda m, x, y: y - y[-1:],
    "number": lambda m, x, y: y * len(y),
    "list": lambda m, x, y: list(y * len(y)),
    "dropout": lambda m, x, y: F.dropout(y * len(y), 0.5, m.training),
    "masked": lambda m, x, y: (y * len(y)).masked_fill(MASK, -torch.inf),
    "masked by a number": lambda m, x, y: (y * len(y)).masked_fill(MASK, -1e9),
    "complex": lambda m, x, y: torch.complex(y, y * len(y)),
}
APART = {
    "list": lambda m, x, y: list(y),
    "dictionaries": lambda m, x, y: [{"a": each, "b": each[:2]} for each in y],
    "dropout": lambda m, x, y: F.dropout(y, 0.1),
    "unused number": lambda m, x, y: (torch.rand(()), y)[1],
    "own numbers": noise,
    "one number": lambda m, x, y: y * torch.rand(()),
    "matrix": lambda m, x, y: (y, m.weight),
    "masked": lambda m, x, y: y.masked_fill(MASK, torch.nan),
    "complex": lambda m, x, y: torch.complex(y, y),
}


@pytest.mark.parametrize("first", [1, 2, 4, 7])
@pytest.mark.parametrize("name", MIXING)
def test_samples_alone_show_a_model_that_sees_their_number_or_the_last(name, first):
    with pytest.raises(MixedSamplesError, match="depends on the other samples beside it"):
        restored(Outputs(MIXING[name])).samples_stay_apart(sample(first))


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("first", [1, 2, 4, 7])
def test_random_numbers_and_lists_of_samples_raise_no_alarm(name, first):
    torch.manual_seed(0)
    assert restored(Outputs(APART[name])).samples_stay_apart(sample(first))


@pytest.mark.parametrize("seed", [0, 1, 9, 55])  # 9, 55: as many steps in all
@pytest.mark.parametrize("kind", ["RReLU", "packed", "chosen"])
def test_random_numbers_for_some_elements_alone_raise_no_alarm(kind, seed):
    torch.manual_seed(seed)
    x = torch.randn(8, 3)
    chosen = lambda m, x, y: y.masked_scatter(x > 0, F.dropout(y[x > 0], 0.5, m.training))  # noqa: E731
    packed = nn.GRU(1, 3, num_layers=2, dropout=0.5)  # of samples of one to four steps
    steps = lambda row: row[: 1 + int((row > 0).sum()), None]  # noqa: E731
    packed.register_forward_pre_hook(lambda m, x: (pack_sequence([*map(steps, x[0])], False),))
    packed.register_forward_hook(lambda m, x, outputs: outputs[1][-1])
    models = {"packed": packed, "chosen": Outputs(chosen)}
    model = models.get(kind) or nn.Sequential(nn.Linear(3, 3), nn.RReLU())
    assert restored(model).samples_stay_apart(sample(4, x))


def restored(model):
    undone = partial(untouched, model)
    return LossCheck(model, list(model.modules()), None, CPU, undone)
