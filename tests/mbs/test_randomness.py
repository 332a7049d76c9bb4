"""Two passes draw the same numbers, hidden states are found, hooks are called once."""

import copy
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_losses import arguments
from torch import nn

from repro.mbs import HookError, MicroBatchStreamer, MixedSamplesError, NondeterministicModelError

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(4, (20,), generator=torch.Generator().manual_seed(2))
PARTS = [(0, 5), (5, 10), (10, 15), (15, 20)]  # 20 in micro-batches of at most 6

SOURCES = {
    "python": (None, lambda generator: random.random()),
    "numpy": (None, lambda generator: np.random.rand()),  # noqa: NPY002
    "torch": (None, lambda generator: torch.rand(()).item()),
    "torch.Generator": (torch.Generator, lambda g: torch.rand((), generator=g).item()),
    "numpy.random.Generator": (lambda: np.random.default_rng(0), lambda g: g.random()),
    "numpy.random.RandomState": (lambda: np.random.RandomState(0), lambda g: g.rand()),
    "random.Random": (lambda: random.Random(0), lambda generator: generator.random()),
}


class Masking(nn.Module):
    """Masks features by random numbers drawn in `forward`, as Wav2Vec2 does from numpy."""

    def __init__(self, draw, generator):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4)
        self.draw, self.generator = draw, generator

    def forward(self, x):
        mask = torch.tensor([[self.draw(self.generator) < 0.6 for _ in row] for row in x])
        return self.linear(x * mask)


def seed():
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


def over_the_batch(outputs, targets):
    return F.cross_entropy(outputs, targets).sqrt()


def assert_same(model, plain):
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", SOURCES)
def test_two_passes_repeat_random_numbers_of_all_kinds(name):
    make, draw = SOURCES[name]
    plain = Masking(draw, make() if make else None)
    model = copy.deepcopy(plain) if make is None else Masking(draw, make())
    seed()
    over_the_batch(torch.cat([plain(X[a:b]) for a, b in PARTS]), Y).backward()
    after = states()
    seed()
    generators = [] if make is None else [model.generator]
    streamer = MicroBatchStreamer(model, over_the_batch, 6, two_pass=True, generators=generators)
    streamer.backward(X, Y)
    assert_same(model, plain)
    assert states() == after
    assert make is None or draw(model.generator) == draw(plain.generator)


def test_what_the_loss_draws_is_drawn_once():
    def loss_fn(outputs, targets):
        return over_the_batch(outputs, targets) * (1 + torch.rand(()))

    model = nn.Linear(6, 4)
    plain = copy.deepcopy(model)
    seed()
    loss_fn(plain(X), Y).backward()
    after = states()
    seed()
    MicroBatchStreamer(model, loss_fn, 6, two_pass=True, check="off").backward(X, Y)
    assert_same(model, plain)
    assert states() == after  # else the next mini-batch would have the same numbers


class Counting(nn.Module):
    """Anneals its outputs with each call: in a buffer, a new or replaced one, or an attribute."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4)
        self.kind, self.calls = kind, 0
        if kind != "new":
            self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if "count" not in self._buffers:
            self.register_buffer("count", torch.zeros(()))
        x = F.dropout(x) if self.kind == "differentiates" else x
        if self.kind == "later" and self.count:
            torch.autograd.grad(self.linear(x).sum(), self.linear.bias)
        if self.kind in ("buffer", "new", "differentiates", "later"):
            self.count.add_(1)
        elif self.kind == "replaced":
            self.count = self.count + 1
        else:
            self.calls += 1
        if self.kind == "differentiates":  # which fails without a graph
            torch.autograd.grad(self.linear(x).sum(), self.linear.bias)
        return self.linear(x) * (1 + 0.1 * (self.count + self.calls))


@pytest.mark.parametrize("kind", ["buffer", "new", "replaced", "differentiates", "later"])
def test_a_state_in_buffers_is_put_back_between_the_passes(kind):
    model, plain = Counting(kind), Counting(kind)
    seed()
    over_the_batch(torch.cat([plain(X[a:b]) for a, b in PARTS]), Y).backward()
    seed()
    told = pytest.warns(RuntimeWarning, match="changes count of Counting")
    with told if kind != "new" else nullcontext():  # which nothing had before
        MicroBatchStreamer(model, over_the_batch, 6, two_pass=True).backward(X, Y)
    assert_same(model, plain)
    assert model.count == plain.count == 4


class Turning(nn.Module):
    """Returns complex numbers, of which a hidden state changes the imaginary part."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 4), 0

    def forward(self, x):
        self.calls += 1
        y = self.linear(x)
        return torch.complex(y, self.calls * y.detach())


HIDDEN = {
    "a counter": lambda: Counting("attribute"),
    "an imaginary part": Turning,
    "a generator": lambda: Masking(lambda g: g.random(), np.random.default_rng(0)),  # not named
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_hidden_state_is_found(kind):
    model, before = HIDDEN[kind](), states()
    with pytest.raises(NondeterministicModelError, match=r"generators= .*such as a counter"):
        MicroBatchStreamer(model, lambda z, _: z.abs().sum(), 6, two_pass=True).backward(X, Y)
    assert model.linear.weight.grad is None and states() == before


class Averaged(nn.Module):
    """Compares with a copy of itself that its forward pass moves, from the second one on."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind = nn.Linear(6, 4), kind
        self.copy = copy.deepcopy(self.layer).requires_grad_(False)
        self.mean, self.calls, self.started = torch.zeros(4), 0, False

    def forward(self, x):
        h = self.layer(x)
        if self.kind == "parameter":
            with torch.no_grad():
                self.copy.weight.lerp_(self.layer.weight, 0.5)
            return h - self.copy(x)
        if self.kind == "data":  # which counts as no write
            self.copy.weight.data = self.copy.weight.lerp(self.layer.weight, 0.5).detach()
            return h - self.copy(x)
        if self.kind == "attribute":
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            return h - self.mean
        if self.kind == "flag":
            if not self.started:
                self.layer.bias.data.sub_(h.detach().mean(0))
                self.started = True
            return self.layer(x)
        self.calls += 1
        return h if self.calls < 6 else 2 * h  # later than any check


STATEFUL = {
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)),
    "counter in place": lambda: Counting("buffer"),  # as of a codebook
    "counter in a buffer": lambda: Counting("replaced"),
    "averaged copy": lambda: Averaged("parameter"),
    "averaged copy, assigned": lambda: Averaged("data"),
    "mean in an attribute": lambda: Averaged("attribute"),
    "first samples alone, by a flag": lambda: Averaged("flag"),  # as of ActNorm
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(6, 4),
    ),
    "counter": lambda: Averaged("number"),  # which changes what is computed later than any check
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_that_micro_batches_change_is_warned_of_once(name):
    torch.manual_seed(0)
    streamer = MicroBatchStreamer(STATEFUL[name](), F.cross_entropy, 6)
    with pytest.warns(RuntimeWarning, match="a forward pass changes") as caught:
        for _ in range(2):
            streamer.backward(X, Y)
    assert len(caught) == 1 and caught[0].filename == __file__
    # Undivided, or without the check, there is nothing to say.
    MicroBatchStreamer(STATEFUL[name](), F.cross_entropy, len(X)).backward(X, Y)
    MicroBatchStreamer(STATEFUL[name](), F.cross_entropy, 6, check="off").backward(X, Y)


class Mixing(nn.Linear):
    """Compares samples, in training alone or in episodes of eight."""

    def __init__(self, kind):
        super().__init__(6, 4)
        self.kind = kind

    def forward(self, x):
        h = super().forward(x)
        if self.kind == "episodes":
            assert len(h) % 8 == 0
            return h - h.reshape(-1, 8, 4).mean(0).repeat(len(h) // 8, 1)
        if not self.training:
            return h
        others = h[torch.randperm(len(h))] if self.kind == "mixup" else h.mean(0)
        return 0.7 * h + 0.3 * others


@pytest.mark.parametrize("kind", ["mean", "mixup", "episodes"])
def test_samples_that_are_compared_in_training_are_refused(kind):
    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randn(32, 4)
    model = Mixing(kind).eval()
    streamer = MicroBatchStreamer(model, F.mse_loss, 8)
    if kind != "episodes":
        streamer.backward(x, y)
    model.train()
    with pytest.raises(MixedSamplesError):
        streamer.backward(x, y)
    MicroBatchStreamer(Mixing(kind), F.mse_loss, 8, check="off").backward(x, y)


class Poisson(nn.Linear):
    """Draws by rejection: as many random numbers as its values need, by chance equally many."""

    def forward(self, x):
        h = super().forward(x)
        return h + torch.poisson(h.detach().exp())


@pytest.mark.filterwarnings("ignore:MicroBatchStreamer could not check")
def test_samples_that_draw_several_random_numbers_are_not_refused():
    for seed in range(10):
        torch.manual_seed(seed)
        x, y = torch.randn(16, 6), torch.randn(16, 2)
        MicroBatchStreamer(Poisson(6, 2), F.mse_loss, 8).backward(x, y)


class Groups(nn.Linear):
    """Compares the samples of groups of four, which micro-batches of eight leave whole."""

    def forward(self, x):
        h = super().forward(x).unflatten(0, (-1, 4))
        return (h - h.mean(1, keepdim=True)).flatten(0, 1)


class Slopes(nn.Linear):
    """Differentiates in its forward pass, which cannot be done without a graph."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        h = super().forward(x)
        return h + torch.autograd.grad(h.tanh().sum(), x, create_graph=True)[0][:, :4]


class Ordered(nn.Linear):
    """Takes samples that follow each other, as a few from all over the mini-batch do not."""

    def forward(self, x):
        assert bool((x[1:, 0] - x[:-1, 0] == 1).all())
        return super().forward(x)


def test_models_that_cannot_be_checked_are_named():
    x, y = torch.randn(32, 6), torch.randint(4, (32,))
    x[:, 0] = torch.arange(32)
    streamer = MicroBatchStreamer(Ordered(6, 4), F.cross_entropy, 8)
    with pytest.warns(RuntimeWarning, match="that the model treats samples one by one") as caught:
        streamer.backward(x, y)
        streamer.backward(x, y)
    assert len(caught) == 1 and caught[0].filename == __file__


class TimeFirst(nn.Module):
    """Returns its states with time first, of as many steps as two micro-batches have samples."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.RNN(6, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x):
        states = self.cell(x[:, None].expand(-1, 16, -1))[0]
        return self.head(states[:, -1]), states.transpose(0, 1)


class Adjacent(nn.Linear):
    """Mixes features by a sparse matrix, and has a number that equals nothing."""

    def __init__(self):
        super().__init__(6, 4)
        self.best = float("nan")
        self.register_buffer("adjacency", torch.eye(6).roll(1, 0).to_sparse())

    def forward(self, x):
        return super().forward((self.adjacency @ x.T).T)


class Forces(nn.Linear):
    """Returns the gradient of an energy by the inputs."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = super().forward(x).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


class Positions(nn.Linear):
    """Makes a buffer in its first call."""

    def __init__(self):
        super().__init__(6, 4)
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.register_buffer("positions", torch.arange(6.0))
            self.ready = True
        return super().forward(x + self.positions)


EXACT = [Slopes(6, 4), TimeFirst(), Adjacent(), Groups(6, 4), Forces(6, 4), Positions()]


@pytest.mark.parametrize("model", EXACT)
def test_what_is_exact_is_not_complained_of(model):
    x, y = torch.randn(32, 6), torch.randint(4, (32,))
    loss_fn = F.cross_entropy
    if isinstance(model, TimeFirst):
        loss_fn = lambda o, t: F.cross_entropy(o[0], t)  # noqa: E731
    loss_fn(model(x), y).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for two_pass in {False, not isinstance(model, TimeFirst)}:
        model.zero_grad()
        MicroBatchStreamer(model, loss_fn, 8, two_pass=two_pass).backward(x, y)
        got = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(got, expected)


def test_probes_refuse_what_they_cannot_put_back():
    with pytest.raises(NondeterministicModelError, match="changes weight of Linear"):
        MicroBatchStreamer(Averaged("parameter"), F.cross_entropy, "auto").backward(X, Y)


@pytest.mark.parametrize("kind", ["attribute", "number"])
def test_probes_put_attributes_back(kind):
    models = Averaged(kind), Averaged(kind)
    MicroBatchStreamer(models[0], F.cross_entropy, "auto").backward(X, Y)
    F.cross_entropy(models[1](X), Y).backward()
    assert torch.equal(models[0].layer.weight.grad, models[1].layer.weight.grad)
    assert torch.equal(models[0].mean, models[1].mean) and models[0].calls == models[1].calls


def test_a_layer_that_mixes_is_found_when_it_is_put_in():
    model = nn.Sequential(nn.Linear(6, 4))
    streamer = MicroBatchStreamer(model, F.cross_entropy, 6)
    streamer.backward(X, Y)
    model.append(Mixing("mean"))
    model[1].in_features, model[1].weight = 4, nn.Parameter(torch.randn(4, 4))
    with pytest.raises(MixedSamplesError):
        streamer.backward(X, Y)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def with_hooks(model, kind):
    """Register hooks that step or clamp in the backward pass."""
    for p in model.parameters():
        if kind == "clamp":
            p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            p.register_hook(lambda gradient: gradient * 2)  # after the other
        elif kind == "clamp in place":
            p.register_post_accumulate_grad_hook(lambda p: nn.utils.clip_grad_value_(p, 0.01))
        else:

            def step(p):
                p.data -= 0.5 * p.grad.sign()
                p.grad = None

            p.register_post_accumulate_grad_hook(step)


def test_a_hook_that_removes_itself_stays_away():
    model, calls = nn.Linear(6, 4), []

    def hook(gradient):
        calls.append(1)
        handle.remove()

    handle = model.weight.register_hook(hook)
    streamer = MicroBatchStreamer(model, F.cross_entropy, 6)
    for _ in range(3):
        streamer.backward(X, Y)
    assert len(calls) == 1


@pytest.mark.parametrize("form", ["whole", "pieces", "two_pass", "auto"])
@pytest.mark.parametrize("kind", ["clamp", "clamp in place", "step"])
def test_hooks_on_parameters_are_called_once_with_the_mini_batchs_gradient(kind, form):
    model, plain = make_model(), make_model()
    for each in (model, plain):
        with_hooks(each, kind)
        for p in each.parameters():
            p.grad = torch.full_like(p, 0.5) if kind != "step" else None
    F.cross_entropy(plain(X), Y).backward()
    size, two_pass = ("auto" if form == "auto" else 6), form == "two_pass"
    streamer = MicroBatchStreamer(model, F.cross_entropy, size, two_pass=two_pass)
    streamer.backward(*arguments(form, X, Y, 12))
    for _ in range(2):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            assert (p.grad is None) == (q.grad is None) == (kind == "step")
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
        for each in (model, plain):  # whose hooks stand as before
            each.zero_grad()
            F.cross_entropy(each(X), Y).backward()


def test_hooks_that_cannot_be_called_later_are_refused():
    model = make_model()
    handle = torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), print)
    streamer = MicroBatchStreamer(model, F.cross_entropy, 6)
    with pytest.raises(HookError, match="register_multi_grad_hook"):
        streamer.backward(X, Y)
    handle.remove()
    streamer.backward(X, Y)


def test_batchnorm_trains_where_a_rest_of_one_would_be_left():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    x, y = X.repeat(4, 1)[:65], Y.repeat(4)[:65]
    for size, count in ((64, 2), (16, 5), (4, 17)):
        streamer = MicroBatchStreamer(model, F.cross_entropy, size)
        assert streamer.backward(x, y).num_micro_batches == count
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        MicroBatchStreamer(model, F.cross_entropy, 2).backward(x, y)
    assert "2 leaves one of an odd number" in caught.value.__notes__[0]
