import copy
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from repro import adaptive
from repro.adaptive import full_cost, gradient_norms, max_stable_batch, noise_scale, stable_batch
from repro.datasets import TensorLoader


def least_squares(noise=1.0):
    """A linear model in float64 and data y = x·v + noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    y += noise * torch.randn(64, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(6, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(1, 6, generator=generator))
    return model, x, y


class TwoBiases(nn.Module):
    """Both biases get the same gradient, of autograd the very same tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 1, bias=False)
        self.one, self.other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return F.linear(x, self.linear.weight, self.one + self.other)


def each_of(model, x, y):
    """Gradients of single samples, (N, parameters), by a backward pass for each."""
    rows = []
    for a, b in zip(x, y, strict=True):
        twin = copy.deepcopy(model)
        F.mse_loss(twin(a[None]), b[None]).backward()
        grads = [p.grad for p in twin.parameters() if p.grad is not None]
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


class Writing(torch.autograd.Function):
    """A linear layer that adds its weight's gradient to `grad` itself, as reversible blocks do."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(ctx.saved_tensors[0]), gradient)
        return gradient @ ctx.layer.weight, None


class Reversible(nn.Sequential):
    def forward(self, x):
        return self[1](Writing.apply(x.requires_grad_(), self[0]))


def one_by_one(model, x, y):
    """|G|² and the unbiased tr(Σ)."""
    each = each_of(model, x, y)
    return float(each.mean(0).square().sum()), float(each.var(0).sum())


class TestNorms:
    def test_are_those_of_mini_batches_without_a_sample_twice(self):
        model, x, y = least_squares()
        each = each_of(model, x, y)[torch.randperm(64, generator=torch.Generator().manual_seed(5))]
        sizes, options = np.array([64, 1, 8]), {"loss_fn": F.mse_loss, "seed": 5}
        measured = gradient_norms(model, (x, y), sizes, batches=64, **options)
        assert [norm.batch_size for norm in measured] == [1, 8, 64]
        for norm in measured:
            norms = each.unflatten(0, (-1, norm.batch_size)).mean(1).norm(dim=1)
            error = float(norms.std()) / len(norms) ** 0.5 if len(norms) > 1 else math.nan
            assert norm.mean == pytest.approx(float(norms.mean()), rel=1e-12)
            assert norm.error == pytest.approx(error, rel=1e-12, nan_ok=True)
        total = nn.MSELoss(reduction="sum")  # of which the mean is meant
        assert gradient_norms(model, (x, y), sizes, batches=64, loss_fn=total, seed=5) == [
            adaptive.GradientNorm(norm.batch_size, *map(pytest.approx, (norm.mean, norm.error)))
            for norm in measured[:2]
        ] + [
            adaptive.GradientNorm(
                64, pytest.approx(measured[2].mean), pytest.approx(math.nan, nan_ok=True)
            )
        ]
        # Numpy's sizes are as good as Python's.
        scales = [noise_scale(model, (x, y), kind(8), **options) for kind in (int, np.int64)]
        assert scales[0] == scales[1]


class TestStableBatch:
    def test_ends_before_the_first_norm_that_is_lower(self):
        norms = [adaptive.GradientNorm(b, mean, 0.0) for b, mean in [(8, 2.0), (16, 1.9), (32, 1.7),
                                                            (64, 1.9), (128, 2.5)]]  # fmt: skip
        assert stable_batch(norms) == 16 and stable_batch(norms[::-1]) == 16
        assert stable_batch(norms, 0.15) == 128 and stable_batch(norms, 0.0) == 8
        assert stable_batch(norms[:1], 0.0) == 8


class TestNoiseScale:
    @pytest.mark.parametrize("kind", ["linear", "two biases", "reversible"])
    @pytest.mark.parametrize("noise", [0.1, 5.0])
    def test_of_single_samples_is_exact(self, kind, noise):
        model, x, y = least_squares(noise=noise)
        model = TwoBiases().double() if kind == "two biases" else model
        if kind == "reversible":
            model = Reversible(nn.Linear(6, 3), nn.Linear(3, 1)).double()
        square, trace = one_by_one(model, x, y)
        # All 64 samples were drawn, so that the large batch's square is |G|², of which the
        # unbiased estimate takes away what of it is noise.
        wanted = trace / (square - trace / 64)
        scale = noise_scale(model, (x, y), 1, loss_fn=F.mse_loss, batches=64)
        assert scale == pytest.approx(wanted, rel=1e-9)

    def test_limits(self):
        """Of samples that agree, and of noise alone; of the largest stable batch, too."""
        model, x, y = least_squares()
        same = (x[:1].expand(64, -1), y[:1].expand(64, -1))
        assert noise_scale(model, same, 4, loss_fn=F.mse_loss) == pytest.approx(0, abs=1e-12)
        assert max_stable_batch(model, same, [2, 8, 32], loss_fn=F.mse_loss) == 32
        with torch.no_grad():
            model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)  # there G is 0
        assert max_stable_batch(model, (x, y), [2, 8, 32], loss_fn=F.mse_loss) == 2
        assert noise_scale(model, (x, y), 1, loss_fn=F.mse_loss, batches=64) == math.inf
        assert math.isnan(noise_scale(model, (x * math.nan, y), 1, loss_fn=F.mse_loss))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_of_half_precision_is_summed_in_single(self, dtype):
        torch.manual_seed(0)
        x = torch.randn(4096, 16) + 1
        data, model = (x.to(dtype), x.sum(1, keepdim=True).to(dtype) + 2), nn.Linear(16, 1)
        found = [
            noise_scale(m, (d[0], d[1]), 8, loss_fn=F.mse_loss, batches=512)
            for m, d in (
                (copy.deepcopy(model), [each.float() for each in data]),
                (model.to(dtype), data),
            )
        ]
        assert found[1] == pytest.approx(found[0], rel=0.01)
        steep = torch.full((4, 16), 2e4, dtype=dtype)  # its squares are beyond float16
        norm = gradient_norms(model, (steep, steep[:, :1]), [4], loss_fn=lambda o, t: o.mean())
        assert norm[0].mean == pytest.approx(8e4, rel=0.01)


class TestFullCost:
    def test_is_of_training_mode(self):
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)).double().eval()
        _, x, y = least_squares()
        normal = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
        wanted = float(F.mse_loss(model[1](normal), y).detach())
        assert full_cost(model, (x, y), 64, loss_fn=F.mse_loss) == pytest.approx(wanted)

    def test_wrong_sizes_and_data(self):
        model, x, y = least_squares()
        for measure, data, size, message in (
            *((gradient_norms, (x, y), sizes, "give at least one size, distinct")
              for sizes in ([], [4, 4], [0, 4], [2.5])),
            (gradient_norms, (x, y), [65], "a batch size of 65; give .* a size of 1 to 64"),
            (noise_scale, (x, y), 40, "at least 2 mini-batches, and there is 1 of 40 samp"),
            (full_cost, (x[:0], y[:0]), 4, "the cost of 0 mini-batches is nan"),
            (full_cost, (x, y), 0, "a batch size of 0; give"),
            (full_cost, (x, y[:63]), 5, "64 inputs, 63 targets"),
            (full_cost, (x, y[:, :1, None]), 5, "compare each sample with every other"),
            (max_stable_batch, [(x, y)] * 3, [2, 4], "data is a list; give a pair of tensors"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=message):
                measure(model, data, size, loss_fn=F.mse_loss)
        with pytest.raises(ValueError, match="no norm to compare"):
            stable_batch([])
        with pytest.raises(adaptive.DivergedError, match="norms are not finite"):
            max_stable_batch(model, (x * math.nan, y), [2, 4], loss_fn=F.mse_loss)


def test_layers_in_evaluation_stay_so_while_the_model_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    x, y = torch.randn(60, 3), torch.randn(60, 1)
    model(x + 1)  # other statistics than the data's
    model[0].eval()
    wanted = F.mse_loss(model(x), y)
    assert full_cost(model, (x, y), 60, loss_fn=F.mse_loss) == pytest.approx(wanted.item())
    gradients = torch.autograd.grad(wanted, [*model.parameters()])
    (norm,) = gradient_norms(model, (x, y), [60], loss_fn=F.mse_loss)
    assert norm.mean == pytest.approx(float(nn.utils.get_total_norm(gradients)))
    assert not model[0].training


def picture_loss(outputs, targets):
    return F.mse_loss(outputs, targets[:, None].float())


def pictures(**options):
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(256, (30, 1, 3, 2), generator=generator, dtype=torch.uint8)
    return TensorLoader(images, torch.randint(5, (30,), generator=generator), 7, seed=1, **options)


class TestLoader:
    def test_gives_what_its_samples_give(self):
        loader = pictures()
        torch.manual_seed(0)
        model, batches = nn.Sequential(nn.Flatten(), nn.Linear(6, 1)), list(loader)
        x = torch.cat([b[0] for b in batches]).flatten(1)
        y = torch.cat([b[1] for b in batches])[:, None].float()
        square, trace = one_by_one(model[1], x, y)
        loader.set_epoch(0)
        wanted = float(F.mse_loss(model(x), y).detach())
        assert full_cost(model, loader, 8, loss_fn=picture_loss) == pytest.approx(wanted, rel=1e-5)
        options = {"loss_fn": picture_loss, "batches": 30}
        (norm,) = gradient_norms(model, loader, [30], **options)
        assert norm.mean == pytest.approx(square**0.5, rel=1e-5)
        scale = noise_scale(model, loader, 1, **options)
        assert scale == pytest.approx(trace / (square - trace / 30), rel=1e-4)

    def test_is_as_it_was(self):
        loader, untouched = pictures(), pictures()
        model = nn.Sequential(nn.Flatten(), nn.Linear(6, 1))
        for each in (loader, untouched):
            list(each)
        gradient_norms(model, loader, [2, 30], loss_fn=picture_loss)
        full_cost(model, loader, 5, loss_fn=picture_loss)
        with pytest.raises(ValueError, match=r"31"):
            gradient_norms(model, loader, [31], loss_fn=picture_loss)
        assert (loader.batch_size, loader.epoch) == (7, 1)
        for one, other in zip(loader, untouched, strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


MEASURES = {
    "norms": lambda m, data, loss: gradient_norms(m, data, [4, 16], loss_fn=loss),
    "noise": lambda m, data, loss: noise_scale(m, data, 4, loss_fn=loss),
    "cost": lambda m, data, loss: full_cost(m, data, 5, loss_fn=loss),
}


class Busy(nn.Module):
    """Changes something in its forward pass."""

    def __init__(self, change):
        super().__init__()
        self.change, self.calls, self.rng = change, 0, np.random.default_rng(0)
        self.table = nn.Embedding(64, 6, max_norm=0.5)
        self.linear = nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("wide", torch.zeros(1).expand(6))
        self.queue, self.kept = [torch.zeros(6)], {"mean": torch.zeros(6)}
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        # Nothing can be put back in these.
        self.held = np.broadcast_to(np.zeros(1), 3), ragged, random.SystemRandom()

    def forward(self, x):
        x = x.float()
        self.change(self, x)
        return self.linear(x - self.mean).double()


def fill_lists(model, x):
    model.queue.append(x.mean(0))
    model.queue[0] += 1
    model.kept["mean"] = x.mean(0)
    model.calls += 1


def write_data(model, x):
    model.mean.data.add_(1)
    model.linear.weight.data = model.linear.weight.data * 0.9


def draw(model, x):
    for each in (np.random.rand, random.random, model.rng.random, lambda: torch.rand(1)):
        each()


BUSY = {
    "replaced": lambda model, x: setattr(model, "mean", 0.9 * model.mean + 0.1 * x.mean(0)),
    "added": lambda model, x: model.register_buffer("last", x.mean(0), persistent=False),
    "lists": fill_lists,
    "data": write_data,
    "draws": draw,
    "max_norm": lambda model, x: model.table(torch.arange(8)),
    "gradients": lambda model, x: model.linear(x).sum().backward(),
}


def all_of(model):
    """Return what a forward pass may change, to the last bit and object."""
    values = [model.calls, model.rng.bit_generator.state, random.getstate()]
    of_numpy = np.random.get_state()  # noqa: NPY002
    values += [repr(of_numpy), bytes(torch.get_rng_state().numpy())]
    values += [[m.training for m in model.modules()]]
    tensors = [*model.queue, *model.kept.values(), *model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    values += [[id(t) for t in tensors], [t.tolist() for t in tensors]]
    return values


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("change", BUSY)
@pytest.mark.parametrize("fails", [False, True])
def test_whatever_a_forward_pass_changes_is_put_back(name, change, fails):
    torch.manual_seed(0)
    model = Busy(BUSY[change]).eval()
    model.table.train()
    _, x, y = least_squares()
    model.linear.weight.grad = torch.ones(1, 6)
    calls, before, modes = [], all_of(model), set()

    def loss(outputs, targets):
        calls.append(1)
        modes.add(model.training)
        if fails and len(calls) == 2:
            raise KeyError("loss")
        return F.mse_loss(outputs, targets)

    if fails:
        with pytest.raises(KeyError):
            MEASURES[name](model, (x, y), loss)
    else:
        first = MEASURES[name](model, (x, y), loss)
        assert MEASURES[name](model, (x, y), loss) == first  # of the seed's random numbers
    assert all_of(model) == before and modes == {True}


@pytest.mark.parametrize("name", MEASURES)
def test_the_modules_of_a_loss_are_put_back(name):
    class Counts(nn.MSELoss):
        def forward(self, outputs, targets):
            self.calls += 1
            return super().forward(outputs, targets)

    model, x, y = least_squares()
    loss = Counts()
    loss.calls = nn.Buffer(torch.zeros(()))
    MEASURES[name](model, (x, y), lambda o, t: loss(o, t))
    assert loss.calls == 0


def test_what_cannot_be_put_back_hinders_nothing_else():
    model, data = Busy(fill_lists).eval(), least_squares()[1:]
    model.fixed = np.zeros(2)
    model.linear.weight.grad = torch.ones(1, 6)

    def loss(outputs, targets):
        model.fixed.flags.writeable = False
        return F.mse_loss(outputs, targets)

    before = all_of(model)
    with pytest.raises(ValueError, match="read-only"):
        full_cost(model, data, 60, loss_fn=loss)
    assert all_of(model) == before


LABELS = torch.arange(60) % 3
CLASSES = torch.tensor([1.0, 5.0, 50.0])
COSTS = {
    "ignored": (nn.CrossEntropyLoss(), torch.where(torch.arange(60) < 25, -100, LABELS)),
    "class weights": (nn.CrossEntropyLoss(CLASSES), LABELS),
    "bytes": (nn.CrossEntropyLoss(CLASSES, ignore_index=-255), LABELS.to(torch.uint8)),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), LABELS),
    "function": (partial(F.cross_entropy, weight=CLASSES, ignore_index=1), LABELS),
    "own": (lambda o, t: F.cross_entropy(o, t) + o.square().mean(), LABELS),
}


class TestCostsOfLosses:
    @pytest.mark.parametrize("name", COSTS)
    @pytest.mark.parametrize("size", [7, 20])
    def test_are_those_of_the_whole(self, name, size):
        loss, y = COSTS[name]
        torch.manual_seed(0)
        model, x = nn.Linear(8, 3), torch.randn(60, 8)
        wanted = float(loss(model(x), y).detach())
        assert full_cost(model, (x, y), size, loss_fn=loss) == pytest.approx(wanted, rel=1e-5)
        batches = [(x[a:b], y[a:b]) for a, b in ((0, size), (size, size), (size, 60))]
        assert full_cost(model, batches, size, loss_fn=loss) == pytest.approx(wanted, rel=1e-5)

    @pytest.mark.parametrize("of", [lambda t: t != -100, lambda t: t > 1])
    def test_of_a_loss_that_is_no_mean_over_samples_are_refused(self, of):
        def loss(outputs, targets):
            return F.cross_entropy(outputs[of(targets)], targets[of(targets)])

        y = torch.where(torch.arange(60) < 50, LABELS, -100)
        with pytest.raises(adaptive.LossCheckError, match=r"full_cost adds up.*cost yo") as caught:
            full_cost(nn.Linear(8, 3), (torch.randn(60, 8), y), 15, loss_fn=loss)
        assert "weights=" not in str(caught.value) and "check=" not in str(caught.value)

    def test_of_a_loss_that_weighs_mini_batches_unlike_are_refused(self):
        def loss(outputs, targets):  # a mean over tokens that are not ignored
            return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

        torch.manual_seed(0)
        x, y = torch.randn(24, 4, 3), torch.randint(3, (24, 4))
        y[:8, 1:], y[8:16, 2:] = -100, -100  # sorted by length: equally many in each mini-batch
        with pytest.raises(adaptive.LossCheckError, match=r"full_cost adds up mini-batches by"):
            full_cost(nn.Linear(3, 3), (x, y), 8, loss_fn=loss)

    def test_of_mini_batches_of_unequal_lengths_are_the_mean_over_all_elements(self):
        torch.manual_seed(0)
        batches = [tuple(s * torch.randn(2, 4, t, 3)) for t, s in ((2, 0.3), (40, 2.0), (5, 1.0))]
        model = nn.Linear(3, 3)
        errors = [(model(x) - y).detach().square().flatten() for x, y in batches]
        wanted = float(torch.cat(errors).mean())
        assert full_cost(model, batches, 4, loss_fn=F.mse_loss) == pytest.approx(wanted)
        # Probabilities of three classes at each of t places.
        batches = [(x.mT, y.softmax(-1).mT) for x, y in batches]
        each = [F.cross_entropy(*pair, reduction="none").flatten() for pair in batches]
        wanted = float(torch.cat(each).mean())
        assert full_cost(nn.Identity(), batches, 4) == pytest.approx(wanted)

    def test_of_a_list_of_targets_for_each_sample(self):
        x, boxes = torch.randn(24, 8), [torch.randn(6, 4) for _ in range(24)]
        loss = lambda o, t: (o[:, :4] - torch.stack(t).mean(1)).square().mean()  # noqa: E731
        model = nn.Linear(8, 4)
        wanted = float(loss(model(x), boxes).detach())
        batches = [(x[a : a + 8], boxes[a : a + 8]) for a in (0, 8, 16)]
        assert full_cost(model, batches, 8, loss_fn=loss) == pytest.approx(wanted)

    @pytest.mark.parametrize("size", [20, 60])
    def test_of_no_target_or_a_model_that_diverged_are_refused(self, size):
        model, data = nn.Linear(8, 3), (torch.randn(60, 8), torch.full((60,), -100))
        with pytest.raises(ValueError, match=r"mini-batches is nan: every target is ignored"):
            full_cost(model, data, size)
        with torch.no_grad():
            model.weight[0, 0] = math.nan
        with pytest.raises(adaptive.DivergedError, match=r"parameters are not finite"):
            full_cost(model, (data[0], LABELS), size)


class TestModelsOfOtherKinds:
    def test_sparse_gradients_are_measured_as_dense_ones(self):
        def model(sparse):
            torch.manual_seed(0)
            return nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Flatten(), nn.Linear(20, 3))

        data = torch.randint(9, (64, 5)), torch.arange(64) % 3
        assert noise_scale(model(True), data, 8) == noise_scale(model(False), data, 8)

    @pytest.mark.parametrize("name", MEASURES)
    def test_what_cannot_be_measured_is_said_in_words(self, name):
        _, x, y = least_squares()
        with pytest.raises(ValueError, match=r"0.weight, 0.bias of the model have no shape yet"):
            MEASURES[name](nn.Sequential(nn.LazyLinear(1)), (x, y), F.mse_loss)
        if name != "cost":
            frozen = nn.Linear(6, 1).requires_grad_(False)
            with pytest.raises(ValueError, match=r"no parameter that requires a gradient"):
                MEASURES[name](frozen, (x, y), F.mse_loss)
            model = nn.Linear(6, 1).double()
            model.forward = partial(checkpoint, model.forward, use_reentrant=True)
            with pytest.raises(ValueError, match=r"give it use_reentrant=False"):
                MEASURES[name](model, (x.clone().requires_grad_(), y), F.mse_loss)


def test_norms_of_a_sharded_model_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        _, x, y = least_squares()
        model = fully_shard(nn.Linear(6, 1).double(), mesh=mesh)
        assert full_cost(model, (x, y), 5, loss_fn=F.mse_loss) > 0
        for name in ("norms", "noise"):
            with pytest.raises(ValueError, match=r"the model is fully sharded: measure it before"):
                MEASURES[name](model, (x, y), F.mse_loss)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", MEASURES)
def test_a_model_that_differentiates_is_measured_without_a_graph_around(name):
    class Slope(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1  # of which a call without a graph is none
            x = self.calls * x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
            return slope

    torch.manual_seed(0)
    model, x = Slope(6, 1), torch.randn(64, 6)
    wanted = MEASURES[name](model, (x, x), F.mse_loss)
    with torch.no_grad():
        assert MEASURES[name](model, (x, x), F.mse_loss) == wanted
    if name == "cost":
        sums = [len(a) * F.mse_loss(model(a), a).detach() for a in x.split(5)]
        assert wanted == pytest.approx(float(sum(sums) / 64))


def test_inputs_of_any_structure():
    class Two(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x * scale)

    model, x, y = Two(3, 2), torch.randn(10, 3), torch.randint(2, (10,))
    loader = [({"x": x[a:b], "scale": x[a:b, :1]}, y[a:b]) for a, b in ((0, 4), (4, 10))]
    wanted = float(F.cross_entropy(model(x, x[:, :1]), y).detach())
    assert full_cost(model, loader, 1) == pytest.approx(wanted)
