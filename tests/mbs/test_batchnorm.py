import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from test_losses import arguments
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from repro.mbs import MicroBatchStreamer
from repro.mbs.transaction import Buffers


def batch(num_samples=20, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = 3 + 2 * torch.randn(num_samples, 5, 3, 2, generator=generator, dtype=dtype)
    return x, torch.randn(num_samples, 5, 3, 2, generator=generator, dtype=dtype)


def streamer(model, micro, **options):
    # A loss that is checked, with forward passes of its own.
    loss_fn = lambda outputs, targets: F.mse_loss(outputs, targets)  # noqa: E731
    return MicroBatchStreamer(model, loss_fn, micro, batchnorm="deferred", **options)


def assert_same_buffers(model, other, rtol=1e-12):
    for (name, b), c in zip(model.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(b, c, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


class Own(nn.BatchNorm2d):
    """As libraries have, with an activation for example."""


class Views(nn.Sequential):
    """Calls its layer for each of two views, as siamese networks do."""

    def forward(self, x):
        return self[0](x) + self[0](2 * x + 1)


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("micro", [1, 16])
@pytest.mark.parametrize("form", ["whole", "pieces", "two_pass", "views", "views, pieces"])
def test_deferred_statistics_are_the_full_batchs(form, micro, momentum):
    model = Own(5, momentum=momentum).double()
    model = Views(model) if "views" in form else model
    full = copy.deepcopy(model)
    stream = streamer(model, micro, two_pass=form == "two_pass")
    for num_samples in (20, 7, 13):
        x, y = batch(num_samples)
        full(x)
        stream.backward(*arguments(form, x, y, 5))
        assert_same_buffers(model, full)
    assert list(model.buffers())[2] == (6 if "views" in form else 3)


@pytest.mark.parametrize(
    ("dtype", "mean", "rtol"),
    # A variance of 4 as a difference of squares of 1e8 would be lost.
    [(torch.float32, 1e4, 1e-4), (torch.bfloat16, 0.0, 1e-5)],
)
def test_deferred_keeps_precision(dtype, mean, rtol):
    model = nn.BatchNorm2d(5)
    x, y = batch(40, dtype)
    x += mean
    streamer(model, 6).backward(x, y)
    variance = x.double().transpose(0, 1).flatten(1).var(dim=1)
    torch.testing.assert_close(model.running_var.double(), 0.9 + 0.1 * variance, rtol=rtol, atol=0)


def test_layers_in_eval_mode_or_without_statistics_are_left_alone():
    layers = [nn.BatchNorm2d(5, track_running_stats=track) for track in (True, False, True)]
    model = nn.Sequential(*layers).double()
    model[0].eval()
    before = copy.deepcopy(model)
    streamer(model, 6).backward(*batch())
    assert_same_buffers(model[0], before[0])
    assert not model[1].track_running_stats and model[1].running_mean is None
    assert model[2].num_batches_tracked == 1
    assert model[0].track_running_stats and model[2].track_running_stats


@pytest.mark.parametrize("two_pass", [False, True])
def test_deeper_layers_pool_the_inputs_that_they_received(two_pass):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(5), nn.Conv2d(5, 5, 1), nn.ReLU(), nn.BatchNorm2d(5))
    model, received = model.double(), []
    handle = model[3].register_forward_pre_hook(lambda m, inputs: received.append(inputs[0]))
    x, y = batch()
    streamer(model, 6, two_pass=two_pass).backward(x, y)
    handle.remove()
    values = torch.cat(received[-4:]).transpose(0, 1).flatten(1)  # (channels, values)
    torch.testing.assert_close(model[3].running_mean, 0.1 * values.mean(1), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model[3].running_var, 0.9 + 0.1 * values.var(1), rtol=1e-12, atol=0)
    # and these are not the undivided mini-batch's, as the documentation says
    full = copy.deepcopy(model)
    full[3].reset_running_stats()
    full(x)
    assert not torch.allclose(full[3].running_var, model[3].running_var, rtol=1e-6)


@pytest.mark.parametrize("two_pass", [False, True])
def test_micro_is_an_explicit_loop(two_pass):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(5), nn.Conv2d(5, 5, 1), nn.BatchNorm2d(5)).double()
    plain = copy.deepcopy(model)
    x, y = batch()
    for start in range(0, 20, 5):  # 20 in micro-batches of at most 6
        part = slice(start, start + 5)
        loss = F.mse_loss(plain(x[part]), y[part])
        (loss * ((part.stop - part.start) / 20)).backward()
    MicroBatchStreamer(model, F.mse_loss, 6, two_pass=two_pass).backward(x, y)
    assert_same_buffers(model, plain)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


def test_buffers_are_restored_by_one_call_for_each_type():
    class Calls(TorchDispatchMode):
        names = ()

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            self.names = (*self.names, function.__name__)
            return function(*arguments, **options or {})

    layers = [nn.BatchNorm1d(3) for _ in range(4)]
    buffers = Buffers(layers)
    copies = buffers.copies()
    layers[1](torch.randn(2, 3))
    with Calls() as calls:
        buffers.write(copies)
    assert len(calls.names) == 2  # floats and counts
    assert not layers[1].num_batches_tracked and not layers[1].running_mean.any()


class Buffered(nn.Linear):
    """Has buffers that a forward pass gives another size, or that cannot be written."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("most", torch.empty(0))
        self.register_buffer("wide", torch.ones(1, 2).expand(4, 2))
        with torch.inference_mode():
            self.register_buffer("order", torch.arange(2))

    def forward(self, x):
        y = super().forward(x)
        self.most.resize_(2).copy_(y.detach().amax(0))
        return y * self.wide[0]


@pytest.mark.parametrize("size", [3, "auto"])
def test_buffers_of_any_form_are_put_back(size):
    model, x = Buffered(), torch.randn(6, 3)
    fails = MicroBatchStreamer(model, lambda outputs: outputs.sum() / 0, size)
    with pytest.raises(ValueError, match=r"is -?inf"):
        fails.backward(x)
    assert not len(model.most) and bool((model.wide == 1).all())
    with pytest.warns(RuntimeWarning) if size == 3 else nullcontext() as caught:
        MicroBatchStreamer(model, F.mse_loss, size).backward(x, torch.zeros(6, 2))
    assert caught is None or "changes most of Buffered. " in str(caught[0].message)
    torch.testing.assert_close(model.most, model(x[-3 if size == 3 else 0 :]).amax(0))


def test_a_layer_that_updates_its_statistics_itself_cannot_be_held_back():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)

    for layer, message in ((Own(6), "cannot hold back Own"), (nn.SyncBatchNorm(6), "a SyncBatchN")):
        model = nn.Sequential(layer, nn.Linear(6, 4))
        with pytest.raises(ValueError, match=message):
            streamer(model, 6).backward(torch.randn(24, 6), torch.randn(24, 4))
        assert not model[0].running_mean.any() and model[1].weight.grad is None
