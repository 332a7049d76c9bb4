"""`tune` and `untune` on small networks: results, layers left alone, limits, copies, the cache."""

import copy
import gc
import importlib
import io
import math
import pickle
import random
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tuned_nets
from torch import nn
from torch.utils.checkpoint import checkpoint
from tuned_nets import BATCH, InventedTimes, assert_close, images, relative_error, tuned_layers

from repro import microconv
from repro.microconv import BenchmarkCache, NotTunableError, find_kernels, tune, untune
from repro.microconv.kernels import KINDS
from repro.microconv.measuring import Trial
from repro.microconv.nnpack import _zeros
from repro.microconv.torch_backend import TorchBackend
from repro.microconv.tuned_kernel import TunedKernel, Workspace

WRITTEN = ("torch:direct", "torch:im2col", "torch:implicit", "torch:fft", "torch:winograd")
NNPACK = ("nnpack:ft8x8", "nnpack:ft16x16", "nnpack:wt8x8")


class Net(nn.Module):
    """Strides, padding, dilation, 'same', a 1×1 filter, groups, BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.strided = nn.Conv2d(6, 8, (5, 3), stride=(2, 1), padding=2, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.dilated = nn.Conv2d(8, 6, 3, padding=(2, 1), dilation=(2, 1))
        self.grouped = nn.Conv2d(6, 6, 3, groups=2)
        self.same = nn.Conv2d(6, 4, 3, padding="same")
        self.point = nn.Conv2d(4, 5, 1, stride=2)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.norm(self.strided(x)))
        x = torch.tanh(self.dilated(x))
        x = torch.tanh(self.same(torch.tanh(self.grouped(x))))
        return self.last(self.point(x).mean((2, 3)))


ALL = ("first", "strided", "dilated", "grouped", "same", "point")


def make_net(dtype=torch.float32):
    torch.manual_seed(0)
    return Net().to(dtype)


def loss_and_gradients(model, x):
    x = x.detach().clone().requires_grad_()
    output = model(x)
    if output.dim() == 4:
        loss = output.float() * torch.linspace(-1, 1, output[0].numel()).view(output[0].shape)
        loss = loss.sum() if x.dtype == torch.float32 else (output * loss.to(output)).sum()
    else:
        loss = F.cross_entropy(output.double(), torch.arange(len(x)) % 3)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, [x, *parameters])]


def assert_same(model, reference, x, tolerance=1e-4):
    assert_close(loss_and_gradients(model, x), loss_and_gradients(reference, x), tolerance)


def divided(model, x=None, algorithms=("torch:im2col",), **options):
    """Tune to the best division, even where torch is faster; return the original and the report."""
    reference = copy.deepcopy(model)
    options = {"cache": InventedTimes(), "min_gain": -math.inf, **options}
    x = images() if x is None else x
    return reference, tune(model, x, algorithms=algorithms, **options)


def kinds_of(report, layer=None):
    return {e.kernel.kind for e in report.kernels if layer in (None, e.layer)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithms", "mode", "policy"),
    [
        (None, "WR", "all"),
        (None, "WD", "powerOfTwo"),
        *(((name,), "WR", "powerOfTwo") for name in (*WRITTEN, *NNPACK)),
        (("torch",), "WD", "undivided"),
    ],
)
def test_loss_and_gradients_are_those_of_the_untuned_network(algorithms, mode, policy):
    model = make_net()
    reference, report = divided(model, algorithms=algorithms, mode=mode, policy=policy)
    for num_samples in (BATCH, 3):
        assert_same(model, reference, images(num_samples))
    assert report.measured == 0
    # Parts of 3, 2 and 2 take as long as the latter: which of them needs less workspace is taken.
    expected = [[BATCH]] if policy == "undivided" else [[2, 2, 2, 1], [3, 2, 2]]
    for entry in report.kernels:
        if entry.division is None:
            continue
        assert [size for size, _ in entry.division.parts] in expected
        for _, name in entry.division.parts:
            assert algorithms is None or name in algorithms or name.split(":")[0] in algorithms
    winograd = algorithms in (("torch:winograd",), ("nnpack:wt8x8",))
    nnpack = algorithms is not None and "nnpack" in algorithms[0]
    layers = ["first", "grouped", "same"] if winograd or nnpack else list(ALL)
    assert tuned_layers(model) == layers
    assert all(module.untuned_calls == 0 for module in model.modules() if hasattr(module, "tuned"))


def test_what_was_not_tuned_is_left_to_torch():
    """Other sizes, another layout, another data type, kernels that evaluation does not need."""
    model = make_net()
    reference, _ = divided(model)
    for size in ((13, 12), (9, 20)):
        assert_same(model, reference, images(size=size))
    assert_same(model, reference, images().to(memory_format=torch.channels_last))
    assert model.first.untuned_calls == 3
    model.double(), reference.double()
    assert_same(model, reference, images(dtype=torch.float64), 0.0)
    model.float(), reference.float()
    assert_same(model, reference, images())
    assert model.first.untuned_calls == 4
    model = make_net()
    reference, report = divided(model.eval())
    assert kinds_of(report) == kinds_of(divided(make_net(), training=False)[1]) == {"forward"}
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert relative_error(model(images()), reference(images())) <= 1e-4
    model.train(), reference.train()
    assert_same(model, reference, images())
    assert kinds_of(divided(make_net().eval(), training=True)[1]) > {"backward_filter"}


@pytest.mark.parametrize("after", [untune, divided])
def test_a_loss_outlives_its_tuning_and_its_model(after):
    model, x = nn.Conv2d(3, 4, 3), images().requires_grad_()
    reference, _ = divided(model)
    loss, expected = model(x).square().sum(), reference(x).square().sum()
    after(model)
    del model
    gc.collect()
    (got,), (want,) = (torch.autograd.grad(one, x) for one in (loss, expected))
    assert relative_error(got, want) <= 1e-4


def test_a_workspace_made_in_inference_mode_trains():
    model = make_net().eval()
    reference = copy.deepcopy(model)
    with torch.inference_mode():
        divided(model, algorithms=("torch:winograd",), training=True, cache=None)
    model = copy.deepcopy(model)
    with torch.inference_mode():
        model(images())  # allocates
    model.train(), reference.train()
    assert_same(model, reference, images())


def test_operands_that_are_not_contiguous():
    model, x = nn.Conv2d(3, 4, 3, padding=1), images(6, (12, 12))
    reference, _ = divided(model, x, ("nnpack:ft8x8", "torch:im2col"))
    for other in (
        x.transpose(2, 3),
        x.flip(0)[:, :, :, :1].expand(6, 3, 12, 12),
        images(12, (12, 12))[::2],
        images(6, (24, 13))[:, :, ::2, 1:],
        images(3, (12, 12), channels=6).view(6, 3, 12, 12),
    ):
        assert relative_error(model(other), reference(other)) <= 1e-4
        model.zero_grad(), reference.zero_grad()
        model(other).sum().backward(), reference(other).sum().backward()  # an expanded gradient
        assert relative_error(model.weight.grad, reference.weight.grad) <= 1e-4
    assert model.untuned_calls == 0
    for module in (model, reference):
        module.weight = nn.Parameter(module.weight.detach().transpose(2, 3))
    assert_same(model, reference, x)


class Twice(nn.Module):
    """One layer called with two shapes, and a shared one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.again = self.conv
        self.tied = nn.Conv2d(3, 3, 3, padding=1)
        self.tied.weight = self.conv.weight

    def forward(self, x):
        return self.tied(self.again(torch.tanh(self.conv(x)))) + self.conv(x[:, :, :6]).mean()


@pytest.mark.parametrize("mode", ["WR", "WD"])
def test_calls_of_two_shapes_and_shared_modules(mode):
    torch.manual_seed(0)
    model = Twice()
    reference, report = divided(model, mode=mode, algorithms=("torch:im2col", "nnpack:ft8x8"))
    assert model.conv is model.again and model.tied.weight is model.conv.weight
    calls = [(entry.layer, entry.kernel.conv.height, entry.kernel.kind) for entry in report.kernels]
    # The first call needs no data gradient, the second of the same shape does.
    whole = [(name, 12, kind) for name in ("conv", "tied") for kind in KINDS]
    assert calls == [*whole, ("conv", 6, "forward"), ("conv", 6, "backward_filter")]
    assert len(model.conv.tuned) == 2 and not report.skipped
    assert_same(model, reference, images())
    assert model.conv.untuned_calls == model.tied.untuned_calls == 0


def test_frozen_weights_and_the_first_layer_need_fewer_kernels():
    model = make_net()
    model.strided.requires_grad_(False)
    model.norm.requires_grad_(False)
    reference, report = divided(model)
    assert kinds_of(report, "first") == {"forward", "backward_filter"}
    assert kinds_of(report, "strided") == {"forward", "backward_data"}
    assert kinds_of(report, "dilated") == set(KINDS)
    assert_same(model, reference, images())  # which asks for the images' gradient as well
    model.strided.requires_grad_(True), reference.strided.requires_grad_(True)
    assert_same(model, reference, images())
    model.requires_grad_(False)
    model.first.bias.requires_grad_(True)
    model(images()).sum().backward()
    assert model.first.bias.grad is not None and model.first.weight.grad is None


def test_channels_last_is_divided_in_its_own_layout():
    model = make_net().to(memory_format=torch.channels_last)
    x = images().to(memory_format=torch.channels_last)
    reference, report = divided(model, x, ("torch:native",), cache=InventedTimes(slowdown=1.0))
    assert {e.kernel.layout for e in report.kernels if e.layer != "point"} == {"nhwc"}
    divisions = {str(entry.division) for entry in report.kernels}
    assert divisions == {"3×2 torch:native + 1 torch:native"} and report.allocated_bytes == 0
    assert_same(model, reference, x)
    gradients = [torch.autograd.grad(m(x).sum(), m.first.weight)[0] for m in (model, reference)]
    assert gradients[0].stride() == gradients[1].stride()
    # Images in torch's default layout, weights that are not: torch computes channels-last.
    assert_same(model, reference, images())
    assert model.first.untuned_calls == 0


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)]
)
def test_sixteen_bits(dtype, autocast):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3, stride=2))
    exact, x = copy.deepcopy(model).double(), images()
    if not autocast:
        model, x = model.to(dtype), x.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        options = {"algorithms": ("torch:native",), "cache": InventedTimes(slowdown=1.0)}
        reference, report = divided(model, x, **options)
        assert {entry.kernel.dtype for entry in report.kernels} == {str(dtype)[6:]}
        assert tuned_layers(model) == ["0", "2"]
        outputs = model(x), reference(x)
        assert outputs[0].dtype == outputs[1].dtype == dtype
    truth = torch.autograd.grad(exact(x.double()).tanh().sum(), list(exact.parameters()))
    errors = []
    for output, module in zip(outputs, (model, reference), strict=True):
        gradients = torch.autograd.grad(output.tanh().sum(), list(module.parameters()))
        assert [g.dtype for g in gradients] == [p.dtype for p in module.parameters()]
        pairs = zip(gradients, truth, strict=True)
        errors.append([relative_error(g.double(), t) for g, t in pairs])
    assert all(ours <= 2 * theirs + 4e-3 for ours, theirs in zip(*errors, strict=True))
    assert model[0].untuned_calls == 0
    if autocast:  # without it, the calls are of another data type
        assert relative_error(model(x), reference(x)) == 0 and model[0].untuned_calls == 1
        for other in (x.byte(), x.to(torch.complex64)):  # which autocast leaves, and torch refuses
            with torch.autocast("cpu", dtype), pytest.raises(RuntimeError):
                model(other)


def test_a_model_is_tried_as_it_is_called():
    model, seen = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        tune(model, images(), algorithms=["torch:im2col"], cache=InventedTimes())
    assert len(seen) > 4 and set(seen) == {torch.bfloat16}


class Calls(nn.Module):
    """Calls its convolution by `call`."""

    def __init__(self, call):
        super().__init__()
        self.conv, self.call = nn.Conv2d(3, 3, 3, padding=1), call

    def forward(self, *args, **kwargs):
        return self.call(self.conv, *args, **kwargs)


class Doubled(nn.Conv2d):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), "padding mode is 'reflect'"),
        (nn.Conv2d(3, 3, (2, 3), padding="same"), "'same' is not symmetric for 2×3"),
        (Doubled(3, 3, 3), "it is a Doubled"),
    ],
)
def test_layers_that_are_left_alone_with_a_reason(layer, reason):
    model, before = nn.Sequential(nn.Conv2d(3, 3, 1), layer), dict(vars(layer))
    reference, report = divided(model)
    assert list(report.skipped) == ["1"] and reason in report.skipped["1"]
    assert type(model[1]) is type(layer) is type(reference[1]) and vars(layer) == before
    assert tuned_layers(model) == ["0"]
    assert f"left as it is: 1: {report.skipped['1']}" in str(report)
    assert_same(model, reference, images())


@pytest.mark.filterwarnings("ignore")
def test_scripted_and_quantised_layers_are_left_and_reported():
    layers = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)
    model = nn.Sequential(torch.jit.script(layers[0]), qat(nn.Sequential(layers[1])))
    state = copy.deepcopy(model.state_dict())
    assert tune(model, images(), cache=None).skipped == {
        "0": "it is scripted; tune first, script then",
        "1.0": "it is a torch.ao.nn.qat.modules.conv.Conv2d; only nn.Conv2d itself is tuned",
    }
    for name, value in model.state_dict().items():  # and observers grow as they see images
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize(
    ("call", "sample", "limit"),
    [
        (lambda conv, x, scale: conv(input=x) * scale, {"scale": 2.0, "x": images()}, 2**20),
        # tuned for the largest batch, and for those of its shapes that fit
        (lambda conv, x: conv(x).mean() + conv(x[:1]).mean(), images(), 2**20),
        (lambda conv, x: conv(x[:, :, :6]).mean() + conv(x), images(), 12_000),
    ],
)
def test_ways_to_call_a_layer(call, sample, limit):
    model = Calls(call)
    _, report = divided(model, sample, training=False, workspace_limit=limit, strict=False)
    assert tuned_layers(model) == ["conv"] and not report.skipped
    assert {entry.batch for entry in report.kernels} == {BATCH}


@pytest.mark.filterwarnings("ignore")
def test_models_whose_runs_do_not_show_what_training_does(monkeypatch):
    options = {"algorithms": ("torch:im2col",), "min_gain": -math.inf, "cache": InventedTimes()}
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Calls(partial(checkpoint, use_reentrant=False)))
    assert kinds_of(tune(model, images(), **options), "1.conv") == set(KINDS)
    model[1].call = partial(checkpoint, use_reentrant=True)
    with pytest.raises(NotTunableError, match=r"\(use_reentrant=True\) refuses; give False"):
        tune(model, images(), **options)
    for compiled in (torch.compile, lambda layer, **how: layer.compile(**how) or layer):
        model[1] = compiled(nn.Conv2d(3, 3, 1), backend="eager")
        (reason,) = tune(model, images(), **options).skipped.values()
        assert tuned_layers(model) == ["0"] and "it is compiled: torch's own runs" in reason
    model[1] = nn.SyncBatchNorm(3)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(NotTunableError, match="tune it before it is sharded, given SyncBatch"):
        tune(model, images(), **options)


def test_models_of_other_kinds():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.BatchNorm2d(4))
    model.register_buffer("mask", torch.ones(1, 4).expand(3, 4))  # which overlaps itself
    with pytest.raises(NotTunableError, match="has lazy layers; run it once"):
        tune(model, images())
    model(images())
    divided(model)
    assert tuned_layers(model) == ["0"] and all(module.training for module in model.modules())
    assert model[1].num_batches_tracked == 1  # of the run before


def test_a_slower_division_is_left_to_torch(monkeypatch):
    pays = Trial((1.0,) * 5, (2.0,) * 5)
    monkeypatch.setattr("repro.microconv.tuner.compare_models", lambda *given: pays)
    for times, gain, tuned in (
        (InventedTimes(0.97, 1.0), 0.03, True),
        (InventedTimes(0.98, 1.0), 0.03, False),  # in the trial
        (InventedTimes(0.5, 1.0, slowdown=0.55), 0.03, False),  # alone
        (InventedTimes(0.5, 1.0), -1.0, True),
    ):
        model = nn.Conv2d(3, 4, 3)
        _, report = divided(model, cache=times, min_gain=gain)
        assert (isinstance(model, microconv.TunedConv2d)) == tuned
        for entry in report.kernels:
            assert (entry.division is not None) == tuned
            assert [entry.time_s] == (times.trial["divided"] if tuned else [entry.native_s])
        assert not report.skipped if tuned else "is as fast" in report.skipped["(model)"]
    _, report = divided(nn.Conv2d(3, 4, 3), workspace_limit=0, strict=False)
    assert "as fast" not in report.skipped["(model)"]  # nothing fits


def test_numerical_derivatives_of_first_and_second_order():
    model = nn.Conv2d(1, 2, 2, stride=(1, 2), padding=1).double()
    x = images(3, (2, 3), torch.float64, channels=1).requires_grad_()
    divided(model, x)

    def function(x, weight, bias):
        return torch.func.functional_call(model, {"weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(function, (x, model.weight, model.bias))
    assert torch.autograd.gradgradcheck(function, (x, model.weight, model.bias))
    assert model.untuned_calls == 0


@pytest.mark.filterwarnings("ignore:`torch.jit")  # inside torch.func.jvp
def test_functional_transforms_fall_back():
    model = make_net(torch.float64).eval()
    reference, _ = divided(model, images(dtype=torch.float64), training=True)
    x, results = images(dtype=torch.float64), []
    for module in (model, reference):
        parameters = {name: p.detach() for name, p in module.named_parameters()}

        def loss(parameters, image, module=module):
            return torch.func.functional_call(module, parameters, (image[None],)).square().sum()

        whole = torch.func.grad(loss)(parameters, x[0])
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        mapped = torch.func.vmap(module)(x[:, None])
        _, tangent = torch.func.jvp(module, (x,), (torch.ones_like(x),))
        results.append([*whole.values(), *each.values(), mapped, tangent])
    assert_close(*results, 1e-12)
    assert model.first.untuned_calls == 0  # these are not for want of a tuning


def test_autograd_in_other_ways():
    """Checkpoints, hooks of saved tensors, anomaly detection, an empty batch."""
    model = make_net().eval()
    reference, _ = divided(model, training=True)

    def hooked(module, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            output = module(x).square().sum()
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            output.backward(retain_graph=True)
            output.backward()

    for way in (
        lambda m, x: checkpoint(m, x, use_reentrant=False).square().sum().backward(),
        lambda m, x: checkpoint(m, x, use_reentrant=True).square().sum().backward(),
        hooked,
    ):
        for module in (model, reference):
            module.zero_grad()
            way(module, images().requires_grad_())
        assert_close(*([p.grad for p in m.parameters()] for m in (model, reference)), 1e-4)
    none = images(0).requires_grad_()
    model.first(none).sum().backward()  # an empty batch
    assert model.first(none).shape == (0, 6, 12, 13) and not none.grad.numel()


def test_parameters_state_and_hooks_are_the_models_own():
    model, hooked = make_net(), []
    model.first.register_forward_hook(lambda m, args, out: hooked.append("after"))
    model.first.register_forward_pre_hook(lambda m, args: hooked.append("before"))
    model.first.register_full_backward_hook(lambda m, gi, go: hooked.append("backward"))
    model.first.note = "mine"
    own = [*model.parameters(), *model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = set(vars(model.first))
    reference, _ = divided(model, algorithms=("nnpack:wt8x8", "torch:winograd"))
    hooked.clear()
    assert [*map(id, (*model.parameters(), *model.modules()))] == [*map(id, own)]
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(now, state[name]) for name, now in model.state_dict().items())
    assert model.first.note == "mine" and isinstance(model.first, nn.Conv2d)
    model(images().requires_grad_()).sum().backward()
    assert hooked == ["before", "after", "backward"]
    model.load_state_dict(state)
    assert untune(model) is model
    assert type(model.first) is nn.Conv2d and set(vars(model.first)) == attributes
    assert tuned_layers(untune(model)) == []
    assert_same(model, reference, images(), 0.0)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("mode", ["WR", "WD"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_copies_of_a_tuned_model(copied, mode):
    model = make_net()
    reference, report = divided(model, mode=mode, algorithms=("torch:direct", "nnpack:ft8x8"))
    (ours,) = {kernel.workspace for kernel in tuned_nets.kernels_in(model)}
    address = ours.allocate().data_ptr()
    model(images(3))  # so that there are divisions of another batch size
    assert ours.allocate().data_ptr() == address and ours.size == report.allocated_bytes > 0
    model.norm.load_state_dict(reference.norm.state_dict())
    other = copied(model)
    assert tuned_layers(other) == tuned_layers(model)
    (theirs,) = {kernel.workspace for kernel in tuned_nets.kernels_in(other)}
    assert theirs is not ours and theirs.size == ours.size
    assert_same(other, reference, images())
    assert other.first.untuned_calls == model.first.untuned_calls == 0
    assert theirs.allocate().data_ptr() != ours.allocate().data_ptr() == address
    untune(other)
    assert tuned_layers(other) == [] and tuned_layers(model)
    for module in (other, model):
        module.norm.load_state_dict(reference.norm.state_dict())
    assert_same(other, reference, images(), 0.0)
    assert_same(model, reference, images())


def test_pruned_and_normalised_weights_are_hooks_and_stay():
    from torch.nn.utils import parametrizations, prune

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    reference = copy.deepcopy(model)
    for module in (model, reference):
        prune.l1_unstructured(module[0], "weight", 0.5)
    tune(model, images(), algorithms=["torch:im2col"], min_gain=-math.inf, cache=InventedTimes())
    assert tuned_layers(model) == ["0", "1"] and model[0].weight_orig.requires_grad
    assert_same(model, reference, images())
    for module in (model, reference):  # after tuning
        torch.manual_seed(1)
        parametrizations.spectral_norm(module[1])
        module(images())
    # Each look at the weight is a power iteration; it must be one for a call.
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert relative_error(ours, theirs) <= 1e-6
    assert tuned_layers(untune(model)) == []


class Restless(nn.Module):
    """Draws random numbers, keeps statistics, and changes all it can, at each run."""

    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.drop = nn.Dropout2d(0.5)
        self.average = nn.Linear(2, 2)
        self.average.weight.grad = torch.ones(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("absent", None)
        self.register_buffer("grown", torch.zeros(2))
        self.register_buffer("moved", torch.zeros(2))
        self.plain, self.count, self.losses = torch.zeros(2), 0, [torch.zeros(2)]
        self.seen, self.set = Counter("a"), {1}
        self.generators = [torch.Generator().manual_seed(1), np.random.default_rng(1)]
        self.own = random.Random(1)

    def forward(self, x):
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
        self.own.random(), self.generators[1].random(), torch.rand(1, generator=self.generators[0])
        self.calls += 1
        self.count += 1
        self.absent, self.added = torch.ones(1), 1
        self.grown.resize_(3).fill_(1.0)
        self.moved.data = torch.ones(2)
        self.plain += 1
        self.losses[0] += 1
        self.losses.append(x)
        self.seen["b"] = self.seen.pop("a", 0)
        self.set.add(len(self.set) + 1)
        self.register_forward_hook(lambda *args: None)
        self.drop.train(not self.drop.training)
        with torch.no_grad():
            self.average.weight.lerp_(self.average.weight + 1, 0.1)
            self.average.bias.data = self.average.bias.data + 1
        with torch.enable_grad():
            self.average(torch.ones(1, 2, dtype=torch.float32)).sum().backward()
        self.average.bias.requires_grad_(False)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        x.mul_(1.5)
        if x.isnan().any():
            raise FloatingPointError
        torch.set_grad_enabled(True)
        return self.net(self.drop(x))


def disturbance(model, x):
    """Return everything that a run may change, as values and as objects."""
    modules = list(model.modules())
    tensors = [*model.parameters(), *model.buffers(), model.plain, *model.losses, x]
    generators = [model.own, *model.generators[1:]]
    values = [
        torch.get_rng_state().tolist(), random.getstate(),
        repr(np.random.get_state()),  # noqa: NPY002
        model.generators[0].get_state().tolist(), model.own.getstate(),
        model.generators[1].bit_generator.state,
        torch.is_grad_enabled(), torch.get_default_dtype(), model.seen, model.set,
        len(model.losses),
        [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules],
        [(t.tolist(), t.requires_grad, str(t.grad)) for t in tensors],
        [t.data_ptr() for t in tensors if t is not model.grown],  # which was allocated anew
        [sorted(vars(m)) for m in modules], model.count, model.absent,
    ]  # fmt: skip
    return copy.deepcopy(values), [*map(id, (*modules, *tensors, *generators))]


@pytest.mark.parametrize("problem", ["none", "raises", "raises in a trial"])
def test_what_a_run_changes_is_put_back(problem, monkeypatch):
    model, x = Restless(), images(2)
    model.net.norm.eval()
    model.net.first.weight.grad = torch.ones_like(model.net.first.weight)
    model.register_forward_pre_hook(lambda *args: None)
    options = {"algorithms": ("torch:im2col",), "cache": InventedTimes()}
    before = disturbance(model, x)
    if problem == "none":
        tune(model, x, min_gain=-1.0, **options)
        find_kernels(model, x)
        assert tuned_layers(model) and disturbance(untune(model), x) == before
        tune(model, x, cache=None)  # measured
        assert disturbance(untune(model), x) == before
    elif problem == "raises":
        x[0, 0, 0, 0] = math.nan
        before = disturbance(model, x)
        with pytest.raises(FloatingPointError):
            tune(model, x)
        assert str(disturbance(model, x)) == str(before)  # nan is no nan
    else:
        divided(model.net.first, x, ("torch:direct",))
        earlier, before = model.net.first.tuned, disturbance(model, x)

        def fail(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr("repro.microconv.tuner.compare_models", fail)
        with pytest.raises(KeyboardInterrupt):
            tune(model, x, **options)
        assert model.net.first.tuned is earlier and tuned_layers(model) == ["net.first"]
        assert disturbance(model, x) == before


def test_a_sample_that_the_model_cannot_take():
    model = nn.Conv2d(3, 4, 3)
    for sample, reason in (
        ([images(), torch.arange(BATCH)], "takes 2 positional arguments but 3 were given"),
        ({"images": images()}, "got an unexpected keyword argument 'images'"),
        (images().numpy(), r"conv2d\(\) received an invalid combination"),
    ):
        with pytest.raises(TypeError, match=reason):
            tune(model, sample)
    with pytest.raises(RuntimeError, match="3 channels"):
        tune(model, images(channels=4))
    assert tuned_layers(model) == []
    for function, *given in ((tune, images()), (find_kernels, images()), (untune,)):
        for wrong, name in ((Net, "Net"), ([make_net()], "list")):
            with pytest.raises(NotTunableError, match=f"given {name}, which is no module"):
                function(wrong, *given)
    watch = torch.utils.flop_counter.FlopCounterMode(display=False)
    with watch, pytest.raises(NotTunableError, match=r"watched \(torch.utils.flop_counter\)"):
        tune(model, images())


@pytest.mark.parametrize("limit", [np.int64(2**20), np.int32(2**20), torch.tensor(2**20)])
def test_whole_numbers_of_any_kind(limit):
    model = nn.Conv2d(np.int64(3), np.int32(4), np.int64(3))
    model.stride, model.padding, model.dilation = 1, (1,), [1, 1]  # which torch takes, too
    report = tune(model, images(), limit, cache=None)
    assert report.limit_bytes == 2**20 and type(report.limit_bytes) is int and report.kernels
    for wrong in (True, np.True_, 2.0**20, np.float32(2**20), "64", None):
        with pytest.raises(ValueError, match=r"workspace_limit is .*; give a whole number"):
            tune(model, images(), wrong)


@pytest.mark.parametrize("name", [*WRITTEN, *NNPACK])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so_and_a_scaler_skips_the_step(name, value):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    reference, _ = divided(model, algorithms=(name,))
    x = images()
    x[2, 1, 5, 5] = value
    results = [], []
    for net, found in zip((reference, model), results, strict=True):
        found.append(net(x))  # and gradients, of such an output gradient
        x_ = images().requires_grad_()
        ones = torch.ones_like(found[0]).index_put_((torch.tensor(2),), torch.tensor(value))
        found += torch.autograd.grad(net(x_), (x_, *net.parameters()), ones)
    for number, (theirs, ours) in enumerate(zip(*results, strict=True)):
        assert not ours[~theirs.isfinite()].isfinite().any()
        if number < 2:  # it spreads within its own image alone
            assert ours[[0, 1, 3, 4, 5, 6]].isfinite().all()
    for scale in (1.0, 2.0**127):  # in the images, or by overflow
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(x if scale == 1 else images()).square().sum() * 100).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale / 2
        assert all(map(torch.equal, before, model.parameters()))
        optimizer.zero_grad()


def test_the_report():
    model = make_net()
    algorithms = ("torch:im2col", "nnpack")
    _, report = divided(model, algorithms=algorithms, workspace_limit=2**22, mode="WD")
    assert (report.mode, report.policy, report.limit_bytes) == ("WD", "powerOfTwo", 2**22)
    every = [(name, kind) for name in ALL for kind in KINDS]
    every.remove(("first", "backward_data"))
    entries = report.kernels
    assert [(entry.layer, entry.kernel.kind) for entry in entries] == every
    assert report.skipped == {} and report.unavailable == []
    assert report.measured == 0 and report.cached > len(every)
    for entry in entries:
        assert entry.batch == BATCH and (entry.time_s, entry.native_s) == (1.0, 2.0)
        used = [name for _, name in entry.division.parts]
        assert entry.error == max(microconv.stated_error(n, entry.kernel) for n in used)
    found = [(e.layer, e.kernel, e.batch) for e in entries]
    assert find_kernels(model, images()) == found
    forward = find_kernels(untune(model), images(), training=False)  # without tuning
    assert forward == [entry for entry in found if entry[1].kind == "forward"]
    # and as text
    model.grouped = nn.Conv2d(6, 6, 3, padding_mode="reflect", padding=1)
    _, report = divided(model, algorithms=None, training=False)
    printed = str(report)
    assert "left as it is: grouped: its padding mode" in printed
    assert "not available: cudnn: runs on a CUDA device only, not on cpu" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "powersOfTwo"}, "policy is 'powersOfTwo'; choose among all, powerOfTwo"),
        ({"mode": "wr"}, "mode is 'wr'; choose among WR, WD"),
        ({"workspace_limit": -1}, "workspace_limit is -1"),
        ({"min_gain": 1.0}, "min_gain is 1.0"),
        ({"algorithms": "torch"}, "give a list of names"),
        ({"max_error": 0.0}, "max_error is 0.0"),
        ({"devices": "cuda:0"}, "devices is 'cuda:0'; give a list of accelerators such as"),
        *(
            ({"devices": wrong}, "devices is .*; give a list of accelerators such as")
            for wrong in ([], torch.device("cuda"), ["cpu"], ["cpu", "cuda:0"])
        ),
        ({"cache": 3}, "cache is 3; give a file"),
    ],
)
def test_arguments_that_are_no_choice(options, message):
    model = make_net()
    with pytest.raises(ValueError, match=message):
        tune(model, images(), **{"cache": InventedTimes(), **options})
    assert tuned_layers(model) == []


@pytest.mark.slow
def test_a_second_tuning_measures_nothing(tmp_path, monkeypatch):
    def decisions(report):
        return [(e.layer, e.kernel, str(e.division), e.time_s, e.native_s) for e in report.kernels]

    x, one = images(4, (6, 6)), partial(nn.Conv2d, 3, 4, 3, padding=1)
    options = {"mode": "WD", "cache": tmp_path / "folder" / "times.sqlite", "min_gain": -math.inf}
    options["algorithms"] = ("torch:im2col", "nnpack")
    model = nn.Sequential(one(), nn.Conv2d(4, 4, 3, padding=1))
    reference, first = copy.deepcopy(model), tune(model, x, **options)
    assert first.measured > 0 and all(entry.division for entry in first.kernels)
    assert_same(model, reference, x)
    for again in (model, copy.deepcopy(reference)):
        second = tune(again, x, **options)
        assert second.measured == 0 and second.cached >= first.measured
        assert decisions(second) == decisions(first)
        assert second.allocated_bytes == first.allocated_bytes
    # The default cache is a file.
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    report = tune(one(), x, min_gain=-math.inf)
    assert report.measured > 0 and (tmp_path / "microconv.sqlite").exists()
    again = tune(one(), x, min_gain=-math.inf)
    assert (again.measured, again.cached) == (0, report.measured + report.cached)
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "microconv.sqlite" / "below"))
    monkeypatch.setenv("REPRO_MICROCONV_POLICY", "undivided")
    with pytest.warns(microconv.CacheWarning, match="kept in memory until the process ends"):
        assert tune(one(), x).policy == "undivided"


@pytest.mark.parametrize("algorithms", [("nnpack",), ("torch:winograd",), ("torch:fft",)])
def test_two_threads_run_one_model_at_once(algorithms):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3, padding=1))
    reference, _ = divided(model, algorithms=algorithms)
    barrier = threading.Barrier(2)

    def work(seed):
        torch.set_num_threads(1)
        x = images(BATCH - seed, seed=seed)
        expected = loss_and_gradients(reference, x)
        barrier.wait(timeout=10)
        for _ in range(10):
            assert_close(loss_and_gradients(model, x), expected, 1e-4)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(work, range(2), timeout=30)) == [None, None]
    assert model[0].untuned_calls == 0


def test_batched_gradients_and_tensors_of_other_kinds():
    class Marked(torch.Tensor):
        pass

    model = nn.Conv2d(3, 4, 3)
    reference, _ = divided(model)
    results = []
    for module in (model, reference):
        x = images().requires_grad_()
        output = module(x)
        several = torch.stack([torch.ones_like(output), output.detach()])
        wanted = [x, *module.parameters()]
        results.append(torch.autograd.grad(output, wanted, several, is_grads_batched=True))
    assert_close(*results, 1e-4)
    assert type(model(images().as_subclass(Marked))) is Marked
    with torch.device("meta"):
        assert _zeros(978).device.type == "cpu"  # NNPACK reads its bias through a pointer


# NNPACK reads what it is pointed to: the first two would end the process.
@pytest.mark.parametrize("change", ["weight elsewhere", "weight smaller", "dtype", "bias smaller"])
def test_weights_that_do_not_fit_the_input_are_torchs_to_refuse(change, monkeypatch):
    model = nn.Conv2d(3, 4, 3)
    divided(model)
    monkeypatch.setattr(TunedKernel, "run", lambda *args: pytest.fail("a division ran"))
    if change == "weight elsewhere":
        model.to("meta")
        model(images())  # as torch does it; no division may read from there
        return
    if change == "weight smaller":
        model.weight = nn.Parameter(model.weight.detach()[:, :2])
    elif change == "dtype":
        model.double()
    else:
        model.bias = nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError):
        model(images())


def qat(model):
    import torch.ao.quantization as quantization

    model.train().qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model).eval()


def quantised_fx(model):
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    prepared = quantize_fx.prepare_fx(model, get_default_qconfig_mapping("fbgemm"), (images(),))
    prepared(images())
    return quantize_fx.convert_fx(prepared)


TOOLS = [
    (qat, 2),
    (quantised_fx, 0),
    (lambda model: importlib.import_module("torch.fx.experimental.optimization").fuse(model), 2),
    (lambda model: torch.ao.quantization.fuse_modules(model, [["0", "1", "2"]]), 2),
    (torch.jit.script, 0),
    (lambda model: torch.jit.freeze(torch.jit.script(model)), 0),
    (lambda model: torch.export.export(model, (images(),)).module(), 0),
    (lambda model: torch.compile(model, backend="aot_eager", fullgraph=True), 2),
    (lambda model: nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last), 2),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("tool", "convolutions"), TOOLS)
def test_tools_that_go_by_the_class_or_the_source(tool, convolutions):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)
    model = nn.Sequential(*layers).eval()
    model(images())
    reference, _ = divided(model)
    assert [type(layer) for layer in model] == [type(layer) for layer in reference]
    ours, theirs = tool(model), tool(reference)
    for made in (ours, theirs):
        assert sum(isinstance(m, nn.Conv2d) for m in made.modules()) == convolutions
    # A value at a step of a quantised model's grid may fall to either side.
    tolerance = 1e-2 if tool in (qat, quantised_fx) else 1e-5
    assert relative_error(ours(images()), theirs(images())) <= tolerance


# As is done for images that wrap around, among others
@pytest.mark.parametrize(
    "replace",
    [
        lambda m, own: setattr(m, "forward", lambda x: 2 * own(x)),
        lambda m, _: setattr(m, "_conv_forward", lambda *given: 2 * F.conv2d(*given)),
        lambda m, _: setattr(m, "__class__", Doubled),
    ],
)
def test_a_forward_pass_of_ones_own_stays(replace, monkeypatch):
    for before in (True, False):
        model = nn.Conv2d(3, 4, 3)
        expected = 2 * model(images())
        if before:
            replace(model, model.forward)
        _, report = divided(model)
        assert ("(model)" in report.skipped) == before
        if not before:
            replace(model, model.forward)
        for _ in range(2):
            assert relative_error(model(images()), expected) <= 1e-5
            untune(model)
    model = nn.Conv2d(3, 4, 3, padding=1)
    reference, _ = divided(model)
    with monkeypatch.context() as patch:  # the exporter sees torch's own
        patch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
        assert torch.equal(model(images()), reference(images()))
    with monkeypatch.context() as patch:  # and so does whoever replaces everybody's
        own = nn.Conv2d._conv_forward
        patch.setattr(nn.Conv2d, "_conv_forward", lambda *args: 3 * own(*args))
        assert torch.equal(model(images()), reference(images()))
    for module in (model, reference):  # another geometry
        module.dilation = module.padding = (2, 2)
    assert relative_error(model(images()), reference(images())) <= 1e-4


def test_a_shallow_copy():
    model = nn.Conv2d(3, 4, 3)
    divided(model)
    shallow, replica = copy.copy(model), model._replicate_for_data_parallel()
    replica.weight, replica.bias = model.weight * 2, model.bias * 2
    assert relative_error(replica(images()), 2 * model(images())) <= 1e-6
    assert torch.equal(shallow(images()), model(images()))
    expected, known = model(images()), weakref.ref(model)
    gc.collect()
    gc.disable()
    del model
    assert known() is None  # no cycle holds the weights
    gc.enable()
    told = r"untune\(copy\), or make the copy by copy.deepcopy"
    with pytest.raises(microconv.LayerGoneError, match=told):
        shallow(images())
    assert relative_error(untune(shallow)(images()), expected) <= 1e-5


@pytest.mark.parametrize(
    ("owner", "name", "cache"),
    [(Workspace, "allocate", InventedTimes()), (TorchBackend, "run", BenchmarkCache(None))],
)
def test_running_out_of_memory_is_reported_as_that(monkeypatch, owner, name, cache):
    def run(*args):
        raise torch.OutOfMemoryError("none left")

    model = nn.Conv2d(3, 4, 3)
    monkeypatch.setattr(owner, name, run)
    with pytest.raises(torch.OutOfMemoryError):
        divided(model, cache=cache)
    assert type(model) is nn.Conv2d
